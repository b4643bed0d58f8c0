"""What to watch of an update: numbers of all tokens that count, over all devices, in one pass."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .._per_token import over_tokens
from .._scoring import arithmetic_dtype
from ..sharding import Placement
from ..sharding._axes import axis_names
from ..sharding._placement import sum_over, vma
from ._mismatch import ImportanceWeights
from ._policy import TokenStats
from ._ratios import bounded_exp
from ._sequences import kept, mask_of, per_token, Sequences


Metrics = dict[str, Float[Array, ""]]


def policy_metrics(
    tokens: TokenStats, *, quantiles: Sequence[float] = (0.1, 0.5, 0.9), sequences: Sequences = Sequences()
) -> Metrics:
    """Metrics of an actor's loss, from what `policy_loss` returns of the tokens; 0 where no token counts.

    Args:
        tokens: of a batch; or of its micro-batches, stacked.
        quantiles: of the entropy, over all tokens that count: N floats go to every device for them; () for none.
        sequences: where the tokens lie; which sequence they belong to is not asked.

    Returns:
        num_tokens; clip_fraction_low, clip_fraction_high: tokens without gradient, their ratio being too low, too high;
        approx_kl: the mean of k3 = r - 1 - log r, and approx_kl_k1, that of -log r; ratio_min, ratio_max, ratio_mean;
        entropy, and entropy_q10, ... where there is one.
    """
    entropies = {} if tokens.entropy is None else {"entropy": tokens.entropy}
    arrays = per_token(log_ratio=tokens.log_ratio, clipped=tokens.clipped, **entropies)
    values = dict(zip(("log_ratio", "clipped", *entropies), map(lax.stop_gradient, arrays)))
    at = {f"entropy_q{100 * q:g}": q for q in quantiles} if entropies else {}

    def local(placement, log_ratio, clipped, *rest):
        *entropy, mask = rest
        devices, ratio = _devices(placement, mask), bounded_exp(log_ratio)
        means = {
            "clip_fraction_low": clipped < 0,
            "clip_fraction_high": clipped > 0,
            "approx_kl": ratio - 1 - log_ratio,
            "approx_kl_k1": -log_ratio,
            "ratio_mean": ratio,
            **dict(zip(entropies, entropy)),
        }
        found = _means(means, mask, devices) | _maxima({"ratio_min": -ratio, "ratio_max": ratio}, mask, devices)
        found["ratio_min"] = -found["ratio_min"]
        return found | (_quantiles(entropy[0], at, mask, devices) if at else {})

    names = ["clip_fraction_low", "clip_fraction_high", "approx_kl", "approx_kl_k1", "ratio_mean", "ratio_min"]
    names += ["ratio_max", "num_tokens", *entropies, *at]
    return _run(local, values | {"loss_mask": tokens.loss_mask}, names, sequences)


def mismatch_metrics(
    old_logprobs: Float[Array, "*batch"],
    sampler_logprobs: Float[Array, "*batch"],
    weights: ImportanceWeights,
    *,
    loss_mask: Any = None,
    sequences: Sequences = Sequences(),
) -> Metrics:
    """How far the sampler is from the trainer, before and after the weights were truncated or tokens rejected.

    Returns:
        logprob_difference: the mean |log π_old - log π_sampler|, and logprob_difference_max; raw_ratio and ratio: the
        means of ρ as it was and as it is used, and raw_ratio_max; rejected_fraction; effective_sample_size: of the
        weights used, (Σ w)² / (N Σ w²).
    """
    given = dict(old_logprobs=old_logprobs, sampler_logprobs=sampler_logprobs, raw=weights.raw, weights=weights.weights)
    arrays = per_token(**given)
    mask = mask_of(loss_mask, arrays[0].shape)
    arrays = [lax.stop_gradient(a) for a in kept(mask, *arrays)]

    def local(placement, old, sampler, raw, used, accepted, mask):
        gap = jnp.abs(old - sampler)
        means = {
            "logprob_difference": gap,
            "raw_ratio": raw,
            "ratio": used,
            "rejected_fraction": ~accepted,
            "squares": jnp.square(used),
        }
        devices = _devices(placement, mask)
        found = _means(means, mask, devices)
        found |= _maxima({"logprob_difference_max": gap, "raw_ratio_max": raw}, mask, devices)
        squares = found.pop("squares")
        ess = jnp.square(found["ratio"]) / jnp.where(squares > 0, squares, 1.0)
        return found | {"effective_sample_size": ess}

    names = ["logprob_difference", "raw_ratio", "ratio", "rejected_fraction", "logprob_difference_max", "raw_ratio_max"]
    names += ["num_tokens", "effective_sample_size"]
    per_tokens = dict(zip(given, arrays)) | {"accepted": weights.accepted, "loss_mask": mask}
    return _run(local, per_tokens, names, sequences)


def _run(local, per_tokens: dict[str, jax.Array], names: list[str], sequences: Sequences) -> Metrics:
    out = dict.fromkeys(names, "whole")
    return over_tokens(local, per_tokens, axes=sequences.axes, mesh=sequences.mesh, out=out)


def _devices(placement: Placement, like: jax.Array) -> frozenset[str]:
    """The mesh axes over which other devices have more of these tokens."""
    return vma(like) & set(axis_names(placement.axes.tokens))


def _means(values: dict[str, jax.Array], mask: jax.Array, devices: frozenset[str]) -> Metrics:
    """Means over the tokens that count, and how many they are: one sum over the devices."""
    dtype = arithmetic_dtype(*values.values())
    columns = jnp.stack([jnp.where(mask, a.astype(dtype), 0.0) for a in values.values()])
    sums = jnp.sum(columns.reshape(len(values), -1), axis=1)
    sums = sum_over(jnp.append(sums, jnp.sum(mask, dtype=sums.dtype)), devices)
    return dict(zip(values, sums[:-1] / jnp.maximum(sums[-1], 1))) | {"num_tokens": sums[-1]}


def _maxima(values: dict[str, jax.Array], mask: jax.Array, devices: frozenset[str]) -> Metrics:
    """Maxima over the tokens that count, 0 where there are none: one maximum over the devices."""
    columns = jnp.stack([jnp.where(mask, a, -jnp.inf) for a in values.values()])
    top = jnp.max(columns.reshape(len(values), -1), axis=1, initial=-jnp.inf)
    top = lax.pmax(top, tuple(sorted(devices))) if devices else top
    return dict(zip(values, jnp.where(top == -jnp.inf, 0.0, top)))


def _quantiles(values: jax.Array, at: dict[str, float], mask: jax.Array, devices: frozenset[str]) -> Metrics:
    """Quantiles over the tokens that count, between the two nearest, 0 where there are none: one sum of all values."""
    row, names = jnp.where(mask, values, jnp.inf).reshape(-1), tuple(sorted(devices))
    if names:
        rows = jnp.zeros_like(row, shape=(lax.axis_size(names), row.size)).at[lax.axis_index(names)].set(row)
        row = sum_over(rows, devices).reshape(-1)
    row = jnp.append(jnp.sort(row), 0.0)  # There may be no tokens at all.
    count = jnp.sum(row < jnp.inf, dtype=jnp.int32) - 1

    def quantile(q):
        place = q * jnp.maximum(count - 1, 0).astype(row.dtype)
        low, high = jnp.floor(place).astype(jnp.int32), jnp.ceil(place).astype(jnp.int32)
        between = row[low] + (place - low.astype(row.dtype)) * (row[high] - row[low])
        return jnp.where(count > 0, between, 0.0)

    return {name: quantile(q) for name, q in at.items()}
