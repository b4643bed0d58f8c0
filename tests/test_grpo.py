"""`examples/grpo.py`: its pure parts by hand, its train step on a small random model, and the script itself."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import grpo
import jax
import jax.numpy as jnp
import llama
import numpy as np
import pytest
import smollm2
from flax import nnx
from jax.sharding import Mesh
from test_processes import free_port, launch

import jaxrl_logprob as jrl


SCRIPT = pathlib.Path(__file__).parents[1] / "examples" / "grpo.py"
MESHES = [(1, 1, 1), (2, 2, 2)]
TINY = llama.LlamaConfig(
    vocab_size=64,
    width=32,
    mlp_width=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=1e4,
    rms_eps=1e-5,
)
CONFIG = grpo.Config(learning_rate=1e-3, temperature=0.8, entropy_coef=0.01)


def make_mesh(shape: tuple[int, int, int]) -> Mesh:
    return jrl.make_mesh(dict(zip(("data", "context", "vocab"), shape, strict=True)))


def random_batch(vocab_size: int, mesh: Mesh) -> grpo.Batch:
    """Eight rows of different lengths."""
    rng = np.random.default_rng(0)
    prompts, completions = (rng.integers(0, vocab_size, (8, size)) for size in (5, 6))
    return grpo.make_batch(prompts, np.arange(8) % 5 + 1, completions, np.arange(8) % 6 + 1, rng.normal(size=8), mesh)


def tiny_model(mesh: Mesh) -> llama.Llama:
    """A small random model, split over the mesh."""
    model = llama.Llama(TINY, grpo.MODEL_AXES, nnx.Rngs(0))
    nnx.update(model, jax.device_put(nnx.state(model), llama.param_sharding(model, mesh)))
    return model


@pytest.mark.parametrize(
    "completion, expected",
    [(" 7.", 1.0), ("7", 1.0), (" 07, or 8", 1.0), (" 17", 0.0), (" 3 + 4 = 7", 0.0), (" seven", 0.0), ("", 0.0)],
)
def test_reward_is_for_the_first_number(completion, expected):
    assert grpo.reward(completion, 7) == expected


def test_group_advantages():
    rewards = np.array([[0.0, 1.0, 1.0, 0.0], [0.3, 0.3, 0.3, 0.3], [1.0, 0.0, 0.0, 0.0]])
    advantages = grpo.group_advantages(rewards)
    np.testing.assert_allclose(advantages[0], [-1, 1, 1, -1], rtol=1e-5)
    np.testing.assert_allclose(advantages[1], 0, atol=1e-9)  # Zero variance.
    np.testing.assert_allclose(advantages[2], np.array([3, -1, -1, -1]) / 3**0.5, rtol=1e-5)


def test_make_batch_aligns_targets_and_mask():
    prompts = np.array([[11, 12, 99], [21, 22, 23]])
    completions = np.array([[13, 14], [24, 2]])
    mesh = make_mesh((1, 4, 1))
    batch = grpo.make_batch(prompts, np.array([2, 3]), completions, np.array([1, 2]), np.array([0.5, -0.5]), mesh)
    np.testing.assert_array_equal(batch.tokens, [[11, 12, 13, 0, 0, 0, 0, 0], [21, 22, 23, 24, 2, 0, 0, 0]])
    np.testing.assert_array_equal(batch.segment_ids.sum(axis=1), [3, 5])
    tokens, ids, counts = (jnp.asarray(np.asarray(a)) for a in batch[:3])
    targets, mask = jrl.segments.shift_targets(tokens, ids, token_mask=counts)
    assert [np.asarray(row)[counts].tolist() for row, counts in zip(targets, np.asarray(mask))] == [[13], [24, 2]]
    np.testing.assert_array_equal(np.argmax(mask, axis=1), [1, 2])  # The last token of the prompt.


def test_command_line():
    config = grpo.Config.from_command_line(["--mesh", "1x2x4", "--learning-rate", "1e-4", "--epochs", "3"])
    assert config == grpo.Config(mesh=(1, 2, 4), learning_rate=1e-4, epochs=3)


@pytest.mark.parametrize("arguments", [["--mesh", "2x2"], ["--mesh", "0x1x1"], ["--epochs", "0"], ["--steps", "-1"]])
def test_command_line_refuses(arguments, capsys):
    with pytest.raises(SystemExit):
        grpo.Config.from_command_line(arguments)
    assert f"got '{arguments[1]}'" in capsys.readouterr().err


def test_batch_that_the_mesh_does_not_divide():
    config = dataclasses.replace(CONFIG, prompts=3, group_size=3)
    with pytest.raises(ValueError, match="= 9 must be a multiple of the data axis, 2"):
        grpo.check_rows(make_mesh((2, 2, 2)), config)


@pytest.mark.usefixtures("quick_compilation")
def test_surrogate_loss_is_ppos():
    mesh = make_mesh((1, 1, 1))
    batch = random_batch(TINY.vocab_size, mesh)
    with jax.set_mesh(mesh):
        model = tiny_model(mesh)
        mask = np.asarray(grpo.next_tokens(model, batch).loss_mask)
        logprobs, entropy = jax.jit(grpo.score, static_argnums=2)(model, batch, CONFIG)
        noise = 0.4 * np.random.default_rng(1).normal(size=mask.shape).astype(np.float32)
        old_logprobs = logprobs + np.where(mask, noise, 0)
        loss, metrics = jax.jit(grpo.surrogate_loss, static_argnums=3)(model, batch, old_logprobs, CONFIG)
    ratio = np.exp(np.float64(logprobs) - np.float64(old_logprobs))[mask]
    advantages = np.broadcast_to(np.asarray(batch.advantages)[:, None], mask.shape)[mask]
    terms = [
        r * a if (r < 1.2 if a > 0 else r > 0.8) else (1.2 if a > 0 else 0.8) * a for r, a in zip(ratio, advantages)
    ]
    np.testing.assert_allclose(loss, -np.mean(terms) - 0.01 * np.mean(np.asarray(entropy)[mask]), rtol=1e-5)
    clipped = np.mean(np.where(advantages > 0, ratio > 1.2, ratio < 0.8))
    assert 0.1 < clipped < 0.9
    np.testing.assert_allclose(metrics["clip_fraction"], clipped, rtol=1e-6)
    np.testing.assert_allclose(metrics["approx_kl"], np.mean(ratio - 1 - np.log(ratio)), rtol=1e-4)


def two_updates(
    model: llama.Llama, mesh: Mesh, config: grpo.Config
) -> tuple[grpo.Actor, grpo.Actor, list[dict[str, float]]]:
    """The actor before and after two updates on one batch, made as `train` makes them; and their metrics."""
    batch, history = random_batch(model.config.vocab_size, mesh), []
    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):
        first = actor = grpo.init_actor(model, mesh, config)
        old_logprobs = jax.jit(grpo.score, static_argnums=2)(model, batch, config).logprobs
        update = jax.jit(grpo.actor_update, static_argnums=3)
        for _ in range(2):
            actor, metrics = update(actor, batch, old_logprobs, config)
            history.append({name: float(value) for name, value in metrics.items()})
    assert history[0]["ratio_error"] == 0 and history[0]["approx_kl"] == 0
    assert history[1]["ratio_error"] > 0 and history[1]["loss"] < history[0]["loss"]
    assert history[0]["entropy"] > 0 and 0 < history[0]["grad_norm"] < np.inf
    return first, actor, history


@pytest.mark.slow
def test_train_step_is_the_same_on_every_mesh():
    (_, whole, want), (first, split, got) = (
        two_updates(tiny_model(mesh), mesh, CONFIG) for mesh in map(make_mesh, MESHES)
    )
    for epoch, expected in zip(got, want, strict=True):
        # The largest error measured is 8e-6, of the second ratio_error, which is 5.
        assert epoch == pytest.approx(expected, rel=0, abs=1e-4)
    for x, expected in zip(jax.tree.leaves(split.model), jax.tree.leaves(whole.model), strict=True):
        # The largest error measured is 4.5e-7.
        np.testing.assert_allclose(x, expected, rtol=0, atol=1e-5)
    for x, before in zip(jax.tree.leaves(split), jax.tree.leaves(first), strict=True):
        assert x.sharding.is_equivalent_to(before.sharding, x.ndim)
        assert x.ndim < 3 or x.addressable_shards[0].data.size == x.size // 8  # Matrices and their moments.


@pytest.mark.slow
def test_real_model_has_the_same_loss_on_both_meshes():
    config = dataclasses.replace(CONFIG, learning_rate=1e-6)
    want, got = (
        two_updates(smollm2.load_model(mesh, grpo.MODEL_AXES), mesh, config)[2] for mesh in map(make_mesh, MESHES)
    )
    for epoch, expected in zip(got, want, strict=True):
        # The largest error measured is 0 before the first update and 2e-6 after it; of gradient norms, 3e-5.
        assert [epoch["loss"], epoch["entropy"]] == pytest.approx(
            [expected["loss"], expected["entropy"]], rel=0, abs=1e-4
        )
        assert epoch["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_script_in_two_processes_is_that_in_one(tmp_path):
    """By the command that its docstring gives, with fewer completions; losses and entropies of both runs agree."""
    sizes = ["--steps", "1", "--prompts", "2", "--group-size", "2", "--max-new-tokens", "4", "--entropy-coef", "0.01"]
    command = lambda folder: [SCRIPT, *sizes, "--run-dir", tmp_path / folder]
    launch(command("one"))
    launch(command("two"), command("second"), port=free_port())
    one, two = (json.loads((tmp_path / folder / "metrics.jsonl").read_text()) for folder in ("one", "two"))
    assert not (tmp_path / "second").exists()
    for name in ("first_loss", "loss", "entropy", "grad_norm"):
        assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    assert two["example"] == one["example"] and two["first_ratio_error"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["2x2x2", "1x1x1"])
def test_script(shape, tmp_path):
    sizes = ["--steps", "2", "--prompts", "2", "--group-size", "2", "--max-new-tokens", "4"]
    command = [sys.executable, "-W", "error", SCRIPT, *sizes, "--mesh", shape, "--run-dir", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert str(tmp_path / "metrics.jsonl") in result.stdout
    history = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [metrics["step"] for metrics in history] == [0, 1]
    for metrics in history:
        assert metrics["first_ratio_error"] == 0
        assert 0 <= metrics["reward"] <= 1
        assert metrics["entropy"] > 0
        assert all(np.isfinite(value) for name, value in metrics.items() if name != "example")
