"""What GPUs have to get right, of two simulated ranks: a check whose expectation is wrong need not wait for GPUs.

Left out are the checks that repeat calls very often or take the sizes of models, and that of the patterns of NaN, which
XLA does not keep on CPUs.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest

import jaxtaxfree as jtf
from jaxtaxfree.ops import register
from tests.conftest import MeshFactory
from tests.helpers import attention_parity, collectives_parity, parity, ragged_dot_parity, ragged_parity

LEFT_OUT = (
    *(
        "check_listed_shapes",
        "check_columns",
        "check_sizes",
        "check_every_pattern",
        "check_epilogues",
        "check_features",
        "check_values",
    ),
    *("check_repetition", "check_repetitions", "check_many_calls", "check_growing_cache"),
)
QUICK = ("check_gradients", "check_reduce_scatter_rounds_once", "check_integers_wrap")
CHECKS = [*parity.CHECKS, *collectives_parity.CHECKS, *attention_parity.CHECKS, *ragged_parity.CHECKS]
CHECKS += ragged_dot_parity.CHECKS


def checks() -> list[Any]:
    named = [(check, parity.name_of(check)) for check in CHECKS]
    return [
        pytest.param(check, id=name, marks=pytest.mark.slow if name.partition("-")[0] in QUICK else pytest.mark.soak)
        for check, name in named
        if name.partition("-")[0] not in LEFT_OUT
    ]


def simulated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*operands: Any, implementation: str | None = None, **keywords: Any) -> Any:
        return function(
            *operands, implementation="simulate" if implementation == "fused" else implementation, **keywords
        )

    return call


@pytest.mark.filterwarnings("ignore::jaxtaxfree.simulator.WastedTrafficWarning")  # of what comes beside garbage
@pytest.mark.parametrize("check", checks())
def test_check(check: Callable[..., None], cpu_mesh: MeshFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*register.OPERATIONS, "ragged_all_to_all", "ragged_dot"):
        monkeypatch.setattr(jtf, name, simulated(getattr(jtf, name)))
    check(cpu_mesh(2, "tp"))
