"""Which part of a model with activations of int8 is wrong on GPUs, and what a rounding costs a random model's margin."""
import os, sys, pathlib, tempfile
sys.path.insert(0, os.getcwd())
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import jaxtaxfree as jtf
from jaxtaxfree import models
from benchmarks import checkpoint
from tests.helpers.checkpoints import FOLDER, expected_of
print("flags", os.environ.get("XLA_FLAGS"), flush=True)
rng = np.random.default_rng(0)
for m in (6, 8, 12, 16):
    for k, n in ((32, 32), (32, 16), (32, 24), (24, 32), (64, 32), (128, 128)):
        a, b = (rng.integers(-127, 128, s).astype(np.int8) for s in ((m, k), (n, k)))
        want = a.astype(np.int32) @ b.astype(np.int32).T
        for precision in (None, "highest"):
            f = jax.jit(lambda a, b: jnp.matmul(a, b.T, precision=precision, preferred_element_type=jnp.int32))
            try:
                got = np.asarray(f(jnp.asarray(a), jnp.asarray(b)))
                if not (got == want).all():
                    print("XLA int8", (m, k, n), precision, "WRONG", np.abs(got - want).max(), flush=True)
            except Exception as e:
                print("XLA int8", (m, k, n), precision, type(e).__name__, str(e)[:150], flush=True)
print("products done", flush=True)
mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
x = jax.device_put(rng.standard_normal((12,)).astype(np.float32), NamedSharding(mesh, P("tp")))
def loop(x, how):
    def body(c, i):
        y = jtf.all_gather(x + i, "tp", tiled=True, implementation=how) if how != "lax" else lax.all_gather(x + i, "tp", tiled=True)
        return c, y
    return lax.scan(body, 0, jnp.arange(5, dtype=jnp.float32))[1]
for how in ("fused", "lax"):
    g = jax.jit(jax.shard_map(lambda x: loop(x, how), mesh=mesh, in_specs=P("tp"), out_specs=P(), check_vma=False))
    print("all_gather of 6", how, np.abs(np.asarray(g(x)) - (np.asarray(x)[None] + np.arange(5)[:, None])).max(), flush=True)
e = expected_of("llama3")
for how in ("xla", None):
    m = models.load(FOLDER / "llama3", mesh, dtype=np.float32, weights="int8", quantize_activations=True, implementation=how)
    l, w = np.asarray(m.logits(e["tokens"][:1])), e["logits"][:1]
    err = np.linalg.norm(l - w, axis=-1) / np.linalg.norm(w, axis=-1)
    print("model int8 activations", how, np.linalg.norm(l - w) / np.linalg.norm(w), "by token", np.round(err[0], 3), flush=True)
if "--margin" in sys.argv:
    checkpoint.SCALE = 0.1
    S = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "num_hidden_layers": 2, "vocab_size": 1024}
    with tempfile.TemporaryDirectory() as t:
        t = pathlib.Path(t)
        checkpoint.write_random(t, checkpoint.LLAMA_3_8B | S)
        tokens = np.random.default_rng(0).integers(0, 1024, (2, 40))
        wide = models.load(t, mesh, dtype=np.float32, implementation="xla")
        for how in ("xla", "fused"):
            for kv in (None, "float8_e4m3fn", "int8"):
                model = models.load(t, mesh, implementation=how, cache_dtype=kv)
                made = model.generate(tokens, 64)
                print("margin of tokens by", how, kv, "judged in f32", checkpoint.margin(wide, tokens, made), "judged in bf16", checkpoint.margin(model.by("xla"), tokens, made), flush=True)
