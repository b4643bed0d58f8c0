"""A run in one picture: reward, entropy, KL, clipping, throughput and memory over its steps.

    uv run --extra examples python examples/plots.py runs/grpo-20260101-120000

reads metrics.jsonl in that folder and writes plots.png beside it; `grpo.py` does so itself at its end.
"""

import argparse
import pathlib
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from records import read_records


def read_history(path: pathlib.Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl.

    Raises:
      ValueError: there is no record, or a line before the last is none.
    """
    history = read_records(path)
    if not history:
        raise ValueError(f"{path} holds no whole record: the run ended before its first step did")
    return history


def column(history: list[dict[str, Any]], name: str) -> np.ndarray | None:
    """A metric of each step, NaN where a step lacks it; None where no step has it as a finite number."""
    values = np.array([record.get(name, np.nan) for record in history], float)
    return values if np.isfinite(values).any() else None


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Of each value and those before it, `window` in all or as many as there are."""
    return np.array([np.mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)])


def plot_reward(axes: Axes, history: list[dict[str, Any]]) -> None:
    """Each step's, and the moving mean that shows the trend in it."""
    steps, values = column(history, "step"), column(history, "reward")
    if steps is None or values is None:
        return
    axes.plot(steps, values, ".", color="C0", alpha=0.4, label="a step")
    if len(values) >= 4:
        window, quarter = max(2, len(values) // 10), len(values) // 4
        axes.plot(steps, moving_mean(values, window), color="C0", label=f"mean of {window} steps")
        quarters = (("first", slice(quarter), ":", 0.98, "right"), ("last", slice(-quarter, None), "--", 0.02, "left"))
        for which, ends, style, x, align in quarters:
            mean = float(np.mean(values[ends]))
            axes.axhline(mean, color="0.6", linewidth=0.9, linestyle=style, zorder=0)
            place: Any = dict(xycoords=("axes fraction", "data"), xytext=(0, 3), textcoords="offset points", ha=align)
            axes.annotate(f"{which} quarter {mean:.2f}", (x, mean), color="0.4", fontsize="small", **place)


def plot_entropy(axes: Axes, history: list[dict[str, Any]]) -> None:
    """The mean over tokens, in the band that holds 80% of them."""
    steps, values = column(history, "step"), column(history, "entropy")
    low, high = column(history, "entropy_q10"), column(history, "entropy_q90")
    if steps is None or values is None:
        return
    axes.plot(steps, values, ".-", color="C1", label="mean over tokens")
    if low is not None and high is not None:
        axes.fill_between(steps, low, high, color="C1", alpha=0.2, linewidth=0, label="10% to 90% of tokens")


def plot_lines(axes: Axes, history: list[dict[str, Any]], labels: dict[str, str]) -> None:
    """The metrics that there are, of those named."""
    steps = column(history, "step")
    for color, (name, label) in enumerate(labels.items()):
        values = column(history, name)
        if steps is not None and values is not None:
            axes.plot(steps, values, ".-", color=f"C{color}", label=label)


LINES = {
    "KL": ("nats per token", {"approx_kl": "to the sampling policy", "kl_ref": "to the reference model"}),
    "clipped ratios": ("fraction of tokens", {"clip_fraction_low": "below", "clip_fraction_high": "above"}),
    "throughput": ("completion tokens per second", {"tokens_per_second": ""}),
    "peak memory": ("GiB", {"peak_memory_gib": ""}),
}


def plot(history: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws the steps of `history`, records as in metrics.jsonl, into a PNG; metrics that none has are said to lack.

    Raises:
      ValueError: the history is empty.
    """
    if not history:
        raise ValueError("`history` must have a step at least, got none")
    figure = Figure(figsize=(13, 7), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 3).flat
    plot_reward(panels[0], history)
    plot_entropy(panels[1], history)
    units = {"reward": "mean over completions", "entropy": "nats per token"}
    for axes, (title, (unit, labels)) in zip(panels[2:], LINES.items(), strict=True):
        plot_lines(axes, history, labels)
        units[title] = unit
    for axes, (title, unit) in zip(panels, units.items(), strict=True):
        decorate(axes, title, unit, (history[0]["step"], history[-1]["step"]))
    figure.savefig(path, dpi=120, format="png")


def decorate(axes: Axes, title: str, unit: str, steps: tuple[int, int]) -> None:
    """Names the axes of a panel, or says that there is nothing in it."""
    axes.set(title=title, xlabel="step", ylabel=unit)
    if not axes.lines:
        axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color="0.5")
        axes.set(xticks=[], yticks=[])
        return
    axes.set_xlim(steps[0] - 0.5, steps[1] + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(alpha=0.25)
    if title not in ("reward", "KL"):
        axes.set_ylim(bottom=0)
    if any(not str(line.get_label()).startswith("_") for line in axes.lines):
        axes.legend(fontsize="small", frameon=False)


def main() -> None:
    """Runs the command line."""
    first_line, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=first_line)
    parser.add_argument("run_dir", type=pathlib.Path, help="folder with metrics.jsonl")
    run_dir = parser.parse_args().run_dir
    try:
        history = read_history(run_dir / "metrics.jsonl")
    except (ValueError, OSError) as error:
        raise SystemExit(f"plots.py: {error}") from None
    plot(history, run_dir / "plots.png")
    print(run_dir / "plots.png")


if __name__ == "__main__":
    main()
