"""What the compiled programs of ops from hidden states hold: no [N, V], collectives, temporaries, products, copies."""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from checks import MeshCase, MESHES, ordinarily
from jax.extend.core import jaxprs_in_params
from linear_checks import BOTH, cotangents, LOOPS, make_linear_problem, OPS
from test_structure import collectives, temporaries

import jaxrl_logprob as jrl
from jaxrl_logprob._chunks import choose_blocks
from jaxrl_logprob._tiles import take_rows


N, D, V = 2048, 512, 32768
MIB = 2**20
CASES = {
    **MESHES,
    "features": MeshCase(
        {"data": 2, "context": 2, "vocab": 2}, jrl.MeshAxes(("data", "context"), "vocab", features="data")
    ),
    "sequence parallel": MeshCase(
        {"context": 2, "vocab": 4}, jrl.MeshAxes((None, "context"), "vocab", sequence_parallel=True)
    ),
}
# Local rows and columns are multiples of the blocks: no ragged ones, whose collectives would stand in the program too.
SMALL = dict(batch=(4, 384), width=16, vocab=1024)
BLOCKS = jrl.Chunks(token_chunk=64, vocab_chunk=128)


every_loop = pytest.mark.parametrize("loop", ordinarily("vocab", of=LOOPS))


@functools.cache
def small_program(where: str, op: str = BOTH, *, loop=None, dtype=jnp.float32, head="array", gradients_of=(0, 1)):
    """Compiled for arrays of `SMALL`: the op and its gradients with respect to hidden states (0) and head (1)."""
    case = CASES[where]
    mesh = case.make()
    p = make_linear_problem(**SMALL, dtype=dtype, head=head).on(case, mesh)
    chunks = dataclasses.replace(BLOCKS, loop=loop)

    def run(p):
        def score(*differentiated):
            h, w = (dict(enumerate(p[:2])) | dict(zip(gradients_of, differentiated))).values()
            return OPS[op](jrl, p, h, w, axes=case.axes, mesh=mesh, chunks=chunks)

        out, pull = jax.vjp(score, *(p[i] for i in gradients_of))
        return out, pull(cotangents(op, p)) if gradients_of else None

    # As leaves: `lower` also puts its own descriptions of arrays into the trees of its arguments.
    leaves, tree = jax.tree.flatten(p)
    return jax.jit(lambda leaves: run(tree.unflatten(leaves))).lower(leaves).compile()


def largest_array(compiled) -> int:
    """Elements of the largest array anywhere in the program, inside fusions too."""
    shapes = re.findall(r"\b(?:pred|bf16|[fsu]\d+)\[([\d,]+)\]", compiled.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@every_loop
@pytest.mark.parametrize(
    "where, dtype, head",
    ordinarily(
        ("none", jnp.float32, "tied"),
        ("features", jnp.float32, "array"),
        of=itertools.product(CASES, [jnp.float32, jnp.bfloat16], ["array", "tied", "lora"]),
    ),
)
def test_no_array_of_tokens_by_vocabulary(where, dtype, head, loop):
    """Nor of one device's tokens by its vocabulary: nothing is larger than hidden states or head."""
    compiled = small_program(where, loop=loop, dtype=dtype, head=head)
    assert largest_array(compiled) <= 16 * 4 * 384


FORWARD = {
    "2x2x2": [("all-reduce", "f32[384]", "maximum"), ("all-reduce", "f32[3,384]", "add")],
    "features": [("all-reduce", "f32[384]", "maximum"), ("all-reduce", "f32[3,384]", "add")],
    "sequence parallel": [("all-reduce", "f32[768]", "maximum"), ("all-reduce", "f32[3,768]", "add")],
}
GATHERED = {
    "2x2x2": [],
    "features": [("all-gather", "f32[16,512]", "")],
    "sequence parallel": [("all-gather", "f32[4,192,16]", "")],
}
DHIDDEN = {
    ("2x2x2", "vocab"): [("all-reduce", "f32[128,16]", "add")],
    ("2x2x2", "tokens"): [("all-reduce", "f32[128,16]", "add"), ("all-reduce", "s32[]", "maximum")],
    ("features", "vocab"): [("all-reduce", "f32[128,16]", "add")],
    ("features", "tokens"): [("all-reduce", "f32[128,16]", "add"), ("all-reduce", "s32[]", "maximum")],
    # 192 rows on a device, in tiles of 128 and a ragged tail.
    ("sequence parallel", "vocab"): [("reduce-scatter", f"f32[{rows},16]", "add") for rows in (128, 64)],
    ("sequence parallel", "tokens"): [("reduce-scatter", "f32[4,48,16]", "add")],
}
DHEAD = {
    "2x2x2": [("all-reduce", "f32[16,128]", "add")],
    "features": [("reduce-scatter", "f32[8,128]", "add"), ("all-reduce", "f32[8,128]", "add")],
    "sequence parallel": [("all-reduce", "f32[16,128]", "add")],
}


@pytest.mark.parametrize("where", ordinarily("features", of=FORWARD))
@pytest.mark.parametrize("op, floats", ordinarily((BOTH, 3), of=zip(OPS, (2, 3, 2, 4))))
def test_forward_has_one_max_and_one_sum_of_order_n(op, floats, where):
    """And what is split along its width or its tokens over the vocabulary axes is gathered once."""
    largest, total = FORWARD[where]
    packed = (total[0], total[1].replace("3,", f"{floats},"), total[2])
    assert collectives(small_program(where, op, gradients_of=())) == sorted([largest, packed, *GATHERED[where]])


@pytest.mark.parametrize(
    "where, loop",
    ordinarily(("sequence parallel", "tokens"), ("features", "vocab"), of=itertools.product(FORWARD, LOOPS)),
)
def test_backward_sums_each_gradient_once(where, loop):
    """Besides the forward's: dhidden_states over the vocabulary and dlm_head over tokens, whole or in blocks of which
    a loop sums each once; reduce-scattered where it is split."""
    expected = [*FORWARD[where], *GATHERED[where], *DHIDDEN[where, loop], *DHEAD[where]]
    assert collectives(small_program(where, loop=loop)) == sorted(expected)


@pytest.mark.parametrize("where, loop", ordinarily(of=itertools.product(FORWARD, LOOPS)))
def test_frozen_head_needs_no_sum_over_tokens(where, loop):
    expected = [*FORWARD[where], *GATHERED[where], *DHIDDEN[where, loop]]
    assert collectives(small_program(where, loop=loop, gradients_of=(0,))) == sorted(expected)


@every_loop
def test_no_mesh_needs_no_collectives(loop):
    assert collectives(small_program("none", loop=loop)) == []


@every_loop
def test_frozen_head_costs_no_product(loop):
    """One product forward; two backward, the logits again and dhidden_states; a third for dlm_head."""
    products = lambda of: len(re.findall(r" dot\(", small_program("none", loop=loop, gradients_of=of).as_text()))
    assert [products(of) for of in ((0,), (0, 1))] == [3, 4]


@every_loop
@pytest.mark.parametrize("where", ordinarily("none", of=["none", "2x2x2"]))
def test_tied_embedding_is_not_turned_around(where, loop):
    """Nor copied: what is copied are the zeros that its gradient starts from. (Split over features, XLA:CPU gathers it
    in another layout and turns that around.)"""
    text = small_program(where, loop=loop, head="tied").as_text()
    whole = r"\[(?:1024,16|16,1024|512,16|16,512|512,8|8,512)\]"
    made = re.findall(rf"= \w+{whole}\S* (transpose|copy)\(%?([\w-]*)", text)
    assert all(kind == "copy" and "broadcast" in of for kind, of in made), made


@functools.cache
def large_program(op=BOTH, *, tokens: int = N, vocab: int = V, loop=None, head="array", gradient=True, **kw):
    """Value and gradients for arrays [tokens, D] and [D, vocab] that are only shapes, compiled."""

    def loss(h, w, targets, weights):
        w = jrl.TiedEmbedding(w) if head == "tied" else w
        args = (h, w) if op == "linear_token_entropy" else (h, w, targets)
        out = getattr(jrl, op)(*args, chunks=jrl.Chunks(loop=loop), **kw)
        return sum((o * weights).sum() for o in jax.tree.leaves(out))

    shapes = [(tokens, D), (vocab, D) if head == "tied" else (D, vocab), (tokens,), (tokens,)]
    args = [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, [jnp.float32, jnp.float32, jnp.int32, jnp.float32])]
    return jax.jit(jax.value_and_grad(loss, (0, 1)) if gradient else loss).lower(*args).compile()


@pytest.mark.parametrize("head", ordinarily("array", of=["array", "tied"]))
def test_temporaries_are_an_accumulator_and_blocks(head):
    """4 MiB of it the N x D floats of dhidden_states; the logits would be 256 MiB."""
    assert temporaries(large_program(head=head)) <= 18 * MIB


@pytest.mark.slow
def test_temporaries_of_a_forward_are_blocks():
    assert temporaries(large_program(gradient=False)) <= 8 * MIB


@pytest.mark.parametrize("entropy_coef", ordinarily(1.0, of=[1.0, 0.0]))
def test_entropy_costs_no_memory(entropy_coef):
    """With its gradient and, case G01, with the gate shut."""
    other = {} if entropy_coef else dict(entropy_coef=0.0)
    assert abs(temporaries(large_program(**other)) - temporaries(large_program("linear_token_logprobs"))) <= 64 * N


def test_rows_next_to_each_other_are_cut_out():
    """Others are gathered, which costs more."""
    jaxpr = jax.make_jaxpr(take_rows)(jnp.zeros((64, 4)), jnp.arange(8))
    branches = next(e.params["branches"] for e in jaxpr.eqns if e.primitive.name == "cond")
    made = [[e.primitive.name for e in branch.eqns] for branch in branches]
    assert "gather" in made[0] and "dynamic_slice" in made[1] and "gather" not in made[1]


def test_temporaries_do_not_grow_with_the_vocabulary():
    small, large = temporaries(large_program()), temporaries(large_program(vocab=2 * V))
    assert abs(large - small) <= 0.1 * small


MANY, FEW = dict(tokens=16384, vocab=2048), dict(tokens=8192, vocab=2048)


def test_temporaries_of_more_tokens_than_columns():
    """D x V floats accumulate: 4 MiB, where those of dhidden_states would be 32."""
    rows, _, columns, _ = choose_blocks(jrl.Chunks(), tokens=MANY["tokens"], width=D, vocab=MANY["vocab"], is_cpu=True)
    # Of logits; of what they are the product of, and the gradients of that.
    block = 4 * (rows * columns + 2 * rows * D + 3 * D * columns)
    assert temporaries(large_program(**MANY)) <= 1.3 * 4 * D * MANY["vocab"] + block


@pytest.mark.slow
@pytest.mark.parametrize("loop", [None, "tokens"])
def test_temporaries_do_not_grow_with_the_tokens(loop):
    """But for what is kept of each token, which is not its D x 4 bytes."""
    many, few = (temporaries(large_program(loop=loop, **size)) for size in (MANY, FEW))
    assert many - few <= 256 * (MANY["tokens"] - FEW["tokens"])


def arrays(jaxpr):
    """Every intermediate of a jaxpr and of those inside it: elements."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield math.prod(variable.aval.shape)
        for inner in jaxprs_in_params(equation.params):
            yield from arrays(inner)


@pytest.mark.parametrize("case", ordinarily("2x4", of=["none", "2x4"]))
def test_four_million_tokens(case):
    """Lowered, not compiled; no intermediate is larger than an input or an accumulator of the same size."""
    case, tokens, width, vocab = CASES[case], 4 * 2**20, 1024, 131072
    mesh = case.make()

    def loss(h, w, targets, mask):
        out = jrl.linear_token_logprobs_and_entropy(h, w, targets, loss_mask=mask, axes=case.axes, mesh=mesh)
        return (out.logprobs + out.entropy).sum()

    shapes = [(4, tokens // 4, width), (width, vocab), (4, tokens // 4), (4, tokens // 4)]
    dtypes = [jnp.bfloat16, jnp.bfloat16, jnp.int32, jnp.bool_]
    args = [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, dtypes)]
    traced = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(*args)
    assert max(arrays(traced.jaxpr.jaxpr)) <= tokens * width
    assert traced.lower().as_text()
