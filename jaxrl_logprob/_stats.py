r"""The softmax statistics: one definition, used by every op, chunk and shard.

A block of logits z (any subset of a token's columns) at temperature τ is summed up by three numbers per token,

    m = max z        s = Σ exp((z - m) / τ)        u = Σ exp((z - m) / τ) (z - m) / τ

which merge over blocks and shards, and from which follow

    logprob = (z_y - m) / τ - log s        entropy = log s - u / s
    τ dz    = dlogprob (1[v = y] - p)  -  dentropy p (log p + entropy),   log p = (z - m) / τ - log s

The maximum is subtracted before anything else, and m and log s are kept apart: at |z| = 1e4 float32 rounds z / τ,
and log-sum-exp, to 5e-4. A column at -inf is absent: 0 · (-inf) is 0 here. A row that is -inf everywhere gives NaN
in every result. τ comes as 1 / τ, or as None where it is 1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float


# The least exponent that is multiplied by its exponential: e^x x adds nothing to a float32 or float64 sum that is at
# least 1, and below it the product would be NaN at -inf. Bounded before the product: after it, gradients are NaN.
_NEGLIGIBLE = -200.0


class SoftmaxStats(NamedTuple):
    """Statistics of a block of columns, per token. `weighted` is None where no entropy is asked for."""

    max: Float[Array, " N"]
    sum: Float[Array, " N"]
    weighted: Float[Array, " N"] | None


class Normalizer(NamedTuple):
    """What turns logits into log-probabilities: 8 bytes per token in float32."""

    max: Float[Array, " N"]
    log_sum: Float[Array, " N"]


def block_stats(
    z: Float[Array, "N V"], inverse_temperature: Float[Array, " N"] | None, *, with_entropy: bool
) -> SoftmaxStats:
    """Statistics of one block. A row that is -inf throughout has max -inf and sum 0: nothing there."""
    top = jnp.max(z, axis=-1)
    shifted = _per_temperature(z - jnp.where(top == -jnp.inf, 0.0, top)[:, None], inverse_temperature)
    total = jnp.sum(jnp.exp(shifted), axis=-1)
    if not with_entropy:
        return SoftmaxStats(top, total, None)
    # Not the exponentials of `total`: sharing them, XLA:CPU would add `total` up in another order, and asking for
    # the entropy would show in the last bits of the log-probabilities.
    bounded = jnp.maximum(shifted, _NEGLIGIBLE)
    return SoftmaxStats(top, total, jnp.sum(jnp.exp(bounded) * bounded, axis=-1))


def rescale(
    stats: SoftmaxStats, top: Float[Array, " N"], inverse_temperature: Float[Array, " N"] | None
) -> SoftmaxStats:
    """The same statistics relative to a larger maximum `top`. What is rescaled to one maximum may be added."""
    down = _per_temperature(jnp.where(stats.max == -jnp.inf, 0.0, stats.max - top), inverse_temperature)
    scale = jnp.exp(down)
    weighted = None if stats.weighted is None else (stats.weighted + stats.sum * down) * scale
    return SoftmaxStats(top, stats.sum * scale, weighted)


def no_stats(like: Float[Array, " N"], *, with_entropy: bool) -> SoftmaxStats:
    """Statistics of no columns at all: what `merge_blocks` starts from."""
    nothing = jnp.zeros_like(like)
    return SoftmaxStats(jnp.full_like(like, -jnp.inf), nothing, nothing if with_entropy else None)


def merge_blocks(
    one: SoftmaxStats, other: SoftmaxStats, inverse_temperature: Float[Array, " N"] | None
) -> SoftmaxStats:
    """Statistics of the columns of both."""
    top = jnp.maximum(one.max, other.max)
    one, other = (rescale(stats, top, inverse_temperature) for stats in (one, other))
    weighted = None if one.weighted is None or other.weighted is None else one.weighted + other.weighted
    return SoftmaxStats(top, one.sum + other.sum, weighted)


def merge_shards(
    stats: SoftmaxStats,
    chosen: Float[Array, "N K"],
    held: Bool[Array, "N K"],
    inverse_temperature: Float[Array, " N"] | None,
    axes: tuple[str, ...],
) -> tuple[SoftmaxStats, Float[Array, "N K"]]:
    """Statistics of all vocabulary shards, and the chosen logits relative to the maximum, (z_k - m) / τ.

    One maximum of N floats and one sum of N (1 or 2, + K) floats over `axes`; no collective where `axes` is empty.

    Args:
        stats: of the columns held here.
        chosen: the logits z_k; any value where this shard does not hold them.
        held: where it does.
        axes: the mesh axes that split the vocabulary.
    """
    top = lax.pmax(stats.max, axes) if axes else stats.max
    local = rescale(stats, top, inverse_temperature)
    shifted = jnp.where(held, _per_temperature(chosen - top[:, None], inverse_temperature), 0.0)
    if not axes:
        return local, shifted
    parts = [local.sum] if local.weighted is None else [local.sum, local.weighted]
    packed = lax.psum(jnp.concatenate([jnp.stack(parts), shifted.T]), axes)
    weighted = None if local.weighted is None else packed[1]
    return SoftmaxStats(top, packed[0], weighted), packed[len(parts) :].T


def normalizer(stats: SoftmaxStats) -> Normalizer:
    """max and log s of merged statistics."""
    return Normalizer(stats.max, jnp.log(stats.sum))


def entropy(stats: SoftmaxStats) -> Float[Array, " N"]:
    """log s - u / s, of merged statistics that have `weighted`."""
    assert stats.weighted is not None
    return jnp.log(stats.sum) - stats.weighted / stats.sum


def softmax_part(
    z: Float[Array, "N V"],
    norm: Normalizer,
    inverse_temperature: Float[Array, " N"] | None,
    dlogprobs: Float[Array, " N"],
    entropies: Float[Array, " N"] | None,
    dentropy: Float[Array, " N"] | None,
) -> Float[Array, "N V"]:
    """-p (dlogprobs + dentropy (log p + entropy)): τ dz but for the 1[v = y] of the chosen ids.

    Args:
        dlogprobs: summed over the chosen ids of each token.
        entropies, dentropy: None where the entropy is not differentiated; its term is then not there at all.
    """
    logp = _per_temperature(z - norm.max[:, None], inverse_temperature) - norm.log_sum[:, None]
    weight = jnp.broadcast_to(dlogprobs[:, None], z.shape)
    if dentropy is not None and entropies is not None:
        weight = weight + dentropy[:, None] * (jnp.maximum(logp, _NEGLIGIBLE) + entropies[:, None])
    return -jnp.exp(logp) * weight


def _per_temperature(x: jax.Array, inverse_temperature: Float[Array, " N"] | None) -> jax.Array:
    if inverse_temperature is None:
        return x
    return x * inverse_temperature.reshape(-1, *(1,) * (x.ndim - 1))
