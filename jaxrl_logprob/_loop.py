"""Loops over chunks of rows, with static shapes: a scan over the full chunks, then the ragged tail by itself.

The tail is padded as a block, never as an array: that would copy it. Nor does the last chunk overlap the one
before: a buffer that is read and overwritten in place would be read twice.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


# Of float32, where no chunk size is given. On CPU a block is an array and should stay in a cache; on an accelerator
# it is read and written by fused kernels, and should be large beside the cost of starting one.
_CPU_BLOCK_BYTES = 4 * 2**20
_ACCELERATOR_BLOCK_BYTES = 64 * 2**20
# XLA:CPU adds up a row in another order where a block is smaller than this, and the chunk size would show in the
# last bits. Measured: from 8 rows and 4096 elements on, blocks of every size agree.
_LEAST_ROWS = 8
_LEAST_ELEMENTS = 8192


class Rows(NamedTuple):
    """`size` rows from `first` on, worked on as a block of `block` rows, the last of them repeated."""

    first: jax.Array | int
    size: int
    block: int

    def take(self, tree):
        """These rows of every array [N, ...], as [block, ...]."""

        def take(array):
            rows = lax.dynamic_slice_in_dim(array, self.first, self.size, 0)
            extra = self.block - self.size
            return jnp.pad(rows, [(0, extra)] + [(0, 0)] * (array.ndim - 1), mode="edge") if extra else rows

        return jax.tree.map(take, tree)

    def put(self, buffer: jax.Array, block: jax.Array) -> jax.Array:
        """`buffer` with these rows from `block`."""
        return lax.dynamic_update_slice_in_dim(buffer, block[: self.size], self.first, 0)


def map_rows(body: Callable[[jax.Array, Rows], object], array: jax.Array, token_chunk: int | None) -> Any:
    """body(block, rows) -> results [block, ...], over all blocks of `array` [N, V]; results [N, ...].

    Args:
        token_chunk: rows in each step, rounded up to a whole number of the smallest blocks; None for blocks
            of a size that suits the platform.
    """

    def run(array, chunk, encode, decode):
        return _scan(lambda _, rows: (None, body(decode(rows.take(array)), rows)), None, array.shape, chunk)[1]

    return _per_platform(run, array, token_chunk)


def update_rows(body: Callable[[jax.Array, Rows], jax.Array], buffer: jax.Array, token_chunk: int | None) -> jax.Array:
    """`buffer` [N, V] with every block overwritten by body(block, rows), in place where nothing else needs it."""

    def run(buffer, chunk, encode, decode):
        step = lambda buffer, rows: (rows.put(buffer, encode(body(decode(rows.take(buffer)), rows))), None)
        return decode(_scan(step, buffer, buffer.shape, chunk)[0])

    return _per_platform(run, buffer, token_chunk)


def _scan(body, carry, shape: tuple[int, int], chunk: int):
    """body(carry, rows) -> (carry, results [block, ...]), over all rows."""
    num_rows, width = shape
    least = max(_LEAST_ROWS, _round_up(-(-_LEAST_ELEMENTS // width), _LEAST_ROWS))
    chunk = _round_up(chunk, least)
    full, tail = divmod(num_rows, chunk)
    parts: list[Any] = []
    if full:
        firsts = jnp.arange(full, dtype=jnp.int32) * chunk
        carry, results = lax.scan(lambda carry, first: body(carry, Rows(first, chunk, chunk)), carry, firsts)
        parts.append(jax.tree.map(lambda r: r.reshape(full * chunk, *r.shape[2:]), results))
    if tail or not full:
        carry, results = body(carry, Rows(full * chunk, tail, _round_up(tail, least)))
        parts.append(jax.tree.map(lambda r: r[:tail], results))
    return carry, jax.tree.map(lambda *p: jnp.concatenate(p), *parts)


def _per_platform(run: Callable, array: jax.Array, token_chunk: int | None):
    """run(array, chunk, encode, decode), with the chunk and the form of the array that suit the platform.

    On CPU, 16-bit floats go through the loop as integers of their bits: XLA:CPU of jax 0.10 has no bfloat16 slices and
    updates, and would convert the whole array to float32 and back in every step. On TPU the integers would be widened.
    """
    rows_of = lambda block_bytes: token_chunk or max(1, block_bytes // (4 * array.shape[1]))
    same = lambda x: x
    bits = lambda x: lax.bitcast_convert_type(x, jnp.uint16)
    floats = lambda x: lax.bitcast_convert_type(x, array.dtype)

    def on_cpu(array):
        chunk = rows_of(_CPU_BLOCK_BYTES)
        return run(bits(array), chunk, bits, floats) if array.dtype.itemsize == 2 else run(array, chunk, same, same)

    on_accelerator = lambda array: run(array, rows_of(_ACCELERATOR_BLOCK_BYTES), same, same)
    return lax.platform_dependent(array, cpu=on_cpu, default=on_accelerator)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
