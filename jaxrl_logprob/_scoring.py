"""What every op does with a block of logits, wherever it came from: statistics, results, gradient.

The ops from logits read their blocks, the ops from hidden states multiply them out; all else is here, once.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from ._gate import EntropyGate
from ._operands import check_options, scored, token_operands, TokenOperands, zero_ignored_nan_outside
from ._stats import block_stats, entropy, merge_shards, Normalizer, normalizer, softmax_part, SoftmaxStats
from ._transform import LogitTransform, transform_cotangent, transform_logits
from .sharding import Placement
from .sharding._errors import wrong


# Up to this many ids per token, 1[v = y] is added by comparison, in the same pass that computes p; beyond, by a
# scatter into the block, which costs one more pass over it and no longer grows with K.
MOST_COMPARED_IDS = 8


class LogprobsAndEntropy(NamedTuple):
    """Log-probabilities of the targets and entropies, each `[*batch]`, in nats."""

    logprobs: Float[Array, "*batch"]
    entropy: Float[Array, "*batch"]


TARGETS_REMEDY = "One id for each row, already shifted: position t holds the token that position t predicts."


@dataclass(frozen=True)
class Scoring:
    """What an op must know before it is traced, besides how it loops.

    Attributes:
        padded: whether columns from `vocab_size` on are there, to be left out.
    """

    placement: Placement
    logit_softcap: float | None
    vocab_size: int
    padded: bool
    ignore_index: int
    entropy: EntropyGate

    def columns(self, first: jax.Array | int, width: int) -> Int32[Array, "1 V"] | None:
        """The ids of `width` columns from `first` on, or None where all of them exist."""
        return lax.iota(jnp.int32, width)[None, :] + first if self.padded else None

    def first_id(self, width: int) -> jax.Array | int:
        """The id of the first of the `width` columns that this shard holds."""
        vocab = self.placement.vocab
        return lax.axis_index(vocab) * width if vocab else 0


def prepare(
    placement: Placement,
    ids: jax.Array,
    loss_mask: jax.Array | None,
    transform: LogitTransform,
    ignore_index: int,
    gate: EntropyGate,
    *,
    batch: tuple[int, ...],
    width: int,
    dtype: Any,
    name: str,
) -> tuple[Scoring, TokenOperands]:
    """The static part of an op over `width` columns of the array called `name`, and its checked per-token operands."""
    check_options(transform, ignore_index)
    columns = width * placement.manual_vocab_shards
    vocab_size = columns if transform.vocab_size is None else transform.vocab_size
    if vocab_size > columns:
        raise ValueError(wrong("transform.vocab_size", f"be at most the {columns} columns of {name}", vocab_size))
    operands = token_operands(ids, loss_mask, transform, ignore_index, batch=batch, dtype=dtype, placement=placement)
    padded = vocab_size < columns
    return Scoring(placement, transform.logit_softcap, vocab_size, padded, ignore_index, gate), operands


def operands_spec(placement: Placement) -> Any:
    """The specs of `TokenOperands`."""
    tokens = placement.spec(*placement.batch)
    return TokenOperands(placement.spec(*placement.batch, None), tokens, tokens)


def forward_block(
    scoring: Scoring,
    x: Float[Array, "N V"],
    columns: Int32[Array, "1 V"] | None,
    inverse_temperature: Float[Array, " N"] | None,
) -> SoftmaxStats:
    """Statistics of a block of untransformed logits, in the dtype of all arithmetic."""
    z = transform_logits(x, columns, scoring.logit_softcap, scoring.vocab_size)
    return block_stats(z, inverse_temperature, with_entropy=scoring.entropy.wanted)


def finish(
    scoring: Scoring,
    stats: SoftmaxStats,
    chosen: Float[Array, "N K"],
    held: Bool[Array, "N K"],
    operands: TokenOperands,
) -> tuple[tuple[Float[Array, "N K"], Float[Array, " N"] | None], Normalizer]:
    """Log-probabilities and entropies, from the statistics of this shard and the untransformed logits it holds."""
    chosen = transform_logits(chosen, None, scoring.logit_softcap, scoring.vocab_size)
    stats, shifted = merge_shards(stats, chosen, held, operands.inverse_temperature, scoring.placement.vocab)
    norm = normalizer(stats)
    counted, outside = scored(operands.ids, operands.valid, scoring.ignore_index, scoring.vocab_size)
    logprobs = zero_ignored_nan_outside(shifted - norm.log_sum[:, None], counted, outside)
    entropies = jnp.where(operands.valid, entropy(stats), 0.0) if scoring.entropy.wanted else None
    return (logprobs, entropies), norm


class RowGradients(NamedTuple):
    """What the backward needs to know of each row; all O(N)."""

    valid: Bool[Array, " N"]
    inverse_temperature: Float[Array, " N"] | None
    norm: Normalizer
    entropies: Float[Array, " N"] | None
    local_ids: Int32[Array, "N K"]
    dlogprobs: Float[Array, "N K"]
    dsum: Float[Array, " N"]
    dentropy: Float[Array, " N"] | None


def row_gradients(
    scoring: Scoring,
    operands: TokenOperands,
    norm: Normalizer,
    entropies: Float[Array, " N"] | None,
    local_ids: Int32[Array, "N K"],
    dlogprobs: Float[Array, "N K"],
    dentropy: Float[Array, " N"] | None,
) -> RowGradients:
    counted, outside = scored(operands.ids, operands.valid, scoring.ignore_index, scoring.vocab_size)
    dlogprobs = zero_ignored_nan_outside(dlogprobs, counted, outside)
    dsum = jnp.sum(dlogprobs, axis=-1)
    return RowGradients(
        operands.valid, operands.inverse_temperature, norm, entropies, local_ids, dlogprobs, dsum, dentropy
    )


def backward_block(
    scoring: Scoring, x: Float[Array, "N V"], columns: Int32[Array, "1 V"] | None, rows: RowGradients
) -> Float[Array, "N V"]:
    """The gradient of a block of untransformed logits x, with p recomputed; `rows.local_ids` number its columns.

    τ dz = Σ_k dlogprobs_k 1[v = id_k]                              (chosen ids)
           - p (Σ_k dlogprobs_k + dentropy (log p + entropy))       (softmax part)
    dx   = dz dz/dx                                                 (transform)
    """
    z = transform_logits(x, columns, scoring.logit_softcap, scoring.vocab_size)
    dz = softmax_part(z, rows.norm, rows.inverse_temperature, rows.dsum, rows.entropies, rows.dentropy)
    dz = _add_at_ids(dz, rows.local_ids, rows.dlogprobs)
    if rows.inverse_temperature is not None:
        dz = dz * rows.inverse_temperature[:, None]
    dx = transform_cotangent(dz, x, columns, scoring.logit_softcap, scoring.vocab_size)
    return jnp.where(rows.valid[:, None], dx, 0.0)


def _add_at_ids(dz: jax.Array, local_ids: jax.Array, d: jax.Array) -> jax.Array:
    """dz + Σ_k d_k 1[v = id_k]; ids of other blocks are no columns here."""
    rows, width = dz.shape
    if local_ids.shape[-1] <= MOST_COMPARED_IDS:
        columns = lax.iota(jnp.int32, width)[None, :]
        for k in range(local_ids.shape[-1]):
            dz = dz + jnp.where(columns == local_ids[:, k, None], d[:, k, None], 0.0)
        return dz
    local_ids = jnp.where(local_ids < 0, width, local_ids)
    return dz.at[lax.iota(jnp.int32, rows)[:, None], local_ids].add(d, mode="drop")


def arithmetic_dtype(*arrays: jax.Array) -> Any:
    """The dtype of all arithmetic on these inputs, and of the results."""
    return jnp.dtype(jnp.float64 if any(a.dtype == jnp.float64 for a in arrays) else jnp.float32)


def flat(tree: Any, batch_rank: int) -> Any:
    """The leading batch dimensions of every array, as one."""
    return jax.tree.map(lambda a: a.reshape(math.prod(a.shape[:batch_rank]), *a.shape[batch_rank:]), tree)
