"""Errors against float64 of the same inputs, side by side with those of plain JAX with float32 logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import MESHES, ordinarily
from linear_checks import BOTH, LOOPS, make_linear_problem, oracle, RAGGED_VOCAB, value_and_gradients

import jaxrl_logprob as jrl


NAMES = ["logprobs", "entropy", "dhidden_states", "dlm_head"]
WIDTH = 64
# Standard deviation of the logits: entropies near log V, of about 1, and of 0 with logits up to 1e5.
SPREADS = [0.35, 1.0, 10.0, 100.0, 30_000.0]


def plain_jax(p):
    """With whole blocks of columns, as models store them: of 1200 XLA:CPU rounds the sums otherwise on some CPUs (with
    AVX-512 to half the error, in any product of this width), which says nothing of what comes after the product."""

    def score(hidden_states, lm_head):
        padded = jnp.pad(lm_head, [(0, 0), (0, -lm_head.shape[1] % 128)])
        logits = jnp.matmul(hidden_states, padded, preferred_element_type=jnp.float32)[:, :, : lm_head.shape[1]]
        logp = jax.nn.log_softmax(logits)
        return jnp.take_along_axis(logp, p.targets[..., None], -1)[..., 0], -(jnp.exp(logp) * logp).sum(-1)

    out, pull = jax.vjp(score, p.hidden_states, p.lm_head)
    return out, pull((p.dlogprobs, p.dentropy))


def with_spread(spread, dtype):
    p = make_linear_problem(batch=(2, 150), width=WIDTH, vocab=RAGGED_VOCAB, dtype=dtype)
    return p._replace(hidden_states=(p.hidden_states * (spread / WIDTH**0.5)).astype(dtype))


def errors(found, exact) -> list[np.ndarray]:
    return [np.abs(np.asarray(a, np.float64) - e) for a, e in zip(jax.tree.leaves(found), exact, strict=True)]


@pytest.mark.parametrize("loop", ordinarily("vocab", of=LOOPS))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("spread", ordinarily(1.0, 30_000.0, of=SPREADS))
def test_errors_are_no_larger_than_those_of_plain_jax(spread, dtype, loop):
    """On average, to the tenth; and nowhere by more than two roundings of the largest result."""
    p = with_spread(spread, dtype)
    values, gradients = oracle(BOTH, p)
    exact = [*values, *gradients]
    ours = errors(value_and_gradients(jrl, BOTH, p, chunks=LOOPS[loop]), exact)
    plain = errors(jax.jit(plain_jax)(p), exact)
    for name, our, their, e in zip(NAMES, ours, plain, exact, strict=True):
        rounding = 0.5 * float(np.spacing(np.abs(e).max().astype(np.float32)))
        assert our.mean() <= 1.1 * their.mean() + 1e-30, f"{name}: {our.mean() / their.mean():.3f} on average"
        assert our.max() <= their.max() + 2 * rounding, f"{name}: {our.max():.3g}, plain JAX {their.max():.3g}"


@pytest.mark.parametrize("loop", ordinarily("vocab", of=LOOPS))
@pytest.mark.parametrize("dtype", ordinarily(jnp.bfloat16, of=[jnp.float32, jnp.bfloat16]))
@pytest.mark.parametrize("where", ordinarily("1x8", of=["1x8", "2x4", "2x2x2"]))
def test_errors_on_a_mesh(where, dtype, loop):
    """As on one device, but that each rounds its part of a 16-bit gradient before these are added up: on average by
    half as much again, of 8 parts (measured: 1.38 times)."""
    p, case = with_spread(1.0, dtype), MESHES[where]
    values, gradients = oracle(BOTH, p)
    exact, mesh = [*values, *gradients], case.make()
    ours = errors(
        value_and_gradients(jrl, BOTH, p.on(case, mesh), axes=case.axes, mesh=mesh, chunks=LOOPS[loop]), exact
    )
    plain = errors(jax.jit(plain_jax)(p), exact)
    bounds = [1.1, 1.1, *[1.5 if dtype == jnp.bfloat16 else 1.1] * 2]
    for name, our, their, bound in zip(NAMES, ours, plain, bounds, strict=True):
        assert our.mean() <= bound * their.mean(), f"{name}: {our.mean() / their.mean():.3f} on average"


@pytest.mark.parametrize("loop", ordinarily("vocab", of=LOOPS))
@pytest.mark.parametrize("where", ordinarily("none", of=["none", "2x4"]))
def test_float32_values_are_within_a_millionth(where, loop):
    p, case = with_spread(1.0, jnp.float32), MESHES[where]
    values, _ = oracle(BOTH, p)
    mesh = case.make()
    found, _ = value_and_gradients(jrl, BOTH, p.on(case, mesh), axes=case.axes, mesh=mesh, chunks=LOOPS[loop])
    for name, a, e in zip(NAMES, found, values):
        assert np.max(np.abs(np.asarray(a, np.float64) - e) / np.abs(e)) <= 1e-6, name
