"""Packed rows on the host, in NumPy: token-budget batches of whole sequences, and converters of their forms.

The native form is `segment_ids` (the number of the sequence each token belongs to, 1 and up; 0 for padding) and
`positions` (the place of the token in its sequence; 0 for padding). `jaxrl_logprob.segments` works on them inside jit.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int32

from .sharding._errors import wrong


class Packed(NamedTuple):
    """Sequences packed into rows. A pytree of arrays: goes into jit as it is.

    Attributes:
        tokens: ids; 0 at padding.
        segment_ids: s + 1 at the tokens of sequence s of this batch, 0 at padding.
        positions: the place of each token in its sequence, 0 at padding.
        response_mask: True at the tokens of responses: where they stand, as `segments.shift_targets` takes it.
        prompt_lengths, response_lengths: tokens of each sequence; 0 where there is none.
        samples: which of the sequences that were packed this is; -1 where there is none.
    """

    tokens: Int32[np.ndarray, "*M rows T"]
    segment_ids: Int32[np.ndarray, "*M rows T"]
    positions: Int32[np.ndarray, "*M rows T"]
    response_mask: Bool[np.ndarray, "*M rows T"]
    prompt_lengths: Int32[np.ndarray, "*M S"]
    response_lengths: Int32[np.ndarray, "*M S"]
    samples: Int32[np.ndarray, "*M S"]


def pack_sequences(
    sequences: Sequence[np.ndarray | Sequence[int]],
    prompt_lengths: Sequence[int] | np.ndarray,
    *,
    max_tokens: int,
    rows: int = 1,
    multiple: int = 1,
) -> list[Packed]:
    """Micro-batches of at most `max_tokens` tokens a row, from sequences of any lengths (dynamic batching).

    No sequence is split. All micro-batches of a call have one shape, and over a run there are few: rows are cut to
    max_tokens, a half, a quarter, ... of it, and S is a power of two: at most log2(max_tokens) times log2(sequences)
    compilations, usually one or two.

    Args:
        sequences: token ids, prompt and response in one; may be empty.
        prompt_lengths: how many tokens of each are prompt.
        max_tokens: the token budget of a row.
        rows: rows of a micro-batch, a multiple of the devices that split it; rows that are left over are empty.
        multiple: row lengths are a multiple of this: `SequenceLayout.multiple` where a mesh axis splits them.

    Returns:
        Micro-batches, every sequence in exactly one of them; [] of no sequences.

    Raises:
        ImportError: binpacking is not installed.
        ValueError: a sequence longer than max_tokens, a prompt longer than its sequence, lengths that do not match,
            or a budget that is no multiple of `multiple`.

    References:
        Greedy packing by https://github.com/benmaier/binpacking: into as few rows as it finds, and then, where the
        budget allows, into so many rows as even as it finds.
    """
    arrays = [np.asarray(s, np.int32) for s in sequences]
    lengths, prompts = np.array([a.size for a in arrays], np.int64), np.asarray(prompt_lengths)
    _check_packable(arrays, lengths, prompts, max_tokens, rows, multiple)
    if not arrays:
        return []
    bins = _rows_of(lengths, max_tokens, rows)
    batches = [bins[first : first + rows] for first in range(0, len(bins), rows)]
    length = _row_length(max(int(lengths[row].sum()) for row in bins), max_tokens, multiple)
    num_segments = 1 << (max(sum(map(len, batch)) for batch in batches) - 1).bit_length()
    return [_packed(batch, arrays, prompts, length, num_segments) for batch in batches]


def stack_micro_batches(packed: Sequence[Packed], count: int) -> Packed:
    """The micro-batches of one `pack_sequences` call as one: [count, rows, T] and [count, S], those missing empty.

    Raises:
        ValueError: none, or more than count.
    """
    if not 1 <= len(packed) <= count:
        raise ValueError(wrong("packed", f"be 1 to {count} micro-batches", len(packed)))
    empty = Packed(*(np.zeros_like(a) for a in packed[0]))._replace(samples=np.full_like(packed[0].samples, -1))
    return Packed(*map(np.stack, zip(*packed, *[empty] * (count - len(packed)))))


def place_values(packed: Packed, values: Sequence[np.ndarray], fill: float = 0.0) -> Float[np.ndarray, "*M rows T"]:
    """Per-token values of samples at the places of their tokens; `fill` at padding.

    Args:
        packed: micro-batches, stacked or not.
        values: values[sample][t] of token t of each sample that was packed.

    Raises:
        ValueError: not as many values as the sample has tokens.
    """
    out = np.full(packed.tokens.shape, fill, np.float32)
    for batch in np.ndindex(packed.samples.shape[:-1]):
        for s, sample in enumerate(packed.samples[batch]):
            there = packed.segment_ids[batch] == s + 1
            if sample >= 0:
                size = int(there.sum())
                if np.shape(values[sample]) != (size,):
                    raise ValueError(wrong(f"values[{sample}]", f"have shape ({size},)", np.shape(values[sample])))
                out[batch][there] = values[sample]
    return out


def unpack_sequences(packed: Packed) -> list[tuple[int, np.ndarray]]:
    """(sample, token ids) of every sequence, the inverse of `pack_sequences`, micro-batch by micro-batch."""
    return [
        (int(sample), packed.tokens[packed.segment_ids == s + 1])
        for s, sample in enumerate(packed.samples)
        if sample >= 0
    ]


def from_cu_seqlens(
    cu_seqlens: Sequence[int] | np.ndarray,
    cu_seqlens_padded: Sequence[int] | np.ndarray | None = None,
    *,
    length: int | None = None,
) -> tuple[Int32[np.ndarray, " T"], Int32[np.ndarray, " T"]]:
    """(segment_ids, positions) of sequences given by where they start and end.

    Args:
        cu_seqlens: [S + 1], cumulative lengths of the sequences, the first 0. An empty sequence keeps its number.
        cu_seqlens_padded: [S + 1], where each sequence begins, and the end of all, where they are padded one by one.
        length: T; where the last (padded) sequence ends when None.

    Raises:
        ValueError: not cumulative lengths, padded ones that have no room, or a length that has none.

    Example:
        >>> from_cu_seqlens([0, 3, 5], [0, 4, 8])[0].tolist()
        [1, 1, 1, 0, 2, 2, 0, 0]
    """
    ends = _cumulative("cu_seqlens", cu_seqlens)
    lengths = np.diff(ends)
    starts = ends if cu_seqlens_padded is None else _cumulative("cu_seqlens_padded", cu_seqlens_padded)
    if starts.shape != ends.shape or np.any(np.diff(starts) < lengths):
        raise ValueError(
            wrong("cu_seqlens_padded", f"have room for each of the lengths {lengths.tolist()}", starts.tolist())
        )
    length = int(starts[-1]) if length is None else length
    if length < starts[-1]:
        raise ValueError(wrong("length", f"be at least {starts[-1]}, where the sequences end", length))
    segment_ids, positions = np.zeros(length, np.int32), np.zeros(length, np.int32)
    for s, (start, size) in enumerate(zip(starts[:-1], lengths)):
        segment_ids[start : start + size] = s + 1
        positions[start : start + size] = np.arange(size)
    return segment_ids, positions


def to_cu_seqlens(
    segment_ids: np.ndarray, num_segments: int | None = None
) -> tuple[Int32[np.ndarray, " S1"], Int32[np.ndarray, " S1"]]:
    """(cu_seqlens, cu_seqlens_padded) of one packed row: the inverse of `from_cu_seqlens`.

    Args:
        segment_ids: [T] or [1, T], sequences in the order of their numbers.
        num_segments: S, where the last sequences may be empty; the highest number when None.

    Returns:
        Cumulative lengths, and where each sequence begins when padding belongs to the sequence before it. An empty
        sequence has no padding; nor is there any before the first.

    Raises:
        ValueError: sequences that are not in order, or in several pieces, padding before the first, or numbers above
            num_segments.

    Example:
        >>> [a.tolist() for a in to_cu_seqlens(np.array([1, 1, 1, 0, 2, 2, 0, 0]))]
        [[0, 3, 5], [0, 4, 8]]
    """
    ids = np.asarray(segment_ids)
    if ids.shape not in ((ids.size,), (1, ids.size)):
        raise ValueError(wrong("segment_ids", "be one row, [T] or [1, T]", f"shape {ids.shape}"))
    ids = ids.reshape(-1)
    there = np.flatnonzero(ids)
    highest = int(ids.max(initial=0))
    num_segments = highest if num_segments is None else num_segments
    if highest > num_segments:
        raise ValueError(wrong("num_segments", f"be at least {highest}, the highest of segment_ids", num_segments))
    if np.any(np.diff(ids[there]) < 0) or (ids.size and there.size and ids[0] == 0) or np.any(ids < 0):
        raise ValueError(wrong("segment_ids", "be sequences in order, from the first slot on", ids.tolist()))
    lengths = np.bincount(ids[there], minlength=num_segments + 1)[1:]
    inside = [np.flatnonzero(ids == s) for s in range(1, num_segments + 1)]
    if any(i.size and i[-1] - i[0] + 1 != i.size for i in inside):
        raise ValueError(wrong("segment_ids", "have each sequence in one piece", ids.tolist()))
    starts = np.empty(num_segments + 1, np.int32)
    starts[-1] = ids.size
    for s in reversed(range(num_segments)):
        starts[s] = inside[s][0] if lengths[s] else starts[s + 1]
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), starts


def _rows_of(lengths: np.ndarray, max_tokens: int, rows: int) -> list[list[int]]:
    """The sequences of each row, in their order; a multiple of `rows` rows."""
    try:
        from binpacking.to_constant_bin_number import to_constant_bin_number
        from binpacking.to_constant_volume import to_constant_volume
    except ImportError as error:
        raise ImportError("pack_sequences needs binpacking: pip install 'jaxrl-logprob[packing]'") from error
    weights: Any = dict(enumerate(lengths.tolist()))  # Its annotations know no keys but strings.
    fewest: list[list[int]] = [list(b) for b in to_constant_volume(weights, max_tokens)]
    count = -(-len(fewest) // rows) * rows
    even: list[list[int]] = [list(b) for b in to_constant_bin_number(weights, count)]
    fits = all(lengths[row].sum() <= max_tokens for row in even)
    bins = [sorted(row) for row in (even if fits else fewest)]
    return sorted(bins, key=lambda row: row[:1]) + [[] for _ in range(count - len(bins))]


def _row_length(tokens: int, max_tokens: int, multiple: int) -> int:
    """The shortest of max_tokens, a half of it, a quarter, ..., in whole multiples, that has room."""
    length = max_tokens
    while (half := -(-length // 2 // multiple) * multiple) >= tokens and half < length:
        length = half
    return max(length, multiple)


def _packed(
    batch: list[list[int]], arrays: list[np.ndarray], prompts: np.ndarray, length: int, num_segments: int
) -> Packed:
    shape = (len(batch), length)
    tokens, segment_ids, positions = (np.zeros(shape, np.int32) for _ in range(3))
    response_mask = np.zeros(shape, bool)
    prompt_lengths, response_lengths = np.zeros(num_segments, np.int32), np.zeros(num_segments, np.int32)
    samples = np.full(num_segments, -1, np.int32)
    segment = 0
    for row, members in enumerate(batch):
        start = 0
        for sample in members:
            size = arrays[sample].size
            cut = np.s_[row, start : start + size]
            place = np.arange(size)
            tokens[cut], segment_ids[cut], positions[cut] = arrays[sample], segment + 1, place
            response_mask[cut] = place >= prompts[sample]
            prompt_lengths[segment], response_lengths[segment] = prompts[sample], size - prompts[sample]
            samples[segment] = sample
            segment, start = segment + 1, start + size
    return Packed(tokens, segment_ids, positions, response_mask, prompt_lengths, response_lengths, samples)


def _check_packable(arrays, lengths, prompts, max_tokens, rows, multiple) -> None:
    for name, value in (("max_tokens", max_tokens), ("rows", rows), ("multiple", multiple)):
        if value < 1:
            raise ValueError(wrong(name, "be at least 1", value))
    if max_tokens % multiple:
        raise ValueError(wrong("max_tokens", f"be a multiple of {multiple}", max_tokens))
    if prompts.shape != lengths.shape:
        raise ValueError(wrong("prompt_lengths", f"be one for each of the {lengths.size} sequences", prompts.shape))
    for sample, (array, prompt) in enumerate(zip(arrays, prompts)):
        if array.ndim != 1:
            raise ValueError(wrong(f"sequences[{sample}]", "be one-dimensional", f"shape {array.shape}"))
        if array.size > max_tokens:
            remedy = "Cut it, leave it out, or allow more tokens a row."
            raise ValueError(wrong(f"sequences[{sample}]", f"have at most {max_tokens} tokens", array.size, remedy))
        if not 0 <= prompt <= array.size:
            raise ValueError(wrong(f"prompt_lengths[{sample}]", f"be in 0..{array.size}", int(prompt)))


def _cumulative(name: str, values: Sequence[int] | np.ndarray) -> np.ndarray:
    array = np.asarray(values, np.int64)
    if array.ndim != 1 or not array.size or array[0] or np.any(np.diff(array) < 0):
        raise ValueError(wrong(name, "be cumulative lengths: one-dimensional, from 0, never falling", array.tolist()))
    return array
