"""Ops from logits against the float64 oracle, values and gradients: dtypes, meshes, ragged sizes, chunks, options."""

import itertools

import checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import check_op, make_problem, MESHES, ordinarily, replaced
from jax.sharding import AxisType

import jaxrl_logprob as jrl


DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
SOME_OPTIONS = jrl.LogitTransform(temperature=0.7, logit_softcap=8.0)
BATCHES = [(), (5,), (2, 3, 4), (1, 1)]
BOTH = ["token_logprobs_and_entropy", "gather_logprobs"]  # between them they do what the other two do
# Each op on each mesh, the dtypes in turn.
IN_TURN = [(op, DTYPES[i % 3], mesh) for i, (op, mesh) in enumerate(itertools.product(checks.OPS, MESHES))]
one_op = pytest.mark.parametrize("op", ordinarily(BOTH[0], of=checks.OPS))


@pytest.mark.parametrize("op, dtype, mesh", ordinarily(*IN_TURN, of=itertools.product(checks.OPS, DTYPES, MESHES)))
def test_op_equals_oracle(op, dtype, mesh):
    p = make_problem(dtype=dtype)
    check_op(op, p, MESHES[mesh], loss_mask=p.loss_mask, transform=SOME_OPTIONS)


@pytest.mark.parametrize(
    "op, mesh", ordinarily((BOTH[0], "2x2x2"), (BOTH[1], "none"), of=itertools.product(BOTH, MESHES))
)
def test_op_float64(op, mesh):
    """With logits that are tens apart: what is small beside the maximum counts in float64."""
    with jax.enable_x64(True):
        p = make_problem(dtype=jnp.float64, scale=10.0)
        transform = jrl.LogitTransform(temperature=0.7, logit_softcap=100.0)
        check_op(op, p, MESHES[mesh], loss_mask=p.loss_mask, transform=transform)


@pytest.mark.parametrize(
    "op, mesh",
    ordinarily((BOTH[0], "2x2x2"), (BOTH[1], "1x8"), (BOTH[0], "none"), of=itertools.product(checks.OPS, MESHES)),
)
def test_op_padded_vocabulary(op, mesh):
    """A prime vocabulary in columns that divide the mesh; the padding holds NaN."""
    p = make_problem(vocab=48, true_vocab=41)
    p = p._replace(logits=replaced(p.logits, np.s_[..., 41:], jnp.nan))
    transform = jrl.LogitTransform(vocab_size=41, logit_softcap=5.0)
    _, dlogits = check_op(op, p, MESHES[mesh], transform=transform)
    assert not dlogits[..., 41:].any()


@pytest.mark.parametrize("mesh", ordinarily("2x2x2", of=["none", "2x2x2"]))
@pytest.mark.parametrize("op", ordinarily(BOTH[0], of=BOTH))
@pytest.mark.parametrize(
    "transform",
    [
        jrl.LogitTransform(),
        jrl.LogitTransform(temperature=2.5),
        jrl.LogitTransform(logit_softcap=3.0),
        jrl.LogitTransform(vocab_size=33),
    ],
)
def test_each_option_alone(op, transform, mesh):
    p = make_problem(true_vocab=33)
    check_op(op, p, MESHES[mesh], transform=transform)


@pytest.mark.parametrize(
    "op, mesh", ordinarily((BOTH[0], "2x2x2"), (BOTH[1], "none"), of=itertools.product(checks.OPS, ["none", "2x2x2"]))
)
def test_temperature_per_token_and_traced(op, mesh):
    p = make_problem()
    check_op(op, p, MESHES[mesh], transform=jrl.LogitTransform(temperature=p.temperature))
    check_op(op, p, MESHES[mesh], transform=jrl.LogitTransform(temperature=jnp.float32(0.3)))


def test_temperature_is_not_differentiated():
    p = make_problem()
    loss = lambda t: jrl.token_logprobs(p.logits, p.targets, transform=jrl.LogitTransform(temperature=t)).sum()
    assert not jax.grad(loss)(p.temperature).any()


@pytest.mark.parametrize(
    "op, batch",
    ordinarily(*zip(checks.OPS, BATCHES), of=itertools.product(checks.OPS, BATCHES)),
)
def test_any_batch_rank(op, batch):
    check_op(op, make_problem(batch=batch, vocab=7))


@pytest.mark.parametrize(
    "op, dtype, mesh, chunk",
    ordinarily(
        (BOTH[0], jnp.float32, "none", 200),
        (BOTH[1], jnp.bfloat16, "2x4", 1),
        of=itertools.product(BOTH, DTYPES[:2], ["none", "2x4"], [1, 64, 200, 10_000]),
    ),
)
@pytest.mark.parametrize("batch", [(3, 514), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_chunk_size_changes_no_bit(op, dtype, mesh, chunk, batch):
    """Chunks that divide the rows, that do not, and larger than all of them; 1 is rounded up to the least block."""
    case, p = MESHES[mesh], make_problem(batch=batch, vocab=1000, dtype=dtype)
    m = case.make()
    placed = p.on(case, m)
    run = lambda c: checks.value_and_gradient(
        jrl, op, placed, axes=case.axes, mesh=m, token_chunk=c, loss_mask=placed.loss_mask, transform=SOME_OPTIONS
    )
    whole, chunked = jax.tree.leaves(run(None)), jax.tree.leaves(run(chunk))
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(whole, chunked, strict=True))


@pytest.mark.parametrize("op", ordinarily(BOTH[0], of=BOTH))
@pytest.mark.parametrize("mesh", ordinarily("2x4", of=["none", "2x4"]))
@pytest.mark.parametrize("chunk", ordinarily(200, of=[64, 200]))
def test_chunked_equals_oracle(op, mesh, chunk):
    p = make_problem(batch=(2, 300), vocab=1000)
    check_op(op, p, MESHES[mesh], token_chunk=chunk, loss_mask=p.loss_mask, transform=SOME_OPTIONS)


@pytest.mark.parametrize("mesh", ordinarily("2x2x2", of=["none", "2x2x2"]))
@pytest.mark.parametrize("num_ids", ordinarily(0, 8, 9, of=[0, 1, 8, 9, 40]))
def test_gather_of_any_number_of_ids(num_ids, mesh):
    """By comparison up to 8 ids, by scatter beyond; ids may repeat and be ignored."""
    p = make_problem(num_ids=num_ids)
    ids = p.ids.at[..., -1:].set(-100).at[..., :2].set(p.ids[..., :1]) if num_ids else p.ids
    check_op("gather_logprobs", p._replace(ids=ids), MESHES[mesh], loss_mask=p.loss_mask)


@one_op
def test_explicit_axes_are_read_from_the_type(op):
    case = MESHES["2x2x2"]
    p = make_problem()
    mesh = case.make(AxisType.Explicit)
    expected, dexpected = checks.oracle(op, p)
    with jax.set_mesh(mesh):
        out, dlogits = checks.value_and_gradient(jrl, op, p.on(case, mesh))
    for o, e in zip(out, expected, strict=True):
        checks.assert_close(o, e, 3e-6)
    checks.assert_close(dlogits, dexpected, 3e-6)
    assert jax.typeof(dlogits).sharding.spec == jax.P("data", "context", "vocab")


@pytest.mark.parametrize("axis_type", ordinarily(AxisType.Auto, of=[AxisType.Auto, AxisType.Explicit]))
@one_op
def test_tokens_over_two_axes_of_one_dimension(op, axis_type):
    case = checks.MeshCase(
        {"data": 2, "context": 2, "vocab": 2}, jrl.MeshAxes(tokens=(("data", "context"),), vocab="vocab")
    )
    check_op(op, make_problem(batch=(4, 3)), case, axis_type=axis_type)


@one_op
def test_vocabulary_over_two_axes(op):
    case = checks.MeshCase({"a": 2, "b": 2, "c": 2}, jrl.MeshAxes(tokens="a", vocab=("c", "b")))
    check_op(op, make_problem(), case)


@one_op
def test_replicated_on_purpose(op):
    check_op(op, make_problem(), checks.MeshCase({"data": 8}, jrl.MeshAxes()))


@pytest.mark.parametrize(
    "coef", [1.0, jnp.float32(0.0), *(pytest.param(c, marks=pytest.mark.slow) for c in (-0.5, 1, float("nan")))]
)
def test_gate_open(coef):
    check_op("token_entropy", make_problem(), entropy_coef=coef)
    check_op("token_logprobs_and_entropy", make_problem(), entropy_coef=coef)


@pytest.mark.parametrize(
    "dtype, mesh",
    ordinarily((jnp.float32, "none"), (jnp.bfloat16, "2x2x2"), of=itertools.product(DTYPES[:2], ["none", "2x2x2"])),
)
def test_gate_shut_is_bit_for_bit_token_logprobs(dtype, mesh):
    case, p = MESHES[mesh], make_problem(batch=(4, 32), vocab=4096, dtype=dtype)
    m = case.make()
    p = p.on(case, m)
    kw = dict(axes=case.axes, mesh=m)
    both, gradient = checks.value_and_gradient(jrl, "token_logprobs_and_entropy", p, entropy_coef=0.0, **kw)
    (alone,), gradient_alone = checks.value_and_gradient(jrl, "token_logprobs", p, **kw)
    assert (both[0] == alone).all() and (gradient == gradient_alone).all()
    assert both[1].min() > 0


@pytest.mark.parametrize(
    "coef",
    [0.0, None, *(pytest.param(c, marks=pytest.mark.slow) for c in (0, -0.0, False, np.zeros(()), np.float32(0)))],
)
def test_gate_shut(coef):
    """Case G01: the entropy is there, its gradient is not."""
    check_op("token_entropy", make_problem(), entropy_coef=coef)
    p = make_problem()
    out, dlogits = check_op("token_logprobs_and_entropy", p, entropy_coef=coef)
    assert out[1].any()
    checks.assert_close(dlogits, check_op("token_logprobs", p)[1], 1e-7)


def test_gate_traced_zero_is_open():
    p = make_problem()
    gradient = jax.jit(jax.grad(lambda x, c: jrl.token_entropy(x, entropy_coef=c).sum()))
    assert gradient(p.logits, jnp.float32(0)).any()


@pytest.mark.parametrize(
    "dtype, options",
    ordinarily(
        (jnp.bfloat16, {}),
        (jnp.float32, dict(temperature=0.7, logit_softcap=30.0)),
        of=itertools.product(
            DTYPES[:2],
            [{}, dict(temperature=0.7), dict(logit_softcap=30.0), dict(temperature=0.7, logit_softcap=30.0)],
        ),
    ),
)
def test_unused_entropy_changes_no_bit_of_the_logprobs(options, dtype):
    """XLA drops what is not used, and must not then compute the rest otherwise."""
    p, kw = make_problem(batch=(64,), vocab=1000, dtype=dtype), dict(transform=jrl.LogitTransform(**options))
    both = lambda x: jrl.token_logprobs_and_entropy(x, p.targets, **kw)
    used = jax.jit(lambda x: tuple(both(x)))(p.logits)[0]
    assert (jax.jit(lambda x: both(x).logprobs)(p.logits) == used).all()
    assert (jax.jit(lambda x: jrl.token_logprobs(x, p.targets, **kw))(p.logits) == used).all()
    assert (jax.jit(lambda x: jrl.gather_logprobs(x, p.targets[:, None], **kw))(p.logits)[:, 0] == used).all()


@pytest.mark.parametrize(
    "options, mesh",
    ordinarily(
        (dict(temperature=0.7, logit_softcap=30.0), "none"),
        ({}, "2x2x2"),
        of=itertools.product([{}, dict(temperature=0.7, logit_softcap=30.0)], ["none", "2x2x2"]),
    ),
)
def test_old_logprobs_give_a_ratio_of_exactly_one(mesh, options):
    case, p = MESHES[mesh], make_problem(batch=(4, 64), vocab=1000, dtype=jnp.bfloat16)
    m = case.make()
    p = p.on(case, m)
    kw = dict(axes=case.axes, mesh=m, transform=jrl.LogitTransform(**options))
    score = lambda x: jrl.token_logprobs_and_entropy(x, p.targets, **kw).logprobs

    def ratio_and_gradient(x, old):
        ratio = lambda x: jnp.exp(score(x) - old)
        return ratio(x), jax.grad(lambda x: ratio(x).sum())(x)

    ratio, _ = jax.jit(ratio_and_gradient)(p.logits, jax.jit(score)(p.logits))
    assert (ratio == 1).all()
