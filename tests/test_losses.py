"""Losses against float64 NumPy: objectives, levels and modes, packed and not, on meshes, in micro-batches."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import losses_reference
import numpy as np
import pytest
from checks import assert_close, MESHES, ordinarily
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxrl_logprob as jrl
from jaxrl_logprob import losses
from jaxrl_logprob.losses import aggregate, Aggregation, policy_loss, Sequences


pytestmark = pytest.mark.usefixtures("quick_compilation")
OBJECTIVES = {name: getattr(losses, name) for name in losses_reference.OBJECTIVES}
LEVELS = ["token", "sequence", "sequence-token"]
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LENGTHS = [7, 12, 3, 8, 1, 0, 5, 4]
TOLERANCE = 2e-6


def aggregation(mode, **kw) -> Aggregation:
    return Aggregation(mode, max_length=16 if mode.endswith("norm") else None, **kw)


class Ragged:
    """Sequences of several lengths; about a quarter of their tokens do not count, and hold NaN."""

    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        self.logprobs, self.old, self.weights, self.entropy = (
            [rng.normal(scale=0.3, size=n) for n in LENGTHS] for _ in range(4)
        )
        self.mask = [rng.random(n) > 0.25 for n in LENGTHS]
        self.advantages = rng.normal(size=len(LENGTHS))

    def rows(self, values, fill=np.nan, dtype=np.float32):
        """[S, 16], a sequence a row."""
        out = np.full((len(LENGTHS), 16), fill, dtype)
        for row, v in zip(out, values):
            row[: len(v)] = v
        return out

    def packed(self, values, fill=np.nan, dtype=np.float32):
        """[4, 16], two sequences a row: 7 + 8, 12 + 4, 3 + 5, 1 + 0."""
        out = np.full((4, 16), fill, dtype)
        for row, (a, b) in zip(out, [(0, 3), (1, 7), (2, 6), (4, 5)]):
            joined = np.concatenate([np.asarray(values[a]), np.asarray(values[b])])
            row[: joined.size] = joined
        return out

    def segment_ids(self):
        return self.packed([np.full(n, s + 1) for s, n in enumerate(LENGTHS)], 0, np.int32)

    def arrays(self, how):
        """logprobs, old_logprobs, advantages, weights, entropy and loss_mask."""
        put = getattr(self, how)
        hidden = lambda values: [np.where(m, v, np.nan) for v, m in zip(values, self.mask)]
        spread = [np.full(n, a) for n, a in zip(LENGTHS, self.advantages)]
        arrays = (self.logprobs, self.old, spread, self.weights, self.entropy)
        return [*(jnp.asarray(put(hidden(a))) for a in arrays), jnp.asarray(put(self.mask, False, bool))]

    def expected(self, objective, level, mode, entropy_coef=0.1):
        of_token = lambda s, values: np.asarray(values[s])[self.mask[s]]
        sequences = []
        for s in range(len(LENGTHS)):
            log_ratio = of_token(s, self.logprobs) - of_token(s, self.old)
            advantages = np.full(log_ratio.size, self.advantages[s])
            found = losses_reference.per_token(objective, list(log_ratio), list(advantages), level)
            sequences.append(np.array(found) * of_token(s, self.weights) - entropy_coef * of_token(s, self.entropy))
        return losses_reference.aggregated(mode, sequences, 16)


def loss_and_gradient(ragged, how, objective, level, mode, *, sequences=None, arrays=None, **kw):
    if sequences is None:
        ids = dict(segment_ids=jnp.asarray(ragged.segment_ids()), num_segments=len(LENGTHS))
        sequences = Sequences(**(ids if how == "packed" else {}))

    def loss(logprobs, entropy, sequences, old, advantages, weights, mask):
        return policy_loss(
            logprobs, old, advantages, loss_mask=mask, objective=OBJECTIVES[objective], level=level, weights=weights,
            entropy=entropy, entropy_coef=0.1, aggregation=aggregation(mode, sequences=sequences), **kw,
        ).loss  # fmt: skip

    logprobs, old, advantages, weights, entropy, mask = arrays or ragged.arrays(how)
    run = jax.jit(jax.value_and_grad(loss, (0, 1)))
    return run(logprobs, entropy, sequences, old, advantages, weights, mask)


EVERYTHING = list(itertools.product(OBJECTIVES, LEVELS, MODES))
FEW = [(o, LEVELS[i % 3], MODES[i]) for i, o in enumerate(OBJECTIVES)] + [
    ("ppo_clip", "sequence", "seq-mean-token-mean")
]


@pytest.mark.parametrize("objective, level, mode", ordinarily(*FEW, of=EVERYTHING))
def test_loss_is_the_papers_packed_or_not(objective, level, mode):
    """Masked tokens hold NaN. The gradients of the two are the same, token by token."""
    ragged = Ragged()
    loss, gradients = loss_and_gradient(ragged, "rows", objective, level, mode)
    assert_close(loss, ragged.expected(objective, level, mode), TOLERANCE)
    packed_loss, packed = loss_and_gradient(ragged, "packed", objective, level, mode)
    assert_close(packed_loss, loss, TOLERANCE)
    for rows, of_packed in zip(gradients, packed):
        by_sequence = [row[:n] for row, n in zip(np.asarray(rows), LENGTHS)]
        assert_close(of_packed, ragged.packed(by_sequence, 0.0), TOLERANCE)
        assert np.any(of_packed)


def finite_difference(f, x, index, step=1e-4):
    def moved(by):
        y = [np.array(v) for v in x]
        y[index[0]][index[1]] += by
        return f(y)

    return (moved(step) - moved(-step)) / (2 * step)


@pytest.mark.parametrize("mode", ordinarily("seq-mean-token-mean", of=MODES))
@pytest.mark.parametrize("objective, level", list(itertools.product(["ppo_clip", "sapo"], ["token", "sequence"])))
def test_gradient_is_that_of_the_papers(objective, level, mode):
    """Of the float64 oracle, by differences; what has stopped gradients in its paper is tested by hand below."""
    ragged = Ragged(1)
    _, (gradient, _) = loss_and_gradient(ragged, "rows", objective, level, mode)

    def value(logprobs):
        ragged.logprobs = logprobs
        return ragged.expected(objective, level, mode)

    start = ragged.logprobs
    for s, t in [(0, 0), (0, 6), (1, 3), (3, 5), (4, 0), (6, 2), (7, 3)]:
        expected = finite_difference(value, start, (s, t)) if ragged.mask[s][t] else 0.0
        assert_close(gradient[s, t], expected, 1e-5, f"{s}, {t}")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gradients_of_objectives(objective):
    with jax.enable_x64(True):
        log_ratio, advantages = jnp.array([-0.5, 0.05, 0.7, -0.1, 0.3, -0.9]), jnp.array([1.0, 2.0, 1.5, -1, -0.5, -2])
        if objective != "cispo":
            check_grads(lambda x: OBJECTIVES[objective](jnp.asarray(x), advantages).losses, (log_ratio,), 1, ["rev"])
        gradient = jax.grad(lambda x: OBJECTIVES[objective](x, advantages).losses.sum())(log_ratio)
        ratio = np.exp(log_ratio)
        if objective == "ppo_clip":  # Nothing where the clipped term is the smaller one.
            free = np.array([1, 1, 0, 1, 1, 0])
            assert_close(gradient, -free * ratio * advantages, 1e-12)
        if objective == "cispo":  # The weight is a constant.
            assert_close(gradient, -ratio * advantages, 1e-12)
            bounded = jax.grad(lambda x: losses.cispo(x, advantages, min_ratio=0.8, max_ratio=1.28).losses.sum())
            assert_close(bounded(log_ratio), -np.clip(ratio, 0.8, 1.28) * advantages, 1e-12)


def test_gradient_of_the_token_form_of_gspo():
    """s sg(π) / π: the ratio of the sequence, the gradient of the token; with equal advantages, that of GSPO."""
    ragged = Ragged(2)
    of = lambda level: loss_and_gradient(ragged, "rows", "ppo_clip", level, "seq-mean-token-mean")
    (loss, (one, _)), (same, (other, _)) = of("sequence"), of("sequence-token")
    assert_close(loss, same, TOLERANCE)
    ragged.weights = [np.ones(n) for n in LENGTHS]
    assert_close(of("sequence")[1][0], of("sequence-token")[1][0], TOLERANCE)
    assert np.abs(np.asarray(one) - np.asarray(other)).max() > 1e-3


def test_log_ratio_and_weights_of_several_sequences_do_not_mix():
    """H09: the masked sum goes over the context axis."""
    mesh, axes = jrl.make_mesh({"context": 2}), jrl.MeshAxes((None, "context"))
    log_ratio = jnp.array([[0.1, 0.2, 0.3, 0.4]])
    run = lambda x: policy_loss(
        x, jnp.zeros_like(x), jnp.ones_like(x), objective=losses.sapo, level="sequence",
        aggregation=Aggregation(sequences=Sequences(axes=axes, mesh=mesh)),
    )  # fmt: skip
    loss = jax.jit(run)(log_ratio).loss
    assert_close(loss, losses_reference.sapo(0.25, 1.0), 1e-6)


# Where the tokens lie.


@pytest.mark.parametrize("how", ["rows", "packed"])
@pytest.mark.parametrize("mesh", ordinarily("2x2x2", "2x4", of=[m for m in MESHES if m != "none"]))
@pytest.mark.parametrize("mode", ordinarily("token-mean", "seq-mean-token-mean", of=MODES))
@pytest.mark.parametrize("level", ordinarily("sequence", of=LEVELS))
def test_mesh_changes_nothing(level, mode, mesh, how):
    case, ragged = MESHES[mesh], Ragged()
    m = case.make()
    assert m is not None
    put = lambda a: jax.device_put(a, jax.NamedSharding(m, P(*case.axes.per_dimension(2))))
    ids = dict(segment_ids=put(ragged.segment_ids()), num_segments=len(LENGTHS)) if how == "packed" else {}
    one = loss_and_gradient(ragged, how, "ppo_clip", level, mode)
    many = loss_and_gradient(
        ragged, how, "ppo_clip", level, mode,
        sequences=Sequences(**ids, axes=case.axes, mesh=m), arrays=[put(a) for a in ragged.arrays(how)],
    )  # fmt: skip
    jax.tree.map(lambda a, b: assert_close(a, b, TOLERANCE), many, one)


@pytest.mark.parametrize("how", ["rows", "packed"])
@pytest.mark.parametrize("mode", ordinarily("seq-mean-token-mean", of=MODES))
def test_inside_the_callers_shard_map(mode, how):
    case, ragged = MESHES["2x2x2"], Ragged()
    m, spec = case.make(), P("data", "context")
    packed = how == "packed"

    def loss(logprobs, old, advantages, weights, entropy, mask, ids):
        ids = dict(segment_ids=ids, num_segments=len(LENGTHS)) if packed else {}
        out = policy_loss(
            logprobs, old, advantages, loss_mask=mask, level="sequence", weights=weights, entropy=entropy,
            entropy_coef=0.1, aggregation=aggregation(mode, sequences=Sequences(**ids, axes=case.axes)),
        )  # fmt: skip
        return out.loss, losses.policy_metrics(out.tokens, sequences=Sequences(axes=case.axes))

    mapped = jax.shard_map(loss, mesh=m, in_specs=(spec,) * 7, out_specs=(P(), P()))
    ids = jnp.asarray(ragged.segment_ids() if packed else np.ones((len(LENGTHS), 16), np.int32))
    (value, metrics), gradient = jax.jit(jax.value_and_grad(mapped, has_aux=True))(*ragged.arrays(how), ids)
    one = loss_and_gradient(ragged, how, "ppo_clip", "sequence", mode)
    assert_close(value, one[0], TOLERANCE)
    assert_close(gradient, one[1][0], TOLERANCE)
    assert float(metrics["num_tokens"]) == sum(m.sum() for m in ragged.mask)


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_add_up_to_the_batch(mode):
    """With the batch's denominator, though they have different numbers of tokens and of sequences."""
    ragged = Ragged()
    whole = loss_and_gradient(ragged, "rows", "ppo_clip", "token", mode)
    arrays = ragged.arrays("rows")
    denominator = losses.loss_denominator(arrays[-1], aggregation(mode))

    def part(*arrays):
        def loss(logprobs, old, advantages, weights, entropy, mask):
            how = aggregation(mode, denominator=denominator)
            out = policy_loss(logprobs, old, advantages, loss_mask=mask, weights=weights, entropy=entropy,
                              entropy_coef=0.1, aggregation=how)  # fmt: skip
            return out.loss

        return jax.value_and_grad(loss)(*arrays)

    parts = [part(*(a[first : first + size] for a in arrays)) for first, size in ((0, 1), (1, 4), (5, 3))]
    assert_close(sum(loss for loss, _ in parts), whole[0], TOLERANCE)
    assert_close(np.concatenate([g for _, g in parts]), whole[1][0], TOLERANCE)


# Aggregation.


@pytest.mark.parametrize("mode, expected", list(zip(MODES, (1.75, 3.5, 2.5, 0.875))))
def test_n07_modes(mode, expected):
    x, mask = jnp.array([[4.0, 9, 9], [1, 1, 1]]), jnp.array([[True, False, False], [True] * 3])
    how = Aggregation(mode, max_length=4 if mode.endswith("norm") else None)
    assert float(aggregate(x, how, loss_mask=mask)) == pytest.approx(expected, rel=1e-6)


def test_k03_sequences_in_a_row_and_an_empty_row():
    ids = jnp.array([[1, 1, 2, 2, 2, 2], [0] * 6])
    x = jnp.where(ids == 1, 1.0, jnp.where(ids == 2, 2.0, jnp.nan))
    of = lambda mode: float(aggregate(x, Aggregation(mode, sequences=Sequences(ids, 2)), loss_mask=ids > 0))
    assert of("seq-mean-token-mean") == pytest.approx(1.5) and of("token-mean") == pytest.approx(10 / 6)
    three = Aggregation("seq-mean-token-mean", sequences=Sequences(ids, 3))  # The third is not there.
    assert float(aggregate(x, three, loss_mask=ids > 0)) == pytest.approx(1.5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_n01_no_token_that_counts(objective, mode):
    x = jnp.full((2, 3), jnp.nan)
    mask = jnp.zeros((2, 3), bool)
    run = lambda x: policy_loss(
        x, x, x, loss_mask=mask, objective=OBJECTIVES[objective], level="sequence", entropy=x, entropy_coef=0.1,
        weights=x, aggregation=aggregation(mode),
    )  # fmt: skip
    loss, gradient = jax.value_and_grad(lambda x: run(x).loss)(x)
    assert loss == 0 and (gradient == 0).all()
    assert all(value == 0 for value in losses.policy_metrics(run(x).tokens).values())


@pytest.mark.parametrize("values, mask, expected", [
    ([[1.0, 0, 0], [4, 3, 2]], [[1, 0, 0], [1, 1, 1]], 2.5),  # N02
    ([[5.0, 5, 5], [4, 3, 2]], [[0, 0, 0], [1, 1, 1]], 3.0),  # N04
    ([[1.0, 1, 1, 4], [1, 2, 3, 2]], [[0, 0, 0, 1], [1, 1, 1, 1]], 2.4),  # H12
])  # fmt: skip
def test_mean_is_over_all_devices(values, mask, expected):
    mesh, axes = jrl.make_mesh({"data": 2}), jrl.MeshAxes("data")
    how = Aggregation(sequences=Sequences(axes=axes, mesh=mesh))
    found = jax.jit(lambda x, m: aggregate(x, how, loss_mask=m))(jnp.array(values), jnp.array(mask, bool))
    assert float(found) == pytest.approx(expected)


# Edge cases of the arithmetic.


@pytest.mark.parametrize("x", [np.nan, -np.inf, -200.0])
def test_r01_masked_slots_hold_anything(x):
    run = lambda logprobs, old: policy_loss(logprobs, old, jnp.ones(2), loss_mask=jnp.array([True, False])).loss
    loss, gradient = jax.value_and_grad(run)(jnp.zeros(2), jnp.array([0.0, x]))
    assert loss == -1 and gradient.tolist() == [-1, 0]
    assert jnp.isnan(run(jnp.array([jnp.nan, 0.0]), jnp.zeros(2)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_r03_ratios_are_bounded(objective, level, advantage):
    for log_ratio in (200.0, -200.0):
        run = lambda x: (
            policy_loss(x, jnp.zeros(3), jnp.full(3, advantage), objective=OBJECTIVES[objective], level=level).loss
        )
        loss, gradient = jax.value_and_grad(run)(jnp.full(3, log_ratio))
        assert jnp.isfinite(loss) and jnp.isfinite(gradient).all()


@pytest.mark.parametrize("d, expected", [(0.5, (-0.5, 0.125, 0.148721)), (-0.5, (0.5, 0.125, 0.106531))])
def test_r10_kl_estimates(d, expected):
    of = lambda k: lambda x: losses.kl_penalty(x, jnp.full((), d), estimator=k)
    assert [float(of(k)(jnp.zeros(()))) for k in ("k1", "k2", "k3")] == pytest.approx(expected, abs=1e-6)
    assert float(jax.grad(of("k3"))(jnp.zeros(()))) == pytest.approx(1 - np.exp(d), abs=1e-6)
    assert float(jax.grad(of("k2"))(jnp.zeros(()))) == pytest.approx(-d, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_corrected_kl_has_the_gradient_of_the_divergence(estimator):
    """Over all actions, in the mean under the policy that sampled: exactly; k3 as it is has the reverse one's."""
    z, ref, old = (jnp.log(jnp.array(p)) for p in ([0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.4, 0.4, 0.2]))
    logp = jax.nn.log_softmax
    penalty = partial(losses.kl_penalty, estimator=estimator)
    divergence = lambda z: jnp.sum(jnp.exp(logp(z)) * (logp(z) - ref))
    corrected = lambda z: jnp.sum(jnp.exp(old) * penalty(logp(z), ref, old_logprobs=old))
    assert_close(corrected(z), divergence(z), 1e-6)
    assert_close(jax.grad(corrected)(z), jax.grad(divergence)(z), 1e-6)
    on_policy = lambda z: jnp.sum(jnp.exp(z) * penalty(logp(z), ref))
    stopped = jax.grad(lambda z, p: jnp.sum(p * penalty(logp(z), ref)))(z, jnp.exp(z))
    assert_close(on_policy(z), divergence(z), 1e-6)
    assert np.abs(stopped - jax.grad(divergence)(z)).max() > 0.05


def test_clamps_of_kl():
    x, ref = jnp.zeros(3), jnp.array([50.0, 3.0, jnp.nan])
    mask = jnp.array([True, True, False])
    found = losses.kl_penalty(x, ref, loss_mask=mask)
    assert_close(found, [np.exp(20.0) - 1 - 50, np.exp(3.0) - 4, 0.0], 1e-6)
    assert_close(losses.kl_penalty(x, ref, loss_mask=mask, log_ratio_bound=1.0)[1], np.exp(1.0) - 4, 1e-6)
    clamped = lambda x: losses.kl_penalty(x, ref, loss_mask=mask, max_penalty=10.0)
    assert clamped(x).tolist() == [10, 10, 0]
    assert jax.grad(lambda x: clamped(x).sum())(x).tolist() == [0, 0, 0]


def test_r20_dual_clip():
    x, a = jnp.log(jnp.array([10.0, 10.0, 0.5])), jnp.array([-1.0, 1.0, -1.0])
    assert_close(losses.ppo_clip(x, a).losses, [10, -1.2, 0.8], 1e-6)
    found = losses.ppo_clip(x, a, dual_clip=3.0)
    assert_close(found.losses, [3, -1.2, 0.8], 1e-6)
    assert found.clipped.tolist() == [1, 1, -1]
    gradient = jax.grad(lambda x: losses.ppo_clip(x, a, dual_clip=3.0).losses.sum())(x)
    assert gradient.tolist() == [0, 0, 0]
    for other in ("cispo", "sapo", "reinforce"):
        with pytest.raises(TypeError, match="dual_clip"):
            OBJECTIVES[other](x, a, dual_clip=3.0)


def test_clip_bounds_are_asymmetric():
    x, a = jnp.log(jnp.array([1.27, 1.29, 0.79, 0.81])), jnp.array([1.0, 1, -1, -1])
    assert_close(losses.ppo_clip(x, a, clip_low=0.2, clip_high=0.28).losses, [-1.27, -1.28, 0.8, 0.81], 1e-6)


# Sampler and trainer.


R17 = jnp.log(jnp.array([0.606531, 12.182494, 0.818731]))


def test_r17_metrics_are_of_both_ratios():
    zeros = jnp.zeros(3)
    tis = losses.truncated_importance(R17, zeros, max_weight=5.0)
    icepop = losses.masked_importance(R17, zeros, min_weight=0.5, max_weight=5.0)
    of = partial(losses.mismatch_metrics, R17, zeros)
    assert float(of(tis)["raw_ratio"]) == pytest.approx(4.535919, rel=1e-5)
    assert float(of(tis)["ratio"]) == pytest.approx(2.141754, rel=1e-5)
    assert float(of(icepop)["ratio"]) == pytest.approx(0.475087, rel=1e-5)
    assert float(of(icepop)["rejected_fraction"]) == pytest.approx(1 / 3)
    assert float(of(tis)["logprob_difference"]) == pytest.approx(np.abs(R17).mean(), rel=1e-5)
    w = np.array([0.606531, 5, 0.818731])
    assert float(of(tis)["effective_sample_size"]) == pytest.approx(w.sum() ** 2 / (3 * (w**2).sum()), rel=1e-5)
    assert float(losses.effective_sample_size(tis.weights)) == pytest.approx(
        w.sum() ** 2 / (3 * (w**2).sum()), rel=1e-5
    )


def test_n05_rejected_tokens_are_not_in_the_mean():
    x = jnp.array([0.1, -1.5, 0.8, -10, 0.3])
    found = losses.masked_importance(x, jnp.zeros(5), min_weight=0.5, max_weight=2.0)
    assert found.accepted.tolist() == [True, False, False, False, True]
    assert float(aggregate(found.weights, loss_mask=found.accepted)) == pytest.approx(1.227515, rel=1e-6)
    assert float(aggregate(found.weights)) == pytest.approx(0.491006, rel=1e-6)


@pytest.mark.parametrize("importance", [losses.truncated_importance, losses.masked_importance])
def test_r16_weights_have_no_gradient(importance):
    def loss(x):
        w = importance(x, jnp.array([0.1, 0.2, -0.1])).weights
        return policy_loss(x, jnp.zeros(3), jnp.ones(3), weights=w).loss

    x = jnp.array([0.05, 0.1, -0.1])
    w = importance(x, jnp.array([0.1, 0.2, -0.1])).weights
    assert_close(jax.grad(loss)(x), -w * jnp.exp(x) / 3, 1e-6)


@pytest.mark.parametrize("level, of_sequence", [("sequence", np.sum), ("sequence-mean", np.mean)])
def test_weights_of_sequences(level, of_sequence):
    ragged = Ragged()
    _, old, *_, mask = ragged.arrays("packed")
    sampler = jnp.zeros_like(old)
    sequences = Sequences(jnp.asarray(ragged.segment_ids()), len(LENGTHS))
    found = losses.truncated_importance(old, sampler, level=level, max_weight=3.0, loss_mask=mask, sequences=sequences)
    raw = [np.exp(of_sequence(o[m])) if m.any() else 0 for o, m in zip(ragged.old, ragged.mask)]
    expected = ragged.packed([np.where(m, min(r, 3.0), 0) for r, m in zip(raw, ragged.mask)], 0.0)
    assert_close(found.weights, expected, TOLERANCE)


def test_a_nan_of_the_sampler_stays_visible():
    found = losses.masked_importance(jnp.array([jnp.nan, jnp.nan]), jnp.zeros(2), loss_mask=jnp.array([True, False]))
    assert jnp.isnan(found.weights[0]) and found.weights[1] == 0 and found.accepted.tolist() == [True, False]


# Advantages.


def test_r14_group_advantages():
    rewards = jnp.array([[1.0, 1, 1, 1], [1, 0, 0, 0]])
    by = lambda ddof, eps: losses.group_advantages(rewards, ddof=ddof, eps=eps)
    assert (by(1, 1e-4)[0] == 0).all() and (by(0, 0.0)[0] == 0).all()
    assert_close(by(1, 1e-4)[1], [1.4997, *[-0.4999] * 3], 1e-5)
    assert_close(by(0, 1e-4)[1], [1.731651, *[-0.577217] * 3], 1e-5)
    assert_close(losses.centred_advantages(rewards)[1], [0.75, -0.25, -0.25, -0.25], 1e-6)
    assert_close(losses.leave_one_out_advantages(rewards)[1], [1, -1 / 3, -1 / 3, -1 / 3], 1e-6)


def test_advantages_keep_their_digits():
    """A large offset, and equal rewards whose mean is not a float32."""
    rewards = np.array([1e6, 1e6 + 1, 1e6 + 3], np.float32)
    expected = (rewards - rewards.astype(np.float64).mean()) / np.std(rewards.astype(np.float64), ddof=1)
    assert_close(losses.group_advantages(jnp.asarray(rewards), eps=0.0), expected, 1e-6)
    assert (losses.group_advantages(jnp.full((1, 7), 0.1), eps=1e-9) == 0).all()


def test_groups_of_several_sizes():
    rewards = jnp.array([[jnp.nan, 3.0, 5.0, jnp.nan], [1, 2, 3, 4], [7.0, jnp.nan, jnp.nan, jnp.nan]])
    where = ~jnp.isnan(rewards)
    for f in (losses.group_advantages, losses.centred_advantages, losses.leave_one_out_advantages):
        found = f(rewards, where=where)
        assert_close(found[0], [0, *f(jnp.array([3.0, 5.0])), 0], 1e-6)
        assert_close(found[1], f(rewards[1]), 1e-6)
        assert (found[2] == 0).all()


# The entropy gate.


def test_entropy_coef_is_gated_as_in_the_ops():
    x = jnp.array([0.1, 0.2])
    run = lambda coef: lambda e: policy_loss(x, x, jnp.ones(2), entropy=e, entropy_coef=coef).loss
    assert jax.grad(run(0.0))(x).tolist() == [0, 0] and jax.grad(run(None))(x).tolist() == [0, 0]
    assert jax.grad(run(0.5))(x).tolist() == [-0.25, -0.25]
    program = lambda coef: str(jax.make_jaxpr(jax.grad(run(coef)))(x))
    assert program(0.0).count("mul") < program(0.5).count("mul")
    schedule = jax.jit(lambda coef: jax.grad(run(coef))(x))
    assert schedule(0.0).tolist() == [0, 0] and schedule(0.5).tolist() == [-0.25, -0.25]
    assert schedule._cache_size() == 1
    with pytest.raises(ValueError, match="`entropy`"):
        policy_loss(x, x, x, entropy_coef=0.1)


# Metrics.


@pytest.mark.parametrize("mesh", ["none", "2x2x2"])
def test_metrics_are_of_the_tokens_that_count(mesh):
    case, ragged = MESHES[mesh], Ragged(3)
    m = case.make()
    logprobs, old, advantages, _, entropy, mask = ragged.arrays("rows")
    sequences = Sequences(axes=case.axes, mesh=m)

    @jax.jit
    def run(logprobs, old, advantages, entropy, mask):
        out = policy_loss(logprobs, old, advantages, loss_mask=mask, entropy=entropy,
                          aggregation=Aggregation(sequences=sequences))  # fmt: skip
        return losses.policy_metrics(out.tokens, sequences=sequences)

    found = {k: float(v) for k, v in run(logprobs, old, advantages, entropy, mask).items()}
    keep = np.asarray(mask)
    log_ratio, e = np.asarray(logprobs - old)[keep].astype(np.float64), np.asarray(entropy)[keep].astype(np.float64)
    ratio, positive = np.exp(log_ratio), np.asarray(advantages)[keep] > 0
    expected = {
        "num_tokens": keep.sum(),
        "clip_fraction_low": np.mean((ratio < 0.8) & ~positive),
        "clip_fraction_high": np.mean((ratio > 1.2) & positive),
        "approx_kl": np.mean(ratio - 1 - log_ratio),
        "approx_kl_k1": np.mean(-log_ratio),
        "ratio_mean": ratio.mean(),
        "ratio_min": ratio.min(),
        "ratio_max": ratio.max(),
        "entropy": e.mean(),
        **{f"entropy_q{q}": np.quantile(e, q / 100) for q in (10, 50, 90)},
    }
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert 0 < found["clip_fraction_low"] < 0.5 and 0 < found["clip_fraction_high"] < 0.5


# What is refused.


X = jnp.zeros((2, 3))


@pytest.mark.parametrize("call, error, message", [
    (lambda: policy_loss(X, X, jnp.zeros((2, 1))), ValueError, "`advantages` must have the shape of logprobs"),
    (lambda: policy_loss(X, jnp.zeros(3), X), ValueError, "`old_logprobs` must have the shape"),
    (lambda: policy_loss(X, X, X, weights=jnp.zeros(2)), ValueError, "`weights`"),
    (lambda: policy_loss(X, X, X, loss_mask=jnp.ones((2, 3))), TypeError, "`loss_mask` must be bool"),
    (lambda: policy_loss(X, X, X, level="row"), ValueError, "`level`"),
    (lambda: policy_loss(X, X, X.astype(int)), TypeError, "`advantages` must be floating point"),
    (lambda: Aggregation("mean"), ValueError, "`mode`"),
    (lambda: Aggregation("seq-mean-token-sum-norm"), ValueError, "`max_length`"),
    (lambda: Aggregation("token-mean", max_length=3), ValueError, "`max_length`"),
    (lambda: Sequences(segment_ids=jnp.ones((2, 3), int)), ValueError, "`num_segments`"),
    (lambda: losses.kl_penalty(X, X, estimator="k4"), ValueError, "`estimator`"),
    (lambda: losses.kl_penalty(X, X[0]), ValueError, "`ref_logprobs`"),
    (lambda: losses.ppo_clip(X, X, clip_low=1.5), ValueError, "`clip_low"),
    (lambda: losses.ppo_clip(X, X, dual_clip=0.5), ValueError, "`dual_clip`"),
    (lambda: losses.cispo(X, X, min_ratio=5.0), ValueError, "min_ratio"),
    (lambda: losses.sapo(X, X, temperature_negative=0.0), ValueError, "temperature_"),
    (lambda: losses.truncated_importance(X, X, max_weight=0.0), ValueError, "max_weight"),
    (lambda: losses.masked_importance(X, X, level="row"), ValueError, "`level`"),
    (lambda: losses.group_advantages(X, ddof=2), ValueError, "`ddof`"),
    (lambda: losses.group_advantages(X, where=X), TypeError, "`where` must be bool"),
    (lambda: losses.group_advantages(jnp.zeros((2, 0))), ValueError, "`rewards`"),
    (lambda: aggregate(X, Aggregation(sequences=Sequences(jnp.ones(3, int), 1), mode="seq-mean-token-sum")),
     ValueError, "segment_ids"),
])  # fmt: skip
def test_errors_name_the_argument(call, error, message, our_own_errors):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name", [n for n, f in vars(losses).items() if n.islower() and callable(f)])
def test_docstring_example_runs(name):
    import doctest

    (test,) = doctest.DocTestFinder(recurse=False).find(getattr(losses, name), name, globs={**vars(losses), "jnp": jnp})
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test)
    assert not result.failed
