"""Ops from logits: log-probabilities of chosen ids and the entropy, of logits the caller already holds.

Every public function here is one call of `_score`, which scores K ids per token (K = 0 for the entropy alone)
and has one custom rule. Its backward writes the gradient over a buffer that starts as the logits, so that
where the logits die there, XLA needs no second array of their size.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Integer

from ._first_order import first_derivative_only, reverse_mode_only
from ._gate import apply_gate, entropy_gate, EntropyGate, NO_ENTROPY
from ._loop import map_rows, Rows, update_rows
from ._operands import check_chunk, check_ids, check_logits, TokenOperands
from ._scoring import (
    arithmetic_dtype,
    backward_block,
    finish,
    flat,
    forward_block,
    LogprobsAndEntropy,
    operands_spec,
    prepare,
    row_gradients,
    Scoring,
    TARGETS_REMEDY,
)
from ._stats import Normalizer
from ._transform import LogitTransform
from .sharding import MeshAxes, place, Role
from .sharding._placement import tokens_first


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
    targets = check_ids("targets", targets, logits.shape[:-1], TARGETS_REMEDY)
    out = _validated_score(
        logits, targets[..., None], loss_mask, transform, ignore_index, axes, mesh, token_chunk, NO_ENTROPY
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
    targets = check_ids("targets", targets, logits.shape[:-1], TARGETS_REMEDY)
    gate = entropy_gate(entropy_coef)
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
    gate = entropy_gate(entropy_coef)
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
    return _validated_score(logits, ids, loss_mask, transform, ignore_index, axes, mesh, token_chunk, NO_ENTROPY)[0]


def _validated_score(
    logits, ids, loss_mask, transform: LogitTransform, ignore_index, axes, mesh, token_chunk, gate: EntropyGate
) -> Any:
    *batch, width = logits.shape
    check_chunk("token_chunk", token_chunk)
    roles: tuple[Role, ...] = (*tokens_first(len(batch)), "vocab")
    placement = place(axes, mesh, {"logits": (logits, roles)}, rank=len(batch))
    scoring, operands = prepare(
        placement, ids, loss_mask, transform, ignore_index, gate,
        batch=tuple(batch), width=width, dtype=arithmetic_dtype(logits), name="logits",
    )  # fmt: skip
    logits, operands = placement.vary_alike((placement.with_spec(logits, *roles), operands))
    out: Any = _score(scoring, token_chunk, reverse_mode_only(logits), operands)
    logprobs, entropies = out
    return logprobs, apply_gate(gate, entropies)


class _Residuals(NamedTuple):
    """Kept for backward besides the operands: 8 bytes a token, 12 where the entropy is differentiated."""

    logits: Float[Array, "*batch V"]
    operands: TokenOperands
    norm: Normalizer
    entropies: Float[Array, "*batch"] | None


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _score(scoring: Scoring, token_chunk: int | None, logits: jax.Array, operands: TokenOperands) -> Any:
    """(log-probabilities [*batch, K], entropies [*batch] or None) of what the caller holds, on any placement."""
    return _forward(scoring, token_chunk, logits, operands)[0]


def _score_fwd(scoring: Scoring, token_chunk: int | None, logits: jax.Array, operands: TokenOperands):
    out, norm = _forward(scoring, token_chunk, first_derivative_only(logits), operands)
    return out, _Residuals(logits, operands, norm, out[1] if scoring.entropy.differentiated else None)


def _score_bwd(scoring: Scoring, token_chunk: int | None, residuals: _Residuals, cotangents):
    # Without the barrier XLA may keep exp(z - m) of the forward for the backward, an [N, V] array in float32. Seen
    # where one chunk holds all rows, ahead of time for v5e: 11.4 GiB instead of 7.6 at the shapes of the README.
    residuals = residuals._replace(logits=lax.optimization_barrier(residuals.logits))
    dlogprobs, dentropy = jax.tree.map(first_derivative_only, cotangents)
    dentropy = dentropy if scoring.entropy.differentiated else None
    logits, ids, tokens = _specs(scoring)
    backward = scoring.placement.run(
        partial(_local_backward, scoring, token_chunk),
        (_Residuals(logits, operands_spec(scoring.placement), tokens, tokens), ids, tokens),
        logits,
    )
    return backward(residuals, dlogprobs, dentropy), None


_score.defvjp(_score_fwd, _score_bwd)


def _specs(scoring: Scoring) -> tuple[Any, Any, Any]:
    """The specs of logits, of ids and their log-probabilities, and of what has one value a token."""
    place = scoring.placement
    return place.spec(*place.batch, "vocab"), place.spec(*place.batch, None), place.spec(*place.batch)


def _forward(scoring: Scoring, token_chunk: int | None, logits: jax.Array, operands: TokenOperands) -> Any:
    logits_spec, ids, tokens = _specs(scoring)
    return scoring.placement.run(
        partial(_local_forward, scoring, token_chunk),
        (logits_spec, operands_spec(scoring.placement)),
        ((ids, tokens), tokens),
    )(logits, operands)


def _local_forward(scoring: Scoring, token_chunk: int | None, logits: jax.Array, operands: TokenOperands):
    """Statistics chunk by chunk, then one merge over the vocabulary shards."""
    *batch, width = logits.shape
    logits, operands = flat((logits, operands), len(batch))
    dtype, first = arithmetic_dtype(logits), scoring.first_id(width)
    local_ids, columns = operands.ids - first, scoring.columns(first, width)

    def block(x, rows: Rows):
        operands_, clipped = rows.take((operands, jnp.clip(local_ids, 0, width - 1)))
        stats = forward_block(scoring, x.astype(dtype), columns, operands_.inverse_temperature)
        return stats, jnp.take_along_axis(x, clipped, axis=-1)

    stats, chosen = map_rows(block, logits, token_chunk)
    held = (local_ids >= 0) & (local_ids < width)
    out = finish(scoring, stats, chosen.astype(dtype), held, operands)
    return jax.tree.map(lambda a: a.reshape(*batch, *a.shape[1:]), out)


def _local_backward(
    scoring: Scoring,
    token_chunk: int | None,
    residuals: _Residuals,
    dlogprobs: jax.Array,
    dentropy: jax.Array | None,
):
    """dlogits of the columns held here, chunk by chunk."""
    shape, dtype = residuals.logits.shape, arithmetic_dtype(residuals.logits)
    (logits, operands, norm, entropies), dlogprobs, dentropy = flat((residuals, dlogprobs, dentropy), len(shape) - 1)
    first = scoring.first_id(shape[-1])
    columns = scoring.columns(first, shape[-1])
    per_row = row_gradients(scoring, operands, norm, entropies, operands.ids - first, dlogprobs, dentropy)

    def block(x, rows: Rows):
        return backward_block(scoring, x.astype(dtype), columns, rows.take(per_row)).astype(logits.dtype)

    # The buffer starts as the logits, and each block of it is read before it is overwritten.
    return update_rows(block, logits, token_chunk).reshape(shape)
