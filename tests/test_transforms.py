"""The ops under JAX's transformations and inside the caller's own shard_map; and the errors where a rule ends."""

import contextlib
import functools
import itertools

import checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, make_problem, ordinarily
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxrl_logprob as jrl
from jaxrl_logprob import reference


pytestmark = pytest.mark.usefixtures("quick_compilation")
AXES = jrl.MeshAxes(tokens=("data", "context"), vocab="vocab")
SIZES = {"data": 2, "context": 2, "vocab": 2}
TOKENS, LOGITS = P("data", "context"), P("data", "context", "vocab")
KINDS = [AxisType.Auto, AxisType.Explicit]
auto_ordinarily = pytest.mark.parametrize("axis_type", ordinarily(AxisType.Auto, of=KINDS))
explicit_ordinarily = pytest.mark.parametrize("axis_type", ordinarily(AxisType.Explicit, of=KINDS))


def loss(logits, targets, dlogprobs, dentropy, lib=jrl, **kw):
    out = lib.token_logprobs_and_entropy(logits, targets, **kw)
    return (out.logprobs * dlogprobs + out.entropy * dentropy).sum()


def arguments(batch=(4, 6), vocab=24):
    p = make_problem(batch=batch, vocab=vocab)
    return p.logits, p.targets, p.dlogprobs, p.dentropy


@functools.cache
def expected_of_arguments():
    """Value and gradient of the oracle's loss."""
    return jax.jit(jax.value_and_grad(functools.partial(loss, lib=reference)))(*arguments())


def check(fun, *args):
    """fun(*args) is (value, gradient) of the loss over all tokens."""
    value, gradient = jax.jit(fun)(*args)
    expected, dexpected = expected_of_arguments()
    assert_close(value, expected, 3e-6, "value")
    assert_close(gradient, dexpected, 3e-6, "gradient")


def test_vmap():
    check(jax.value_and_grad(lambda *args: jax.vmap(loss)(*args).sum()), *arguments())


def test_vmap_of_gradient():
    args = arguments()
    gradient = jax.jit(jax.vmap(jax.grad(loss)))(*args)
    assert_close(gradient, expected_of_arguments()[1], 3e-6)


def test_jacrev():
    args = arguments(batch=(3,), vocab=7)
    of = lambda lib: jax.jit(jax.jacrev(lambda x: lib.token_logprobs(x, args[1])))(args[0])
    assert_close(of(jrl), of(reference), 3e-6)


def test_remat():
    check(jax.value_and_grad(jax.checkpoint(loss)), *arguments())


def test_scan():
    def run(logits, *rest):
        return jax.lax.scan(lambda total, row: (total + loss(*row), None), 0.0, (logits, *rest))[0]

    check(jax.value_and_grad(run), *arguments())


def test_no_jit_equals_jit():
    args = arguments()
    assert_close(jax.grad(loss)(*args), jax.jit(jax.grad(loss))(*args), 1e-6)


@pytest.fixture
def placed(axis_type):
    mesh = jrl.make_mesh(SIZES, axis_type=axis_type)
    put = lambda a, spec: jax.device_put(np.asarray(a), NamedSharding(mesh, spec))
    logits, *rest = arguments()
    return mesh, (put(logits, LOGITS), *(put(a, TOKENS) for a in rest))


def context(mesh, set_mesh):
    return (jax.set_mesh(mesh), {}) if set_mesh else (contextlib.nullcontext(), {"mesh": mesh})


@pytest.mark.parametrize(
    "axis_type, set_mesh, transform",
    ordinarily(
        (AxisType.Auto, False, "jit"),
        (AxisType.Explicit, True, "jit"),
        (AxisType.Auto, True, "remat"),
        (AxisType.Auto, True, "mean"),
        of=itertools.product(KINDS, [True, False], ["jit", "remat", "mean"]),
    ),
)
def test_mesh_from_context_or_argument(placed, set_mesh, transform):
    mesh, args = placed
    manager, kw = context(mesh, set_mesh)
    with manager:
        fun = lambda *a: loss(*a, axes=AXES, **kw)
        fun = jax.checkpoint(fun) if transform == "remat" else fun
        if transform == "mean":  # whatever the caller's loss does, no factor of an axis size
            fun = lambda *a: loss(*a, axes=AXES, **kw) / 24
            value, gradient = jax.jit(jax.value_and_grad(fun))(*args)
            assert_close(24 * gradient, expected_of_arguments()[1], 3e-6)
        else:
            check(jax.value_and_grad(fun), *args)


@auto_ordinarily
def test_vmap_over_a_split_dimension(placed):
    mesh, args = placed
    axes = jrl.MeshAxes(tokens="context", vocab="vocab")
    with jax.set_mesh(mesh):
        check(jax.value_and_grad(lambda *a: jax.vmap(lambda *b: loss(*b, axes=axes))(*a).sum()), *args)


@pytest.mark.parametrize("axis_type", [AxisType.Auto])
def test_scan_over_a_split_dimension(placed):
    mesh, args = placed
    axes = jrl.MeshAxes(tokens="context", vocab="vocab")
    with jax.set_mesh(mesh):
        run = lambda *a: jax.lax.scan(lambda total, row: (total + loss(*row, axes=axes), None), 0.0, a)[0]
        check(jax.value_and_grad(run), *args)


@pytest.mark.parametrize(
    "axis_type, set_mesh, gradient",
    ordinarily(
        (AxisType.Auto, False, "inside"),
        (AxisType.Auto, True, "outside"),
        (AxisType.Explicit, True, "inside"),
        of=itertools.product(KINDS, [True, False], ["outside", "inside"]),
    ),
)
def test_inside_the_callers_shard_map(placed, set_mesh, gradient):
    mesh, args = placed
    manager, kw = context(mesh, set_mesh)
    in_specs = (LOGITS, TOKENS, TOKENS, TOKENS)
    total = lambda *a: jax.lax.psum(loss(*a, axes=AXES), ("data", "context"))
    with manager:
        if gradient == "outside":
            fun = jax.value_and_grad(jax.shard_map(total, in_specs=in_specs, out_specs=P(), **kw))
        else:
            both = lambda *a: (total(*a), jax.grad(lambda *b: loss(*b, axes=AXES))(*a))
            fun = jax.shard_map(both, in_specs=in_specs, out_specs=(P(), LOGITS), **kw)
        check(fun, *args)


@auto_ordinarily
@pytest.mark.parametrize(
    "in_specs, over, reduce",
    [((P("data"),) * 4, "data", ("data",)), ((P(None, None, "vocab"), P(), P(), P()), "vocab", ())],
)
def test_inside_a_shard_map_over_some_axes(placed, in_specs, over, reduce):
    """The others are mapped by the op itself."""
    mesh, args = placed
    total = lambda *a: jax.lax.psum(loss(*a, axes=AXES), reduce) if reduce else loss(*a, axes=AXES)
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(total, in_specs=in_specs, out_specs=P(), axis_names={over})
        check(jax.value_and_grad(mapped), *args)


@pytest.mark.parametrize("axis_type", [AxisType.Auto])
def test_vmap_over_all_tokens_inside_the_callers_shard_map(placed):
    """One row [V] a call: no dimension is left whose axes could be named in `tokens`."""
    mesh, args = placed
    one = lambda *row: loss(*row, axes=jrl.MeshAxes(vocab="vocab"))
    local = lambda *a: jax.lax.psum(jax.vmap(jax.vmap(one))(*a).sum(), ("data", "context"))
    fun = jax.shard_map(local, mesh=mesh, in_specs=(LOGITS, TOKENS, TOKENS, TOKENS), out_specs=P())
    check(jax.value_and_grad(fun), *args)


@auto_ordinarily
def test_replicated_logits_scored_against_split_targets(placed):
    """Logits that vary over fewer axes than the targets: their gradient is the sum over the others."""
    mesh, (logits, targets, dlogprobs, dentropy) = placed
    first = jax.device_put(arguments()[0][:1], NamedSharding(mesh, P(None, None, "vocab")))
    put = lambda a: jax.device_put(np.asarray(a), NamedSharding(mesh, P("data")))

    def local(first, targets, *rest):
        return jax.lax.psum(
            sum(loss(first, targets[i : i + 1], *(r[i : i + 1] for r in rest), axes=AXES) for i in (0, 1)), "data"
        )

    in_specs = (P(None, None, "vocab"), P("data"), P("data"), P("data"))
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(local, in_specs=in_specs, out_specs=P())
        args = (first, put(targets), put(dlogprobs), put(dentropy))
        _, *rest = arguments()
        same = lambda x: loss(jnp.broadcast_to(x, (4, 6, 24)), *rest, lib=reference)
        expected, dexpected = jax.jit(jax.value_and_grad(same))(arguments()[0][:1])
        value, gradient = jax.jit(jax.value_and_grad(mapped))(*args)
    assert_close(value, expected, 3e-6)
    assert_close(gradient, dexpected, 3e-6)


@explicit_ordinarily
def test_padded_vocabulary_inside_shard_map(placed):
    mesh, args = placed
    targets = jnp.minimum(arguments()[1], 19)
    args = (args[0], jax.device_put(targets, NamedSharding(mesh, TOKENS)), *args[2:])
    transform = jrl.LogitTransform(vocab_size=20)
    total = lambda *a: jax.lax.psum(loss(*a, axes=AXES, transform=transform), ("data", "context"))
    with jax.set_mesh(mesh):
        fun = jax.shard_map(total, in_specs=(LOGITS, TOKENS, TOKENS, TOKENS), out_specs=P())
        value, gradient = jax.jit(jax.value_and_grad(fun))(*args)
    logits, _, *rest = arguments()
    oracle = functools.partial(loss, lib=reference, transform=transform)
    expected, dexpected = jax.jit(jax.value_and_grad(oracle))(logits, targets, *rest)
    assert_close(value, expected, 3e-6)
    assert_close(gradient, dexpected, 3e-6)


@pytest.mark.parametrize("axis_type", [AxisType.Auto])
def test_shard_map_without_vma_is_refused(placed):
    """There gradients would come out divided by the number of vocabulary shards (case V02)."""
    mesh, args = placed
    fun = jax.shard_map(
        lambda *a: loss(*a, axes=AXES),
        mesh=mesh,
        in_specs=(LOGITS, TOKENS, TOKENS, TOKENS),
        out_specs=P(),
        check_vma=False,
    )
    with pytest.raises(ValueError, match="keep check_vma=True"):
        jax.jit(jax.grad(fun))(*args)


@pytest.mark.parametrize("axis_type", [AxisType.Auto])
@pytest.mark.parametrize("wrong", ["targets", "loss_mask", "temperature"])
def test_operand_that_differs_between_vocabulary_shards_is_refused(placed, wrong):
    mesh, args = placed

    def local(logits, targets, mask, temperature):
        vary = lambda a, name: jax.lax.pcast(a, "vocab", to="varying") if name == wrong else a
        return jrl.token_logprobs(
            logits,
            vary(targets, "targets"),
            loss_mask=vary(mask > 0, "loss_mask"),
            axes=AXES,
            transform=jrl.LogitTransform(temperature=vary(temperature, "temperature")),
        )

    fun = jax.shard_map(local, mesh=mesh, in_specs=(LOGITS, TOKENS, TOKENS, TOKENS), out_specs=TOKENS)
    with pytest.raises(ValueError, match=f"`{wrong}` must be the same on every vocabulary shard"):
        fun(*args)


def _jvp(f, x):
    return jax.jvp(f, (x,), (x,))


@pytest.mark.parametrize("jit", ordinarily(True, of=[False, True]))
@pytest.mark.parametrize("op", ordinarily("token_logprobs_and_entropy", of=checks.OPS))
@pytest.mark.parametrize(
    "differentiate, what",
    [
        (_jvp, "forward-mode"),
        (lambda f, x: jax.jacfwd(f)(x), "forward-mode"),
        (lambda f, x: jax.jacfwd(jax.jacrev(f))(x), "derivative"),
        (lambda f, x: jax.jacrev(jax.jacrev(f))(x), "second derivative"),
        (lambda f, x: jax.grad(lambda x: (jax.grad(lambda y: f(y).sum())(x) ** 2).sum())(x), "second derivative"),
    ],
)
def test_unsupported_derivative_names_the_way_out(op, differentiate, what, jit):
    p = make_problem(batch=(3,), vocab=5)
    of = lambda lib: lambda x: checks.OPS[op](lib, p, x)[-1]
    run = lambda x: differentiate(of(jrl), x)
    with pytest.raises(TypeError, match=f"{what}.*jaxrl_logprob.reference"):
        jax.block_until_ready((jax.jit(run) if jit else run)(p.logits))
    derivatives = jax.jit(lambda x: differentiate(of(reference), x))(p.logits)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(derivatives))


def test_derivative_of_the_cotangent_is_refused():
    p = make_problem(batch=(3,), vocab=5)
    _, pull = jax.vjp(lambda x: jrl.token_logprobs(x, p.targets), p.logits)
    with pytest.raises(TypeError, match="second derivative"):
        jax.grad(lambda d: (pull(d)[0] ** 2).sum())(p.dlogprobs)
