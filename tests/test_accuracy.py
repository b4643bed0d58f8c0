"""Errors against float64 of the same inputs, side by side with those of plain JAX with float32 logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import ordinarily
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
def test_float32_values_are_within_a_millionth(loop):
    p = with_spread(1.0, jnp.float32)
    values, _ = oracle(BOTH, p)
    found, _ = value_and_gradients(jrl, BOTH, p, chunks=LOOPS[loop])
    for name, a, e in zip(NAMES, found, values):
        assert np.max(np.abs(np.asarray(a, np.float64) - e) / np.abs(e)) <= 1e-6, name
