"""Which cases of a test run, if not all do."""

import collections
import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any


def covering(cases: Sequence[Sequence[tuple]], together: int) -> set[int]:
    """Those that `make test` has: indices of cases in which all values occur that occur in any case, each alone, or
    each pair, and so on.

    Greedy: the next case is the one that has most of what is missing. Of equal ones it is the first, but if only single
    values are asked for, the one whose values have been taken least, so that values take turns.

    Args:
      cases: each the values of its parameters, of which several may belong together.
      together: 1 for each value, 2 for each pair of values of two parameters, and so on.
    """
    of_case = [set(_parts(case, together)) for case in cases]
    missing, taken = set().union(*of_case), set()
    times: collections.Counter[tuple] = collections.Counter()
    while missing:
        new = [len(parts & missing) for parts in of_case]
        best = max(range(len(cases)), key=lambda i: (new[i], -sum(times[part] for part in of_case[i]), -i))
        taken.add(best)
        missing -= of_case[best]
        if together == 1:
            times.update(of_case[best])
    return taken


def spread(count: int, most: int) -> set[int]:
    """Indices of at most so many of `count` cases: the first one, the last one, and others at equal distances."""
    kept = min(count, most)
    return {round(i * (count - 1) / max(kept - 1, 1)) for i in range(kept)}


def _parts(case: Sequence[tuple], together: int) -> Iterable[tuple]:
    known = enumerate(tuple(map(_key, values)) for values in case)
    return itertools.combinations(known, min(together, len(case)))


def _key(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value  # True is not 1 here
