"""The oracle: every op as the textbook writes it, unsharded, in plain JAX, never optimised.

Computes in float64 where x64 is on, else in float32. Differentiates to any order and in both modes, which the
ops themselves do not, and holds arrays of size [tokens, vocabulary], which they exist to avoid. Same names and
same meaning of every argument as in `jaxrl_logprob`, without those that only say how (axes, mesh, chunks).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Integer

from ._gate import entropy_is_differentiated
from ._head import Head, LoraHead, TiedEmbedding
from ._scoring import LogprobsAndEntropy
from ._transform import LogitTransform


def token_logprobs(
    logits: Float[Array, "*batch V"],
    targets: Integer[Array, "*batch"],
    *,
    loss_mask: Bool[Array, "*batch"] | None = None,
    transform: LogitTransform = LogitTransform(),
    ignore_index: int = -100,
) -> Float[Array, "*batch"]:
    """z_y - lse."""
    kept = (targets != ignore_index) & _mask(loss_mask, targets.shape)
    logp = _log_softmax(logits, kept, transform)
    chosen = _chosen(logp, jnp.where(kept, targets, 0)[..., None], _vocab_size(logits, transform))
    return jnp.where(kept, chosen[..., 0], 0.0)


def token_logprobs_and_entropy(
    logits: Float[Array, "*batch V"],
    targets: Integer[Array, "*batch"],
    *,
    entropy_coef: ArrayLike | None = 1.0,
    loss_mask: Bool[Array, "*batch"] | None = None,
    transform: LogitTransform = LogitTransform(),
    ignore_index: int = -100,
) -> LogprobsAndEntropy:
    """Both of the other two, at the tokens whose target is not ignored."""
    kept = (targets != ignore_index) & _mask(loss_mask, targets.shape)
    return LogprobsAndEntropy(
        token_logprobs(logits, targets, loss_mask=kept, transform=transform, ignore_index=ignore_index),
        token_entropy(logits, entropy_coef=entropy_coef, loss_mask=kept, transform=transform),
    )


def token_entropy(
    logits: Float[Array, "*batch V"],
    *,
    entropy_coef: ArrayLike | None = 1.0,
    loss_mask: Bool[Array, "*batch"] | None = None,
    transform: LogitTransform = LogitTransform(),
) -> Float[Array, "*batch"]:
    """-Σ p log p, where 0 log 0 is 0."""
    kept = _mask(loss_mask, logits.shape[:-1])
    logp = _log_softmax(logits, kept, transform)
    present = logp != -jnp.inf
    terms = jnp.where(present, jnp.exp(logp) * jnp.where(present, logp, 0.0), 0.0)
    entropy = jnp.where(kept, -jnp.sum(terms, axis=-1), 0.0)
    return entropy if entropy_is_differentiated(entropy_coef) else lax.stop_gradient(entropy)


def gather_logprobs(
    logits: Float[Array, "*batch V"],
    ids: Integer[Array, "*batch K"],
    *,
    loss_mask: Bool[Array, "*batch"] | None = None,
    transform: LogitTransform = LogitTransform(),
    ignore_index: int = -100,
) -> Float[Array, "*batch K"]:
    """z_k - lse of each id k."""
    kept = (ids != ignore_index) & _mask(loss_mask, logits.shape[:-1])[..., None]
    logp = _log_softmax(logits, jnp.any(kept, axis=-1), transform)
    return jnp.where(kept, _chosen(logp, jnp.where(kept, ids, 0), _vocab_size(logits, transform)), 0.0)


def linear_token_logprobs(
    hidden_states: Float[Array, "*batch D"],
    lm_head: Head,
    targets: Integer[Array, "*batch"],
    *,
    bias: Float[Array, " V"] | None = None,
    loss_mask: Bool[Array, "*batch"] | None = None,
    transform: LogitTransform = LogitTransform(),
    ignore_index: int = -100,
) -> Float[Array, "*batch"]:
    """`token_logprobs` of hidden_states @ lm_head + bias."""
    kept = (targets != ignore_index) & _mask(loss_mask, targets.shape)
    logits = _logits(hidden_states, lm_head, bias, kept)
    return token_logprobs(logits, targets, loss_mask=kept, transform=transform, ignore_index=ignore_index)


def linear_token_logprobs_and_entropy(
    hidden_states: Float[Array, "*batch D"],
    lm_head: Head,
    targets: Integer[Array, "*batch"],
    *,
    entropy_coef: ArrayLike | None = 1.0,
    bias: Float[Array, " V"] | None = None,
    loss_mask: Bool[Array, "*batch"] | None = None,
    transform: LogitTransform = LogitTransform(),
    ignore_index: int = -100,
) -> LogprobsAndEntropy:
    """`token_logprobs_and_entropy` of hidden_states @ lm_head + bias."""
    kept = (targets != ignore_index) & _mask(loss_mask, targets.shape)
    logits = _logits(hidden_states, lm_head, bias, kept)
    return token_logprobs_and_entropy(
        logits, targets, entropy_coef=entropy_coef, loss_mask=kept, transform=transform, ignore_index=ignore_index
    )


def linear_token_entropy(
    hidden_states: Float[Array, "*batch D"],
    lm_head: Head,
    *,
    entropy_coef: ArrayLike | None = 1.0,
    bias: Float[Array, " V"] | None = None,
    loss_mask: Bool[Array, "*batch"] | None = None,
    transform: LogitTransform = LogitTransform(),
) -> Float[Array, "*batch"]:
    """`token_entropy` of hidden_states @ lm_head + bias."""
    kept = _mask(loss_mask, hidden_states.shape[:-1])
    logits = _logits(hidden_states, lm_head, bias, kept)
    return token_entropy(logits, entropy_coef=entropy_coef, loss_mask=kept, transform=transform)


def linear_gather_logprobs(
    hidden_states: Float[Array, "*batch D"],
    lm_head: Head,
    ids: Integer[Array, "*batch K"],
    *,
    bias: Float[Array, " V"] | None = None,
    loss_mask: Bool[Array, "*batch"] | None = None,
    transform: LogitTransform = LogitTransform(),
    ignore_index: int = -100,
) -> Float[Array, "*batch K"]:
    """`gather_logprobs` of hidden_states @ lm_head + bias."""
    kept = jnp.any(ids != ignore_index, axis=-1) & _mask(loss_mask, hidden_states.shape[:-1])
    logits = _logits(hidden_states, lm_head, bias, kept)
    return gather_logprobs(logits, ids, loss_mask=kept, transform=transform, ignore_index=ignore_index)


def _logits(hidden_states: jax.Array, lm_head: Head, bias: jax.Array | None, kept: jax.Array) -> jax.Array:
    """hidden_states @ lm_head + bias, in the dtype of `_log_softmax`; rows that do not count are 0."""
    dtype = jnp.float64 if jax.config.read("jax_enable_x64") else jnp.float32
    hidden_states = jnp.where(kept[..., None], hidden_states.astype(dtype), 0.0)
    logits = hidden_states @ _matrix(lm_head).astype(dtype)
    return logits if bias is None else logits + jnp.broadcast_to(bias.astype(dtype), logits.shape)


def _matrix(lm_head: Head) -> jax.Array:
    """The head as [D, V], its adapter merged."""
    if isinstance(lm_head, TiedEmbedding):
        return lm_head.embedding.T
    if isinstance(lm_head, LoraHead):
        dtype = jnp.float64 if jax.config.read("jax_enable_x64") else jnp.float32
        a, b, scale = (jnp.asarray(x).astype(dtype) for x in (lm_head.a, lm_head.b, lm_head.scale))
        return _matrix(lm_head.lm_head).astype(dtype) + scale * (a @ b)
    return lm_head


def _log_softmax(logits: jax.Array, kept: jax.Array, transform: LogitTransform) -> jax.Array:
    """log p [*batch, V] of the transformed logits. Rows that do not count and columns that do not exist are replaced
    before anything is computed: whatever they hold stays out of the gradient."""
    dtype = jnp.float64 if jax.config.read("jax_enable_x64") else jnp.float32
    exists = jnp.broadcast_to(jnp.arange(logits.shape[-1]) < _vocab_size(logits, transform), logits.shape)
    z = jnp.where(kept[..., None] & exists, logits, 0.0).astype(dtype)
    if transform.logit_softcap is not None:
        z = transform.logit_softcap * jnp.tanh(z / transform.logit_softcap)
    z = jnp.where(exists, z, -jnp.inf)
    temperature = lax.stop_gradient(jnp.asarray(transform.temperature).astype(dtype))
    z = z / jnp.broadcast_to(temperature, z.shape[:-1])[..., None]
    shifted = z - lax.stop_gradient(jnp.max(z, axis=-1, keepdims=True))
    return shifted - jnp.log(jnp.sum(jnp.exp(shifted), axis=-1, keepdims=True))


def _chosen(logp: jax.Array, ids: jax.Array, vocab_size: int) -> jax.Array:
    """log p [*batch, K] of the ids; NaN, with a NaN gradient, for ids outside [0, vocab_size)."""
    inside = (ids >= 0) & (ids < vocab_size)
    chosen = jnp.take_along_axis(logp, jnp.where(inside, ids, 0), axis=-1)
    return chosen * jnp.where(inside, 1.0, jnp.nan).astype(logp.dtype)


def _mask(loss_mask: jax.Array | None, shape: tuple[int, ...]) -> jax.Array:
    return jnp.ones(shape, bool) if loss_mask is None else loss_mask


def _vocab_size(logits: jax.Array, transform: LogitTransform) -> int:
    return logits.shape[-1] if transform.vocab_size is None else transform.vocab_size
