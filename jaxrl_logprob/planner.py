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
    dtype: DTypeLike = jnp.bfloat16,
    platform: Platform = "tpu",
    budget: int | None = None,
    chunks: Chunks = Chunks(),
) -> Plan:
    """Blocks and bytes for T tokens, width D and vocabulary V on a mesh.

    The temporaries are within 15 % of XLA's for CPU in float32; on TPU and GPU, where small buffers may live on
    the chip and fusions keep others from existing, the two ways of this library take no more than is said.

    Args:
        tokens, width, vocab: T, D and V of the whole batch and model.
        token_shards, vocab_shards: products of the sizes of the mesh axes that split them.
        dtype: of hidden_states and lm_head.
        platform: where it runs.
        budget: bytes a device may spend on temporaries, or None.
        chunks: what is already decided.

    Raises:
        ValueError: sizes below 1, or that the shards do not divide.

    Example:
        >>> p = plan(32768, 2048, 248320, token_shards=2, vocab_shards=2)
        >>> p.blocks.vocab_outside, p.temporaries() < p.temporaries("from logits") / 20
        (True, True)
    """
    for name, size in dict(tokens=tokens, width=width, vocab=vocab, token_shards=token_shards,
                           vocab_shards=vocab_shards).items():  # fmt: skip
        if size < 1:
            raise ValueError(wrong(name, "be at least 1", size))
    if tokens % token_shards or vocab % vocab_shards:
        got = f"{tokens} over {token_shards} and {vocab} over {vocab_shards}"
        raise ValueError(wrong("tokens, vocab", "divide into their shards", got, "Pad them (VocabPartition)."))
    if platform not in ("cpu", "tpu", "gpu"):
        raise ValueError(wrong("platform", 'be "cpu", "tpu" or "gpu"', repr(platform)))
    rows, columns = tokens // token_shards, vocab // vocab_shards
    choose = partial(choose_blocks, tokens=rows, width=width, vocab=columns, is_cpu=platform == "cpu")
    size = jnp.dtype(dtype).itemsize
    blocks = choose(chunks)
    hidden = _from_hidden_states(blocks, rows, width, columns, size)
    while budget is not None and sum(hidden.values()) > budget and (smaller := _smaller(chunks, blocks)) != chunks:
        chunks = smaller
        blocks = choose(chunks)
        hidden = _from_hidden_states(blocks, rows, width, columns, size)
    logits = rows * columns
    buffers = {
        PLAIN: {"logits, log p, p and their gradient, in float32": 4 * 4 * logits},
        FROM_LOGITS: {
            "logits, then their gradient": size * logits,
            "a block of rows": 4 * columns * rows_of_block(columns, platform == "cpu") if size < 4 else 0,
            "statistics": 24 * rows,
        },
        FROM_HIDDEN_STATES: hidden,
    }
    shared = {
        "hidden_states": size * rows * width,
        "lm_head": size * width * columns,
        "dhidden_states": size * rows * width,
        "dlm_head": size * width * columns,
    }
    advice = () if budget is None or sum(hidden.values()) <= budget else _advice(blocks, hidden, budget)
    return Plan(chunks, blocks, buffers, shared, budget, advice)


def _from_hidden_states(blocks: Blocks, rows: int, width: int, columns: int, size: int) -> dict[str, int]:
    """Temporaries of forward and backward; the forward's are fewer."""
    padded = round_up(rows, blocks.last_rows)
    tile, block = min(blocks.rows, padded), min(blocks.columns, columns)
    tail = columns % block
    accumulator = ("dhidden_states", padded * width) if blocks.vocab_outside else ("dlm_head", width * columns)
    # A tile that is all of the rows is read where it lies.
    tiles = (size if padded > tile else 0) + 4
    return {
        f"{accumulator[0]}, accumulated in float32": 4 * accumulator[1],
        "a block of logits and of their gradient": 4 * tile * (block + 2 * tail),
        "a tile of hidden_states and of their gradient": tiles * tile * width,
        "a block of lm_head, of its gradient and of its sum": (size + 4 + 4) * width * block,
        "statistics, and the order of rows that count": 40 * padded,
    }


def _smaller(chunks: Chunks, blocks: Blocks) -> Chunks:
    """Half the larger side of a block, down to 128 x 128."""
    rows, columns = blocks.rows, blocks.columns
    if rows >= columns and rows > ALIGNMENT:
        return dataclasses.replace(chunks, token_chunk=max(ALIGNMENT, rows // 2 // ALIGNMENT * ALIGNMENT))
    if columns > ALIGNMENT:
        return dataclasses.replace(chunks, vocab_chunk=max(ALIGNMENT, columns // 2 // ALIGNMENT * ALIGNMENT))
    return chunks


def _advice(blocks: Blocks, hidden: Mapping[str, int], budget: int) -> tuple[str, ...]:
    name, accumulator = next(iter(hidden.items()))
    if accumulator > budget:
        other = "tokens" if blocks.vocab_outside else "vocab"
        more = "token" if blocks.vocab_outside else "vocabulary"
        return (
            f"{name.split(',')[0]} alone takes {accumulator} of {budget} bytes: split it over "
            f"{-(-accumulator // budget)} times as many {more} shards, or score fewer tokens a step (micro-batches).",
            f'Chunks(loop="{other}") accumulates the other gradient instead, which is larger here.',
        )
    return (f"Blocks of 128 x 128 are the smallest: allow {sum(hidden.values()) - budget} bytes more.",)
