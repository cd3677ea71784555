"""Sizes and offsets that fit nowhere, on GPUs: who is told what, and that the next call is right."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxtaxfree as jtf
from tests.conftest import MeshFactory
from tests.helpers.ragged_cases import garbage, reports
from tests.helpers.ragged_parity import call
from tests.helpers.rehearsal import needs_real_gpus

pytestmark = pytest.mark.gpu(2)


def test_garbage_is_an_error_and_the_next_call_is_right(gpu_mesh: MeshFactory) -> None:
    mesh = gpu_mesh(2, "tp")
    devices = [device.id for device in mesh.devices.flat]
    program = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=(P("tp"),) * 6, out_specs=P("tp"), check_vma=False))
    for name, routing, tables, receivers in garbage(2):
        arrays = [jnp.asarray(x).reshape(-1, 5) for x in routing.arrays("float32", 5)]
        wanted = routing.expected(*(np.asarray(x).reshape(2, -1, 5) for x in arrays))
        right = jtf.block_until_ready(program(*arrays, *(x.reshape(-1) for x in routing.tables)))
        np.testing.assert_array_equal(np.asarray(right).reshape(wanted.shape), wanted, err_msg=name)
        wanted[receivers] = np.nan
        with pytest.raises(jtf.GarbageError) as raised:
            found = program(*arrays, *(x.reshape(-1) for x in tables))
            needs_real_gpus()
            jtf.block_until_ready(found)
        np.testing.assert_array_equal(np.asarray(found).reshape(wanted.shape), wanted, err_msg=name)
        message = str(raised.value)
        for report in reports(routing, tables, call="CALL"):
            rank, what = int(report[5]), re.escape(report[6:]).replace("CALL", r"\d+")
            assert re.search(rf": rank {rank} \(device {devices[rank]}\){what}", message), (name, message)
        jtf.heap.check()  # it is raised once
