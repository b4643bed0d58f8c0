"""Llama and Qwen3 checkpoints for `llama.py`, from a folder as Hugging Face lays it out.

This module owns what it takes from such a folder: `load_config(folder)` reads config.json and refuses by name what
`llama.py` does not compute; `load_model(folder, mesh, axes)` reads the safetensors files, one or several with their
index, and places each parameter straight into its sharding; `load_tokenizer`, `eos_ids` and `prompt` are for the
sampler. It is imported, not run, and needs the `examples` extra but no network. A file that is cut off or does not fit
its config.json is refused with the name of the tensor. For that, the files' headers are read here: the package
`safetensors` does not say which tensor.
"""

import json
import math
import pathlib
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float
from llama import abstract_model, Llama, Llama3RopeScaling, LlamaConfig, ModelAxes, place
from tokenizers import Tokenizer


Folder = str | pathlib.Path

# Hugging Face's names for the parameters of `llama.Llama`; those of a layer stand between "model.layers.{number}."
# and ".weight".
_MODEL_TENSORS = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "kernel": "lm_head.weight",
}
_LAYER_TENSORS = {
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
_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}


def load_config(folder: Folder) -> LlamaConfig:
    """The model's shape, from config.json; what that leaves out is as in the package `transformers`.

    Raises:
        FileNotFoundError: There is no config.json.
        ValueError: It lacks something, or asks for arithmetic that `llama.py` does not do.
    """
    path = pathlib.Path(folder) / "config.json"
    config = _Settings(path)
    config.check("model_type", None, "llama", "qwen3")
    config.check("hidden_act", "silu", "silu")
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        config.check(key, False, False)
    config.check("partial_rotary_factor", 1, 1)
    for kind in config.get("layer_types", []):
        if kind != "full_attention":
            raise ValueError(f"{path}: layer_types has {kind!r}; supported: 'full_attention'")
    heads, width = config["num_attention_heads"], config["hidden_size"]
    theta, scaling = _rope(config)
    return LlamaConfig(
        vocab_size=config["vocab_size"],
        width=width,
        mlp_width=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim", width // heads),
        rope_theta=theta,
        rms_eps=config.get("rms_norm_eps", 1e-6),
        tied=config.get("tie_word_embeddings", False),
        qk_norm=config["model_type"] == "qwen3",
        rope_scaling=scaling,
    )


class _Settings:
    """A JSON object in a file, or one within it."""

    def __init__(self, path: pathlib.Path, values: Any = None, within: str = ""):
        self.path = path
        self.values = _json(path) if values is None else values
        self.within = within
        if not isinstance(self.values, dict):
            raise ValueError(f"{path}: expected a JSON object, got {self.values!r}")

    def __getitem__(self, key: str) -> Any:
        if self.get(key) is None:
            raise ValueError(f"{self.path} lacks {self.within}{key}")
        return self.get(key)

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default where there is none or null."""
        value = self.values.get(key)
        return default if value is None else value

    def check(self, key: str, default: Any, *supported: Any) -> None:
        """Raises unless the value is one of those supported."""
        if (value := self.get(key, default)) not in supported:
            expected = " and ".join(map(repr, supported))
            raise ValueError(f"{self.path}: {self.within}{key} is {value!r}; supported: {expected}")


def _json(path: pathlib.Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def _rope(config: _Settings) -> tuple[float, Llama3RopeScaling | None]:
    """Base of the rotary angles and their scaling, where older and where newer versions of `transformers` put them."""
    values = config.get("rope_parameters", {}) | config.get("rope_scaling", {})
    if "type" in values:  # The older name.
        values = {"rope_type": values["type"]} | values
    rope = _Settings(config.path, values, "rope_parameters or rope_scaling: ")
    rope.check("rope_type", "default", "default", "llama3")
    keys = ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    llama3 = rope.get("rope_type") == "llama3"
    for key in values.keys() - {"type", "rope_type", "rope_theta", "partial_rotary_factor", *(keys if llama3 else ())}:
        rope.check(key, None, None)
    rope.check("partial_rotary_factor", 1, 1)
    theta = float(rope.get("rope_theta", config.get("rope_theta", 1e4)))
    return theta, Llama3RopeScaling(*(rope[key] for key in keys)) if llama3 else None


def load_model(folder: Folder, mesh: Mesh, axes: ModelAxes) -> Llama:
    """The model in f32, each parameter split over the mesh as `llama.param_sharding` says.

    The files may be in f32, bf16 or f16. The host holds one parameter, all layers of it, at a time.

    Raises:
        FileNotFoundError: There is no config.json, no model.safetensors nor its index, or not all files of the index.
        ValueError: Files that are cut off, lack a tensor or have one too many, of another shape or dtype.
    """
    config = load_config(folder)
    model = abstract_model(config, axes)
    tensors = _find_tensors(pathlib.Path(folder))
    parameters = [str(path[-1]) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    expected = [name for parameter in parameters for name in _names(parameter, config.num_layers)]
    for name in expected:
        if name not in tensors:
            raise ValueError(f"{folder} has no tensor {name}, which its config.json asks for")
    for name in tensors.keys() - expected:
        # Older checkpoints store the rotary angles, some a tied head a second time.
        if not name.endswith(".rotary_emb.inv_freq") and name != _MODEL_TENSORS["kernel"]:
            raise ValueError(f"{tensors[name].where} is not part of the model that config.json describes")

    def read(parameter: str, shape: tuple[int, ...]) -> Float[np.ndarray, "..."]:
        weights = np.empty(shape, np.float32)
        parts = [weights] if parameter in _MODEL_TENSORS else weights
        for name, part in zip(_names(parameter, config.num_layers), parts, strict=True):
            # safetensors hold a matrix [outputs, inputs], as PyTorch does; norms are vectors, which .T leaves alone.
            part = part if parameter == "embedding" else part.T
            part[...] = tensors[name].read(part.shape)
        return weights

    return place(model, mesh, read)


def _names(parameter: str, num_layers: int) -> list[str]:
    """The tensors that make up a parameter."""
    if parameter in _MODEL_TENSORS:
        return [_MODEL_TENSORS[parameter]]
    return [f"model.layers.{number}.{_LAYER_TENSORS[parameter]}.weight" for number in range(num_layers)]


class _Tensor(NamedTuple):
    """Where a tensor lies."""

    path: pathlib.Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def where(self) -> str:
        return f"{self.path}: tensor {self.name}"

    def read(self, shape: tuple[int, ...]) -> np.ndarray:
        """The tensor, which must have the shape. It stays on disk until it is used."""
        if self.dtype not in _DTYPES:
            raise ValueError(f"{self.where} has dtype {self.dtype}; supported: {', '.join(_DTYPES)}")
        if self.shape != shape:
            raise ValueError(f"{self.where} has shape {self.shape}; config.json asks for {shape}")
        dtype = _DTYPES[self.dtype]
        if self.end - self.start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{self.where} has {self.end - self.start} bytes, which {self.dtype} {shape} has not")
        return np.memmap(self.path, dtype, "r", self.start, shape)


def _find_tensors(folder: pathlib.Path) -> dict[str, _Tensor]:
    """All tensors of the folder by name, of whole files only."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return _header(single, _MODEL_TENSORS["embedding"])
    if not index.exists():
        raise FileNotFoundError(f"{folder} has neither {single.name} nor {index.name}")
    files, tensors = {}, {}
    for name, file in _Settings(index, _Settings(index)["weight_map"]).values.items():
        path = folder / file
        if not path.exists():
            raise FileNotFoundError(f"{path} is not there, and {index.name} says that it has the tensor {name}")
        if path not in files:
            files[path] = _header(path, name)
        if name not in files[path]:
            raise ValueError(f"{path} has no tensor {name}, and {index.name} says that it has")
        tensors[name] = files[path][name]
    return tensors


def _header(path: pathlib.Path, expected: str) -> dict[str, _Tensor]:
    """All tensors of a file: 8 bytes give the size of a JSON object, which gives their places in what follows it.

    Args:
        path: The file.
        expected: A tensor in it, for the message where no header can be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length) if 8 + length <= size else b"")
            data = 8 + length
            tensors = {
                name: _Tensor(
                    path, name, entry["dtype"], tuple(entry["shape"]), *(data + x for x in entry["data_offsets"])
                )
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValueError(
                f"{path}: cut off within its header, or no safetensors file; expected the tensor {expected} in it"
            ) from None
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
        if tensor.end > size:
            raise ValueError(f"{tensor.where} is cut off: it ends at byte {tensor.end}, and the file at {size}")
    return tensors


def load_tokenizer(folder: Folder) -> Tokenizer:
    """tokenizer.json, which neither pads nor truncates here.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It cannot be read.
    """
    path = pathlib.Path(folder) / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # The package raises no class of its own.
        raise ValueError(f"{path}: {error}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def eos_ids(folder: Folder) -> list[int]:
    """The tokens that end a completion, from generation_config.json or else config.json."""
    folder = pathlib.Path(folder)
    for path in (folder / "generation_config.json", folder / "config.json"):
        if path.exists() and (ids := _Settings(path).get("eos_token_id", [])) != []:
            return ids if isinstance(ids, list) else [ids]
    raise ValueError(f"{folder}: neither generation_config.json nor config.json has an eos_token_id")


def prompt(tokenizer: Tokenizer, message: str) -> str:
    """The text after which the model answers a user's message: a chat, where the tokenizer knows ChatML's tokens."""
    if tokenizer.token_to_id("<|im_start|>") is None:
        return f"Question: {message}\nAnswer:"
    return f"<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"
