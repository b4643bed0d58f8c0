"""Ops from hidden states against the float64 oracle: values, and gradients of hidden states, head, adapter and bias."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, MeshCase, MESHES, ordinarily, replaced
from jax.sharding import AxisType, PartitionSpec as P
from linear_checks import (
    BOTH,
    check_linear,
    ENTROPY,
    fill_padding,
    GATHER,
    HEADS,
    LOGPROBS,
    LOOPS,
    make_linear_problem,
    OPS,
    oracle,
    RAGGED_VOCAB,
    SMALL_BLOCKS,
    value_and_gradients,
)

import jaxrl_logprob as jrl
from jaxrl_logprob import reference


DTYPES = {
    "f32": (jnp.float32, jnp.float32),
    "bf16": (jnp.bfloat16, jnp.bfloat16),
    "f16": (jnp.float16, jnp.float16),
    "bf16 of f32": (jnp.bfloat16, jnp.float32),
    "f32 of bf16": (jnp.float32, jnp.bfloat16),
}
TRUE_VOCAB = 1100
RAGGED = dict(vocab=RAGGED_VOCAB, true_vocab=TRUE_VOCAB)  # the last of eight shards has a block of padding alone
# Each op on each mesh in each order of the loops; the heads, and the dtypes of hidden states and head, in turn.
IN_TURN = [
    (loop, op, mesh, HEADS[(i + i // 4) % 4], list(DTYPES)[(i + i // 5) % 5])
    for i, (loop, op, mesh) in enumerate(itertools.product(LOOPS, OPS, MESHES))
]
FEW = [
    ("vocab", GATHER, "1x8"),
    ("vocab", ENTROPY, "2x2x2"),
    ("tokens", BOTH, "none"),
    ("tokens", BOTH, "2x2x2"),
]
both_loops = pytest.mark.parametrize("loop", ordinarily("vocab", of=LOOPS))
quick = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize(
    "loop, op, mesh, head, dtype", ordinarily(*(row for row in IN_TURN if row[:3] in FEW), of=IN_TURN)
)
def test_linear_op_equals_oracle(loop, op, mesh, head, dtype):
    """With every option at once, over several tiles of rows; the padding of the vocabulary holds large numbers."""
    dtype, head_dtype = DTYPES[dtype]
    p = make_linear_problem(batch=(2, 150), dtype=dtype, head_dtype=head_dtype, head=head, bias=True, **RAGGED)
    p = p._replace(targets=replaced(p.targets, np.s_[0, ::5], -100))
    transform = jrl.LogitTransform(temperature=p.temperature, logit_softcap=5.0, vocab_size=TRUE_VOCAB)
    _, (_, dlm_head, dbias) = check_linear(
        op, fill_padding(p, TRUE_VOCAB, 1e4), MESHES[mesh], clean=p, chunks=LOOPS[loop], loss_mask=p.loss_mask,
        transform=transform,
    )  # fmt: skip
    matrix = dlm_head.lm_head if isinstance(dlm_head, jrl.LoraHead) else dlm_head
    matrix = np.asarray(matrix.embedding).T if isinstance(matrix, jrl.TiedEmbedding) else np.asarray(matrix)
    assert not matrix[:, TRUE_VOCAB:].any() and not np.asarray(dbias)[TRUE_VOCAB:].any()


@pytest.mark.parametrize(
    "loop, head, dtype", ordinarily(("vocab", "lora", "bf16"), of=itertools.product(LOOPS, HEADS, DTYPES))
)
def test_linear_op_of_every_head_and_dtype(loop, head, dtype):
    dtype, head_dtype = DTYPES[dtype]
    p = make_linear_problem(dtype=dtype, head_dtype=head_dtype, head=head, vocab=RAGGED_VOCAB)
    check_linear(BOTH, p, chunks=LOOPS[loop])


@pytest.mark.parametrize("op, mesh", ordinarily((BOTH, "none"), of=itertools.product(OPS, ["none", "2x2x2"])))
def test_linear_op_without_options(op, mesh):
    check_linear(op, make_linear_problem(), MESHES[mesh], chunks=jrl.Chunks())


@pytest.mark.parametrize(
    "option", ordinarily(of=["loss_mask", "logit_softcap", "temperature", "per token", "vocab_size", "ignore_index"])
)
@pytest.mark.parametrize("mesh", ["none", "2x2x2"])
def test_linear_op_with_each_option_alone(option, mesh):
    p = make_linear_problem(**RAGGED)
    options = {
        "loss_mask": dict(loss_mask=p.loss_mask),
        "logit_softcap": dict(transform=jrl.LogitTransform(logit_softcap=3.0)),
        "temperature": dict(transform=jrl.LogitTransform(temperature=0.7)),
        "per token": dict(transform=jrl.LogitTransform(temperature=p.temperature)),
        "vocab_size": dict(transform=jrl.LogitTransform(vocab_size=TRUE_VOCAB)),
        "ignore_index": dict(ignore_index=int(p.targets[0, 0])),
    }
    check_linear(BOTH, p, MESHES[mesh], **options[option])


@pytest.mark.parametrize("mesh, loop", ordinarily(("none", "tokens"), of=itertools.product(["none", "2x2x2"], LOOPS)))
def test_linear_op_float64(mesh, loop):
    with jax.enable_x64(True):
        p = make_linear_problem(dtype=jnp.float64, bias=True, head="lora")
        transform = jrl.LogitTransform(temperature=0.7, logit_softcap=100.0)
        check_linear(BOTH, p, MESHES[mesh], chunks=LOOPS[loop], loss_mask=p.loss_mask, transform=transform)


FSDP = {
    "over the axis of the batch": MeshCase(
        {"data": 2, "context": 2, "vocab": 2}, jrl.MeshAxes(("data", "context"), "vocab", features="data")
    ),
    "over both axes of tokens": MeshCase(
        {"data": 2, "context": 2, "vocab": 2}, jrl.MeshAxes(("data", "context"), "vocab", features=("context", "data"))
    ),
    "over an axis of its own": MeshCase(
        {"data": 2, "fsdp": 2, "vocab": 2}, jrl.MeshAxes("data", "vocab", features="fsdp")
    ),
    "over one of tokens and one of its own": MeshCase(
        {"data": 2, "fsdp": 2, "vocab": 2}, jrl.MeshAxes("data", "vocab", features=("data", "fsdp"))
    ),
    "and no split of the vocabulary": MeshCase({"data": 4}, jrl.MeshAxes("data", features="data")),
}
SEQUENCE_PARALLEL = {
    "2x4": MeshCase({"context": 2, "vocab": 4}, jrl.MeshAxes((None, "context"), "vocab", sequence_parallel=True)),
    "1x8": MeshCase({"vocab": 8}, jrl.MeshAxes(vocab="vocab", sequence_parallel=True)),
    "2x2x2, features over data": MeshCase(
        {"data": 2, "context": 2, "vocab": 2},
        jrl.MeshAxes(("data", "context"), "vocab", features="data", sequence_parallel=True),
    ),
}


@pytest.mark.parametrize(
    "where, head, loop",
    ordinarily(
        ("over an axis of its own", "tied", "tokens"),
        of=itertools.product(FSDP, ["array", "tied", "lora"], LOOPS),
    ),
)
def test_head_split_over_features(where, head, loop):
    """The gradient is split as the head is."""
    case, p = FSDP[where], make_linear_problem(batch=(4, 6), head=head)
    _, (_, dlm_head, _) = check_linear(BOTH, p, case, chunks=LOOPS[loop], loss_mask=p.loss_mask)
    if head == "array":
        assert dlm_head.sharding.is_equivalent_to(p.on(case, case.make()).lm_head.sharding, 2)


@pytest.mark.parametrize(
    "where, dtype, loop",
    ordinarily(
        ("2x4", "f32", "tokens"),
        of=itertools.product(SEQUENCE_PARALLEL, ["f32", "bf16"], LOOPS),
    ),
)
def test_sequence_parallel(where, dtype, loop):
    p = make_linear_problem(batch=(2, 24), dtype=DTYPES[dtype][0])
    check_linear(BOTH, p, SEQUENCE_PARALLEL[where], chunks=LOOPS[loop], loss_mask=p.loss_mask)


@pytest.mark.parametrize("op", ordinarily(of=OPS))
def test_sequence_parallel_with_an_adapter(op):
    check_linear(op, make_linear_problem(batch=(2, 24), head="lora"), SEQUENCE_PARALLEL["2x4"])


CASES = {**MESHES, **FSDP, **SEQUENCE_PARALLEL}


@quick
@pytest.mark.parametrize(
    "where",
    ordinarily(
        "2x2x2, features over data",
        of=["2x2x2", "over the axis of the batch", "over an axis of its own", "2x2x2, features over data"],
    ),
)
def test_explicit_axes_are_read_from_the_types(where):
    case, p = CASES[where], make_linear_problem(batch=(4, 8))
    mesh = case.make(AxisType.Explicit)
    expected, dexpected = oracle(BOTH, p)
    with jax.set_mesh(mesh):
        placed = p.on(case, mesh)
        out, gradients = value_and_gradients(jrl, BOTH, placed, chunks=SMALL_BLOCKS)
    for actual, exact in zip(jax.tree.leaves((out, gradients)), expected + dexpected, strict=True):
        assert_close(actual, exact, 3e-6)
    for x, d in zip(placed.differentiated[:2], gradients):
        assert jax.typeof(d).sharding.spec == jax.typeof(x).sharding.spec


@pytest.mark.slow
@pytest.mark.parametrize("where", [*FSDP, *SEQUENCE_PARALLEL])
def test_explicit_axes_given_too(where):
    p = make_linear_problem(batch=(4, 8), head="lora of tied", bias=True)
    check_linear(BOTH, p, CASES[where], axis_type=AxisType.Explicit, loss_mask=p.loss_mask)


@quick
@pytest.mark.parametrize(
    "gradient, loop, where",
    ordinarily(
        ("inside", "vocab", "2x4"),
        of=itertools.product(["inside", "outside"], LOOPS, ["2x4", "sequence parallel", "features"]),
    ),
)
def test_inside_the_callers_shard_map(gradient, loop, where, our_own_errors):
    cases = {
        "2x4": MESHES["2x4"],
        "sequence parallel": SEQUENCE_PARALLEL["2x4"],
        "features": FSDP["over the axis of the batch"],
    }
    case, p = cases[where], make_linear_problem(batch=(2, 16), bias=True)
    mesh = case.make()
    specs = jax.tree.unflatten(jax.tree.structure(p), p.specs(case.axes))
    names = [n for n in mesh.axis_names if n != "vocab"]

    def loss(differentiated, rest):
        h, w, b = differentiated
        out = jrl.linear_token_logprobs_and_entropy(
            h, w, rest.targets, bias=b, loss_mask=rest.loss_mask, axes=case.axes, chunks=LOOPS[loop]
        )
        return (out.logprobs * rest.dlogprobs + out.entropy * rest.dentropy).sum()

    def local(p):
        total = lambda d: jax.lax.psum(loss(d, p), names)
        if gradient == "outside":
            return total(p.differentiated)
        return total(p.differentiated), jax.grad(loss)(p.differentiated, p)

    out_specs = (P(), tuple(specs.differentiated)) if gradient == "inside" else P()
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=out_specs)
    outside = lambda p: jax.value_and_grad(lambda d: mapped(p._replace(**dict(zip(p._fields, d)))))(p.differentiated)
    value, gradients = jax.jit(mapped if gradient == "inside" else outside)(p.on(case, mesh))
    exact, dexact = oracle(BOTH, p, loss_mask=p.loss_mask)
    assert_close(value, (exact[0] * p.dlogprobs + exact[1] * p.dentropy).sum(), 3e-6)
    for d, e in zip(jax.tree.leaves(gradients), dexact, strict=True):
        assert_close(d, e, 3e-6)


def _per_row(score, p):
    """The loss of one row [T] of the batch, as a function of what is scanned or mapped over."""
    return lambda w, h, y, m, a, b: (lambda o: (o.logprobs * a + o.entropy * b).sum())(score(h, w, y, loss_mask=m))


@quick
@pytest.mark.parametrize("transform", ordinarily("scan", "vmap", of=["vmap", "remat", "scan", "no jit"]))
def test_linear_op_under_a_transformation(transform):
    p = make_linear_problem(batch=(3, 10))
    rows = (p.targets, p.loss_mask, p.dlogprobs, p.dentropy)
    score = lambda *args, **kw: jrl.linear_token_logprobs_and_entropy(*args, chunks=SMALL_BLOCKS, **kw)
    one = _per_row(score, p)
    if transform == "scan":
        step = lambda w: lambda total, row: (total + jax.checkpoint(one)(w, *row), None)
        total = lambda h, w: jax.lax.scan(step(w), 0.0, (h, *rows))[0]
    elif transform == "vmap":
        total = lambda h, w: jax.vmap(one, in_axes=(None, 0, 0, 0, 0, 0))(w, h, *rows).sum()
    else:
        one = jax.checkpoint(one) if transform == "remat" else one
        total = lambda h, w: one(w, h, *rows)
    run = jax.value_and_grad(total, (0, 1))
    value, gradients = (run if transform == "no jit" else jax.jit(run))(p.hidden_states, p.lm_head)
    exact, dexact = oracle(BOTH, p, loss_mask=p.loss_mask)
    assert_close(value, (exact[0] * p.dlogprobs + exact[1] * p.dentropy).sum(), 3e-6)
    for d, e in zip(gradients, dexact, strict=True):
        assert_close(d, e, 3e-6)


@pytest.mark.parametrize("head", ["tied", "lora"])
def test_head_is_a_tree_like_any_other(head):
    """JAX itself puts descriptions, specs and axes where its arrays were."""
    p = make_linear_problem(head=head)
    assert jax.tree.structure(jax.tree.map(lambda a: P(), p.lm_head)) == jax.tree.structure(p.lm_head)
    many = jax.tree.map(lambda a: a[None], p.lm_head)
    score = jax.vmap(lambda w: jrl.linear_token_logprobs(p.hidden_states, w, p.targets))
    assert jax.jit(score).lower(many).out_info.shape == (1, *p.targets.shape)


@quick
@pytest.mark.slow
def test_vmap_over_heads():
    """A head for each row of the batch."""
    p = make_linear_problem(batch=(3, 10))
    heads = jnp.stack([p.lm_head, 2 * p.lm_head, -p.lm_head])
    of = lambda lib: lambda h, w: (jax.vmap(lib.linear_token_logprobs)(h, w, p.targets) * p.dlogprobs).sum()
    actual = jax.jit(jax.value_and_grad(of(jrl), (0, 1)))(p.hidden_states, heads)
    exact = jax.jit(jax.value_and_grad(of(reference), (0, 1)))(p.hidden_states, heads)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(exact), strict=True):
        assert_close(a, e, 1e-5)


@pytest.mark.parametrize("batch, loop", ordinarily(((), "tokens"), of=itertools.product([(), (5,), (2, 3, 4)], LOOPS)))
def test_linear_op_of_any_batch_rank(batch, loop):
    check_linear(BOTH, make_linear_problem(batch=batch), chunks=LOOPS[loop])


@pytest.mark.parametrize(
    "op, mesh, batch",
    ordinarily((BOTH, "2x2x2", (0, 4)), of=itertools.product(OPS, ["none", "2x2x2"], [(0, 4), (2, 0)])),
)
def test_no_tokens(op, mesh, batch):
    """The gradient of the head is there, and 0."""
    out, (dhidden, dlm_head, dbias) = check_linear(op, make_linear_problem(batch=batch, bias=True), MESHES[mesh])
    assert dhidden.size == 0 and all(o.size == 0 for o in out)
    assert not dlm_head.any() and not dbias.any()


@pytest.mark.parametrize(
    "num_ids, mesh, loop",
    ordinarily((9, "none", "tokens"), of=itertools.product([0, 1, 8, 9, 40], ["none", "2x2x2"], LOOPS)),
)
def test_gather_of_any_number_of_ids(num_ids, mesh, loop):
    """By comparison up to 8 ids, by scatter beyond; ids may repeat and be ignored."""
    p = make_linear_problem(num_ids=num_ids)
    ids = p.ids.at[..., -1:].set(-100).at[..., :2].set(p.ids[..., :1]) if num_ids else p.ids
    check_linear(GATHER, p._replace(ids=ids), MESHES[mesh], chunks=LOOPS[loop], loss_mask=p.loss_mask)


@pytest.mark.parametrize("coef", ordinarily(-0.5, of=[1.0, -0.5, jnp.float32(0.0)]))
@pytest.mark.parametrize("op", ordinarily(of=[BOTH, ENTROPY]))
def test_gate_open(op, coef):
    check_linear(op, make_linear_problem(), entropy_coef=coef)


@pytest.mark.parametrize("op", ordinarily(ENTROPY, of=[BOTH, ENTROPY]))
def test_gate_shut(op):
    _, gradients = check_linear(op, make_linear_problem(), entropy_coef=0.0)
    if op == ENTROPY:
        assert not any(d.any() for d in jax.tree.leaves(gradients))


def same_bits(a, b) -> bool:
    return all((x == y).all() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


EXACT = [(dtype, mesh, loop) for dtype in ("f32", "bf16") for mesh in ("none", "2x4") for loop in LOOPS]


@pytest.mark.parametrize("dtype, mesh, loop", ordinarily(("f32", "none", "vocab"), of=EXACT))
def test_gate_shut_is_bit_for_bit_linear_token_logprobs(dtype, mesh, loop):
    case, p = MESHES[mesh], make_linear_problem(dtype=DTYPES[dtype][0])
    m = case.make()
    kw = dict(axes=case.axes, mesh=m, chunks=LOOPS[loop], loss_mask=p.loss_mask)
    both, gradients = value_and_gradients(jrl, BOTH, p.on(case, m), entropy_coef=0.0, **kw)
    alone, gradients_alone = value_and_gradients(jrl, LOGPROBS, p.on(case, m), **kw)
    assert same_bits((both[0], gradients), (alone, gradients_alone)) and both[1].any()


@pytest.mark.parametrize("rows", ordinarily(150, of=[20, 150, 300]))
@pytest.mark.parametrize("dtype, mesh, loop", ordinarily(("f32", "none", "tokens"), of=EXACT))
def test_token_chunk_changes_no_bit(dtype, mesh, loop, rows):
    """Of the results and of dhidden_states; dlm_head is a sum over the tiles. They divide the rows, or do not, or are
    larger than all of them; of 600 rows, there are large ones and then small ones."""
    case, p = MESHES[mesh], make_linear_problem(batch=(2, rows), vocab=RAGGED_VOCAB, dtype=DTYPES[dtype][0])
    m = case.make()
    run = lambda token_chunk: value_and_gradients(
        jrl, BOTH, p.on(case, m), axes=case.axes, mesh=m, loss_mask=p.loss_mask,
        chunks=dataclasses.replace(LOOPS[loop], token_chunk=token_chunk),
    )  # fmt: skip
    whole, (dhidden, dlm_head, _) = run(None)
    for token_chunk in [128] if rows == 150 else [8, 104, 128, 256, 10_000]:
        out, gradients = run(token_chunk)
        assert same_bits((out, gradients[0]), (whole, dhidden)), token_chunk
        assert_close(gradients[1].astype(jnp.float32), dlm_head.astype(jnp.float32), 0.02 if dtype == "bf16" else 6e-6)


@pytest.mark.parametrize("dtype, mesh, loop", ordinarily(("bf16", "none", "vocab"), of=EXACT))
def test_old_logprobs_give_a_ratio_of_exactly_one(dtype, mesh, loop):
    """Scored alone, without the entropy that the differentiated call has."""
    case, p = MESHES[mesh], make_linear_problem(dtype=DTYPES[dtype][0])
    m = case.make()
    p = p.on(case, m)
    kw = dict(axes=case.axes, mesh=m, chunks=LOOPS[loop], loss_mask=p.loss_mask)
    old = jax.jit(lambda h, w: jrl.linear_token_logprobs(h, w, p.targets, **kw))(*p[:2])

    def loss(h, w, old):
        out = jrl.linear_token_logprobs_and_entropy(h, w, p.targets, **kw)
        ratio = jnp.exp(out.logprobs - old)
        return (ratio + 0.01 * out.entropy).sum(), ratio

    (_, ratio), _ = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*p[:2], old)
    assert (ratio == 1).all()


@pytest.mark.parametrize(
    "dtype, options",
    ordinarily(
        of=itertools.product(["f32", "bf16"], [{}, dict(temperature=0.7), dict(temperature=0.7, logit_softcap=5.0)])
    ),
)
def test_unused_entropy_changes_no_bit_of_the_logprobs(dtype, options):
    """XLA drops what is not used, and must not then compute the rest otherwise."""
    p = make_linear_problem(dtype=DTYPES[dtype][0])
    kw = dict(transform=jrl.LogitTransform(**options), chunks=SMALL_BLOCKS)
    both = lambda h, w: jrl.linear_token_logprobs_and_entropy(h, w, p.targets, **kw)
    used = jax.jit(lambda h, w: tuple(both(h, w)))(*p[:2])[0]
    assert (jax.jit(lambda h, w: both(h, w).logprobs)(*p[:2]) == used).all()
    assert (jax.jit(lambda h, w: jrl.linear_token_logprobs(h, w, p.targets, **kw))(*p[:2]) == used).all()
    gather = jax.jit(lambda h, w: jrl.linear_gather_logprobs(h, w, p.targets[..., None], **kw))(*p[:2])
    assert (gather[..., 0] == used).all()
