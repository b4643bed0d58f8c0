"""Ops from logits against the float64 oracle, values and gradients: dtypes, meshes, ragged sizes, chunks, options."""

import checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import check_op, make_problem, MESHES
from jax.sharding import AxisType

import jaxrl_logprob as jrl


DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
SOME_OPTIONS = jrl.LogitTransform(temperature=0.7, logit_softcap=8.0)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", checks.OPS)
def test_op_equals_oracle(op, dtype, mesh):
    p = make_problem(dtype=dtype)
    check_op(op, p, MESHES[mesh], loss_mask=p.loss_mask, transform=SOME_OPTIONS)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("op", ["token_logprobs_and_entropy", "gather_logprobs"])
def test_op_float64(op, mesh):
    """With logits that are tens apart: what is small beside the maximum counts in float64."""
    with jax.enable_x64(True):
        p = make_problem(dtype=jnp.float64, scale=10.0)
        transform = jrl.LogitTransform(temperature=0.7, logit_softcap=100.0)
        check_op(op, p, MESHES[mesh], loss_mask=p.loss_mask, transform=transform)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("op", checks.OPS)
def test_op_padded_vocabulary(op, mesh):
    """A prime vocabulary in columns that divide the mesh; the padding holds NaN."""
    p = make_problem(vocab=48, true_vocab=41)
    p = p._replace(logits=p.logits.at[..., 41:].set(jnp.nan))
    transform = jrl.LogitTransform(vocab_size=41, logit_softcap=5.0)
    _, dlogits = check_op(op, p, MESHES[mesh], transform=transform)
    assert not dlogits[..., 41:].any()


@pytest.mark.parametrize("mesh", ["none", "2x2x2"])
@pytest.mark.parametrize("op", ["token_logprobs_and_entropy", "gather_logprobs"])
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


@pytest.mark.parametrize("mesh", ["none", "2x2x2"])
@pytest.mark.parametrize("op", checks.OPS)
def test_temperature_per_token_and_traced(op, mesh):
    p = make_problem()
    check_op(op, p, MESHES[mesh], transform=jrl.LogitTransform(temperature=p.temperature))
    check_op(op, p, MESHES[mesh], transform=jrl.LogitTransform(temperature=jnp.float32(0.3)))


def test_temperature_is_not_differentiated():
    p = make_problem()
    loss = lambda t: jrl.token_logprobs(p.logits, p.targets, transform=jrl.LogitTransform(temperature=t)).sum()
    assert not jax.grad(loss)(p.temperature).any()


@pytest.mark.parametrize("op", checks.OPS)
@pytest.mark.parametrize("batch", [(), (5,), (2, 3, 4), (1, 1)])
def test_any_batch_rank(op, batch):
    check_op(op, make_problem(batch=batch, vocab=7))


@pytest.mark.parametrize("op", ["token_logprobs_and_entropy", "gather_logprobs"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("mesh", ["none", "2x4"])
@pytest.mark.parametrize("batch", [(1, 2), (3, 514)])
def test_chunk_size_changes_no_bit(op, batch, mesh, dtype):
    """Chunks that divide the rows, that do not, and larger than all of them; 1 is rounded up to the least block."""
    case, p = MESHES[mesh], make_problem(batch=batch, vocab=1000, dtype=dtype)
    m = case.make()
    placed = p.on(case, m)
    run = lambda c: checks.value_and_gradient(
        jrl, op, placed, axes=case.axes, mesh=m, token_chunk=c, loss_mask=placed.loss_mask, transform=SOME_OPTIONS
    )
    whole = jax.tree.leaves(run(None))
    for chunk in (1, 64, 200, 10_000):
        chunked = jax.tree.leaves(run(chunk))
        assert all((a == b).all() for a, b in zip(whole, chunked, strict=True)), chunk


@pytest.mark.parametrize("op", ["token_logprobs_and_entropy", "gather_logprobs"])
@pytest.mark.parametrize("mesh", ["none", "2x4"])
@pytest.mark.parametrize("chunk", [64, 200])
def test_chunked_equals_oracle(op, mesh, chunk):
    p = make_problem(batch=(2, 300), vocab=1000)
    check_op(op, p, MESHES[mesh], token_chunk=chunk, loss_mask=p.loss_mask, transform=SOME_OPTIONS)


@pytest.mark.parametrize("mesh", ["none", "2x2x2"])
@pytest.mark.parametrize("num_ids", [0, 1, 8, 9, 40])
def test_gather_of_any_number_of_ids(num_ids, mesh):
    """By comparison up to 8 ids, by scatter beyond; ids may repeat and be ignored."""
    p = make_problem(num_ids=num_ids)
    ids = p.ids.at[..., -1:].set(-100).at[..., :2].set(p.ids[..., :1]) if num_ids else p.ids
    check_op("gather_logprobs", p._replace(ids=ids), MESHES[mesh], loss_mask=p.loss_mask)


@pytest.mark.parametrize("op", checks.OPS)
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


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("op", checks.OPS)
def test_tokens_over_two_axes_of_one_dimension(op, axis_type):
    case = checks.MeshCase(
        {"data": 2, "context": 2, "vocab": 2}, jrl.MeshAxes(tokens=(("data", "context"),), vocab="vocab")
    )
    check_op(op, make_problem(batch=(4, 3)), case, axis_type=axis_type)


@pytest.mark.parametrize("op", checks.OPS)
def test_vocabulary_over_two_axes(op):
    case = checks.MeshCase({"a": 2, "b": 2, "c": 2}, jrl.MeshAxes(tokens="a", vocab=("c", "b")))
    check_op(op, make_problem(), case)


@pytest.mark.parametrize("op", checks.OPS)
def test_replicated_on_purpose(op):
    check_op(op, make_problem(), checks.MeshCase({"data": 8}, jrl.MeshAxes()))


@pytest.mark.parametrize("coef", [1.0, -0.5, 1, jnp.float32(0.0), float("nan")])
def test_gate_open(coef):
    check_op("token_entropy", make_problem(), entropy_coef=coef)
    check_op("token_logprobs_and_entropy", make_problem(), entropy_coef=coef)


@pytest.mark.parametrize("mesh", ["none", "2x2x2"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gate_shut_is_bit_for_bit_token_logprobs(dtype, mesh):
    case, p = MESHES[mesh], make_problem(batch=(4, 32), vocab=4096, dtype=dtype)
    m = case.make()
    p = p.on(case, m)
    kw = dict(axes=case.axes, mesh=m)
    both, gradient = checks.value_and_gradient(jrl, "token_logprobs_and_entropy", p, entropy_coef=0.0, **kw)
    (alone,), gradient_alone = checks.value_and_gradient(jrl, "token_logprobs", p, **kw)
    assert (both[0] == alone).all() and (gradient == gradient_alone).all()
    assert both[1].min() > 0


@pytest.mark.parametrize("coef", [0, 0.0, -0.0, None, False, np.zeros(()), np.float32(0)])
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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, dict(temperature=0.7), dict(logit_softcap=30.0), dict(temperature=0.7, logit_softcap=30.0)]
)
def test_unused_entropy_changes_no_bit_of_the_logprobs(options, dtype):
    """XLA drops what is not used, and must not then compute the rest otherwise."""
    p, kw = make_problem(batch=(64,), vocab=1000, dtype=dtype), dict(transform=jrl.LogitTransform(**options))
    both = lambda x: jrl.token_logprobs_and_entropy(x, p.targets, **kw)
    used = jax.jit(lambda x: tuple(both(x)))(p.logits)[0]
    assert (jax.jit(lambda x: both(x).logprobs)(p.logits) == used).all()
    assert (jax.jit(lambda x: jrl.token_logprobs(x, p.targets, **kw))(p.logits) == used).all()
    assert (jax.jit(lambda x: jrl.gather_logprobs(x, p.targets[:, None], **kw))(p.logits)[:, 0] == used).all()


@pytest.mark.parametrize("options", [{}, dict(temperature=0.7, logit_softcap=30.0)])
@pytest.mark.parametrize("mesh", ["none", "2x2x2"])
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
