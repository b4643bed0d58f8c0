"""In which order the positions of a sequence lie over the devices that split it.

Causal attention gives later positions more work, so that context parallelism does not always split a sequence in
order. An order is a permutation of the positions; arrays of per-token numbers are stored in it. Everything that asks
"which position is this" or "which comes next" asks here.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from ._axes import axis_names, MeshAxes
from ._errors import wrong
from ._placement import place, Placement, tokens_first


Order = Literal["contiguous", "zigzag", "striped"]


@dataclasses.dataclass(frozen=True)
class SequenceLayout:
    """The order in which the positions of a sequence are stored, over `shards` equal blocks, one for each device.

    Args:
        order: "contiguous": block r has the r-th part. "zigzag": of 2 shards chunks, block r has chunks r and
            2 shards - 1 - r. "striped": block r has positions r, r + shards, r + 2 shards, ...
        shards: the devices that split the sequence: the product of the sizes of its mesh axes.

    Raises:
        ValueError: another order, or shards below 1.

    Example:
        >>> SequenceLayout("zigzag", 2).positions(8)
        array([0, 1, 6, 7, 2, 3, 4, 5])

    References:
        zigzag: https://github.com/zhuzilin/ring-flash-attention; striped: Brandon et al., https://arxiv.org/abs/2311.09431.
    """

    order: Order = "contiguous"
    shards: int = 1

    def __post_init__(self):
        if self.order not in ("contiguous", "zigzag", "striped"):
            raise ValueError(wrong("order", 'be "contiguous", "zigzag" or "striped"', repr(self.order)))
        if not isinstance(self.shards, int) or self.shards < 1:
            raise ValueError(wrong("shards", "be a positive int", repr(self.shards)))

    @property
    def multiple(self) -> int:
        """What a stored length is a multiple of."""
        return 2 * self.shards if self.order == "zigzag" else self.shards

    def padded(self, length: int) -> int:
        """The stored length of a sequence: `length` rounded up."""
        return -(-length // self.multiple) * self.multiple

    def positions(self, length: int) -> np.ndarray:
        """[padded(length)]: the position stored in each slot; those from `length` on are padding."""
        return self.position(np.arange(self.padded(length)), self.padded(length))

    def slots(self, length: int) -> np.ndarray:
        """[padded(length)]: the slot in which each position is stored; the inverse of `positions`."""
        return self.slot(np.arange(self.padded(length)), self.padded(length))

    def position(self, slot: Any, size: int) -> Any:
        """The positions stored in these slots of a sequence of `size`, a multiple of `multiple`."""
        block = size // self.shards
        if self.order == "striped":
            return slot % block * self.shards + slot // block
        if self.order == "zigzag":
            half = block // 2
            shard, second = slot // half // 2, slot // half % 2
            chunk = shard + second * (2 * self.shards - 1 - 2 * shard)
            return chunk * half + slot % half
        return slot

    def slot(self, position: Any, size: int) -> Any:
        """The slots that store these positions of a sequence of `size`, a multiple of `multiple`."""
        block = size // self.shards
        if self.order == "striped":
            return position % self.shards * block + position // self.shards
        if self.order == "zigzag":
            half = block // 2
            chunk, second = position // half, position // half // self.shards
            shard = chunk + second * (2 * self.shards - 1 - 2 * chunk)
            return (2 * shard + second) * half + position % half
        return position

    def arrange(self, array: Any, *, axis: int = -1, fill: Any = 0) -> Any:
        """A NumPy or JAX array in order, as it is stored: padded with `fill`, and permuted along `axis`.

        For arrays that one device, or the host, has all of; those split over devices: `redistribute`.
        """
        length = array.shape[axis]
        pad = [(0, 0)] * array.ndim
        pad[axis] = (0, self.padded(length) - length)
        numpy = np if isinstance(array, np.ndarray) else jnp
        return numpy.take(numpy.pad(array, pad, constant_values=fill), self.positions(length), axis=axis)

    def restore(self, array: Any, length: int, *, axis: int = -1) -> Any:
        """The inverse of `arrange`, of an array whose length was `length`."""
        numpy = np if isinstance(array, np.ndarray) else jnp
        return numpy.take(array, self.slots(length)[:length], axis=axis)


def redistribute(
    array: jax.Array,
    source: SequenceLayout,
    target: SequenceLayout,
    *,
    axis: int = -1,
    axes: MeshAxes | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> jax.Array:
    """A per-token array that is stored in one order, stored in another.

    For ids, masks, log-probabilities: O(N) numbers, all-gathered along the sequence, of which each device takes its
    own. Differentiable; the gradient is the single-device one.

    Args:
        array: [*batch], or [*batch, ...] where `axis` is not the last.
        source, target: the orders; the length of the sequence is a multiple of both their `multiple`s.
        axis: the dimension of the sequence, the last of the batch.
        axes: which mesh axes split what; may be left out where there is one device or the axes are Explicit.
        mesh: the mesh; that of `jax.set_mesh` when None. Inside your own shard_map, `array` is the local block.

    Raises:
        ValueError: a length that is no such multiple, or axes that do not fit.

    Example:
        >>> redistribute(jnp.arange(8), SequenceLayout(), SequenceLayout("zigzag", 2))
        Array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
    """
    rank = axis % array.ndim + 1
    roles = (*tokens_first(rank), *(None,) * (array.ndim - rank))
    placement = place(axes, mesh, {"array": (array, roles)}, rank=rank)
    spec = placement.spec(*roles)

    def local(x):
        split = SplitSequence.of(placement, x.shape[rank - 1])
        split.check(source, "source")
        split.check(target, "target")
        slots = source.slot(target.position(split.slots, split.size), split.size)
        return jnp.take(split.gathered(x, rank - 1), slots, axis=rank - 1, mode="clip")

    return placement.run(local, (spec,), spec)(placement.with_spec(array, *roles))


@dataclasses.dataclass(frozen=True)
class SplitSequence:
    """The sequence dimension as one device sees it, inside `Placement.run`.

    Attributes:
        names: the mesh axes that split it, and into how many `shards`.
        size: its length over all of them.
        slots: [size / shards]: those that this device stores.
    """

    names: tuple[str, ...]
    shards: int
    size: int
    slots: jax.Array

    @classmethod
    def of(cls, placement: Placement, local_size: int) -> "SplitSequence":
        names = axis_names(placement.axes.per_dimension(placement.rank)[-1]) if placement.rank else ()
        shards = lax.axis_size(names) if names else 1
        first = lax.axis_index(names) * local_size if names else 0
        return cls(names, shards, shards * local_size, lax.iota(jnp.int32, local_size) + first)

    def check(self, layout: SequenceLayout, name: str) -> None:
        if self.size % layout.multiple:
            raise ValueError(
                wrong(
                    name,
                    f"divide the {self.size} positions of the sequence into {layout.multiple} equal parts",
                    layout,
                    f"Pad the sequence to {layout.padded(self.size)}: `SequenceLayout.arrange` does.",
                )
            )

    def gathered(self, x: jax.Array, axis: int = -1) -> jax.Array:
        """The whole sequence, on every device that has a part of it."""
        return lax.all_gather(x, self.names, axis=axis % x.ndim, tiled=True) if self.names else x

    def following(self, x: jax.Array, layout: SequenceLayout, fill: Any = 0) -> jax.Array:
        """x [..., size / shards] of the position that follows the one stored in each slot; after the last, `fill`.

        One exchange with each neighbour where the devices are those of the layout.
        """
        last = layout.position(self.slots, self.size) == self.size - 1
        return jnp.where(jnp.broadcast_to(last, x.shape), jnp.asarray(fill, x.dtype), self._following(x, layout))

    def _following(self, x: jax.Array, layout: SequenceLayout) -> jax.Array:
        if not self.names or (layout.order != "contiguous" and layout.shards != self.shards):
            after = layout.position(self.slots, self.size) + 1
            return jnp.take(self.gathered(x), layout.slot(after, self.size), axis=-1, mode="clip")
        on_last = lax.axis_index(self.names) == self.shards - 1
        after = lambda block, first: jnp.concatenate([block[..., 1:], first], axis=-1)
        if layout.order == "contiguous":
            return after(x, self._pulled(x[..., :1], 1))
        if layout.order == "striped":
            following = self._pulled(x, 1)
            return jnp.where(on_last, after(following, following[..., :1]), following)
        low, high = jnp.split(x, 2, axis=-1)
        after_low = jnp.where(on_last, high[..., :1], self._pulled(low[..., :1], 1))
        return jnp.concatenate([after(low, after_low), after(high, self._pulled(high[..., :1], -1))], axis=-1)

    def _pulled(self, block: jax.Array, distance: int) -> jax.Array:
        """That of the device `distance` further on, round the ring."""
        ring = [((r + distance) % self.shards, r) for r in range(self.shards)]
        return lax.ppermute(block, self.names, ring)
