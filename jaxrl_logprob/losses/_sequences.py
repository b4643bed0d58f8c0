"""Which sequence each token belongs to, and the sums that losses need: over all tokens, and over each sequence."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int32, Integer

from .. import segments
from .._operands import check_ids, check_loss_mask, floating
from .._per_token import over_tokens
from .._scoring import arithmetic_dtype
from .._transform import check_static_int
from ..sharding import MeshAxes
from ..sharding._axes import axis_names
from ..sharding._errors import wrong
from ..sharding._placement import manual_shards, sum_over, vary_over, vma


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sequences:
    """Which sequence each token belongs to, and where the tokens lie.

    Args:
        segment_ids: [*batch], as `jaxrl_logprob.segments` has them. None: each row (the last dimension) is a sequence.
        num_segments: how many there are, static; given with segment_ids.
        axes: which mesh axes split the tokens; may be left out where there is one device or the axes are Explicit.
        mesh: the mesh; that of `jax.set_mesh` when None.
    """

    segment_ids: Integer[Array, "*batch"] | None = None
    num_segments: int | None = dataclasses.field(default=None, metadata=dict(static=True))
    axes: MeshAxes | None = dataclasses.field(default=None, metadata=dict(static=True))
    mesh: Mesh | AbstractMesh | None = dataclasses.field(default=None, metadata=dict(static=True))

    def __post_init__(self):
        if (self.segment_ids is None) != (self.num_segments is None):
            raise ValueError(wrong("num_segments", "be given with segment_ids, and only then", repr(self.num_segments)))
        if self.num_segments is not None:
            check_static_int("num_segments", self.num_segments)

    def total(self, values: Float[Array, "*batch"], loss_mask: Bool[Array, "*batch"]) -> Float[Array, ""]:
        """The sum over all tokens that count, wherever they are."""

        def local(placement, values, mask):
            return self._over_devices(placement, jnp.sum(jnp.where(mask, values, 0.0)))

        return self._run(local, {"values": values, "loss_mask": loss_mask}, "whole")

    def count(self, loss_mask: Bool[Array, "*batch"]) -> Float[Array, ""]:
        """How many tokens count."""
        return self.total(jnp.ones(loss_mask.shape, jnp.float32), loss_mask)

    def sums(self, values: Float[Array, "*batch"], loss_mask: Bool[Array, "*batch"]) -> Float[Array, " S"]:
        """The sum over the tokens of each sequence that count."""
        return segments.segment_sum(values, *self._ids(values), **self._options(loss_mask=loss_mask))

    def means(self, values: Float[Array, "*batch"], loss_mask: Bool[Array, "*batch"]) -> Float[Array, " S"]:
        """The mean over the tokens of each sequence that count; 0 where there are none."""
        return segments.segment_mean(values, *self._ids(values), **self._options(loss_mask=loss_mask))

    def counts(self, loss_mask: Bool[Array, "*batch"]) -> Float[Array, " S"]:
        """How many tokens of each sequence count."""
        return segments.segment_count(*self._ids(loss_mask), **self._options(loss_mask=loss_mask))

    def spread(self, per_sequence: Float[Array, " S"], like: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
        """One value for each sequence, at each of its tokens; `like` is any per-token array."""
        return segments.spread_segments(per_sequence, self._ids(like)[0], **self._options())

    def _ids(self, like: jax.Array) -> tuple[Int32[Array, "*batch"], int]:
        if self.segment_ids is not None and self.num_segments is not None:
            ids = check_ids("sequences.segment_ids", self.segment_ids, like.shape, "One for each token; 0 for padding.")
            return ids, self.num_segments
        if not like.ndim:
            raise ValueError(wrong("logprobs", "have a dimension of positions, the last", "a scalar"))

        def local(placement, x):
            number = jnp.zeros(x.shape, jnp.int32)
            for dimension, names in enumerate(placement.axes.per_dimension(x.ndim)[:-1]):
                names, size = axis_names(names), x.shape[dimension]
                shards = lax.axis_size(names) if names else 1
                index = lax.broadcasted_iota(jnp.int32, x.shape, dimension)
                number = number * (size * shards) + index + (lax.axis_index(names) * size if names else 0)
            return vary_over(number + 1, vma(x))

        whole = [n * manual_shards(entry) for n, entry in zip(like.shape, self._entries(like.ndim))][:-1]
        return self._run(local, {"logprobs": like}, "token"), math.prod(whole)

    def _entries(self, rank: int) -> tuple:
        return (self.axes or MeshAxes()).per_dimension(rank)

    def _options(self, **more: Any) -> dict[str, Any]:
        return dict(axes=self.axes, mesh=self.mesh, **more)

    def _run(self, local, per_token: Mapping[str, jax.Array], out: Any) -> Any:
        return over_tokens(local, per_token, axes=self.axes, mesh=self.mesh, out=out)

    @staticmethod
    def _over_devices(placement, sums: jax.Array) -> jax.Array:
        return sum_over(sums, vma(sums) & set(axis_names(placement.axes.tokens)))


def per_token(**arrays: Any) -> list[Float[Array, "*batch"]]:
    """Floating-point arrays of one shape, in the dtype of all arithmetic.

    Raises:
        TypeError: not floating point.
        ValueError: another shape than the first; nothing is broadcast.
    """
    (name, first), *_ = arrays.items()
    shape, found = jnp.shape(first), [floating(n, a) for n, a in arrays.items()]
    for other, array in zip(arrays, found):
        if array.shape != shape:
            remedy = "One number for each token: spread those of sequences with `segments.spread_segments`."
            raise ValueError(wrong(other, f"have the shape of {name}, {shape}", array.shape, remedy))
    return [a.astype(arithmetic_dtype(*found)) for a in found]


def mask_of(loss_mask: Any, shape: tuple[int, ...]) -> Bool[Array, "*batch"]:
    return jnp.ones(shape, bool) if loss_mask is None else check_loss_mask(loss_mask, shape)


def kept(mask: Bool[Array, "*batch"], *arrays: Float[Array, "*batch"]) -> list[Float[Array, "*batch"]]:
    """The arrays, 0 where the token does not count: what they hold there does not reach the arithmetic."""
    return [jnp.where(mask, a, 0.0) for a in arrays]
