"""Importance ratios between two policies, of tokens and of sequences: the one place where log-ratios are exponentiated.

Masked tokens have log-ratio 0 whatever their log-probabilities hold; a NaN at a token that counts stays. Log-ratios are
kept within ±`LOG_RATIO_BOUND` before exp, where the gradient is 0 beyond: no ratio is infinite, nor 0 · inf NaN.
"""

from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from ..sharding._errors import wrong
from ._sequences import Sequences


# As verl clamps them: e^20 is 5e8.
LOG_RATIO_BOUND = 20.0

RatioLevel = Literal["token", "sequence", "sequence-token"]
LEVELS = ("token", "sequence", "sequence-token")


def bounded_exp(log_ratio: Float[Array, "..."], bound: float = LOG_RATIO_BOUND) -> Float[Array, "..."]:
    """exp of the log-ratio, kept within ±bound."""
    return jnp.exp(jnp.clip(log_ratio, -bound, bound))


def log_ratio_at(
    level: RatioLevel, log_ratio: Float[Array, "*batch"], mask: Bool[Array, "*batch"], sequences: Sequences
) -> Float[Array, "*batch"]:
    """The log-ratio that each token's objective uses, of the tokens' own.

    "token": its own. "sequence": the mean over its sequence, log s_i of GSPO (eq. 7 of https://arxiv.org/abs/2507.18071).
    "sequence-token": the value of that, with the gradient of the token's own (eq. 14).
    """
    if level not in LEVELS:
        raise ValueError(wrong("level", f"be one of {', '.join(LEVELS)}", repr(level)))
    if level == "token":
        return log_ratio
    mean = jnp.where(mask, sequences.spread(sequences.means(log_ratio, mask), log_ratio), 0.0)
    if level == "sequence":
        return mean
    return lax.stop_gradient(mean - log_ratio) + log_ratio
