"""How a function of local blocks is put on a mesh: which mesh, which specs, or already inside a shard_map.

An op asks `place` once and gets a `Placement`: a small static value that says how the batch dimensions and
the vocabulary are split, and runs a local function there. The four situations (no mesh, a mesh, inside the
caller's shard_map over all axes, or over some) differ here and nowhere else.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ._axes import axis_names, AxisEntry, MeshAxes
from ._errors import wrong


# What a dimension of an array is. The batch dimensions of an op are "tokens", in order; "sequence" is the last of them
# where it is split over the vocabulary axes too (`MeshAxes.sequence_parallel`). None is whole everywhere.
Role = Literal["tokens", "sequence", "vocab", "features"] | None


@dataclass(frozen=True)
class Placement:
    """Where an op runs. Hashable, so that it can be a static argument.

    Attributes:
        mesh: the mesh to map over, or None: no mesh, or every axis is already manual.
        axes: how the caller says, or the types say, that the arrays are split.
        rank: the number of batch dimensions.
        mapped: the axes that `run` makes manual: those that split something. The others are left to JAX: a dimension
            that the caller vmaps over stays split as it is.
        manual_vocab_shards: how many vocabulary shards the caller's own shard_map has made: the whole vocabulary
            has so many times the columns that the op sees.
    """

    mesh: Mesh | AbstractMesh | None
    axes: MeshAxes
    rank: int
    mapped: frozenset[str]
    manual_vocab_shards: int

    @property
    def vocab(self) -> tuple[str, ...]:
        """All mesh axes that split the vocabulary; collectives name these."""
        return axis_names(self.axes.vocab)

    @property
    def features(self) -> tuple[str, ...]:
        """The axes over which a local block of lm_head has to be gathered along its width: those that split tokens too.

        Where all devices along an axis have the same tokens, JAX gathers and slices, outside of the op.
        """
        tokens = axis_names(self.axes.tokens)
        return tuple(a for a in axis_names(self.axes.features) if a in tokens)

    @property
    def batch(self) -> tuple[Role, ...]:
        """The roles of the batch dimensions."""
        return tokens_first(self.rank)

    @property
    def hidden(self) -> tuple[Role, ...]:
        """The roles of hidden states [*batch, D]."""
        return hidden_roles(self.rank)

    def spec(self, *roles: Role) -> Any:
        """The PartitionSpec of an array with these dimensions, as `run` wants it; it stands for the array in a tree."""
        entries = _entries(dataclasses.replace(self.axes, features=self.features), roles)
        return PartitionSpec(*(tuple(a for a in axis_names(e) if a in self.mapped) or None for e in entries))

    def run(self, fun: Callable, in_specs: tuple, out_specs: object) -> Callable:
        """`fun` of local blocks as a function of the arrays the caller holds."""
        if self.mesh is None:
            return fun
        mesh = None if isinstance(self.mesh, AbstractMesh) else self.mesh
        return jax.shard_map(
            fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(self.mapped), check_vma=True
        )

    def with_spec(self, array: jax.Array, *roles: Role) -> jax.Array:
        """`array` in the sharding that `run` wants of it.

        Under Explicit axes shardings are types, and an O(N) mask made by `jnp.ones` has another one than the logits.
        Under Auto axes JAX brings arrays where `run` wants them; what it gathers for that, features along axes that do
        not split tokens, is held to its own split before, and so is its gradient.
        """
        if self.mesh is None:
            return array
        put = lambda spec: spec if isinstance(self.mesh, AbstractMesh) else NamedSharding(self.mesh, spec)
        if _explicit(self.mesh):
            return jax.reshard(array, put(PartitionSpec(*_typed_entries(self.mesh, self.spec(*roles)))))
        if "features" in roles and self.features != axis_names(self.axes.features) and not manual_axes():
            return lax.with_sharding_constraint(array, put(PartitionSpec(*_entries(self.axes, roles))))
        return array

    def vary_alike(self, tree: Any) -> Any:
        """The arrays of `tree`, each varying over every manual axis that any of them varies over, vocabulary apart.

        A scan carry has one type from its first step to its last. The transpose is the sum over the axes that
        were added, so that the gradient of a replicated array is right.
        """
        varying = vma(tree) - frozenset(self.vocab)
        return jax.tree.map(lambda array: vary_over(array, varying), tree)


def tokens_first(rank: int) -> tuple[Role, ...]:
    """The roles of `rank` batch dimensions."""
    return ("tokens",) * rank


def hidden_roles(rank: int) -> tuple[Role, ...]:
    """The roles of hidden states [*batch, D]; the last batch dimension may be split over the vocabulary axes too."""
    return (*tokens_first(rank - 1), "sequence", None) if rank else (None,)


def place(
    axes: MeshAxes | None,
    mesh: Mesh | AbstractMesh | None,
    arrays: Mapping[str, tuple[jax.Array, tuple[Role, ...]]],
    *,
    rank: int,
) -> Placement:
    """The placement of an op with these operands.

    Args:
        axes: how the operands are split; None reads it from their types, where the mesh axes are Explicit.
        mesh: None takes the one set by `jax.set_mesh`.
        arrays: what error messages call it -> the operand, and what its dimensions are. The first of them has all of
            the batch dimensions.
        rank: how many batch dimensions there are.

    Raises:
        TypeError: `axes` or `mesh` of another type.
        ValueError: axes that are not in the mesh, that do not divide an array, that contradict its
            type, or that are needed and not given.
    """
    context, manual = jax.sharding.get_abstract_mesh(), manual_axes()
    if mesh is None or manual:
        mesh = context if context.axis_names else None
    _check_arguments(axes, mesh, context)
    if axes is None:
        axes = _axes_from_types(arrays, mesh)
    axes = dataclasses.replace(axes, tokens=axes.per_dimension(rank))
    _check_names(axes, mesh)
    for name, (array, roles) in arrays.items():
        _check_divides(array, mesh, manual, _entries(axes, roles), roles, name)
    if mesh is None:
        return Placement(None, axes, rank, frozenset(), 1)
    vocab = axis_names(axes.vocab)
    mapped = frozenset({*axis_names(axes.tokens), *vocab} - manual)
    placement = Placement(mesh if mapped else None, axes, rank, mapped, manual_shards(axes.vocab))
    for name, (array, roles) in arrays.items():
        if manual:
            _check_local(array, axes, manual, roles, name)
        elif _explicit(mesh):
            _check_type(array, axes, roles, name)
    return placement


def gathered_batch(batch: tuple[int, ...], axes: MeshAxes | None) -> tuple[int, ...]:
    """The batch dimensions of local hidden states, as those of targets and results: inside the caller's shard_map, and
    with `sequence_parallel`, the last of them is split over vocabulary axes that do not split those."""
    if not isinstance(axes, MeshAxes) or not axes.sequence_parallel or not batch:
        return batch
    return (*batch[:-1], batch[-1] * manual_shards(axes.vocab))


def manual_axes() -> frozenset[str]:
    """The mesh axes that the caller's own shard_map has made manual."""
    context = jax.sharding.get_abstract_mesh()
    return frozenset(n for n, t in zip(context.axis_names, context.axis_types) if t == AxisType.Manual)


def manual_shards(entry: AxisEntry) -> int:
    """Into how many blocks the caller's own shard_map has split a dimension with this entry."""
    context, manual = jax.sharding.get_abstract_mesh(), manual_axes()
    return math.prod(context.shape[a] for a in axis_names(entry) if a in manual)


def vocab_must_not_vary(array: jax.Array, placement: Placement, name: str) -> None:
    """Inside the caller's shard_map: refuse per-token operands that differ between vocabulary shards.

    Raises:
        ValueError: `array` varies over a vocabulary axis.
    """
    varying = sorted(vma(array) & set(placement.vocab))
    if varying:
        raise ValueError(
            wrong(
                name,
                f"be the same on every vocabulary shard, over {varying}",
                "an array that varies there",
                "Pass it in through in_specs that do not name these axes; if its copies are equal, "
                "`jax.lax.pmax(x, axis)` says so.",
            )
        )


def vma(tree: Any) -> frozenset[str]:
    """The manual mesh axes over which any array of `tree` varies."""
    return frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in jax.tree.leaves(tree)))


def vary_over(array: jax.Array, axes: Iterable[str]) -> jax.Array:
    """`array`, varying over these axes too; the transpose is a sum over those that were added."""
    missing = tuple(sorted(frozenset(axes) - vma(array)))
    return lax.pcast(array, missing, to="varying") if missing else array


def sum_over(array: jax.Array, axes: Iterable[str]) -> jax.Array:
    """The sum of `array` over these axes."""
    names = tuple(sorted(axes))
    return lax.psum(array, names) if names else array


def _entries(axes: MeshAxes, roles: tuple[Role, ...]) -> tuple[AxisEntry, ...]:
    """The entry of a PartitionSpec for each dimension."""
    rank = sum(role in ("tokens", "sequence") for role in roles)
    tokens = iter(axes.per_dimension(rank) if rank else ())
    entries = []
    for role in roles:
        entry = next(tokens) if role in ("tokens", "sequence") else None if role is None else getattr(axes, role)
        extra = axes.vocab if role == "sequence" and axes.sequence_parallel else None
        entries.append((*axis_names(entry), *axis_names(extra)) or None)
    return tuple(entries)


def _explicit(mesh: Mesh | AbstractMesh) -> bool:
    return AxisType.Explicit in mesh.axis_types


def _typed_entries(mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> tuple[AxisEntry, ...]:
    """The entries of a spec without the axes that are not Explicit: those are no part of an array's type."""
    typed = {n for n, t in zip(mesh.axis_names, mesh.axis_types) if t == AxisType.Explicit}
    return tuple(tuple(a for a in axis_names(entry) if a in typed) or None for entry in spec)


def _axes_from_types(arrays, mesh) -> MeshAxes:
    name, (array, _) = next(iter(arrays.items()))
    typed = [a for a, _ in arrays.values() if any(axis_names(entry) for entry in jax.typeof(a).sharding.spec)]
    placed = [a for a, _ in arrays.values() if not (isinstance(a, jax.core.Tracer) or a.is_fully_replicated)]
    if mesh is None and (typed or placed):
        how = jax.typeof(typed[0]) if typed else placed[0].sharding
        remedy = "Say how it is split, MeshAxes(tokens=..., vocab=...), and pass mesh= or set it by jax.set_mesh."
        raise ValueError(wrong("axes", f"be given where {name} is split over devices", f"None for {how}", remedy))
    if mesh is None or math.prod(mesh.shape.values()) == 1:
        return MeshAxes()
    types = dict(zip(mesh.axis_names, mesh.axis_types))
    unread = [n for n, size in mesh.shape.items() if size > 1 and types[n] != AxisType.Explicit]
    if unread:
        raise ValueError(
            wrong(
                "axes",
                f"be given where {name} may be split over the mesh {dict(mesh.shape)}",
                None,
                "Say how it is split, MeshAxes(tokens=..., vocab=...), or MeshAxes() if it is replicated. Only "
                f"Explicit axes can be read from the array, and {unread} are {types[unread[0]].name}.",
            )
        )
    read: dict[Role, list] = {role: [] for role in ("tokens", "sequence", "vocab", "features")}
    for array, roles in arrays.values():
        for entry, role in zip([*jax.typeof(array).sharding.spec] + [None] * array.ndim, roles):
            read.setdefault(role, []).append(axis_names(entry))
    first = lambda role: next((names for names in read[role] if names), ())
    vocab, sequence = first("vocab"), first("sequence")
    tokens = [*read["tokens"], *read["sequence"]][: sum(r in ("tokens", "sequence") for r in arrays[name][1])]
    return MeshAxes(
        tokens=tuple(tuple(a for a in names if a not in vocab) or None for names in tokens),
        vocab=vocab or None,
        features=first("features") or None,
        sequence_parallel=bool(vocab) and set(vocab) <= set(sequence),
    )


def _check_arguments(axes, mesh, context) -> None:
    """Types, and a mesh that JAX would refuse in words of its own."""
    if not isinstance(axes, MeshAxes | None):
        raise TypeError(wrong("axes", "be a MeshAxes or None", repr(axes), "MeshAxes(tokens=..., vocab=...)."))
    if not isinstance(mesh, Mesh | AbstractMesh | None):
        raise TypeError(wrong("mesh", "be a jax.sharding.Mesh or None", repr(mesh), "`make_mesh` makes one."))
    if isinstance(mesh, AbstractMesh) and mesh != context and not context.axis_names:
        raise ValueError(
            wrong("mesh", "have devices where none is set", repr(mesh), "Pass a Mesh, or `jax.set_mesh` one.")
        )
    if isinstance(mesh, Mesh) and context.axis_names and mesh.abstract_mesh.shape != context.shape:
        raise ValueError(
            wrong("mesh", f"be the mesh in context, {dict(context.shape)}", dict(mesh.shape), "Leave it out.")
        )


def _check_names(axes: MeshAxes, mesh) -> None:
    names = (*axis_names(axes.tokens), *axis_names(axes.vocab), *axis_names(axes.features))
    known = () if mesh is None else mesh.axis_names
    missing = [n for n in names if n not in known]
    if missing and mesh is None:
        raise ValueError(
            wrong(
                "axes",
                "name axes of a mesh",
                f"{missing} and no mesh",
                "Pass mesh=, or set one: `with jax.set_mesh(mesh):` around the call.",
            )
        )
    if missing:
        raise ValueError(wrong("axes", f"name axes of the mesh {dict(mesh.shape)}", missing))


_REMEDIES = {
    "tokens": 'Pad the batch (loss_mask False there), or split another dimension, as tokens=(None, "context").',
    "sequence": "Pad the batch (loss_mask False there), or leave sequence_parallel out.",
    "vocab": "Pad it (VocabPartition.pad) and give the true size: LogitTransform(vocab_size=...).",
    "features": "Leave `features` out: lm_head is then gathered by JAX.",
}


def _check_divides(array, mesh, manual, entries: tuple, roles: tuple[Role, ...], name: str) -> None:
    for dim, (entry, role) in enumerate(zip(entries, roles)):
        ways = math.prod(mesh.shape[a] for a in axis_names(entry) if a not in manual) if mesh is not None else 1
        if array.shape[dim] % ways:
            raise ValueError(
                wrong(
                    name,
                    f"have a dimension {dim} that divides into {ways} shards over {axis_names(entry)}",
                    f"shape {array.shape}",
                    _REMEDIES[role] if role else "",
                )
            )


def _check_local(array, axes: MeshAxes, manual, roles: tuple[Role, ...], name: str) -> None:
    if "vocab" not in roles and not (axes.sequence_parallel and "sequence" in roles):
        return
    vocab = set(axis_names(axes.vocab))
    named = {*axis_names(axes.tokens), *axis_names(axes.features), *vocab}
    missing = sorted((vocab & manual) - vma(array))
    if missing:
        raise ValueError(
            wrong(
                name,
                f"vary over the vocabulary axes {missing} inside your shard_map",
                "an array that does not",
                "Split it there by in_specs, and keep check_vma=True: without it JAX cannot tell a replicated "
                "cotangent from a split one, and gradients come out divided by the axis size.",
            )
        )
    unnamed = sorted(vma(array) - named)
    if unnamed and axes.vocab is None and array.ndim > 1:
        raise ValueError(
            wrong(
                "axes",
                f"name `vocab`, or else every axis over which `{name}` varies inside your shard_map",
                f"{axes} and {unnamed} besides",
                "If one of these splits the vocabulary, name it; if they all split tokens, name them in `tokens`.",
            )
        )


def _check_type(array, axes: MeshAxes, roles: tuple[Role, ...], name: str) -> None:
    """Axes of size 1 split nothing, and may be in the one and not in the other."""
    typed = jax.typeof(array).sharding
    split = lambda spec: [
        [a for a in axis_names(entry) if typed.mesh.shape[a] > 1] for entry in _typed_entries(typed.mesh, spec)
    ]
    want = PartitionSpec(*_entries(axes, roles))
    have = split(typed.spec)
    if have + [[]] * (array.ndim - len(have)) != split(want):
        raise ValueError(
            wrong(
                name,
                f"be split as `axes` says, {want}",
                f"one of type {typed.spec}",
                "Leave `axes` out to read it from the array, or `jax.reshard` the array.",
            )
        )
