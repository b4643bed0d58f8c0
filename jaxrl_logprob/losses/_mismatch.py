"""Importance weights for what sampled the tokens when it was not the trainer: inference engines round otherwise.

    ρ = π_old / π_sampler,  of the same weights, scored by the trainer and by the sampler

Weights are constants of the loss, whatever the log-probabilities they come from are differentiated for.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from ..sharding._errors import wrong
from ._ratios import bounded_exp
from ._sequences import kept, mask_of, per_token, Sequences


WeightLevel = Literal["token", "sequence", "sequence-mean"]
LEVELS = ("token", "sequence", "sequence-mean")


class ImportanceWeights(NamedTuple):
    """What to multiply per-token losses with.

    Attributes:
        weights: without gradient; 0 where the token does not count or was rejected.
        accepted: the loss mask without what was rejected. Averaged with this mask, a loss is of those kept; with the
            old one, rejected tokens count as 0.
        raw: ρ as it was, before truncation or rejection; 0 where the token does not count.
    """

    weights: Float[Array, "*batch"]
    accepted: Bool[Array, "*batch"]
    raw: Float[Array, "*batch"]


def truncated_importance(
    old_logprobs: Float[Array, "*batch"],
    sampler_logprobs: Float[Array, "*batch"],
    *,
    min_weight: float = 0.0,
    max_weight: float = 2.0,
    level: WeightLevel = "token",
    loss_mask: Bool[Array, "*batch"] | None = None,
    sequences: Sequences = Sequences(),
) -> ImportanceWeights:
    """TIS: min(ρ, max_weight), and at least min_weight; nothing is rejected.

    Args:
        old_logprobs: of the sampled tokens, by the trainer, before the update.
        sampler_logprobs: the same by what sampled, at the positions that predict (`segments.shift_values`).
        level: "token": of each token by itself; "sequence": the product over its sequence, at each of its tokens;
            "sequence-mean": the geometric mean over it.
        loss_mask: True where the token counts; elsewhere the inputs may hold anything.
        sequences: which sequence each token belongs to, and where the tokens lie; for the last two levels.

    References:
        https://fengyao.notion.site/off-policy-rl; Espeholt et al., https://arxiv.org/abs/1802.01561, section 4.1.

    Example:
        >>> truncated_importance(jnp.array([-0.5, 2.5, -0.2]), jnp.zeros(3), max_weight=5.0).weights
        Array([0.60653067, 5.        , 0.8187308 ], dtype=float32)
    """
    mask, raw = _ratio(old_logprobs, sampler_logprobs, level, loss_mask, sequences)
    _check_bounds(min_weight, max_weight)
    return ImportanceWeights(jnp.where(mask, jnp.clip(raw, min_weight, max_weight), 0.0), mask, raw)


def masked_importance(
    old_logprobs: Float[Array, "*batch"],
    sampler_logprobs: Float[Array, "*batch"],
    *,
    min_weight: float = 0.5,
    max_weight: float = 5.0,
    level: WeightLevel = "token",
    loss_mask: Bool[Array, "*batch"] | None = None,
    sequences: Sequences = Sequences(),
) -> ImportanceWeights:
    """MIS: ρ where it is in min_weight..max_weight, and rejected elsewhere; IcePop with the defaults.

    Arguments as for `truncated_importance`. A NaN is not rejected: it stays visible.

    References:
        IcePop: https://ringtech.notion.site/icepop, and eq. 3 of https://arxiv.org/abs/2510.18855; masked sequences:
        https://yingru.notion.site/When-Speed-Kills-Stability-271211a558b7808d8b12d403fd15edda.
    """
    mask, raw = _ratio(old_logprobs, sampler_logprobs, level, loss_mask, sequences)
    _check_bounds(min_weight, max_weight)
    accepted = mask & ~((raw < min_weight) | (raw > max_weight))
    return ImportanceWeights(jnp.where(accepted, raw, 0.0), accepted, raw)


def effective_sample_size(
    weights: Float[Array, "*batch"],
    *,
    loss_mask: Bool[Array, "*batch"] | None = None,
    sequences: Sequences = Sequences(),
) -> Float[Array, ""]:
    """(Σ w)² / (N Σ w²) over the N tokens that count: 1 where weights are equal, 1 / N where one has all; 0 of none.

    References:
        Kish, 1965; Kong, 1992.
    """
    (weights,) = per_token(weights=weights)
    mask = mask_of(loss_mask, weights.shape)
    (weights,) = kept(mask, weights)
    total, squares = sequences.total(weights, mask), sequences.total(jnp.square(weights), mask)
    scale = sequences.count(mask) * squares
    return jnp.square(total) / jnp.where(scale > 0, scale, 1.0)


def _ratio(old_logprobs, sampler_logprobs, level, loss_mask, sequences) -> tuple[Array, Array]:
    """The mask and ρ at this level."""
    if level not in LEVELS:
        raise ValueError(wrong("level", f"be one of {', '.join(LEVELS)}", repr(level)))
    old_logprobs, sampler_logprobs = per_token(old_logprobs=old_logprobs, sampler_logprobs=sampler_logprobs)
    mask = mask_of(loss_mask, old_logprobs.shape)
    (log_ratio,) = kept(mask, lax.stop_gradient(old_logprobs - sampler_logprobs))
    if level != "token":
        of_sequence = sequences.sums if level == "sequence" else sequences.means
        log_ratio = sequences.spread(of_sequence(log_ratio, mask), log_ratio)
    return mask, jnp.where(mask, bounded_exp(log_ratio), 0.0)


def _check_bounds(min_weight: float, max_weight: float) -> None:
    if not 0 <= min_weight < max_weight:
        raise ValueError(wrong("min_weight, max_weight", "be 0 <= min_weight < max_weight", (min_weight, max_weight)))
