"""The Flax heads: against autodiff of logits that their layers' own calls form, NNX, Linen, on a mesh and off."""

import doctest

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checks import assert_close, MESHES
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxrl_logprob as jrl
from jaxrl_logprob import heads
from jaxrl_logprob.heads import LinenLogprobHead, LogprobHead


BATCH, WIDTH, VOCAB = (2, 4), 16, 24
RNG = np.random.default_rng(0)
HIDDEN = jnp.asarray(RNG.normal(size=(*BATCH, WIDTH)), jnp.float32)
TOKENS = jnp.asarray(RNG.integers(0, 20, BATCH), jnp.int32)
TARGETS = jnp.asarray(RNG.integers(0, 20, BATCH), jnp.int32).at[0, 1].set(-100)
IDS = jnp.asarray(RNG.integers(0, 20, (*BATCH, 3)), jnp.int32)
MASK = jnp.ones(BATCH, bool).at[1, 2].set(False)
WEIGHTS = jnp.asarray(RNG.normal(size=(2, *BATCH)), jnp.float32)
pytestmark = pytest.mark.usefixtures("quick_compilation")


def linear(use_bias: bool = True, **options) -> nnx.Linear:
    init = nnx.initializers.normal(1.0)
    return nnx.Linear(WIDTH, VOCAB, use_bias=use_bias, bias_init=init, rngs=nnx.Rngs(0), **options)


def with_adapter(layer, rank: int = 3, **options) -> LogprobHead:
    """A head whose adapter does something: b is not zero."""
    head = LogprobHead(layer, lora_rank=rank, rngs=nnx.Rngs(1), **options)
    head.b.set_value(jax.random.normal(jax.random.key(2), head.b.shape, head.b.dtype))
    return head


class Tied(nnx.Module):
    """An embedding looked up, and again as the head."""

    def __init__(self, **options):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=nnx.Rngs(0))
        self.head = LogprobHead(self.embed, **options)


def weighted(out: jrl.LogprobsAndEntropy) -> jax.Array:
    return jnp.sum(WEIGHTS[0] * out.logprobs + WEIGHTS[1] * out.entropy)


def plain(logits, *, softcap=None, vocab_size=VOCAB, temperature=1.0) -> jrl.LogprobsAndEntropy:
    """Of untransformed logits, by autodiff, with the tokens of TARGETS and MASK."""
    transform = jrl.LogitTransform(temperature, softcap, vocab_size)
    return jrl.reference.token_logprobs_and_entropy(logits, TARGETS, loss_mask=MASK, transform=transform)


def check_gradients(ours, theirs, *arguments):
    """Two losses of the same arguments, in value and gradients."""
    argnums = tuple(range(len(arguments)))
    got, want = (jax.jit(jax.value_and_grad(loss, argnums))(*arguments) for loss in (ours, theirs))
    for actual, expected in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(actual, expected, 2e-5)


def rebuilt(layer):
    """The layer as a function of its parameters, and these."""
    graph, state = nnx.split(layer)
    return lambda state: nnx.merge(graph, state), state


OPTIONS = dict(logit_softcap=2.0, vocab_size=20, temperature=0.7)
PLAIN = dict(softcap=2.0, vocab_size=20, temperature=0.7)


@pytest.mark.parametrize("use_bias, options, expected", [(False, {}, {}), (True, OPTIONS, PLAIN)])
@pytest.mark.parametrize("mesh", ["none", "2x2x2"])
def test_linear_is_its_own_logits(mesh, use_bias, options, expected):
    build, state = rebuilt(linear(use_bias))
    case = MESHES[mesh]
    ours = lambda state, x: weighted(
        LogprobHead(build(state), axes=case.axes, mesh=case.make(), **options)(x, TARGETS, loss_mask=MASK)
    )
    check_gradients(ours, lambda state, x: weighted(plain(build(state)(x), **expected)), state, HIDDEN)


@pytest.mark.parametrize("mesh", ["none", "2x2x2"])
def test_tied_embedding_gets_both_gradients(mesh):
    case = MESHES[mesh]
    model = Tied(axes=case.axes, mesh=case.make())
    assert len(jax.tree.leaves(nnx.state(model))) == 1 and model.head.layer.embedding is model.embed.embedding
    loss = lambda model: weighted(model.head(model.embed(TOKENS), TARGETS, loss_mask=MASK))
    (gradient,) = jax.tree.leaves(nnx.jit(nnx.grad(loss))(model))
    embedding = model.embed.embedding[...]
    part = lambda looked_up, unembed: weighted(plain(looked_up[TOKENS] @ unembed.T))
    lookup, head = map(np.asarray, jax.jit(jax.grad(part, (0, 1)))(embedding, embedding))
    assert np.abs(lookup).max() > 0.1 and np.abs(head).max() > 0.1
    assert_close(gradient, lookup + head, 2e-5)


@pytest.mark.parametrize("mesh", ["none", "2x2x2"])
def test_adapter_is_the_merged_matrix(mesh):
    case, layer = MESHES[mesh], linear()
    head = with_adapter(layer, lora_alpha=6.0, axes=case.axes, mesh=case.make())
    a, b = head.a[...], head.b[...]
    graph, adapter, rest = nnx.split(head, nnx.LoRAParam, ...)
    assert len(jax.tree.leaves(adapter)) == 2
    ours = lambda a, b: weighted(nnx.merge(graph, replaced(adapter, a, b), rest)(HIDDEN, TARGETS, loss_mask=MASK))
    merged = lambda a, b: HIDDEN @ (layer.kernel[...] + 2.0 * (a @ b)) + layer.bias[...][None, None]
    check_gradients(ours, lambda a, b: weighted(plain(merged(a, b))), a, b)
    assert_close(head.logits(HIDDEN), merged(a, b), 1e-5)


def replaced(adapter: nnx.State, a: jax.Array, b: jax.Array) -> nnx.State:
    return nnx.from_flat_state(
        [(path, p.replace({"a": a, "b": b}[path[-1]])) for path, p in nnx.to_flat_state(adapter)]
    )


def test_new_adapter_adds_nothing_and_trains_with_a_frozen_layer():
    layer = linear()
    head = LogprobHead(layer, lora_rank=2, rngs=nnx.Rngs(1))
    assert_close(head.logits(HIDDEN), layer(HIDDEN), 1e-5)
    assert jnp.abs(head.a[...]).min() > 0
    optimizer = nnx.Optimizer(head, optax.adam(0.1), wrt=nnx.LoRAParam)
    before = jax.tree.map(jnp.copy, nnx.state(layer))

    @nnx.jit
    def step(head, optimizer):
        loss = lambda head: -head.logprobs(HIDDEN, TARGETS).sum()
        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(head)
        optimizer.update(head, grads)
        return value

    with jax.numpy_dtype_promotion("standard"):
        losses = [float(step(head, optimizer)) for _ in range(5)]
    assert losses[-1] < losses[0] - 1
    assert all(map(jnp.array_equal, jax.tree.leaves(before), jax.tree.leaves(nnx.state(layer))))


def test_train_step_of_a_tied_model_on_a_mesh():
    """jit, nnx.value_and_grad and optax, with parameters split; the same losses as without a mesh."""
    case = MESHES["2x2x2"]
    mesh = case.make()

    @nnx.jit
    def step(model, optimizer, temperature):
        loss = lambda model: -model.head(model.embed(TOKENS), TARGETS, temperature=temperature).logprobs.mean()
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    def losses(model):
        optimizer = nnx.Optimizer(model, optax.adam(0.03), wrt=nnx.Param)
        with jax.numpy_dtype_promotion("standard"):
            return [float(step(model, optimizer, jnp.float32(t))) for t in (1.0, 0.8, 0.8)]

    whole = losses(Tied())
    axes = jrl.MeshAxes(tokens=("data", "context"), vocab="vocab", features=("data", "context"))
    with jax.set_mesh(mesh):
        model = Tied(axes=axes)
        placed = jax.device_put(model.embed.embedding[...], NamedSharding(mesh, P("vocab", ("data", "context"))))
        model.embed.embedding.set_value(placed)
        split = losses(model)
    assert split == pytest.approx(whole, abs=1e-5) and split[2] < split[1]


def test_methods_are_of_the_logits():
    """At a temperature of the call, and at the head's own."""

    @jax.jit
    def answers(head, temperature):
        now = dict(temperature=temperature)
        first = head.logprobs(HIDDEN, TARGETS, **now), head.entropy(HIDDEN, **now), head.gather(HIDDEN, IDS, **now)
        return *first, head(HIDDEN, TARGETS, **now), head.logprobs(HIDDEN, TARGETS), head.logits(HIDDEN)

    logprobs, entropy, gathered, out, own, logits = answers(with_adapter(linear(), **OPTIONS), 1.5)
    assert logits.dtype == jnp.float32 and jnp.all(logits[..., 20:] == -jnp.inf) and jnp.abs(logits[..., :20]).max() < 2
    logits, targets = np.asarray(logits, np.float64), np.asarray(TARGETS)
    counted = targets != -100
    softmax = lambda t: (e := np.exp(logits / t)) / e.sum(-1, keepdims=True)
    of = lambda t, ids: np.log(np.take_along_axis(softmax(t), ids, -1))
    chosen = lambda t: np.where(counted, of(t, np.where(counted, targets, 0)[..., None])[..., 0], 0)
    p = softmax(1.5)[..., :20]
    for actual, expected in (
        (logprobs, chosen(1.5)),
        (own, chosen(0.7)),
        (gathered, of(1.5, np.asarray(IDS))),
        (entropy, -(p * np.log(p)).sum(-1)),
        (out.logprobs, logprobs),
        (out.entropy, np.where(counted, entropy, 0)),
    ):
        assert_close(actual, expected, 1e-5)


def test_linen_is_nnx():
    head = with_adapter(linear(), lora_alpha=6.0, **OPTIONS)
    linen = LinenLogprobHead(VOCAB, lora_rank=3, lora_alpha=6.0, **OPTIONS)
    params = dict(kernel=head.layer.kernel[...], bias=head.layer.bias[...], a=head.a[...], b=head.b[...])
    initial = jax.eval_shape(linen.init, jax.random.key(0), HIDDEN, TARGETS)["params"]
    assert jax.tree.map(jnp.shape, initial) == {name: value.shape for name, value in params.items()}

    @jax.jit
    def both(params, head):
        now = dict(loss_mask=MASK, temperature=0.5)
        methods = dict(logprobs=((TARGETS,), now), entropy=((), now), gather=((IDS,), now), logits=((), {}))
        methods["__call__"] = (TARGETS,), dict(entropy_coef=0.0, **now)
        ask = lambda name, args, options: linen.apply({"params": params}, HIDDEN, *args, method=name, **options)
        return {
            name: (ask(name, *given), getattr(head, name)(HIDDEN, *given[0], **given[1]))
            for name, given in methods.items()
        }

    for name, (got, expected) in both(params, head).items():
        for actual, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert_close(actual, wanted, 1e-6, name)


def test_linen_head_takes_a_dense_checkpoint():
    dense = nn.Dense(VOCAB, bias_init=nn.initializers.normal(1.0))
    variables = dense.init(jax.random.key(0), HIDDEN)
    assert_close(
        LinenLogprobHead(VOCAB).apply(variables, HIDDEN, method="logits"), dense.apply(variables, HIDDEN), 1e-5
    )


class LinenTied(nn.Module):
    def setup(self):
        self.embed, self.head = nn.Embed(VOCAB, WIDTH), LinenLogprobHead()

    def __call__(self, tokens):
        return self.head(self.embed(tokens), TARGETS, embedding=self.embed.embedding, loss_mask=MASK)


def test_linen_tied_embedding_gets_both_gradients():
    variables = jax.jit(LinenTied().init)(jax.random.key(0), TOKENS)
    embedding = variables["params"]["embed"]["embedding"]
    assert len(jax.tree.leaves(variables)) == 1
    tree = lambda e: {"params": {"embed": {"embedding": e}}}
    ours = lambda e: weighted(LinenTied().apply(tree(e), TOKENS))
    check_gradients(ours, lambda e: weighted(plain(e[TOKENS] @ e.T)), embedding)


def test_bfloat16_is_the_op_of_cast_operands():
    """`dtype` casts as the layer's own call does; the parameters and their gradients stay float32."""
    layer, module = linear(dtype=jnp.bfloat16), LinenLogprobHead(VOCAB, dtype=jnp.bfloat16)

    @jax.jit
    def scores(layer):
        kernel, bias = layer.kernel[...], layer.bias[...]
        cast = lambda x: x.astype(jnp.bfloat16)
        expected = jrl.linear_token_logprobs(cast(HIDDEN), cast(kernel), TARGETS, bias=cast(bias))
        params = {"params": dict(kernel=kernel, bias=bias)}
        linen = module.apply(params, HIDDEN, TARGETS, method="logprobs")
        loss = lambda layer: LogprobHead(layer).logprobs(HIDDEN, TARGETS).sum()
        with jax.numpy_dtype_promotion("standard"):
            gradient = jax.grad(loss)(layer)
        head = LogprobHead(layer)
        return expected, (linen, head.logprobs(HIDDEN, TARGETS)), gradient, head.logits(HIDDEN), layer(HIDDEN)

    expected, got, gradient, logits, rounded = scores(layer)
    assert all(g.dtype == jnp.float32 and jnp.array_equal(g, expected) for g in got)
    assert {g.dtype for g in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.float32)}
    assert logits.dtype == jnp.float32 and rounded.dtype == jnp.bfloat16
    assert_close(logits, rounded.astype(jnp.float32), 2e-2)


@pytest.mark.parametrize("columns", [128, 256])
def test_blocks_are_those_asked_for(columns):
    wide = nnx.Linear(HIDDEN.shape[-1], 512, rngs=nnx.Rngs(0))
    head = LogprobHead(wide, chunks=jrl.Chunks(vocab_chunk=columns))
    program = str(jax.make_jaxpr(lambda x: head.logprobs(x, TARGETS))(HIDDEN))
    assert [f"f32[{HIDDEN.shape[-1]},{n}]" in program for n in (128, 256)] == [columns == 128, columns == 256]


def test_bfloat16_parameters_need_no_dtype():
    head = LogprobHead(linear(param_dtype=jnp.bfloat16, use_bias=False))
    expected = jrl.linear_token_logprobs(HIDDEN, head.layer.kernel[...], TARGETS)
    assert jnp.array_equal(head.logprobs(HIDDEN, TARGETS), expected)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: LogprobHead(HIDDEN), TypeError, "`layer` must be an nnx.Linear or an nnx.Embed, got .*Array"),
        (lambda: LogprobHead(nnx.LoRALinear(4, 4, lora_rank=1, rngs=nnx.Rngs(0))), TypeError, "lora_rank=..."),
        (lambda: LogprobHead(linear(precision="highest")), ValueError, "`layer.precision` must be the default"),
        (
            lambda: LogprobHead(linear(preferred_element_type=jnp.bfloat16)),
            ValueError,
            "preferred_element_type` must be",
        ),
        (
            lambda: LinenLogprobHead(0).init(jax.random.key(0), HIDDEN, TARGETS),
            ValueError,
            "`features` must be at least 1",
        ),
        (lambda: LogprobHead(linear(), lora_rank=2), ValueError, "`rngs` must be given where lora_rank is, got None"),
        (lambda: LogprobHead(linear(), lora_alpha=2.0), ValueError, "`lora_rank` must be given where lora_alpha is"),
        (lambda: LogprobHead(linear(), lora_rank=0, rngs=nnx.Rngs(0)), ValueError, "`lora_rank` must be at least 1"),
        (lambda: LogprobHead(linear(), lora_rank=1.0, rngs=nnx.Rngs(0)), TypeError, "`lora_rank` must be a Python int"),
        (lambda: LogprobHead(linear(), logit_softcap=-1.0), ValueError, "`logit_softcap` must be positive"),
        (
            lambda: LogprobHead(linear(), vocab_size=25).logits(HIDDEN),
            ValueError,
            "`vocab_size` must be at most the 24",
        ),
        (lambda: LogprobHead(linear()).logits(HIDDEN[..., 1:]), ValueError, r"`lm_head` must have shape \(15, V\)"),
        (lambda: LogprobHead(linear())(HIDDEN, TARGETS[:1]), ValueError, r"`targets` must have shape \(2, 4\)"),
        (lambda: LogprobHead(linear())(HIDDEN, TARGETS, temperature=0.0), ValueError, "`temperature` must be positive"),
        (lambda: LogprobHead(linear()).logits(TOKENS), TypeError, "`hidden_states` must be floating point"),
        (
            lambda: LinenLogprobHead().apply({}, HIDDEN, TARGETS),
            ValueError,
            "`embedding` must be given where the head has no `features`, got None",
        ),
        (
            lambda: LinenLogprobHead(VOCAB).apply({}, HIDDEN, TARGETS, embedding=HIDDEN[0]),
            ValueError,
            r"`embedding` must be left out where the head has `features`, 24, got an array of shape \(4, 16\)",
        ),
    ],
)
def test_wrong_use(make, error, message, our_own_errors):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("name", ["LogprobHead", "LinenLogprobHead"])
def test_docstring_example_runs(name):
    (test,) = doctest.DocTestFinder(recurse=False).find(getattr(heads, name), name, globs={**vars(heads)})
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test)
    assert result.attempted and not result.failed
