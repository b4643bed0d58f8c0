"""How a function of local blocks is put on a mesh: which mesh, which specs, or already inside a shard_map.

An op asks `place` once and gets a `Placement`: a small static value that says how the batch dimensions and
the vocabulary are split, and runs a local function there. The four situations (no mesh, a mesh, inside the
caller's shard_map over all axes, or over some) differ here and nowhere else.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ._axes import axis_names, AxisEntry, MeshAxes
from ._errors import wrong


@dataclass(frozen=True)
class Placement:
    """Where an op runs. Hashable, so that it can be a static argument.

    Attributes:
        mesh: the mesh to map over, or None: no mesh, or every axis is already manual.
        tokens: for each batch dimension, the axes that split it and are not manual yet.
        vocab: all mesh axes that split the vocabulary; collectives name these.
        mapped: the axes that `run` makes manual: those that split something. The others are left to JAX: a dimension
            that the caller vmaps over stays split as it is.
        manual_vocab_shards: how many vocabulary shards the caller's own shard_map has made: the whole vocabulary
            has so many times the columns that the op sees.
    """

    mesh: Mesh | AbstractMesh | None
    tokens: tuple[AxisEntry, ...]
    vocab: tuple[str, ...]
    mapped: frozenset[str]
    manual_vocab_shards: int

    def spec(self, *trailing: AxisEntry) -> PartitionSpec:
        """The spec of an array [*batch, *trailing]."""
        return PartitionSpec(*self.tokens, *trailing)

    @property
    def vocab_entry(self) -> tuple[str, ...] | None:
        """The entry for a vocabulary dimension in `spec`."""
        return tuple(a for a in self.vocab if a in self.mapped) or None

    def run(self, fun: Callable, in_specs: tuple, out_specs: object) -> Callable:
        """`fun` of local blocks as a function of the arrays the caller holds."""
        if self.mesh is None:
            return fun
        mesh = None if isinstance(self.mesh, AbstractMesh) else self.mesh
        return jax.shard_map(
            fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(self.mapped), check_vma=True
        )

    def with_spec(self, array: jax.Array, *trailing: AxisEntry) -> jax.Array:
        """`array` [*batch, *trailing] in the sharding that `run` wants of it.

        Under Explicit axes shardings are types, and an O(N) mask made by `jnp.ones` has another one than the logits.
        """
        if self.mesh is None or not _explicit(self.mesh):
            return array
        spec = PartitionSpec(*_typed_entries(self.mesh, self.spec(*trailing)))
        return jax.reshard(array, spec if isinstance(self.mesh, AbstractMesh) else NamedSharding(self.mesh, spec))

    def vary_alike(self, tree: Any) -> Any:
        """The arrays of `tree`, each varying over every manual axis that any of them varies over, vocabulary apart.

        A scan carry has one type from its first step to its last. The transpose is the sum over the axes that
        were added, so that the gradient of a replicated array is right.
        """
        varying = frozenset().union(*(_vma(a) for a in jax.tree.leaves(tree))) - frozenset(self.vocab)

        def vary(array):
            missing = tuple(varying - _vma(array))
            return lax.pcast(array, missing, to="varying") if missing else array

        return jax.tree.map(vary, tree)


def place(
    axes: MeshAxes | None, mesh: Mesh | AbstractMesh | None, array: jax.Array, *, name: str, rank: int
) -> Placement:
    """The placement of an op whose operand `array` is [*batch, V].

    Args:
        axes: how the operand is split; None reads it from `array`'s type, where the mesh axes are Explicit.
        mesh: None takes the one set by `jax.set_mesh`.
        array: the operand that is split over the vocabulary as well as over tokens.
        name: what error messages call it.
        rank: how many batch dimensions it has.

    Raises:
        TypeError: `axes` or `mesh` of another type.
        ValueError: axes that are not in the mesh, that do not divide the array, that contradict the array's
            type, or that are needed and not given.
    """
    context = jax.sharding.get_abstract_mesh()
    manual = frozenset(n for n, t in zip(context.axis_names, context.axis_types) if t == AxisType.Manual)
    if mesh is None or manual:
        mesh = context if context.axis_names else None
    _check_arguments(axes, mesh, context)
    if axes is None:
        axes = _axes_from_type(array, mesh, manual, name, rank)
    tokens, vocab = axes.per_dimension(rank), axis_names(axes.vocab)
    _check_names(axes, mesh)
    _check_divides(array, mesh, manual, (*tokens, vocab or None), name)
    if mesh is None:
        return Placement(None, tokens, vocab, frozenset(), 1)
    named = {n for entry in (*tokens, vocab) for n in axis_names(entry)}
    mapped = frozenset(named - manual)
    placement = Placement(
        mesh if mapped else None,
        tuple(tuple(a for a in axis_names(entry) if a in mapped) or None for entry in tokens),
        vocab,
        mapped,
        math.prod(mesh.shape[a] for a in vocab if a in manual),
    )
    if manual:
        _check_local(array, axes, manual, name)
    elif _explicit(mesh):
        _check_type(array, placement, name)
    return placement


def vocab_must_not_vary(array: jax.Array, placement: Placement, name: str) -> None:
    """Inside the caller's shard_map: refuse per-token operands that differ between vocabulary shards.

    Raises:
        ValueError: `array` varies over a vocabulary axis.
    """
    varying = sorted(_vma(array) & set(placement.vocab))
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


def _vma(array: jax.Array) -> frozenset[str]:
    return frozenset(jax.typeof(array).manual_axis_type.varying)


def _explicit(mesh: Mesh | AbstractMesh) -> bool:
    return AxisType.Explicit in mesh.axis_types


def _typed_entries(mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> tuple[AxisEntry, ...]:
    """The entries of a spec without the axes that are not Explicit: those are no part of an array's type."""
    typed = {n for n, t in zip(mesh.axis_names, mesh.axis_types) if t == AxisType.Explicit}
    return tuple(tuple(a for a in axis_names(entry) if a in typed) or None for entry in spec)


def _axes_from_type(array, mesh, manual, name: str, rank: int) -> MeshAxes:
    typed = any(axis_names(entry) for entry in jax.typeof(array).sharding.spec)
    if mesh is None and (typed or not (isinstance(array, jax.core.Tracer) or array.is_fully_replicated)):
        how = jax.typeof(array) if typed else array.sharding
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
    spec = tuple(jax.typeof(array).sharding.spec)
    spec += (None,) * (rank + 1 - len(spec))
    return MeshAxes(tokens=tuple(axis_names(e) or None for e in spec[:-1]), vocab=spec[-1])


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
    names = (*axis_names(axes.tokens), *axis_names(axes.vocab))
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


def _check_divides(array, mesh, manual, entries: tuple, name: str) -> None:
    for dim, entry in enumerate(entries):
        ways = math.prod(mesh.shape[a] for a in axis_names(entry) if a not in manual) if mesh is not None else 1
        if array.shape[dim] % ways:
            last = dim == len(entries) - 1
            remedy = (
                "Pad it (VocabPartition.pad) and give the true size: LogitTransform(vocab_size=...)."
                if last
                else 'Pad the batch (loss_mask False there), or split another dimension, as tokens=(None, "context").'
            )
            raise ValueError(
                wrong(
                    name,
                    f"have a dimension {dim} that divides into {ways} shards over {axis_names(entry)}",
                    f"shape {array.shape}",
                    remedy,
                )
            )


def _check_local(array, axes: MeshAxes, manual, name: str) -> None:
    vocab, named = set(axis_names(axes.vocab)), {*axis_names(axes.tokens), *axis_names(axes.vocab)}
    missing = sorted((vocab & manual) - _vma(array))
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
    unnamed = sorted(_vma(array) - named)
    if unnamed and axes.vocab is None and array.ndim > 1:
        raise ValueError(
            wrong(
                "axes",
                f"name `vocab`, or else every axis over which `{name}` varies inside your shard_map",
                f"{axes} and {unnamed} besides",
                "If one of these splits the vocabulary, name it; if they all split tokens, name them in `tokens`.",
            )
        )


def _check_type(array, placement: Placement, name: str) -> None:
    """Axes of size 1 split nothing, and may be in the one and not in the other."""
    typed = jax.typeof(array).sharding
    split = lambda spec: [
        [a for a in axis_names(entry) if typed.mesh.shape[a] > 1] for entry in _typed_entries(typed.mesh, spec)
    ]
    have, want = split(typed.spec), split(placement.spec(placement.vocab_entry))
    if have + [[]] * (array.ndim - len(have)) != want:
        raise ValueError(
            wrong(
                name,
                f"be split as `axes` says, {placement.spec(placement.vocab_entry)}",
                f"one of type {typed.spec}",
                "Leave `axes` out to read it from the array, or `jax.reshard` the array.",
            )
        )
