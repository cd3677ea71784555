"""Which cases of a test `@pytest.mark.covers` and `--cases` leave."""

import collections
import itertools
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.helpers.covering import covering, spread


@pytest.mark.parametrize(
    ("sizes", "together", "most"),
    (((9, 3, 3), 2, 27), ((2, 2, 2), 2, 4), ((3, 4), 1, 4), ((3, 4), 2, 12), ((5,), 2, 5)),
)
def test_everything_occurs(sizes: Sequence[int], together: int, most: int) -> None:
    cases = [[(value,) for value in case] for case in itertools.product(*map(range, sizes))]
    taken = covering(cases, together)
    assert len(taken) <= most
    for chosen in itertools.combinations(range(len(sizes)), min(together, len(sizes))):
        values = itertools.product(*(range(sizes[i]) for i in chosen))
        assert {tuple(cases[case][i][0] for i in chosen) for case in taken} == set(values)


def test_values_take_turns() -> None:
    taken = covering([[(one,), (two,)] for one in range(6) for two in range(2)], 1)
    assert sorted(i % 2 for i in taken) == [0, 0, 0, 1, 1, 1]


def test_values_that_cannot_be_keys() -> None:
    one, other = [1], [1]
    assert covering([[(one,)], [(other,)], [(one,)], [(True,)], [(1,)]], 1) == {0, 1, 3, 4}


def test_nothing_is_taken_of_nothing() -> None:
    assert covering([], 2) == set()


@pytest.mark.parametrize(
    ("count", "most", "kept"),
    ((1, 2, {0}), (2, 2, {0, 1}), (9, 1, {0}), (9, 2, {0, 8}), (9, 3, {0, 4, 8}), (3, 9, {0, 1, 2})),
)
def test_some_of_the_cases(count: int, most: int, kept: set[int]) -> None:
    assert spread(count, most) == kept


def test_each_test_has_so_many_cases(pytestconfig: pytest.Config) -> None:
    """In this file, whose parameters are pairs of values already: `covers` leaves all of them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--cases", "2", __file__]
    out = subprocess.run(command, cwd=pytestconfig.rootpath, capture_output=True, text=True, check=True).stdout
    names = [line.split("::")[1].split("[")[0] for line in out.splitlines() if "::" in line]
    several = {"test_everything_occurs", "test_some_of_the_cases"}
    assert collections.Counter(names) == {name: 2 if name in several else 1 for name in names}
    assert several < set(names)
