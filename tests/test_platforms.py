"""The code that runs on TPU and GPU, run on CPU: other blocks, other layouts of weights, products of bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import check_op, make_problem, MESHES, ordinarily
from linear_checks import (
    BOTH,
    check_linear,
    HEADS,
    LOOPS,
    make_linear_problem,
    oracle,
    RAGGED_VOCAB,
    value_and_gradients,
)
from test_accuracy import errors, NAMES, plain_jax, with_spread

import jaxrl_logprob as jrl


@pytest.fixture(autouse=True)
def as_on_an_accelerator(monkeypatch):
    import checks

    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    monkeypatch.setattr(checks, "_PROGRAMS", {})
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("vocab", ordinarily(RAGGED_VOCAB, of=[1024, RAGGED_VOCAB]))
@pytest.mark.parametrize("head", ordinarily("lora", of=HEADS))
@pytest.mark.parametrize("mesh", ordinarily("none", of=["none", "2x2x2"]))
def test_from_hidden_states(mesh, head, vocab, loop):
    p = make_linear_problem(batch=(2, 150), head=head, bias=True, vocab=vocab, true_vocab=vocab - 100)
    p = p._replace(hidden_states=jnp.where(p.loss_mask[..., None], p.hidden_states, jnp.nan))
    transform = jrl.LogitTransform(p.temperature, logit_softcap=5.0, vocab_size=vocab - 100)
    check_linear(BOTH, p, MESHES[mesh], chunks=LOOPS[loop], loss_mask=p.loss_mask, transform=transform)


@pytest.mark.parametrize("dtype", ordinarily(jnp.bfloat16, of=[jnp.float32, jnp.bfloat16]))
def test_from_logits(dtype):
    p = make_problem(batch=(2, 150), vocab=200, dtype=dtype)
    check_op("token_logprobs_and_entropy", p, loss_mask=p.loss_mask, token_chunk=64)


@pytest.mark.parametrize("loop", ordinarily("vocab", of=LOOPS))
@pytest.mark.parametrize("precision, bounds", [(None, (1.1, 1.1, 1.5, 1.5)), ("highest", (1.1,) * 4)])
def test_bfloat16_errors_beside_those_of_plain_jax(precision, bounds, loop):
    """Plain JAX here has float32 products; by default, an accelerator rounds their operands to bfloat16 as we do."""
    p = with_spread(1.0, jnp.bfloat16)
    values, gradients = oracle(BOTH, p)
    exact = [*values, *gradients]
    with jax.default_matmul_precision(precision):
        ours = errors(value_and_gradients(jrl, BOTH, p, chunks=LOOPS[loop]), exact)
    plain = errors(jax.jit(plain_jax)(p), exact)
    found = dict(zip(NAMES, (np.mean(a) / np.mean(b) for a, b in zip(ours, plain, strict=True))))
    assert all(found[name] <= bound for name, bound in zip(NAMES, bounds)), found
