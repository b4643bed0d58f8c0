"""What the compiled programs hold: collectives, temporaries, copies, arrays of size [N, V]; and their number."""

import re

import checks
import chex
import jax
import jax.numpy as jnp
import pytest
from checks import make_problem, MESHES, ordinarily
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxrl_logprob as jrl


N, V = 2048, 4096
COLLECTIVE = re.compile(
    r"= (\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)(?:-start)?\("
)

# In the ordinary run the two that between them do what the others do.
every_op = pytest.mark.parametrize("op", ordinarily("token_logprobs_and_entropy", "gather_logprobs", of=checks.OPS))


def collectives(compiled) -> list[tuple[str, str, str]]:
    """(kind, element type and shape, reduction) of every collective of the optimised program, loops counted once."""
    text = compiled.as_text()
    found = []
    for line in text.splitlines():
        if match := COLLECTIVE.search(line):
            shape = re.sub(r"\{[^}]*\}", "", match[1])
            reduction = re.search(r"to_apply=%?([\w.\-]+)", line)
            body = re.search(rf"%?{re.escape(reduction[1])} \(.*?\n(.*?)\n}}", text, re.S) if reduction else None
            kind = re.search(r"ROOT .* (maximum|add)\(", body[1])[1] if body else ""
            found.append((match[2], shape, kind))
    return sorted(found)


def compile_on(case, op, p, *, gradient, **kw):
    mesh = case.make()
    placed = p.on(case, mesh)

    def forward(p):
        return checks.OPS[op](jrl, p, p.logits, axes=case.axes, mesh=mesh, **kw)

    def both(p):
        return jax.vjp(lambda x: checks.OPS[op](jrl, p, x, axes=case.axes, mesh=mesh, **kw), p.logits)[1](
            checks.COTANGENTS[op](p)
        )

    return jax.jit(both if gradient else forward).lower(placed).compile()


@pytest.mark.parametrize("chunk", ordinarily(8, of=[8, 128, 100_000]))
@pytest.mark.parametrize(
    "mesh, shards, tokens", ordinarily(("2x2x2", 2, 4), of=[("2x4", 4, 2), ("2x2x2", 2, 4), ("1x8", 8, 1)])
)
@pytest.mark.parametrize(
    "op, floats",
    [("token_logprobs", 2), ("token_logprobs_and_entropy", 3), ("token_entropy", 2), ("gather_logprobs", 4)],
)
def test_forward_has_one_max_and_one_sum_of_order_n(op, floats, mesh, shards, tokens, chunk):
    p = make_problem(batch=(2, 256), vocab=1024)
    found = collectives(compile_on(MESHES[mesh], op, p, gradient=False, token_chunk=chunk))
    local = 512 // tokens
    assert set(found) == {("all-reduce", f"f32[{floats},{local}]", "add"), ("all-reduce", f"f32[{local}]", "maximum")}
    assert len(found) == 2


@pytest.mark.parametrize("mesh", ordinarily("2x2x2", of=["2x4", "2x2x2"]))
@every_op
def test_backward_has_no_collectives(op, mesh):
    """The program of value and gradient has the forward's two and no more."""
    p = make_problem(batch=(2, 256), vocab=1024)
    forward = collectives(compile_on(MESHES[mesh], op, p, gradient=False, token_chunk=8))
    both = collectives(compile_on(MESHES[mesh], op, p, gradient=True, token_chunk=8))
    assert both == forward and len(both) == 2


@pytest.mark.parametrize("op", ordinarily("token_logprobs_and_entropy", of=checks.OPS))
def test_tokens_alone_need_no_collectives(op):
    case = checks.MeshCase({"data": 2, "context": 4}, jrl.MeshAxes(tokens=("data", "context")))
    p = make_problem(batch=(2, 256), vocab=1024)
    assert collectives(compile_on(case, op, p, gradient=True)) == []
    assert collectives(compile_on(MESHES["none"], op, p, gradient=True)) == []


def head_gradient(op=jrl.token_logprobs_and_entropy, dtype=jnp.float32, **kw):
    """Gradient through logits that only this program holds, compiled; logits are N x V."""

    def loss(hidden_states, lm_head, targets, weights):
        out = op((hidden_states @ lm_head).astype(dtype), targets, **kw)
        return sum((o * weights).sum() for o in jax.tree.leaves(out))

    shapes = [(N, 16), (16, V), (N,), (N,)]
    dtypes = [jnp.float32, jnp.float32, jnp.int32, jnp.float32]
    args = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes)]
    return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*args).compile()


def temporaries(compiled) -> int:
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("chunk", ordinarily(8, of=[8, 64]))
def test_gradient_is_written_over_the_logits_where_they_die(chunk):
    """One buffer of logits is the whole cost, entropy's gradient included; a second one would be 2.0."""
    compiled = head_gradient(token_chunk=chunk)
    logits = 4 * N * V
    assert temporaries(compiled) < logits + 4 * (4 * chunk * V) + 64 * N
    assert not re.search(rf"= f32\[{N},{V}\]\S* copy\(", compiled.as_text())


def test_default_chunks_are_small_beside_the_logits():
    assert temporaries(head_gradient()) < 1.3 * 4 * N * V


def test_entropy_gradient_costs_no_memory():
    alone = temporaries(head_gradient(lambda x, y: jrl.token_logprobs(x, y, token_chunk=8)))
    shut = temporaries(head_gradient(entropy_coef=0.0, token_chunk=8))
    both = temporaries(head_gradient(token_chunk=8))
    assert abs(both - alone) < 64 * N and abs(shut - alone) < 64 * N


def test_smaller_chunks_have_lower_peaks():
    peaks = [temporaries(head_gradient(token_chunk=c)) for c in (8, 256, 1024)]
    assert peaks[0] < peaks[1] < peaks[2]


@every_op
def test_donated_logits_become_the_gradient(op):
    p = make_problem(batch=(N,), vocab=V)

    def gradient(logits, p):
        return jax.vjp(lambda x: checks.OPS[op](jrl, p, x, token_chunk=8), logits)[1](checks.COTANGENTS[op](p))[0]

    rest = p._replace(logits=jnp.zeros(()))
    compiled = jax.jit(gradient, donate_argnums=0).lower(p.logits, rest).compile()
    assert temporaries(compiled) < 0.05 * 4 * N * V
    assert compiled.memory_analysis().alias_size_in_bytes >= 4 * N * V
    assert not re.search(rf"= f32\[{N},{V}\]\S* copy\(", compiled.as_text())


@every_op
def test_no_wide_array_of_bfloat16_logits(op):
    """Neither float32 nor integers of size [N, V] anywhere, not even inside a fusion."""
    p = make_problem(batch=(N,), vocab=V, dtype=jnp.bfloat16)
    compiled = compile_on(MESHES["none"], op, p, gradient=True, token_chunk=8)
    text = compiled.as_text() or ""
    assert f"bf16[{N},{V}]" in text
    assert not re.search(rf"\b([fsu](32|64)|s16|pred)\[{N},{V}\]", text)
    assert temporaries(compiled) < 1.1 * 2 * N * V


def test_shards_hold_only_their_part():
    case = MESHES["2x2x2"]
    p = make_problem(batch=(2, 512), vocab=V)
    compiled = compile_on(case, "token_logprobs_and_entropy", p, gradient=True, token_chunk=8)
    shard = 4 * 2 * 512 * V // 8
    assert temporaries(compiled) < 1.2 * shard
    assert not re.search(rf"f32\[(2,512|1024|512|256),{V}\]", compiled.as_text())


@pytest.mark.parametrize("gradient", [False, True])
def test_vmap_over_a_split_dimension_gathers_nothing(gradient):
    mesh = jrl.make_mesh({"data": 2, "context": 2, "vocab": 2})
    axes = jrl.MeshAxes(tokens="context", vocab="vocab")
    logits = jax.ShapeDtypeStruct(
        (4, 64, 512), jnp.float32, sharding=NamedSharding(mesh, P("data", "context", "vocab"))
    )
    targets = jax.ShapeDtypeStruct((4, 64), jnp.int32, sharding=NamedSharding(mesh, P("data", "context")))
    score = jax.vmap(lambda x, y: jrl.token_logprobs(x, y, axes=axes, mesh=mesh))
    program = jax.grad(lambda x, y: score(x, y).sum()) if gradient else score
    found = collectives(jax.jit(program).lower(logits, targets).compile())
    assert sorted(found) == [("all-reduce", "f32[2,2,32]", "add"), ("all-reduce", "f32[2,32]", "maximum")]


def test_unlisted_axes_stay_out_of_it():
    """The same program on every device along an axis that `axes` does not name."""
    mesh = jrl.make_mesh({"data": 2, "vocab": 2, "other": 2})
    logits = jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=NamedSharding(mesh, P("data", "vocab")))
    targets = jax.ShapeDtypeStruct((64,), jnp.int32, sharding=NamedSharding(mesh, P("data")))
    axes = jrl.MeshAxes(tokens="data", vocab="vocab")
    gradient = jax.grad(lambda x, y: jrl.token_logprobs(x, y, axes=axes, mesh=mesh).sum())
    found = collectives(jax.jit(gradient).lower(logits, targets).compile())
    assert [kind for kind, *_ in found] == ["all-reduce", "all-reduce"]


def test_one_trace_while_values_change():
    p = make_problem()

    @jax.jit
    @chex.assert_max_traces(1)
    def step(logits, targets, mask, temperature, coef):
        def loss(logits):
            out = jrl.token_logprobs_and_entropy(
                logits,
                targets,
                loss_mask=mask,
                entropy_coef=coef,
                transform=jrl.LogitTransform(temperature=temperature),
            )
            return out.logprobs.sum() + coef * out.entropy.sum()

        return jax.grad(loss)(logits)

    chex.clear_trace_counter()
    for i in range(4):
        step(p.logits + i, (p.targets + i) % 40, p.loss_mask ^ (i % 2 == 0), p.temperature * (1 + i), jnp.float32(i))
    assert step._cache_size() == 1
