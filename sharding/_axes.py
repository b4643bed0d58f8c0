"""Which mesh axes split what. The names are always the caller's; this module only reads and checks them."""

from dataclasses import dataclass

from jax.sharding import PartitionSpec

from ._errors import wrong


AxisEntry = str | tuple | PartitionSpec | None


def axis_names(entry: AxisEntry) -> tuple[str, ...]:
    """The mesh axes named by one entry of a PartitionSpec, in order: None -> (), "a" -> ("a",)."""
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    return tuple(name for part in entry for name in axis_names(part))


@dataclass(frozen=True)
class MeshAxes:
    """The mesh axes that split tokens, vocabulary and features, each written as in a PartitionSpec.

    `MeshAxes()` says that everything is replicated, on purpose.

    Args:
        tokens: the axes that split the batch dimensions. A name splits the first dimension. A tuple
            has one entry for each dimension, ("data", "context") for [B, T] with B over "data" and T over
            "context", (None, "context") for T alone, (("data", "fsdp"), "context") for B over two axes.
            Where there is one batch dimension, a flat tuple of names splits that dimension over all of them.
        vocab: the axes that split the vocabulary dimension of logits or lm_head.
        features: the axes that split the width D of lm_head (FSDP); they may split tokens too. Ops from logits have
            no such dimension.
        sequence_parallel: the last batch dimension of hidden_states is also split over `vocab`, after its own axes
            (Megatron's sequence parallelism). Targets and results are not.

    Raises:
        TypeError: an entry is not a name, a tuple of entries, a PartitionSpec or None.
        ValueError: an axis is named twice, other than in tokens and features, or sequence_parallel without vocab.

    Example:
        >>> MeshAxes(tokens=("data", "context"), vocab="vocab").per_dimension(2)
        ('data', 'context')
        >>> MeshAxes(tokens=("data", "context")).per_dimension(1)
        (('data', 'context'),)
    """

    tokens: AxisEntry = None
    vocab: AxisEntry = None
    features: AxisEntry = None
    sequence_parallel: bool = False

    def __post_init__(self):
        for field in ("tokens", "vocab", "features"):
            entry = getattr(self, field)
            if isinstance(entry, PartitionSpec):
                object.__setattr__(self, field, tuple(entry))
            _check_entry(f"axes.{field}", getattr(self, field))
        tokens, vocab, features = (axis_names(e) for e in (self.tokens, self.vocab, self.features))
        twice = sorted({n for names in ((*tokens, *vocab), (*vocab, *features)) for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(
                wrong(
                    "axes",
                    "name each mesh axis once",
                    f"{twice} more than once in {self}",
                    "One axis splits tokens or vocabulary, not both; `features` may share axes with `tokens` (FSDP).",
                )
            )
        if self.sequence_parallel and not vocab:
            raise ValueError(wrong("axes.vocab", "be given where sequence_parallel is True", repr(self)))

    def per_dimension(self, rank: int) -> tuple[AxisEntry, ...]:
        """`tokens` as one entry for each of `rank` batch dimensions.

        Raises:
            ValueError: `tokens` has more entries than there are batch dimensions.
        """
        entry = self.tokens
        if entry is None or isinstance(entry, str):
            entries = (entry,)
        elif rank == 1 and len(entry) > 1 and all(isinstance(part, str) for part in entry):
            entries = (entry,)
        else:
            entries = tuple(entry)
        while len(entries) > rank and entries[-1] is None:
            entries = entries[:-1]
        if len(entries) > rank:
            raise ValueError(
                wrong(
                    "axes.tokens",
                    f"have at most one entry for each of the {rank} batch dimensions",
                    repr(entry),
                    'To split one dimension over several axes, nest them: tokens=(("data", "fsdp"), "context").',
                )
            )
        return entries + (None,) * (rank - len(entries))


def _check_entry(argument: str, entry: object) -> None:
    if entry is None or isinstance(entry, str):
        return
    if isinstance(entry, tuple):
        for part in entry:
            _check_entry(argument, part)
        return
    raise TypeError(wrong(argument, "be a mesh axis name, a tuple of them or None", repr(entry)))
