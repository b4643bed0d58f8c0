"""Surrogate objectives: per-token losses of a log-ratio and an advantage, each as its paper has it.

    r = π / π_old of the token (or of its sequence, `RatioLevel`),  A = its advantage

A loss is minus the objective, to be minimised. Where a paper has log π, these have log r: less a constant, so that the
gradient is the same. All are functions of two arrays of one shape; options by keyword, or `functools.partial`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from ..sharding._errors import wrong
from ._ratios import bounded_exp
from ._sequences import per_token


class Surrogate(NamedTuple):
    """Per-token losses, and what the metrics need to know of them.

    Attributes:
        losses: to be aggregated.
        clipped: -1 where the ratio was clipped from below, 1 from above, and has no gradient there (CISPO: has a
            weight that was); else 0.
    """

    losses: Float[Array, "*batch"]
    clipped: Float[Array, "*batch"]


def reinforce(log_ratio: Float[Array, "*batch"], advantages: Float[Array, "*batch"]) -> Surrogate:
    """-A log r: REINFORCE, on-policy.

    References:
        Williams, 1992, https://doi.org/10.1007/BF00992696, eq. 4.
    """
    log_ratio, advantages = per_token(log_ratio=log_ratio, advantages=advantages)
    return Surrogate(-advantages * log_ratio, jnp.zeros_like(log_ratio))


def ppo_clip(
    log_ratio: Float[Array, "*batch"],
    advantages: Float[Array, "*batch"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Surrogate:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): PPO, and with it GRPO, Dr.GRPO, DAPO and GSPO.

    Args:
        clip_low, clip_high: DAPO's are 0.2 and 0.28, GSPO's 3e-4 and 4e-4 (at level "sequence").
        dual_clip: c > 1: where A < 0 the loss is at most c |A|.

    References:
        PPO, https://arxiv.org/abs/1707.06347, eq. 7; clip-higher: DAPO, https://arxiv.org/abs/2503.14476, eq. 8;
        dual clip: https://arxiv.org/abs/1912.09729, eq. 5; GSPO, https://arxiv.org/abs/2507.18071, eq. 5.

    Example:
        >>> ppo_clip(jnp.log(jnp.array([1.5, 0.5])), jnp.array([1.0, 1.0])).losses
        Array([-1.2, -0.5], dtype=float32)
    """
    log_ratio, advantages = per_token(log_ratio=log_ratio, advantages=advantages)
    _check_clips(clip_low, clip_high)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(wrong("dual_clip", "be above 1, or None", dual_clip))
    ratio = bounded_exp(log_ratio)
    unclipped, clipped = ratio * advantages, jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * advantages
    objective = jnp.minimum(unclipped, clipped)
    side = jnp.where(clipped < unclipped, jnp.sign(advantages), 0.0)
    if dual_clip is not None:
        floor = dual_clip * advantages
        binds = (advantages < 0) & (objective < floor)
        objective, side = jnp.where(binds, floor, objective), jnp.where(binds, 1.0, side)
    return Surrogate(-objective, side)


def cispo(
    log_ratio: Float[Array, "*batch"],
    advantages: Float[Array, "*batch"],
    *,
    min_ratio: float = 0.0,
    max_ratio: float = 5.0,
) -> Surrogate:
    """-sg(clip(r, min_ratio, max_ratio)) A log r: the weight is clipped, and every token has its gradient.

    The bounds are those of the ratio itself, as ScaleRL and TRL give them. MiniMax and verl give distances from 1:
    1 - ε_low and 1 + ε_high.

    References:
        MiniMax-M1, https://arxiv.org/abs/2506.13585, eq. 4 and 5; ScaleRL, https://arxiv.org/abs/2510.13786.
    """
    log_ratio, advantages = per_token(log_ratio=log_ratio, advantages=advantages)
    if not 0 <= min_ratio < max_ratio:
        raise ValueError(wrong("min_ratio, max_ratio", "be 0 <= min_ratio < max_ratio", (min_ratio, max_ratio)))
    ratio = lax.stop_gradient(bounded_exp(log_ratio))
    weight = jnp.clip(ratio, min_ratio, max_ratio)
    side = jnp.sign(ratio - weight)
    return Surrogate(-weight * advantages * log_ratio, side)


def sapo(
    log_ratio: Float[Array, "*batch"],
    advantages: Float[Array, "*batch"],
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> Surrogate:
    """-(4 / τ) σ(τ (r - 1)) A: a gate that falls off smoothly instead of a clip; τ by the sign of A.

    References:
        SAPO, https://arxiv.org/abs/2511.20347, eq. 5 and 6.
    """
    log_ratio, advantages = per_token(log_ratio=log_ratio, advantages=advantages)
    if not (temperature_positive > 0 and temperature_negative > 0):
        given = (temperature_positive, temperature_negative)
        raise ValueError(wrong("temperature_positive, temperature_negative", "be positive", given))
    temperature = jnp.where(advantages > 0, temperature_positive, temperature_negative)
    gate = 4 / temperature * jax.nn.sigmoid(temperature * (bounded_exp(log_ratio) - 1))
    return Surrogate(-gate * advantages, jnp.zeros_like(log_ratio))


def _check_clips(clip_low: float, clip_high: float) -> None:
    if not (0 <= clip_low <= 1 and clip_high >= 0):
        raise ValueError(wrong("clip_low, clip_high", "be in 0..1 and at least 0", (clip_low, clip_high)))


def outside(mask: Bool[Array, "*batch"], surrogate: Surrogate) -> Surrogate:
    """The surrogate, 0 where the token does not count."""
    return Surrogate(*(jnp.where(mask, a, 0.0) for a in surrogate))
