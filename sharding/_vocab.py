"""The vocabulary partition: which shard holds which ids, and the padding that makes the shards equal."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from ._errors import wrong


@dataclass(frozen=True)
class VocabPartition:
    """A vocabulary of `vocab_size` ids in `num_shards` equal, contiguous shards; the last may end in padding.

    Args:
        vocab_size: the number of ids that exist.
        num_shards: the product of the sizes of the mesh axes that split the vocabulary.
        multiple: every shard has a multiple of this many columns. 128 keeps the matmuls and the gradient
            buffers of the hidden-states ops aligned.

    Raises:
        ValueError: an argument below 1.

    Example:
        >>> part = VocabPartition(50257, num_shards=2)
        >>> part.shard_size, part.padded_size, part.bounds(1)
        (25129, 50258, (25129, 50257))
    """

    vocab_size: int
    num_shards: int
    multiple: int = 1

    def __post_init__(self):
        for field in ("vocab_size", "num_shards", "multiple"):
            if getattr(self, field) < 1:
                raise ValueError(wrong(field, "be at least 1", getattr(self, field)))

    @property
    def shard_size(self) -> int:
        """Columns of each shard, padding included."""
        return -(-self.vocab_size // (self.num_shards * self.multiple)) * self.multiple

    @property
    def padded_size(self) -> int:
        """Columns of all shards together."""
        return self.shard_size * self.num_shards

    def bounds(self, shard: int) -> tuple[int, int]:
        """First id of a shard and the id after its last; equal for a shard that is all padding.

        Raises:
            ValueError: no such shard.
        """
        if not 0 <= shard < self.num_shards:
            raise ValueError(wrong("shard", f"be in [0, {self.num_shards})", shard))
        first = min(shard * self.shard_size, self.vocab_size)
        return first, min(first + self.shard_size, self.vocab_size)

    def owner(self, ids: Int[Array, "*batch"] | Int[np.ndarray, "*batch"]) -> Int[Array, "*batch"]:
        """The shard that holds each id, -1 for ids outside [0, vocab_size)."""
        ids = jnp.asarray(ids)
        return jnp.where((ids >= 0) & (ids < self.vocab_size), ids // self.shard_size, -1)

    def pad(self, array: Shaped[Array, "..."], axis: int = -1) -> Shaped[Array, "..."]:
        """`array` with zeros after its `vocab_size` ids along `axis`, up to `padded_size`.

        The ops leave the padded columns out when told the true size: `LogitTransform(vocab_size=...)`.

        Raises:
            ValueError: `array` does not have `vocab_size` entries along `axis`.
        """
        if array.shape[axis] != self.vocab_size:
            raise ValueError(
                wrong("array", f"have vocab_size={self.vocab_size} entries along axis {axis}", f"shape {array.shape}")
            )
        widths = [(0, 0)] * array.ndim
        widths[axis] = (0, self.padded_size - self.vocab_size)
        return jax.numpy.pad(array, widths)
