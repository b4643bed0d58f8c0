"""`benchmarks/train_step.py`: the step compiles from shapes alone, and the figures are what they say."""

import dataclasses
import os
from unittest import mock

import jax
import pytest

import jaxrl_logprob as jrl


with mock.patch.dict(os.environ):  # Which the script sets for itself.
    import train_step


CONFIG = dataclasses.replace(
    train_step.QWEN3, vocab_size=8192, width=32, mlp_width=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)
SIZES = train_step.Sizes(rows=2, tokens=128, accumulation=1, params="bfloat16", moments="float32")


def test_train_step_figures(quick_compilation):
    mesh = jrl.make_mesh({"data": 2, "context": 2, "vocab": 2})
    with jax.numpy_dtype_promotion("standard"):
        plain, hidden = (train_step.measure(CONFIG, mesh, SIZES, head) for head in ("plain", "hidden"))
    # Matrices are split over all eight devices, norms over none.
    matrices = 8192 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    numbers = matrices / 8 + 2 * (2 * 32 + 2 * 8) + 32
    for figures in (plain, hidden):
        kept = figures["parameters_gib"] + figures["optimiser_gib"]
        assert figures["parameters_gib"] * 2**30 == 2 * numbers
        assert figures["optimiser_gib"] * 2**30 == 8 * numbers + 4
        assert figures["arguments_gib"] == pytest.approx(kept + figures["batch_gib"], rel=0.01)
        assert figures["aliased_gib"] == pytest.approx(kept, rel=0.01)
        assert figures["total_gib"] > figures["temporaries_gib"] > 0
    # A shard of logits is 64 x 4096, in f32.
    assert (plain["temporaries_gib"] - hidden["temporaries_gib"]) * 2**30 > 64 * 4096 * 4
