"""`examples/plots.py`: a picture from every history, and clear words where there is none."""

import json
import pathlib
import struct
import subprocess
import sys

import numpy as np
import plots
import pytest


SCRIPT = pathlib.Path(__file__).parents[1] / "examples" / "plots.py"


def record(step: int) -> dict[str, float]:
    names = ("reward", "entropy", "entropy_q10", "entropy_q90", "approx_kl", "kl_ref", "clip_fraction_low")
    names += ("clip_fraction_high", "tokens_per_second", "peak_memory_gib")
    return {"step": step, **dict(zip(names, np.random.default_rng(step).uniform(size=len(names)).tolist()))}


def png_size(path: pathlib.Path) -> tuple[int, ...]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) > 10_000
    return struct.unpack(">2I", data[16:24])


def panel_texts(monkeypatch, history: list[dict], path: pathlib.Path) -> dict[str, list[str]]:
    """What is written inside each panel, by its title."""
    figures, savefig = [], plots.Figure.savefig
    keep = lambda figure, *args, **kwargs: (figures.append(figure), savefig(figure, *args, **kwargs))
    monkeypatch.setattr(plots.Figure, "savefig", keep)
    plots.plot(history, path)
    return {axes.get_title(): [text.get_text() for text in axes.texts] for axes in figures[0].axes}


@pytest.mark.parametrize("num_steps", [1, 3, 60])
def test_plot(num_steps, tmp_path, monkeypatch):
    texts = panel_texts(monkeypatch, [record(step) for step in range(num_steps)], tmp_path / "plots.png")
    assert png_size(tmp_path / "plots.png") == (1560, 840)
    assert len(texts) == 6 and not any("not recorded" in found for found in texts.values())


def test_quarters(tmp_path, monkeypatch):
    history = [{"step": step, "reward": step / 8} for step in range(8)]
    texts = panel_texts(monkeypatch, history, tmp_path / "plots.png")
    assert texts["reward"] == ["first quarter 0.06", "last quarter 0.81"]


def test_missing_metrics(tmp_path, monkeypatch):
    history = [{"step": 0, "reward": 0.5}, {"step": 1, "reward": 0.5, "approx_kl": 0.1, "peak_memory_gib": np.nan}]
    texts = panel_texts(monkeypatch, history, tmp_path / "plots.png")
    missing = [title for title, found in texts.items() if found == ["not recorded"]]
    assert missing == ["entropy", "clipped ratios", "throughput", "peak memory"]


def test_moving_mean():
    np.testing.assert_allclose(plots.moving_mean(np.array([1.0, 3.0, 5.0, 7.0]), 2), [1, 2, 4, 6])


def test_no_steps(tmp_path):
    with pytest.raises(ValueError, match="`history` must have a step at least, got none"):
        plots.plot([], tmp_path / "plots.png")


def test_read_history_drops_a_torn_last_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(record(0)) + "\n" + json.dumps(record(1))[:-9])
    assert plots.read_history(path) == [record(0)]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "holds no whole record"),
        ('{"step": 0, "rew', "holds no whole record"),
        ('{"rew\n{"step": 1}\n', "line 1, is no record of a step"),
    ],
)
def test_read_history_refuses(text, message, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ValueError, match=f"metrics.jsonl.*{message}"):
        plots.read_history(tmp_path / "metrics.jsonl")


def test_script(tmp_path):
    command = [sys.executable, "-W", "error", SCRIPT, tmp_path]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr.startswith("plots.py: [Errno 2] No such file")
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record(0)) + "\n")
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{tmp_path / 'plots.png'}\n" and png_size(tmp_path / "plots.png")
