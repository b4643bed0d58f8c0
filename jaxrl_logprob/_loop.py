"""Loops over blocks, with static shapes: a scan over the full blocks, then the ragged tail by itself.

The tail is padded as a block, never as an array: that would copy it. Nor does the last chunk overlap the one
before: a buffer that is read and overwritten in place would be read twice.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


# Of float32, where no chunk size is given. On CPU a block is an array and should stay in a cache; on an accelerator
# it is read and written by fused kernels, and should be large beside the cost of starting one.
_CPU_BLOCK_BYTES = 4 * 2**20
_ACCELERATOR_BLOCK_BYTES = 64 * 2**20
# XLA:CPU adds up a row in another order where a block is smaller than this, and the chunk size would show in the
# last bits. Measured: from 8 rows and 4096 elements on, blocks of every size agree.
_LEAST_ROWS = 8
_LEAST_ELEMENTS = 8192


class Platform(NamedTuple):
    """What a loop has to know of where it runs.

    On CPU, 16-bit floats go through a loop as integers of their bits: XLA:CPU of jax 0.10 has no bfloat16 slices and
    updates, and would convert the whole array to float32 and back in every step. On TPU the integers would be widened.
    """

    is_cpu: bool

    def stored(self, array: jax.Array) -> jax.Array:
        """`array` in the form in which a loop slices and updates it."""
        return lax.bitcast_convert_type(array, jnp.uint16) if self._bits(array.dtype) else array

    def loaded(self, block: jax.Array, dtype: DTypeLike) -> jax.Array:
        """A block of a stored array, or the whole, as `dtype`."""
        return lax.bitcast_convert_type(block, dtype) if self._bits(dtype) else block

    def _bits(self, dtype: DTypeLike) -> bool:
        return self.is_cpu and jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 2


def on_platform(run: Callable, *args: Any) -> Any:
    """run(platform, *args), compiled for the platform that it runs on."""
    return lax.platform_dependent(*args, cpu=partial(run, Platform(True)), default=partial(run, Platform(False)))


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

    def run(platform, array):
        block = lambda rows: body(platform.loaded(rows.take(stored), array.dtype), rows)
        stored = platform.stored(array)
        return _scan(lambda _, rows: (None, block(rows)), None, array.shape, _chunk(platform, array, token_chunk))[1]

    return on_platform(run, array)


def update_rows(body: Callable[[jax.Array, Rows], jax.Array], buffer: jax.Array, token_chunk: int | None) -> jax.Array:
    """`buffer` [N, V] with every block overwritten by body(block, rows), in place where nothing else needs it."""

    def run(platform, buffer):
        def step(stored, rows):
            block = body(platform.loaded(rows.take(stored), buffer.dtype), rows)
            return rows.put(stored, platform.stored(block)), None

        chunk = _chunk(platform, buffer, token_chunk)
        return platform.loaded(_scan(step, platform.stored(buffer), buffer.shape, chunk)[0], buffer.dtype)

    return on_platform(run, buffer)


def _chunk(platform: Platform, array: jax.Array, token_chunk: int | None) -> int:
    return token_chunk or rows_of_block(array.shape[1], platform.is_cpu)


def rows_of_block(width: int, is_cpu: bool) -> int:
    """Rows of a block of [N, width] where no chunk size is given."""
    return max(1, (_CPU_BLOCK_BYTES if is_cpu else _ACCELERATOR_BLOCK_BYTES) // (4 * width))


def _scan(body, carry, shape: tuple[int, int], chunk: int):
    """body(carry, rows) -> (carry, results [block, ...]), over all rows."""
    num_rows, width = shape
    least = max(_LEAST_ROWS, round_up(-(-_LEAST_ELEMENTS // width), _LEAST_ROWS))
    chunk = round_up(chunk, least)
    full, tail = divmod(num_rows, chunk)
    parts: list[Any] = []
    if full:
        firsts = jnp.arange(full, dtype=jnp.int32) * chunk
        carry, results = lax.scan(lambda carry, first: body(carry, Rows(first, chunk, chunk)), carry, firsts)
        parts.append(jax.tree.map(lambda r: r.reshape(full * chunk, *r.shape[2:]), results))
    if tail or not full:
        carry, results = body(carry, Rows(full * chunk, tail, round_up(tail, least)))
        parts.append(jax.tree.map(lambda r: r[:tail], results))
    return carry, jax.tree.map(lambda *p: jnp.concatenate(p), *parts)


def fold_blocks(body: Callable[[Any, Any, int], Any], carry: Any, size: int, block: int) -> Any:
    """carry = body(carry, first, width), over blocks of `block` columns in `size`: a scan over the full ones, then the
    ragged tail by itself."""
    full, tail = divmod(size, block)
    if full:
        firsts = jnp.arange(full, dtype=jnp.int32) * block
        carry = lax.scan(lambda carry, first: (body(carry, first, block), None), carry, firsts)[0]
    return body(carry, jnp.int32(full * block), tail) if tail else carry


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
