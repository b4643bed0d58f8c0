"""The head of a language model as the ops take it: a matrix, a tied embedding, either with a low-rank adapter.

Whatever the form, the logits are a sum of products of activations and weights, Σ_i x_i W_i (+ bias), and the loops of
`_linear` know nothing else.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ._operands import floating
from .sharding import Role
from .sharding._errors import wrong


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TiedEmbedding:
    """An embedding used as the lm_head: logits = hidden_states @ embedding.T, with no transposed copy.

    Args:
        embedding: [V, D]. Its gradient is that of its use as the head; JAX adds that of the lookup.
    """

    # Any: JAX puts specs and placeholders there as it maps over trees. The ops check it.
    embedding: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LoraHead:
    """A head with a low-rank adapter: logits = hidden_states @ (lm_head + scale a b), the sum never formed.

    Args:
        lm_head: [D, V], or a `TiedEmbedding`.
        a: [D, r].
        b: [r, V], split over the vocabulary as lm_head is.
        scale: a number or a scalar array; usually alpha / r.

    References:
        Hu et al., LoRA, https://arxiv.org/abs/2106.09685, section 4.1.
    """

    lm_head: Any
    a: Any
    b: Any
    scale: Any = 1.0


Head = Float[Array, "D V"] | TiedEmbedding | LoraHead


@dataclass(frozen=True)
class Weight:
    """One of the matrices, or the bias, static part: what it is called, and what its dimensions are."""

    name: str
    roles: tuple[Role, ...]

    @property
    def vocab_dimension(self) -> int:
        return self.roles.index("vocab")

    @property
    def features_dimension(self) -> int | None:
        """The dimension that FSDP splits; None where nothing does."""
        return self.roles.index("features") if "features" in self.roles else None


BIAS = Weight("bias", ("vocab",))


def head_weights(lm_head: Any, width: int, shards: int = 1) -> tuple[list[Weight], list[jax.Array]]:
    """The matrices of a head, checked against each other and the `width` of the hidden states.

    Args:
        shards: into how many blocks along D the caller's own shard_map has split lm_head. An adapter's `a` is whole.

    Raises:
        TypeError: another type, or not floating point.
        ValueError: shapes that do not match.
    """
    if isinstance(lm_head, LoraHead):
        if isinstance(lm_head.lm_head, LoraHead):
            raise TypeError(wrong("lm_head.lm_head", "be an array [D, V] or a TiedEmbedding", "LoraHead",
                                  "Two adapters are one of both ranks: concatenate their a, and their b."))  # fmt: skip
        if not isinstance(lm_head.scale, int | float | jax.Array | np.ndarray | np.generic) or np.ndim(lm_head.scale):
            raise TypeError(wrong("lm_head.scale", "be a number or a scalar array", repr(lm_head.scale)))
        weights, arrays = head_weights(lm_head.lm_head, width, shards)
        vocab = arrays[0].shape[weights[0].vocab_dimension]
        a, b = _matrix("lm_head.a", lm_head.a, (width, "r")), _matrix("lm_head.b", lm_head.b, ("r", vocab))
        if a.shape[1] != b.shape[0]:
            raise ValueError(wrong("lm_head.b", f"have the rank of lm_head.a, ({a.shape[1]}, {vocab})", b.shape))
        return [*weights, Weight("lm_head.b", (None, "vocab"))], [*arrays, b]
    if isinstance(lm_head, TiedEmbedding):
        embedding = _matrix("lm_head.embedding", lm_head.embedding, ("V", width // shards))
        return [Weight("lm_head.embedding", ("vocab", "features"))], [embedding]
    if not isinstance(lm_head, jax.Array | np.ndarray):
        raise TypeError(wrong("lm_head", "be an array [D, V], a TiedEmbedding or a LoraHead", type(lm_head).__name__))
    remedy = "For an embedding [V, D], pass TiedEmbedding(embedding)."
    return [Weight("lm_head", ("features", "vocab"))], [_matrix("lm_head", lm_head, (width // shards, "V"), remedy)]


def head_activations(
    hidden_states: Float[Array, "*batch D"], lm_head: Any, valid: Bool[Array, "*batch"]
) -> tuple[list[jax.Array], Float[Array, "D r"] | None]:
    """The activations that the matrices of `head_weights` multiply, and what makes the second of the first.

    Rows that do not count may hold anything.
    """
    if not isinstance(lm_head, LoraHead):
        return [hidden_states], None
    a = jnp.asarray(lm_head.a)
    dtype = operand_dtype(hidden_states, a)
    clean = jnp.where(valid[..., None], hidden_states, jnp.zeros((), hidden_states.dtype)).astype(dtype)
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    scale = jnp.asarray(lm_head.scale).astype(wide)
    product = jnp.matmul(clean, a.astype(dtype), preferred_element_type=wide)
    return [hidden_states, product * scale], a.astype(wide) * scale


def operand_dtype(*arrays: Any) -> Any:
    """The dtype in which matrices are multiplied: their own where they agree, else one that holds both."""
    dtypes = {jnp.dtype(a.dtype) for a in arrays}
    if len(dtypes) == 1:
        return dtypes.pop()
    return jnp.dtype(jnp.float64 if jnp.dtype(jnp.float64) in dtypes else jnp.float32)


def check_hidden_states(hidden_states: jax.Array | np.ndarray) -> Float[Array, "..."]:
    """`hidden_states` as a JAX array.

    Raises:
        TypeError: not floating point.
        ValueError: no width, or width 0.
    """
    hidden_states = floating("hidden_states", hidden_states)
    if hidden_states.ndim == 0 or hidden_states.shape[-1] == 0:
        raise ValueError(wrong("hidden_states", "have shape (*batch, D)", hidden_states.shape))
    return hidden_states


def check_bias(bias: jax.Array | np.ndarray | None, columns: int) -> jax.Array | None:
    """`bias` as a JAX array, or None.

    Raises:
        TypeError: not floating point.
        ValueError: not of shape [V].
    """
    if bias is None:
        return None
    bias = floating("bias", bias)
    if bias.shape != (columns,):
        raise ValueError(wrong("bias", f"have one entry for each column of lm_head, ({columns},)", bias.shape))
    return bias


def _matrix(name: str, array: Any, shape: tuple[int | str, int | str], remedy: str = "") -> jax.Array:
    array = floating(name, array)
    fits = array.ndim == 2 and all(isinstance(n, str) or n == m for n, m in zip(shape, array.shape))
    if not fits or not array.size:
        raise ValueError(wrong(name, f"have shape ({shape[0]}, {shape[1]}), not empty", array.shape, remedy))
    return array
