"""Per-token estimates of the divergence from a reference policy, KL(π ‖ π_ref), of tokens sampled by π."""

from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from ..sharding._errors import wrong
from ._ratios import bounded_exp, LOG_RATIO_BOUND
from ._sequences import kept, mask_of, per_token


KlEstimator = Literal["k1", "k2", "k3"]
ESTIMATORS = ("k1", "k2", "k3")


def kl_penalty(
    logprobs: Float[Array, "*batch"],
    ref_logprobs: Float[Array, "*batch"],
    *,
    estimator: KlEstimator = "k3",
    old_logprobs: Float[Array, "*batch"] | None = None,
    loss_mask: Bool[Array, "*batch"] | None = None,
    log_ratio_bound: float = LOG_RATIO_BOUND,
    max_penalty: float | None = None,
) -> Float[Array, "*batch"]:
    """With d = log π_ref - log π:  k1 = -d,  k2 = d² / 2,  k3 = e^d - 1 - d.

    All three have the right mean under π, but as a loss only k2 has the gradient of the divergence there: k1's is 0 in
    the mean, k3's is that of the reverse one. With `old_logprobs`, the policy that sampled, the estimate is multiplied
    by π / π_old, which is differentiated too: mean and gradient are then those of KL(π ‖ π_ref), of k1 and of k3.

    Args:
        logprobs, ref_logprobs: of the sampled tokens. The reference has no gradient.
        estimator: "k1", "k2" or "k3".
        old_logprobs: of the policy that sampled the tokens; None: no correction.
        loss_mask: True where the token counts; elsewhere the result is 0 whatever the inputs hold.
        log_ratio_bound: d and log π / π_old are kept within ±this before exp; the gradient of exp is 0 beyond.
        max_penalty: results are at most this in absolute value (verl: 10), without gradient beyond; None: no limit.

    Returns:
        [*batch], in nats; to be aggregated and added to the loss, times a coefficient.

    References:
        http://joschu.net/blog/kl-approx.html; corrected k3: DeepSeek-V3.2, https://arxiv.org/abs/2512.02556, eq. 7.

    Example:
        >>> of = lambda k: float(kl_penalty(jnp.zeros(()), jnp.full((), 0.5), estimator=k))
        >>> [round(of(k), 4) for k in ("k1", "k2", "k3")]
        [-0.5, 0.125, 0.1487]
    """
    if estimator not in ESTIMATORS:
        raise ValueError(wrong("estimator", f"be one of {', '.join(ESTIMATORS)}", repr(estimator)))
    given = dict(logprobs=logprobs, ref_logprobs=ref_logprobs)
    logprobs, ref_logprobs, old = per_token(**given, old_logprobs=logprobs if old_logprobs is None else old_logprobs)
    mask = mask_of(loss_mask, logprobs.shape)
    logprobs, ref_logprobs, old = kept(mask, logprobs, lax.stop_gradient(ref_logprobs), lax.stop_gradient(old))
    d = ref_logprobs - logprobs
    if estimator == "k1":
        penalty = -d
    elif estimator == "k2":
        penalty = 0.5 * jnp.square(d)
    else:
        penalty = bounded_exp(d, log_ratio_bound) - 1 - d
    if old_logprobs is not None:
        penalty = penalty * bounded_exp(logprobs - old, log_ratio_bound)
    if max_penalty is not None:
        penalty = jnp.clip(penalty, -max_penalty, max_penalty)
    return penalty
