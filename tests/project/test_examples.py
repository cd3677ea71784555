"""The demo: both forms of the transformer agree, the weights are good, and the command line does what it says."""

import dataclasses
import functools
import os
import re
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxtaxfree import models
from tests.helpers.decode_steps import call_of, refusals

pytest.importorskip("safetensors")
pytest.importorskip("matplotlib")

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import decode_loop  # noqa: E402
import eight_bits  # noqa: E402
import iris_kernel  # noqa: E402
import published  # noqa: E402
import train  # noqa: E402
import train_step  # noqa: E402
import transformer  # noqa: E402

TINY = transformer.Config(d_model=32, n_layers=2, n_heads=8, n_kv_heads=4, head_dim=8, d_mlp=48, context=64)
MIXED = dataclasses.replace(TINY, n_experts=4)
# In bits per byte. The first 16 windows of the held-out text measure 1.82, all of it 1.69; the margin is for Python
# versions whose help() text is not that of the version that the weights were trained with.
HELD_OUT_BOUND = 2.1
LENGTHS = np.array([5, 40, 1, 33, 12, 3, 32, 2], np.int32)


def tiny_params(cfg: transformer.Config = TINY) -> transformer.Params:
    # Gains that differ per channel, so that a gain that is left out or misplaced shows.
    params = transformer.init(jax.random.key(0), cfg)
    gain = 1 + 0.5 * np.sin(np.arange(TINY.d_model))
    return jax.tree.map(lambda p: p * gain if p.ndim == 1 else p, params)


def prompts_and_lengths() -> tuple[np.ndarray, np.ndarray]:
    prompts = np.random.default_rng(0).integers(256, size=(len(LENGTHS), LENGTHS.max())).astype(np.int32)
    return prompts, LENGTHS


def on_mesh(f, world, in_specs, out_specs):
    mesh = Mesh(np.array(jax.devices()[:world]), ("tp",))
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.soak), 4])
def test_tensor_parallel_logits_equal_plain_logits(world):
    """Ragged prompts are prefilled, then three given tokens are decoded; all logits are those of `forward`."""
    params, (prompts, lengths) = tiny_params(), prompts_and_lengths()
    b, t = prompts.shape
    given = np.random.default_rng(1).integers(256, size=(b, 3)).astype(np.int32)

    def tensor_parallel(params, prompts, given):
        x, cache = transformer.read_prompts(params, prompts, b, transformer.cache_length(t + 3, world), TINY)
        x = x.reshape(-1, TINY.d_model)
        logits = [transformer.logits_shard(params, x).reshape(b, t, -1)]
        for i in range(3):
            x, cache = transformer.next_token(params, cache, given[:, i], lengths + i, TINY)
            logits.append(transformer.logits_shard(params, x)[:, None])
        return jnp.concatenate(logits, axis=1)

    run = on_mesh(tensor_parallel, world, (transformer.param_specs(TINY), P("tp"), P("tp")), P(None, None, "tp"))
    actual = np.asarray(run(params, prompts, given))
    # `forward` is causal, so one padded shape serves every length.
    whole = np.zeros((b, t + 3), np.int32)
    for i, length in enumerate(lengths):
        whole[i, : length + 3] = np.concatenate([prompts[i, :length], given[i]])
    expected = np.asarray(jax.jit(lambda rows: transformer.forward(params, rows, TINY))(whole))
    for i, length in enumerate(lengths):
        np.testing.assert_allclose(actual[i, :length], expected[i, :length], atol=1e-4)
        np.testing.assert_allclose(actual[i, t:], expected[i, length : length + 3], atol=1e-4)


@pytest.mark.parametrize(
    "world, whole, cfg",
    [pytest.param(2, False, TINY, marks=pytest.mark.soak), (4, False, TINY), (2, True, TINY), (2, False, MIXED)],
)
def test_greedy_decoding_equals_plain_greedy_decoding(world, whole, cfg):
    """With `decode_step` as well, for which zeros fill up heads and columns; and by a mixture of experts."""
    params, (prompts, lengths) = tiny_params(cfg), prompts_and_lengths()
    n_tokens = 10
    mesh = Mesh(np.array(jax.devices()[:world]), ("tp",))
    runs = decode_loop.generate(params, prompts, lengths, n_tokens, cfg, mesh, "xla", whole=whole).tokens
    actual = runs[0]
    assert (runs == actual).all()

    forward = jax.jit(lambda rows: transformer.forward(params, rows, cfg))
    rows = np.pad(prompts, ((0, 0), (0, n_tokens)))
    for i in range(n_tokens):
        logits = np.asarray(forward(rows))
        rows[np.arange(len(rows)), lengths + i] = logits[np.arange(len(rows)), lengths + i - 1].argmax(-1)
    expected = np.stack([row[length : length + n_tokens] for row, length in zip(rows, lengths, strict=True)])
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_kernel_of_decode_step_takes_the_example(world):
    """In bfloat16, for few prompts: what zeros fill up has the sizes that it takes."""
    cfg = transformer.Config()
    spec = transformer.whole_spec(cfg, world)
    stacked = transformer.stack(transformer.init(jax.random.key(0), cfg), cfg, spec)
    assert {name: x.shape for name, x in stacked.items()} == spec.param_shapes()
    assert refusals(call_of(spec, world, slots=200)) == []


def test_greedy_takes_the_smallest_of_equal_tokens():
    logits = np.zeros((8, 256), np.float32)
    logits[0, [70, 200]] = 1  # on two ranks
    logits[1, [130, 131]] = 1  # on one
    logits[2, 255] = 1
    logits[3] = -np.inf
    run = on_mesh(transformer.greedy, 4, P(None, "tp"), P("tp"))
    np.testing.assert_array_equal(run(logits), [70, 130, 255, 0, 0, 0, 0, 0])


def test_training_learns_and_is_deterministic():
    text = np.frombuffer(b"the quick brown fox jumps over the lazy dog; " * 20, np.uint8)
    start = train.evaluate(transformer.init(jax.random.key(0), TINY), text, TINY)
    first, second = (train.train(text, TINY, steps=25, seed=0, log=lambda _: None) for _ in range(2))
    assert train.evaluate(first, text, TINY) < start - 2
    jax.tree.map(np.testing.assert_array_equal, first, second)


def rows_to_train_on(batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(256, size=(batch, length + 1)).astype(np.int32)


@functools.cache
def plain_step_of_training(cfg):
    """Parameters, rows, and what one step makes of them on one device: loss, gradients, and new parameters."""
    params, rows = tiny_params(cfg), rows_to_train_on(4, 12)
    loss, grads = jax.jit(jax.value_and_grad(train.loss_fn), static_argnums=2)(params, rows, cfg)
    new, _ = train.adam(params, train.no_moments(params), grads, np.int32(0), np.float32(train_step.LEARNING_RATE))
    return params, rows, loss, grads, new


@pytest.mark.parametrize(
    "world, implementation, cfg",
    [
        *(pytest.param(world, "xla", TINY, marks=pytest.mark.soak) for world in (1, 2)),
        (4, "xla", TINY),
        pytest.param(2, "xla", MIXED, marks=pytest.mark.soak),
        pytest.param(2, "simulate", TINY, marks=pytest.mark.slow),
    ],
)
def test_a_tensor_parallel_step_of_training_equals_one_on_one_device(world, implementation, cfg, monkeypatch):
    monkeypatch.setattr(train_step, "TIMED_STEPS", 1)
    params, rows, want_loss, want_grads, want_new = plain_step_of_training(cfg)
    mesh = Mesh(np.array(jax.devices()[:world]), ("tp",))
    loss, grads, new, _ = train_step.take_step(params, rows, cfg, mesh, implementation)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    assert max(train_step.relative_errors(grads, want_grads).values()) < 1e-5
    assert max(train_step.relative_errors(new, want_new).values()) < 1e-5


@pytest.mark.usefixtures("no_code")
def test_a_step_of_training_has_no_collective_of_xlas():
    """Lowered for GPUs, run nowhere."""
    params, _, _ = published.load(decode_loop.WEIGHTS)
    cfg, mesh = transformer.Config(), Mesh(np.array(jax.devices("cpu")[:4]), ("tp",))
    specs = transformer.param_specs(cfg)

    def gradients(params, rows, implementation):
        return train_step.loss_and_gradients(params, rows, cfg, implementation=implementation)

    def lowered(implementation):
        run = jax.shard_map(
            lambda params, rows: gradients(params, rows, implementation),
            mesh=mesh,
            in_specs=(specs, P()),
            out_specs=(P(), specs),
        )
        traced = jax.jit(run).trace(params, jax.ShapeDtypeStruct((4, 9), jnp.int32))
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    collectives = ("stablehlo.all_gather", "stablehlo.all_reduce", "stablehlo.reduce_scatter")
    assert not [name for name in collectives if name in lowered("fused")]
    assert [name for name in collectives if name in lowered("xla")] == list(collectives)


def test_a_step_of_training_explains_what_it_cannot_do():
    for changes, message in (
        ({"weights": Path("nowhere")}, "train them with: python examples/train.py"),
        ({"batch": 6}, "--batch 6 is not a multiple of the 4 devices"),
        ({"length": 257}, "--length 257 is not from 1 to the model's context of 256"),
    ):
        defaults = {"weights": decode_loop.WEIGHTS, "dtype": "float32", "world": 4, "implementation": "auto"}
        args = Namespace(**(defaults | {"batch": 8, "length": 128} | changes))
        with pytest.raises(decode_loop.UsageError, match=message):
            train_step.run(args, decode_loop.Console())


def test_a_step_of_training_reports_a_gradient_that_differs(monkeypatch, capsys):
    args = Namespace(weights=decode_loop.WEIGHTS, dtype="float32", world=2, implementation="auto", batch=2, length=8)
    take_step = train_step.take_step

    def wrong(params, rows, cfg, mesh, implementation):
        loss, grads, new, seconds = take_step(params, rows, cfg, mesh, "xla")
        if implementation != "xla":
            grads["layers"][1]["w_o"] = 1.001 * grads["layers"][1]["w_o"]
        return loss, grads, new, seconds

    monkeypatch.setattr(train_step, "take_step", wrong)
    assert train_step.run(args, decode_loop.Console(width=200)) == 1
    assert "gradient ['layers'][1]['w_o'] differs by more than 0.0001" in capsys.readouterr().err


@pytest.mark.parametrize("cfg", [TINY, MIXED])
def test_saved_weights_load_as_they_were(cfg, tmp_path):
    path, params = tmp_path / "new" / "tiny", tiny_params(cfg)
    published.save(path, params, cfg, note="x")
    loaded, found, metadata = published.load(path)
    assert found == cfg
    assert metadata["note"] == "x"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), loaded, params)


def test_the_library_reads_a_mixture_of_experts_as_the_examples_do(tmp_path):
    published.save(tmp_path, tiny_params(MIXED), MIXED)
    stored, cfg, _ = published.load(tmp_path)
    params, tokens = jax.tree.map(jnp.asarray, stored), rows_to_train_on(2, 12)
    model = models.load(tmp_path, Mesh(np.array(jax.devices()[:2]), ("tp",)), dtype="float32")
    expected = jax.jit(lambda rows: transformer.forward(params, rows, cfg))(tokens)
    np.testing.assert_allclose(model.logits(tokens), expected, atol=1e-3)


def test_held_out_text_is_not_trained_on():
    training, held_out = (part.tobytes().decode(errors="ignore") for part in train.corpus())
    seen = {" ".join(paragraph.split()) for paragraph in training.split("\n\n")}
    # The first and the last paragraph may be halves: the cut falls between bytes.
    assert not seen & {" ".join(paragraph.split()) for paragraph in held_out.split("\n\n")[1:-1]}


def test_weights_of_the_repository_are_small_and_good():
    assert sum(path.stat().st_size for path in decode_loop.WEIGHTS.iterdir()) <= 2_000_000
    params, cfg, metadata = published.load(decode_loop.WEIGHTS)
    _, held_out = train.corpus()
    bits = train.evaluate(params, held_out, cfg, rows=16)
    assert bits < HELD_OUT_BOUND, f"{bits:.3f} bits/byte, after training {metadata['held_out_bits_per_byte']}"


def test_an_operation_of_a_shared_function_counts_once_per_call():
    def kernel(x):
        return jax.ffi.ffi_call("triton_kernel_call_ffi", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    shared = jax.jit(lambda x: kernel(kernel(x)))

    def loop(x):
        x = jax.lax.while_loop(lambda x: x[0] < 1, lambda x: shared(shared(kernel(x))), x)
        return jax.ffi.ffi_call("other", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    lowered = jax.jit(loop).lower(jnp.zeros(4)).as_text()
    assert decode_loop.count(lowered, decode_loop.KERNEL) == 5


@pytest.mark.parametrize(
    "implementation, kernels, products, collectives",
    [("fused", 6 * 4 + 2, 0, 0), (None, 6 * 4 + 2, 0, 0), ("xla", 0, 7 * 4 + 1, 8 * 4 + 2)],
)
def test_launches_of_a_decode_step(implementation, kernels, products, collectives):
    """A layer: queries, keys and values; their gather; attention; its projection; gate and up; down.

    And the vocabulary, and a gather for the likeliest token. XLA's products are one more for gate and up, and two
    for attention, which gathers its three partial results. Lowered for GPUs, run nowhere.
    """
    params, cfg, _ = published.load(decode_loop.WEIGHTS)
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("tp",))

    def decode(params, cache, first, lengths):
        return transformer.decode(params, cache, first, lengths, 5, cfg, implementation=implementation)

    length = transformer.cache_length(100, 4)
    assert length == 128
    part = jax.ShapeDtypeStruct((8, length, cfg.n_kv_heads, cfg.head_dim), jnp.float32)
    specs = (transformer.param_specs(cfg), transformer.cache_specs(cfg), P("tp"), P())
    step = jax.jit(jax.shard_map(decode, mesh=mesh, in_specs=specs, out_specs=P("tp")))
    tokens = jax.ShapeDtypeStruct((8,), jnp.int32)
    traced = step.trace(params, [(part, part)] * cfg.n_layers, tokens, tokens)
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    operations = (decode_loop.KERNEL, decode_loop.PRODUCT, decode_loop.COLLECTIVE)
    assert [decode_loop.count(lowered, each) for each in operations] == [kernels, products, collectives]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_cache_is_turned_over(world):
    """Every rank has its blocks of positions, of all heads."""
    x = np.random.default_rng(0).normal(size=(3, 40, 4, 2)).astype(np.float32)
    length = transformer.cache_length(41, world)
    run = on_mesh(lambda x: transformer.by_sequence(x, length, "tp"), world, P(None, None, "tp"), P("tp"))
    parts = np.asarray(run(x)).reshape(world, 3, length // world, 4, 2)
    for position in range(length):
        block, rest = divmod(position, transformer.BLOCK)
        of_rank = parts[block % world, :, block // world * transformer.BLOCK + rest]
        np.testing.assert_array_equal(of_rank, x[:, position] if position < 40 else np.zeros_like(x[:, 0]))


def run_demo(*args: str) -> subprocess.CompletedProcess:
    # Without the flag by which pytest may have got its devices: the demo has to see to its own.
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(EXAMPLES / "decode_loop.py"), *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, check=False)


def test_demo_runs(tmp_path):
    """Three prompts make four sequences, one per device; the simulated kernels take one step."""
    picture = tmp_path / ("a long name " * 10) / "picture.png"
    picture.parent.mkdir()
    prompts = ("--prompt", 'A "return" statement ', "--prompt", "A [bold]", "--prompt", "x")
    done = run_demo("--tokens", "2", *prompts, "--picture", str(picture))
    assert done.returncode == 0, done.stderr
    assert "4 virtual CPU devices" in done.stdout
    assert 'A "return" statement ' in done.stdout and "A [bold]" in done.stdout
    said = " ".join(done.stdout.split())
    assert "All 8 tokens of auto: xla agree with those of xla, in each of 4 runs." in said
    assert "All 8 tokens of models agree with those of xla, in each of 4 runs." in said
    assert "All 8 tokens of decode_step agree with those of xla, in each of 4 runs." in said
    assert "All 8 tokens of the simulated kernels agree with those of xla." in said
    assert "A decode step took 26 launches instead of 63: " in said
    assert f"\n{picture}\n" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_demo_rejects_a_world_that_does_not_divide_the_heads():
    done = run_demo("--world", "3")
    assert done.returncode == 2
    assert done.stderr == "error: --world 3 does not divide the model's 4 key/value heads\n"


def demo_args(**changes) -> Namespace:
    defaults = {
        "prompt": ["a", "bc"],
        "tokens": 4,
        "implementation": "auto",
        "world": None,
        "batch": None,
        "dtype": "float32",
        "weights": decode_loop.WEIGHTS,
        "picture": Path("never.png"),
    }
    return Namespace(**(defaults | changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"weights": Path("nowhere")}, "train them with: python examples/train.py"),
        ({"prompt": ["long " * 60]}, "has 300 bytes, .* context of 256"),
        ({"prompt": ["a", ""]}, "at least one character"),
        ({"tokens": 0}, "--tokens 0"),
        ({"world": 0}, "--world 0 does not divide"),
    ],
)
def test_demo_explains_what_it_cannot_do(changes, message):
    with pytest.raises(decode_loop.UsageError, match=message):
        decode_loop.run(demo_args(**changes), decode_loop.Console())


@pytest.mark.parametrize("dtype, status", [("float32", 1), ("bfloat16", 0)])
def test_demo_reports_tokens_that_differ(monkeypatch, capsys, dtype, status):
    def generate(params, prompts, lengths, n_tokens, cfg, mesh, implementation, whole=False):
        tokens = np.full((2, len(prompts), n_tokens), ord("a"))
        if implementation == "simulate":
            tokens[1, 1, 2] = tokens[:, 0, 3] = ord("b")
        return decode_loop.Result(tokens, 1.0, 1.0, "")

    monkeypatch.setattr(decode_loop, "generate", generate)
    monkeypatch.setattr(decode_loop, "generate_published", lambda folder, *args: generate(None, *args, "xla"))
    args = demo_args(dtype=dtype, implementation="simulate", world=2)
    assert decode_loop.run(args, decode_loop.Console(width=200)) == status
    out, err = capsys.readouterr()
    assert "token 2 of prompt 1 is b'a' with xla and b'b' with simulate in run 1" in (
        out if dtype == "bfloat16" else err
    )
    assert ("81.2 % of the tokens agree" in out) == (dtype == "bfloat16")


@pytest.mark.parametrize("dtype, status", [("float32", 1), ("bfloat16", 0)])
def test_demo_reports_simulated_tokens_that_differ(monkeypatch, capsys, dtype, status):
    def generate(params, prompts, lengths, n_tokens, cfg, mesh, implementation, whole=False):
        return decode_loop.Result(np.full((2, len(prompts), n_tokens), ord("a")), 1.0, 1.0, "")

    def simulate(generator, n_tokens, picture):
        tokens = np.full((2, n_tokens), ord("a"))
        tokens[1, 3] = ord("b")
        return tokens, 27

    monkeypatch.setattr(decode_loop, "generate", generate)
    monkeypatch.setattr(decode_loop, "generate_published", lambda folder, *args: generate(None, *args, "xla"))
    monkeypatch.setattr(decode_loop, "simulate", simulate)
    assert decode_loop.run(demo_args(dtype=dtype, tokens=9, world=2), decode_loop.Console(width=200)) == status
    out, err = capsys.readouterr()
    assert "token 3 of prompt 1 is b'a' with xla and b'b' with the simulated kernels in run 0" in (
        out if dtype == "bfloat16" else err
    )
    assert ("A decode step took 27 launches" in out) == (dtype == "bfloat16")


def test_custom_kernel_runs_on_a_cpu(tmp_path):
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(EXAMPLES / "custom_kernel.py")]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Fewer than two GPUs here, so the kernels of 4 ranks run in the simulator" in done.stdout
    assert "All ranks have what lax.all_gather gives: True" in done.stdout
    picture = tmp_path / "custom_kernel.png"
    assert done.stdout.endswith(f"\n{picture}\n")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_kernel_in_the_words_of_iris():
    x = jnp.arange(4.0 * 50 * 33).reshape(4 * 50, 33)
    run = on_mesh(lambda x: iris_kernel.all_gather(x, "tp", "simulate"), 4, P("tp"), P(None, "tp"))
    np.testing.assert_array_equal(run(x), np.tile(x.reshape(4, 50, 33), (1, 4, 1)))


@pytest.mark.gpu(2)
def test_custom_kernel_runs_on_gpus(tmp_path):
    command = [sys.executable, str(EXAMPLES / "custom_kernel.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "All ranks have what lax.all_gather gives: True\n"
    assert not list(tmp_path.iterdir())


def loop_of_processes(count: int) -> str:
    """The loop that the example names, for so many processes."""
    (loop,) = re.findall(r"^    (for i in .*)$", (EXAMPLES / "processes.py").read_text(), re.MULTILINE)
    loop = loop.replace("in 0 1 2 3", f"in {' '.join(map(str, range(count)))}").replace(" 4 ", f" {count} ")
    return loop.replace("python examples", f"{sys.executable} {EXAMPLES}").replace("9876", str(free_port()))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_processes(script: str, **environment: str) -> None:
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | environment
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=300, check=False)
    # Gloo of both processes writes into the same pipe, at times into the middle of each other's lines.
    started = re.findall(r"\d+ processes, .*", done.stdout)
    assert started == ["2 processes, 2 devices, mesh {'data': 1, 'model': 2}"], done.stdout + done.stderr
    (said,) = re.findall(r"loss (.*)", done.stdout)
    losses = [float(value) for value in said.split()]
    assert len(losses) == 10 and losses == sorted(losses, reverse=True)
    assert "Error" not in done.stderr


@pytest.mark.slow
def test_processes_of_a_shell_loop_on_a_cpu():
    run_processes(loop_of_processes(2), JAX_PLATFORMS="cpu")


@pytest.mark.soak
def test_processes_of_slurm_on_a_cpu():
    """With what srun tells each of its tasks."""
    loop = "for i in 0 1; do SLURM_PROCID=$i SLURM_LOCALID=$i {} {}/processes.py & done; wait"
    told = {"SLURM_JOB_ID": str(free_port()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    run_processes(loop.format(sys.executable, EXAMPLES), JAX_PLATFORMS="cpu", **told)


@pytest.mark.slow
@pytest.mark.gpu(2)
def test_processes_of_a_shell_loop_on_gpus():
    run_processes(loop_of_processes(2), JAX_PLATFORMS="cuda", XLA_PYTHON_CLIENT_MEM_FRACTION="0.3")


def test_a_layer_trains_in_eight_bits():
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("tp",))
    eight, exact = eight_bits.train(eight_bits.product, mesh), eight_bits.train(eight_bits.exact, mesh)
    assert eight[0] == pytest.approx(exact[0]) and exact[-1] < 1e-3
    assert 0.01 < eight[-1] < 1e-3 * eight[0]  # what rounding leaves
