"""Accounts of taxes: of made-up timelines and programs everywhere, of planted taxes on GPUs."""

from __future__ import annotations

import importlib
import io
import json
import math
import pathlib
import pkgutil
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import rich.console
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtaxfree import kernels as own_kernels
from jaxtaxfree import taxes
from jaxtaxfree.__main__ import main
from jaxtaxfree.ops.register import OPERATIONS, Operation
from jaxtaxfree.taxes import hlo, profile, programs, report, timeline
from jaxtaxfree.taxes.timeline import Kernel, Kind
from tests.helpers import support

US = 1e-6


def kernel(device: int, start: float, end: float, kind: Kind = "compute", name: str = "", stream: str = "1") -> Kernel:
    """One from `start` to `end`, in microseconds."""
    return Kernel(device=device, stream=stream, name=name or kind, start_ns=start * 1e3, end_ns=end * 1e3, kind=kind)


def repeated(step: list[Kernel], period: float, steps: int = 5) -> list[Kernel]:
    """The same step every so many microseconds."""
    return [
        kernel(k.device, k.start_ns / 1e3 + i * period, k.end_ns / 1e3 + i * period, k.kind, k.name, k.stream)
        for i in range(steps)
        for k in step
    ]


def microseconds(device: timeline.DeviceTime) -> dict[str, float]:
    fields = ("compute", "communication", "waiting", "gaps", "dispatch", "fused_lead")
    return {field: round(getattr(device, field) / US, 6) for field in fields if getattr(device, field)}


# Timelines


def test_gaps_and_dispatch() -> None:
    step = [kernel(0, 0, 30), kernel(0, 34, 50), kernel(0, 50, 60)]
    (device,) = timeline.read(repeated(step, 100), 5).devices
    assert microseconds(device) == {"compute": 56, "gaps": 4, "dispatch": 40}
    assert device.step == pytest.approx(100 * US)


def test_collective_waits_for_the_last_device() -> None:
    step = [kernel(0, 0, 10), kernel(0, 10, 90, "collective"), kernel(1, 0, 60), kernel(1, 60, 90, "collective")]
    found = timeline.read(repeated(step, 100), 5)
    assert [microseconds(device) for device in found.devices] == [
        {"compute": 10, "waiting": 50, "communication": 30, "dispatch": 10},
        {"compute": 60, "communication": 30, "dispatch": 10},
    ]
    assert found.clock_error == 0


def test_clocks_are_aligned_by_the_ends_of_collectives() -> None:
    step = [kernel(0, 0, 10), kernel(0, 10, 90, "collective"), kernel(1, 0, 60), kernel(1, 60, 92, "collective")]
    plain = repeated(step, 100)
    shifted = [
        kernel(k.device, k.start_ns / 1e3 + 777 * k.device, k.end_ns / 1e3 + 777 * k.device, k.kind) for k in plain
    ]
    found = timeline.read(shifted, 5)
    # By 2 us the ends differ always, so they are taken for a difference of the clocks.
    assert microseconds(found.devices[0])["waiting"] == pytest.approx(48)
    assert found.clock_error == pytest.approx(0)


def test_clocks_are_aligned_by_a_calibration() -> None:
    """A collective need not end at the same time everywhere, and fused kernels do not."""
    step = [kernel(0, 0, 80, "fused"), kernel(1, 520, 590, "fused")]
    calibration = repeated([kernel(0, 900, 902, "collective"), kernel(1, 1401, 1402, "collective")], 10)
    found = timeline.read(repeated(step, 100), 5, calibration=calibration)
    assert [microseconds(device).get("fused_lead", 0) for device in found.devices] == [20, 0]
    assert found.clock_error == 0


def test_calibration_is_told_apart() -> None:
    steps = repeated([kernel(0, 0, 10), kernel(1, 5, 15, "collective")], 100)
    calibration = [kernel(0, 90_000, 90_010, "collective"), kernel(1, 90_000, 90_010, "collective")]
    before, after = profile.separate([kernel(1, 90_020, 90_021), *calibration, *steps])
    assert sorted(before, key=lambda k: k.start_ns) == steps
    assert sorted(after, key=lambda k: k.device) == calibration
    assert profile.separate(steps)[1] == ()


def test_clock_error_is_what_alignment_leaves() -> None:
    plain = repeated([kernel(0, 0, 80, "collective"), kernel(1, 0, 80, "collective")], 100, steps=9)
    kernels = [
        kernel(k.device, k.start_ns / 1e3, k.end_ns / 1e3 + 3 * k.device * (i % 3), k.kind) for i, k in enumerate(plain)
    ]
    error = timeline.read(kernels, 9).clock_error
    assert error is not None
    assert 0 < error <= 6 * US


def test_work_hides_a_wait() -> None:
    """A collective on a stream of its own costs only what nothing else runs beside."""
    step = [
        kernel(0, 0, 5),
        kernel(0, 5, 60, "collective", stream="2"),
        kernel(0, 5, 30),
        kernel(1, 0, 5),
        kernel(1, 40, 60, "collective", stream="2"),
        kernel(1, 5, 30),
    ]
    found = timeline.read(repeated(step, 60), 5)
    assert microseconds(found.devices[0]) == {"compute": 30, "waiting": 10, "communication": 20}
    assert microseconds(found.devices[1]) == {"compute": 30, "gaps": 10, "communication": 20}


def test_groups_wait_for_their_own_members() -> None:
    starts = {0: 0, 1: 10, 2: 50, 3: 60}
    step = [kernel(device, start, 90, "collective") for device, start in starts.items()]
    found = timeline.read(repeated(step, 100), 5, groups=[(0, 1), (2, 3)])
    assert [microseconds(device).get("waiting", 0) for device in found.devices] == [10, 0, 10, 0]


def test_fused_kernels_count_as_work() -> None:
    step = [kernel(0, 0, 50, "fused"), kernel(1, 20, 50, "fused")]
    found = timeline.read(repeated(step, 100), 5)
    assert [microseconds(device) for device in found.devices] == [
        {"compute": 50, "dispatch": 50, "fused_lead": 20},
        {"compute": 30, "dispatch": 70},
    ]
    assert found.clock_error is None


def test_transfers_communicate() -> None:
    (device,) = timeline.read(repeated([kernel(0, 0, 40), kernel(0, 30, 60, "transfer")], 60), 5).devices
    assert microseconds(device) == {"compute": 40, "communication": 20}


def test_skipped_steps() -> None:
    slow = repeated([kernel(0, 0, 90)], 100, steps=4)
    fast = [kernel(0, k.start_ns / 1e3 + 400, k.end_ns / 1e3 + 380) for k in slow]
    found = timeline.read(slow + fast, 8, skip=4)
    assert microseconds(found.devices[0]) == {"compute": 70, "dispatch": 30}
    assert found.steps == 3


def test_steps_that_cannot_be_told_apart() -> None:
    kernels = repeated([kernel(0, 0, 50)], 100)[:-1] + [kernel(0, 400, 410), kernel(0, 420, 450)]
    found = timeline.read(kernels, 5)
    assert found.devices[0].step == pytest.approx(450 / 5 * US)
    assert "could not be told apart" in found.notes[0]


def test_collective_that_a_device_lacks() -> None:
    step = [kernel(0, 0, 50, "collective"), kernel(1, 0, 50)]
    assert "5 collectives" in timeline.read(repeated(step, 100), 5).notes[0]


@pytest.mark.parametrize(("kernels", "steps"), [([], 5), ([kernel(0, 0, 1)] * 2, 2)])
def test_too_little_to_read(kernels: list[Kernel], steps: int) -> None:
    with pytest.raises(ValueError):
        timeline.read(kernels, steps)


# Programs

GATHER_MATMUL = """HloModule jit_up, is_scheduled=true

ENTRY %main (p0: bf16[16,8192], p1: bf16[8192,7168]) -> bf16[64,7168] {
  %p0 = bf16[16,8192]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}
  %p1 = bf16[8192,7168]{1,0} parameter(1), metadata={op_name="w"}
  %all-gather-start = (bf16[16,8192]{1,0}, bf16[64,8192]{1,0}) all-gather-start(%p0), replica_groups=[1,4]<=[4]
  %all-gather-done = bf16[64,8192]{1,0} all-gather-done(%all-gather-start)
  %gemm = (bf16[64,7168]{1,0}, s8[33554432]{0}) custom-call(%all-gather-done, %p1), custom_call_target="__cublas$gemm"
  ROOT %get-tuple-element = bf16[64,7168]{1,0} get-tuple-element(%gemm), index=0
}
"""


def test_traffic_of_gather_and_product() -> None:
    """The gathered matrix, and neither operands, nor the result, nor the workspace that nobody reads."""
    gathered = 64 * 8192 * 2
    assert hlo.traffic(GATHER_MATMUL) == hlo.Traffic(compute=gathered, collective=gathered)
    assert hlo.groups(GATHER_MATMUL) == ((0, 1, 2, 3),)


LOOP = """HloModule jit_decode

%fused_update (cache: f32[1024,8], row: f32[1,8], at: s32[]) -> f32[1024,8] {
  %cache = f32[1024,8]{1,0} parameter(0)
  %row = f32[1,8]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %updated = f32[1024,8]{1,0} dynamic-update-slice(%cache, %row, %at, %zero)
}

%fused_step (y: f32[1,8], w: f32[64,8], at: s32[]) -> f32[1,8] {
  %y = f32[1,8]{1,0} parameter(0)
  %w = f32[64,8]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %row = f32[1,8]{1,0} dynamic-slice(%w, %at, %at), dynamic_slice_sizes={1,8}
  ROOT %sum = f32[1,8]{1,0} add(%y, %row)
}

%body (state: (s32[], f32[1,8], f32[1024,8], f32[64,8])) -> (s32[], f32[1,8], f32[1024,8], f32[64,8]) {
  %state = STATE parameter(0)
  %at = s32[] get-tuple-element(%state), index=0
  %y = f32[1,8]{1,0} get-tuple-element(%state), index=1
  %cache = f32[1024,8]{1,0} get-tuple-element(%state), index=2
  %w = f32[64,8]{1,0} get-tuple-element(%state), index=3
  %next = f32[1,8]{1,0} fusion(%y, %w, %at), kind=kLoop, calls=%fused_step
  %stored = f32[1024,8]{1,0} fusion(%cache, %next, %at), kind=kLoop, calls=%fused_update
  ROOT %tuple = STATE tuple(%at, %next, %stored, %w)
}

%condition (state: (s32[], f32[1,8], f32[1024,8], f32[64,8])) -> pred[] {
  %state = STATE parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (y0: f32[1,8], cache0: f32[1024,8], w0: f32[64,8]) -> (f32[1,8], f32[1024,8]) {
  %y0 = f32[1,8]{1,0} parameter(0)
  %cache0 = f32[1024,8]{1,0} parameter(1)
  %w0 = f32[64,8]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %init = STATE tuple(%zero, %y0, %cache0, %w0)
  %while = STATE while(%init), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"10"}}
  %y1 = f32[1,8]{1,0} get-tuple-element(%while), index=1
  %cache1 = f32[1024,8]{1,0} get-tuple-element(%while), index=2
  ROOT %out = (f32[1,8]{1,0}, f32[1024,8]{1,0}) tuple(%y1, %cache1)
}
""".replace("STATE", "(s32[], f32[1,8]{1,0}, f32[1024,8]{1,0}, /*index=3*/f32[64,8]{1,0})")


def test_traffic_of_a_loop() -> None:
    """`next` is written 10 times, the last time as a result, and read 20 times. Nothing is read from the cache."""
    row = 8 * 4
    assert hlo.traffic(LOOP) == hlo.Traffic(compute=(9 + 20) * row, collective=0)


def test_loop_of_unknown_length_is_noted() -> None:
    found = hlo.traffic(LOOP.replace('{"known_trip_count":{"n":"10"}}', "{}"))
    assert found.total == 2 * 8 * 4
    assert "while" in found.notes[0]


ASYNC = """HloModule jit_scatter

%async_computation (x: f32[64]) -> f32[16] {
  %x = f32[64]{0} parameter(0)
  ROOT %reduce-scatter = f32[16]{0} reduce-scatter(%x), replica_groups={{0,2},{1,3}}, dimensions={0}, to_apply=%add
}

%command_buffer (p: f32[64]) -> f32[64] {
  %p = f32[64]{0} parameter(0)
  ROOT %negated = f32[64]{0} custom-call(%p), custom_call_target="negate"
}

ENTRY main (p0: f32[64]) -> f32[16] {
  p0 = f32[64]{0} parameter(0)
  same = f32[64]{0} opt-barrier(p0)
  call = f32[64]{0} call(same), to_apply=%command_buffer
  start = ((f32[64]{0}), f32[16]{0}) async-start(f32[64]{0} call), calls=%async_computation
  done = f32[16]{0} async-done(start)
  other-start = ((f32[64]{0}), f32[16]{0}) reduce-scatter-start(call), replica_groups={{0,2},{1,3}}
  other = f32[16]{0} reduce-scatter-done(other-start)
  total-start = f32[16]{0} all-reduce-start(done), replica_groups={{0,2},{1,3}}, to_apply=%add
  total = f32[16]{0} all-reduce-done(total-start)
  ROOT sum = f32[16]{0} fusion(total, other), kind=kLoop, calls=%fused
}

%fused (a: f32[16], b: f32[16]) -> f32[16] {
  %a = f32[16]{0} parameter(0)
  %b = f32[16]{0} parameter(1)
  ROOT %c = f32[16]{0} add(%a, %b)
}
"""


def test_traffic_of_calls_and_asynchronous_collectives() -> None:
    # The negated array is written once and read by both scatters; their results and the sum are written and read.
    compute = 64 * 4 + 2 * 16 * 4
    collective = 2 * 64 * 4 + 3 * 16 * 4 + 16 * 4
    assert hlo.traffic(ASYNC) == hlo.Traffic(compute=compute, collective=collective)
    assert hlo.groups(ASYNC) == ((0, 2), (1, 3))


def test_traffic_of_copies_and_branches() -> None:
    text = """
ENTRY %main (p0: f32[64], p1: pred[]) -> f32[64] {
  %p0 = f32[64]{0} parameter(0)
  %p1 = pred[] parameter(1)
  %start = (f32[64]{0:S(5)}, f32[64]{0}, u32[]) copy-start(%p0)
  %done = f32[64]{0:S(5)} copy-done(%start)
  %branch = f32[64]{0} conditional(%p1, %done, %done), true_computation=%a, false_computation=%b
  ROOT %sum = f32[64]{0} custom-call(%branch, %done), custom_call_target="add"
}
"""
    found = hlo.traffic(text)
    assert found.compute == 2 * 64 * 4
    assert "branch" in found.notes[0]


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("{}", None),
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("mesh['dp'=2,'tp'=2] {'tp'}", ((0, 1), (2, 3))),
        ("mesh['dp'=2,'tp'=2] {'dp'}", ((0, 2), (1, 3))),
        ("mesh['dp'=2,'tp'=2] {'dp', 'tp'}", ((0, 1, 2, 3),)),
        ("something_new", None),
    ],
)
def test_groups(written: str, found: Any) -> None:
    text = f"  %a = f32[4]{{0}} all-gather(%x), channel_id=1, replica_groups={written}, dimensions={{0}}\n"
    assert hlo.groups(text * 2) == found
    assert hlo.groups(text + text.replace(written, "{{0,1,2,3}}")) is None


def test_text_that_is_no_program() -> None:
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.traffic("nothing")


def test_compiled_program(cpu_mesh: Callable) -> None:
    """What XLA writes in this version, for CPUs."""
    mesh = cpu_mesh(4, "tp")

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"))
    def up(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.all_gather(x, "tp", tiled=True) @ w

    text = (
        up.lower(
            jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(mesh, P("tp"))),
            jax.ShapeDtypeStruct((32, 16), jnp.float32, sharding=NamedSharding(mesh, P(None, "tp"))),
        )
        .compile()
        .as_text()
    )
    assert hlo.traffic(text) == hlo.Traffic(compute=64 * 32 * 4, collective=64 * 32 * 4)
    assert hlo.groups(text) in (None, ((0, 1, 2, 3),))


# Traces

TRACE = """
planes {
  name: "/device:GPU:1"
  lines {
    name: "Stream #7(Compute)" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 5000000 duration_ps: 2000000 }
    events { metadata_id: 2 offset_ps: 8000000 duration_ps: 3000000 }
    events { metadata_id: 3 offset_ps: 12000000 duration_ps: 1000000 }
    events { metadata_id: 4 offset_ps: 14000000 duration_ps: 1000000 }
    events { metadata_id: 5 offset_ps: 16000000 duration_ps: 0 }
  }
  lines { name: "CUPTI overhead" events { metadata_id: 1 duration_ps: 1 } }
  event_metadata { key: 1 value { id: 1 name: "loop_add_fusion" } }
  event_metadata { key: 2 value { id: 2 name: "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)" } }
  event_metadata { key: 3 value { id: 3 name: "all_gather_matmul_kernel" } }
  event_metadata { key: 4 value { id: 4 name: "MemcpyP2P" } }
  event_metadata { key: 5 value { id: 5 name: "Memset" } }
}
planes { name: "/host:CPU" lines { name: "Stream #1" events { metadata_id: 1 duration_ps: 1 } } }
"""


def test_kernels_of_a_trace() -> None:
    found = list(profile.kernels_of(jax.profiler.ProfileData.from_text_proto(TRACE), fused=("loop_add",)))
    assert [(k.device, k.kind, k.start_ns, k.end_ns) for k in found] == [
        (1, "fused", 6000, 8000),
        (1, "collective", 9000, 12000),
        (1, "fused", 13000, 14000),
        (1, "transfer", 15000, 16000),
    ]
    assert found[0].stream == "Stream #7(Compute)"


@pytest.mark.parametrize("module", [module.name for module in pkgutil.iter_modules(own_kernels.__path__)])
def test_our_kernels_are_known(module: str) -> None:
    functions = vars(importlib.import_module(f"jaxtaxfree.kernels.{module}"))
    for name in (name for name in functions if name.endswith("_kernel")):
        trace = jax.profiler.ProfileData.from_text_proto(TRACE.replace("all_gather_matmul_kernel", name))
        assert [k.kind for k in profile.kernels_of(trace, fused=())].count("fused") == 1, name


def test_cpus_are_refused(cpu_mesh: Callable) -> None:
    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(cpu_mesh(2, "tp"), P("tp")))
    with pytest.raises(RuntimeError, match=r"needs GPUs: the program runs on cpu devices"):
        taxes.account(jax.jit(jnp.sin), x)


def test_function_without_results() -> None:
    with pytest.raises(TypeError, match="returns no array"):
        taxes.account(lambda: None)


def test_options_need_a_program() -> None:
    with pytest.raises(ValueError, match="compiler_options"):
        taxes.account(lambda: None, compiler_options={"xla_flag": True})


def test_trace_without_kernels(cpu_mesh: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """The whole way of a measurement, on devices of which the profiler shows no kernels."""
    mesh = cpu_mesh(2, "tp")
    monkeypatch.setattr(profile, "_gpus_of", lambda _: tuple(mesh.devices.flat))
    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("tp")))
    with pytest.raises(RuntimeError, match="recorded no kernel"):
        taxes.account(jax.jit(jnp.sin), x, steps=3, bandwidth=1e12, keep=tmp_path)
    recording = taxes.Recording.load(tmp_path / "recording.json")
    assert recording.kernels == ()
    assert (recording.steps, recording.skip) == (6, 3)
    assert recording.step_seconds > 0
    assert (tmp_path / "trace.xplane.pb").exists()


def test_bandwidth_of_copies() -> None:
    assert 1e6 < profile.copy_bandwidth(tuple(jax.devices("cpu")[:2]), nbytes=1 << 16) < 1e13


# Accounts


def recording(program: str | None = GATHER_MATMUL, step_seconds: float = 100 * US, **fields: Any) -> taxes.Recording:
    """Steps of 100 us of two devices: 60 us of product, 20 of a gather that one waits 10 us for, and idle time."""
    step = [kernel(0, 0, 30, "collective"), kernel(0, 34, 94), kernel(1, 10, 30, "collective"), kernel(1, 34, 94)]
    fields = {
        "kernels": tuple(repeated(step, 100)),
        "steps": 5,
        "skip": 1,
        "bandwidth": 2 * 64 * 8192 * 2 / (8 * US),
    } | fields
    return taxes.Recording(hlo=program, step_seconds=step_seconds, **fields)


def parts_of(account: taxes.Account) -> dict[str, float]:
    return {field: round(account.part(field) / US, 6) for field, _, _ in report.PARTS}


def test_account() -> None:
    account = taxes.account_of(recording(), "XLA")
    # Device 1 is idle for the 10 us that device 0 waits: on the mean it is 5 us each.
    expected = {"work": 56, "communication": 16, "launch": 15, "bulk_synchronous": 5, "locality": 8, "rest": 0}
    assert parts_of(account) == expected
    assert sum(expected.values()) == round(account.step / US)
    assert account.dispatch / US == pytest.approx(11)
    assert account.locality_bytes == 2 * 64 * 8192 * 2
    assert [(k.name, k.count) for k in account.kernels] == [("compute", 1), ("collective", 1)]
    assert account.notes == ()


@pytest.mark.parametrize(("step", "launch", "rest"), [(150, 15, 50), (90, 5, 0), (85, 0, 0), (70, 0, -15)])
def test_rest_is_what_the_trace_does_not_explain(step: float, launch: float, rest: float) -> None:
    """The profiler delays launches, so those of the trace count only as far as there is room for them."""
    found = parts_of(taxes.account_of(recording(step_seconds=step * US)))
    assert (found["launch"], found["rest"]) == (pytest.approx(launch), pytest.approx(rest))
    assert sum(found.values()) == pytest.approx(step)


def test_account_of_calls() -> None:
    whole, single = (taxes.account_of(recording(calls=calls)) for calls in (1, 10))
    assert parts_of(single) == {field: pytest.approx(value / 10) for field, value in parts_of(whole).items()}
    assert single.kernels[0].count == pytest.approx(0.1)


def test_locality_is_no_more_than_there_is() -> None:
    found = parts_of(taxes.account_of(recording(bandwidth=1.0)))
    assert (found["work"], found["communication"]) == (0, 0)
    assert sum(found.values()) == pytest.approx(100)


def test_locality_of_an_unknown_program() -> None:
    account = taxes.account_of(recording(None))
    assert account.locality is None
    assert "not known" in account.notes[0]
    assert sum(parts_of(account).values()) == pytest.approx(100)
    assert "not known" in printed(account.table())


def test_fused_kernels_are_noted() -> None:
    step = [kernel(0, 0, 50, "fused"), kernel(1, 20, 50, "fused")]
    account = taxes.account_of(recording(kernels=tuple(repeated(step, 100))))
    assert account.fused_lead == pytest.approx(10 * US)
    assert "inside" in account.notes[0]
    assert "ahead" in printed(account.table())


def test_bad_clocks_are_noted() -> None:
    step = [kernel(0, 0, 80, "collective"), kernel(1, 0, 80, "collective")]
    kernels = [
        kernel(k.device, k.start_ns / 1e3, k.end_ns / 1e3 + 15 * k.device * (i % 3), k.kind)
        for i, k in enumerate(repeated(step, 100, steps=9))
    ]
    account = taxes.account_of(recording(kernels=tuple(kernels), steps=9))
    assert any("clocks" in note for note in account.notes)


def printed(renderable: Any) -> str:
    console = rich.console.Console(width=120, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()


def test_table_json_and_picture(tmp_path: pathlib.Path) -> None:
    before = taxes.account_of(recording(), "XLA")
    after = taxes.account_of(recording(step_seconds=80 * US), "fused")
    text = printed(taxes.table([before, after]))
    assert "bulk-synchronous tax" in text
    assert "56.0   56%" in text
    assert "20.0 µs less in fused than in XLA" in taxes.compare(before, after)
    fields = json.loads(before.to_json())
    assert math.isclose(fields["work"] / US, 56)
    assert fields["devices"][1]["device"] == 1
    taxes.save_png([before, after], tmp_path / "taxes.png")
    assert (tmp_path / "taxes.png").read_bytes().startswith(b"\x89PNG")


def test_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxtaxfree\[simulator\]'"):
        taxes.account_of(recording()).save_png("never")


# Command line


def test_recordings_are_read_anywhere(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, step_seconds in (("XLA", 100 * US), ("fused", 80 * US)):
        (tmp_path / name).mkdir()
        recording(step_seconds=step_seconds).save(tmp_path / name / "recording.json")
    assert taxes.Recording.load(tmp_path / "XLA" / "recording.json") == recording()
    files = [str(tmp_path / name / "recording.json") for name in ("XLA", "fused")]
    out = tmp_path / "accounts.json"
    assert main(["taxes", "--read", *files, "--json", str(out), "--png", str(tmp_path / "taxes.png")]) == 0
    assert "launch tax" in capsys.readouterr().out
    assert [account["name"] for account in json.loads(out.read_text())] == ["XLA", "fused"]
    assert (tmp_path / "taxes.png").exists()


def test_machine_without_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(jax, "devices", lambda _: [])
    assert main(["taxes"]) == 2
    assert "needs at least two GPUs" in capsys.readouterr().err


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_built_in_programs(operation: Operation, cpu_mesh: Callable) -> None:
    """The function that all calls share is one kernel of ours, or has collectives of XLA's."""
    mesh = cpu_mesh(2, "tp")
    program = programs.program_of(operation, operation.tiny_shapes[0], mesh)
    assert program.calls == 256
    support.assert_fused(support.lower_for_cuda(program.jitted("fused", mesh), *program.operands))
    collective = {
        "matmul_reduce_scatter": "reduce_scatter",
        "psum_scatter": "reduce_scatter",
        "all_to_all": "all_to_all",
        "matmul_all_reduce": "all_reduce",
        "psum": "all_reduce",
    }.get(operation.name, "all_gather")
    support.assert_not_fused(support.lower_for_cuda(program.jitted("XLA", mesh), *program.operands), collective)


def test_lengths_of_programs() -> None:
    """Short chains are repeated, and long ones are shorter; by default the shortest and the longest call are taken."""
    found = {
        name: [programs._sizes(shape) for shape in programs._usual_shapes(operation, 4)]
        for name, operation in OPERATIONS.items()
    }
    assert found["all_gather_matmul"] == ["16,8192,28672", "8192,8192,28672"]
    assert found["decode_attention"] == ["1,8192", "8,32768"]
    assert found["psum"] == ["2", "4194304"]
    assert all(
        programs._sizes(programs._shape(text, OPERATIONS[name])) == text for name in found for text in found[name]
    )


@pytest.mark.parametrize("text", ["1,2", "1,2,x", ""])
def test_shapes_that_do_not_fit(text: str) -> None:
    operation = OPERATIONS["all_gather_matmul"]
    shape = programs._shape("1,2,3", operation)
    assert (shape.m, shape.k, shape.n) == (1, 2, 3)
    with pytest.raises(SystemExit, match="takes M,K,N"):
        programs._shape(text, operation)


# Planted taxes


def grown(before: taxes.Account, after: taxes.Account, field: str) -> float:
    return after.part(field) - before.part(field)


def check_sum(*accounts: taxes.Account) -> None:
    for account in accounts:
        assert sum(account.part(field) for field, _, _ in report.PARTS) == pytest.approx(account.step)


@pytest.mark.gpu(2)
def test_planted_straggler(gpu_mesh: Callable) -> None:
    """Rank 0 multiplies before a sum over the ranks: the other one waits as long as that takes."""
    mesh = gpu_mesh(2, "tp")
    x = jax.jit(lambda: jnp.ones((2 * 8192, 8192), jnp.bfloat16), out_shardings=NamedSharding(mesh, P("tp")))()

    def account(products: int) -> taxes.Account:
        @jax.jit
        @jax.shard_map(mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check_vma=False)
        def program(x: jax.Array) -> jax.Array:
            limit = jnp.where(lax.axis_index("tp") == 0, products, 0)
            y = lax.fori_loop(0, limit, lambda _, y: (y @ x) * jnp.bfloat16(1e-4), x)
            return lax.psum(y[:512], "tp")

        return taxes.account(program, x, name=f"{products} products")

    before, after = account(0), account(3)
    check_sum(before, after)
    extra = after.devices[0].compute - before.devices[0].compute
    assert extra > 2e-3
    assert after.devices[1].waiting - before.devices[1].waiting == pytest.approx(extra, rel=0.3)
    assert grown(before, after, "bulk_synchronous") == pytest.approx(extra / 2, rel=0.3)
    assert abs(grown(before, after, "launch")) < 0.3 * extra


@pytest.mark.gpu(2)
def test_planted_dispatch(gpu_mesh: Callable) -> None:
    """A host that sleeps before each program leaves the devices idle."""
    x = jax.device_put(jnp.ones((4096, 4096)), NamedSharding(gpu_mesh(2, "tp"), P("tp")))
    program = jax.jit(lambda x: jnp.sin(x) @ x.T)

    def sleepy(x: jax.Array) -> jax.Array:
        time.sleep(5e-3)
        return program(x)

    before, after = (taxes.account(lambda x, call=call: call(x), x) for call in (program, sleepy))
    check_sum(before, after)
    assert after.step - before.step > 3e-3
    assert grown(before, after, "launch") == pytest.approx(after.step - before.step, rel=0.3)
    assert after.dispatch > 0.7 * after.launch


@pytest.mark.gpu(2)
def test_planted_launches(gpu_mesh: Callable) -> None:
    """Many kernels where one would do: the devices are idle between them."""
    x = jax.device_put(jnp.ones((64, 128)), NamedSharding(gpu_mesh(2, "tp"), P("tp")))

    def account(pieces: int) -> taxes.Account:
        @jax.jit
        def program(x: jax.Array) -> jax.Array:
            for _ in range(pieces):
                x = lax.optimization_barrier(x * 1.5 + 1)
            return x

        return taxes.account(program, x)

    before, after = account(1), account(200)
    check_sum(before, after)
    assert sum(kernel.count for kernel in after.kernels) >= 200
    assert grown(before, after, "launch") > 0.2 * (after.step - before.step)


@pytest.mark.gpu(2)
def test_planted_round_trip(gpu_mesh: Callable) -> None:
    """An intermediate that goes through memory, because a barrier keeps two element-wise kernels apart."""
    sharding = NamedSharding(gpu_mesh(2, "tp"), P("tp"))
    x = jax.jit(lambda: jnp.ones((2, 1 << 27), jnp.float32), out_shardings=sharding)()  # 512 MiB a device

    @jax.jit
    def one_kernel(x: jax.Array) -> jax.Array:
        return (x * 1.5 + 1) * x

    @jax.jit
    def two_kernels(x: jax.Array) -> jax.Array:
        return lax.optimization_barrier(x * 1.5 + 1) * 2.5

    before, after = (taxes.account(program, x) for program in (one_kernel, two_kernels))
    check_sum(before, after)
    assert before.locality_bytes == 0
    assert after.locality_bytes == 2 << 29
    saved = after.step - before.step
    assert grown(before, after, "locality") == pytest.approx(saved, rel=0.3)
    assert abs(grown(before, after, "work")) < 0.3 * saved
