"""Rows that count, brought together: their order, tiles of it, and loops over as many tiles as hold one.

A stable sort with static shapes; how many tiles there are is data. Rows are gathered tile by tile: there is no sorted
copy of anything wider than a few numbers a row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from ._chunks import Blocks
from ._loop import round_up


class RowOrder(NamedTuple):
    """The rows that count first, in their order, then the others.

    Attributes:
        rows: the rows in that order, with row 0 repeated up to a whole number of tiles.
        position: where each row stands in that order.
        counted: for each of `rows`, whether it counts.
        num_counted: how many do.
    """

    rows: Int32[Array, " M"]
    position: Int32[Array, " N"]
    counted: Bool[Array, " M"]
    num_counted: Int32[Array, ""]


def row_order(valid: Bool[Array, " N"], multiple: int) -> RowOrder:
    """The order of rows, padded to a multiple of so many."""
    size = valid.shape[0]
    rows = jnp.argsort(~valid, stable=True).astype(jnp.int32)
    position = jnp.argsort(rows).astype(jnp.int32)
    count = jnp.sum(valid, dtype=jnp.int32)
    padded = round_up(size, multiple)
    counted = lax.iota(jnp.int32, padded) < count
    return RowOrder(jnp.pad(rows, (0, padded - size)), position, counted, count)


class Tile(NamedTuple):
    """`size` rows of a `RowOrder`, from `first` on."""

    first: jax.Array
    size: int

    def take(self, tree: Any) -> Any:
        """These rows of every array."""
        return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, self.first, self.size), tree)

    def put(self, buffer: jax.Array, block: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(buffer, block, self.first, 0)


def over_tiles(body: Callable[[Tile, Any], Any], carry: Any, order: RowOrder, blocks: Blocks) -> Any:
    """carry = body(tile, carry), over tiles of all rows that count: large ones, then small ones for what is left."""
    large = 0
    if blocks.last_rows < blocks.rows <= order.rows.size:
        large = order.num_counted // blocks.rows
        carry = lax.fori_loop(0, large, lambda i, c: body(Tile(i * blocks.rows, blocks.rows), c), carry)
    start = large * blocks.rows
    small = -(-(order.num_counted - start) // blocks.last_rows)
    return lax.fori_loop(0, small, lambda i, c: body(Tile(start + i * blocks.last_rows, blocks.last_rows), c), carry)


def consecutive(rows: jax.Array) -> jax.Array:
    """Whether each of these rows is the one after the one before."""
    return jnp.all(rows == rows[0] + lax.iota(jnp.int32, rows.size))


def take_rows(array: jax.Array, rows: jax.Array) -> jax.Array:
    """array[rows]; a slice where they are next to each other, as rows that count often are: a gather costs more."""
    if rows.size > array.shape[0]:
        return array[rows]
    cut = lambda: lax.dynamic_slice_in_dim(array, rows[0], rows.size)
    return lax.cond(consecutive(rows), cut, lambda: array[rows])
