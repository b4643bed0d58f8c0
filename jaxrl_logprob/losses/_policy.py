"""The loss of an actor: an objective of its log-ratios, aggregated, with an entropy bonus."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from .._gate import entropy_is_differentiated
from ._aggregate import aggregate, Aggregation
from ._objectives import outside, ppo_clip, Surrogate
from ._ratios import log_ratio_at, RatioLevel
from ._sequences import kept, mask_of, per_token


class TokenStats(NamedTuple):
    """What `policy_metrics` needs to know of each token; without gradient, 0 where the token does not count.

    Attributes:
        log_ratio: log π / π_old of the token itself, as it is: not bounded.
        clipped: as `Surrogate` has it.
        entropy: None where none was given.
        loss_mask: True where the token counts.
    """

    log_ratio: Float[Array, "*batch"]
    clipped: Float[Array, "*batch"]
    entropy: Float[Array, "*batch"] | None
    loss_mask: Bool[Array, "*batch"]


class PolicyLoss(NamedTuple):
    """The loss, a scalar to be differentiated, and what there is to know of the tokens."""

    loss: Float[Array, ""]
    tokens: TokenStats


def policy_loss(
    logprobs: Float[Array, "*batch"],
    old_logprobs: Float[Array, "*batch"],
    advantages: Float[Array, "*batch"],
    *,
    loss_mask: Bool[Array, "*batch"] | None = None,
    objective: Callable[[Array, Array], Surrogate] = ppo_clip,
    level: RatioLevel = "token",
    weights: Float[Array, "*batch"] | None = None,
    entropy: Float[Array, "*batch"] | None = None,
    entropy_coef: ArrayLike | None = 0.0,
    aggregation: Aggregation = Aggregation(),
) -> PolicyLoss:
    """aggregate(weights · objective(log π / π_old, A) - entropy_coef · entropy).

    Whatever arrays hold where the mask is False, NaN too, is not looked at; a NaN at a token that counts makes the loss
    NaN. No token that counts: loss 0, gradient 0. Nothing is broadcast: all arrays have one shape.

    Args:
        logprobs: of the tokens, at the positions that predict them, by the policy that learns.
        old_logprobs: the same before the update; no gradient goes there.
        advantages: of each token; those of sequences by `segments.spread_segments`.
        loss_mask: True where the token counts.
        objective: `ppo_clip`, `cispo`, `sapo`, `reinforce`, or one of your own of (log_ratio, advantages); options by
            `functools.partial`.
        level: whose ratio it is: "token", "sequence" (GSPO) or "sequence-token" (GSPO-token).
        weights: importance weights of a sampler that is not π_old: `truncated_importance`, `masked_importance`.
        entropy: of each token. A token's counts as its loss does.
        entropy_coef: static 0 or None leaves the entropy out of the loss; a traced schedule always has it in.
        aggregation: how the tokens' losses become one, and which sequences they belong to.

    Returns:
        The loss, and the tokens' part in it for `policy_metrics`.

    Raises:
        TypeError, ValueError: dtypes, shapes and options that do not fit; entropy_coef without entropy.

    Example:
        >>> out = policy_loss(jnp.zeros(2), jnp.array([0.0, jnp.nan]), jnp.ones(2), loss_mask=jnp.array([True, False]))
        >>> float(out.loss)
        -1.0
    """
    given = dict(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    optional = dict(weights=weights, entropy=entropy)
    optional = {name: array for name, array in optional.items() if array is not None}
    arrays = dict(zip((*given, *optional), per_token(**given, **optional)))
    mask = mask_of(loss_mask, arrays["logprobs"].shape)
    arrays = dict(zip(arrays, kept(mask, *arrays.values())))
    own = arrays["logprobs"] - lax.stop_gradient(arrays["old_logprobs"])
    log_ratio = log_ratio_at(level, own, mask, aggregation.sequences)
    surrogate = outside(mask, objective(log_ratio, lax.stop_gradient(arrays["advantages"])))
    losses = surrogate.losses
    if weights is not None:
        losses = losses * lax.stop_gradient(arrays["weights"])
    if entropy_is_differentiated(entropy_coef):
        if entropy is None:
            raise ValueError("`entropy` must be given with an entropy_coef that is not a static 0.")
        losses = losses - jnp.asarray(entropy_coef) * arrays["entropy"]
    stats = TokenStats(own, surrogate.clipped, arrays.get("entropy"), mask)
    return PolicyLoss(aggregate(losses, aggregation, loss_mask=mask), jax.tree.map(lax.stop_gradient, stats))
