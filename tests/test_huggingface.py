"""Hugging Face checkpoint folders in `examples/`: the loading code on small folders written here.

Parameters are held against what was written, logits against a float64 forward pass in NumPy, a mesh against none.
"""

import dataclasses
import json
import pathlib

import huggingface
import jax
import jax.numpy as jnp
import llama
import numpy as np
import pytest
import sampling
import tokenizers
from flax import nnx
from safetensors.numpy import load_file, save_file

import jaxrl_logprob as jrl


pytestmark = pytest.mark.usefixtures("quick_compilation")
AXES = llama.ModelAxes(batch="data", sequence="context", tensor="vocab")
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
CONFIG = dict(
    model_type="llama",
    hidden_act="silu",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    rope_theta=100.0,
    tie_word_embeddings=True,
    eos_token_id=2,
)
QWEN3 = CONFIG | dict(model_type="qwen3", head_dim=6, use_sliding_window=False, sliding_window=4096)
LAYER = "model.layers.1."
UP = LAYER + "mlp.up_proj.weight"

# Parameters of a layer and what Hugging Face calls them.
TENSORS = {
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def make_mesh(*shape: int) -> jax.sharding.Mesh:
    return jrl.make_mesh(dict(zip(("data", "context", "vocab"), shape, strict=True)))


def write(folder: pathlib.Path, config: dict, shards: int = 1, dtype=np.float32) -> dict[str, np.ndarray]:
    """A checkpoint of random weights; returns them."""
    rng = np.random.default_rng(0)
    width, mlp_width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim", width // config["num_attention_heads"])
    heads, kv_heads = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer = {
        "input_layernorm": [width],
        "self_attn.q_proj": [heads, width],
        "self_attn.k_proj": [kv_heads, width],
        "self_attn.v_proj": [kv_heads, width],
        "self_attn.o_proj": [width, heads],
        "post_attention_layernorm": [width],
        "mlp.gate_proj": [mlp_width, width],
        "mlp.up_proj": [mlp_width, width],
        "mlp.down_proj": [width, mlp_width],
    }
    if config["model_type"] == "qwen3":
        layer |= {"self_attn.q_norm": [head_dim], "self_attn.k_norm": [head_dim]}
    shapes = {"model.embed_tokens": [vocab, width], "model.norm": [width]}
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = [vocab, width]
    weights = {
        f"{name}.weight": (rng.normal(size=shape) / np.sqrt(shape[-1]) ** (len(shape) - 1)).astype(dtype)
        for name, shape in shapes.items()
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return weights
    place = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(weights)}
    for file in set(place.values()):
        save_file({name: array for name, array in weights.items() if place[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return weights


def logits_of(weights: dict[str, np.ndarray], config: dict, ids: np.ndarray) -> np.ndarray:
    """The forward pass of one sequence in float64, head by head, from the tensors as they are written."""
    w = {name.removesuffix(".weight"): array.astype(np.float64) for name, array in weights.items()}
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    group = config["num_attention_heads"] // config["num_key_value_heads"]

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * scale

    frequencies = np.array([config["rope_theta"] ** (-2 * i / head_dim) for i in range(head_dim // 2)])
    if scaling := config.get("rope_scaling"):
        low, high, size = (
            scaling[k] for k in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        )
        for i, frequency in enumerate(frequencies):
            wavelength = 2 * np.pi / frequency
            if wavelength > size / low:
                frequencies[i] = frequency / scaling["factor"]
            elif wavelength > size / high:
                smooth = (size / wavelength - low) / (high - low)
                frequencies[i] = (1 - smooth) * frequency / scaling["factor"] + smooth * frequency
    # Features i and i + head_dim / 2 are a complex number, which the position turns.
    turn = np.exp(1j * np.outer(np.arange(len(ids)), frequencies))

    def rope(x):
        turned = (x[:, : head_dim // 2] + 1j * x[:, head_dim // 2 :]) * turn
        return np.concatenate([turned.real, turned.imag], axis=1)

    x = w["model.embed_tokens"][ids]
    for number in range(config["num_hidden_layers"]):
        layer = {
            name: array for key, array in w.items() if (name := key.removeprefix(f"model.layers.{number}.")) != key
        }
        normed, heads = norm(x, layer["input_layernorm"]), []
        for head in range(config["num_attention_heads"]):
            rows, kv_rows = (slice(i * head_dim, (i + 1) * head_dim) for i in (head, head // group))
            query = normed @ layer["self_attn.q_proj"][rows].T
            key = normed @ layer["self_attn.k_proj"][kv_rows].T
            if config["model_type"] == "qwen3":
                query, key = norm(query, layer["self_attn.q_norm"]), norm(key, layer["self_attn.k_norm"])
            attention = np.exp(rope(query) @ rope(key).T / np.sqrt(head_dim)) * np.tri(len(ids))
            attention /= attention.sum(1, keepdims=True)
            heads.append(attention @ normed @ layer["self_attn.v_proj"][kv_rows].T)
        x = x + np.concatenate(heads, axis=1) @ layer["self_attn.o_proj"].T
        normed = norm(x, layer["post_attention_layernorm"])
        gate = normed @ layer["mlp.gate_proj"].T
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ layer["mlp.up_proj"].T)) @ layer["mlp.down_proj"].T
    head = w["model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"]
    return norm(x, w["model.norm"]) @ head.T


@jax.jit
def apply(model: llama.Llama, ids: jax.Array):
    """Logits of rows of ids, and log-probabilities and entropies through the head."""
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1])[None], ids.shape)
    hidden_states = model(ids, positions, jnp.ones_like(ids))
    return model.logits(hidden_states), model.head()(hidden_states, ids)


def check_logits(model: llama.Llama, weights: dict[str, np.ndarray], config: dict) -> None:
    """That logits and head are those of the NumPy forward pass."""
    ids = np.random.default_rng(1).integers(0, config["vocab_size"], (2, 40)).astype(np.int32)
    got, (logprobs, entropy) = apply(model, ids)
    logits = np.stack([logits_of(weights, config, row) for row in ids])
    # The largest error measured is 2e-6.
    np.testing.assert_allclose(got, logits, rtol=0, atol=5e-5)
    expected = logits - np.log(np.exp(logits).sum(2, keepdims=True))
    np.testing.assert_allclose(logprobs, np.take_along_axis(expected, ids[..., None], 2)[..., 0], rtol=0, atol=5e-5)
    np.testing.assert_allclose(entropy, -(np.exp(expected) * expected).sum(2), rtol=0, atol=5e-5)


def check_params(model: llama.Llama, weights: dict[str, np.ndarray]) -> None:
    """That every parameter is what was written, and every tensor in a parameter."""
    left = dict(weights)
    for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name, assert_same = str(path[-1]), np.testing.assert_array_equal
        assert param.dtype == jnp.float32
        if name == "embedding":
            assert_same(param, left.pop("model.embed_tokens.weight").astype(np.float32))
        elif name == "final_norm":
            assert_same(param, left.pop("model.norm.weight").astype(np.float32))
        elif name == "kernel":
            assert_same(param, left.pop("lm_head.weight").T.astype(np.float32))
        else:
            for number, layer in enumerate(np.asarray(param)):
                assert_same(layer, left.pop(f"model.layers.{number}.{TENSORS[name]}.weight").T.astype(np.float32))
    assert not left


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("config", [CONFIG, QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16], ids=["f32", "bf16", "f16"])
def test_parameters(config, tied, shards, dtype, tmp_path):
    weights = write(tmp_path, config | {"tie_word_embeddings": tied}, shards, dtype)
    check_params(huggingface.load_model(tmp_path, make_mesh(1, 1, 1), AXES), weights)


@pytest.mark.parametrize(
    "config",
    [CONFIG, CONFIG | dict(tie_word_embeddings=False, rope_scaling=LLAMA3), QWEN3 | dict(tie_word_embeddings=False)],
    ids=["llama", "llama3", "qwen3"],
)
def test_logits(config, tmp_path):
    weights = write(tmp_path, config)
    check_logits(huggingface.load_model(str(tmp_path), make_mesh(1, 1, 1), llama.ModelAxes()), weights, config)


@jax.jit
@jax.grad
def gradient(model: llama.Llama):
    """Of the mean log-probability of some tokens."""
    return apply(model, jnp.asarray(np.random.default_rng(3).integers(0, 32, (4, 8)).astype(np.int32)))[
        1
    ].logprobs.mean()


@pytest.mark.parametrize("shape", [(2, 2, 2), pytest.param((1, 1, 8), marks=pytest.mark.slow)], ids=str)
def test_mesh_changes_nothing(shape, tmp_path):
    """An untied head is split over features and vocabulary, its gradient too."""
    config = QWEN3 | dict(tie_word_embeddings=False, rope_scaling=LLAMA3)
    weights, mesh = write(tmp_path, config, shards=2), make_mesh(*shape)
    model = huggingface.load_model(tmp_path, mesh, AXES)
    check_params(model, weights)
    for param, sharding in zip(*map(jax.tree.leaves, (model, llama.param_sharding(model, mesh))), strict=True):
        assert param.sharding == sharding
    kernel = model.lm_head.kernel
    assert kernel.addressable_shards[0].data.size == kernel.size // 8
    with jax.set_mesh(mesh):
        axes = model.head().axes
        assert axes.vocab == "vocab" and axes.features == ("data", "context")
        check_logits(model, weights, config)
        got = gradient(model)
    expected = gradient(huggingface.load_model(tmp_path, make_mesh(1, 1, 1), llama.ModelAxes()))
    for x, y, param in zip(*map(jax.tree.leaves, (got, expected, model)), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)
        assert x.sharding.is_equivalent_to(param.sharding, x.ndim)


def test_sampler(tmp_path):
    """With an untied head and norms of queries and keys, decoding step by step is the full forward pass."""
    config, mesh = QWEN3 | dict(tie_word_embeddings=False), make_mesh(2, 2, 2)
    weights = write(tmp_path, config)
    prompts = np.random.default_rng(2).integers(0, 32, (4, 5)).astype(np.int32)
    with jax.set_mesh(mesh):
        model = sampling.for_sampling(huggingface.load_model(tmp_path, mesh, AXES), mesh)
        samples = sampling.sample(
            model, prompts, np.full(4, 5), jax.random.key(0), max_new_tokens=6, temperature=1.0, eos_ids=[-1]
        )
    for row, tokens, logprobs in zip(prompts, *map(np.asarray, (samples.tokens, samples.logprobs)), strict=True):
        logits = logits_of(weights, config, np.concatenate([row, tokens]))[4:-1]
        expected = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        np.testing.assert_allclose(logprobs, expected[np.arange(6), tokens], rtol=0, atol=5e-5)


def test_tensors_that_are_not_parameters(tmp_path):
    """A tied head stored a second time and the rotary angles are left where they are."""
    weights = write(tmp_path, CONFIG)
    more = {"lm_head.weight": np.zeros((32, 16), np.float32), LAYER + "self_attn.rotary_emb.inv_freq": np.zeros(2)}
    save_file(weights | more, tmp_path / "model.safetensors")
    check_params(huggingface.load_model(tmp_path, make_mesh(1, 1, 1), AXES), weights)


def test_config(tmp_path):
    """Defaults, and the places of rope_theta."""
    load = lambda **changes: (write(tmp_path, CONFIG | changes), huggingface.load_config(tmp_path))[1]
    plain = load()
    assert plain == llama.LlamaConfig(32, 16, 24, 2, 4, 2, 4, 100.0, 1e-5)
    assert load(rope_theta=None).rope_theta == 1e4
    for key in ("rope_parameters", "rope_scaling"):
        assert load(rope_theta=7, **{key: {"rope_theta": 100, "rope_type": "default"}}) == plain
        scaled = load(**{key: {"rope_theta": 5e5} | LLAMA3})
        assert scaled.rope_theta == 5e5 and scaled.rope_scaling == llama.Llama3RopeScaling(8.0, 1.0, 4.0, 32)
    assert load(rope_scaling={"type": "llama3", **{k: v for k, v in LLAMA3.items() if k != "rope_type"}}).rope_scaling
    assert load(model_type="qwen3", layer_types=["full_attention"] * 2) == dataclasses.replace(plain, qk_norm=True)
    few = {k: v for k, v in CONFIG.items() if k not in ("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings")}
    (tmp_path / "config.json").write_text(json.dumps(few))
    expected = dataclasses.replace(plain, num_kv_heads=4, rms_eps=1e-6, tied=False)
    assert huggingface.load_config(tmp_path) == expected


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "mistral"}, "model_type is 'mistral'; supported: 'llama' and 'qwen3'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type is 'linear'; supported: 'default' and 'llama3'",
        ),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"rope_parameters": {"factor": 2.0}}, "factor is 2.0; supported: None"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "lacks .*: factor"),
        ({"hidden_size": None}, "lacks hidden_size"),
    ],
)
def test_config_that_is_not_supported(changes, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises(ValueError, match=rf"config\.json.*{message}"):
        huggingface.load_config(tmp_path)


def edit(folder: pathlib.Path, **changes) -> None:
    """Replaces tensors; None removes one."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights |= changes
    save_file({name: array for name, array in weights.items() if array is not None}, file)


def cut(file: pathlib.Path, size: int) -> None:
    """Leaves the first bytes of a file; of a negative size, all but the last."""
    file.write_bytes(file.read_bytes()[:size])


def last_tensor(file: pathlib.Path) -> str:
    """The tensor whose data ends the file."""
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return max(header.keys() - {"__metadata__"}, key=lambda name: header[name]["data_offsets"])


def refused(folder: pathlib.Path, error: type[Exception] = ValueError, match: str = "") -> None:
    """Asserts that the model is not loaded from the folder, which the message has to name."""
    with pytest.raises(error, match=f"(?s){folder}.*{match}"):
        huggingface.load_model(folder, make_mesh(1, 1, 1), AXES)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda folder: edit(folder, **{UP: None}), rf"no tensor {UP}"),
        (lambda folder: edit(folder, **{UP: np.zeros((24, 8), np.float32)}), rf"{UP} has shape \(24, 8\).*\(24, 16\)"),
        (lambda folder: edit(folder, **{UP: np.zeros((16, 24), np.float32)}), rf"{UP} has shape \(16, 24\)"),
        (lambda folder: edit(folder, **{UP: np.zeros((24, 16), np.int8)}), rf"{UP} has dtype I8; supported: F32, F16"),
        (lambda folder: edit(folder, **{LAYER + "x.bias": np.zeros(8)}), rf"{LAYER}x.bias is not part of the model"),
        (lambda folder: cut(folder / "model.safetensors", 200), "cut off within its header.*model.embed_tokens.weight"),
        (lambda folder: cut(folder / "model.safetensors", 5), "cut off within its header"),
        (lambda folder: cut(folder / "model.safetensors", 0), "cut off within its header"),
        (lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs"), "no safetensors file"),
    ],
    ids=["missing", "shape", "transposed", "dtype", "unexpected", "header", "length", "empty", "pointer"],
)
def test_wrong_file(damage, message, tmp_path):
    write(tmp_path, CONFIG)
    damage(tmp_path)
    refused(tmp_path, match=message)


def test_head_that_is_not_there(tmp_path):
    write(tmp_path, CONFIG)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": False}))
    refused(tmp_path, match="no tensor lm_head.weight")


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("missing", [1, 40])
def test_file_without_its_end(shards, missing, tmp_path):
    write(tmp_path, QWEN3, shards)
    file = max(tmp_path.glob("*.safetensors"))
    name = last_tensor(file)
    cut(file, -missing)
    refused(tmp_path, match=f"{file.name}: tensor {name} is cut off")


def test_header_of_other_sizes(tmp_path):
    """A header that gives a tensor fewer bytes than its shape needs."""
    write(tmp_path, CONFIG)
    file = tmp_path / "model.safetensors"
    data, size = file.read_bytes(), int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header[UP]["data_offsets"][1] -= 4
    file.write_bytes(data[:8] + json.dumps(header, separators=(",", ":")).encode().ljust(size) + data[8 + size :])
    refused(tmp_path, match=f"{UP} has 1532 bytes")


def test_index(tmp_path):
    """Files and tensors that the index names, and that are not there."""
    weights = write(tmp_path, CONFIG, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    place = json.loads(index.read_text())["weight_map"]
    file = tmp_path / place[UP]
    content = file.read_bytes()
    cut(file, 20)
    refused(tmp_path, match=f"{file.name}: cut off within its header.*model")
    file.unlink()
    first = next(name for name in place if place[name] == file.name)
    refused(tmp_path, FileNotFoundError, f"{file.name} is not there, .* tensor {first}")
    file.write_bytes(content)
    other = next(name for name in place.values() if name != file.name)
    index.write_text(json.dumps({"weight_map": place | {UP: other}}))
    refused(tmp_path, match=f"{other} has no tensor {UP}")
    index.write_text(json.dumps({"weight_map": {name: place[name] for name in place if name != UP}}))
    refused(tmp_path, match=f"no tensor {UP}")
    index.write_text("{")
    refused(tmp_path, match="index.json is not JSON")
    index.write_text("{}")
    refused(tmp_path, match="index.json lacks weight_map")
    index.unlink()
    refused(tmp_path, FileNotFoundError, "neither model.safetensors nor model.safetensors.index.json")
    save_file(weights, tmp_path / "model.safetensors")
    check_params(huggingface.load_model(tmp_path, make_mesh(1, 1, 1), AXES), weights)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json"):
        huggingface.load_config(tmp_path)


@pytest.mark.parametrize("chat", [True, False])
def test_tokenizer_and_prompt(chat, tmp_path):
    """The tokenizer of the folder, but for padding and truncation that it was saved with."""
    text = "What is 17 + 25?\n"
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"][: 3 if chat else 1]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text * 4, "Answer: 42"], trainer)
    expected = tokenizer.encode(text).ids
    tokenizer.enable_padding(length=64)
    tokenizer.enable_truncation(3)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = huggingface.load_tokenizer(tmp_path)
    assert loaded.encode(text).ids == expected and loaded.decode(expected) == text
    prompt = huggingface.prompt(loaded, "Hi?")
    if not chat:
        assert prompt == "Question: Hi?\nAnswer:"
        return
    assert prompt == "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n"
    ids = loaded.encode(prompt).ids
    assert ids.count(1) == 2 and ids.count(2) == 1  # Special tokens are one id each.


def test_tokenizer_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="tokenizer.json"):
        huggingface.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version"')
    with pytest.raises(ValueError, match="tokenizer.json"):
        huggingface.load_tokenizer(tmp_path)


def test_eos_ids(tmp_path):
    """generation_config.json goes before config.json, where it has one; the first of several."""
    config, generation = tmp_path / "config.json", tmp_path / "generation_config.json"
    config.write_text('{"eos_token_id": 2}')
    assert huggingface.eos_ids(tmp_path) == [2]
    generation.write_text('{"eos_token_id": [0, 7]}')
    assert huggingface.eos_ids(tmp_path) == [0, 7]
    generation.write_text("{}")
    assert huggingface.eos_ids(tmp_path) == [2]
    config.write_text('{"eos_token_id": null}')
    with pytest.raises(ValueError, match="eos_token_id"):
        huggingface.eos_ids(tmp_path)
