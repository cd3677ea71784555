"""The tests in this folder ask which kernels a program launches. The code of the kernels is read in tests/compiled."""

import contextlib
from collections.abc import Iterator

import pytest

from tests.helpers import compiling


@pytest.fixture(autouse=True)
def _no_code(request: pytest.FixtureRequest) -> Iterator[None]:
    with contextlib.nullcontext() if request.node.get_closest_marker("gpu") else compiling.no_code():
        yield
