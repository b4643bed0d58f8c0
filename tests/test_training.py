"""The actor step against autodiff of the loss written out sequence by sequence; meshes, micro-batches, compilations."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import llama
import numpy as np
import optax
import pytest
from checks import assert_close, ordinarily
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxrl_logprob as jrl
from jaxrl_logprob import losses, packing
from jaxrl_logprob.heads import LinenLogprobHead
from jaxrl_logprob.training import ActorBatch, ActorLoss, make_actor_step


pytestmark = pytest.mark.usefixtures("quick_compilation")
V, D = 48, 16
AXES = jrl.MeshAxes(tokens=("data", "context"), vocab="vocab")
MESHES = {"1x1x1": (1, 1, 1), "1x1x8": (1, 1, 8), "1x2x4": (1, 2, 4), "2x2x2": (2, 2, 2)}
LENGTHS = [9, 4, 12, 7, 3, 11, 5, 1, 8]
PROMPTS = [3, 2, 5, 1, 3, 4, 2, 1, 4]
SGD = optax.sgd(1.0)


def make_mesh(name):
    return jrl.make_mesh(dict(zip(("data", "context", "vocab"), MESHES[name])))


def place(params, mesh):
    specs = {"head": P(None, "vocab")}
    return {name: jax.device_put(np.array(a), NamedSharding(mesh, specs.get(name, P()))) for name, a in params.items()}


def make_params(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"embed": (V, D), "place": (16, D), "mix": (D, D), "head": (D, V)}
    return {name: rng.normal(size=shape, scale=0.5).astype(np.float32) for name, shape in shapes.items()}


def hidden_states(params, tokens, positions, segment_ids):
    return jnp.tanh((params["embed"][tokens] + params["place"][positions]) @ params["mix"])


class Case:
    """Nine samples with what is known of each: advantages, old and reference log-probabilities of its response."""

    def __init__(self, seed=0, lengths=LENGTHS, prompts=PROMPTS):
        rng = np.random.default_rng(seed)
        self.prompts = prompts
        self.sequences = [rng.integers(0, V, n) for n in lengths]
        self.advantages = rng.normal(size=len(lengths)).astype(np.float32)
        # Of every token: of the target at t - 1, where it stands at t.
        self.old, self.ref, self.weights = (
            [np.asarray(rng.normal(size=n, scale=0.3) + by, np.float32) for n in lengths] for by in (-4, -4, 1)
        )

    def batch(self, mesh, accumulation, rows=2, max_tokens=16, optional=()):
        packed = packing.pack_sequences(self.sequences, self.prompts, max_tokens=max_tokens, rows=rows, multiple=2)
        stacked = packing.stack_micro_batches(packed, accumulation)
        batch = ActorBatch.of(stacked, self.advantages, mesh, AXES)
        spec = NamedSharding(mesh, P(None, "data", "context"))
        shifted = lambda values: jax.device_put(
            np.roll(packing.place_values(stacked, values), -1, axis=-1) * np.asarray(batch.loss_mask), spec
        )
        given = dict(old_logprobs=self.old, ref_logprobs=self.ref, weights=self.weights)
        return batch._replace(**{n: shifted(v) for n, v in given.items() if n == "old_logprobs" or n in optional})

    def loss(self, params, *, entropy_coef, kl_coef, weighted=False):
        """GRPO as written: the mean over responses of the means over their tokens."""
        total, count = 0.0, 0
        for s, (tokens, prompt) in enumerate(zip(self.sequences, self.prompts)):
            hidden = jnp.tanh((params["embed"][tokens] + params["place"][: len(tokens)]) @ params["mix"])
            logp = jax.nn.log_softmax(hidden @ params["head"])[prompt - 1 : -1]
            if not len(logp):
                continue
            logprobs = jnp.take_along_axis(logp, tokens[prompt:, None], axis=1)[:, 0]
            ratio, advantage = jnp.exp(logprobs - self.old[s][prompt:]), self.advantages[s]
            objective = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
            if weighted:
                objective *= self.weights[s][prompt:]
            d = self.ref[s][prompt:] - logprobs
            entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
            total += jnp.mean(-objective - entropy_coef * entropy + kl_coef * (jnp.exp(d) - 1 - d))
            count += 1
        return total / count


def step_of(params, mesh, accumulation, optimizer=SGD, **loss):
    return make_actor_step(
        place(params, mesh), hidden_states, head_of, optimizer, axes=AXES, accumulation=accumulation,
        loss=ActorLoss(**loss),
    )  # fmt: skip


def head_of(params):
    def score(hidden, targets, **options):
        return jrl.linear_token_logprobs_and_entropy(hidden, params["head"], targets, axes=AXES, **options)

    return score


def moved(before, after):
    """The gradient, of SGD with step size 1."""
    return jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), before, after)


@pytest.mark.parametrize("accumulation, rows", ordinarily((5, 2), (1, 8), of=[(5, 2), (1, 8), (2, 6), (9, 2)]))
@pytest.mark.parametrize("mesh", ordinarily("2x2x2", of=MESHES))
def test_update_is_the_gradient_of_the_loss_as_written(mesh, accumulation, rows):
    """Packed, in micro-batches, some of them empty: entropy, KL and importance weights too."""
    case, params, m = Case(), make_params(), make_mesh(mesh)
    options = dict(entropy_coef=0.1, kl_coef=0.2)
    with jax.set_mesh(m):
        step = step_of(params, m, accumulation, **options)
        batch = case.batch(m, accumulation, rows, optional=("ref_logprobs", "weights"))
        actor, metrics = step.update(step.init(place(params, m)), batch)
    loss = functools.partial(case.loss, **options, weighted=True)
    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    assert_close(metrics["loss"], value, 1e-5)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5), moved(params, actor.params), gradients)
    assert float(metrics["num_tokens"]) == sum(LENGTHS) - sum(PROMPTS)
    assert_close(metrics["grad_norm"], optax.tree.norm(gradients), 1e-5)
    assert actor.step == 1


@pytest.mark.parametrize("recipe", ordinarily("gspo", "dr-grpo", of=losses.RECIPES))
def test_micro_batches_and_mesh_change_nothing(recipe):
    case, params = Case(), make_params()
    options = dict(recipe=losses.RECIPES[recipe], entropy_coef=0.1, max_length=12 if recipe == "dr-grpo" else None)
    found = []
    for mesh, accumulation, rows in (("1x1x1", 1, 8), ("2x2x2", 4, 2)):
        m = make_mesh(mesh)
        with jax.set_mesh(m):
            step = step_of(params, m, accumulation, **options)
            batch = case.batch(m, accumulation, rows)
            old = step.score(place(params, m), batch).logprobs + jnp.where(batch.loss_mask, 0.1, 0.0)
            batch = batch._replace(old_logprobs=old)
            actor, metrics = step.update(step.init(place(params, m)), batch)
            found.append((moved(params, actor.params), metrics))
    (one, few), (many, same) = found
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-5), many, one)
    assert {n: float(v) for n, v in same.items()} == pytest.approx({n: float(v) for n, v in few.items()}, abs=1e-5)


def test_ratio_to_scored_logprobs_is_exactly_1():
    case, params, m = Case(), make_params(), make_mesh("2x2x2")
    with jax.set_mesh(m):
        step = step_of(params, m, 4)
        batch, actor = case.batch(m, 4), step.init(place(params, m))
        batch = batch._replace(old_logprobs=step.score(actor.params, batch).logprobs)
        _, metrics = step.update(actor, batch)
    assert float(metrics["ratio_min"]) == float(metrics["ratio_max"]) == 1 and float(metrics["approx_kl"]) == 0


def test_actor_is_donated_and_stays_where_it_was():
    case, params, m = Case(), make_params(), make_mesh("2x2x2")
    with jax.set_mesh(m), jax.numpy_dtype_promotion("standard"):
        step = step_of(params, m, 4, optimizer=optax.adam(1e-3))
        batch, first = case.batch(m, 4), step.init(place(params, m))
        shardings = jax.tree.map(lambda x: x.sharding, first)
        actor, _ = step.update(first, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(first))
    assert jax.tree.map(lambda x: x.sharding, actor) == shardings
    mu = actor.opt_state[0].mu["head"]
    assert mu.addressable_shards[0].data.shape == (D, V // 2)


def test_a_run_compiles_few_times():
    """Twelve batches of other lengths; one compilation for each shape of a batch, and of these there are few."""
    params, m, rng = make_params(), make_mesh("1x2x4"), np.random.default_rng(0)
    with jax.set_mesh(m):
        step = step_of(params, m, 9)
        actor, shapes = step.init(place(params, m)), set()
        for seed in range(12):
            lengths = rng.integers(2, 17, 9)
            batch = Case(seed, lengths, [1] * 9).batch(m, 9, rows=1)
            shapes.add((batch.tokens.shape, batch.advantages.shape))
            actor, metrics = step.update(actor, batch)
            assert np.isfinite(metrics["loss"])
    assert step.update._cache_size() == len(shapes) <= 3


@pytest.mark.parametrize("recipe", ordinarily("grpo", of=losses.RECIPES))
def test_no_token_that_counts_changes_nothing(recipe):
    case, params, m = Case(), make_params(), make_mesh("1x1x1")
    max_length = 12 if recipe == "dr-grpo" else None
    with jax.set_mesh(m):
        step = step_of(params, m, 4, recipe=losses.RECIPES[recipe], entropy_coef=0.1, max_length=max_length)
        batch = case.batch(m, 4)
        batch = batch._replace(loss_mask=jnp.zeros_like(batch.loss_mask))
        actor, metrics = step.update(step.init(place(params, m)), batch)
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0
    jax.tree.map(np.testing.assert_array_equal, actor.params, params)


def test_micro_batches_without_tokens_are_not_computed():
    case, params, m = Case(), make_params(), make_mesh("1x1x1")
    seen = []

    def watched(params, tokens, positions, segment_ids):
        jax.debug.callback(lambda count: seen.append(int(count)), jnp.sum(segment_ids > 0))
        return hidden_states(params, tokens, positions, segment_ids)

    with jax.set_mesh(m):
        step = make_actor_step(place(params, m), watched, head_of, SGD, axes=AXES, accumulation=9)
        batch = case.batch(m, 9)
        step.score(place(params, m), batch).logprobs.block_until_ready()
        jax.effects_barrier()
    assert 0 < len(seen) < 9 and sum(seen) == sum(LENGTHS)


def test_entropy_coef_may_be_a_schedule():
    case, params, m = Case(), make_params(), make_mesh("1x1x1")
    schedule = optax.linear_schedule(0.4, 0.0, 2)
    with jax.set_mesh(m):
        step, batch = step_of(params, m, 4, entropy_coef=schedule), case.batch(m, 4)
        actor, coefs = step.init(place(params, m)), []
        for _ in range(3):
            before = jax.tree.map(np.asarray, actor.params)
            actor, metrics = step.update(actor, batch)
            coefs.append(float(metrics["entropy_coef"]))
            expected = jax.jit(jax.grad(functools.partial(case.loss, entropy_coef=coefs[-1], kl_coef=0.0)))(before)
            jax.tree.map(lambda a, b: assert_close(a, b, 1e-4), moved(before, actor.params), expected)
    assert coefs == pytest.approx([0.4, 0.2, 0.0]) and step.update._cache_size() == 1


def test_remat_keeps_less():
    """Of a deep model, whose gradient is the same."""
    params, m, case = (
        make_params() | {"deep": np.tile(np.eye(D, dtype=np.float32), (24, 1, 1))},
        make_mesh("1x1x1"),
        Case(),
    )

    def deep(params, *where):
        x = hidden_states(params, *where)
        for layer in params["deep"]:
            x = jnp.tanh(x @ layer)
        return x

    memory, gradients = {}, {}
    with jax.set_mesh(m):
        batch = case.batch(m, 1, rows=8)
        for remat in (None, jax.checkpoint_policies.nothing_saveable):
            step = make_actor_step(place(params, m), deep, head_of, SGD, axes=AXES, remat=remat)
            gradient = step.update.lower(step.actor, batch)
            memory[remat] = gradient.as_text().count("tanh")
            actor, _ = step.update(step.init(place(params, m)), batch)
            gradients[remat] = moved(params, actor.params)
    kept, again = memory.values()
    assert again > kept
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-6), *gradients.values())


class Linen(nn.Module):
    @nn.compact
    def __call__(self, tokens, positions, segment_ids):
        return jnp.tanh(nn.Embed(V, D)(tokens) + nn.Embed(16, D)(positions))


@pytest.mark.parametrize("flax", ["linen", "nnx"])
def test_flax_model_learns(flax):
    """Linen with a head of its own, and the example's Llama, whose head is its embedding."""
    m, case = make_mesh("2x2x2"), Case()
    with jax.set_mesh(m), jax.numpy_dtype_promotion("standard"):
        if flax == "linen":
            model, last = Linen(), LinenLogprobHead(V, axes=AXES)
            where = (jnp.zeros((2, 4), int),) * 3
            params = {
                "model": model.init(jax.random.key(0), *where),
                "head": last.init(jax.random.key(1), jnp.zeros((2, 4, D)), where[0]),
            }
            params = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(m, P())), params)
            apply = lambda params, *where: model.apply(params["model"], *where)
            make_head = lambda params: functools.partial(last.apply, params["head"])
        else:
            config = llama.LlamaConfig(V, D, 32, 1, 2, 2, 8, 1e4, 1e-5)
            params = llama.Llama(config, llama.ModelAxes("data", "context", "vocab"), nnx.Rngs(0))
            nnx.update(params, jax.device_put(nnx.state(params), llama.param_sharding(params, m)))
            apply, make_head = lambda model, *where: model(*where), lambda model: model.head()
        step = make_actor_step(params, apply, make_head, optax.adam(1e-2), axes=AXES, accumulation=4)
        actor, batch = step.init(params), case.batch(m, 4)
        batch = batch._replace(old_logprobs=step.score(actor.params, batch).logprobs)
        history = []
        for _ in range(3):
            actor, metrics = step.update(actor, batch)
            history.append({name: float(value) for name, value in metrics.items()})
    assert history[0]["ratio_max"] == history[0]["ratio_min"] == 1
    assert history[2]["loss"] < history[1]["loss"] < history[0]["loss"]


def test_errors():
    case, params, m = Case(), make_params(), make_mesh("1x1x1")
    with jax.set_mesh(m):
        batch, actor = case.batch(m, 4), step_of(params, m, 4).init(place(params, m))
        with pytest.raises(ValueError, match="accumulation=3"):
            step_of(params, m, 3).update(actor, batch)
        with pytest.raises(ValueError, match="ref_logprobs"):
            step_of(params, m, 4, kl_coef=0.1).update(actor, batch)
        with pytest.raises(ValueError, match="max_length"):
            step_of(params, m, 4, recipe=losses.RECIPES["dr-grpo"]).update(actor, batch)
