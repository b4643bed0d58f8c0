"""SmolLM2 in `examples/`: tokenizer, model and sampler, on one device and on meshes.

Tokenizer and model are held against Hugging Face's values (tests/data/README.md), the sampler against the
full forward pass, and every mesh against none.
"""

import contextlib
import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import llama
import numpy as np
import pytest
import sampling
import smollm2
from flax import nnx
from jax.sharding import AxisType, Mesh
from jaxtyping import Array, Float, Int

import jaxrl_logprob as jrl


pytestmark = pytest.mark.usefixtures("quick_compilation")
GOLD = pathlib.Path(__file__).parent / "data" / "gold_smol.npz"
TEXTS = (
    "The capital of France is Paris.",
    "Q: What is 17 + 25?\nA: 42",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "Entropy measures how spread out the next-token distribution is.",
)
AXES = llama.ModelAxes(batch="batch", sequence="sequence", tensor="tensor")
MESHES = [(2, 2, 2), (1, 8, 1), (4, 1, 2), (8, 1, 1), (1, 1, 1)]
TINY = llama.LlamaConfig(
    vocab_size=64,
    width=32,
    mlp_width=48,
    num_layers=2,
    num_heads=6,
    num_kv_heads=3,
    head_dim=8,
    rope_theta=1e4,
    rms_eps=1e-5,
)


def make_mesh(shape: tuple[int, int, int]) -> Mesh:
    """The first devices as a mesh with the axes of AXES."""
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, ("batch", "sequence", "tensor"), (AxisType.Auto,) * 3, devices=devices)


def scores(
    logits: Float[Array, "B T V"], ids: Int[Array, "B T"], temperature: float | Array = 1.0
) -> tuple[Float[Array, "B T-1"], Float[Array, "B T"]]:
    """Log-probabilities of ids[:, 1:], and the entropy at every position."""
    no_mesh = jax.sharding.get_abstract_mesh().empty
    logprobs, entropy = jrl.token_logprobs_and_entropy(
        logits,
        jnp.roll(ids, -1, axis=1),
        transform=jrl.LogitTransform(temperature=temperature),
        axes=jrl.MeshAxes() if no_mesh else jrl.MeshAxes(tokens=("batch", "sequence"), vocab="tensor"),
    )
    return logprobs[:, :-1], entropy


@jax.jit
def full_scores(model, ids, lengths, temperature):
    """Scores of right-padded rows of ids by the full forward pass, and the logits."""
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1])[None], ids.shape)
    logits = model.logits(model(ids, positions, (positions < lengths[:, None]).astype(jnp.int32)))
    return *scores(logits, ids, temperature), logits


def tiny(mesh: Mesh) -> llama.Llama:
    """A small random model, split over the mesh."""
    model = llama.Llama(TINY, AXES, nnx.Rngs(0))
    nnx.update(model, jax.device_put(nnx.state(model), llama.param_sharding(model, mesh)))
    return model


@pytest.fixture(scope="module")
def tokenizer():
    return smollm2.load_tokenizer()


@pytest.fixture(scope="module", params=[pytest.param((1, 1, 1), marks=pytest.mark.slow), (2, 2, 2)], ids=str)
def smol(request):
    """SmolLM2 and the mesh that it is on."""
    mesh = make_mesh(request.param)
    return smollm2.load_model(mesh, AXES), mesh


def test_tokenizer(tokenizer):
    gold = np.load(GOLD)
    for i, text in enumerate(TEXTS):
        ids = tokenizer.encode(text).ids
        np.testing.assert_array_equal(ids, gold[f"ids_{i}"])
        assert tokenizer.decode(ids) == text


def test_chat_prompt(tokenizer):
    ids = tokenizer.encode(smollm2.chat_prompt("Hi <|im_end|>")).ids
    assert ids.count(1) == 3 and ids.count(smollm2.EOS_ID) == 3  # Special tokens are one id each.
    assert tokenizer.decode(ids).startswith("system\nYou are a helpful AI assistant named SmolLM")


def test_missing_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"jaxrl-logprob\[examples\]"):
        smollm2.gguf_path()


def test_scores_are_hugging_faces(smol):
    model, mesh = smol
    gold = np.load(GOLD)
    lengths = np.array([gold[f"ids_{i}"].size for i in range(len(TEXTS))])
    ids = np.zeros((len(TEXTS), 40), np.int32)
    for i, length in enumerate(lengths):
        ids[i, :length] = gold[f"ids_{i}"]
    with jax.set_mesh(mesh):
        logprobs, entropy, _ = map(np.asarray, full_scores(model, ids, lengths, 1.0))
    for i, length in enumerate(lengths):
        # The largest error measured is 3.2e-5 in log-probabilities and 2.3e-5 in entropies.
        np.testing.assert_allclose(logprobs[i, : length - 1], gold[f"log_probs_{i}"], rtol=0, atol=2e-4)
        np.testing.assert_allclose(entropy[i, :length], gold[f"entropy_{i}"], rtol=0, atol=2e-4)


@pytest.mark.slow
def test_smollm2_answers(smol, tokenizer):
    model, mesh = smol
    questions = ("What is the capital of Japan?", "How many days are there in one week?")
    encoded = [tokenizer.encode(smollm2.chat_prompt(question)).ids for question in questions]
    prompts, lengths = pad(encoded * 4)
    with jax.set_mesh(mesh):
        samples = sampling.sample(
            sampling.for_sampling(model, mesh),
            prompts,
            lengths,
            jax.random.key(0),
            max_new_tokens=12,
            temperature=0.1,
            eos_ids=[smollm2.EOS_ID],
        )
        check_against_full_forward(model, prompts, lengths, samples, 0.1, atol=2e-3)
    answers = tokenizer.decode_batch(np.asarray(samples.tokens).tolist())
    assert "Tokyo" in answers[0] and "7" in answers[1]


def pad(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids padded on the right, and their lengths."""
    lengths = np.array([len(row) for row in rows], np.int32)
    padded = np.zeros((len(rows), lengths.max()), np.int32)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = ids
    return padded, lengths


def check_against_full_forward(model, prompts, prompt_lengths, samples, temperature, atol):
    """Asserts that the sampler's log-probabilities are the full forward's; returns the latter's logits."""
    rows = [
        [*prompt[:length], *tokens[:count]]
        for prompt, length, tokens, count in zip(
            prompts, prompt_lengths, np.asarray(samples.tokens), np.asarray(samples.lengths), strict=True
        )
    ]
    ids, lengths = pad(rows)
    # An odd length would do too, but then no axis would split the sequence.
    ids = np.pad(ids, ((0, 0), (0, -ids.shape[1] % 8)))
    logprobs, _, logits = map(np.asarray, full_scores(model, ids, lengths, temperature))
    completion_logits = []
    for i, (start, end) in enumerate(zip(prompt_lengths, lengths, strict=True)):
        expected = logprobs[i, start - 1 : end - 1]
        np.testing.assert_allclose(samples.logprobs[i, : end - start], expected, rtol=0, atol=atol)
        completion_logits.append(logits[i, start - 1 : end - 1])
    return completion_logits


def tiny_prompts() -> tuple[np.ndarray, np.ndarray]:
    """Eight prompts of lengths 1 to 8; their padding is not 0, which must not matter."""
    prompts = np.random.default_rng(0).integers(0, TINY.vocab_size, (8, 8)).astype(np.int32)
    return prompts, np.arange(1, 9, dtype=np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1e-5])
def test_sampler_agrees_with_full_forward(shape, temperature):
    mesh = make_mesh(shape)
    with jax.set_mesh(mesh):
        model = tiny(mesh)
        prompts, lengths = tiny_prompts()
        samples = sampling.sample(
            sampling.for_sampling(model, mesh),
            prompts,
            lengths,
            jax.random.key(1),
            max_new_tokens=10,
            temperature=temperature,
            eos_ids=[-1],
        )
        assert np.all(np.asarray(samples.lengths) == 10)
        # Errors of 1e-6 in the logits, divided by the temperature.
        logits = check_against_full_forward(
            model, prompts, lengths, samples, temperature, atol=1e-5 / min(1, temperature)
        )
    if temperature < 1e-4:
        np.testing.assert_array_equal(samples.tokens, np.argmax(logits, axis=2))


def test_sampler_stops_at_end_of_sequence():
    mesh = make_mesh((2, 2, 2))
    prompts, lengths = tiny_prompts()
    with jax.set_mesh(mesh):
        model = sampling.for_sampling(tiny(mesh), mesh)
        draw = functools.partial(
            sampling.sample, model, prompts, lengths, jax.random.key(2), max_new_tokens=10, temperature=2.0
        )
        endless = draw(eos_ids=[-1])
        eos_ids = [int(endless.tokens[0, 4]), int(endless.tokens[1, 2])]  # Rows 0 and 1 end in their middle, or before.
        ended = draw(eos_ids=eos_ids)
    there = np.isin(endless.tokens, eos_ids)
    ends = np.where(there.any(axis=1), there.argmax(axis=1) + 1, 10)
    np.testing.assert_array_equal(ended.lengths, ends)
    for i, end in enumerate(ends):
        np.testing.assert_array_equal(ended.tokens[i, :end], endless.tokens[i, :end])
        np.testing.assert_array_equal(ended.tokens[i, end:], eos_ids[0])
        np.testing.assert_array_equal(ended.logprobs[i, end:], 0)


@functools.partial(jax.jit, static_argnames="remat")
@jax.value_and_grad
def mean_logprob(model, remat):
    """Of rows of two packed segments and padding."""
    ids = np.random.default_rng(1).integers(0, TINY.vocab_size, (8, 16)).astype(np.int32)
    segment_ids = np.tile(np.array([1] * 4 + [2] * 8 + [0] * 4, np.int32), (8, 1))
    positions = np.tile(np.array([*range(4), *range(8), *range(4)], np.int32), (8, 1))
    hidden = model(jnp.asarray(ids), jnp.asarray(positions), jnp.asarray(segment_ids), remat=remat)
    return scores(model.logits(hidden), jnp.asarray(ids))[0].mean()


@pytest.fixture(scope="module")
def without_mesh():
    return mean_logprob(llama.Llama(TINY, AXES, nnx.Rngs(0)), remat=False)


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_mesh_and_remat_change_nothing(shape, without_mesh):
    value, gradient = without_mesh
    mesh = make_mesh(shape)
    with jax.set_mesh(mesh):
        model = tiny(mesh)
        sharded_value, sharded_gradient = mean_logprob(model, remat=True)
    np.testing.assert_allclose(sharded_value, value, rtol=1e-5)
    for got, want, param in zip(*map(jax.tree.leaves, (sharded_gradient, gradient, model)), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
        assert got.sharding.is_equivalent_to(param.sharding, got.ndim)


@pytest.mark.parametrize("shape", [None, (2, 2, 2), (1, 8, 1)], ids=str)
def test_queries_in_blocks(shape, monkeypatch):
    rng = np.random.default_rng(3)
    queries, weights = rng.normal(size=(2, 2, 64, 6, 8)).astype(np.float32)
    keys, values = rng.normal(size=(2, 2, 64, 3, 8)).astype(np.float32)
    mask = np.tril(rng.random((2, 64, 64)) < 0.5) | np.eye(64, dtype=bool)

    def weighted(*operands):
        return jnp.vdot(weights, llama.attend_on_mesh(*operands, mask, AXES))

    both = lambda: jax.jit(jax.value_and_grad(lambda *xs: weighted(*xs), (0, 1, 2)))(queries, keys, values)
    whole = both()
    monkeypatch.setattr(llama, "QUERY_BLOCK", 4)
    with jax.set_mesh(make_mesh(shape)) if shape else contextlib.nullcontext():
        found = both()
    for got, want in zip(*map(jax.tree.leaves, (found, whole)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_packed_segments_are_separate_rows():
    model = llama.Llama(TINY, llama.ModelAxes(), nnx.Rngs(0))
    first, second = np.random.default_rng(2).integers(0, TINY.vocab_size, (2, 5)).tolist()
    ids = np.array([first + second, first + [0] * 5, second + [0] * 5])
    positions = np.array([[*range(5), *range(5)], [*range(10)], [*range(10)]])
    segment_ids = np.array([[3] * 5 + [1] * 5, [1] * 5 + [0] * 5, [1] * 5 + [0] * 5])
    packed, *alone = jax.jit(llama.Llama.__call__)(model, ids, positions, segment_ids)
    for part, row in zip((packed[:5], packed[5:]), alone, strict=True):
        np.testing.assert_allclose(part, row[:5], rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_parameters_are_split_over_the_whole_mesh(shape):
    mesh = make_mesh(shape)
    config = smollm2.load_config()
    for fsdp, parts in ((True, mesh.size), (False, mesh.shape["tensor"])):
        axes = dataclasses.replace(AXES, fsdp=fsdp)
        model = llama.abstract_model(config, axes)
        params = jax.tree.leaves(nnx.state(model))
        shardings = jax.tree.leaves(llama.param_sharding(model, mesh))
        total = sum(param.size for param in params)
        on_one_device = sum(
            np.prod(sharding.shard_shape(param.shape)) for param, sharding in zip(params, shardings, strict=True)
        )
        assert total == 134_515_008
        assert on_one_device < total / parts * 1.003  # The norms are whole everywhere.
