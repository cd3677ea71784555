"""Files and tensors: what is read where, how much of it is on the host, and what is wrong in one sentence."""

import functools
import json
import pathlib
import shutil
import tracemalloc
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from benchmarks import checkpoint
from jaxtaxfree import models
from jaxtaxfree.models import weights
from jaxtaxfree.models.quantized import widen
from tests.helpers.checkpoints import FOLDER, expected_of, mesh_of, tensors_of, write

Q, UP = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"


def load(folder: pathlib.Path, world: int = 2, **keywords: Any) -> models.Model:
    return models.load(folder, mesh_of(world), **{"dtype": np.float32} | keywords)


def refused(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Why a checkpoint is refused, before anything is on a device."""
    monkeypatch.setattr(weights.Weights, "place", lambda *_: pytest.fail("something was loaded"))
    with pytest.raises(models.ModelError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".")
    return message


def test_weights_of_each_rank():
    """Of the stacked weights each rank has its rows, or its columns, and of heads fewer than ranks a copy."""
    tensors, model = tensors_of("llama3"), load(FOLDER / "llama3", 4)
    stacked = lambda of: np.stack([tensors[f"model.layers.{i}.{of}.weight"] for i in range(2)])  # noqa: E731
    shards = lambda name: [np.asarray(x.data) for x in model.params[name].addressable_shards]  # noqa: E731
    parts = {
        "q_proj": np.split(stacked("self_attn.q_proj"), 4, 1),
        "o_proj": np.split(stacked("self_attn.o_proj"), 4, 2),
        "k_proj": np.repeat(np.split(stacked("self_attn.k_proj"), 2, 1), 2, 0),
        "attn_norm": [stacked("input_layernorm")] * 4,
        "embed": np.split(tensors["model.embed_tokens.weight"], 4, 0),
    }
    for name, expected in parts.items():
        for found, wanted in zip(shards(name), expected, strict=True):
            np.testing.assert_array_equal(found, wanted, err_msg=name)
    assert load(FOLDER / "llama3", dtype=None).dtype == ml_dtypes.bfloat16  # as config.json says


def test_experts_of_each_rank():
    tensors, model = tensors_of("mixtral"), load(FOLDER / "mixtral")
    for name, of, axis in (("gate_proj", "w1", 3), ("up_proj", "w3", 3), ("down_proj", "w2", 2)):
        names = [[f"model.layers.{i}.block_sparse_moe.experts.{e}.{of}.weight" for e in range(4)] for i in range(2)]
        whole = np.stack([[tensors[name].T for name in layer] for layer in names])
        for found, wanted in zip(model.params[name].addressable_shards, np.split(whole, 2, axis), strict=True):
            np.testing.assert_array_equal(found.data, wanted)


def test_a_vocabulary_that_ranks_do_not_divide(tmp_path, monkeypatch):
    def cut(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.embed_tokens.weight"] = np.ascontiguousarray(tensors["model.embed_tokens.weight"][:95])
        tensors["lm_head.weight"] = np.ascontiguousarray(tensors["lm_head.weight"][:95])

    mesh = jax.make_mesh((2,), ("tp",), devices=jax.devices("cpu")[:2])  # of Explicit axes
    monkeypatch.setattr(weights, "AT_A_TIME", 40 * 128)  # 20 rows of each device at a time
    told: list[tuple[int, int]] = []
    folder = write(tmp_path, "mistral", {"vocab_size": 95}, cut)
    model = models.load(folder, mesh, dtype=np.float32, progress=lambda *numbers: told.append(numbers))
    assert told[-1][0] == told[-1][1]
    expected = expected_of("mistral")
    tokens, logits = expected["tokens"][:1], expected["logits"][:1, :, :95]
    assert tokens.max() < 95
    np.testing.assert_allclose(model.logits(tokens), logits, rtol=0, atol=1e-4 * np.abs(logits).max())
    unembed = np.asarray(model.params["unembed"])
    assert unembed.shape == (96, 32) and model.config.spec.vocab == 95
    np.testing.assert_array_equal(unembed[:95], tensors_of("mistral")["lm_head.weight"][:95])
    np.testing.assert_array_equal(unembed[95], 0)


def test_gemma_3_with_images(tmp_path):
    """As it is published from 4B on: the text model under other names, and a part for images that is not read."""
    for prefix, head in (("language_model.model.", "language_model."), ("model.language_model.", "")):
        inner = json.loads((FOLDER / "gemma3" / "config.json").read_text())
        outer = {"model_type": "gemma3", "text_config": inner, "vision_config": {}, "mm_tokens_per_image": 256}
        outer["eos_token_id"] = inner.pop("eos_token_id")
        tensors = {name.replace("model.", prefix, 1): x for name, x in tensors_of("gemma3").items()}
        tensors["vision_tower.x.weight"] = np.zeros(3, np.float32)
        tensors[f"{head}lm_head.weight"] = tensors[f"{prefix}embed_tokens.weight"]
        (tmp_path / "config.json").write_text(json.dumps(outer))
        safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
        model, alone = load(tmp_path), load(FOLDER / "gemma3")
        assert model.spec == alone.spec and model.config.stop == (2,)
        for name, weight in alone.params.items():
            np.testing.assert_array_equal(model.params[name], weight)


def test_memory_of_the_host(tmp_path, monkeypatch):
    """Of 34 MB at most a few tensors of 256 KB are on the host."""
    config = json.loads((FOLDER / "llama3" / "config.json").read_text())
    config |= {"hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 24, "rope_parameters": None}
    config |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32, "vocab_size": 128}
    rng = np.random.default_rng(0)
    tensors = {"model.embed_tokens.weight": rng.standard_normal((128, 256), np.float32)}
    tensors["model.norm.weight"] = np.ones(256, np.float32)
    for i in range(24):
        for name, shape in (
            ("input_layernorm", (256,)), ("post_attention_layernorm", (256,)), ("self_attn.q_proj", (256, 256)),
            ("self_attn.k_proj", (256, 256)), ("self_attn.v_proj", (256, 256)), ("self_attn.o_proj", (256, 256)),
            ("mlp.gate_proj", (128, 256)), ("mlp.up_proj", (128, 256)), ("mlp.down_proj", (256, 128)),
        ):  # fmt: skip
            tensors[f"model.layers.{i}.{name}.weight"] = rng.standard_normal(shape, np.float32)
    (tmp_path / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setattr(weights, "AT_A_TIME", 1 << 17)
    load(tmp_path)  # what JAX keeps of its first programs is not what is asked for
    told: list[tuple[int, int]] = []
    tracemalloc.start()
    model = load(tmp_path, progress=lambda *numbers: told.append(numbers))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    total = sum(x.nbytes for x in tensors.values())
    assert total > 30e6 and most < 2e6, most
    assert told[-1] == (total, total) and [done for done, _ in told] == sorted({done for done, _ in told})
    for name in ("q_proj", "down_proj"):
        of = {"q_proj": "self_attn.q_proj", "down_proj": "mlp.down_proj"}[name]
        whole = np.stack([tensors[f"model.layers.{i}.{of}.weight"] for i in range(24)])
        np.testing.assert_array_equal(model.params[name], whole)


def _row_scales(weight: np.ndarray, kind: Any, most: float) -> tuple[np.ndarray, np.ndarray]:
    scale = np.abs(weight).max(1, keepdims=True) / most
    narrow = np.round(weight / scale) if kind == np.int8 else weight / scale
    return narrow.astype(kind), scale.astype(np.float32)


def _block_scales(weight: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    down, across = (-(-size // block) for size in weight.shape)
    scale = np.ones((down, across), np.float32)
    for i, j in np.ndindex(down, across):
        part = weight[i * block : (i + 1) * block, j * block : (j + 1) * block]
        scale[i, j] = np.abs(part).max() / 448
    wide = np.repeat(np.repeat(scale, block, 0), block, 1)[: weight.shape[0], : weight.shape[1]]
    return (weight / wide).astype(ml_dtypes.float8_e4m3fn), scale


@pytest.mark.parametrize("form", ["int8 rows", "fp8 tensor", "fp8 blocks"])
def test_eight_bits(tmp_path, form):
    """They become what they were, up to the rounding of 8 bits, and on every rank exactly number times scale."""
    block = 20  # no divisor of a weight or of a rank's part
    exact: dict[str, np.ndarray] = {}

    def narrow(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            weight = tensors[name]
            if form == "fp8 blocks":
                small, scale = _block_scales(weight, block)
                wide = np.repeat(np.repeat(scale, block, 0), block, 1)[: weight.shape[0], : weight.shape[1]]
                tensors[f"{name}_scale_inv"] = scale
            elif form == "int8 rows":
                small, scale = _row_scales(weight, np.int8, 127)
                wide = tensors[f"{name}_scale"] = scale
            else:
                scale = np.array([np.abs(weight).max() / 448], np.float32)
                small = (weight / scale).astype(ml_dtypes.float8_e4m3fn)
                wide = tensors[f"{name}_scale"] = scale
                tensors[name.replace(".weight", ".input_scale")] = scale
            tensors[name] = small
            exact[name] = small.astype(np.float32) * wide
            np.testing.assert_allclose(exact[name], weight, atol=0.04 * np.abs(weight).max())

    said: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    said |= {"weight_block_size": [block, block]}
    if form != "fp8 blocks":
        kind, strategy = ("int", "channel") if form == "int8 rows" else ("float", "tensor")
        of_weights = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False}
        said = {
            "quant_method": "compressed-tensors", "format": f"{kind}-quantized", "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": of_weights, "input_activations": {}}},
        }  # fmt: skip
    model = load(write(tmp_path, "llama3", {"quantization_config": said}, narrow), 4)
    for name, of in (("q_proj", "self_attn.q_proj"), ("down_proj", "mlp.down_proj"), ("up_proj", "mlp.up_proj")):
        whole = np.stack([exact[f"model.layers.{i}.{of}.weight"] for i in range(2)])
        np.testing.assert_array_equal(model.params[name], whole)
    keys = np.stack([exact[f"model.layers.{i}.self_attn.k_proj.weight"] for i in range(2)])
    copied = np.repeat(keys.reshape(2, 2, 16, 32), 2, 1).reshape(2, 64, 32)
    np.testing.assert_array_equal(model.params["k_proj"], copied)
    check_that_they_keep_them(tmp_path, model, "int8" if form == "int8 rows" else "float8_e4m3fn", form != "fp8 blocks")


def check_that_they_keep_them(folder: pathlib.Path, wide: models.Model, kind: str, stored: bool) -> None:
    """Matrices that lie in 8 bits are the same weights, exactly if the file has them so, and give the same logits."""
    model = load(folder, 4, weights=kind)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        values, scales = model.params[name], model.params[f"{name}_scale"]
        assert values.dtype == kind and scales.dtype == np.float32 and scales.shape == (*values.shape[:2], 1)
        found, wanted = np.asarray(values, np.float32) * np.asarray(scales), np.asarray(wide.params[name])
        np.testing.assert_allclose(found, wanted, rtol=0, atol=(0 if stored else 0.04) * np.abs(wanted).max())
    if kind == "int8" or not stored:
        found, wanted = (np.asarray(each.logits(expected_of("llama3")["tokens"])) for each in (model, wide))
        assert np.linalg.norm(found - wanted) < (1e-5 if stored else 0.15) * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("kind", "largest", "activations"),
    [("int8", 127, True), pytest.param("float8_e4m3fn", 448, False, marks=pytest.mark.soak)],
)
def test_eight_bits_on_load(kind, largest, activations, monkeypatch):
    """Of a checkpoint in 16 or 32 bits each row is divided by its largest magnitude; steps take them as prompts do."""
    monkeypatch.setattr(weights, "AT_A_TIME", 1 << 13)  # layer by layer
    model = load(FOLDER / "llama3", 4, weights=kind, quantize_activations=activations)
    tensors = tensors_of("llama3")
    for name, of in (("q_proj", "self_attn.q_proj"), ("down_proj", "mlp.down_proj")):
        whole = np.stack([tensors[f"model.layers.{i}.{of}.weight"] for i in range(2)])
        scales = np.abs(whole).max(-1, keepdims=True) / largest
        np.testing.assert_allclose(model.params[f"{name}_scale"], scales, rtol=1e-6)
        found = np.asarray(model.params[name], np.float32) * scales
        np.testing.assert_allclose(found, whole, rtol=0, atol=0.04 * np.abs(whole).max())
    expected = expected_of("llama3")
    tokens, wanted = expected["tokens"][:1], expected["logits"][:1]
    error = np.linalg.norm(np.asarray(model.logits(tokens)) - wanted) / np.linalg.norm(wanted)
    assert 1e-3 < error < 0.15
    generated = model.generate(tokens, 3)
    again = np.asarray(model.logits(np.concatenate([tokens, generated[:, :2]], 1)))
    np.testing.assert_array_equal(again[0, tokens.shape[1] - 1 :].argmax(-1), generated[0])


@pytest.mark.parametrize("activations", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_blocks_that_products_take(tmp_path, activations):
    """Of 128 x 128, none on two ranks: they lie as they are stored."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 64, "torch_dtype": "float32"}
    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    config = checkpoint.LLAMA_3_8B | sizes | {"quantization_config": said}
    rng, tensors = np.random.default_rng(0), {}
    for name, shape in checkpoint.tensors_of(config):
        tensors[name] = np.ones(shape, np.float32) if len(shape) == 1 else rng.standard_normal(shape, np.float32) / 8
        if name.endswith("_proj.weight"):
            tensors[name], tensors[f"{name}_scale_inv"] = _block_scales(tensors[name], 128)
    (tmp_path / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    model = load(tmp_path, weights="float8_e4m3fn", quantize_activations=activations)
    for name, of in (("q_proj", "self_attn.q_proj"), ("down_proj", "mlp.down_proj")):
        stored = f"model.layers.0.{of}.weight"
        np.testing.assert_array_equal(model.params[name][0], tensors[stored])
        np.testing.assert_array_equal(model.params[f"{name}_scale"][0], tensors[f"{stored}_scale_inv"])
    tokens = rng.integers(0, 64, (2, 6))
    found, wanted = (np.asarray(each.logits(tokens)) for each in (model, load(tmp_path)))
    assert np.linalg.norm(found - wanted) < (0.1 if activations else 1e-5) * np.linalg.norm(wanted)
    assert model.generate(tokens, 2).shape == (2, 2)


def test_eight_bits_that_there_are_not():
    with pytest.raises(ValueError, match="load takes weights as None or one of int8, float8_e4m3fn, not float16"):
        load(FOLDER / "llama3", weights=np.float16)
    with pytest.raises(ValueError, match="quantize_activations=True needs weights of 8 bits"):
        load(FOLDER / "llama3", quantize_activations=True)


@pytest.mark.soak
def test_weights_alone_in_eight_bits_beside_simulated_kernels():
    """Their products are those of None, and the rest is simulated."""
    model, tokens = load(FOLDER / "llama3", weights="int8"), [[1, 2, 3, 4]]
    found, wanted = (np.asarray(model.by(how).logits(tokens)) for how in ("simulate", "xla"))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_experts_keep_their_bits():
    model = load(FOLDER / "mixtral", weights="int8")
    assert model.params["gate_proj"].dtype == np.float32 and "gate_proj_scale" not in model.params
    assert model.params["o_proj"].dtype == np.int8


def test_every_number_of_eight_bits():
    for kind in (np.int8, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        numbers = np.arange(256, dtype=np.uint8).view(kind)
        np.testing.assert_array_equal(widen(numbers), numbers.astype(np.float32))


def _drop(name: str, tensors: dict[str, np.ndarray]) -> None:
    del tensors[name]


def _replace(name: str, x: np.ndarray, tensors: dict[str, np.ndarray]) -> None:
    tensors[name] = x


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (functools.partial(_drop, Q), f"{Q} is missing"),
        (functools.partial(_drop, "model.embed_tokens.weight"), "model.embed_tokens.weight is missing"),
        (functools.partial(_replace, "model.x", np.zeros(1, np.float32)), "model.x belongs to nothing in the model"),
        (
            functools.partial(_replace, "model.layers.2.mlp.up_proj.weight", np.zeros((48, 32), np.float32)),
            "model.layers.2.mlp.up_proj.weight belongs to nothing",
        ),
        (functools.partial(_replace, Q, np.zeros((65, 32), np.float32)), f"{Q} is [65, 32] and should be [64, 32]"),
        (functools.partial(_replace, UP, np.zeros((48, 32), np.int8)), f"{UP} is int8 without scales {UP}_scale or"),
        (functools.partial(_replace, UP, np.zeros((48, 32), np.int32)), f"{UP} is int32, which no weight can be"),
    ],
)
def test_tensors_that_are_not_right(tmp_path, monkeypatch, change, message):
    assert message in refused(write(tmp_path, "llama3", change=change), monkeypatch)


def test_scales_that_do_not_fit(tmp_path):
    def narrow(tensors: dict[str, np.ndarray]) -> None:
        tensors[UP] = np.zeros((48, 32), np.int8)
        tensors[f"{UP}_scale"] = np.ones((7, 3), np.float32)

    with pytest.raises(models.ModelError, match=r"scales \[7, 3\] do not fit a weight \[48, 32\] with blocks of None"):
        load(write(tmp_path, "llama3", change=narrow))


def test_files_that_are_not_right(tmp_path, monkeypatch):
    path = write(tmp_path, "llama3") / "model.safetensors"
    whole = path.read_bytes()

    def wrong(text: bytes) -> str:
        path.write_bytes(text)
        return refused(tmp_path, monkeypatch)

    assert "model.norm.weight ends 4 bytes behind its end" in wrong(whole[:-4])
    assert "cut off in its header" in wrong(whole[:100])
    assert "cut off in its header" in wrong(whole[:3])
    assert "is empty" in wrong(b"")
    assert "has a broken header" in wrong(whole[:8] + b"}" + whole[9:])
    assert "as F99, which is not supported" in wrong(whole.replace(b'"F32"', b'"F99"', 1))
    path.unlink()
    assert "has neither model.safetensors nor model.safetensors.index.json" in refused(tmp_path, monkeypatch)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin is not read: convert it to safetensors" in refused(tmp_path, monkeypatch)


def test_several_files(tmp_path, monkeypatch):
    folder = tmp_path / "qwen2"
    shutil.copytree(FOLDER / "qwen2", folder)
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    name, file = next(iter(places.items()))
    other = next(x for x in places.values() if x != file)
    index.write_text(json.dumps({"weight_map": places | {name: other}}))
    assert f"has {name} in {other}, which has not" in refused(folder, monkeypatch)
    index.write_text("{}")
    assert "has no weight_map" in refused(folder, monkeypatch)
    index.write_text(json.dumps({"weight_map": places}))
    shutil.copy(folder / file, folder / "other")
    (folder / file).unlink()
    assert f"{file} is missing" in refused(folder, monkeypatch)
    shutil.copy(folder / "other", folder / file)
    shutil.copy(folder / "other", folder / other)
    assert "and so has another file" in refused(folder, monkeypatch)
