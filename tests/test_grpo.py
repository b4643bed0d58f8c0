"""`examples/grpo.py`: its pure parts by hand, and the script itself. Its update: test_training.py."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import grpo
import numpy as np
import pytest
from test_processes import free_port, launch

import jaxrl_logprob as jrl


SCRIPT = pathlib.Path(__file__).parents[1] / "examples" / "grpo.py"
SIZES = ["--prompts", "2", "--group-size", "2", "--max-new-tokens", "4", "--checkpoint-every", "0"]


def make_mesh(shape: tuple[int, int, int]):
    return jrl.make_mesh(dict(zip(("data", "context", "vocab"), shape, strict=True)))


@pytest.mark.parametrize(
    "completion, expected",
    [(" 7.", 1.0), ("7", 1.0), (" 07, or 8", 1.0), (" 17", 0.0), (" 3 + 4 = 7", 0.0), (" seven", 0.0), ("", 0.0)],
)
def test_reward_is_for_the_first_number(completion, expected):
    assert grpo.reward(completion, 7) == expected


def test_command_line():
    config = grpo.Config.from_command_line(["--mesh", "1x2x4", "--learning-rate", "1e-4", "--recipe", "gspo"])
    assert config == grpo.Config(mesh=(1, 2, 4), learning_rate=1e-4, recipe="gspo")


@pytest.mark.parametrize(
    "arguments",
    [["--mesh", "2x2"], ["--mesh", "0x1x1"], ["--epochs", "0"], ["--steps", "-1"], ["--recipe", "ppo2"]],
)
def test_command_line_refuses(arguments, capsys):
    with pytest.raises(SystemExit):
        grpo.Config.from_command_line(arguments)
    assert f"got '{arguments[1]}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(rows=3), "--rows 3 must be a multiple of the data axis, 2"),
        (dict(max_tokens=65), "--max-tokens 65 must be a multiple of the context axis, 2"),
        (dict(minibatches=3), "= 16 must be a multiple of --minibatches 3"),
    ],
)
def test_sizes_that_do_not_divide(options, message):
    with pytest.raises(ValueError, match=message):
        grpo.check_sizes(make_mesh((2, 2, 2)), dataclasses.replace(grpo.Config(), **options))


@pytest.mark.slow
def test_script_in_two_processes_is_that_in_one(tmp_path):
    """By the command that its docstring gives, with fewer completions; losses and entropies of both runs agree."""
    command = lambda folder: [SCRIPT, *SIZES, "--steps", "1", "--entropy-coef", "0.01", "--run-dir", tmp_path / folder]
    launch(command("one"))
    launch(command("two"), command("two"), port=free_port())
    one, two = (json.loads((tmp_path / folder / "metrics.jsonl").read_text()) for folder in ("one", "two"))
    for name in ("first_loss", "loss", "entropy", "grad_norm"):
        assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    assert two["example"] == one["example"] and two["first_ratio_error"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["2x2x2", "1x1x1"])
def test_script(shape, tmp_path):
    command = [sys.executable, SCRIPT, *SIZES, "--steps", "2", "--mesh", shape, "--run-dir", tmp_path]
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
    assert (tmp_path / "plots.png").stat().st_size > 10_000
