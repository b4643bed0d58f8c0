"""Ops from logits: log-probabilities of chosen ids and the entropy, of logits the caller already holds.

Every public function here is one call of `_score`, which scores K ids per token (K = 0 for the entropy alone)
and has one custom rule. Its backward writes the gradient over a buffer that starts as the logits, so that
where the logits die there, XLA needs no second array of their size.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Integer

from ._first_order import first_derivative_only, reverse_mode_only
from ._gate import entropy_is_differentiated
from ._loop import map_rows, Rows, update_rows
from ._operands import (
    check_ids,
    check_logits,
    check_options,
    scored,
    token_operands,
    TokenOperands,
    zero_ignored_nan_outside,
)
from ._stats import block_stats, entropy, merge_shards, Normalizer, normalizer, softmax_part
from ._transform import LogitTransform, transform_cotangent, transform_logits
from .sharding import MeshAxes, place, Placement
from .sharding._errors import wrong


# Up to this many ids per token, 1[v = y] is added by comparison, in the same pass that computes p; beyond, by a
# scatter into the block, which costs one more pass over it and no longer grows with K.
_MOST_COMPARED_IDS = 8


class LogprobsAndEntropy(NamedTuple):
    """Log-probabilities of the targets and entropies, each `[*batch]`, in nats."""

    logprobs: Float[Array, "*batch"]
    entropy: Float[Array, "*batch"]


def token_logprobs(
    logits: Float[Array, "*batch V"],
    targets: Integer[Array, "*batch"],
    *,
    loss_mask: Bool[Array, "*batch"] | None = None,
    transform: LogitTransform = LogitTransform(),
    ignore_index: int = -100,
    axes: MeshAxes | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    token_chunk: int | None = None,
) -> Float[Array, "*batch"]:
    r"""Log-probability of each target under the softmax of its logits.

        logprob = z_y - log Σ_v exp z_v,   z = transform(logits)

    Sharding: batch dimensions over `axes.tokens`, V over `axes.vocab`. Forward: one max of N floats and one sum
        of 2N over the vocabulary axes, N tokens on a device; backward: none. On a mesh, call it under `jax.jit`.
    Memory: for backward, the logits and 8 bytes a token. The gradient is written over the logits where they die.
    Precision: float32 arithmetic (float64 for float64 logits); the gradient is rounded once, to the logits' dtype.

    Args:
        logits: floating point, V >= 1.
        targets: ids in [0, V), already aligned with the position that predicts them.
        loss_mask: True where the token counts.
        transform: softcap, vocabulary size and temperature.
        ignore_index: a target that does not count.
        axes: which mesh axes split what; may be left out where there is one device or the axes are Explicit.
        mesh: the mesh; that of `jax.set_mesh` when None.
        token_chunk: rows in each step of the loop, rounded up to blocks of at least 8 rows and 8192 elements; changes
            memory and speed, and no bit of the result. None for a size that suits the platform.

    Returns:
        float32 (float64 for float64 logits), nats; 0 where the token does not count, NaN where a target is out
        of range, -inf where its logit is.

    Raises:
        TypeError: logits not floating point, targets not integers, loss_mask not bool.
        ValueError: shapes that do not match, `axes` that the mesh or the shapes do not allow, or several devices
            and no `axes`.

    Example:
        >>> logits = jnp.array([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
        >>> token_logprobs(logits, jnp.array([2, -100])).round(4)
        Array([-0.4076,  0.    ], dtype=float32)
    """
    logits = check_logits(logits)
    targets = check_ids("targets", targets, logits.shape[:-1], _TARGETS_REMEDY)
    out = _validated_score(
        logits, targets[..., None], loss_mask, transform, ignore_index, axes, mesh, token_chunk, _Entropy(False, False)
    )
    return out[0][..., 0]


def token_logprobs_and_entropy(
    logits: Float[Array, "*batch V"],
    targets: Integer[Array, "*batch"],
    *,
    entropy_coef: ArrayLike | None = 1.0,
    loss_mask: Bool[Array, "*batch"] | None = None,
    transform: LogitTransform = LogitTransform(),
    ignore_index: int = -100,
    axes: MeshAxes | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    token_chunk: int | None = None,
) -> LogprobsAndEntropy:
    r"""Log-probability of each target, and the entropy of the distribution it was drawn from, in one pass.

        entropy = log s - (Σ e^{z-m} (z-m)) / s,   s = Σ e^{z-m},  m = max z

    Everything else is as for `token_logprobs`, whose arguments these are, with one more float per token in the
    forward's sum over the vocabulary axes and 4 more bytes a token kept for backward.

    Args:
        entropy_coef: the coefficient your loss gives the entropy. It is not multiplied in: it decides whether the
            entropy has a gradient. None or a Python or NumPy zero returns it through `lax.stop_gradient` and
            leaves its term out of the backward; any other number, and any JAX array, keeps it.

    Returns:
        `LogprobsAndEntropy`; both 0 where the token does not count. The entropy does not depend on the target: it is
        finite where that is out of range, though the row's gradient is NaN.

    Example:
        >>> out = token_logprobs_and_entropy(jnp.array([[2.0, 0.0, 0.0]]), jnp.array([1]))
        >>> out.logprobs.round(4), out.entropy.round(4)
        (Array([-2.2395], dtype=float32), Array([0.6656], dtype=float32))
    """
    logits = check_logits(logits)
    targets = check_ids("targets", targets, logits.shape[:-1], _TARGETS_REMEDY)
    gate = _Entropy(True, entropy_is_differentiated(entropy_coef))
    logprobs, entropies = _validated_score(
        logits, targets[..., None], loss_mask, transform, ignore_index, axes, mesh, token_chunk, gate
    )
    return LogprobsAndEntropy(logprobs[..., 0], entropies)


def token_entropy(
    logits: Float[Array, "*batch V"],
    *,
    entropy_coef: ArrayLike | None = 1.0,
    loss_mask: Bool[Array, "*batch"] | None = None,
    transform: LogitTransform = LogitTransform(),
    axes: MeshAxes | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    token_chunk: int | None = None,
) -> Float[Array, "*batch"]:
    """Entropy of the softmax of each token's logits, nats; 0 where `loss_mask` is False.

    Arguments, sharding, memory and precision as for `token_logprobs_and_entropy`.

    Example:
        >>> token_entropy(jnp.array([[0.0, 0.0, -jnp.inf, -jnp.inf]])).round(4)
        Array([0.6931], dtype=float32)
    """
    logits = check_logits(logits)
    no_ids = jnp.zeros((*logits.shape[:-1], 0), jnp.int32)
    gate = _Entropy(True, entropy_is_differentiated(entropy_coef))
    return _validated_score(logits, no_ids, loss_mask, transform, -100, axes, mesh, token_chunk, gate)[1]


def gather_logprobs(
    logits: Float[Array, "*batch V"],
    ids: Integer[Array, "*batch K"],
    *,
    loss_mask: Bool[Array, "*batch"] | None = None,
    transform: LogitTransform = LogitTransform(),
    ignore_index: int = -100,
    axes: MeshAxes | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    token_chunk: int | None = None,
) -> Float[Array, "*batch K"]:
    """Log-probabilities of K ids for each token, under the softmax over the whole vocabulary.

    Arguments, sharding, memory and precision as for `token_logprobs`, with 1 + K floats a token in the forward's
    sum. An id may stand more than once; `ignore_index` leaves out one id, `loss_mask` the whole token.

    Example:
        >>> gather_logprobs(jnp.array([[1.0, 2.0, 3.0]]), jnp.array([[2, 0, -100]])).round(4)
        Array([[-0.4076, -2.4076,  0.    ]], dtype=float32)
    """
    logits = check_logits(logits)
    num_ids = jnp.shape(ids)[-1] if jnp.ndim(ids) == jnp.ndim(logits) else "K"
    remedy = "For one id per token without the last dimension, see `token_logprobs`."
    ids = check_ids("ids", ids, (*logits.shape[:-1], num_ids), remedy)
    return _validated_score(
        logits, ids, loss_mask, transform, ignore_index, axes, mesh, token_chunk, _Entropy(False, False)
    )[0]


_TARGETS_REMEDY = "One id for each row of logits, already shifted: position t holds the token that position t predicts."


class _Entropy(NamedTuple):
    wanted: bool
    differentiated: bool


@dataclass(frozen=True)
class _Static:
    """All that `_score` must know before it is traced."""

    placement: Placement
    logit_softcap: float | None
    vocab_size: int
    padded: bool
    ignore_index: int
    entropy: _Entropy
    token_chunk: int | None


def _validated_score(
    logits, ids, loss_mask, transform: LogitTransform, ignore_index, axes, mesh, token_chunk, gate: _Entropy
) -> Any:
    *batch, width = logits.shape
    check_options(transform, ignore_index, token_chunk)
    placement = place(axes, mesh, logits, name="logits", rank=len(batch))
    columns = width * placement.manual_vocab_shards
    vocab_size = columns if transform.vocab_size is None else transform.vocab_size
    if vocab_size > columns:
        raise ValueError(wrong("transform.vocab_size", f"be at most the {columns} columns of logits", vocab_size))
    operands = token_operands(
        ids, loss_mask, transform, ignore_index, batch=tuple(batch), dtype=_dtype(logits), placement=placement
    )
    logits, operands = placement.vary_alike((placement.with_spec(logits, placement.vocab_entry), operands))
    static = _Static(
        placement, transform.logit_softcap, vocab_size, vocab_size < columns, ignore_index, gate, token_chunk
    )
    out: Any = _score(static, reverse_mode_only(logits), operands)
    logprobs, entropies = out
    return logprobs, entropies if gate.differentiated or not gate.wanted else lax.stop_gradient(entropies)


class _Residuals(NamedTuple):
    """Kept for backward besides the operands: 8 bytes a token, 12 where the entropy is differentiated."""

    logits: Float[Array, "*batch V"]
    operands: TokenOperands
    norm: Normalizer
    entropies: Float[Array, "*batch"] | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _score(static: _Static, logits: jax.Array, operands: TokenOperands) -> Any:
    """(log-probabilities [*batch, K], entropies [*batch] or None) of what the caller holds, on any placement."""
    return _forward(static, logits, operands)[0]


def _score_fwd(static: _Static, logits: jax.Array, operands: TokenOperands):
    out, norm = _forward(static, first_derivative_only(logits), operands)
    return out, _Residuals(logits, operands, norm, out[1] if static.entropy.differentiated else None)


def _score_bwd(static: _Static, residuals: _Residuals, cotangents):
    # Without the barrier XLA may keep exp(z - m) of the forward for the backward, an [N, V] array in float32. Seen
    # where one chunk holds all rows, ahead of time for v5e: 11.4 GiB instead of 7.6 at the shapes of the README.
    residuals = residuals._replace(logits=lax.optimization_barrier(residuals.logits))
    dlogprobs, dentropy = jax.tree.map(first_derivative_only, cotangents)
    dentropy = dentropy if static.entropy.differentiated else None
    logits_spec, ids_spec, token_spec = _specs(static.placement)
    backward = static.placement.run(
        partial(_local_backward, static),
        (
            _Residuals(logits_spec, TokenOperands(ids_spec, token_spec, token_spec), token_spec, token_spec),
            ids_spec,
            token_spec,
        ),
        logits_spec,
    )
    return backward(residuals, dlogprobs, dentropy), None


_score.defvjp(_score_fwd, _score_bwd)


def _specs(placement: Placement) -> tuple[Any, Any, Any]:
    """The specs of logits, of ids and their log-probabilities, and of what has one value a token."""
    return placement.spec(placement.vocab_entry), placement.spec(None), placement.spec()


def _forward(static: _Static, logits: jax.Array, operands: TokenOperands) -> Any:
    logits_spec, ids_spec, token_spec = _specs(static.placement)
    return static.placement.run(
        partial(_local_forward, static),
        (logits_spec, TokenOperands(ids_spec, token_spec, token_spec)),
        ((ids_spec, token_spec), token_spec),
    )(logits, operands)


def _local_forward(static: _Static, logits: jax.Array, operands: TokenOperands):
    """Statistics chunk by chunk, then one merge over the vocabulary shards."""
    *batch, width = logits.shape
    logits, operands = _flat((logits, operands), len(batch))
    local_ids, held, columns = _locate(static, operands.ids, width)

    def block(x, rows: Rows):
        operands_, clipped = rows.take((operands, jnp.clip(local_ids, 0, width - 1)))
        z = transform_logits(x.astype(_dtype(logits)), columns, static.logit_softcap, static.vocab_size)
        chosen = jnp.take_along_axis(x, clipped, axis=-1)
        return block_stats(z, operands_.inverse_temperature, with_entropy=static.entropy.wanted), chosen

    stats, chosen = map_rows(block, logits, static.token_chunk)
    chosen = transform_logits(chosen.astype(_dtype(logits)), None, static.logit_softcap, static.vocab_size)
    stats, shifted = merge_shards(stats, chosen, held, operands.inverse_temperature, static.placement.vocab)
    norm = normalizer(stats)
    counted, outside = scored(operands.ids, operands.valid, static.ignore_index, static.vocab_size)
    logprobs = zero_ignored_nan_outside(shifted - norm.log_sum[:, None], counted, outside)
    entropies = jnp.where(operands.valid, entropy(stats), 0.0) if static.entropy.wanted else None
    return jax.tree.map(lambda a: a.reshape(*batch, *a.shape[1:]), ((logprobs, entropies), norm))


def _local_backward(static: _Static, residuals: _Residuals, dlogprobs: jax.Array, dentropy: jax.Array | None):
    """dlogits of the columns held here, from p recomputed chunk by chunk:

    τ dz = Σ_k dlogprobs_k 1[v = id_k]                              (chosen ids)
           - p (Σ_k dlogprobs_k + dentropy (log p + entropy))       (softmax part)
    dx   = dz dz/dx                                                 (transform)
    """
    shape = residuals.logits.shape
    (logits, operands, norm, entropies), dlogprobs, dentropy = _flat((residuals, dlogprobs, dentropy), len(shape) - 1)
    local_ids, _, columns = _locate(static, operands.ids, shape[-1])
    counted, outside = scored(operands.ids, operands.valid, static.ignore_index, static.vocab_size)
    dlogprobs = zero_ignored_nan_outside(dlogprobs, counted, outside)
    per_token = (operands, norm, entropies, dlogprobs, jnp.sum(dlogprobs, axis=-1), dentropy, local_ids)

    def block(x, rows: Rows):
        operands_, norm_, entropies_, dlogprobs_, dsum, dentropy_, ids = rows.take(per_token)
        x = x.astype(_dtype(logits))
        z = transform_logits(x, columns, static.logit_softcap, static.vocab_size)
        dz = softmax_part(z, norm_, operands_.inverse_temperature, dsum, entropies_, dentropy_)
        dz = _add_at_ids(dz, ids, dlogprobs_)
        if operands_.inverse_temperature is not None:
            dz = dz * operands_.inverse_temperature[:, None]
        dx = transform_cotangent(dz, x, columns, static.logit_softcap, static.vocab_size)
        return jnp.where(operands_.valid[:, None], dx, 0.0).astype(logits.dtype)

    # The buffer starts as the logits, and each block of it is read before it is overwritten.
    return update_rows(block, logits, static.token_chunk).reshape(shape)


def _dtype(logits: jax.Array):
    """The dtype of all arithmetic on logits, and of the results."""
    return logits.dtype if logits.dtype == jnp.float64 else jnp.dtype(jnp.float32)


def _flat(tree: Any, batch_rank: int) -> Any:
    """The leading batch dimensions of every array, as one."""
    return jax.tree.map(lambda a: a.reshape(math.prod(a.shape[:batch_rank]), *a.shape[batch_rank:]), tree)


def _locate(static: _Static, ids: jax.Array, width: int):
    """Ids as column numbers of this shard, whether it holds them, and the ids of its columns where some are padding."""
    vocab = static.placement.vocab
    offset = lax.axis_index(vocab) * width if vocab else 0
    local = ids - offset
    columns = lax.iota(jnp.int32, width)[None, :] + offset if static.padded else None
    return local, (local >= 0) & (local < width), columns


def _add_at_ids(dz: jax.Array, local_ids: jax.Array, d: jax.Array) -> jax.Array:
    """dz + Σ_k d_k 1[v = id_k]; ids of other shards are no columns here."""
    rows, width = dz.shape
    if local_ids.shape[-1] <= _MOST_COMPARED_IDS:
        columns = lax.iota(jnp.int32, width)[None, :]
        for k in range(local_ids.shape[-1]):
            dz = dz + jnp.where(columns == local_ids[:, k, None], d[:, k, None], 0.0)
        return dz
    local_ids = jnp.where(local_ids < 0, width, local_ids)
    return dz.at[lax.iota(jnp.int32, rows)[:, None], local_ids].add(d, mode="drop")
