"""Advantages of completions relative to the others of the same prompt, without a value function.

Rewards are [*prompts, G], a group a row. The first reward of a group is subtracted before anything is added up: equal
rewards give exactly 0, and a large offset costs no digits.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._operands import check_loss_mask, floating
from ..sharding._errors import wrong


def group_advantages(
    rewards: Float[Array, "*prompts G"],
    *,
    where: Bool[Array, "*prompts G"] | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Float[Array, "*prompts G"]:
    """(r - mean) / (std + eps) over each group: GRPO, DAPO, GSPO. 0 where all rewards of a group are equal.

    Args:
        rewards: [*prompts, G].
        where: True at the completions there are, of groups of several sizes; the result is 0 elsewhere.
        ddof: std divides by n - ddof: 1 as PyTorch's (TRL, verl), 0 as NumPy's.
        eps: TRL's is 1e-4, verl's 1e-6.

    References:
        DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.2.

    Example:
        >>> [round(a, 4) for a in group_advantages(jnp.array([1.0, 0.0, 0.0, 0.0]), eps=1e-4).tolist()]
        [1.4997, -0.4999, -0.4999, -0.4999]
    """
    if ddof not in (0, 1):
        raise ValueError(wrong("ddof", "be 0 or 1", ddof))
    if not eps >= 0:
        raise ValueError(wrong("eps", "be at least 0", eps))
    centred, there, count = _centred(rewards, where)
    variance = jnp.sum(jnp.square(centred), axis=-1, keepdims=True) / jnp.maximum(count - ddof, 1)
    scale = jnp.sqrt(variance) + eps
    return jnp.where(there & (scale > 0), centred / jnp.where(scale > 0, scale, 1.0), 0.0)


def centred_advantages(
    rewards: Float[Array, "*prompts G"], *, where: Bool[Array, "*prompts G"] | None = None
) -> Float[Array, "*prompts G"]:
    """r - mean over each group: Dr.GRPO, whose advantages are not divided by the standard deviation.

    References:
        https://arxiv.org/abs/2503.20783, section 3.2.
    """
    return _centred(rewards, where)[0]


def leave_one_out_advantages(
    rewards: Float[Array, "*prompts G"], *, where: Bool[Array, "*prompts G"] | None = None
) -> Float[Array, "*prompts G"]:
    """r less the mean of the others of its group: RLOO. 0 where there are no others.

    References:
        https://arxiv.org/abs/2402.14740, section 4.2; G / (G - 1) times `centred_advantages`.
    """
    centred, _, count = _centred(rewards, where)
    return centred * count / jnp.maximum(count - 1, 1)


def _centred(
    rewards, where
) -> tuple[Float[Array, "*prompts G"], Bool[Array, "*prompts G"], Float[Array, "*prompts 1"]]:
    """Rewards less the mean of their group, 0 where there are none; which there are; and how many in the group."""
    rewards = floating("rewards", rewards)
    if not rewards.ndim or not rewards.shape[-1]:
        raise ValueError(wrong("rewards", "have shape (*prompts, G), a group a row", rewards.shape))
    there = jnp.ones(rewards.shape, bool) if where is None else check_loss_mask(where, rewards.shape, "where")
    count = jnp.sum(there, axis=-1, keepdims=True).astype(rewards.dtype)
    first = jnp.take_along_axis(rewards, jnp.argmax(there, axis=-1, keepdims=True), axis=-1)
    shifted = jnp.where(there, rewards - first, 0.0)
    mean = jnp.sum(shifted, axis=-1, keepdims=True) / jnp.maximum(count, 1)
    return jnp.where(there, shifted - mean, 0.0), there, count
