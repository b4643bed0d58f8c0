"""Packing on the host: every sequence once, within the budget, in few shapes; converters are exact inverses."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxrl_logprob import packing


ragged = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=12)  # prompt and response lengths


def sequences_of(lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(1, 100, p + r) for p, r in lengths], [p for p, _ in lengths]


@given(ragged, st.integers(1, 3), st.sampled_from([1, 4, 8]))
@settings(deadline=None, max_examples=200)
def test_every_sequence_comes_back_once(lengths, rows, multiple):
    sequences, prompts = sequences_of(lengths)
    batches = packing.pack_sequences(sequences, prompts, max_tokens=24, rows=rows, multiple=multiple)
    back = sorted((item for packed in batches for item in packing.unpack_sequences(packed)), key=lambda item: item[0])
    assert [sample for sample, _ in back] == list(range(len(sequences)))
    assert all((tokens == sequences[sample]).all() for sample, tokens in back)
    for packed in batches:
        assert (
            packed.tokens.shape[0] == rows and packed.tokens.shape[1] <= 24 and packed.tokens.shape[1] % multiple == 0
        )
        assert [a.shape for a in packed] == [packed.tokens.shape] * 4 + [packed.samples.shape] * 3
        assert not packed.tokens[packed.segment_ids == 0].any() and not packed.positions[packed.segment_ids == 0].any()
        for s, sample in enumerate(packed.samples):
            here = packed.segment_ids == s + 1
            p, r = lengths[sample] if sample >= 0 else (0, 0)
            assert (packed.positions[here] == np.arange(p + r)).all() and here.any(axis=1).sum() <= 1
            assert (packed.prompt_lengths[s], packed.response_lengths[s]) == (p, r)
            assert (packed.response_mask[here] == (np.arange(p + r) >= p)).all()
    assert len({a.shape for packed in batches for a in (packed.tokens, packed.samples)}) <= 2


def test_a_run_of_many_batches_has_few_shapes():
    rng = np.random.default_rng(0)
    shapes = set()
    for _ in range(100):
        lengths = rng.integers(1, 1000, rng.integers(20, 40))
        batches = packing.pack_sequences([np.ones(n, int) for n in lengths], lengths // 2, max_tokens=4096, rows=2)
        shapes |= {(packed.tokens.shape, packed.samples.shape) for packed in batches}
        filled = sum(lengths) / sum(packed.tokens.size for packed in batches)
        assert filled > 0.4
    assert len(shapes) <= 4


def test_rows_are_even():
    """Eight sequences of seven in rows of 24: two in each, not three in the first two."""
    (packed,) = packing.pack_sequences([np.ones(7, int)] * 8, [1] * 8, max_tokens=24, rows=4)
    assert ((packed.segment_ids > 0).sum(axis=1) == 14).all()


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=8), st.integers(0, 3))
def test_cu_seqlens_round_trip(lengths, tail):
    """Padded and not, sequences of length 0 and 1 among them; an empty sequence has no padding of its own."""
    sizes = np.array([n for n, _ in lengths], int)
    slots = np.array([n + (pad if n else 0) for n, pad in lengths], int)
    cu, padded = np.concatenate([[0], np.cumsum(sizes)]), np.concatenate([[0], np.cumsum(slots)])
    segment_ids, positions = packing.from_cu_seqlens(cu, padded)
    assert segment_ids.tolist() == [
        s + 1 if i < n else 0 for s, (n, m) in enumerate(zip(sizes, slots)) for i in range(m)
    ]
    assert positions.tolist() == [i if i < n else 0 for n, m in zip(sizes, slots) for i in range(m)]
    back = packing.to_cu_seqlens(segment_ids[None], num_segments=len(lengths))
    assert back[0].tolist() == cu.tolist() and back[1].tolist() == padded.tolist()
    plain, _ = packing.from_cu_seqlens(cu, length=int(cu[-1]) + tail)
    assert packing.to_cu_seqlens(plain, num_segments=len(lengths))[0].tolist() == cu.tolist()


def test_k06_empty_sequences_keep_their_number():
    segment_ids, positions = packing.from_cu_seqlens([0, 1, 1, 4])
    assert segment_ids.tolist() == [1, 3, 3, 3] and positions.tolist() == [0, 0, 1, 2]
    assert packing.to_cu_seqlens(segment_ids)[0].tolist() == [0, 1, 1, 4]


def test_nothing_to_pack():
    assert packing.pack_sequences([], [], max_tokens=8) == []


ONE = [np.ones(3, int)]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: packing.pack_sequences([np.ones(9, int)], [1], max_tokens=8), r"`sequences\[0\]` must have at most 8"),
        (lambda: packing.pack_sequences(ONE, [4], max_tokens=8), r"`prompt_lengths\[0\]` must be in 0..3, got 4"),
        (lambda: packing.pack_sequences(ONE, [1, 1], max_tokens=8), "`prompt_lengths` must be one for each of the 1"),
        (lambda: packing.pack_sequences(ONE, [1], max_tokens=6, multiple=4), "`max_tokens` must be a multiple of 4"),
        (lambda: packing.pack_sequences(ONE, [1], max_tokens=8, rows=0), "`rows` must be at least 1"),
        (lambda: packing.pack_sequences([np.ones((2, 2), int)], [1], max_tokens=8), "must be one-dimensional"),
        (lambda: packing.from_cu_seqlens([0, 3, 2]), "`cu_seqlens` must be cumulative"),
        (lambda: packing.from_cu_seqlens([0, 3, 5], [0, 2, 8]), "`cu_seqlens_padded` must have room"),
        (lambda: packing.from_cu_seqlens([0, 3], length=2), "`length` must be at least 3"),
        (lambda: packing.to_cu_seqlens(np.array([2, 1])), "must be sequences in order"),
        (lambda: packing.to_cu_seqlens(np.array([1, 0, 1])), "must have each sequence in one piece"),
        (lambda: packing.to_cu_seqlens(np.array([1, 2]), 1), "`num_segments` must be at least 2"),
        (lambda: packing.to_cu_seqlens(np.array([[1], [2]])), "must be one row"),
    ],
)
@pytest.mark.usefixtures("our_own_errors")
def test_errors_of_packing(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_pack_sequences_without_binpacking_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "binpacking.to_constant_bin_number", None)
    with pytest.raises(ImportError, match="pip install"):
        packing.pack_sequences(ONE, [1], max_tokens=8)


def micro_batches():
    sequences, prompts = sequences_of([(2, 3), (1, 6), (0, 8), (4, 0)])
    return sequences, packing.pack_sequences(sequences, prompts, max_tokens=8, multiple=8)


def test_micro_batches_in_a_stack_and_empty_ones():
    sequences, packed = micro_batches()
    stacked = packing.stack_micro_batches(packed, len(packed) + 2)
    for part, micro_batch in enumerate(packed):
        assert all((a[part] == b).all() for a, b in zip(stacked, micro_batch, strict=True))
    for part in (-1, -2):
        assert not stacked.segment_ids[part].any() and (stacked.samples[part] == -1).all()
    with pytest.raises(ValueError, match=f"`packed` must be 1 to {len(packed) - 1} micro-batches, got {len(packed)}"):
        packing.stack_micro_batches(packed, len(packed) - 1)
    with pytest.raises(ValueError, match="`packed` must be 1 to 3 micro-batches, got 0"):
        packing.stack_micro_batches([], 3)


@pytest.mark.parametrize("stacked", [False, True])
def test_values_stand_where_their_tokens_do(stacked):
    sequences, packed = micro_batches()
    values = [tokens + 0.5 for tokens in sequences]
    for part in [packing.stack_micro_batches(packed, 5)] if stacked else packed:
        placed = packing.place_values(part, values, fill=-1.0)
        there = part.segment_ids > 0
        assert there.any() and (placed[there] == part.tokens[there] + 0.5).all() and (placed[~there] == -1).all()


def test_values_of_another_length():
    sequences, packed = micro_batches()
    with pytest.raises(ValueError, match=r"`values\[2\]` must have shape \(8,\), got \(7,\)"):
        for part in packed:
            packing.place_values(part, [*sequences[:2], sequences[2][1:], sequences[3]])
