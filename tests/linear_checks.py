"""What the tests of the ops from hidden states share: random problems, their placement, and the float64 oracle."""

import dataclasses
from typing import Any, NamedTuple

import checks
import jax
import jax.numpy as jnp
import numpy as np
from checks import assert_close, assert_rounded_once, MeshCase, MESHES, replaced, VALUE_TOLERANCE
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxrl_logprob as jrl
from jaxrl_logprob import reference
from jaxrl_logprob.sharding._axes import axis_names


HEADS = ["array", "tied", "lora", "lora of tied"]
# Of whole blocks of 128 columns on every mesh of `MESHES`; and, in 600, 300 or 150 columns, of those and a ragged one.
VOCAB, RAGGED_VOCAB, WIDTH = 1024, 1200, 8
# As `VALUE_TOLERANCE`: the gradient of the head is also a sum over tokens. Measured 3.2e-6 in float32.
GRADIENT_TOLERANCE = {"float64": 2e-13, "float32": 6e-6}
SMALL_BLOCKS = jrl.Chunks(token_chunk=8, vocab_chunk=128)
LOOPS = {loop: dataclasses.replace(SMALL_BLOCKS, loop=loop) for loop in ("vocab", "tokens")}


class LinearProblem(NamedTuple):
    """Hidden states [*batch, D], a head, targets, and cotangents that differ from token to token."""

    hidden_states: jax.Array
    lm_head: Any
    bias: jax.Array | None
    targets: jax.Array
    ids: jax.Array
    loss_mask: jax.Array
    temperature: jax.Array
    dlogprobs: jax.Array
    dentropy: jax.Array
    dgather: jax.Array

    @property
    def differentiated(self) -> tuple:
        return self[:3]

    def specs(self, axes: jrl.MeshAxes) -> list[P]:
        """The PartitionSpec of every array, in the order of `jax.tree.leaves`."""
        tokens = axes.per_dimension(self.targets.ndim)
        split = lambda *dimensions: P(*(axis_names(d) or None for d in dimensions))
        last = (tokens[-1], axes.vocab) if axes.sequence_parallel else tokens[-1]
        return [
            split(*tokens[:-1], last, None),
            *_head_specs(self.lm_head, axes),
            *([] if self.bias is None else [split(axes.vocab)]),
            *(split(*tokens, *(None,) * (a.ndim - len(tokens))) for a in self[3:]),
        ]

    def on(self, case: MeshCase, mesh) -> "LinearProblem":
        """Every array placed as the axes say."""
        if mesh is None:
            return self
        leaves, tree = jax.tree.flatten(self)
        # From NumPy: to split an array that is on a device takes a program of its own.
        put = [
            jax.device_put(np.asarray(a), NamedSharding(mesh, s))
            for a, s in zip(leaves, self.specs(case.axes), strict=True)
        ]
        return jax.tree.unflatten(tree, put)


def _head_specs(lm_head: Any, axes: jrl.MeshAxes) -> list[P]:
    if isinstance(lm_head, jrl.LoraHead):
        return [*_head_specs(lm_head.lm_head, axes), P(), P(None, axes.vocab), P()]
    return [P(axes.vocab, axes.features) if isinstance(lm_head, jrl.TiedEmbedding) else P(axes.features, axes.vocab)]


def make_linear_problem(
    seed: int = 0,
    *,
    batch=(2, 12),
    width: int = WIDTH,
    vocab: int = VOCAB,
    dtype=jnp.float32,
    head_dtype=None,
    head: str = "array",
    bias: bool = False,
    num_ids: int = 3,
    true_vocab: int | None = None,
) -> LinearProblem:
    """`head` is one of `HEADS`; of 16-bit arrays, the logits are about as far apart as of float32 ones."""
    head_dtype = head_dtype or dtype
    rng = np.random.default_rng(seed)
    wide = jnp.float64 if jnp.float64 in (dtype, head_dtype) else jnp.float32
    numbers = lambda *shape, scale=1.0, dtype=wide: np.asarray(scale * rng.normal(size=shape), wide).astype(dtype)
    normal = lambda *shape, **kw: jnp.asarray(numbers(*shape, **kw))
    top = true_vocab or vocab
    matrix = numbers(width, vocab, dtype=head_dtype)
    lm_head = jrl.TiedEmbedding(jnp.asarray(matrix.T)) if "tied" in head else jnp.asarray(matrix)
    if "lora" in head:
        a, b = normal(width, 4, scale=0.3, dtype=head_dtype), normal(4, vocab, dtype=head_dtype)
        lm_head = jrl.LoraHead(lm_head, a, b, jnp.asarray(0.5, wide))
    return LinearProblem(
        normal(*batch, width, dtype=dtype),
        lm_head,
        normal(vocab, dtype=head_dtype) if bias else None,
        jnp.asarray(rng.integers(0, top, batch), jnp.int32),
        jnp.asarray(rng.integers(0, top, (*batch, num_ids)), jnp.int32),
        jnp.asarray(rng.random(batch) > 0.25),
        jnp.asarray(rng.uniform(0.5, 2.0, batch), wide),
        *(normal(*s) for s in (batch, batch, (*batch, num_ids))),
    )


def fill_padding(p: LinearProblem, true_vocab: int, value: float) -> LinearProblem:
    """The problem with `value` in every column of the head and the bias from `true_vocab` on."""
    last = lambda a: replaced(a, np.s_[..., true_vocab:], value)

    def fill(head):
        if isinstance(head, jrl.LoraHead):
            return dataclasses.replace(head, lm_head=fill(head.lm_head), b=last(head.b))
        if isinstance(head, jrl.TiedEmbedding):
            return jrl.TiedEmbedding(replaced(head.embedding, np.s_[true_vocab:], value))
        return last(head)

    return p._replace(lm_head=fill(p.lm_head), bias=None if p.bias is None else last(p.bias))


OPS = {
    "linear_token_logprobs": lambda lib, p, h, w, **kw: (lib.linear_token_logprobs(h, w, p.targets, **kw),),
    "linear_token_logprobs_and_entropy": lambda lib, p, h, w, **kw: tuple(
        lib.linear_token_logprobs_and_entropy(h, w, p.targets, **kw)
    ),
    "linear_token_entropy": lambda lib, p, h, w, **kw: (lib.linear_token_entropy(h, w, **kw),),
    "linear_gather_logprobs": lambda lib, p, h, w, **kw: (lib.linear_gather_logprobs(h, w, p.ids, **kw),),
}
LOGPROBS, BOTH, ENTROPY, GATHER = OPS


def cotangents(op: str, p: LinearProblem) -> tuple:
    return checks.COTANGENTS[op.removeprefix("linear_")](p)  # pyright: ignore[reportArgumentType]


def value_and_gradients(lib, op: str, p: LinearProblem, *, loss_mask=None, transform=jrl.LogitTransform(), **kw):
    """The op's results, and the gradients of hidden states, head and bias; jitted, compiled once for equal options."""
    traced = isinstance(transform.temperature, jax.Array)

    def run(p: LinearProblem, loss_mask, temperature):
        options = dict(
            loss_mask=loss_mask,
            transform=dataclasses.replace(transform, temperature=temperature) if traced else transform,
            **kw,
        )
        out, pull = jax.vjp(lambda h, w, b: OPS[op](lib, p, h, w, bias=b, **options), *p.differentiated)
        return out, pull(tuple(c.astype(o.dtype) for c, o in zip(cotangents(op, p), out)))

    temperature = transform.temperature if traced else None
    static = dataclasses.replace(transform, temperature=1.0) if traced else transform
    return checks.jit_once(run, lib, op, dict(kw, transform=static, traced=traced))(p, loss_mask, temperature)


def oracle(op: str, p: LinearProblem, *, transform=jrl.LogitTransform(), **kw) -> tuple[list, list]:
    """The same from `reference` in float64, of exactly the same inputs; the gradients as a list of arrays."""
    with jax.enable_x64(True), checks.quick_compilation():
        if isinstance(transform.temperature, jax.Array):
            transform = dataclasses.replace(transform, temperature=checks.widen(transform.temperature))
        found = value_and_gradients(reference, op, jax.tree.map(checks.widen, p), transform=transform, **kw)
        out, gradients = ([np.asarray(a) for a in jax.tree.leaves(part)] for part in found)
        return out, gradients


def check_linear(
    op: str,
    p: LinearProblem,
    case: MeshCase = MESHES["none"],
    *,
    axis_type: AxisType = AxisType.Auto,
    chunks: jrl.Chunks = SMALL_BLOCKS,
    tolerance: float | None = None,
    clean: LinearProblem | None = None,
    **kw,
):
    """The op on a mesh against the oracle, in values and gradients. `kw` goes to both; `clean` is the problem that the
    oracle sees, where it is not the same one."""
    expected, dexpected = oracle(op, clean or p, **kw)
    mesh = case.make(axis_type)
    with checks.quick_compilation():
        out, gradients = value_and_gradients(jrl, op, p.on(case, mesh), axes=case.axes, mesh=mesh, chunks=chunks, **kw)
    wide = jnp.float64 in (p.hidden_states.dtype, jax.tree.leaves(p.lm_head)[0].dtype)
    for o, e in zip(out, expected, strict=True):
        assert o.dtype == (jnp.float64 if wide else jnp.float32)
        assert_close(o, e, tolerance or VALUE_TOLERANCE[o.dtype.name], f"{op} value")
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(p.differentiated)]
    leaves = (jax.tree.leaves(tree) for tree in (p.differentiated, gradients))
    for path, x, d, e in zip(paths, *leaves, dexpected, strict=True):
        assert d.dtype == x.dtype and d.shape == x.shape
        assert_gradient(d, e, f"{op} gradient{path}", mesh is None, tolerance)
    return out, gradients


def assert_gradient(actual, exact, what: str, one_device: bool, tolerance: float | None = None) -> None:
    """Rounded once on each device: on one, that is all; on several, their parts have been added since."""
    if actual.dtype.itemsize > 2 or tolerance:
        assert_close(actual, exact, tolerance or GRADIENT_TOLERANCE[actual.dtype.name], what)
    elif one_device:
        assert_rounded_once(actual, exact, what)
    else:
        assert_close(actual, exact, 4 * float(jnp.finfo(actual.dtype).eps), what)
