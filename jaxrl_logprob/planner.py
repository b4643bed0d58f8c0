"""How many bytes the loss segment of an actor update needs on a device, before anything is compiled.

For log-probabilities, entropy and the gradients of hidden_states and lm_head, computed in three ways: plain JAX, from
logits, from hidden states. The blocks are the ones that the ops choose themselves; `plan` makes them smaller where a
budget asks for it. On the command line: `python -m jaxrl_logprob plan --help`.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

from ._chunks import ALIGNMENT, Blocks, choose_blocks, Chunks
from ._loop import round_up, rows_of_block
from .sharding._errors import wrong


Platform = Literal["cpu", "tpu", "gpu"]
_NAMES = {4: "float32", 8: "float64"}
PLAIN, FROM_LOGITS, FROM_HIDDEN_STATES = "plain JAX", "from logits", "from hidden states"


@dataclass(frozen=True)
class Plan:
    """The plan of one device.

    Attributes:
        chunks: to pass to the ops from hidden states.
        blocks: what comes of them: rows and columns of a block, and which loop is outside.
        buffers: way -> temporary buffer -> bytes. Held at once, at the peak.
        shared: bytes of what every way needs: inputs and their gradients.
        budget: bytes for temporaries, or None.
        advice: what to do where the budget is not met; empty where it is.
    """

    chunks: Chunks
    blocks: Blocks
    buffers: Mapping[str, Mapping[str, int]]
    shared: Mapping[str, int]
    budget: int | None
    advice: tuple[str, ...]

    def temporaries(self, way: str = FROM_HIDDEN_STATES) -> int:
        """Bytes of all temporaries of one way."""
        return sum(self.buffers[way].values())

    @property
    def fits(self) -> bool:
        """Whether the way from hidden states is within the budget."""
        return self.budget is None or self.temporaries() <= self.budget


def plan(
    tokens: int,
    width: int,
    vocab: int,
    *,
    token_shards: int = 1,
    vocab_shards: int = 1,
    feature_shards: int = 1,
    sequence_parallel: bool = False,
    dtype: DTypeLike = jnp.bfloat16,
    platform: Platform = "tpu",
    budget: int | None = None,
    chunks: Chunks = Chunks(),
) -> Plan:
    """Blocks and bytes for T tokens, width D and vocabulary V on a mesh.

    For an lm_head [D, V] or a tied embedding, without an adapter. From a few MiB on, the temporaries are within 15 % of
    XLA's for CPU in float32. On TPU and GPU, where small buffers may live on the chip and XLA may pack large ones
    badly, those measured at the shapes of the README were 0.7 to 1.25 times what is said.

    Args:
        tokens, width, vocab: T, D and V of the whole batch and model.
        token_shards, vocab_shards: products of the sizes of the mesh axes that split them.
        feature_shards: of those that split D of lm_head (`MeshAxes.features`).
        sequence_parallel: whether vocabulary axes split hidden_states along tokens too.
        dtype: of hidden_states and lm_head, floating point.
        platform: where it runs.
        budget: bytes a device may spend on temporaries, or None.
        chunks: what is already decided.

    Raises:
        TypeError: a dtype that is not floating point.
        ValueError: sizes or a budget below 1, or sizes that the shards do not divide.

    Example:
        >>> p = plan(32768, 2048, 248320, token_shards=2, vocab_shards=2)
        >>> p.blocks.vocab_outside, p.temporaries() < p.temporaries("from logits") / 20
        (True, True)
    """
    for name, size in dict(tokens=tokens, width=width, vocab=vocab, token_shards=token_shards,
                           vocab_shards=vocab_shards, feature_shards=feature_shards,
                           budget=1 if budget is None else budget).items():  # fmt: skip
        if size < 1:
            raise ValueError(wrong(name, "be at least 1", size))
    sequence_shards = vocab_shards if sequence_parallel else 1
    for name, size, shards in (
        ("tokens", tokens, token_shards * sequence_shards),
        ("vocab", vocab, vocab_shards),
        ("width", width, feature_shards),
    ):
        if size % shards:
            raise ValueError(wrong(name, f"divide into {shards} shards", size, "Pad it (VocabPartition)."))
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(wrong("dtype", "be floating point", jnp.dtype(dtype).name))
    if platform not in ("cpu", "tpu", "gpu"):
        raise ValueError(wrong("platform", 'be "cpu", "tpu" or "gpu"', repr(platform)))
    rows, columns = tokens // token_shards, vocab // vocab_shards
    choose = partial(choose_blocks, tokens=rows, width=width, vocab=columns, is_cpu=platform == "cpu")
    size = jnp.dtype(dtype).itemsize
    wide = max(4, size)
    whole_head, whole_states = size * width * columns, size * rows * width
    gathered = {}
    if feature_shards > 1:
        gathered["lm_head, gathered"] = whole_head
    if sequence_shards > 1:
        gathered["hidden_states, gathered"] = whole_states

    def temporaries(blocks: Blocks) -> dict[str, int]:
        buffers = _from_hidden_states(blocks, rows, width, columns, size)
        if sequence_shards > 1 and not blocks.vocab_outside:
            buffers["dhidden_states, to be scattered"] = whole_states
        return buffers | gathered

    blocks = choose(chunks)
    hidden = temporaries(blocks)
    while budget is not None and sum(hidden.values()) > budget and (smaller := _smaller(chunks, blocks)) != chunks:
        chunks = smaller
        blocks = choose(chunks)
        hidden = temporaries(blocks)
    logits = rows * columns
    buffers = {
        PLAIN: {f"logits, log p, p and their gradient, in {_NAMES[wide]}": 4 * wide * logits} | gathered,
        FROM_LOGITS: {
            "logits, then their gradient": size * logits,
            "a block of rows": 4 * columns * rows_of_block(columns, platform == "cpu") if size < 4 else 0,
            "statistics": 24 * rows,
        }
        | gathered,
        FROM_HIDDEN_STATES: hidden,
    }
    shared = {
        "hidden_states": whole_states // sequence_shards,
        "lm_head": whole_head // feature_shards,
        "dhidden_states": whole_states // sequence_shards,
        "dlm_head": whole_head // feature_shards,
    }
    made = Plan(chunks, blocks, buffers, shared, budget, ())
    return made if made.fits else dataclasses.replace(made, advice=_advice(made, rows, columns))


def _from_hidden_states(blocks: Blocks, rows: int, width: int, columns: int, size: int) -> dict[str, int]:
    """Temporaries of forward and backward; the forward's are fewer."""
    wide = max(4, size)
    padded = round_up(rows, blocks.last_rows)
    tile, block = min(blocks.rows, padded), min(blocks.columns, columns)
    tail = columns % block
    accumulator = ("dhidden_states", padded * width) if blocks.vocab_outside else ("dlm_head", width * columns)
    # A tile that is all of the rows is read where it lies.
    tiles = (size if padded > tile else 0) + wide
    return {
        f"{accumulator[0]}, accumulated in {_NAMES[wide]}": wide * accumulator[1],
        "a block of logits and of their gradient": wide * tile * (block + 2 * tail),
        "a tile of hidden_states and of their gradient": tiles * tile * width,
        "a block of lm_head, of its gradient and of its sum": (size + wide + wide) * width * block,
        "statistics, and the order of rows that count": 10 * wide * padded,
    }


def _smaller(chunks: Chunks, blocks: Blocks) -> Chunks:
    """Half the larger side of a block, down to 128 x 128."""
    rows, columns = blocks.rows, blocks.columns
    if rows >= columns and rows > ALIGNMENT:
        return dataclasses.replace(chunks, token_chunk=max(ALIGNMENT, rows // 2 // ALIGNMENT * ALIGNMENT))
    if columns > ALIGNMENT:
        return dataclasses.replace(chunks, vocab_chunk=max(ALIGNMENT, columns // 2 // ALIGNMENT * ALIGNMENT))
    return chunks


def _advice(made: Plan, rows: int, columns: int) -> tuple[str, ...]:
    """What to do where the smallest blocks are too large, of `rows` and `columns` on a device."""
    name, accumulator = next(iter(made.buffers[FROM_HIDDEN_STATES].items()))
    budget, outside = made.budget or 0, made.blocks.vocab_outside
    if accumulator <= budget:
        return (f"Blocks of 128 x 128 are the smallest: allow {mebibytes(made.temporaries() - budget)} MiB more.",)
    split, other, more = (rows, columns, "token") if outside else (columns, rows, "vocabulary")
    least = -(-accumulator // budget)
    times = next((n for n in range(least, split + 1) if split % n == 0), None)
    what = f"{name.split(',')[0]} alone takes {mebibytes(accumulator)} of {mebibytes(budget)} MiB: "
    shards = "" if times is None else f"split it over {times} times as many {more} shards, or "
    lines = [f"{what}{shards}score fewer tokens a step (micro-batches)."]
    if other < split:
        loop, size = "tokens" if outside else "vocab", mebibytes(accumulator * other // split)
        lines.append(f'Chunks(loop="{loop}") accumulates {size} MiB instead.')
    return tuple(lines)


def mebibytes(size: int) -> str:
    """As MiB, with as many digits as tell it from 0."""
    return f"{size / 2**20:,.1f}" if size >= 2**20 or not size else f"{size / 2**20:.2g}"
