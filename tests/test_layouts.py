"""Orders of a sequence over the context axis: permutations, their inverses, and arrays taken from one to another."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, MESHES, ordinarily
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxrl_logprob as jrl
from jaxrl_logprob.sharding import redistribute, SequenceLayout


ORDERS = ["contiguous", "zigzag", "striped"]
orders = st.sampled_from(ORDERS)
# Context axes of 8, 4 and 2 devices, alone, beside a data axis and beside a vocabulary axis.
CONTEXTS = {
    "8": ({"context": 8}, jrl.MeshAxes(tokens=(None, "context"))),
    "2x4": ({"data": 2, "context": 4}, jrl.MeshAxes(tokens=("data", "context"))),
    "2x2x2": (MESHES["2x2x2"].sizes, MESHES["2x2x2"].axes),
    "two axes": ({"node": 2, "context": 4}, jrl.MeshAxes(tokens=(None, ("node", "context")))),
}
SHARDS = {"8": 8, "2x4": 4, "2x2x2": 2, "two axes": 8}


@pytest.mark.parametrize(
    "order, shards, expected",
    [
        ("contiguous", 2, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("zigzag", 2, [0, 1, 6, 7, 2, 3, 4, 5]),
        ("zigzag", 4, [0, 7, 1, 6, 2, 5, 3, 4]),
        ("striped", 2, [0, 2, 4, 6, 1, 3, 5, 7]),
    ],
)
def test_order_is_the_one_of_its_name(order, shards, expected):
    assert SequenceLayout(order, shards).positions(8).tolist() == expected


@given(orders, st.integers(1, 8), st.integers(0, 40))
def test_positions_and_slots_are_inverse(order, shards, length):
    layout = SequenceLayout(order, shards)
    positions, slots = layout.positions(length), layout.slots(length)
    assert len(positions) == layout.padded(length) and layout.padded(length) - length < layout.multiple
    assert sorted(positions) == list(range(len(positions)))
    assert (positions[slots] == np.arange(len(slots))).all()


@given(orders, st.sampled_from([1, 2, 4, 8]), st.integers(0, 20), st.integers(0, 2), st.booleans())
@settings(deadline=None, max_examples=30)  # JAX compiles a program for each shape.
def test_arranged_and_restored_is_the_array_itself(order, shards, length, axis, of_jax):
    layout = SequenceLayout(order, shards)
    shape = [2, 3, 4]
    shape[axis] = length
    array = np.arange(np.prod(shape)).reshape(shape)
    arranged = layout.arrange(jnp.asarray(array) if of_jax else array, axis=axis, fill=-1)
    assert isinstance(arranged, jax.Array if of_jax else np.ndarray)
    assert (
        np.count_nonzero(np.asarray(arranged) == -1)
        == array.size // max(length, 1) * (layout.padded(length) - length if length else 0)
        or not length
    )
    assert (np.asarray(layout.restore(arranged, length, axis=axis)) == array).all()


def test_h08_sequence_shorter_than_the_mesh():
    layout = SequenceLayout("zigzag", 4)
    stored = layout.arrange(np.array([5, 6]), fill=0)
    assert stored.tolist() == [5, 0, 6, 0, 0, 0, 0, 0]
    assert layout.restore(stored, 2).tolist() == [5, 6]


def placed(array, mesh, axes):
    return jax.device_put(np.asarray(array), NamedSharding(mesh, P(*axes.per_dimension(2))))


@functools.cache
def program(where: str, source: SequenceLayout, target: SequenceLayout, axis_type=AxisType.Auto):
    """The array in the other order, and the gradient of its weighted sum; compiled."""
    sizes, axes = CONTEXTS[where]
    mesh = jrl.make_mesh(sizes, axis_type=axis_type)

    def run(x, weights):
        out, pull = jax.vjp(lambda x: redistribute(x, source, target, axes=axes, mesh=mesh), x)
        return out, pull(weights)[0]

    args = [placed(np.zeros((4, 32), np.float32), mesh, axes)] * 2
    return jax.jit(run).lower(*args).compile(), mesh, axes


PAIRS = [(w, *pair) for w in CONTEXTS for pair in itertools.product(ORDERS, ORDERS)]
FEW = [("2x4", "contiguous", "zigzag"), ("2x2x2", "zigzag", "striped"), ("two axes", "striped", "contiguous")]


@pytest.mark.parametrize("where, source, target", ordinarily(*FEW, of=PAIRS))
def test_redistributed_with_the_single_device_gradient(where, source, target):
    """The gradient is 1 for each value, never the number of devices along an axis."""
    source, target = SequenceLayout(source, SHARDS[where]), SequenceLayout(target, SHARDS[where])
    run, mesh, axes = program(where, source, target)
    x, weights = np.random.default_rng(0).normal(size=(2, 4, 32)).astype(np.float32)
    out, gradient = run(placed(source.arrange(x), mesh, axes), placed(target.arrange(weights), mesh, axes))
    assert_close(target.restore(np.asarray(out), 32), x, 0)
    assert_close(source.restore(np.asarray(gradient), 32), weights, 0)


def test_redistributed_gathers_nothing_larger_than_its_input():
    run, *_ = program("2x4", SequenceLayout(), SequenceLayout("zigzag", 4))
    sizes = [
        int(np.prod([int(n) for n in shape.split(",")]))
        for shape in re.findall(
            r"= \w+\[([\d,]+)\]\S* (?:all-gather|all-to-all|collective-permute|reduce-scatter)\(", run.as_text()
        )
    ]
    assert sizes and max(sizes) <= 4 * 32


def test_redistribute_without_a_mesh_and_along_an_inner_axis():
    layout = SequenceLayout("zigzag", 2)
    x = jnp.arange(2 * 8 * 3).reshape(2, 8, 3)
    assert (redistribute(x, SequenceLayout(), layout, axis=1) == layout.arrange(x, axis=1)).all()


def test_redistribute_inside_the_callers_shard_map():
    sizes, axes = CONTEXTS["2x4"]
    mesh, layout = jrl.make_mesh(sizes), SequenceLayout("zigzag", 4)
    local = lambda x: redistribute(x, SequenceLayout(), layout, axes=axes)
    x = np.arange(4.0 * 16, dtype=np.float32).reshape(4, 16)
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data", "context"), out_specs=P("data", "context")))
    assert (np.asarray(run(x)) == layout.arrange(x)).all()
    gradient = jax.jit(jax.grad(lambda x: (run(x) * layout.arrange(x)).sum()))(jnp.asarray(x))
    assert (np.asarray(gradient) == 2 * x).all()


def test_redistribute_reads_explicit_types():
    sizes, axes = CONTEXTS["2x4"]
    mesh, layout = jrl.make_mesh(sizes, axis_type=AxisType.Explicit), SequenceLayout("striped", 4)
    x = np.arange(4 * 16).reshape(4, 16)
    with jax.set_mesh(mesh):
        out = jax.jit(lambda x: redistribute(x, SequenceLayout(), layout))(placed(x, mesh, axes))
    assert (np.asarray(out) == layout.arrange(x)).all() and jax.typeof(out).sharding.spec == P("data", "context")


def test_what_comes_from_a_stopped_entropy_stays_stopped():
    sizes, axes = CONTEXTS["2x2x2"]
    mesh, layout = jrl.make_mesh(sizes), SequenceLayout("zigzag", 2)

    def loss(logits, coef):
        entropy = jrl.token_entropy(logits, entropy_coef=coef, axes=axes, mesh=mesh)
        return (redistribute(entropy, layout, SequenceLayout(), axes=axes, mesh=mesh) ** 2).sum()

    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 16)), jnp.float32)
    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    assert not np.asarray(gradient(logits, 0.0)).any() and np.asarray(gradient(logits, 1.0)).any()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: SequenceLayout("spiral", 2), "`order` must be"),
        (lambda: SequenceLayout("zigzag", 0), "`shards` must be a positive int"),
        (
            lambda: redistribute(jnp.zeros(6), SequenceLayout(), SequenceLayout("zigzag", 2)),
            r"`target` must divide the 6 positions .* Pad the sequence to 8",
        ),
    ],
)
@pytest.mark.usefixtures("our_own_errors")
def test_errors_of_layouts(call, message):
    with pytest.raises(ValueError, match=message):
        call()
