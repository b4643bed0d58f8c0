"""The loops of the ops from hidden states, on one device: tiles of rows, those that count first, and vocabulary blocks.

    forward   for each tile of rows, for each block of the vocabulary: logits, their statistics
    backward  "vocab" outside: for each block, for each tile: dlm_head of the block, written once; dhidden_states of all
              rows accumulates
              "tokens" outside: the other way round

Tiles without a row that counts are not visited: their number is data. Loops with collectives in them have the same
steps on every device.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._chunks import Blocks, choose_blocks, Chunks
from ._head import BIAS, Weight
from ._head_blocks import HeadBlocks, map_parts, Operands, vocabulary_first
from ._loop import fold_blocks, on_platform, Platform
from ._operands import TokenOperands
from ._scoring import (
    arithmetic_dtype,
    backward_block,
    finish,
    flat,
    forward_block,
    MOST_COMPARED_IDS,
    row_gradients,
    Scoring,
)
from ._stats import merge_blocks, no_stats, Normalizer
from ._tiles import consecutive, over_tiles, row_order, RowOrder, take_rows, Tile
from .sharding._placement import sum_over, vary_over, vma


@dataclass(frozen=True)
class LinearScoring:
    """What an op from hidden states must know before it is traced."""

    scoring: Scoring
    weights: tuple[Weight, ...]
    chunks: Chunks

    def parts(self, wanted: frozenset[str]) -> Operands:
        """The weights and the bias whose gradient is wanted, by name."""
        only = lambda w: w if w.name in wanted else None
        return Operands([], [only(w) for w in self.weights], only(BIAS))


def local_gather(static: LinearScoring, operands: Operands) -> Operands:
    """The operands of one device, whole along features, and along tokens over the vocabulary axes."""
    place = static.scoring.placement
    gather = lambda x, names, axis: lax.all_gather(x, names, axis=axis, tiled=True, to="invarying") if names else x
    sequence = place.vocab if place.axes.sequence_parallel else ()
    activations = [gather(x, sequence, place.rank - 1) for x in operands.activations]
    weights = [
        m if w.features_dimension is None else gather(m, place.features, w.features_dimension)
        for w, m in zip(static.weights, operands.weights)
    ]
    return operands._replace(activations=activations, weights=weights)


def local_forward(static: LinearScoring, operands: Operands, tokens: TokenOperands):
    """Statistics of this device's columns, tile by tile, then one merge over the vocabulary shards."""
    scoring, batch = static.scoring, operands.activations[0].shape[:-1]
    activations, tokens = flat((operands.activations, tokens), len(batch))
    operands = operands._replace(activations=activations)
    size, columns = _sizes(static, operands)
    first_id = scoring.first_id(columns)
    local_ids = tokens.ids - first_id
    dtype, axes = arithmetic_dtype(*jax.tree.leaves(operands)), vma((operands, tokens))

    def run(platform: Platform, operands: Operands, tokens: TokenOperands, local_ids: jax.Array):
        blocks = _blocks(static, operands, platform)
        weights, operands = vocabulary_first(static.weights, operands, platform)
        order = row_order(tokens.valid, blocks.last_rows)
        head = HeadBlocks(weights, platform, operands)
        ids, inverse_temperature = jax.tree.map(lambda a: a[order.rows], (local_ids, tokens.inverse_temperature))

        def tile_stats(tile, results):
            xs = head.rows(*tile.take((order.rows, order.counted)))
            ids_, temperature = tile.take((ids, inverse_temperature))

            def block(carry, first, width):
                stats, chosen = carry
                x = head.logits(xs, head.block(first, width), dtype)
                new = forward_block(scoring, x, scoring.columns(first_id + first, width), temperature)
                return merge_blocks(stats, new, temperature), _choose(chosen, x, ids_ - first)

            nothing = vary_over(jnp.zeros(tile.size, dtype), axes)
            none_chosen = vary_over(jnp.zeros(ids_.shape, dtype), axes)
            start = (no_stats(nothing, with_entropy=scoring.entropy.wanted), none_chosen)
            done = fold_blocks(block, start, columns, blocks.columns)
            return jax.tree.map(tile.put, results, done)

        empty = vary_over(jnp.zeros(order.rows.shape, dtype), axes)
        none = vary_over(jnp.zeros((*order.rows.shape, tokens.ids.shape[-1]), dtype), axes)
        start = (no_stats(empty, with_entropy=scoring.entropy.wanted), none)
        results = over_tiles(tile_stats, start, order, blocks)
        return jax.tree.map(lambda a: a[order.position], results)

    stats, chosen = on_platform(run, operands, tokens, local_ids)
    held = (local_ids >= 0) & (local_ids < columns)
    out = finish(scoring, stats, chosen, held, tokens)
    return jax.tree.map(lambda a: a.reshape(*batch, *a.shape[1:]), out)


def local_backward(
    static: LinearScoring,
    wanted: frozenset[str],
    operands: Operands,
    tokens: TokenOperands,
    norm: Normalizer,
    entropies: jax.Array | None,
    dlogprobs: jax.Array,
    dentropy: jax.Array | None,
) -> Operands:
    """The gradients of this device's operands, summed over the devices that share them; None where not `wanted`."""
    batch = operands.activations[0].shape[:-1]
    (activations, tokens, norm, entropies, dlogprobs, dentropy) = flat(
        (operands.activations, tokens, norm, entropies, dlogprobs, dentropy), len(batch)
    )
    operands = operands._replace(activations=activations)
    first_id = static.scoring.first_id(_sizes(static, operands)[1])
    rows = row_gradients(static.scoring, tokens, norm, entropies, tokens.ids - first_id, dlogprobs, dentropy)

    def run(platform: Platform, operands: Operands, rows: Any):
        blocks = _blocks(static, operands, platform)
        weights, operands = vocabulary_first(static.weights, operands, platform)
        loop = _Backward(dataclasses.replace(static, weights=weights), wanted, platform, blocks, operands, rows, batch)
        gradients = loop.vocab_outside() if blocks.vocab_outside else loop.tokens_outside()
        own = lambda d, w, own: d if d is None or w == own else d.T
        return gradients._replace(weights=[*map(own, gradients.weights, weights, static.weights)])

    return on_platform(run, operands, rows)


class _Backward:
    """The backward of one device, in either order of its two loops."""

    def __init__(self, static: LinearScoring, wanted, platform: Platform, blocks: Blocks, operands, rows, batch):
        self.static, self.platform, self.blocks, self.operands, self.batch = static, platform, blocks, operands, batch
        self.parts = static.parts(wanted)
        self.head = HeadBlocks(static.weights, platform, operands)
        self.order = row_order(rows.valid, blocks.last_rows)
        self.sorted = jax.tree.map(lambda a: a[self.order.rows], rows)
        self.sorted = self.sorted._replace(valid=self.order.counted)
        self.dtype = arithmetic_dtype(*jax.tree.leaves(operands))
        self.axes = vma((operands, rows))
        self.features = static.scoring.placement.features
        self.columns = _sizes(static, operands)[1]
        self.first_id = static.scoring.first_id(self.columns)

    def vocab_outside(self) -> Operands:
        """Each block of dlm_head is finished and written once; dhidden_states accumulates, [N, D] floats."""
        rows = self.order.rows.size
        gradients = self._buffers()
        dxs = [self._zeros(rows, x.shape[-1]) for x in self.operands.activations]

        def block(carry, first, width):
            dxs, gradients = carry
            weights = self._block(first, width)
            zeros = map_parts(lambda _, m: self._zeros(*m.shape), self.parts, weights)

            def add_tile(tile, carry):
                dxs, sums = carry
                new = self._tile(tile, self._rows(tile), weights, first, width)
                dxs = [self._add(a, b, tile.first, 0) for a, b in zip(dxs, new.activations)]
                return dxs, map_parts(lambda _, total, d: total + d, self.parts, sums, new)

            dxs, sums = over_tiles(add_tile, (dxs, zeros), self.order, self.blocks)
            return dxs, self._write(gradients, sums, first)

        dxs, gradients = fold_blocks(block, (dxs, gradients), self.columns, self.blocks.columns)
        dxs = [self._collect(dxs, i, x) for i, x in enumerate(self.operands.activations)]
        return Operands(dxs, *self._loaded(gradients)[1:])

    def tokens_outside(self) -> Operands:
        """Each tile of dhidden_states is finished and written once; dlm_head accumulates, [D, V] floats."""
        totals = map_parts(lambda _, m: self._zeros(*m.shape), self.parts, self.operands)

        def finish_tile(tile, carry):
            dxs, totals = carry
            xs = self._rows(tile)

            def block(carry, first, width):
                sums, totals = carry
                new = self._tile(tile, xs, self._block(first, width), first, width)
                add = lambda w, total, d: self._add(total, d, first, w.vocab_dimension)
                totals = map_parts(add, self.parts, totals, new)
                return [a + b for a, b in zip(sums, new.activations)], totals

            sums = [self._zeros(*x.shape) for x in xs]
            sums, totals = fold_blocks(block, (sums, totals), self.columns, self.blocks.columns)
            sums = [self._with_adapted(sums, i) for i, _ in enumerate(sums)]
            return [self._scatter(dx, s, tile, x) for dx, s, x in zip(dxs, sums, self.operands.activations)], totals

        # Summed over the vocabulary tile by tile; where the rows of a tile are split there, the whole afterwards.
        varying = vma(self.operands.activations) if self._sequence_shards() == 1 else self.axes
        dxs = [self._stored_zeros(x.shape, x.dtype, varying) for x in self.operands.activations]
        order = self.order if varying == self.axes else self._same_steps()
        dxs, totals = over_tiles(finish_tile, (dxs, totals), order, self.blocks)

        def block(gradients, first, width):
            cut = lambda w, total: lax.dynamic_slice_in_dim(total, first, width, w.vocab_dimension)
            return self._write(gradients, map_parts(cut, self.parts, totals), first)

        gradients = fold_blocks(block, self._buffers(), self.columns, self.blocks.columns)
        dxs = [self._whole(dx, x) for dx, x in zip(dxs, self.operands.activations)]
        return Operands(dxs, *self._loaded(gradients)[1:])

    def _same_steps(self) -> RowOrder:
        """As many tiles on every device as on that which has most rows that count: they sum them together."""
        names = tuple(vma(self.order.num_counted))
        count = self.order.num_counted
        return self.order._replace(num_counted=lax.pmax(count, names) if names else count)

    def _rows(self, tile: Tile) -> list[jax.Array]:
        return self.head.rows(*tile.take((self.order.rows, self.order.counted)))

    def _block(self, first: jax.Array, width: int) -> Operands:
        """The weights of some columns; those that do not exist are 0, whatever they hold."""
        block, columns = self.head.block(first, width), self.static.scoring.columns(self.first_id + first, width)
        if columns is None:
            return block
        exists = columns < self.static.scoring.vocab_size
        clean = lambda m, w: jnp.where(exists if w.vocab_dimension else exists.T, m, jnp.zeros((), m.dtype))
        return block._replace(weights=[clean(m, w) for m, w in zip(block.weights, self.static.weights)])

    def _tile(self, tile: Tile, xs: list[jax.Array], weights: Operands, first: jax.Array, width: int) -> Operands:
        """What one block of logits adds to the gradients."""
        rows = tile.take(self.sorted)
        rows = rows._replace(local_ids=rows.local_ids - first)
        columns = self.static.scoring.columns(self.first_id + first, width)
        logits = self.head.logits(xs, weights, self.dtype)
        dlogits = backward_block(self.static.scoring, logits, columns, rows)
        return self.head.gradients(xs, weights, dlogits, self.parts)

    def _with_adapted(self, dxs: list[jax.Array], i: int) -> jax.Array:
        """The gradient of the activations i, given those that the head gives: the first made the second."""
        if i or self.operands.low_rank is None:
            return dxs[i]
        return dxs[0] + jnp.matmul(dxs[1], self.operands.low_rank.astype(self.dtype).T)

    def _zeros(self, *shape: int) -> jax.Array:
        return vary_over(jnp.zeros(shape, self.dtype), self.axes)

    @staticmethod
    def _add(total: jax.Array, new: jax.Array, first: jax.Array, axis: int) -> jax.Array:
        old = lax.dynamic_slice_in_dim(total, first, new.shape[axis], axis)
        return lax.dynamic_update_slice_in_dim(total, old + new, first, axis)

    def _buffers(self) -> Operands:
        """The gradients of weights and bias, all zero, in their own dtypes, as the loops update them."""

        def zeros(part, array):
            split = self._split(part)
            shape = tuple(n // lax.axis_size(self.features) if i == split else n for i, n in enumerate(array.shape))
            varying = vma(array) | set(self.features if split is not None else ())
            return self._stored_zeros(shape, array.dtype, varying)

        return map_parts(zeros, self.parts, self.operands)

    def _split(self, part: Weight) -> int | None:
        """The dimension that other devices have more of (FSDP)."""
        return part.features_dimension if self.features else None

    def _stored_zeros(self, shape: tuple[int, ...], dtype: Any, varying: frozenset[str]) -> jax.Array:
        return vary_over(self.platform.stored(jnp.zeros(shape, dtype)), varying)

    def _loaded(self, gradients: Operands) -> Operands:
        """Stored buffers of weights and bias in their own dtypes."""
        return map_parts(lambda _, g, m: self.platform.loaded(g, m.dtype), self.parts, gradients, self.operands)

    def _write(self, gradients: Operands, sums: Operands, first: jax.Array) -> Operands:
        """Finished blocks of the gradients of weights and bias: rounded, summed over devices, put in place."""

        def write(part, buffer, total, like):
            total = total.astype(like.dtype)
            if (split := self._split(part)) is not None:
                total = lax.psum_scatter(total, self.features, scatter_dimension=split, tiled=True)
            total = sum_over(total, vma(total) - vma(buffer))
            return lax.dynamic_update_slice_in_dim(buffer, self.platform.stored(total), first, part.vocab_dimension)

        return map_parts(write, self.parts, gradients, sums, self.operands)

    def _collect(self, totals: list[jax.Array], i: int, x: jax.Array) -> jax.Array:
        """The gradient [*batch, D] of activations `i`, of accumulators in sorted order: rounded and summed over the
        vocabulary axes tile by tile, so that no second array of its size is held."""
        shards = self._sequence_shards()
        index = lax.iota(jnp.int32, x.shape[0]).reshape(-1, shards, (self.batch or (1,))[-1] // shards)
        index = jnp.moveaxis(index, 1, 0).reshape(shards, -1)

        def block(buffer, first, width):
            rows = lax.dynamic_slice_in_dim(index, first, width, 1).reshape(-1)
            position = self.order.position[rows]
            part = self._with_adapted([take_rows(total, position) for total in totals], i)
            part = jnp.where(self.order.counted[position][:, None], part, 0.0).astype(x.dtype)
            if shards > 1:
                vocab = self.static.scoring.placement.vocab
                part = lax.psum_scatter(part, vocab, scatter_dimension=0, tiled=True)
            part = sum_over(part, vma(part) - vma(buffer))
            return lax.dynamic_update_slice_in_dim(buffer, self.platform.stored(part), first, 0)

        local = index.shape[1]
        varying = vma(x) | set(self.static.scoring.placement.vocab if shards > 1 else ())
        buffer = self._stored_zeros((local, x.shape[1]), x.dtype, varying)
        buffer = fold_blocks(block, buffer, local, self.blocks.rows)
        return self._unflat(self.platform.loaded(buffer, x.dtype), shards)

    def _scatter(self, buffer: jax.Array, block: jax.Array, tile: Tile, x: jax.Array) -> jax.Array:
        """The rows of a tile of dhidden_states, finished, to where they belong; those that do not count stay 0."""
        rows, counted = tile.take((self.order.rows, self.order.counted))
        block = block.astype(x.dtype)
        block = self.platform.stored(sum_over(block, vma(block) - vma(buffer)))
        together = consecutive(rows) & jnp.all(counted)
        put = lambda b: lax.dynamic_update_slice_in_dim(b, block, rows[0], 0)
        drop = jnp.where(counted, rows, len(buffer))
        spread = lambda b: b.at[drop].set(block, mode="drop")
        return lax.cond(together, put, spread, buffer) if len(rows) <= len(buffer) else spread(buffer)

    def _whole(self, buffer: jax.Array, x: jax.Array) -> jax.Array:
        """dhidden_states [*batch, D] of a buffer that has all rows."""
        dx = self._unflat(self.platform.loaded(buffer, x.dtype), 1)
        if self._sequence_shards() == 1:
            return dx
        place = self.static.scoring.placement
        dx = lax.psum_scatter(dx, place.vocab, scatter_dimension=place.rank - 1, tiled=True)
        return sum_over(dx, vma(dx) - vma(x) - set(place.vocab))

    def _sequence_shards(self) -> int:
        place = self.static.scoring.placement
        return lax.axis_size(place.vocab) if place.axes.sequence_parallel else 1

    def _unflat(self, rows: jax.Array, shards: int) -> jax.Array:
        batch = self.batch[:-1] + ((self.batch[-1] // shards,) if self.batch else ())
        return rows.reshape(*batch, rows.shape[-1])


def _blocks(static: LinearScoring, operands: Operands, platform: Platform) -> Blocks:
    tokens, columns = _sizes(static, operands)
    width = operands.activations[0].shape[-1]
    return choose_blocks(static.chunks, tokens=tokens, width=width, vocab=columns, is_cpu=platform.is_cpu)


def _sizes(static: LinearScoring, operands: Operands) -> tuple[int, int]:
    """Rows and columns of this device, of flat operands."""
    return operands.activations[0].shape[0], operands.weights[0].shape[static.weights[0].vocab_dimension]


def _choose(chosen: jax.Array, x: jax.Array, local_ids: jax.Array) -> jax.Array:
    """`chosen` [N, K], with the logits of the ids that are columns of this block."""
    width = x.shape[1]
    if local_ids.shape[1] <= MOST_COMPARED_IDS:
        columns = lax.iota(jnp.int32, width)[None, :]
        pick = lambda k: jnp.sum(jnp.where(columns == local_ids[:, k, None], x, 0.0), axis=1)
        here = jnp.stack([pick(k) for k in range(local_ids.shape[1])], axis=1) if local_ids.shape[1] else chosen
    else:
        here = jnp.take_along_axis(x, jnp.clip(local_ids, 0, width - 1), axis=1)
    return jnp.where((local_ids >= 0) & (local_ids < width), here, chosen)
