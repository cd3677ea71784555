"""Sampling, stop tokens, text, and the commands of a shell."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxtaxfree import __main__ as program
from jaxtaxfree import models
from jaxtaxfree.models import commands, compare
from jaxtaxfree.models import model as model_module
from jaxtaxfree.models.sampling import Sampling, next_tokens
from jaxtaxfree.models.tokenizer import Tokenizer
from jaxtaxfree.target import memory_bandwidth_of
from tests.helpers.checkpoints import FOLDER, STEPS, expected_of, mesh_of, model_of

CHECKPOINT = FOLDER / "llama3"


def drawn(logits: np.ndarray, vocab: int | None = None, seeds: int = 1, **how: float) -> np.ndarray:
    """Tokens [seeds, B] of logits [B, V], whose vocabulary is sharded over two ranks."""
    sampling = Sampling(**how)

    def draw(logits: jax.Array, keys: jax.Array) -> jax.Array:
        one = lambda key: next_tokens(logits, key, ("tp",), sampling=sampling, vocab=vocab or 2 * logits.shape[1])  # noqa: E731
        return jax.lax.map(one, keys)

    draw = jax.shard_map(draw, mesh=mesh_of(2), in_specs=(P(None, "tp"), P()), out_specs=P(), check_vma=False)
    return np.asarray(jax.jit(draw)(jnp.asarray(logits, jnp.float32), jax.random.split(jax.random.key(0), seeds)))


def test_the_likeliest_token():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((5, 12)).astype(np.float32)
    logits[0] = 1.0  # the first of equal ones
    logits[1, [3, 7]] = 9.0
    np.testing.assert_array_equal(drawn(logits)[0], logits.argmax(-1))
    logits[:, 11] = 99.0  # behind the vocabulary
    np.testing.assert_array_equal(drawn(logits, vocab=11)[0], logits[:, :11].argmax(-1))
    assert drawn(logits, vocab=11, seeds=50, temperature=5.0).max() < 11


def test_drawn_tokens():
    """They come as often as they should, and none comes that top-k or top-p leaves out."""
    chances = np.array([[0.4, 0.05, 0.3, 0.05, 0.15, 0.05]])
    logits = np.log(chances)
    count = lambda **how: np.bincount(drawn(logits, seeds=2000, **how)[:, 0], minlength=6) / 2000  # noqa: E731
    np.testing.assert_allclose(count(temperature=1.0), chances[0], atol=0.04)
    hot = chances[0] ** 0.5
    np.testing.assert_allclose(count(temperature=2.0), hot / hot.sum(), atol=0.04)
    np.testing.assert_allclose(count(temperature=1.0, top_k=2), [4 / 7, 0, 3 / 7, 0, 0, 0], atol=0.04)
    # 0.4 + 0.3 is not yet 0.75, so the third stays.
    np.testing.assert_allclose(count(temperature=1.0, top_p=0.75), np.array([8, 0, 6, 0, 3, 0]) / 17, atol=0.04)
    np.testing.assert_array_equal(count(temperature=1.0, top_p=0.01), [1, 0, 0, 0, 0, 0])


def test_samplings_that_there_are_not():
    with pytest.raises(
        ValueError, match=r"temperature must not be negative, .*; top_k must be 1 .*; top_p must be above 0"
    ):
        Sampling(temperature=-1.0, top_k=0, top_p=0.0)


def test_drawing_and_stop_tokens():
    """Of one candidate the likeliest is drawn. A sequence repeats its stop token; when all have stopped, it ends."""
    model, expected = model_of("llama3"), expected_of("llama3")
    tokens, lengths, greedy = expected["tokens"], expected["lengths"], expected["greedy"]
    stop = [int(greedy[0, 3]), int(greedy[1, 1]), int(greedy[2, 6])]
    first = [min(np.flatnonzero(np.isin(row, stop))) for row in greedy]
    wanted = greedy.copy()
    for row, at in zip(wanted, first):
        row[at:] = row[at]
    how = {"temperature": 0.7, "top_k": 1}
    found = model.generate(tokens, STEPS, lengths=lengths, stop=stop, **how)
    np.testing.assert_array_equal(found, wanted)
    steps = list(model.stream(tokens, STEPS, lengths=lengths, stop=stop, sampling=Sampling(**how)))
    assert len(steps) == 1 + max(first)


@pytest.mark.parametrize("cache_dtype", [None, "int8"])
@pytest.mark.parametrize("cache", ["heads", "sequence"])
def test_a_step_takes_the_cache_over(cache, cache_dtype):
    """Keys and values are donated: where they lie is where the new ones are."""
    model = models.load(CHECKPOINT, mesh_of(2), dtype=np.float32, cache=cache, cache_dtype=cache_dtype)
    text = model._step(model.room([3], 4), Sampling()).lowered.as_text()
    assert text.count("tf.aliasing_output") + text.count("jax.buffer_donor") == (4 if cache_dtype else 2)


def test_each_step_draws_anew():
    """So hot that all tokens are alike: by one key every step would draw the same rank. A seed says which they are."""
    model, prompt = model_of("llama3"), [1, 2, 3]
    first, again, other = (model.generate([prompt], 8, temperature=1e6, seed=seed)[0] for seed in (5, 5, 6))
    logits = np.asarray(model.logits([[*prompt, *first[:-1].tolist()]]))[0, len(prompt) - 1 :]
    ranks = [int(np.sum(row > row[token])) for row, token in zip(logits, first, strict=True)]
    assert len(set(ranks)) >= 6, ranks
    np.testing.assert_array_equal(first, again)
    assert np.sum(first == other) <= 2


@pytest.mark.parametrize("cache_dtype", [None, "int8"])
@pytest.mark.parametrize("cache", ["heads", "sequence", "pages"])
def test_a_cache_that_grows(monkeypatch, cache, cache_dtype):
    """Twice, where it has not a position more than it needs; the tokens are those of a cache that does not."""
    monkeypatch.setattr(model_module, "ROOM", 1)
    monkeypatch.setattr(model_module, "BLOCK", 2)
    model = models.load(CHECKPOINT, mesh_of(2), dtype=np.float32, cache=cache, cache_dtype=cache_dtype)
    expected = expected_of("llama3")
    wanted = expected["greedy"]
    if cache_dtype:
        wanted = model.generate(expected["tokens"], STEPS, lengths=expected["lengths"])
    model.growth = 12
    found = model.generate(expected["tokens"], STEPS, lengths=expected["lengths"])
    np.testing.assert_array_equal(found, wanted)


def whole_cache(model: models.Model, steps: int) -> list[np.ndarray]:
    """Keys and values behind the checkpoint's prompts and some of its own greedy tokens: [L, sequence's tokens, K, H]
    of each sequence, in f32, of a cache in 8 bits by their scales.
    """
    expected = expected_of("llama3")
    tokens, lengths, greedy = expected["tokens"], expected["lengths"], expected["greedy"]
    room, rotation = model.room(lengths, STEPS), model._rotation(int(lengths.max()) + STEPS)
    tables = model._tables_of(lengths, STEPS)
    how = Sampling()
    padded = model_module._padded(tokens, model._bucket(tokens.shape[1]))
    of_step = model._put(tables)
    key, count = model._put(jax.random.key(0)), model._put(np.int32(1))
    read, step = (of(room, *args, how).compiled for of, args in ((model._read, (padded.shape[1],)), (model._step, ())))
    at = model._put(lengths)
    _, cache = read(model.params, model._put(padded), at, *rotation, key, of_step)
    for i in range(steps):
        token = model._put(greedy[:, i].astype(np.int32))
        _, at, count, cache = step(model.params, cache, token, at, *rotation, key, count, of_step)
    keys, values, *scales = (np.asarray(part, np.float32) for part in cache)
    if scales:
        keys, values = keys * scales[0][..., None], values * scales[1][..., None]
    found = []
    for part in (keys, values):
        if model.paged:  # of each rank its own pages, behind those of the others
            ranks = np.split(part, model.world, axis=1)
            part = np.concatenate(
                [np.stack([pages[:, row] for row in tables], 1) for pages in ranks], 2
            )  # [L, B, P, K, ..]
            part = np.moveaxis(part, 3, 2).reshape(*part.shape[:2], part.shape[3], -1, part.shape[-1])
        found.append(part)
    if not model.by_heads:  # neighbouring stretches lie on neighbouring ranks
        stretch = model_module.BLOCK
        found = [
            np.swapaxes(x.reshape(*x.shape[:3], model.world, -1, stretch, x.shape[-1]), 3, 4).reshape(x.shape)
            for x in found
        ]
    return [x[:, b, :, : length + steps] for x in found for b, length in enumerate(lengths)]


@pytest.mark.covers(1)
@pytest.mark.parametrize("cache_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("cache", ["heads", "sequence", "pages"])
def test_a_cache_of_eight_bits(monkeypatch, cache, cache_dtype):
    """What prompts and steps leave in it is what a cache in f32 has, as closely as 8 bits with a scale hold it.

    The first layer's is rounded alone. Those of later layers come of attention to rounded ones, too.
    """
    monkeypatch.setattr(model_module, "BLOCK", 4)
    load = lambda dtype: models.load(CHECKPOINT, mesh_of(2), dtype=np.float32, cache=cache, cache_dtype=dtype)  # noqa: E731
    step = 0.5 / 127 if cache_dtype == "int8" else 2.0**-4
    for found, wanted in zip(whole_cache(load(cache_dtype), 3), whole_cache(load(None), 3), strict=True):
        most = np.max(np.abs(wanted), axis=-1, keepdims=True)
        off = np.abs(found - wanted) / most
        assert 0.2 * step < off[0].max() <= 1.01 * step
        assert off.mean() < step
    model = load(cache_dtype)
    assert model.cache_dtype == np.dtype(cache_dtype)
    assert model.step_bytes(1, 100) < load(None).step_bytes(1, 100)


def test_prompts_that_are_refused():
    model = model_of("llama3")
    for tokens, steps, lengths, message in (
        ([1, 2], 1, None, r"tokens must be i32\[B, T\], not int64\[2\]"),
        ([[1.0]], 1, None, r"tokens must be i32\[B, T\], not float64"),
        ([[1, 2]], 1, [3], r"lengths must be i32\[1\] from 1 to 2, not \[3\]"),
        ([[1, 2]], 1, [0], r"lengths must be i32\[1\] from 1 to 2, not \[0\]"),
        ([[1, 288]], 1, None, "tokens must be from 0 to 287, and 288 is not"),
        ([[1, 2], [1]], 1, None, r"tokens must be i32\[B, T\]: fill up shorter rows"),
        ([[1]], 0, None, "steps must be 1 or more, and is 0"),
        ([[1]], 128, None, "129 tokens are more than max_position_embeddings=128"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(tokens, steps, lengths=lengths)
    with pytest.raises(ValueError, match="no cache='paged'"):
        models.load(CHECKPOINT, mesh_of(2), cache="paged")
    with pytest.raises(ValueError, match="load takes cache_dtype as None or one of int8, float8_e4m3fn, not bfloat16"):
        models.load(CHECKPOINT, mesh_of(2), cache_dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="load has axis_name='x', and the mesh has 'tp'"):
        models.load(CHECKPOINT, mesh_of(2), "x")
    with pytest.raises(ValueError, match="load needs an axis of the mesh"):
        models.load(CHECKPOINT, mesh_of(2), ())
    for dtype, named in ((np.int8, "int8"), ("bf16", "'bf16'"), (3, "3")):
        with pytest.raises(ValueError, match=f"load takes dtype as None or one of float32, .*, not {named}"):
            models.load(CHECKPOINT, mesh_of(2), dtype=dtype)
    with pytest.raises(ValueError, match="load takes weights as None or one of int8, float8_e4m3fn, not 'fp8'"):
        models.load(CHECKPOINT, mesh_of(2), weights="fp8")
    with pytest.raises(ValueError, match=r"stop must be several tokens, such as \(3,\), not 3"):
        model.generate([[1]], 1, stop=3)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(TypeError, match=r"generate takes steps as a whole number, not 1\.5"):
        model.generate([[1]], 1.5)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(TypeError, match=r"a sampling takes top_k as a whole number, not 1\.5"):
        model.generate([[1]], 1, top_k=1.5)  # pyrefly: ignore[bad-argument-type]


def test_bytes_of_a_step():
    """Weights and cache that a rank reads, by hand."""
    of = {name: int(np.prod(shape)) for name, shape in model_of("mistral").spec.param_shapes().items()}
    norms = of["attn_norm"] + of["mlp_norm"] + of["final_norm"]
    shared = sum(of.values()) - norms
    weights = 4 * (shared // 2 + norms + 3 * 32)  # and three rows of the embedding
    cache = 4 * 2 * 3 * 2 * 1 * 16  # f32, keys and values, sequences, layers, a head, its size
    assert model_of("mistral").step_bytes(3, 100) == weights + cache * 6  # of the window
    mixture = model_of("mixtral")
    assert mixture.step_bytes(1, 1) < mixture.step_bytes(2, 1) - 4 * 2 * 2 * 3 * 24 * 32 // 2  # two experts more
    assert memory_bandwidth_of("NVIDIA H100 80GB HBM3") == 3.35e12 and memory_bandwidth_of("cpu") is None


def test_text():
    """The tokens of a text and of a chat are those of transformers."""
    said = json.loads((CHECKPOINT / "text.json").read_text())
    tokenizer = Tokenizer(CHECKPOINT)
    assert tokenizer.encode(said["text"]) == said["ids"]
    assert tokenizer.decode(said["ids"]) == said["text"]
    assert tokenizer.chat(said["chat"]) == said["chat_ids"]
    # Characters of several tokens come when they are whole.
    text = commands._Text(tokenizer, (2,))
    parts = [text.add(token) for token in [*said["ids"], 2]]
    assert "".join(parts) + text.rest() == said["text"] and "\ufffd" not in "".join(parts)


def test_text_that_is_refused(tmp_path):
    with pytest.raises(models.ModelError, match=r"has no tokenizer\.json: give tokens by their numbers"):
        Tokenizer(FOLDER / "qwen3")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(models.ModelError, match="is no tokenizer"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((CHECKPOINT / "tokenizer.json").read_bytes())
    with pytest.raises(models.ModelError, match="has no chat template"):
        Tokenizer(tmp_path).chat([])
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(models.ModelError, match=r"refuses these messages \(roles must alternate\)"):
        Tokenizer(tmp_path).chat([])


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The program, with the model that is loaded and compiled already."""
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # devices are there
    monkeypatch.setattr(commands, "load", lambda *_, **__: model_of("llama3"))
    return program.main(list(arguments))


def ids() -> list[str]:
    expected = expected_of("llama3")
    rows = [row[:length] for row, length in zip(expected["tokens"], expected["lengths"])]
    return [text for row in rows for text in ("--ids", ",".join(map(str, row)))]


def test_generate(monkeypatch, capsys):
    """A batch, its text, and the last line."""
    options = ["--world", "2", "--tokens", str(STEPS), "--ignore-stop"]
    assert run(monkeypatch, "generate", str(CHECKPOINT), *ids(), *options) == 0
    shown = capsys.readouterr().out
    tokenizer = Tokenizer(CHECKPOINT)
    for row in expected_of("llama3")["greedy"]:
        assert tokenizer.decode(row) in shown
    last = shown.strip().splitlines()[-1]
    assert (
        "3 x 32 tokens on 2 x virtual CPU" in last and "tokens/s" in last and last.endswith("nothing fused: plain XLA.")
    )


def test_what_generate_asks_for(monkeypatch, capsys):
    """What is said of weights and the cache reaches `load`."""
    asked = {}
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(commands, "load", lambda *_, **how: asked.update(how) or model_of("llama3"))
    options = ["--world", "2", "--cache", "pages", "--weights", "int8", "--quantize-activations", "--dtype", "float16"]
    assert program.main(["generate", str(CHECKPOINT), "--ids", "1", "--tokens", "1", *options]) == 0
    capsys.readouterr()
    assert (asked["cache"], asked["weights"], asked["quantize_activations"]) == ("pages", "int8", True)
    assert asked["dtype"] == np.float16 and asked["implementation"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--ids", "1"], "nowhere has no config.json"),
        ([str(CHECKPOINT)], "there is no prompt: give --prompt, --ids or --batch"),
        ([str(CHECKPOINT), "--ids", "1,x"], "--ids takes numbers with commas between them, not '1,x'"),
        ([str(CHECKPOINT), "--ids", "1,-2"], "--ids has -2, which is no number of a token"),
        ([str(CHECKPOINT), "--ids", "1,9999999999"], "--ids has 9999999999, which is no number of a token"),
        ([str(CHECKPOINT), "--ids", "1,300"], "tokens must be from 0 to 287, and 300 is not"),
        ([str(CHECKPOINT), "--batch", "nofile"], "--batch nofile is no file"),
        ([str(CHECKPOINT), "--ids", "1", "--world", "99"], "--world 99 needs 99 devices, and JAX finds"),
        ([str(CHECKPOINT), "--ids", "1", "--top-p", "2"], "top_p must be above 0 and at most 1"),
        ([str(FOLDER / "qwen3"), "--prompt", "x"], "has no tokenizer.json: give tokens by their numbers"),
        ([str(FOLDER / "qwen4"), "--prompt", "x"], "qwen4: give that of a checkpoint as Hugging Face publishes it"),
    ],
)
def test_what_generate_refuses(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    assert program.main(["generate", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1


class _Expected:
    """In the place of transformers, what it said of the checkpoint."""

    def __init__(self, folder):
        self.change = 0.0

    def _row(self, prompt):
        return int(np.argmax(expected_of("llama3")["lengths"] == len(prompt)))

    def logits(self, prompt):
        return expected_of("llama3")["logits"][self._row(prompt)][: len(prompt)] + self.change

    def greedy(self, prompt, steps):
        return expected_of("llama3")["greedy"][self._row(prompt)][:steps]


def test_compare(monkeypatch, capsys):
    monkeypatch.setattr(compare, "_Transformers", _Expected)
    assert run(monkeypatch, "compare", str(CHECKPOINT), *ids(), "--world", "2") == 0
    shown = capsys.readouterr().out
    assert shown.count("the first 32 of 32 greedy tokens agree.") == 3 and shown.count("the same") == 12 + 5 + 9
    monkeypatch.setattr(_Expected, "logits", lambda self, prompt: 0.9 * expected_of("llama3")["logits"][0])
    monkeypatch.setattr(_Expected, "greedy", lambda self, prompt, steps: np.arange(steps))
    assert run(monkeypatch, "compare", str(CHECKPOINT), *ids(), "--world", "2") == 1
    assert "the first 0 of 32 greedy tokens agree; then" in capsys.readouterr().out


def test_compare_without_transformers(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "kernels", None)  # as the command leaves it, until the test's end
    assert run(monkeypatch, "compare", str(CHECKPOINT)) == 2
    assert "compare needs torch and transformers: pip install 'jaxtaxfree[models-test]'" in capsys.readouterr().err
