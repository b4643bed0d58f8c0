"""What the README and the smallest example promise: run as a user runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import flax_train_step
import jax
import jax.numpy as jnp
import pytest

import jaxrl_logprob as jrl


pytestmark = pytest.mark.usefixtures("quick_compilation")
ROOT = Path(__file__).parent.parent
PYTHON_BLOCK = re.compile(r"```python\n(.*?)```", re.S)


def run_example(*args: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    done = subprocess.run([sys.executable, *args], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def numbers(out: str) -> list[float]:
    return [float(n) for n in re.findall(r"(?:reward|entropy) (\S+)", out)]


@pytest.mark.slow
def test_nnx_train_step_learns():
    """The half of the example that is the quicker one to compile, in this process."""
    with jax.numpy_dtype_promotion("standard"), jax.set_mesh(jrl.make_mesh({"context": 2, "vocab": 4})):
        history = flax_train_step.train_nnx()
    (first, first_entropy), (last, last_entropy) = history[0], history[-1]
    assert last > first + 0.2 and 0 < last_entropy < first_entropy


@pytest.mark.slow
def test_flax_train_step_learns_and_is_the_same_on_a_mesh():
    one, eight = (run_example("examples/flax_train_step.py", "--mesh", mesh) for mesh in ("1x1", "2x4"))
    for first, last in ((0, 4), (6, 10)):  # NNX, Linen: reward at the first step and at the last
        assert numbers(one)[last] > numbers(one)[first] + 0.2
        assert 0 < numbers(one)[last + 1] < numbers(one)[first + 1]
    assert max(abs(a - b) for a, b in zip(numbers(one), numbers(eight), strict=True)) <= 0.02


SNIPPETS = {
    f"{file.name}-{n}": code
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for n, code in enumerate(PYTHON_BLOCK.findall(file.read_text()))
}


@pytest.mark.parametrize("name", SNIPPETS)
def test_documented_snippet_runs(name):
    """Each as it stands, with eight devices, as its text says; one that starts JAX, in a process of its own."""
    if "start_processes(" in SNIPPETS[name]:
        run_example("-c", SNIPPETS[name])
        return
    with jax.numpy_dtype_promotion("standard"):
        exec(compile(SNIPPETS[name], name, "exec"), {})


@pytest.mark.parametrize("op", ["token_logprobs", "token_logprobs_and_entropy", "token_entropy", "gather_logprobs"])
def test_docstring_example_runs(op):
    import doctest

    test = doctest.DocTestFinder().find(getattr(jrl, op), op, globs={**vars(jrl), "jnp": jnp})
    results = [doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(t) for t in test]
    assert sum(r.attempted for r in results) and not any(r.failed for r in results)
