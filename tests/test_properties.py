"""Any shape, mesh, dtype, chunk and option, drawn by hypothesis, against the float64 oracle."""

import checks
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, HealthCheck, Phase, settings, strategies as st

import jaxrl_logprob as jrl


# Not shrunk: every shape is compiled, and the drawn call is small as it is.
SETTINGS = dict(
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
MESHES = {
    (1, 1): None,
    **{(t, v): {"tokens": t, "vocab": v} for t in (1, 2, 4) for v in (1, 2, 4, 8) if 1 < t * v <= 8},
}


CALLS = st.fixed_dictionaries(
    {
        "op": st.sampled_from(sorted(checks.OPS)),
        "mesh": st.sampled_from(sorted(MESHES)),
        "seed": st.integers(0, 2**16),
        "rows": st.integers(1, 3),
        "columns": st.integers(0, 6),
        "shard": st.integers(1, 12),
        "padding": st.integers(0, 3),
        "num_ids": st.integers(0, 10),
        "dtype": st.sampled_from(["float32", "bfloat16", "float16"]),
        "scale": st.sampled_from([0.0, 1.0, 30.0]),
        "absent": st.booleans(),
        "ignored": st.booleans(),
        "masked": st.booleans(),
        "temperature": st.sampled_from([1.0, 0.6, 3]),
        "softcap": st.sampled_from([None, 20.0]),
        "token_chunk": st.sampled_from([None, 8, 1000]),
    }
)


def check(c):
    """`c` drawn of CALLS: batch [rows, columns x token shards], vocabulary shard x vocabulary shards, less padding."""
    tokens, shards = c["mesh"]
    batch, vocab = (c["rows"], tokens * c["columns"]), shards * c["shard"]
    true_vocab = max(1, vocab - c["padding"])
    p = checks.make_problem(
        c["seed"], batch=batch, vocab=vocab, true_vocab=true_vocab, dtype=jnp.dtype(c["dtype"]), scale=c["scale"],
        num_ids=c["num_ids"],
    )  # fmt: skip
    rng = np.random.default_rng(c["seed"] + 1)
    if c["absent"]:  # some columns, but never a whole row
        absent = rng.random(p.logits.shape) < 0.3
        absent[..., 0] = False
        p = p._replace(logits=jnp.where(absent, -jnp.inf, p.logits))
    if c["ignored"]:
        p = p._replace(targets=jnp.where(rng.random(batch) < 0.3, -100, p.targets))
    sizes = MESHES[c["mesh"]]
    axes = None if sizes is None else jrl.MeshAxes(tokens=(None, "tokens"), vocab="vocab")
    checks.check_op(
        c["op"], p, checks.MeshCase(sizes, axes), tolerance=1e-5, token_chunk=c["token_chunk"],
        loss_mask=p.loss_mask if c["masked"] else None,
        transform=jrl.LogitTransform(
            temperature=c["temperature"], logit_softcap=c["softcap"],
            vocab_size=true_vocab if true_vocab < vocab else None,
        ),
    )  # fmt: skip


@settings(max_examples=4, derandomize=True, **SETTINGS)
@given(CALLS)
def test_any_call_equals_oracle(call):
    check(call)


@pytest.mark.slow
@settings(max_examples=100, **SETTINGS)
@given(CALLS)
def test_many_calls_equal_oracle(call):
    check(call)
