"""Processes of `jax.distributed` that lower programs for CUDA, on a machine without GPUs.

Each takes its CPU devices for GPUs, with a model of their driver. Regions of the heap, the key-value store and the
sockets are real; the programs are lowered and never run.
"""

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax_triton import triton_lib

import jaxtaxfree as jtf
from jaxtaxfree import heap, shmem, teams
from jaxtaxfree.heap import door
from tests.helpers.driver_model import MIB, DriverModel
from tests.helpers.support import COLLECTIVES, TRITON_CALL

PROLOGUE = """
import json, os, signal, sys, time
import jax
rank, world, port = map(int, sys.argv[1:4])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
from tests.helpers import fake_gpus
from tests.helpers.fake_gpus import jtf, lower, lower_all
jax.distributed.initialize(f"127.0.0.1:{port}", world, rank)
driver = fake_gpus.install()
found = {}
"""
EPILOGUE = """
print("FOUND " + json.dumps(found), flush=True)
os._exit(0)
"""


def install() -> DriverModel:
    """Makes this process's devices GPUs for the lowering. FAKE_HOST names its host."""
    driver = DriverModel(jax.local_device_count(), 1024 * MIB, first=1 + jax.process_index())
    heap.Driver = lambda: driver
    if host := os.environ.get("FAKE_HOST"):
        door.host = lambda: host
        socket.gethostname = lambda: host
    for name, value in {"on_gpus": True, "compute_capability": 90, "multiprocessors": 132, "device_kind": ""}.items():
        setattr(teams.Team, name, property(lambda _, value=value: value))
    shmem._load_modules = lambda *_: None
    return driver


def move(host: str) -> None:
    """Makes this process believe that it is on this host, with a heap of its own."""
    heap.close()
    door.announce().host = host
    socket.gethostname = lambda: host


def lower(
    devices: Sequence[jax.Device],
    shape: Sequence[int] | None = None,
    names: Sequence[str] = ("tp",),
    rows: int = 8,
    implementation: str | None = None,
) -> dict[str, Any]:
    """Lowers a sum along the last axis of a mesh of these devices: what it became, or its error, and its seconds."""
    mesh = Mesh(np.array(devices).reshape(shape or (len(devices),)), names)
    call = jax.shard_map(
        lambda x: jtf.psum(x, names[-1], implementation=implementation),
        mesh=mesh,
        in_specs=P(names),
        out_specs=P(names[:-1]),
    )
    x = jax.ShapeDtypeStruct((rows * len(devices), 128), jnp.float32, sharding=NamedSharding(mesh, P(names)))
    return _lowered(call, x)


def _lowered(call: Callable[..., Any], *operands: Any) -> dict[str, Any]:
    start = time.monotonic()
    try:
        with mock.patch.object(triton_lib, "compile_ttir_to_ptx_inplace", _compiled_so_far):
            text = jax.jit(call).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
        collectives = [name for name in re.findall(r"stablehlo\.(\w+)\"\(", text) if name in COLLECTIVES]
        end = {
            "kernel": "triton" in text,
            "kernels": text.count(TRITON_CALL),
            "collectives": collectives,
            "program": hashlib.sha256(text.encode()).hexdigest(),
        }
    except Exception as error:
        end = {"error": f"{type(error).__name__}: {error}"}
    return {**end, "seconds": time.monotonic() - start}


def lower_all(
    devices: Sequence[jax.Device],
    shape: Sequence[int],
    axes: Sequence[str],
    implementation: str | None = None,
    names: Sequence[str] = ("data", "model"),
) -> dict[str, Any]:
    """Lowers a program of every operation that goes in two levels, along these axes of a mesh of these devices."""
    mesh = Mesh(np.array(devices).reshape(shape), names)
    along, how = tuple(axes), {"implementation": implementation}
    world = len(devices)

    def local(x: Any, lhs: Any, rhs: Any) -> Any:
        return (
            jtf.psum(x, along, **how),
            jtf.all_gather(x, along, tiled=True, **how),
            jtf.psum_scatter(x, along, tiled=True, **how),
            jtf.matmul_all_reduce(lhs, rhs, along, **how),
        )

    specs = P(along), P(None, along), P(along)
    call = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(), P(), P(along), P()), check_vma=False)
    sizes = (16 * world * world, 8), (8, 32 * world), (32 * world, 64)
    arrays = [
        jax.ShapeDtypeStruct(size, jnp.float32, sharding=NamedSharding(mesh, spec)) for size, spec in zip(sizes, specs)
    ]
    return _lowered(call, *arrays)


def _compiled_so_far(ttir: Any, *_: Any) -> triton_lib.CompilationResult:
    """A kernel that is compiled to Triton's own code and no further, which would take longest."""
    code = str(ttir)
    return triton_lib.CompilationResult(
        binary=hashlib.sha256(code.encode()).hexdigest(), name="kernel", shared_mem_bytes=0, ttgir="", llir=code
    )


def run(
    world: int, each: int, body: str, *, hosts: Sequence[str] | None = None, timeout: float = 120, **variables: str
) -> tuple[list[dict[str, Any] | None], list[str]]:
    """Runs a program in `world` processes of `each` devices: what each found (None of one that died), and wrote."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={each}"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROLOGUE + textwrap.dedent(body) + EPILOGUE, str(rank), str(world), str(port)],
            env={**os.environ, **own, **variables, "FAKE_HOST": hosts[rank] if hosts else ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    return [
        json.loads(output.rpartition("FOUND ")[2].splitlines()[0]) if "FOUND " in output else None for output in outputs
    ], outputs
