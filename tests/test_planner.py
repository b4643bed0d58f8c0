"""The planner's bytes against the compiled program's, its choices under a budget, and its command."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from checks import ordinarily
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxrl_logprob as jrl
from jaxrl_logprob.__main__ import main
from jaxrl_logprob.planner import FROM_HIDDEN_STATES, FROM_LOGITS, PLAIN, plan


def plain(hidden_states, lm_head, targets):
    logp = jax.nn.log_softmax(hidden_states @ lm_head)
    return jnp.take_along_axis(logp, targets[:, None], axis=1)[:, 0], -(jnp.exp(logp) * logp).sum(-1)


def temporaries(way, tokens, width, vocab, mesh=None, axes=jrl.MeshAxes()) -> int:
    """Of loss and gradients, compiled for CPU in float32."""

    def loss(hidden_states, lm_head, targets, weights):
        logprobs, entropy = way(hidden_states, lm_head, targets)
        return -(logprobs * weights).mean() - 0.01 * entropy.mean()

    states = (axes.tokens, axes.vocab) if axes.sequence_parallel else axes.tokens
    shapes = [((tokens, width), jnp.float32, P(states)), ((width, vocab), jnp.float32, P(axes.features, axes.vocab))]
    shapes += [((tokens,), jnp.int32, P(axes.tokens)), ((tokens,), jnp.float32, P(axes.tokens))]
    put = lambda spec: None if mesh is None else NamedSharding(mesh, spec)
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=put(spec)) for shape, dtype, spec in shapes]
    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    "shape",
    [(2048, 512, 32768), (8192, 256, 4096), (2048, 512, 50257)]
    + [pytest.param(s, marks=pytest.mark.slow) for s in [(4096, 1024, 65536), (16384, 256, 4096), (1024, 1024, 8192)]],
)
def test_bytes_from_hidden_states_are_those_of_the_compiled_program(shape):
    way = lambda h, w, y: jrl.linear_token_logprobs_and_entropy(h, w, y)
    expected = plan(*shape, dtype=jnp.float32, platform="cpu").temporaries(FROM_HIDDEN_STATES)
    assert temporaries(way, *shape) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("loop", ordinarily("tokens", of=["vocab", "tokens"]))
@pytest.mark.parametrize("chunk, columns", [(512, 256), pytest.param(128, 128, marks=pytest.mark.slow)])
def test_bytes_of_chunks_that_are_given(chunk, columns, loop):
    chunks = jrl.Chunks(chunk, columns, loop)
    way = lambda h, w, y: jrl.linear_token_logprobs_and_entropy(h, w, y, chunks=chunks)
    expected = plan(4096, 512, 8192, dtype=jnp.float32, platform="cpu", chunks=chunks).temporaries()
    assert temporaries(way, 4096, 512, 8192) == pytest.approx(expected, rel=0.15)


MESHES = {
    "tokens and vocab": ({"context": 2, "vocab": 4}, jrl.MeshAxes("context", "vocab")),
    "features": ({"context": 4, "vocab": 2}, jrl.MeshAxes("context", "vocab", features="context")),
    "sequence parallel": ({"context": 2, "vocab": 2}, jrl.MeshAxes("context", "vocab", sequence_parallel=True)),
}


@pytest.mark.parametrize(
    "where, loop",
    ordinarily(
        ("tokens and vocab", "tokens"), ("features", "vocab"), of=itertools.product(MESHES, ["vocab", "tokens"])
    ),
)
def test_bytes_on_a_mesh(where, loop):
    sizes, axes = MESHES[where]
    mesh, chunks, shape = jrl.make_mesh(sizes), jrl.Chunks(512, 256, loop), (8192, 512, 16384)
    way = lambda h, w, y: jrl.linear_token_logprobs_and_entropy(h, w, y, axes=axes, mesh=mesh, chunks=chunks)
    features = sizes["context"] if axes.features else 1
    made = plan(
        *shape, token_shards=sizes["context"], vocab_shards=sizes["vocab"], feature_shards=features,
        sequence_parallel=axes.sequence_parallel, dtype=jnp.float32, platform="cpu", chunks=chunks,
    )  # fmt: skip
    assert temporaries(way, *shape, mesh, axes) == pytest.approx(made.temporaries(), rel=0.15)


@pytest.mark.parametrize("way", [PLAIN, FROM_LOGITS])
@pytest.mark.parametrize("shape", [(2048, 64, 8192), pytest.param((4096, 256, 16384), marks=pytest.mark.slow)])
def test_bytes_of_the_other_ways(shape, way):
    program = plain if way == PLAIN else lambda h, w, y: jrl.token_logprobs_and_entropy(h @ w, y)
    expected = plan(*shape, dtype=jnp.float32, platform="cpu").temporaries(way)
    assert temporaries(program, *shape) == pytest.approx(expected, rel=0.15)


def test_the_smaller_accumulator_decides_the_loop():
    assert plan(1024, 64, 4096).blocks.vocab_outside and not plan(8192, 64, 4096).blocks.vocab_outside
    assert not plan(8192, 64, 4096, vocab_shards=2, token_shards=2).blocks.vocab_outside
    assert plan(8192, 64, 4096, token_shards=8).blocks.vocab_outside


def test_shards_divide_what_they_split():
    one, split = plan(4096, 256, 65536), plan(4096, 256, 65536, token_shards=2, vocab_shards=4)
    assert split.shared["lm_head"] * 4 == one.shared["lm_head"]
    assert split.shared["hidden_states"] * 2 == one.shared["hidden_states"]
    assert split.buffers[PLAIN].keys() == one.buffers[PLAIN].keys()
    assert split.temporaries(PLAIN) * 8 == one.temporaries(PLAIN)


def test_a_budget_makes_blocks_smaller_and_the_ops_take_them():
    free = plan(16384, 4096, 151936)
    budget = free.temporaries() - 2**22
    tight = plan(16384, 4096, 151936, budget=budget)
    assert tight.fits and tight.temporaries() <= budget and not tight.advice
    assert tight.blocks.rows * tight.blocks.columns < free.blocks.rows * free.blocks.columns
    small = plan(256, 16, 1024, budget=600_000, platform="cpu", dtype=jnp.float32)
    chunks = small.chunks
    assert small.fits and chunks != jrl.Chunks()
    way = lambda h, w, y: jrl.linear_token_logprobs_and_entropy(h, w, y, chunks=chunks)
    assert temporaries(way, 256, 16, 1024) <= 600_000


def test_a_budget_that_cannot_be_met_says_what_to_do():
    made = plan(16384, 4096, 151936, budget=2**20)
    assert not made.fits and "256 times as many token shards" in made.advice[0] and len(made.advice) == 1
    other = plan(16384, 4096, 151936, budget=2**20, chunks=jrl.Chunks(loop="tokens"))
    assert 'Chunks(loop="vocab") accumulates 256.0 MiB' in other.advice[1]
    # 3 times as many would not divide 1000 tokens.
    assert "4 times as many token shards" in plan(1000, 4096, 2048, budget=6 * 2**20).advice[0]
    barely = plan(16384, 4096, 151936, budget=4 * 16384 * 4096 + 2**20)
    assert not barely.fits and "128 x 128 are the smallest" in barely.advice[0]


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(token_shards=3), "`tokens` must divide into 3 shards"),
        (dict(token_shards=512, vocab_shards=4, sequence_parallel=True), "`tokens` must divide into 2048 shards"),
        (dict(feature_shards=3), "`width` must divide into 3 shards"),
        (dict(budget=0), "`budget` must be at least 1, got 0"),
        (dict(vocab_shards=0), "`vocab_shards` must be at least 1, got 0"),
        (dict(platform="fpga"), '`platform` must be "cpu", "tpu" or "gpu"'),
    ],
)
def test_errors_name_the_argument(options, message, our_own_errors):
    with pytest.raises(ValueError, match=message):
        plan(1024, 64, 4096, **options)


def test_a_dtype_that_is_not_floating_point(our_own_errors):
    with pytest.raises(TypeError, match="`dtype` must be floating point, got int32"):
        plan(1024, 64, 4096, dtype=jnp.int32)


def test_command_prints_a_table(capsys):
    arguments = ["plan", "--tokens", "16384", "--token-shards", "2", "--vocab-shards", "2"]
    assert main([*arguments, "--budget", "170MiB"]) == 0
    out = capsys.readouterr().out
    for text in ("plain JAX", "from logits", "from hidden states", "temporaries", "593.5", "Budget 170.0 MiB: met"):
        assert text in out
    assert main([*arguments, "--budget", "0.1GiB"]) == 1
    assert "2 times as many token shards" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "--tokens", "7", "--token-shards", "2"]) == 2
    assert "divide into 2 shards" in capsys.readouterr().err
    assert main(["plan", "--budget", "0"]) == 2
    assert main(["plan", "--feature-shards", "2", "--token-shards", "2", "--sequence-parallel"]) == 0
    assert "lm_head, gathered" in capsys.readouterr().out


def test_command_reads_sizes(capsys):
    for size in ("much", "1.2.3MiB", "-1GiB"):
        with pytest.raises(SystemExit):
            main(["plan", f"--budget={size}"])
        assert "200MiB" in capsys.readouterr().err
    assert main(["plan", "--tokens", "16384", "--token-shards", "2", "--budget", "178257920"]) == 0
    assert "Budget 170.0 MiB: met" in capsys.readouterr().out
