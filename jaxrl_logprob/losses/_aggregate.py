"""Per-token losses to one number, by the modes of the field, with a denominator that is the whole batch's."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from ..sharding._errors import wrong
from ._sequences import kept, mask_of, per_token, Sequences


LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Aggregation:
    """How per-token losses become one number.

    With x the losses of the tokens that count, S the sequences that have such tokens, N the tokens:

        token-mean                Σ x / N
        seq-mean-token-sum        Σ_s Σ_t x / S
        seq-mean-token-mean       Σ_s (Σ_t x / N_s) / S
        seq-mean-token-sum-norm   Σ_s (Σ_t x / max_length) / S

    Args:
        mode: one of these.
        max_length: of the last mode, and needed there: a constant of the run, not of the batch.
        denominator: N or S of the whole batch, where `x` is a micro-batch of it: the losses of the micro-batches then
            add up to that of the batch, and so do their gradients. `loss_denominator` counts it. None: of `x` itself,
            over all devices.
        sequences: which sequence each token belongs to, and where the tokens lie.

    Raises:
        ValueError: another mode, or a max_length that is missing, below 1, or for another mode.
    """

    mode: LossAggMode = dataclasses.field(default="token-mean", metadata=dict(static=True))
    max_length: int | None = dataclasses.field(default=None, metadata=dict(static=True))
    denominator: ArrayLike | None = None
    sequences: Sequences = Sequences()

    def __post_init__(self):
        if self.mode not in MODES:
            raise ValueError(wrong("mode", f"be one of {', '.join(MODES)}", repr(self.mode)))
        if (self.mode == "seq-mean-token-sum-norm") != (self.max_length is not None):
            raise ValueError(
                wrong("max_length", "be given for seq-mean-token-sum-norm, and only then", self.max_length)
            )
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(wrong("max_length", "be at least 1", self.max_length))


def aggregate(
    losses: Float[Array, "*batch"],
    aggregation: Aggregation = Aggregation(),
    *,
    loss_mask: Bool[Array, "*batch"] | None = None,
) -> Float[Array, ""]:
    """Σ of the losses of tokens that count, weighted and divided as `Aggregation` says.

    0, with gradient 0, where no token counts. One sum over the devices for each of the numbers it needs.

    Args:
        losses: [*batch]; may hold anything where the mask is False.
        loss_mask: True where the token counts.

    Example:
        >>> losses = jnp.array([[4.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
        >>> mask = jnp.array([[True, False, False], [True, True, True]])
        >>> [float(aggregate(losses, Aggregation(m), loss_mask=mask)) for m in ("token-mean", "seq-mean-token-mean")]
        [1.75, 2.5]
    """
    (losses,) = per_token(losses=losses)
    mask, sequences = mask_of(loss_mask, losses.shape), aggregation.sequences
    (losses,) = kept(mask, losses)
    if aggregation.mode == "seq-mean-token-mean":
        total = jnp.sum(sequences.means(losses, mask))
    else:
        total = sequences.total(losses, mask) / (aggregation.max_length or 1)
    given = aggregation.denominator
    denominator = loss_denominator(mask, aggregation) if given is None else jnp.asarray(given, total.dtype)
    return total / jnp.where(denominator > 0, denominator, 1.0)


def loss_denominator(loss_mask: Bool[Array, "*batch"], aggregation: Aggregation = Aggregation()) -> Float[Array, ""]:
    """What `aggregate` divides by: the tokens that count, or the sequences that have any.

    Of the micro-batches of a batch, the denominators add up to that of the batch.

    Example:
        >>> float(loss_denominator(jnp.array([[True, False], [True, True], [False, False]]), Aggregation()))
        3.0
    """
    mask, sequences = mask_of(loss_mask, loss_mask.shape), aggregation.sequences
    if aggregation.mode == "token-mean":
        return sequences.count(mask)
    return jnp.sum(sequences.counts(mask) > 0, dtype=jnp.float32)
