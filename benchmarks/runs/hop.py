"""How long a hop takes: every program sends its rows of a vector to all programs, and waits for all of it. us a hop.

python benchmarks/runs/hop.py WORLD [--lower | --tiny]
"""
import os, sys, time
sys.path.insert(0, os.getcwd())
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
import numpy as np, jax, jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
import triton
from jaxtaxfree.kernels import shmem_gluon as shmem, shmem as sh

SCOPE = gl.constexpr(os.environ.get("HOP_SCOPE", "sys"))

@gluon.jit
def loads(x_desc, stages, full, LOADS: gl.constexpr, SPREAD: gl.constexpr):
    for i in range(LOADS):
        s = i % 2
        if i >= 2:
            mbarrier.wait(full.index(s), (i // 2 - 1) % 2)
        mbarrier.expect(full.index(s), stages.index(s).nbytes_per_cta)
        tma.async_load(x_desc, [(gl.program_id(0) + i * SPREAD) * 128, 0], full.index(s), stages.index(s))
    for s in gl.static_range(2):
        if LOADS >= 2:
            mbarrier.wait(full.index(s), (LOADS - 2 + s) // 2 % 2)

@gluon.jit
def hops(me, y_ptr, told, met, t_ptr, ITERS: gl.constexpr, D: gl.constexpr, PROGRAMS: gl.constexpr, WORLD: gl.constexpr, FORM: gl.constexpr, ROWS: gl.constexpr, WARM: gl.constexpr):
    LINE: gl.constexpr = shmem.vectors_of(1, gl.num_warps())
    SIZE: gl.constexpr = max(32 * gl.num_warps(), triton.next_power_of_2(ROWS))
    at = gl.arange(0, SIZE, LINE)
    row = gl.program_id(0) * ROWS + at
    there = (at < ROWS) & (row < D)
    base = shmem.scratch(me, told, gl.float32) if FORM == "meet" else shmem.messages(me, told)
    value = gl.load(y_ptr + row, mask=there, other=0.0)
    begin = shmem.now()
    dummy = value * 0.0
    for i in range(ITERS):
        dest = base + (i * WORLD + me.rank) * D + row
        of = base + i * WORLD * D
        if WARM:
            ahead = base + (i + 2) * WORLD * D + 32 * (gl.program_id(0) + PROGRAMS * at)
            dummy += gl.load(ahead.to(gl.pointer_type(gl.float32)), mask=(32 * (gl.program_id(0) + PROGRAMS * at) < WORLD * D) & (i + 2 < ITERS), other=0.0, volatile=True)
        if FORM == "meet":
            gl.store(dest, value, mask=there)
            shmem.arrive(me, met)
            shmem.meet(me, met, ((me.epoch - 1) * (ITERS * PROGRAMS)).to(gl.int32) + (i + 1) * PROGRAMS)
            WIDE: gl.constexpr = shmem.vectors_of(4, gl.num_warps())
            got = gl.load(of + gl.arange(0, D, WIDE))
            total = gl.sum(got, 0)
        else:
            for r in gl.static_range(1, WORLD + 1):
                shmem.send(me, dest, value, (me.rank + r) % WORLD, there)
            if FORM == "first":
                v = gl.arange(0, 32 * gl.num_warps(), LINE)
                first, _ = shmem.receive_at(me, of + 4 * v + (WORLD - 1) * D, v >= 0)
            if FORM == "sampled":
                v = gl.arange(0, 32 * gl.num_warps(), LINE)
                first, _ = shmem.receive_at(me, of + (gl.minimum(v * ROWS + ROWS - 1, D - 1) // 4 * 4) + (WORLD - 1) * D, v < PROGRAMS)
            if WORLD == 1:
                got, _ = shmem.receive_own(me, of, D, triton.next_power_of_2(D))
                total = gl.sum(gl.where(got == got, got, 0.0), 0)
            else:
                gots, _ = shmem.receive_all(me, of, D, triton.next_power_of_2(D), D, WORLD, True)
                got = gots[0]
                for r in gl.static_range(1, WORLD):
                    got += gots[r]
                total = gl.sum(got, 0)
        value = value * 0.5 + total * 1e-6
    gl.store(t_ptr + gl.program_id(0), (shmem.now() - begin).to(gl.int32))
    gl.store(t_ptr + PROGRAMS + gl.program_id(0), gl.sum(value + dummy * 1e-30, 0).to(gl.int32))

@gluon.jit
def hop_kernel(x_desc, y_ptr, team, told, met, t_ptr, ITERS: gl.constexpr, D: gl.constexpr, PROGRAMS: gl.constexpr, WORLD: gl.constexpr, FORM: gl.constexpr, LOADS: gl.constexpr, ROWS: gl.constexpr, WARM: gl.constexpr):
    me = shmem.start(team, WORLD=WORLD)
    stages = gl.allocate_shared_memory(x_desc.dtype, [2, 128, 64], x_desc.layout)
    full = mbarrier.allocate_mbarrier(batch=2)
    for s in gl.static_range(2):
        mbarrier.init(full.index(s), count=1)
    gl.warp_specialize([(hops, (me, y_ptr, told, met, t_ptr, ITERS, D, PROGRAMS, WORLD, FORM, ROWS, WARM)), (loads, (x_desc, stages, full, LOADS, PROGRAMS))], [1], [24])
    shmem.finish(me)

def program(world, form, d, iters, loads, programs, warps, rows, warm):
    from jaxtaxfree.shmem import shmem_call
    mesh = Mesh(np.array(jax.devices()[:world]), ("tp",))
    told = (iters, world, d)
    def local(x, y):
        return shmem_call(hop_kernel, x, y, axis_name="tp", out_type=jax.ShapeDtypeStruct((2, programs), jnp.int32), grid=programs, together=programs,
            scratch={"told": jax.ShapeDtypeStruct(told, jnp.float32)} if form == "meet" else {}, messages={} if form == "meet" else {"told": told}, signals={"met": 1},
            descriptors={"x_desc": (128, 64)}, name="hop", num_warps=warps, ITERS=iters, D=d, PROGRAMS=programs, FORM=form, LOADS=loads, ROWS=rows, WARM=warm)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P()), out_specs=P(None, "tp"), check_vma=False))

SHAPES = [(4096, 32), (1848, 14), (2112, 16), (1024, 8), (792, 6), (512, 4), (512, 32)]
CASES = [(l, "all", d, r, w) for l in (0, 64) for d, r in SHAPES for w in (0, 1) if l or not w]
def main():
    world = int(sys.argv[1]); tiny = "--tiny" in sys.argv
    if tiny:
        from jaxtaxfree import simulator
        for form in (("all", "meet") if world == 1 else ("all",)):
            x = [np.zeros((128 * 3 * 4, 64), jnp.bfloat16)] * world; y = [np.ones(512, np.float32)] * world
            outs, _ = simulator.run(hop_kernel, x, y, world=world, out_type=jax.ShapeDtypeStruct((2, 3), jnp.int32), grid=3, together=3,
                scratch={"told": jax.ShapeDtypeStruct((3, world, 512), jnp.float32)} if form == "meet" else {}, messages={} if form == "meet" else {"told": (3, world, 512)}, signals={"met": 1},
                descriptors={"x_desc": (128, 64)}, num_warps=4, ITERS=3, D=512, PROGRAMS=3, FORM=form, LOADS=4, ROWS=171, WARM=0)
            print(form, outs[0].tolist() if hasattr(outs[0], "tolist") else outs[0])
        return
    programs = 132
    iters = 40
    x = jnp.zeros((128 * programs * 80, 64), jnp.bfloat16)
    for loads, form, d, rows, warm in CASES:
        if True:
            warps = 8
            f = program(world, form, d, iters, loads, programs, warps, rows, warm)
            y = jnp.ones(rows * 132 + 256, jnp.float32)
            if "--lower" in sys.argv:
                f.trace(x, y).lower(lowering_platforms=("cuda",)); continue
            try:
                ts = []
                for _ in range(6):
                    t = np.asarray(f(x, y)).reshape(2, -1)[0] if world == 1 else np.asarray(f(x, y))[0]
                    ts.append(t.mean() / iters / 1000)
                print(f"world {world} scope {SCOPE.value} loads {loads:3d} {form:8s} D {d:5d} rows {rows} warm {warm}: {np.median(ts[1:]):.3f} us a hop, least {min(ts):.3f}", flush=True)
            except Exception as e:
                print(form, d, type(e).__name__, str(e)[:200], flush=True)
main()
