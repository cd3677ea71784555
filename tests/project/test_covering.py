"""What `@pytest.mark.covers` leaves in `make test`."""

import itertools
from collections.abc import Sequence

import pytest

from tests.helpers.covering import covering


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
