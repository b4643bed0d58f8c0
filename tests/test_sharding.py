"""`jaxrl_logprob.sharding`: axes, meshes, the vocabulary partition, and the errors of a placement that cannot be."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import make_problem, ordinarily
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxrl_logprob as jrl
from jaxrl_logprob.sharding import make_mesh, MeshAxes, VocabPartition


@pytest.mark.parametrize(
    "tokens, rank, expected",
    [
        (None, 2, (None, None)),
        ("data", 1, ("data",)),
        ("data", 2, ("data", None)),
        (("data",), 2, ("data", None)),
        (("data", "context"), 1, (("data", "context"),)),
        (("data", "context"), 2, ("data", "context")),
        ((None, "context"), 2, (None, "context")),
        ((("data", "fsdp"), "context"), 2, (("data", "fsdp"), "context")),
        ((("data", "fsdp"),), 3, (("data", "fsdp"), None, None)),
        (P("data", "context"), 2, ("data", "context")),
        (("data", None), 1, ("data",)),
        (None, 0, ()),
    ],
)
def test_axes_per_dimension(tokens, rank, expected):
    assert MeshAxes(tokens=tokens).per_dimension(rank) == expected


def test_axes_are_hashable_and_equal_by_value():
    assert len({MeshAxes(tokens=("a", "b"), vocab="v"), MeshAxes(tokens=P("a", "b"), vocab="v")}) == 1


@pytest.mark.parametrize("tokens, rank", [("data", 0), (("a", "b", "c"), 2), ((None, "a"), 1)])
def test_axes_with_too_many_entries(tokens, rank):
    with pytest.raises(ValueError, match="at most one entry for each of the .* nest them"):
        MeshAxes(tokens=tokens).per_dimension(rank)


@pytest.mark.parametrize(
    "kw", [dict(tokens="a", vocab="a"), dict(tokens=("a", "a")), dict(vocab="a", features=("b", "a"))]
)
def test_axis_named_twice(kw):
    with pytest.raises(ValueError, match="name each mesh axis once"):
        MeshAxes(**kw)


def test_axes_of_a_wrong_type(our_own_errors):
    with pytest.raises(TypeError, match="`axes.vocab` must be a mesh axis name"):
        MeshAxes(vocab=3)
    with pytest.raises(TypeError, match="`axes.tokens` must be a mesh axis name"):
        MeshAxes(tokens=["data", "context"])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_make_mesh(axis_type):
    mesh = make_mesh({"data": 2, "vocab": 4}, axis_type=axis_type)
    assert dict(mesh.shape) == {"data": 2, "vocab": 4} and set(mesh.axis_types) == {axis_type}
    assert dict(make_mesh({"data": 2, "vocab": -1}).shape) == {"data": 2, "vocab": 4}
    assert make_mesh({"x": 3}).devices.size == 3
    assert make_mesh({"x": 2}, devices=jax.devices()[4:6]).devices.tolist() == jax.devices()[4:6]


@pytest.mark.parametrize("sizes", [{"a": 0}, {"a": -2}, {"a": -1, "b": -1}])
def test_make_mesh_of_impossible_sizes(sizes):
    with pytest.raises(ValueError, match="`sizes` must be positive, with at most one -1"):
        make_mesh(sizes)


@pytest.mark.parametrize("sizes, need", [({"a": 16}, 16), ({"a": 3, "b": 5}, 15), ({"a": 9, "b": -1}, 9)])
def test_make_mesh_of_more_devices_than_there_are(sizes, need):
    with pytest.raises(ValueError, match=f'8 cpu device.*jax_num_cpu_devices", {need}\\)'):
        make_mesh(sizes)


@pytest.mark.parametrize(
    "vocab_size, shards, multiple", [(5, 2, 1), (8, 2, 1), (50257, 8, 128), (1, 4, 1), (151936, 4, 128)]
)
def test_vocab_partition(vocab_size, shards, multiple):
    part = VocabPartition(vocab_size, shards, multiple)
    assert part.shard_size % multiple == 0 and part.padded_size == shards * part.shard_size >= vocab_size
    assert part.padded_size - vocab_size < shards * multiple
    bounds = [part.bounds(s) for s in range(shards)]
    held = np.concatenate([np.arange(*b) for b in bounds])
    assert held.tolist() == list(range(vocab_size))
    owners = np.concatenate([np.full(last - first, s) for s, (first, last) in enumerate(bounds)])
    assert (part.owner(jnp.asarray(held)) == owners).all()
    assert part.owner(jnp.asarray([-1, vocab_size, -100])).tolist() == [-1] * 3


def test_vocab_partition_pads():
    part = VocabPartition(5, 2)
    padded = part.pad(jnp.ones((3, 5)))
    assert padded.shape == (3, 6) and padded[:, 5:].sum() == 0 and padded.sum() == 15
    assert part.pad(jnp.ones((5, 3)), axis=0).shape == (6, 3)
    with pytest.raises(ValueError, match="vocab_size=5 entries along axis -1"):
        part.pad(jnp.ones((3, 4)))


def test_vocab_partition_of_nothing():
    with pytest.raises(ValueError, match="`num_shards` must be at least 1"):
        VocabPartition(5, 0)
    with pytest.raises(ValueError, match=r"`shard` must be in \[0, 2\)"):
        VocabPartition(5, 2).bounds(2)


@pytest.mark.usefixtures("quick_compilation")
def test_padded_vocabulary_end_to_end():
    """Case V05: 5 ids on 2 shards; counting the pad as a logit of 0 gives -2.351932."""
    part, mesh = VocabPartition(5, 2), make_mesh({"vocab": 2})
    logits = part.pad(jnp.array([[0.1, -0.2, 0.3, 0.4, -0.5]]))
    options = dict(axes=MeshAxes(vocab="vocab"), mesh=mesh, transform=jrl.LogitTransform(vocab_size=5))
    out = jax.jit(functools.partial(jrl.token_logprobs_and_entropy, **options))(logits, jnp.array([4]))
    assert abs(out.logprobs[0] + 2.181222) < 1e-6 and abs(out.entropy[0] - 1.561121) < 1e-6


SIZES = {"data": 2, "context": 2, "vocab": 2}


def score(**kw):
    p = make_problem(batch=kw.pop("batch", (2, 4)), vocab=kw.pop("vocab", 8))
    return jrl.token_logprobs(p.logits, p.targets, **kw)


def test_several_devices_and_no_axes():
    with (
        jax.set_mesh(make_mesh(SIZES)),
        pytest.raises(ValueError, match=r"`axes` must be given .* MeshAxes\(\) if it is"),
    ):
        score()
    with pytest.raises(ValueError, match="`axes` must be given"):
        score(mesh=make_mesh(SIZES))


def test_mixed_axis_types_are_not_readable():
    mesh = jax.make_mesh((2, 2), ("a", "b"), (AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"\['b'\] are Auto"):
        score()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_one_device_needs_no_axes(axis_type):
    with jax.set_mesh(make_mesh({"data": 1, "vocab": 1}, axis_type=axis_type)):
        assert (jax.jit(score)() == jax.jit(functools.partial(score, axes=MeshAxes()))()).all()


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    "axis_type, sizes",
    ordinarily(
        (AxisType.Explicit, {"data": 8, "vocab": 1}),
        (AxisType.Auto, {"data": 1, "vocab": 8}),
        of=itertools.product(
            [AxisType.Auto, AxisType.Explicit],
            [{"data": 1, "vocab": 1}, {"data": 8, "vocab": 1}, {"data": 1, "vocab": 8}],
        ),
    ),
)
def test_axes_of_size_one_may_be_named(axis_type, sizes):
    """The same call on any mesh, whether or not the type of the array names what splits nothing."""
    mesh = make_mesh(sizes, axis_type=axis_type)
    p = make_problem(batch=(8, 4), vocab=8)
    split = P(*(name if sizes[name] > 1 else None for name in ("data", "unused", "vocab") if name != "unused"))
    axes = MeshAxes(tokens="data", vocab="vocab")
    with jax.set_mesh(mesh):
        logits = jax.device_put(p.logits, NamedSharding(mesh, P(split[0], None, split[1])))
        gradient = jax.jit(jax.grad(lambda x: jrl.token_logprobs(x, p.targets, axes=axes).sum()))(logits)
    expected = jax.jit(jax.grad(lambda x: jrl.token_logprobs(x, p.targets).sum()))(p.logits)
    assert jnp.abs(gradient - expected).max() < 1e-6


def test_split_array_and_no_mesh_in_context():
    """What can be seen of it: outside jit the array says how it lies."""
    p, mesh = make_problem(batch=(2, 4), vocab=8), make_mesh(SIZES)
    logits = jax.device_put(p.logits, NamedSharding(mesh, P("data", "context", "vocab")))
    with pytest.raises(ValueError, match="`axes` must be given where logits is split over devices.*pass mesh="):
        jrl.token_logprobs(logits, p.targets)


@pytest.mark.parametrize("jit", [False, True])
def test_explicit_array_and_no_mesh_in_context(jit):
    """Its type says how it lies, under jit too; the mesh has to be set all the same."""
    p, mesh = make_problem(batch=(2, 4), vocab=8), make_mesh(SIZES, axis_type=AxisType.Explicit)
    logits = jax.device_put(p.logits, NamedSharding(mesh, P("data", "context", "vocab")))
    call = lambda x: jrl.token_logprobs(x, p.targets)
    with pytest.raises(ValueError, match="`axes` must be given where logits is split over devices.*pass mesh="):
        (jax.jit(call) if jit else call)(logits)


@pytest.mark.parametrize(
    "kw, error, message",
    [
        (dict(axes="vocab"), TypeError, "`axes` must be a MeshAxes or None, got 'vocab'"),
        (dict(mesh="x"), TypeError, "`mesh` must be a jax.sharding.Mesh or None, got 'x'"),
        (dict(mesh=make_mesh({"a": 2}).abstract_mesh), ValueError, "`mesh` must have devices where none is set"),
    ],
)
def test_wrong_axes_or_mesh(kw, error, message, our_own_errors):
    with pytest.raises(error, match=message):
        score(**kw)


def test_mesh_that_is_not_the_one_in_context():
    with jax.set_mesh(make_mesh(SIZES)), pytest.raises(ValueError, match="`mesh` must be the mesh in context"):
        score(axes=MeshAxes(), mesh=make_mesh({"vocab": 2}))


def test_vocabulary_axis_left_out_inside_the_callers_shard_map():
    """Each shard would be normalised by itself."""
    p = make_problem(batch=(2, 4), vocab=8)
    local = lambda x, y: jrl.token_logprobs(x, y, axes=MeshAxes(tokens="data"))
    specs = (P("data", None, "vocab"), P("data"))
    fun = jax.shard_map(local, mesh=make_mesh(SIZES), in_specs=specs, out_specs=P("data", "vocab"))
    with pytest.raises(ValueError, match=r"`axes` must name `vocab`, or else every axis .*\['vocab'\] besides"):
        fun(p.logits, p.targets)


def test_replicated_explicit_array_is_readable():
    with jax.set_mesh(make_mesh(SIZES, axis_type=AxisType.Explicit)):
        assert jnp.isfinite(jax.jit(score)()).all()


def test_axes_and_no_mesh():
    with pytest.raises(ValueError, match=r"`axes` must name axes of a mesh, got \['vocab'\] and no mesh.*jax.set_mesh"):
        score(axes=MeshAxes(vocab="vocab"))


def test_axes_that_the_mesh_does_not_have():
    with pytest.raises(ValueError, match=r"`axes` must name axes of the mesh .*, got \['tensor'\]"):
        score(axes=MeshAxes(vocab="tensor"), mesh=make_mesh(SIZES))


@pytest.mark.parametrize(
    "kw, message",
    [
        (
            dict(vocab=9),
            r"dimension 2 that divides into 2 shards over \('vocab',\), got shape \(2, 4, 9\).*VocabPartition",
        ),
        (dict(batch=(3, 4)), r"dimension 0 that divides into 2 shards over \('data',\).*loss_mask False"),
        (dict(batch=(1, 4)), r"dimension 0 .*tokens=\(None, \"context\"\)"),
        (dict(batch=(2, 5)), r"dimension 1 that divides into 2 shards over \('context',\)"),
    ],
)
def test_sizes_that_do_not_divide(kw, message):
    axes = MeshAxes(tokens=("data", "context"), vocab="vocab")
    with pytest.raises(ValueError, match=message):
        score(axes=axes, mesh=make_mesh(SIZES), **kw)


def test_axes_that_contradict_an_explicit_array():
    mesh = make_mesh(SIZES, axis_type=AxisType.Explicit)
    p = make_problem(batch=(2, 4), vocab=8)
    with jax.set_mesh(mesh):
        logits = jax.device_put(p.logits, NamedSharding(mesh, P("data", None, "vocab")))
        with pytest.raises(ValueError, match="`logits` must be split as `axes` says.*jax.reshard"):
            jrl.token_logprobs(logits, p.targets, axes=MeshAxes(tokens=("data", "context"), vocab="vocab"))


def test_axes_not_given_inside_the_callers_shard_map():
    fun = jax.shard_map(
        lambda x, y: jrl.token_logprobs(x, y), mesh=make_mesh(SIZES), in_specs=P("data"), out_specs=P("data")
    )
    p = make_problem(batch=(2, 4), vocab=8)
    with pytest.raises(ValueError, match=r"`axes` must be given.*are Manual"):
        fun(p.logits, p.targets)


def test_logits_not_split_inside_the_callers_shard_map():
    local = lambda x, y: jrl.token_logprobs(x, y, axes=MeshAxes(vocab="vocab"))
    fun = jax.shard_map(local, mesh=make_mesh(SIZES), in_specs=P(), out_specs=P())
    p = make_problem(batch=(2, 4), vocab=8)
    with pytest.raises(ValueError, match=r"must vary over the vocabulary axes \['vocab'\]"):
        fun(p.logits, p.targets)
