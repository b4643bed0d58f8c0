"""The loops of the ops from hidden states, on one device: tiles of rows, those that count first, and vocabulary blocks.

    forward   for each tile of rows, for each block of the vocabulary: logits, their statistics
    backward  "vocab" outside: for each block, for each tile: dlm_head of the block, written once; dhidden_states of all
              rows accumulates
              "tokens" outside: the other way round

Rows that count are brought together by a stable sort of the mask, and tiles without any are not visited: the loops
over tiles have as many steps as there are rows. Loops with collectives in them have the same steps on every device.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from ._chunks import ALIGNMENT, Blocks, choose_blocks, Chunks
from ._head import operand_dtype, Weight
from ._loop import fold_blocks, on_platform, Platform, round_up
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
from .sharding._placement import vary_over, vma


class Operands(NamedTuple):
    """What is differentiated: logits = Σ_i activations_i @ weights_i + bias."""

    activations: list[jax.Array]
    weights: list[jax.Array]
    bias: jax.Array | None


@dataclass(frozen=True)
class LinearScoring:
    """What an op from hidden states must know before it is traced."""

    scoring: Scoring
    weights: tuple[Weight, ...]
    chunks: Chunks


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


def local_gather(static: LinearScoring, operands: Operands) -> Operands:
    """The operands of one device, whole along features, and along tokens over the vocabulary axes."""
    place = static.scoring.placement
    gather = lambda x, names, axis: lax.all_gather(x, names, axis=axis, tiled=True, to="invarying") if names else x
    sequence = place.vocab if place.axes.sequence_parallel else ()
    activations = [gather(x, sequence, place.rank - 1) for x in operands.activations]
    weights = [
        gather(m, place.features, w.roles.index("features")) if "features" in w.roles else m
        for w, m in zip(static.weights, operands.weights)
    ]
    return Operands(activations, weights, operands.bias)


def local_forward(static: LinearScoring, operands: Operands, tokens: TokenOperands):
    """Statistics of this device's columns, tile by tile, then one merge over the vocabulary shards."""
    scoring, batch = static.scoring, operands.activations[0].shape[:-1]
    activations, tokens = flat((operands.activations, tokens), len(batch))
    operands = operands._replace(activations=activations)
    size, columns = _sizes(static, operands)
    first_id = scoring.first_id(columns)
    local_ids = tokens.ids - first_id
    dtype, axes = arithmetic_dtype(*jax.tree.leaves(operands)), _varying((operands, tokens))

    def run(platform: Platform, operands: Operands, tokens: TokenOperands, local_ids: jax.Array):
        blocks = _blocks(static, operands, platform)
        weights, operands = _vocabulary_first(static.weights, operands, platform)
        order = row_order(tokens.valid, blocks.last_rows)
        head = _Head(weights, platform, operands)
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
    operands: Operands,
    tokens: TokenOperands,
    norm: Normalizer,
    entropies: jax.Array | None,
    dlogprobs: jax.Array,
    dentropy: jax.Array | None,
) -> Operands:
    """The gradients of this device's operands, summed over the devices that share them."""
    batch = operands.activations[0].shape[:-1]
    (activations, tokens, norm, entropies, dlogprobs, dentropy) = flat(
        (operands.activations, tokens, norm, entropies, dlogprobs, dentropy), len(batch)
    )
    operands = operands._replace(activations=activations)
    first_id = static.scoring.first_id(_sizes(static, operands)[1])
    rows = row_gradients(static.scoring, tokens, norm, entropies, tokens.ids - first_id, dlogprobs, dentropy)

    def run(platform: Platform, operands: Operands, rows: Any):
        blocks = _blocks(static, operands, platform)
        weights, operands = _vocabulary_first(static.weights, operands, platform)
        loop = _Backward(dataclasses.replace(static, weights=weights), platform, blocks, operands, rows, batch)
        gradients = loop.vocab_outside() if blocks.vocab_outside else loop.tokens_outside()
        turned = [d if w == own else d.T for d, w, own in zip(gradients.weights, weights, static.weights)]
        return gradients._replace(weights=turned)

    return on_platform(run, operands, rows)


class _Head:
    """Rows of the activations, blocks of the weights, and the logits they make."""

    def __init__(self, weights: tuple[Weight, ...], platform: Platform, operands: Operands):
        self.weights, self.platform, self.operands = weights, platform, operands
        self.stored = jax.tree.map(platform.stored, operands)

    def rows(self, rows: jax.Array, counted: jax.Array) -> list[jax.Array]:
        """The activations of these rows; 0 where they do not count, whatever they hold."""

        def take(x, stored):
            block = self.platform.loaded(_take_rows(stored, rows), x.dtype)
            return jnp.where(counted[:, None], block, jnp.zeros((), x.dtype))

        return [take(x, s) for x, s in zip(self.operands.activations, self.stored.activations)]

    def block(self, first: jax.Array, width: int) -> Operands:
        """The weights and the bias of some columns."""
        cut = lambda m, s, axis: self.platform.loaded(lax.dynamic_slice_in_dim(s, first, width, axis), m.dtype)
        weights = [
            cut(m, s, w.vocab_dimension) for w, m, s in zip(self.weights, self.operands.weights, self.stored.weights)
        ]
        bias = self.operands.bias
        return Operands([], weights, None if bias is None else cut(bias, self.stored.bias, 0))

    def logits(self, xs: list[jax.Array], block: Operands, dtype: Any) -> jax.Array:
        """Σ_i x_i W_i + bias, accumulated in `dtype`."""
        terms = [
            _product(x, m, (1, 1 - w.vocab_dimension), operand_dtype(x, m), dtype)
            for x, m, w in zip(xs, block.weights, self.weights)
        ]
        logits = sum(terms[1:], start=terms[0])
        return logits if block.bias is None else logits + block.bias.astype(dtype)[None, :]

    def gradients(self, xs: list[jax.Array], block: Operands, dx: jax.Array) -> Operands:
        """Of activations, weights and bias, for the gradient of their logits; in the dtype of `dx`."""
        dxs, dws = [], []
        for x, m, w in zip(xs, block.weights, self.weights):
            # Bfloat16 products where the hardware has them; XLA:CPU widens them anyway, and float16 would underflow.
            operands = operand_dtype(x, m)
            narrow = operands == jnp.bfloat16 and not self.platform.is_cpu
            operands = operands if narrow else dx.dtype
            dxs.append(_product(dx, m, (1, w.vocab_dimension), operands, dx.dtype))
            pair = (dx, x) if w.tied else (x, dx)
            dws.append(_product(*pair, (0, 0), operands, dx.dtype))
        return Operands(dxs, dws, None if block.bias is None else jnp.sum(dx, axis=0))


class _Backward:
    """The backward of one device, in either order of its two loops."""

    def __init__(self, static: LinearScoring, platform: Platform, blocks: Blocks, operands: Operands, rows, batch):
        self.static, self.platform, self.blocks, self.operands, self.batch = static, platform, blocks, operands, batch
        self.head = _Head(static.weights, platform, operands)
        self.order = row_order(rows.valid, blocks.last_rows)
        self.sorted = jax.tree.map(lambda a: a[self.order.rows], rows)
        self.sorted = self.sorted._replace(valid=self.order.counted)
        self.dtype = arithmetic_dtype(*jax.tree.leaves(operands))
        self.axes = _varying((operands, rows))
        self.columns = _sizes(static, operands)[1]
        self.first_id = static.scoring.first_id(self.columns)

    def vocab_outside(self) -> Operands:
        """Each block of dlm_head is finished and written once; dhidden_states accumulates, [N, D] floats."""
        rows = self.order.rows.size
        gradients = Operands([], *self._buffers()[1:])
        dxs = [self._zeros(rows, x.shape[-1]) for x in self.operands.activations]

        def block(carry, first, width):
            dxs, gradients = carry
            weights = self._block(first, width)
            zeros = jax.tree.map(lambda m: self._zeros(*m.shape), weights)

            def add_tile(tile, carry):
                dxs, sums = carry
                new = self._tile(tile, self._rows(tile), weights, first, width)
                dxs = [self._add(a, b, tile.first, 0) for a, b in zip(dxs, new.activations)]
                return dxs, jax.tree.map(jnp.add, sums, new._replace(activations=[]))

            dxs, sums = over_tiles(add_tile, (dxs, zeros), self.order, self.blocks)
            return dxs, self._write(gradients, sums, first)

        dxs, gradients = fold_blocks(block, (dxs, gradients), self.columns, self.blocks.columns)
        dxs = [self._collect(dx, x) for dx, x in zip(dxs, self.operands.activations)]
        return Operands(dxs, *self._loaded(gradients)[1:])

    def tokens_outside(self) -> Operands:
        """Each tile of dhidden_states is finished and written once; dlm_head accumulates, [D, V] floats."""
        totals = jax.tree.map(lambda m: self._zeros(*m.shape), self.operands._replace(activations=[]))

        def finish_tile(tile, carry):
            dxs, totals = carry
            xs = self._rows(tile)

            def block(carry, first, width):
                sums, totals = carry
                new = self._tile(tile, xs, self._block(first, width), first, width)
                add = lambda total, d, axis: self._add(total, d, first, axis)
                weights = [
                    add(t, d, w.vocab_dimension) for t, d, w in zip(totals.weights, new.weights, self.static.weights)
                ]
                bias = None if new.bias is None else add(totals.bias, new.bias, 0)
                return [a + b for a, b in zip(sums, new.activations)], Operands([], weights, bias)

            sums = [self._zeros(*x.shape) for x in xs]
            sums, totals = fold_blocks(block, (sums, totals), self.columns, self.blocks.columns)
            return [self._scatter(dx, s, tile, x) for dx, s, x in zip(dxs, sums, self.operands.activations)], totals

        dxs, totals = over_tiles(finish_tile, (self._buffers()[0], totals), self.order, self.blocks)

        def block(gradients, first, width):
            cut = lambda t, axis: lax.dynamic_slice_in_dim(t, first, width, axis)
            weights = [cut(t, w.vocab_dimension) for t, w in zip(totals.weights, self.static.weights)]
            bias = None if totals.bias is None else cut(totals.bias, 0)
            return self._write(gradients, Operands([], weights, bias), first)

        gradients = Operands([], *self._buffers()[1:])
        gradients = fold_blocks(block, gradients, self.columns, self.blocks.columns)
        dxs = [self._sum_over_vocab(dx, x) for dx, x in zip(dxs, self.operands.activations)]
        return Operands(dxs, *self._loaded(gradients)[1:])

    def _rows(self, tile: Tile) -> list[jax.Array]:
        return self.head.rows(*tile.take((self.order.rows, self.order.counted)))

    def _block(self, first: jax.Array, width: int) -> Operands:
        """The weights of some columns; those that do not exist are 0, whatever they hold."""
        block, columns = self.head.block(first, width), self.static.scoring.columns(self.first_id + first, width)
        if columns is None:
            return block
        exists = columns < self.static.scoring.vocab_size
        clean = lambda m, w: jnp.where(exists.T if w.tied else exists, m, jnp.zeros((), m.dtype))
        return block._replace(weights=[clean(m, w) for m, w in zip(block.weights, self.static.weights)])

    def _tile(self, tile: Tile, xs: list[jax.Array], weights: Operands, first: jax.Array, width: int) -> Operands:
        """What one block of logits adds to the gradients."""
        rows = tile.take(self.sorted)
        rows = rows._replace(local_ids=rows.local_ids - first)
        columns = self.static.scoring.columns(self.first_id + first, width)
        logits = self.head.logits(xs, weights, self.dtype)
        return self.head.gradients(xs, weights, backward_block(self.static.scoring, logits, columns, rows))

    def _zeros(self, *shape: int) -> jax.Array:
        return vary_over(jnp.zeros(shape, self.dtype), self.axes)

    @staticmethod
    def _add(total: jax.Array, new: jax.Array, first: jax.Array, axis: int) -> jax.Array:
        old = lax.dynamic_slice_in_dim(total, first, new.shape[axis], axis)
        return lax.dynamic_update_slice_in_dim(total, old + new, first, axis)

    def _buffers(self) -> Operands:
        """The gradients, all zero, in their own dtypes, in the form in which the loops update them."""
        place = self.static.scoring.placement
        shards = lax.axis_size(place.features) if place.features else 1

        def zeros(array, shape, axes):
            return vary_over(self.platform.stored(jnp.zeros(shape, array.dtype)), axes)

        weights = []
        for m, w in zip(self.operands.weights, self.static.weights):
            split = "features" in w.roles
            shape = [n // (shards if r == "features" else 1) for n, r in zip(m.shape, w.roles)]
            weights.append(zeros(m, shape, vma(m) | set(place.features if split else ())))
        bias = self.operands.bias
        activations = [zeros(x, x.shape, self.axes) for x in self.operands.activations]
        return Operands(activations, weights, None if bias is None else zeros(bias, bias.shape, vma(bias)))

    def _loaded(self, gradients: Operands) -> Operands:
        """Stored buffers of weights and bias in their own dtypes."""
        own = self.operands._replace(activations=[])
        return jax.tree.map(lambda g, m: self.platform.loaded(g, m.dtype), gradients, own)

    def _write(self, gradients: Operands, sums: Operands, first: jax.Array) -> Operands:
        """Finished blocks of the gradients of weights and bias: rounded, summed over devices, put in place."""
        features = self.static.scoring.placement.features

        def write(buffer, total, like, axis, split):
            total = total.astype(like.dtype)
            if split is not None and features:
                total = lax.psum_scatter(total, features, scatter_dimension=split, tiled=True)
            total = _sum_over(total, vma(total) - vma(buffer))
            return lax.dynamic_update_slice_in_dim(buffer, self.platform.stored(total), first, axis)

        weights = [
            write(b, t, m, w.vocab_dimension, w.roles.index("features") if "features" in w.roles else None)
            for b, t, m, w in zip(gradients.weights, sums.weights, self.operands.weights, self.static.weights)
        ]
        bias = None if sums.bias is None else write(gradients.bias, sums.bias, self.operands.bias, 0, None)
        return Operands([], weights, bias)

    def _collect(self, total: jax.Array, x: jax.Array) -> jax.Array:
        """dhidden_states [*batch, D] of its accumulator in sorted order: rounded and summed over the vocabulary axes
        tile by tile, so that no second array of its size is held."""
        shards = self._sequence_shards()
        index = lax.iota(jnp.int32, x.shape[0]).reshape(-1, shards, (self.batch or (1,))[-1] // shards)
        index = jnp.moveaxis(index, 1, 0).reshape(shards, -1)

        def block(buffer, first, width):
            rows = lax.dynamic_slice_in_dim(index, first, width, 1).reshape(-1)
            position = self.order.position[rows]
            part = _take_rows(total, position)
            part = jnp.where(self.order.counted[position][:, None], part, 0.0).astype(x.dtype)
            if shards > 1:
                vocab = self.static.scoring.placement.vocab
                part = lax.psum_scatter(part, vocab, scatter_dimension=0, tiled=True)
            part = _sum_over(part, vma(part) - vma(buffer))
            return lax.dynamic_update_slice_in_dim(buffer, self.platform.stored(part), first, 0)

        local = index.shape[1]
        varying = vma(x) | set(self.static.scoring.placement.vocab if shards > 1 else ())
        buffer = vary_over(self.platform.stored(jnp.zeros((local, x.shape[1]), x.dtype)), varying)
        buffer = fold_blocks(block, buffer, local, self.blocks.rows)
        return self._unflat(self.platform.loaded(buffer, x.dtype), shards)

    def _scatter(self, buffer: jax.Array, block: jax.Array, tile: Tile, x: jax.Array) -> jax.Array:
        """The rows of a tile of dhidden_states, finished, to where they belong; those that do not count stay 0."""
        rows, counted = tile.take((self.order.rows, self.order.counted))
        block = self.platform.stored(block.astype(x.dtype))
        consecutive = _consecutive(rows) & jnp.all(counted)
        put = lambda b: lax.dynamic_update_slice_in_dim(b, block, rows[0], 0)
        drop = jnp.where(counted, rows, len(buffer))
        spread = lambda b: b.at[drop].set(block, mode="drop")
        return lax.cond(consecutive, put, spread, buffer) if len(rows) <= len(buffer) else spread(buffer)

    def _sum_over_vocab(self, buffer: jax.Array, x: jax.Array) -> jax.Array:
        """dhidden_states [*batch, D] of a buffer that has all rows."""
        dx = self._unflat(self.platform.loaded(buffer, x.dtype), 1)
        names, shards = vma(dx) - vma(x), self._sequence_shards()
        if shards > 1:
            place = self.static.scoring.placement
            dx = lax.psum_scatter(dx, place.vocab, scatter_dimension=place.rank - 1, tiled=True)
            names -= set(place.vocab)
        return _sum_over(dx, names)

    def _sequence_shards(self) -> int:
        place = self.static.scoring.placement
        return lax.axis_size(place.vocab) if place.axes.sequence_parallel else 1

    def _unflat(self, rows: jax.Array, shards: int) -> jax.Array:
        batch = self.batch[:-1] + ((self.batch[-1] // shards,) if self.batch else ())
        return rows.reshape(*batch, rows.shape[-1])


def _vocabulary_first(
    weights: tuple[Weight, ...], operands: Operands, platform: Platform
) -> tuple[tuple[Weight, ...], Operands]:
    """Every matrix as [V, D] where its V columns do not fill whole lanes of an accelerator.

    XLA for TPU keeps such a [D, V] with D along the lanes; asked for blocks of columns it would turn a copy of it
    around. The transpose is no more than another name for what is there.
    """
    if platform.is_cpu or operands.weights[0].shape[weights[0].vocab_dimension] % ALIGNMENT == 0:
        return weights, operands
    turned = [m if w.tied else m.T for m, w in zip(operands.weights, weights)]
    tied = tuple(w if w.tied else w._replace(tied=True, roles=w.roles[::-1]) for w in weights)
    return tied, operands._replace(weights=turned)


def _blocks(static: LinearScoring, operands: Operands, platform: Platform) -> Blocks:
    tokens, columns = _sizes(static, operands)
    width = operands.activations[0].shape[-1]
    return choose_blocks(static.chunks, tokens=tokens, width=width, vocab=columns, is_cpu=platform.is_cpu)


def _sizes(static: LinearScoring, operands: Operands) -> tuple[int, int]:
    """Rows and columns of this device, of flat operands."""
    return operands.activations[0].shape[0], operands.weights[0].shape[static.weights[0].vocab_dimension]


def _varying(tree: Any) -> frozenset[str]:
    return frozenset().union(*(vma(a) for a in jax.tree.leaves(tree)))


def _sum_over(x: jax.Array, names: frozenset[str]) -> jax.Array:
    return lax.psum(x, tuple(sorted(names))) if names else x


def _consecutive(rows: jax.Array) -> jax.Array:
    return jnp.all(rows == rows[0] + lax.iota(jnp.int32, rows.size))


def _take_rows(array: jax.Array, rows: jax.Array) -> jax.Array:
    """array[rows]; a slice where they are next to each other, as rows that count often are: a gather costs more."""
    if rows.size > array.shape[0]:
        return array[rows]
    cut = lambda: lax.dynamic_slice_in_dim(array, rows[0], rows.size)
    return lax.cond(_consecutive(rows), cut, lambda: array[rows])


def _product(x: jax.Array, y: jax.Array, contract: tuple[int, int], operands: Any, dtype: Any) -> jax.Array:
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(x.astype(operands), y.astype(operands), dimensions, preferred_element_type=dtype)


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
