"""The per-token operands of every op: ids, loss mask and temperature, checked once and brought to one form.

Also what an id may be: scored, ignored (value 0, gradient 0) or out of range (NaN, loudly).
"""

import numbers
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32, Integer

from ._transform import check_static_int, LogitTransform, usable
from .sharding import Placement
from .sharding._errors import wrong
from .sharding._placement import vocab_must_not_vary


class TokenOperands(NamedTuple):
    """What an op needs to know of each token; all O(N).

    Attributes:
        ids: the K ids to score; K = 0 where only the entropy is asked for.
        valid: False where the token does not count: its results are 0 and its logits are not looked at.
        inverse_temperature: in the arithmetic's dtype, or None for 1.
    """

    ids: Int32[Array, "*batch K"]
    valid: Bool[Array, "*batch"]
    inverse_temperature: Float[Array, "*batch"] | None


def token_operands(
    ids: Integer[Array, "*batch K"],
    loss_mask: Bool[Array, "*batch"] | None,
    transform: LogitTransform,
    ignore_index: int,
    *,
    batch: tuple[int, ...],
    dtype: DTypeLike,
    placement: Placement,
) -> TokenOperands:
    """Checked operands, in the sharding of `placement`.

    A token counts where the loss mask says so and not all of its ids are ignored.
    """
    valid = jnp.ones(batch, bool) if loss_mask is None else check_loss_mask(loss_mask, batch)
    if ids.shape[-1]:
        valid = valid & jnp.any(ids != ignore_index, axis=-1)
    inverse_temperature = _inverse_temperature(transform.temperature, batch, dtype)
    for name, array in (("targets", ids), ("loss_mask", valid), ("temperature", inverse_temperature)):
        if array is not None:
            vocab_must_not_vary(array, placement, name)
    return TokenOperands(
        placement.with_spec(ids, *placement.batch, None),
        placement.with_spec(valid, *placement.batch),
        None if inverse_temperature is None else placement.with_spec(inverse_temperature, *placement.batch),
    )


def check_options(transform: object, ignore_index: object) -> None:
    """What is static has to be a Python or NumPy value.

    Raises:
        TypeError: another type.
        ValueError: ignore_index beyond int32.
    """
    if not isinstance(transform, LogitTransform):
        raise TypeError(wrong("transform", "be a LogitTransform", repr(transform), "LogitTransform(temperature=...)."))
    check_static_int("ignore_index", ignore_index)
    if not -(2**31) <= operator.index(ignore_index) < 2**31:  # pyright: ignore[reportArgumentType]
        raise ValueError(wrong("ignore_index", "be an int32", ignore_index))


def check_chunk(name: str, chunk: object) -> None:
    """A static size of a loop's blocks.

    Raises:
        TypeError: not an integer or None.
        ValueError: below 1.
    """
    if chunk is not None:
        check_static_int(name, chunk)
        if operator.index(chunk) < 1:  # pyright: ignore[reportArgumentType]
            raise ValueError(wrong(name, "be at least 1, or None", chunk))


def floating(name: str, array: jax.Array | np.ndarray) -> jax.Array:
    """`array` as a JAX array.

    Raises:
        TypeError: not floating point.
    """
    array = jnp.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(wrong(name, "be floating point", f"dtype {array.dtype}"))
    return array


def check_logits(logits: jax.Array | np.ndarray) -> Float[Array, "..."]:
    """`logits` as a JAX array.

    Raises:
        TypeError: not floating point.
        ValueError: no vocabulary dimension, or an empty one.
    """
    logits = floating("logits", logits)
    if logits.ndim == 0:
        raise ValueError(wrong("logits", "have shape (*batch, V)", logits.shape))
    if logits.shape[-1] == 0:
        raise ValueError(wrong("logits", "have at least one column", f"shape {logits.shape}"))
    return logits


def check_ids(name: str, ids: jax.Array | np.ndarray, shape: tuple[int | str, ...], remedy: str) -> Int32[Array, "..."]:
    """`ids` as int32, of exactly `shape`. Ids too large for int32 stay out of range: they do not wrap into it.

    Raises:
        TypeError: not integers.
        ValueError: another shape.
    """
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(wrong(name, "be integer ids", f"dtype {ids.dtype}", f"Cast them: {name}.astype(jnp.int32)."))
    if ids.shape != shape:
        raise ValueError(wrong(name, f"have shape {str(shape).replace(chr(39), '')}", ids.shape, remedy))
    bounds = jnp.iinfo(jnp.int32)
    if jnp.iinfo(ids.dtype).max > bounds.max:
        low = max(int(bounds.min), int(jnp.iinfo(ids.dtype).min))
        ids = jnp.clip(ids, low, int(bounds.max))
    return ids.astype(jnp.int32)


def scored(
    ids: Int32[Array, "N K"], valid: Bool[Array, " N"], ignore_index: int, vocab_size: int
) -> tuple[Bool[Array, "N K"], Bool[Array, "N K"]]:
    """Which ids have a value other than 0, and which of those are outside [0, vocab_size): NaN."""
    counted = valid[:, None] & (ids != ignore_index)
    return counted, counted & ((ids < 0) | (ids >= vocab_size))


def zero_ignored_nan_outside(x: Float[Array, "N K"], counted: Array, outside: Array) -> Float[Array, "N K"]:
    """x, with 0 where the id is ignored and NaN where it is out of range; for values and for cotangents."""
    return jnp.where(counted, jnp.where(outside, jnp.nan, x), 0.0)


def check_loss_mask(
    loss_mask: jax.Array | np.ndarray, batch: tuple[int, ...], name: str = "loss_mask"
) -> Bool[Array, "*batch"]:
    """`loss_mask` as a JAX array.

    Raises:
        TypeError: not bool.
        ValueError: another shape.
    """
    loss_mask = jnp.asarray(loss_mask)
    if loss_mask.dtype != bool:
        remedy = f"Write `{name} > 0`; weights belong in the loss."
        raise TypeError(wrong(name, "be bool, True where the token counts", f"dtype {loss_mask.dtype}", remedy))
    if loss_mask.shape != batch:
        raise ValueError(wrong(name, f"have the batch shape {batch}", loss_mask.shape))
    return loss_mask


def _inverse_temperature(temperature, batch: tuple[int, ...], dtype: DTypeLike) -> Float[Array, "*batch"] | None:
    number = isinstance(temperature, (jax.Array, np.ndarray, np.generic, numbers.Real))
    kind = jnp.asarray(temperature).dtype if number else None
    if kind is None or not (jnp.issubdtype(kind, jnp.floating) or jnp.issubdtype(kind, jnp.integer)):
        raise TypeError(wrong("temperature", "be a real number or array", repr(temperature)))
    if not isinstance(temperature, jax.Array):
        if not (usable(temperature) and usable(1.0 / np.asarray(temperature, np.float64))):
            remedy = "Greedy decoding has no log-probabilities: score at the temperature that sampled, or at 1."
            raise ValueError(wrong("temperature", "be positive and finite, in float32 too", repr(temperature), remedy))
        if np.ndim(temperature) == 0 and temperature == 1:
            return None
    temperature = jnp.asarray(temperature)
    if temperature.shape not in ((), batch):
        raise ValueError(wrong("temperature", f"be a scalar or have the batch shape {batch}", temperature.shape))
    return lax.stop_gradient(jnp.broadcast_to(1.0 / temperature.astype(dtype), batch))
