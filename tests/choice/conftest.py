"""The tests in this folder ask which kernel is chosen. The code of the kernels is read in tests/compiled."""

from collections.abc import Iterator

import pytest

from tests.helpers import compiling


@pytest.fixture(autouse=True)
def _no_code() -> Iterator[None]:
    with compiling.no_code(memory=False):
        yield
