"""Sequences in packed rows, inside jit: next-token targets, sums over sequences, and responses taken out again.

Packing is told by two int arrays beside the tokens: `segment_ids`, the number of the sequence each token belongs to, 1
and up, the same wherever in the batch the sequence lies, 0 for padding; and `positions`, the place of the token in its
sequence. `jaxrl_logprob.packing` makes them on the host.

Every array is [*batch] as the ops have it: split as `axes` says, its last dimension the sequence. Inside your own
shard_map the arrays are the local blocks.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int32, Integer

from ._operands import check_ids, check_loss_mask, floating
from ._per_token import over_tokens
from ._scoring import arithmetic_dtype
from ._transform import check_static_int
from .sharding import MeshAxes, Placement, SequenceLayout
from .sharding._axes import axis_names
from .sharding._errors import wrong
from .sharding._layout import SplitSequence
from .sharding._placement import sum_over, vma


# What is on the host too: `Packed` is NumPy's.
AnyArray = Array | np.ndarray


class ShiftedTargets(NamedTuple):
    """What each position predicts, and whether that counts.

    Attributes:
        targets: the next token of the same sequence; `ignore_index` where there is none.
        loss_mask: True where there is one, and it counts.
    """

    targets: Int32[Array, "*batch"]
    loss_mask: Bool[Array, "*batch"]


class Responses(NamedTuple):
    """Per-token values of responses, one row for each sequence.

    Attributes:
        values: 0 where `mask` is False.
        mask: True where the response has a token that some position predicts.
    """

    values: Float[Array, "S R"]
    mask: Bool[Array, "S R"]


def shift_targets(
    tokens: Integer[AnyArray, "*batch"],
    segment_ids: Integer[AnyArray, "*batch"] | None = None,
    *,
    token_mask: Bool[AnyArray, "*batch"] | None = None,
    ignore_index: int = -100,
    layout: SequenceLayout = SequenceLayout(),
    axes: MeshAxes | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> ShiftedTargets:
    """Next-token targets: what position t predicts is the token at t + 1 of the same sequence.

    Right at the ends of sequences and of shards, in every layout; each device exchanges one token with each neighbour
    (striped: the tokens of one). Everything else here that is "per token", log-probabilities first, stands at the
    position that predicts.

    Args:
        tokens: [*batch], ids, stored in the order of `layout` along the last dimension.
        segment_ids: the sequence each token belongs to, 0 for padding; one sequence per row when None.
        token_mask: True at the tokens that count as targets, those of responses: where they stand, not shifted.
        ignore_index: the target where there is none.
        layout: the order of the positions; `axes` says which mesh axes split them.
        axes: which mesh axes split what; may be left out where there is one device or the axes are Explicit.
        mesh: the mesh; that of `jax.set_mesh` when None.

    Raises:
        TypeError: tokens or segment_ids not integers, token_mask not bool.
        ValueError: shapes that do not match, or a layout or `axes` that do not fit them.

    Example:
        >>> shift_targets(jnp.array([[10, 11, 12, 20, 21]]), jnp.array([[1, 1, 1, 2, 2]])).targets
        Array([[  11,   12, -100,   21, -100]], dtype=int32)
    """
    check_static_int("ignore_index", ignore_index)
    tokens, segment_ids = _ids("tokens", tokens), _segment_ids(segment_ids, jnp.shape(tokens))
    mask = jnp.ones(tokens.shape, bool) if token_mask is None else check_loss_mask(token_mask, tokens.shape)

    def local(placement, tokens, segment_ids, mask):
        split = _split(placement, tokens, layout)
        here = jnp.stack([tokens, segment_ids, mask.astype(jnp.int32)])
        targets, next_ids, counts = split.following(here, layout)
        same = (next_ids == segment_ids) & (segment_ids > 0)  # After the last position there is segment 0.
        return jnp.where(same, targets, ignore_index), same & (counts > 0)

    arrays = {"tokens": tokens, "segment_ids": segment_ids, "token_mask": mask}
    return ShiftedTargets(*over_tokens(local, arrays, axes=axes, mesh=mesh, out=("token", "token")))


def shift_values(
    values: Float[AnyArray, "*batch"],
    segment_ids: Integer[AnyArray, "*batch"] | None = None,
    *,
    layout: SequenceLayout = SequenceLayout(),
    axes: MeshAxes | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> Float[Array, "*batch"]:
    """Values that stand at the tokens they concern, moved to the positions that predict those; 0 where there are none.

    For log-probabilities as a sampler records them, and whatever else comes with a token. Arguments as for
    `shift_targets`. Differentiable.

    Example:
        >>> shift_values(jnp.array([[0.0, -1.0, -2.0, 0.0, -3.0]]), jnp.array([[1, 1, 1, 2, 2]]))
        Array([[-1., -2.,  0., -3.,  0.]], dtype=float32)
    """
    values = floating("values", values)
    segment_ids = _segment_ids(segment_ids, values.shape)

    def local(placement, values, segment_ids):
        split = _split(placement, values, layout)
        same = (split.following(segment_ids, layout) == segment_ids) & (segment_ids > 0)
        return jnp.where(same, split.following(values, layout), jnp.zeros((), values.dtype))

    return over_tokens(local, {"values": values, "segment_ids": segment_ids}, axes=axes, mesh=mesh, out="token")


def segment_sum(
    values: Float[AnyArray, "*batch"],
    segment_ids: Integer[AnyArray, "*batch"],
    num_segments: int,
    *,
    loss_mask: Bool[AnyArray, "*batch"] | None = None,
    axes: MeshAxes | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> Float[Array, " S"]:
    """The sum of `values` over each sequence, wherever in the batch it lies: rows, shards, devices.

    Differentiable. One sum of S floats over the axes of the tokens; every device has the result, and the same
    collectives, whatever sequences it holds.

    Args:
        values: [*batch].
        segment_ids: the sequence each token belongs to: s + 1 adds to entry s; 0 and those above num_segments to none.
        num_segments: S, static.
        loss_mask: True where the token counts; elsewhere `values` may hold anything.
        axes: which mesh axes split what; may be left out where there is one device or the axes are Explicit.
        mesh: the mesh; that of `jax.set_mesh` when None.

    Returns:
        float32 (float64 where `values` are); 0 for a sequence without tokens.

    Raises:
        TypeError: values not floating point, segment_ids not integers, loss_mask not bool, num_segments not an int.
        ValueError: shapes that do not match, `axes` that do not fit.

    Example:
        >>> segment_sum(jnp.array([[1.0, 2.0, 3.0, 9.0]]), jnp.array([[1, 1, 2, 0]]), 3)
        Array([3., 3., 0.], dtype=float32)
    """
    return _segment_sums(values, segment_ids, num_segments, loss_mask, axes, mesh)[:, 0]


def segment_count(
    segment_ids: Integer[AnyArray, "*batch"],
    num_segments: int,
    *,
    loss_mask: Bool[AnyArray, "*batch"] | None = None,
    axes: MeshAxes | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> Float[Array, " S"]:
    """The number of tokens of each sequence, or of those that count. Arguments as for `segment_sum`.

    Example:
        >>> segment_count(jnp.array([[1, 1, 2, 0]]), 3)
        Array([2., 1., 0.], dtype=float32)
    """
    ones = jnp.ones(jnp.shape(segment_ids), jnp.float32)
    return _segment_sums(ones, segment_ids, num_segments, loss_mask, axes, mesh)[:, 1]


def segment_mean(
    values: Float[AnyArray, "*batch"],
    segment_ids: Integer[AnyArray, "*batch"],
    num_segments: int,
    *,
    loss_mask: Bool[AnyArray, "*batch"] | None = None,
    axes: MeshAxes | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> Float[Array, " S"]:
    """The mean of `values` over the tokens of each sequence that count; 0, with gradient 0, where there are none.

    Arguments as for `segment_sum`; sums and counts go over the devices together.

    Example:
        >>> segment_mean(jnp.array([[1.0, 2.0, 3.0, 9.0]]), jnp.array([[1, 1, 2, 0]]), 3)
        Array([1.5, 3. , 0. ], dtype=float32)
    """
    sums = _segment_sums(values, segment_ids, num_segments, loss_mask, axes, mesh)
    return sums[:, 0] / jnp.maximum(sums[:, 1], 1.0)


def spread_segments(
    per_segment: Float[AnyArray, " S"],
    segment_ids: Integer[AnyArray, "*batch"],
    *,
    axes: MeshAxes | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> Float[Array, "*batch"]:
    """One value for each sequence, at each of its tokens: advantages, sequence ratios; 0 at padding.

    Differentiable: the gradient of an entry is the sum over its tokens, on all devices.

    Args:
        per_segment: [S]; entry s belongs to the tokens whose segment id is s + 1. The same on every device.
        segment_ids, axes, mesh: as for `segment_sum`.

    Example:
        >>> spread_segments(jnp.array([5.0, 7.0]), jnp.array([[1, 1, 2, 0]]))
        Array([[5., 5., 7., 0.]], dtype=float32)
    """
    per_segment = _per_sequence("per_segment", floating("per_segment", per_segment))

    def local(placement, segment_ids, per_segment):
        return _of_segments(per_segment, segment_ids)

    arrays = {"segment_ids": _ids("segment_ids", segment_ids)}
    return over_tokens(local, arrays, (per_segment,), axes=axes, mesh=mesh, out="token")


def unpack_responses(
    values: Float[AnyArray, "*batch"],
    segment_ids: Integer[AnyArray, "*batch"],
    positions: Integer[AnyArray, "*batch"],
    prompt_lengths: Integer[AnyArray, " S"],
    response_lengths: Integer[AnyArray, " S"],
    max_response_length: int,
    *,
    axes: MeshAxes | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> Responses:
    """Per-token results of packed rows, as one row of response tokens for each sequence.

    Differentiable. One sum of 2 S R floats over the axes of the tokens, on every device, whatever it holds: a sequence
    without a response gives a row of zeros, and its tokens gradient 0.

    Args:
        values: [*batch], at the positions that predict, as log-probabilities and entropies come.
        segment_ids, positions: of the tokens; entry s below belongs to the sequence with id s + 1.
        prompt_lengths, response_lengths: tokens of each sequence. Without a prompt, nothing predicts the first
            response token: it is not in the mask.
        max_response_length: R, static; longer responses are cut.
        axes, mesh: as for `segment_sum`.

    Example:
        >>> ids, positions = jnp.array([[1, 1, 1, 2, 2]]), jnp.array([[0, 1, 2, 0, 1]])
        >>> values = jnp.array([[-1.0, -2.0, 0.0, -3.0, 0.0]])
        >>> unpack_responses(values, ids, positions, jnp.array([1, 1]), jnp.array([2, 1]), 2).values
        Array([[-1., -2.],
               [-3.,  0.]], dtype=float32)
    """
    values = floating("values", values)
    segment_ids, positions = (
        _segment_ids(segment_ids, values.shape),
        check_ids("positions", positions, values.shape, ""),
    )
    prompts = _per_sequence("prompt_lengths", _ids("prompt_lengths", prompt_lengths))
    responses = check_ids("response_lengths", response_lengths, prompts.shape, "One for each of prompt_lengths.")
    check_static_int("max_response_length", max_response_length)
    size = (prompts.shape[0], max_response_length)

    def local(placement, values, segment_ids, positions, prompts, responses):
        prompt, response = _of_segments(prompts, segment_ids), _of_segments(responses, segment_ids)
        token = positions - (prompt - 1)
        counts = (segment_ids > 0) & (token >= 0) & (token < response)
        rows = jnp.where(counts, segment_ids - 1, size[0])
        return _sum_at((rows, token), size, _counted(values, counts), placement)

    arrays = {"values": values, "segment_ids": segment_ids, "positions": positions}
    sums = over_tokens(local, arrays, (prompts, responses), axes=axes, mesh=mesh, out="whole")
    return Responses(sums[..., 0], sums[..., 1] > 0)


def _segment_sums(values, segment_ids, num_segments, loss_mask, axes, mesh) -> Float[Array, "S 2"]:
    """Sums and counts."""
    values = floating("values", values)
    segment_ids = _segment_ids(segment_ids, values.shape)
    mask = jnp.ones(values.shape, bool) if loss_mask is None else check_loss_mask(loss_mask, values.shape)
    check_static_int("num_segments", num_segments)

    def local(placement, segment_ids, values, mask):
        counts = mask & (segment_ids > 0)
        rows = jnp.where(counts, segment_ids - 1, num_segments)
        return _sum_at((rows,), (num_segments,), _counted(values, counts), placement)

    arrays = {"segment_ids": segment_ids, "values": values, "loss_mask": mask}
    return over_tokens(local, arrays, axes=axes, mesh=mesh, out="whole")


def _counted(values: jax.Array, counts: jax.Array) -> Float[Array, "*batch 2"]:
    """[value, 1] where the token counts, whatever it holds elsewhere."""
    dtype = arithmetic_dtype(values)
    return jnp.stack([jnp.where(counts, values.astype(dtype), 0.0), counts.astype(dtype)], axis=-1)


def _sum_at(index: tuple[jax.Array, ...], size: tuple[int, ...], updates: jax.Array, placement: Placement) -> jax.Array:
    """[*size, 2]: the sums of all tokens' updates, each at its index; none where that is out of range."""
    sums = jnp.zeros((*size, updates.shape[-1]), updates.dtype).at[index].add(updates, mode="drop")
    return sum_over(sums, vma(sums) & set(axis_names(placement.axes.tokens)))


def _of_segments(per_segment: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """The value of each token's sequence; 0 where it has none."""
    index = jnp.where(segment_ids > 0, segment_ids - 1, per_segment.shape[0])
    return per_segment.at[index].get(mode="fill", fill_value=0)


def _split(placement: Placement, array: jax.Array, layout: SequenceLayout) -> SplitSequence:
    if not array.ndim:
        raise ValueError(wrong("tokens", "have a dimension of positions, the last", "a scalar"))
    split = SplitSequence.of(placement, array.shape[-1])
    split.check(layout, "layout")
    return split


def _ids(name: str, ids: Any) -> Int32[Array, "..."]:
    return check_ids(name, ids, jnp.shape(ids), "")


def _segment_ids(segment_ids: Any, batch: tuple[int, ...]) -> Int32[Array, "*batch"]:
    if segment_ids is None:
        return jnp.ones(batch, jnp.int32)
    return check_ids("segment_ids", segment_ids, batch, "One for each token; 0 for padding.")


def _per_sequence(name: str, array: jax.Array) -> Array:
    if array.ndim != 1:
        raise ValueError(wrong(name, "have one entry for each sequence, shape (S,)", array.shape))
    return array
