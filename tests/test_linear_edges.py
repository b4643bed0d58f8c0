"""The rows of the edge contract (docs/numerics.md) for ops from hidden states, and what a wrong call says.

Every problem has a bias, a mask and a padded vocabulary, so that one program for each op and mesh serves them all.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, MESHES, ordinarily, replaced
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from linear_checks import (
    BOTH,
    check_linear,
    fill_padding,
    GATHER,
    LOGPROBS,
    LOOPS,
    make_linear_problem,
    OPS,
    oracle,
    value_and_gradients,
)

import jaxrl_logprob as jrl


pytestmark = pytest.mark.usefixtures("quick_compilation")
TRUE_VOCAB, COLUMNS = 250, 256
PADDED = jrl.LogitTransform(vocab_size=TRUE_VOCAB)
PLACES = list(itertools.product(["none", "2x4", "1x8", "2x2x2"], LOOPS))
everywhere = pytest.mark.parametrize("mesh, loop", ordinarily(("none", "vocab"), ("2x4", "tokens"), of=PLACES))
every_op = pytest.mark.parametrize("op", ordinarily(BOTH, of=OPS))
with_ids = pytest.mark.parametrize("op", ordinarily(BOTH, of=[BOTH, GATHER]))


def problem(**kw):
    p = make_linear_problem(vocab=COLUMNS, true_vocab=TRUE_VOCAB, bias=True, **kw)
    return p._replace(loss_mask=jnp.ones_like(p.loss_mask))


def check(op, p, mesh, loop, **kw):
    options = dict(chunks=LOOPS[loop], loss_mask=p.loss_mask, transform=PADDED, **kw)
    return check_linear(op, p, MESHES[mesh], **options)


def run(op, p, mesh, loop, **kw):
    """The op alone, for problems that the oracle answers otherwise."""
    case, m = MESHES[mesh], MESHES[mesh].make()
    kw = dict(axes=case.axes, mesh=m, chunks=LOOPS[loop], loss_mask=p.loss_mask, transform=PADDED, **kw)
    return value_and_gradients(jrl, op, p.on(case, m), **kw)


@everywhere
@every_op
@pytest.mark.parametrize("poison", ordinarily(jnp.nan, jnp.inf, of=[jnp.nan, jnp.inf, -jnp.inf, 3e38]))
@pytest.mark.parametrize("head", ordinarily("array", of=["array", "lora"]))
def test_masked_rows_are_zero_whatever_they_hold(op, poison, head, mesh, loop):
    """And add exactly nothing to the gradients of head and bias."""
    p = problem(head=head)
    mask = make_linear_problem().loss_mask
    p = p._replace(hidden_states=jnp.where(mask[..., None], p.hidden_states, poison), loss_mask=mask)
    out, (dhidden, *others) = check(op, p, mesh, loop)
    assert all(not o[~mask].any() for o in out) and not dhidden[~mask].any()
    clean = run(op, p._replace(hidden_states=jnp.where(mask[..., None], p.hidden_states, 0.0)), mesh, loop)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(others), jax.tree.leaves(clean[1][1:]), strict=True))


@everywhere
@every_op
def test_all_rows_masked(op, mesh, loop):
    p = problem()
    p = p._replace(hidden_states=p.hidden_states * jnp.nan, loss_mask=jnp.zeros_like(p.loss_mask))
    out, gradients = check(op, p, mesh, loop)
    assert not any(a.any() for a in jax.tree.leaves((out, gradients)))


@everywhere
@pytest.mark.parametrize("op", ordinarily(BOTH, of=[LOGPROBS, BOTH]))
@pytest.mark.parametrize("ignore_index", ordinarily(-100, of=[-100, 3]))
def test_ignored_targets_are_zero_whatever_their_row_holds(op, ignore_index, mesh, loop):
    p = problem()
    p = p._replace(
        targets=replaced(p.targets, np.s_[:, ::3], ignore_index),
        hidden_states=replaced(p.hidden_states, np.s_[:, ::3], jnp.nan),
    )
    other = {} if ignore_index == -100 else dict(ignore_index=ignore_index)
    out, (dhidden, *_) = check(op, p, mesh, loop, **other)
    assert all(not o[:, ::3].any() for o in out) and not dhidden[:, ::3].any()


@pytest.mark.parametrize("mesh, loop", ordinarily(("2x4", "tokens"), of=PLACES))
def test_ignored_id_of_a_gather_leaves_the_other_ids(mesh, loop):
    p = problem(num_ids=2)
    p = p._replace(ids=p.ids.at[:, ::2, 0].set(-100).at[:, ::4].set(-100))
    (logprobs,), (dhidden, *_) = check(GATHER, p, mesh, loop)
    assert not logprobs[:, ::2, 0].any() and logprobs[:, 2::4, 1].all() and not dhidden[:, ::4].any()


@everywhere
@with_ids
@pytest.mark.parametrize("outside", ordinarily(TRUE_VOCAB, -(2**31), of=[TRUE_VOCAB, COLUMNS, -1, 2**31 - 1, -(2**31)]))
def test_target_out_of_range_is_nan(op, outside, mesh, loop):
    """In its row of the results and of dhidden_states alone; every row adds to the gradients of head and bias, which
    are NaN wherever the vocabulary is."""
    p = problem()
    p = p._replace(targets=replaced(p.targets, np.s_[1, 3], outside), ids=replaced(p.ids, np.s_[1, 3, 1], outside))
    out, (dhidden, dlm_head, dbias) = check(op, p, mesh, loop)
    assert jnp.isnan(out[0][1, 3]).any() and jnp.isnan(out[0]).sum() == 1
    assert jnp.isnan(dhidden[1, 3]).all() and jnp.isnan(dhidden).sum() == dhidden.shape[-1]
    for d in (dlm_head, dbias):
        assert jnp.isnan(d[..., :TRUE_VOCAB]).all() and not d[..., TRUE_VOCAB:].any()


@everywhere
@every_op
@pytest.mark.parametrize("head", ordinarily("array", of=["array", "tied"]))
def test_padding_of_the_head_may_hold_anything(op, mesh, loop, head):
    """Columns from `vocab_size` on are absent, as they are from logits: NaN there reaches no gradient."""
    p = problem(head=head)
    _, (_, dlm_head, dbias) = check(op, fill_padding(p, TRUE_VOCAB, jnp.nan), mesh, loop, clean=p)
    dlm_head = dlm_head.embedding.T if head == "tied" else dlm_head
    assert not dlm_head[:, TRUE_VOCAB:].any() and not dbias[TRUE_VOCAB:].any()


@everywhere
@every_op
@pytest.mark.parametrize("absent", ordinarily(slice(0, 64), of=[slice(7, 8), slice(0, 64), slice(1, TRUE_VOCAB)]))
def test_columns_at_neginf_are_absent(op, absent, mesh, loop):
    """By their bias: one column, a whole shard and block, all columns but one."""
    p = problem()
    present = jnp.asarray([v for v in range(TRUE_VOCAB) if v not in range(TRUE_VOCAB)[absent]])
    p = p._replace(
        bias=replaced(p.bias, np.s_[absent], -jnp.inf),
        targets=present[p.targets % len(present)],
        ids=present[p.ids % len(present)],
    )
    out, (_, dlm_head, dbias) = check(op, p, mesh, loop)
    assert not dlm_head[:, absent].any() and not dbias[absent].any()
    assert all(jnp.isfinite(o).all() for o in out)


@everywhere
@with_ids
def test_target_at_neginf_has_a_finite_gradient(op, mesh, loop):
    p = problem()
    p = p._replace(
        bias=replaced(p.bias, np.s_[7], -jnp.inf),
        targets=replaced(p.targets, np.s_[0, 2], 7),
        ids=replaced(p.ids, np.s_[0, 2, 0], 7),
    )
    out, gradients = check(op, p, mesh, loop)
    assert out[0][0, 2].min() == -jnp.inf and all(jnp.isfinite(d).all() for d in gradients)


@everywhere
@every_op
def test_row_at_neginf_is_nan(op, mesh, loop):
    """By its hidden states, whose products overflow; the other rows do not notice."""
    p = problem()
    p = p._replace(lm_head=1.0 + jnp.abs(p.lm_head))
    lost = p._replace(hidden_states=replaced(p.hidden_states, np.s_[1, 5], -3e38))
    out, (dhidden, *_) = run(op, lost, mesh, loop)
    expected, (dexpected, *_) = run(op, p, mesh, loop)
    for o, e in zip(out, expected):
        assert jnp.isnan(o[1, 5]).all()
        assert_close(replaced(o, np.s_[1, 5], 0), replaced(e, np.s_[1, 5], 0), 1e-6)
    assert jnp.isnan(dhidden[1, 5]).all()
    assert_close(replaced(dhidden, np.s_[1, 5], 0), replaced(dexpected, np.s_[1, 5], 0), 1e-5)


@everywhere
@every_op
def test_every_row_at_neginf_is_nan(op, mesh, loop):
    p = problem()
    out, (dhidden, *_) = check(op, p._replace(bias=jnp.full_like(p.bias, -jnp.inf)), mesh, loop)
    assert all(jnp.isnan(a).all() for a in (*out, dhidden))


@everywhere
@every_op
@pytest.mark.parametrize("value", ordinarily(jnp.nan, of=[jnp.nan, jnp.inf]))
def test_nan_in_a_row_that_counts_stays_visible(op, value, mesh, loop):
    p = problem()
    p = p._replace(hidden_states=replaced(p.hidden_states, np.s_[1, 5, 2], value))
    out, (dhidden, dlm_head, _) = run(op, p, mesh, loop)
    for o in out:
        assert jnp.isnan(o[1, 5]).all() and jnp.isnan(o).sum() == o[1, 5].size
    assert jnp.isnan(dhidden[1, 5]).all() and jnp.isnan(dhidden).sum() == dhidden.shape[-1]
    assert jnp.isnan(dlm_head).any()


@everywhere
@every_op
@pytest.mark.parametrize("size", ordinarily(1e4, of=[1e4, -1e4, 1e6]))
def test_large_logits_are_exact_to_rounding(op, size, mesh, loop):
    """Integers, so that the logits themselves are exact in float32: all large, and far apart."""
    p = problem()
    whole = lambda a: jnp.round(2 * a)
    p = p._replace(hidden_states=whole(p.hidden_states), lm_head=whole(p.lm_head), bias=whole(p.bias))
    for column in (jnp.float32(size), jnp.where(jnp.arange(COLUMNS) % 2 == 0, jnp.float32(size), 0.0)):
        large = p._replace(
            hidden_states=replaced(p.hidden_states, np.s_[..., 0], 1.0), lm_head=replaced(p.lm_head, np.s_[0], column)
        )
        out, gradients = run(op, large, mesh, loop)
        exact, dexact = oracle(op, large, loss_mask=p.loss_mask, transform=PADDED)
        for o, e in zip(out, exact, strict=True):
            assert_close(o, e, 3e-6, "value")
        # Each component of dhidden_states beside the largest: it is a sum of entries of that size.
        assert_close(gradients[0][..., 0] / size, dexact[0][..., 0] / size, 3e-6, "dhidden_states of the large column")
        for d, e in zip((gradients[0][..., 1:], *gradients[1:]), (dexact[0][..., 1:], *dexact[1:]), strict=True):
            assert_close(d, e, 1e-5, "gradient")


def _second(f, *args):
    return jax.grad(lambda *a: sum((g**2).sum() for g in jax.grad(lambda *b: f(*b).sum(), (0, 1))(*a)))(*args)


@pytest.mark.parametrize("op", ordinarily(BOTH, of=OPS))
@pytest.mark.parametrize(
    "differentiate, what",
    [
        (lambda f, h, w: jax.jvp(f, (h, w), (h, w)), "forward-mode"),
        (lambda f, h, w: jax.jacfwd(f, argnums=1)(h, w), "forward-mode"),
        (_second, "second derivative"),
        (lambda f, h, w: jax.jacfwd(jax.grad(lambda *a: f(*a).sum()))(h, w), "derivative"),
    ],
)
def test_unsupported_derivative_names_the_way_out(op, differentiate, what):
    p = make_linear_problem(batch=(3,), vocab=5)
    with pytest.raises(TypeError, match=f"{what}.*jaxrl_logprob.reference"):
        jax.jit(lambda h, w: differentiate(lambda *a: OPS[op](jrl, p, *a)[-1], h, w)).lower(*p[:2])


HIDDEN, MATRIX, TARGETS = jnp.zeros((4, 6, 8)), jnp.zeros((8, 256)), jnp.zeros((4, 6), jnp.int32)


def score(hidden_states=HIDDEN, lm_head=MATRIX, targets=TARGETS, **kw):
    return jrl.linear_token_logprobs(hidden_states, lm_head, targets, **kw)


@pytest.mark.parametrize(
    "kw, error, message",
    [
        (dict(hidden_states=HIDDEN.astype(int)), TypeError, "`hidden_states` must be floating point, got dtype int"),
        (dict(hidden_states=jnp.zeros(())), ValueError, r"`hidden_states` must have shape \(\*batch, D\), got \(\)"),
        (dict(hidden_states=HIDDEN[..., :0]), ValueError, r"`hidden_states` must have shape \(\*batch, D\)"),
        (dict(hidden_states=HIDDEN[..., :7]), ValueError, r"`lm_head` must have shape \(7, V\), .*got \(8, 256\)"),
        (
            dict(lm_head=MATRIX.T),
            ValueError,
            r"`lm_head` must have shape \(8, V\), not empty, got \(256, 8\)\. .*TiedEmbedding\(embedding\)",
        ),
        (
            dict(lm_head=jrl.TiedEmbedding(MATRIX)),
            ValueError,
            r"`lm_head.embedding` must have shape \(V, 8\), not empty, got \(8, 256\)",
        ),
        (dict(lm_head=MATRIX[:, :0]), ValueError, r"`lm_head` must have shape \(8, V\), not empty, got \(8, 0\)"),
        (dict(lm_head=MATRIX[None]), ValueError, r"`lm_head` must have shape \(8, V\).*got \(1, 8, 256\)"),
        (dict(lm_head=MATRIX.astype(int)), TypeError, "`lm_head` must be floating point, got dtype int"),
        (dict(lm_head=[MATRIX]), TypeError, r"`lm_head` must be an array \[D, V\], a TiedEmbedding or a LoraHead"),
        (dict(bias=jnp.zeros(255)), ValueError, r"`bias` must have one entry for each column .*\(256,\), got \(255,\)"),
        (dict(bias=jnp.zeros(256, int)), TypeError, "`bias` must be floating point, got dtype int"),
        (
            dict(targets=TARGETS[:, 1:]),
            ValueError,
            r"`targets` must have shape \(4, 6\).*already shifted",
        ),
        (dict(targets=TARGETS.astype(jnp.float32)), TypeError, "`targets` must be integer ids, got dtype float32"),
        (dict(loss_mask=TARGETS), TypeError, "`loss_mask` must be bool.*got dtype int32"),
        (dict(loss_mask=TARGETS[0] > 0), ValueError, r"`loss_mask` must have the batch shape \(4, 6\), got \(6,\)"),
        (dict(transform=0.7), TypeError, "`transform` must be a LogitTransform, got 0.7"),
        (
            dict(transform=jrl.LogitTransform(vocab_size=257)),
            ValueError,
            "`transform.vocab_size` must be at most the 256 columns of lm_head, got 257",
        ),
        (dict(ignore_index=1.5), TypeError, "`ignore_index` must be a Python integer"),
        (dict(chunks=128), TypeError, "`chunks` must be a Chunks, got 128"),
    ],
)
def test_wrong_call(kw, error, message, our_own_errors):
    with pytest.raises(error, match=message):
        score(**kw)


@pytest.mark.parametrize(
    "a, b, message",
    [
        ((7, 2), (2, 256), r"`lm_head.a` must have shape \(8, r\), not empty, got \(7, 2\)"),
        ((8, 2), (2, 255), r"`lm_head.b` must have shape \(r, 256\), not empty, got \(2, 255\)"),
        ((8, 2), (3, 256), r"`lm_head.b` must have the rank of lm_head.a, \(2, 256\), got \(3, 256\)"),
    ],
)
def test_wrong_adapter(a, b, message, our_own_errors):
    with pytest.raises(ValueError, match=message):
        score(lm_head=jrl.LoraHead(MATRIX, jnp.zeros(a), jnp.zeros(b)))


@pytest.mark.parametrize("scale", [jnp.ones(2), "0.5", None])
def test_wrong_scale_of_an_adapter(scale, our_own_errors):
    with pytest.raises(TypeError, match="`lm_head.scale` must be a number or a scalar array, got "):
        score(lm_head=jrl.LoraHead(MATRIX, jnp.zeros((8, 2)), jnp.zeros((2, 256)), scale))


def test_an_adapter_on_an_adapter(our_own_errors):
    one = jrl.LoraHead(MATRIX, jnp.zeros((8, 2)), jnp.zeros((2, 256)))
    with pytest.raises(TypeError, match="`lm_head.lm_head` must be an array .*concatenate their a"):
        score(lm_head=jrl.LoraHead(one, one.a, one.b))


@pytest.mark.parametrize(
    "kw, error, message",
    [
        (dict(vocab_chunk=100), ValueError, "`vocab_chunk` must be a multiple of 128, got 100"),
        (dict(vocab_chunk=0), ValueError, "`vocab_chunk` must be at least 1, or None, got 0"),
        (dict(vocab_chunk=128.0), TypeError, "`vocab_chunk` must be a Python integer"),
        (dict(token_chunk=0), ValueError, "`token_chunk` must be at least 1, or None, got 0"),
        (dict(loop="rows"), ValueError, '`loop` must be "vocab", "tokens" or None, got \'rows\''),
    ],
)
def test_wrong_chunks(kw, error, message, our_own_errors):
    with pytest.raises(error, match=message):
        jrl.Chunks(**kw)


def test_wrong_gather(our_own_errors):
    with pytest.raises(ValueError, match=r"`ids` must have shape \(4, 6, K\), got \(4, 6\).*linear_token_logprobs"):
        jrl.linear_gather_logprobs(HIDDEN, MATRIX, TARGETS)


SIZES = {"data": 2, "context": 2, "vocab": 2}


@pytest.mark.parametrize(
    "kw, axes, message",
    [
        ({}, None, r"`axes` must be given where hidden_states may be split over the mesh"),
        (
            dict(lm_head=MATRIX[:, :255]),
            jrl.MeshAxes(vocab="vocab"),
            r"`lm_head` must have a dimension 1 that divides into 2 shards over \('vocab',\).*VocabPartition",
        ),
        (
            dict(hidden_states=HIDDEN[..., :7], lm_head=MATRIX[:7]),
            jrl.MeshAxes("data", features="data"),
            r"`lm_head` must have a dimension 0 that divides into 2 shards over \('data',\).*Leave `features` out",
        ),
        (
            dict(hidden_states=HIDDEN[:3], targets=TARGETS[:3]),
            jrl.MeshAxes("data"),
            r"`hidden_states` must have a dimension 0 that divides into 2 shards over \('data',\)",
        ),
        (
            dict(hidden_states=HIDDEN[:, :5], targets=TARGETS[:, :5]),
            jrl.MeshAxes(vocab="vocab", sequence_parallel=True),
            r"`hidden_states` must have a dimension 1 that divides into 2 shards.*leave sequence_parallel out",
        ),
        ({}, jrl.MeshAxes(vocab="tensor"), r"`axes` must name axes of the mesh .*got \['tensor'\]"),
    ],
)
def test_wrong_axes(kw, axes, message):
    with pytest.raises(ValueError, match=message):
        score(axes=axes, mesh=jrl.make_mesh(SIZES), **kw)


def test_axes_that_contradict_an_explicit_head():
    mesh = jrl.make_mesh(SIZES, axis_type=AxisType.Explicit)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="`lm_head` must be split as `axes` says.*jax.reshard"):
        score(lm_head=jax.device_put(MATRIX, NamedSharding(mesh, P("vocab"))), axes=jrl.MeshAxes(vocab="vocab"))


@pytest.mark.parametrize(
    "hidden, head, message",
    [
        (P(None, "vocab"), P(None, "vocab"), "`hidden_states` must be the same on every vocabulary shard"),
        (P(), P(), r"`lm_head` must vary over the vocabulary axes \['vocab'\]"),
    ],
)
def test_what_must_vary_inside_the_callers_shard_map(hidden, head, message):
    local = lambda h, w: jrl.linear_token_entropy(h, w, axes=jrl.MeshAxes(vocab="vocab"))
    fun = jax.shard_map(local, mesh=jrl.make_mesh({"vocab": 2}), in_specs=(hidden, head), out_specs=P())
    with pytest.raises(ValueError, match=message):
        fun(HIDDEN, MATRIX)
