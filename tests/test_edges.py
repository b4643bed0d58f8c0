"""One test for each row of the edge contract (docs/numerics.md), values and gradients, on one device and sharded."""

import itertools

import checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import check_op, make_problem, MESHES, ordinarily, replaced

import jaxrl_logprob as jrl


pytestmark = pytest.mark.usefixtures("quick_compilation")
WHERE = ["none", "2x4", "1x8", "2x2x2"]
everywhere = pytest.mark.parametrize("mesh", ordinarily("none", "2x4", of=WHERE))
BOTH = ["token_logprobs_and_entropy", "gather_logprobs"]  # between them they do what the other two do
every_op = pytest.mark.parametrize("op", ordinarily(*BOTH, of=checks.OPS))
# The two of them, and both kinds of mesh, once.
by_turns = pytest.mark.parametrize(
    "op, mesh", ordinarily((BOTH[0], "2x4"), (BOTH[1], "none"), of=itertools.product(checks.OPS, WHERE))
)
with_targets = pytest.mark.parametrize("op", ordinarily(BOTH[0], of=["token_logprobs", BOTH[0]]))


@by_turns
@pytest.mark.parametrize("poison", ordinarily(-jnp.inf, jnp.nan, of=[jnp.nan, jnp.inf, -jnp.inf, 1e38]))
def test_masked_rows_are_zero_whatever_they_hold(op, poison, mesh):
    p = make_problem()
    p = p._replace(logits=jnp.where(p.loss_mask[..., None], p.logits, poison))
    out, dlogits = check_op(op, p, MESHES[mesh], loss_mask=p.loss_mask)
    assert all(not o[~p.loss_mask].any() for o in out) and not dlogits[~p.loss_mask].any()
    assert dlogits[p.loss_mask].any(axis=-1).all()


@everywhere
@with_targets
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_ignored_targets_are_zero_whatever_their_row_holds(op, ignore_index, mesh):
    p = make_problem()
    p = p._replace(
        targets=replaced(p.targets, np.s_[:, ::3], ignore_index), logits=replaced(p.logits, np.s_[:, ::3], jnp.nan)
    )
    p = p._replace(targets=jnp.where(p.targets == ignore_index, ignore_index, p.targets))
    p = p._replace(logits=jnp.where((p.targets == ignore_index)[..., None], jnp.nan, p.logits))
    out, dlogits = check_op(op, p, MESHES[mesh], ignore_index=ignore_index)
    assert all(not o[:, ::3].any() for o in out) and not dlogits[:, ::3].any()


@everywhere
def test_ignored_id_of_a_gather_leaves_the_other_ids(mesh):
    p = make_problem(num_ids=2)
    p = p._replace(ids=p.ids.at[:, ::2, 0].set(-100).at[:, ::4].set(-100))
    (logprobs,), dlogits = check_op("gather_logprobs", p, MESHES[mesh])
    assert not logprobs[:, ::2, 0].any() and logprobs[:, 2::4, 1].all()
    assert not dlogits[:, ::4].any()


@everywhere
@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("outside", ordinarily(40, -(2**31), of=[40, -1, 2**31 - 1, -(2**31)]))
def test_target_out_of_range_is_nan_in_its_row_alone(op, outside, mesh):
    p = make_problem()
    p = p._replace(targets=replaced(p.targets, np.s_[1, 3], outside), ids=replaced(p.ids, np.s_[1, 3, 1], outside))
    out, dlogits = check_op(op, p, MESHES[mesh])
    assert jnp.isnan(out[0][1, 3]).any() and jnp.isnan(out[0]).sum() == 1
    assert jnp.isnan(dlogits[1, 3]).all() and jnp.isnan(dlogits).sum() == 40
    if op == "token_logprobs_and_entropy":
        assert jnp.isfinite(out[1]).all()


@everywhere
@with_targets
def test_target_in_the_padding_is_nan(op, mesh):
    p = make_problem(true_vocab=35)
    p = p._replace(targets=replaced(p.targets, np.s_[0, 0], 35))
    out, dlogits = check_op(op, p, MESHES[mesh], transform=jrl.LogitTransform(vocab_size=35))
    assert jnp.isnan(out[0][0, 0]) and jnp.isnan(dlogits[0, 0, :35]).all() and not dlogits[0, 0, 35:].any()


@pytest.mark.parametrize("dtype", ordinarily(jnp.int8, jnp.uint32, of=[jnp.uint8, jnp.int8, jnp.int16, jnp.uint32]))
def test_any_integer_dtype_of_targets(dtype):
    p = make_problem()
    expected = jrl.token_logprobs(p.logits, p.targets)
    assert (jrl.token_logprobs(p.logits, p.targets.astype(dtype)) == expected).all()


def test_large_ids_do_not_wrap_into_range():
    logits = jnp.zeros((1, 8))
    score = jax.jit(jrl.token_logprobs)
    assert jnp.isnan(score(logits, jnp.array([2**32 - 1], jnp.uint32))).all()
    with jax.enable_x64(True):
        for target in (2**32 + 3, -(2**32) + 3):
            assert jnp.isnan(score(logits, jnp.array([target], jnp.int64))).all()


@everywhere
@pytest.mark.parametrize("op", ["token_logprobs", "gather_logprobs"])
def test_target_at_neginf_has_a_finite_gradient(op, mesh):
    p = make_problem()
    p = p._replace(
        logits=replaced(p.logits, np.s_[0, 2, 7], -jnp.inf),
        targets=replaced(p.targets, np.s_[0, 2], 7),
        ids=replaced(p.ids, np.s_[0, 2, 0], 7),
    )
    out, dlogits = check_op(op, p, MESHES[mesh])
    assert out[0][0, 2].min() == -jnp.inf and jnp.isfinite(dlogits).all()


@by_turns
@pytest.mark.parametrize(
    "absent",
    ordinarily(slice(0, 20), slice(0, 39), of=[slice(0, 1), slice(0, 20), slice(20, 40), slice(5, 39), slice(0, 39)]),
)
def test_columns_at_neginf_are_absent(op, absent, mesh):
    """One column, whole shards, all shards but one, all columns but one."""
    p = make_problem()
    present = jnp.asarray([v for v in range(40) if v not in range(40)[absent]])
    p = p._replace(
        logits=replaced(p.logits, np.s_[..., absent], -jnp.inf),
        targets=present[p.targets % len(present)],
        ids=present[p.ids % len(present)],
    )
    out, dlogits = check_op(op, p, MESHES[mesh], transform=jrl.LogitTransform(temperature=0.5))
    assert not dlogits[..., absent].any()
    assert all(jnp.isfinite(o).all() for o in out)


@by_turns
def test_row_at_neginf_is_nan(op, mesh):
    p = make_problem()
    p = p._replace(logits=replaced(p.logits, np.s_[1, 5], -jnp.inf))
    out, dlogits = check_op(op, p, MESHES[mesh])
    for o in out:
        assert jnp.isnan(o[1, 5]).all() and jnp.isnan(o).sum() == o[1, 5].size
    assert jnp.isnan(dlogits[1, 5]).all() and jnp.isnan(dlogits).sum() == 40


@by_turns
@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_nan_or_inf_in_a_row_that_counts_stays_visible(op, value, mesh):
    p = make_problem()
    p = p._replace(logits=replaced(p.logits, np.s_[1, 5, 9], value))
    case, m = MESHES[mesh], MESHES[mesh].make()
    out, dlogits = checks.value_and_gradient(jrl, op, p.on(case, m), axes=case.axes, mesh=m)
    for o in out:
        assert jnp.isnan(o[1, 5]).any() and jnp.isnan(o).sum() == jnp.isnan(o[1, 5]).sum()
    assert jnp.isnan(dlogits[1, 5]).any() and jnp.isnan(dlogits).sum() == jnp.isnan(dlogits[1, 5]).sum()


@by_turns
@pytest.mark.parametrize("temperature", ordinarily(0.7, of=[1.0, 0.7]))
@pytest.mark.parametrize("offset", ordinarily(1e6, -1e4, of=[1e4, -1e4, 1e6]))
def test_large_logits_are_exact_to_rounding(op, offset, temperature, mesh):
    """float32 logits near ±1e6 are themselves 0.06 apart; what is computed of them is as exact as near 0."""
    p = make_problem()
    p = p._replace(logits=p.logits + jnp.float32(offset))
    check_op(op, p, MESHES[mesh], transform=jrl.LogitTransform(temperature=temperature))


@by_turns
def test_logits_of_very_different_size(op, mesh):
    p = make_problem(scale=1e4)
    check_op(op, p, MESHES[mesh], tolerance=2e-5)  # logprobs of -1e5 and dlogits of 1e4, relative to their size
    check_op(op, p._replace(logits=p.logits.at[..., ::2].set(-3e38).at[..., 1::2].mul(1e-4)), MESHES[mesh])


@every_op
@pytest.mark.parametrize("mesh", ["none", "2x2x2"])
@pytest.mark.parametrize("batch", [(0, 4), pytest.param((2, 0), marks=pytest.mark.slow)])
def test_no_tokens(op, batch, mesh):
    out, dlogits = check_op(op, make_problem(batch=batch), MESHES[mesh])
    assert dlogits.size == 0 and all(o.size == 0 for o in out)


@every_op
def test_one_column(op):
    out, _ = check_op(op, make_problem(vocab=1))
    assert all(not o.any() for o in out)


@every_op
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_gradient_is_rounded_once(op, dtype):
    p = make_problem(batch=(8, 64), vocab=256, dtype=dtype)
    _, exact = checks.oracle(op, p)
    _, dlogits = checks.value_and_gradient(jrl, op, p)
    rounded = np.asarray(exact, np.float32).astype(dtype)
    assert dlogits.dtype == dtype
    assert np.mean(np.asarray(dlogits) != rounded) < 2e-3  # what float32 arithmetic tips; rounded twice: 2e-2 and more


@pytest.mark.parametrize(
    "op, mesh", ordinarily((BOTH[0], "2x2x2"), (BOTH[1], "none"), of=itertools.product(checks.OPS, ["none", "2x2x2"]))
)
def test_invariances(op, mesh):
    """A constant added to a row changes nothing; a row of dlogits sums to 0; 0 <= entropy <= log V."""
    p = make_problem()
    out, dlogits = check_op(op, p, MESHES[mesh])
    shifted, _ = check_op(op, p._replace(logits=p.logits + 16.0), MESHES[mesh])
    for a, b in zip(out, shifted, strict=True):
        checks.assert_close(a, b, 1e-5)
    checks.assert_close(dlogits.sum(-1), jnp.zeros((2, 12)), 3e-6)
    if "entropy" in op:
        assert out[-1].min() >= 0 and out[-1].max() <= np.log(40) + 1e-6
