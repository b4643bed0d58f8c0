"""`examples/grpo.py`: its pure parts by hand, and the script itself. Its update: test_training.py."""

import dataclasses
import json
import pathlib
import signal
import subprocess
import sys
import time

import grpo
import numpy as np
import pytest
import test_huggingface
from test_processes import free_port, launch
from tokenizers import models, pre_tokenizers, Tokenizer

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
    config = grpo.Config.from_command_line("", ["--mesh", "1x2x4", "--learning-rate", "1e-4", "--recipe", "gspo"])
    assert config == grpo.Config(mesh=(1, 2, 4), learning_rate=1e-4, recipe="gspo")


@pytest.mark.parametrize(
    "arguments",
    [["--mesh", "2x2"], ["--mesh", "0x1x1"], ["--epochs", "0"], ["--steps", "-1"], ["--recipe", "ppo2"]],
)
def test_command_line_refuses(arguments, capsys):
    with pytest.raises(SystemExit):
        grpo.Config.from_command_line("", arguments)
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


def write_model(folder: pathlib.Path) -> None:
    """A small Qwen3 of random weights, with a tokenizer that has a token for each digit."""
    words = ["What", "is", "The", "answer", "+", "?", "<unk>", "<eos>", *map(str, range(24))]
    test_huggingface.write(folder, test_huggingface.QWEN3 | dict(eos_token_id=7))
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def losses_of(run_dir: pathlib.Path) -> list[tuple[float, ...]]:
    names = ("step", "reward", "first_loss", "loss", "entropy", "grad_norm")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [tuple(record[name] for name in names) for record in records]


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path):
    """kill -9 at two moments, between checkpoints; a third start has nothing left to do, and loses nothing."""
    write_model(tmp_path / "model")
    command = [sys.executable, SCRIPT, "--model", tmp_path / "model", "--steps", "7", "--checkpoint-every", "2"]
    command += ["--mesh", "1x2x2", "--temperature", "3", "--learning-rate", "1e-3", "--kl-coef", "0.1", "--run-dir"]
    run = lambda folder: subprocess.run([*command, tmp_path / folder], capture_output=True, text=True)
    assert (whole := run("whole")).returncode == 0, whole.stderr
    for steps in (3, 6):
        process = subprocess.Popen(
            [*command, tmp_path / "killed"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        path, deadline = tmp_path / "killed" / "metrics.jsonl", time.monotonic() + 300
        while not (path.exists() and f'"step": {steps - 1},' in path.read_text()) and time.monotonic() < deadline:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert len(losses_of(tmp_path / "killed")) < 7
    assert (last := run("killed")).returncode == 0, last.stderr
    expected = losses_of(tmp_path / "whole")
    assert losses_of(tmp_path / "killed") == expected and [step for step, *_ in expected] == list(range(7))
    assert len({loss for _, _, _, loss, *_ in expected}) == 7
    command[command.index("7")] = "4"
    assert run("killed").returncode == 0 and losses_of(tmp_path / "killed") == expected
    foreign = subprocess.run([*command, tmp_path / "killed", "--seed", "1"], capture_output=True, text=True)
    assert foreign.returncode == 1 and "seed got 1, saved 0" in foreign.stderr and "Traceback" not in foreign.stderr


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
