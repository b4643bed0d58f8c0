"""How large the blocks of the loops over hidden states and lm_head are, and which loop is outside.

One decision, asked by the ops for each platform as they are traced, and by the planner to tell the bytes beforehand.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ._loop import round_up
from ._operands import check_chunk
from .sharding._errors import wrong


# The most rows and columns of a block of logits, and the most floats of a tile of hidden states and of a block of
# lm_head. On CPU a block is an array and should stay in a cache; on an accelerator it should be large beside the cost
# of starting a step.
_CPU = dict(rows=1024, columns=512, floats=2**20)
_ACCELERATOR = dict(rows=2048, columns=1024, floats=2**23)
_LAST_ROWS = 128
# Vocabulary blocks start at multiples of this: an unaligned one makes XLA copy the whole gradient of lm_head.
ALIGNMENT = 128


@dataclass(frozen=True)
class Chunks:
    """Sizes of the blocks of the ops from hidden states, per device. None leaves a choice to the library.

    Args:
        token_chunk: rows of a block of logits, rounded up to a multiple of 128 where there are so many. Changes memory
            and speed, and no bit of the results and of dhidden_states; dlm_head is added up in another order.
        vocab_chunk: columns of a block of logits, a multiple of 128. Changes the order of sums over the vocabulary.
        loop: which loop of the backward is outside: "vocab" accumulates dhidden_states in N x D floats, "tokens"
            accumulates dlm_head in D x V floats. None for the smaller one.

    Raises:
        TypeError: a chunk that is not an integer.
        ValueError: token_chunk below 1, vocab_chunk not a multiple of 128, another loop.
    """

    token_chunk: int | None = None
    vocab_chunk: int | None = None
    loop: Literal["vocab", "tokens"] | None = None

    def __post_init__(self):
        check_chunk("token_chunk", self.token_chunk)
        check_chunk("vocab_chunk", self.vocab_chunk)
        if self.vocab_chunk is not None and self.vocab_chunk % ALIGNMENT:
            remedy = "Other blocks make XLA copy the whole gradient of lm_head."
            raise ValueError(wrong("vocab_chunk", f"be a multiple of {ALIGNMENT}", self.vocab_chunk, remedy))
        if self.loop not in ("vocab", "tokens", None):
            raise ValueError(wrong("loop", 'be "vocab", "tokens" or None', repr(self.loop)))


class Blocks(NamedTuple):
    """Every choice made, for the shapes of one device.

    Attributes:
        rows: of a tile, as long as there are so many left that count.
        last_rows: of the tiles after those, so that fewer of their rows are not needed. Divides `rows`.
        columns: of a block of the vocabulary.
        vocab_outside: which loop of the backward is outside.
    """

    rows: int
    last_rows: int
    columns: int
    vocab_outside: bool


def choose_blocks(chunks: Chunks, *, tokens: int, width: int, vocab: int, is_cpu: bool) -> Blocks:
    """The blocks for `tokens` rows, `width` features and `vocab` columns on a device."""
    most = _CPU if is_cpu else _ACCELERATOR
    fit = lambda size, least: max(least, min(size, most["floats"] // width) // least * least)
    rows = chunks.token_chunk or fit(most["rows"], _LAST_ROWS)
    # Products of fewer rows are computed otherwise, and the chunk size would show in the last bits.
    rows = round_up(rows, _LAST_ROWS) if tokens > _LAST_ROWS else round_up(max(1, tokens), 8)
    rows = min(rows, round_up(tokens, 8))
    columns = min(chunks.vocab_chunk or fit(most["columns"], ALIGNMENT), round_up(vocab, ALIGNMENT))
    last_rows = _LAST_ROWS if rows % _LAST_ROWS == 0 else rows
    return Blocks(rows, last_rows, columns, chunks.loop == "vocab" if chunks.loop else tokens <= vocab)
