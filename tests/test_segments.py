"""Targets, sums over sequences and unpacked responses, across rows, packed sequences, shards and layouts."""

import functools
import pathlib
import re
from typing import NamedTuple

import checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, ordinarily
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxrl_logprob as jrl
from jaxrl_logprob import packing, segments
from jaxrl_logprob.sharding import SequenceLayout


ORDERS = ["contiguous", "zigzag", "striped"]
IGN = -100
ROWS, LENGTH = 4, 32
# Context x vocabulary, and with rows over an axis of their own.
MESHES = {
    "none": (None, None),
    "1x8": checks.MESHES["1x8"][:2],
    "2x4": checks.MESHES["2x4"][:2],
    "4x2": ({"context": 4, "vocab": 2}, jrl.MeshAxes(tokens=(None, "context"), vocab="vocab")),
    "8x1": ({"context": 8, "vocab": 1}, jrl.MeshAxes(tokens=(None, "context"), vocab="vocab")),
    "2x2x2": checks.MESHES["2x2x2"][:2],
}
FOUR_DEVICES = ["4x2", "2x2x2"]


class Where(NamedTuple):
    """A mesh, how [B, T] lies on it, and the layout of an order over its context axis."""

    mesh: jax.sharding.Mesh | None
    axes: jrl.MeshAxes | None
    layout: SequenceLayout

    @classmethod
    def of(cls, mesh: str, order: str = "contiguous", axis_type=AxisType.Auto) -> "Where":
        sizes, axes = MESHES[mesh]
        made = None if sizes is None else jrl.make_mesh(sizes, axis_type=axis_type)
        return cls(made, axes, SequenceLayout(order, 2 if sizes is None else sizes["context"]))

    @property
    def options(self) -> dict:
        return dict(axes=self.axes, mesh=self.mesh)

    def put(self, *arrays):
        """Arrays [B, T] in order, stored in the layout, on the devices."""
        stored = [self.layout.arrange(np.asarray(a)) for a in arrays]
        if self.mesh is None:
            return [jnp.asarray(a) for a in stored]
        sharding = NamedSharding(self.mesh, P(*self.axes.per_dimension(2)))
        return [jax.device_put(a, sharding) for a in stored]

    def get(self, array, length=LENGTH):
        return self.layout.restore(np.asarray(array), length)


def random_rows(seed: int, rows: int = ROWS, length: int = LENGTH):
    """Sequences of random lengths, some of one token, with padding between, after, and a row of nothing else; numbered
    across rows, and one of them cut in two by the end of a row."""
    rng = np.random.default_rng(seed)
    ids, positions = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.int32)
    number = 0
    for row in range(rows - (seed % 2)):
        start = int(rng.integers(0, 3))
        while start < length:
            size = int(min(rng.integers(1, 10), length - start))
            number += 1
            ids[row, start : start + size], positions[row, start : start + size] = number, np.arange(size)
            start += size + int(rng.integers(0, 3))
    return ids, positions, number


def next_tokens(tokens, ids, counts):
    """The oracle of `shift_targets`, one token after the other."""
    targets, mask = np.full(tokens.shape, IGN, np.int32), np.zeros(tokens.shape, bool)
    for row in range(tokens.shape[0]):
        for t in range(tokens.shape[1] - 1):
            if ids[row, t] and ids[row, t] == ids[row, t + 1]:
                targets[row, t], mask[row, t] = tokens[row, t + 1], counts[row, t + 1]
    return targets, mask


@functools.cache
def shift_program(mesh: str, order: str):
    where = Where.of(mesh, order)
    run = lambda tokens, ids, counts, values: (
        segments.shift_targets(tokens, ids, token_mask=counts, layout=where.layout, **where.options),
        segments.shift_values(values, ids, layout=where.layout, **where.options),
    )
    return jax.jit(run), where


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mesh", ordinarily("none", "4x2", "2x2x2", of=MESHES))
@given(seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=10)
def test_targets_are_right_across_every_boundary(mesh, order, seed):
    run, where = shift_program(mesh, order)
    rng = np.random.default_rng(seed)
    ids, _, _ = random_rows(seed)
    tokens = rng.integers(0, 1000, ids.shape).astype(np.int32)
    counts, values = rng.random(ids.shape) > 0.3, rng.normal(size=ids.shape).astype(np.float32)
    (targets, mask), shifted = run(*where.put(tokens, ids, counts, values))
    expected, expected_mask = next_tokens(tokens, ids, counts)
    assert (where.get(targets) == expected).all() and (where.get(mask) == expected_mask).all()
    follows = np.concatenate([values[:, 1:], values[:, :1]], axis=1)
    assert (where.get(shifted) == np.where(expected == IGN, 0, follows)).all()


@pytest.mark.parametrize("order, exchanges", [("contiguous", 1), ("zigzag", 2), ("striped", 1)])
def test_shift_exchanges_once_with_each_neighbour(order, exchanges):
    """Zigzag has a neighbour in either direction; striped, the next device has all that follows one's own tokens."""
    where = Where.of("4x2", order)
    arrays = where.put(*(np.zeros((ROWS, LENGTH), np.int32) for _ in range(2)))
    run = lambda tokens, ids: segments.shift_targets(tokens, ids, layout=where.layout, **where.options)
    text = jax.jit(run).lower(*arrays).compile().as_text()
    moved = re.findall(r"= \w+\[([\d,]+)\]\S* (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(", text)
    assert [kind for _, kind in moved] == ["collective-permute"] * exchanges
    block = LENGTH // 4 if order == "striped" else 1
    assert all(shape == f"3,{ROWS},{block}" for shape, _ in moved), moved


def targets_of(tokens, ids=None, order="contiguous", mesh="none", **kw):
    """Targets in the order in which they are stored, and their mask."""
    where = Where.of(mesh, order)
    tokens = np.asarray(tokens, np.int32)
    arrays = where.put(tokens, np.ones_like(tokens) if ids is None else np.asarray(ids, np.int32))
    out = segments.shift_targets(*arrays, layout=where.layout, **where.options, **kw)
    return np.asarray(out.targets).tolist(), np.asarray(out.loss_mask).tolist()


def test_h01_no_roll_inside_a_shard():
    where = Where.of("2x4")
    (tokens,) = where.put(np.arange(8, dtype=np.int32)[None])
    out = segments.shift_targets(tokens, **where.options)
    assert np.asarray(out.targets).tolist() == [[1, 2, 3, 4, 5, 6, 7, IGN]]


@pytest.mark.parametrize("mesh", ["none", "2x4"])
def test_h02_zigzag_targets(mesh):
    targets, _ = targets_of([list(range(8))], order="zigzag", mesh=mesh)
    assert targets == [[1, 2, 7, IGN, 3, 4, 5, 6]]


def test_k01_no_target_in_the_next_sequence():
    targets, mask = targets_of([[10, 11, 12, 20, 21, 0]], [[1, 1, 1, 2, 2, 0]])
    assert targets == [[11, 12, IGN, 21, IGN, IGN]] and mask == [[True, True, False, True, False, False]]


@pytest.mark.parametrize("mesh", ["none", "2x4"])
def test_k02_padded_layout(mesh):
    ids, _ = packing.from_cu_seqlens([0, 3, 5], [0, 4, 8])
    targets, _ = targets_of([[10, 11, 12, 0, 20, 21, 0, 0]], ids[None], mesh=mesh)
    assert targets == [[11, 12, IGN, IGN, 21, IGN, IGN, IGN]]


def test_k06_short_sequences_have_no_target():
    ids, _ = packing.from_cu_seqlens([0, 1, 1, 4])
    targets, mask = targets_of([[9, 1, 2, 3]], ids[None])
    assert targets == [[IGN, 2, 3, IGN]] and np.sum(mask) == 2


def test_whole_rows_without_segment_ids():
    tokens = jnp.arange(6).reshape(2, 3)
    assert segments.shift_targets(tokens, ignore_index=-1).targets.tolist() == [[1, 2, -1], [4, 5, -1]]


# Sums over sequences.


def numpy_sums(values, ids, size):
    sums = np.zeros(size)
    np.add.at(sums, ids[ids > 0] - 1, values[ids > 0])
    return sums


SEGMENTS = 40


@functools.cache
def reduce_program(mesh: str, axis_type=AxisType.Auto):
    """Sums, means, counts and spread values, and the gradients of a weighted sum of each."""
    where = Where.of(mesh, "zigzag", axis_type)

    def run(values, ids, mask, weights, spread_weights):
        options = dict(loss_mask=mask, **where.options)
        total = lambda v: segments.segment_sum(v, ids, SEGMENTS, **options)
        mean = lambda v: segments.segment_mean(v, ids, SEGMENTS, **options)
        spread = lambda s: segments.spread_segments(s, ids, **where.options)
        gradient = lambda f, x, w: jax.grad(lambda x: (f(x) * w).sum())(x)
        count = segments.segment_count(ids, SEGMENTS, **options)
        forward = total(values), mean(values), count, spread(weights)
        return forward, (
            gradient(total, values, weights), gradient(mean, values, weights), gradient(spread, weights, spread_weights)
        )  # fmt: skip

    return jax.jit(run), where


@pytest.mark.parametrize("mesh", ordinarily("none", "4x2", "2x2x2", of=MESHES))
@given(seed=st.integers(0, 2**31))
@settings(deadline=None, max_examples=8)
def test_reductions_over_sequences_and_their_gradients(mesh, seed):
    """Sequences also lie in several rows; what the mask leaves out is NaN."""
    run, where = reduce_program(mesh)
    rng = np.random.default_rng(seed)
    ids, _, _ = random_rows(seed)
    ids = np.where(ids > 0, ids % SEGMENTS + 1, 0).astype(np.int32)
    mask = rng.random(ids.shape) > 0.3
    values, spread_weights = rng.normal(size=(2, *ids.shape)).astype(np.float32)
    weights = rng.normal(size=SEGMENTS).astype(np.float32)
    holed = np.where(mask, values, np.nan).astype(np.float32)
    (total, mean, count, spread), gradients = run(
        *where.put(holed, ids, mask), jnp.asarray(weights), *where.put(spread_weights)
    )
    counted = np.where(mask, ids, 0)
    sums, counts = numpy_sums(values, counted, SEGMENTS), numpy_sums(np.ones(ids.shape), counted, SEGMENTS)
    assert_close(total, sums, 1e-6, "sum")
    assert_close(mean, sums / np.maximum(counts, 1), 1e-6, "mean")
    assert_close(count, counts, 0, "count")
    at = lambda per_segment, which: np.where(which > 0, np.append(per_segment, 0)[which - 1], 0)
    assert_close(where.get(spread), at(weights, ids), 0, "spread")
    dtotal, dmean, dspread = gradients
    assert_close(where.get(dtotal), at(weights, counted), 0, "gradient of the sum")
    assert_close(where.get(dmean), at(weights / np.maximum(counts, 1), counted), 1e-6, "gradient of the mean")
    assert_close(dspread, numpy_sums(spread_weights, ids, SEGMENTS), 1e-6, "gradient of the spread")


def test_reductions_under_explicit_axes():
    run, where = reduce_program("2x2x2", AxisType.Explicit)
    ids = random_rows(3)[0]
    values = np.random.default_rng(3).normal(size=ids.shape).astype(np.float32)
    ones = np.ones(ids.shape, bool)
    with jax.set_mesh(where.mesh):
        (total, *_), _ = run(*where.put(values, ids, ones), jnp.zeros(SEGMENTS), *where.put(values))
    assert_close(total, numpy_sums(values, ids, SEGMENTS), 1e-6)


def test_axes_are_read_from_explicit_types():
    where = Where.of("2x2x2", axis_type=AxisType.Explicit)
    ids = random_rows(3)[0]
    with jax.set_mesh(where.mesh):
        count = jax.jit(lambda ids: segments.segment_count(ids, SEGMENTS))(*where.put(ids))
        targets = jax.jit(lambda tokens: segments.shift_targets(tokens).targets)(*where.put(ids))
    assert_close(count, numpy_sums(np.ones(ids.shape), ids, SEGMENTS), 0)
    assert (np.asarray(targets)[:, :-1] == ids[:, 1:]).all()


def test_segments_inside_the_callers_shard_map():
    where = Where.of("2x2x2", "zigzag")
    ids = random_rows(5)[0]
    values = np.random.default_rng(5).normal(size=ids.shape).astype(np.float32)

    def local(values, ids):
        total = segments.segment_sum(values, ids, SEGMENTS, axes=where.axes)
        targets = segments.shift_targets(ids, ids, layout=where.layout, axes=where.axes)
        return total, segments.spread_segments(total, ids, axes=where.axes), targets.targets

    tokens = P("data", "context")
    run = jax.shard_map(local, mesh=where.mesh, in_specs=(tokens, tokens), out_specs=(P(), tokens, tokens))
    arrays = where.put(values, ids)
    total, spread, targets = jax.jit(run)(*arrays)
    sums = numpy_sums(values, ids, SEGMENTS)
    assert_close(total, sums, 1e-6)
    assert_close(where.get(spread), np.where(ids > 0, np.append(sums, 0)[ids - 1], 0), 1e-6)
    assert (where.get(targets) == next_tokens(ids, ids, np.ones(ids.shape, bool))[0]).all()
    gradient = jax.jit(jax.grad(lambda v: (run(v, arrays[1])[1]).sum()))(arrays[0])
    sizes = numpy_sums(np.ones(ids.shape), ids, SEGMENTS)
    assert_close(where.get(gradient), np.where(ids > 0, np.append(sizes, 0)[ids - 1], 0), 1e-6)


def test_h04_counts_go_over_all_axes_of_the_tokens():
    where = Where.of("2x2x2")
    mask = np.array([[1, 1, 1, 0, 0, 0, 1, 0], [1, 1, 0, 0, 1, 0, 0, 1]], bool)  # 3 and 1, 2 and 2
    count = segments.segment_count(
        *where.put(np.ones((2, 8), np.int32)), 1, loss_mask=where.put(mask)[0], **where.options
    )
    assert count.tolist() == [8]


def test_h09_sequence_ratio_over_the_context_axis():
    """GSPO: exp of the mean log-ratio of the sequence, not of each shard's part of it."""
    where = Where.of("2x4")
    values = np.array([[0.1, 0.2, 0.3, 0.4]], np.float32)
    ids = np.ones((1, 4), np.int32)
    mean = segments.segment_mean(*where.put(values, ids), 1, **where.options)
    assert_close(jnp.exp(mean), [1.284025], 1e-6)


def test_h12_masked_prompts_do_not_bias_the_mean():
    where = Where.of("2x4")
    values = np.array([[1, 1, 1, 4], [1, 2, 3, 2]], np.float32).reshape(1, 8)
    mask = np.array([[0, 0, 0, 1], [1, 1, 1, 1]], bool).reshape(1, 8)
    values, mask, ids = where.put(values, mask, np.ones((1, 8), np.int32))
    assert_close(segments.segment_mean(values, ids, 1, loss_mask=mask, **where.options), [2.4], 1e-6)


def test_k03_a_packed_row_is_several_sequences():
    """And an empty row is none: a mean over sequences divides by those that have tokens."""
    ids = jnp.array([[1, 1, 2, 2, 2, 2], [0] * 6])
    values = jnp.array([[1.0, 1, 2, 2, 2, 2], [7.0] * 6])
    means, counts = segments.segment_mean(values, ids, 3), segments.segment_count(ids, 3)
    assert_close(means.sum() / jnp.sum(counts > 0, dtype=jnp.float32), 1.5, 1e-6)
    assert_close(segments.segment_sum(values, ids, 3).sum() / counts.sum(), 1.666667, 1e-6)


@pytest.mark.parametrize("mesh", ["none", "2x2x2"])
def test_n01_no_valid_token_is_0_with_gradient_0(mesh):
    where = Where.of(mesh)
    values = np.full((ROWS, LENGTH), np.nan, np.float32)
    values, ids, mask = where.put(values, np.ones_like(values, np.int32), np.zeros(values.shape, bool))
    loss = lambda v: segments.segment_mean(v, ids, 2, loss_mask=mask, **where.options).sum()
    value, gradient = jax.jit(jax.value_and_grad(loss))(values)
    assert value == 0 and not np.asarray(gradient).any()


def test_n04_everything_on_one_device_masked():
    where = Where.of("2x2x2")
    values, mask = np.zeros((2, 8), np.float32), np.zeros((2, 8), bool)
    values[1, :3], mask[1, :3] = 3, True
    values, mask, ids = where.put(values, mask, np.ones((2, 8), np.int32))
    assert segments.segment_mean(values, ids, 1, loss_mask=mask, **where.options).tolist() == [3.0]


# Responses.


@pytest.mark.parametrize("mesh", ordinarily("none", "2x2x2", of=MESHES))
def test_unpacked_responses_and_their_gradient(mesh):
    """Sequences without response, without prompt, empty ones, and one longer than R; devices without any response."""
    where = Where.of(mesh, "zigzag")
    prompts, responses, longest = [2, 3, 0, 5, 0, 4], [3, 0, 2, 9, 0, 1], 6
    sequences = [np.arange(p + r) for p, r in zip(prompts, responses)]
    (packed,) = packing.pack_sequences(sequences, prompts, max_tokens=16, rows=ROWS, multiple=16)
    rng = np.random.default_rng(0)
    values = rng.normal(size=packed.tokens.shape).astype(np.float32)
    weights = jnp.asarray(rng.normal(size=(packed.samples.size, longest)), jnp.float32)
    expected, mask, dexpected = np.zeros(weights.shape), np.zeros(weights.shape, bool), np.zeros(values.shape)
    for s in range(packed.samples.size):
        row, column = np.nonzero(packed.segment_ids == s + 1)
        p = packed.prompt_lengths[s]
        for k in range(min(packed.response_lengths[s], longest)):
            if p + k >= 1:
                at = row[p + k - 1], column[p + k - 1]
                expected[s, k], mask[s, k], dexpected[at] = values[at], True, weights[s, k]

    def run(values, ids, positions):
        lengths = jnp.asarray(packed.prompt_lengths), jnp.asarray(packed.response_lengths)
        unpack = lambda v: segments.unpack_responses(v, ids, positions, *lengths, longest, **where.options)
        return unpack(values), jax.grad(lambda v: (unpack(v).values * weights).sum())(values)

    out, gradient = jax.jit(run)(*where.put(values, packed.segment_ids, packed.positions))
    assert_close(out.values, expected, 0)
    assert (np.asarray(out.mask) == mask).all()
    assert_close(where.get(gradient, 16), dexpected, 0)


# From sequences to gradients: packed, in zigzag, on a mesh, and one by one on one device.


WIDTH, VOCAB, SEQUENCES = 8, 256, [(3, 5), (1, 0), (4, 9), (0, 6), (2, 1), (5, 11), (0, 0), (1, 12)]


def weighted(out: jrl.LogprobsAndEntropy, weights):
    return (out.logprobs * weights[0] + out.entropy * weights[1]).sum()


@functools.cache
def unpacked():
    """Each sequence in a row of its own."""
    rng = np.random.default_rng(0)
    longest = max(p + r for p, r in SEQUENCES)
    shape = (len(SEQUENCES), longest)
    place = np.arange(longest)[None]
    prompts, lengths = (np.array(n)[:, None] for n in zip(*[(p, p + r) for p, r in SEQUENCES]))
    ids, counts = (place < lengths).astype(np.int32), (place >= prompts) & (place < lengths)
    tokens = np.where(ids > 0, rng.integers(0, VOCAB, shape), 0).astype(np.int32)
    hidden, lm_head = (rng.normal(size=s).astype(np.float32) for s in ((*shape, WIDTH), (WIDTH, VOCAB)))
    lm_head /= np.sqrt(WIDTH)  # Logits of unit scale.
    weights = rng.normal(size=(2, *shape)).astype(np.float32)

    @jax.jit
    def run(hidden, lm_head):
        targets, mask = segments.shift_targets(jnp.asarray(tokens), jnp.asarray(ids), token_mask=jnp.asarray(counts))
        out = jrl.linear_token_logprobs_and_entropy(hidden, lm_head, targets, loss_mask=mask)
        return weighted(out, weights), out

    (_, out), gradients = jax.value_and_grad(run, argnums=(0, 1), has_aux=True)(jnp.asarray(hidden), lm_head)
    return tokens, (prompts[:, 0], lengths[:, 0]), hidden, lm_head, weights, out, gradients


def in_rows(packed, array):
    """array [S, L, ...] of the sequences, as the rows of `packed`."""
    rows = np.zeros((*packed.tokens.shape, *array.shape[2:]), array.dtype)
    for s, sample in enumerate(packed.samples):
        here = packed.segment_ids == s + 1
        rows[here] = array[sample, : here.sum()]
    return rows


@pytest.mark.parametrize("ways", ["from hidden states", "from logits"])
@pytest.mark.parametrize("mesh", ordinarily("4x2", "2x2x2", of=["1x8", "2x4", "4x2", "2x2x2"]))
def test_packed_equals_unpacked(mesh, ways):
    where = Where.of(mesh, "zigzag")
    tokens, (prompts, lengths), hidden, lm_head, weights, expected, (dhidden, dhead) = unpacked()
    (packed,) = packing.pack_sequences(
        [t[:n] for t, n in zip(tokens, lengths)], prompts, max_tokens=32, rows=2, multiple=where.layout.multiple
    )
    rows = [packed.tokens, packed.segment_ids, packed.response_mask, *(in_rows(packed, w) for w in weights)]
    stored_hidden = jax.device_put(
        where.layout.arrange(in_rows(packed, hidden), axis=1),
        NamedSharding(where.mesh, P(*where.axes.per_dimension(2), None)),
    )

    @jax.jit
    def run(hidden, lm_head, tokens, ids, counts, *weights):
        targets, mask = segments.shift_targets(tokens, ids, token_mask=counts, layout=where.layout, **where.options)
        if ways == "from logits":
            out = jrl.token_logprobs_and_entropy(hidden @ lm_head, targets, loss_mask=mask, **where.options)
        else:
            out = jrl.linear_token_logprobs_and_entropy(hidden, lm_head, targets, loss_mask=mask, **where.options)
        return weighted(out, weights), out

    grad = jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))
    (_, out), gradients = grad(stored_hidden, lm_head, *where.put(*rows))
    for found, wanted in zip(out, expected, strict=True):
        assert_close(where.get(found, packed.tokens.shape[1]), in_rows(packed, np.asarray(wanted)), 1e-6)
    back = where.layout.restore(np.asarray(gradients[0]), packed.tokens.shape[1], axis=1)
    assert_close(back, in_rows(packed, np.asarray(dhidden)), 1e-6)
    assert_close(gradients[1], dhead, 2e-6)


@pytest.mark.parametrize("order", ordinarily("zigzag", of=ORDERS))
def test_packed_sequences_of_nemo(order):
    """Context 2 x vocabulary 2. To NeMo the padding of a sequence is part of it: the last token predicts it. Its own
    gradient is twice this one, as the backward of its all-gather adds up its ranks."""
    gold = np.load(pathlib.Path(__file__).parent / "data" / "nemo_packed_tp2_cp2.npz")
    mesh = jrl.make_mesh({"context": 2, "vocab": 2})
    where = Where(mesh, jrl.MeshAxes(tokens=(None, "context"), vocab="vocab"), SequenceLayout(order, 2))
    padded, cotangents = gold["cu_seqlens_padded"], gold["g"]
    lengths = np.diff(padded)
    ids, positions = packing.from_cu_seqlens(padded)
    one, responses = jnp.ones(len(lengths), jnp.int32), jnp.asarray(lengths - 1, jnp.int32)

    def loss(logits, tokens, ids, positions):
        targets, mask = segments.shift_targets(tokens, ids, layout=where.layout, **where.options)
        logprobs = jrl.token_logprobs(logits, targets, loss_mask=mask, **where.options)
        out = segments.unpack_responses(logprobs, ids, positions, one, responses, 11, **where.options)
        return (out.values * cotangents).sum(), out

    logits = jax.device_put(
        where.layout.arrange(gold["logits"][None], axis=1), NamedSharding(mesh, P(None, "context", "vocab"))
    )
    arrays = where.put(*(a[None].astype(np.int32) for a in (gold["tokens"], ids, positions)))
    (_, out), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(logits, *arrays)
    assert (np.asarray(out.mask) == (np.arange(11) < lengths[:, None] - 1)).all()
    assert_close(out.values, gold["log_probs"], 1e-6)
    assert_close(where.layout.restore(np.asarray(gradient), 32, axis=1)[0], gold["true_grad"], 1e-6)


@pytest.mark.parametrize("mesh", ordinarily("2x2x2", of=["2x4", "2x2x2"]))
def test_h07_devices_without_response_tokens(mesh):
    """Only the last two of 8 positions are a response: the loss and its gradient are those of one device."""
    rng = np.random.default_rng(0)
    logits, tokens = rng.normal(size=(2, 8, 16)).astype(np.float32), rng.integers(0, 16, (2, 8)).astype(np.int32)
    counts = np.arange(8)[None] >= np.array([[6], [6]])

    def loss(logits, tokens, counts, where):
        targets, mask = segments.shift_targets(tokens, token_mask=counts, layout=where.layout, **where.options)
        logprobs = jrl.token_logprobs(logits, targets, loss_mask=mask, **where.options)
        ids = jnp.ones(tokens.shape, jnp.int32)
        return segments.segment_mean(logprobs, ids, 1, loss_mask=mask, **where.options)[0]

    grad = jax.jit(jax.value_and_grad(loss), static_argnums=3)
    one, many = Where.of("none"), Where.of(mesh)
    expected, dexpected = grad(jnp.asarray(logits), *one.put(tokens, counts), one)
    value, gradient = grad(jnp.asarray(logits), *many.put(tokens, counts), many)
    assert_close(value, expected, 1e-6)
    assert_close(gradient, dexpected, 1e-6)


def test_no_array_of_logits_or_hidden_states_is_moved():
    """Targets, scores and sums per sequence, in zigzag on context 2 x vocab 2: collectives of O(N) and O(S) numbers."""
    where = Where.of("2x2x2", "zigzag")
    tokens, ids, counts = where.put(*(np.zeros((ROWS, LENGTH), t) for t in (np.int32, np.int32, bool)))

    def run(logits, tokens, ids, counts):
        targets, mask = segments.shift_targets(tokens, ids, token_mask=counts, layout=where.layout, **where.options)
        logprobs = jrl.token_logprobs(logits, targets, loss_mask=mask, **where.options)
        return segments.segment_mean(logprobs, ids, SEGMENTS, loss_mask=mask, **where.options).sum()

    logits = jax.ShapeDtypeStruct(
        (ROWS, LENGTH, 4096), jnp.float32, sharding=NamedSharding(where.mesh, P("data", "context", "vocab"))
    )
    text = jax.jit(jax.grad(run)).lower(logits, tokens, ids, counts).compile().as_text()
    kinds = r"(?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    shapes = re.findall(rf"= \(?\w+\[([\d,]*)\]\S* {kinds}\(", text)
    assert shapes and all(np.prod([int(n) for n in s.split(",") if n]) <= 4 * ROWS * LENGTH for s in shapes), shapes


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: segments.shift_targets(jnp.zeros((2, 3))), TypeError, "`tokens` must be integer ids"),
        (
            lambda: segments.shift_targets(jnp.zeros((2, 3), int), jnp.zeros((3, 2), int)),
            ValueError,
            r"`segment_ids` must have shape \(2, 3\), got \(3, 2\)",
        ),
        (
            lambda: segments.shift_targets(jnp.zeros((2, 6), int), layout=SequenceLayout("zigzag", 2)),
            ValueError,
            "`layout` must divide the 6 positions",
        ),
        (lambda: segments.segment_sum(jnp.zeros((2, 3)), jnp.zeros((2, 3)), 4), TypeError, "`segment_ids`"),
        (lambda: segments.segment_sum(jnp.zeros(3, int), jnp.zeros(3, int), 4), TypeError, "`values` must be floating"),
        (lambda: segments.segment_sum(jnp.zeros(3), jnp.zeros(3, int), 4.0), TypeError, "`num_segments`"),
        (lambda: segments.spread_segments(jnp.zeros((2, 2)), jnp.zeros(3, int)), ValueError, "`per_segment` must have"),
        (
            lambda: segments.unpack_responses(
                jnp.zeros(3), jnp.zeros(3, int), jnp.zeros(3, int), jnp.zeros(2, int), jnp.zeros(3, int), 4
            ),
            ValueError,
            "`response_lengths` must have shape",
        ),
    ],
)
@pytest.mark.usefixtures("our_own_errors")
def test_errors_of_segments(call, error, message):
    with pytest.raises(error, match=message):
        call()
