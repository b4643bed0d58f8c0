"""What the tests share: tolerances, one comparison, the meshes, random problems, and the float64 oracle."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxrl_logprob as jrl
from jaxrl_logprob import reference


# Largest error as a multiple of max(1, |expected|): float32 sums of a few hundred terms. Gradients in 16 bits are
# compared by `assert_rounded_once`.
VALUE_TOLERANCE = {"float64": 1e-13, "float32": 3e-6, "bfloat16": 3e-6, "float16": 3e-6}


def ordinarily(*few: Any, of: Iterable[Any]) -> list:
    """`of` for `parametrize`, with all but `few` left to the slow run: every program takes XLA a while to compile.

    A tuple is a row of several arguments.
    """
    row = lambda value: value if isinstance(value, tuple) else (value,)
    return [pytest.param(*row(value), marks=() if value in few else pytest.mark.slow) for value in of]


@contextlib.contextmanager
def quick_compilation():
    """What is compiled here is hardly optimised: for results compared to a tolerance, not for bits or programs."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def assert_close(actual, expected, tolerance: float, what: str = "") -> None:
    """Same shape, NaN and infinities in the same places, and close elsewhere; says the worst place otherwise."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    with np.errstate(invalid="ignore"):
        error = np.abs(actual - expected) / np.maximum(1.0, np.abs(expected))
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    error = np.where(same, 0.0, np.where(np.isnan(error), np.inf, error))
    if error.size:
        worst = np.unravel_index(np.argmax(error), error.shape)
        assert error[worst] <= tolerance, (
            f"{what}: error {error[worst]:.3g} at {tuple(map(int, worst))}, tolerance {tolerance:.3g}: "
            f"got {actual[worst]!r}, expected {expected[worst]!r}"
        )


def assert_rounded_once(actual, exact, what: str = "") -> None:
    """16-bit numbers that are `exact` rounded, or its neighbour where float32 arithmetic tips a tie; small ones too."""
    if not actual.size:
        return
    rounded = np.asarray(exact, np.float32).astype(actual.dtype)
    actual = np.asarray(actual)
    nan = np.isnan(actual) & np.isnan(rounded)
    order = lambda a: np.where(a.view(np.int16) < 0, -32768 - a.view(np.int16).astype(np.int32), a.view(np.int16))
    steps = np.where(nan, 0, np.abs(order(actual) - order(rounded)))
    error = np.abs(actual.astype(np.float64) - np.asarray(exact))
    close = (steps <= 1) | (error <= 1e-6)
    assert close.all(), f"{what}: {steps.max()} steps apart at {np.unravel_index(steps.argmax(), steps.shape)}"
    otherwise = np.mean((steps > 0) & (error > 1e-6))
    assert otherwise < 0.02, f"{what}: {otherwise:.1%} of the entries are rounded otherwise"


def replaced(array: jax.Array, index: Any, value: Any) -> jax.Array:
    """array.at[index].set(value), by NumPy: of small arrays, JAX would compile a program for each."""
    new = np.array(array)
    new[index] = value
    return jnp.asarray(new)


class MeshCase(NamedTuple):
    """A mesh and how [B, T, V] lies on it; None for no mesh at all."""

    sizes: dict[str, int] | None
    axes: jrl.MeshAxes | None

    def make(self, axis_type: AxisType = AxisType.Auto):
        return None if self.sizes is None else jrl.make_mesh(self.sizes, axis_type=axis_type)


MESHES = {
    "none": MeshCase(None, None),
    "1x1": MeshCase({"context": 1, "vocab": 1}, jrl.MeshAxes(tokens=(None, "context"), vocab="vocab")),
    "1x8": MeshCase({"context": 1, "vocab": 8}, jrl.MeshAxes(tokens=(None, "context"), vocab="vocab")),
    "2x4": MeshCase({"context": 2, "vocab": 4}, jrl.MeshAxes(tokens=(None, "context"), vocab="vocab")),
    "2x2x2": MeshCase({"data": 2, "context": 2, "vocab": 2}, jrl.MeshAxes(tokens=("data", "context"), vocab="vocab")),
}


class Problem(NamedTuple):
    """Logits [B, T, V], targets and cotangents that differ from token to token."""

    logits: jax.Array
    targets: jax.Array
    ids: jax.Array
    loss_mask: jax.Array
    temperature: jax.Array
    dlogprobs: jax.Array
    dentropy: jax.Array
    dgather: jax.Array

    def on(self, case: MeshCase, mesh) -> "Problem":
        """Every array placed as the axes say."""
        if mesh is None:
            return self
        tokens = case.axes.per_dimension(2)
        # From NumPy: to split an array that is on a device takes a program of its own.
        place = lambda a, *rest: jax.device_put(np.asarray(a), NamedSharding(mesh, P(*tokens, *rest)))
        return Problem(
            place(self.logits, case.axes.vocab),
            *(place(a, *(None,) * (a.ndim - 2)) for a in self[1:]),
        )


def make_problem(
    seed: int = 0,
    *,
    batch=(2, 12),
    vocab: int = 40,
    dtype=jnp.float32,
    scale: float = 3.0,
    num_ids: int = 3,
    true_vocab: int | None = None,
) -> Problem:
    rng = np.random.default_rng(seed)
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    top = true_vocab or vocab
    return Problem(
        jnp.asarray(np.asarray(scale * rng.normal(size=(*batch, vocab)), wide).astype(dtype)),
        jnp.asarray(rng.integers(0, top, batch), jnp.int32),
        jnp.asarray(rng.integers(0, top, (*batch, num_ids)), jnp.int32),
        jnp.asarray(rng.random(batch) > 0.25),
        jnp.asarray(rng.uniform(0.5, 2.0, batch), wide),
        *(jnp.asarray(rng.normal(size=s), wide) for s in (batch, batch, (*batch, num_ids))),
    )


OPS = {
    "token_logprobs": lambda lib, p, logits, **kw: (lib.token_logprobs(logits, p.targets, **kw),),
    "token_logprobs_and_entropy": lambda lib, p, logits, **kw: tuple(
        lib.token_logprobs_and_entropy(logits, p.targets, **kw)
    ),
    "token_entropy": lambda lib, p, logits, **kw: (lib.token_entropy(logits, **kw),),
    "gather_logprobs": lambda lib, p, logits, **kw: (lib.gather_logprobs(logits, p.ids, **kw),),
}
COTANGENTS = {
    "token_logprobs": lambda p: (p.dlogprobs,),
    "token_logprobs_and_entropy": lambda p: (p.dlogprobs, p.dentropy),
    "token_entropy": lambda p: (p.dentropy,),
    "gather_logprobs": lambda p: (p.dgather,),
}


_PROGRAMS: dict[tuple, Callable] = {}


def jit_once(run: Callable, lib, op: str, options: dict) -> Callable:
    """`run` jitted, and compiled once for equal options; `options` are all that it closes over, and hold no arrays."""
    # By `repr`, which tells 0 from 0.0 and -0.0; a mesh's leaves out its devices.
    key = (lib, op, options.get("mesh"), repr(options), jax.config.read("jax_disable_most_optimizations"))
    return _PROGRAMS.setdefault(key, jax.jit(run))


def widen(a: jax.Array) -> jax.Array:
    """Floating point as float64, where x64 is on; what else there is as it is."""
    return jnp.asarray(np.asarray(a).astype(np.float64)) if jnp.issubdtype(a.dtype, jnp.floating) else a


def value_and_gradient(lib, op: str, p: Problem, *, loss_mask=None, **kw):
    """The op's results and dlogits for the problem's cotangents, jitted; compiled once for equal options."""

    def run(p: Problem, loss_mask):
        out, pull = jax.vjp(lambda logits: OPS[op](lib, p, logits, loss_mask=loss_mask, **kw), p.logits)
        return out, pull(tuple(c.astype(o.dtype) for c, o in zip(COTANGENTS[op](p), out)))[0]

    if any(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(kw)):
        return jax.jit(run)(p, loss_mask)
    return jit_once(run, lib, op, kw)(p, loss_mask)


def oracle(op: str, p: Problem, **kw):
    """The same from `reference` in float64, of exactly the same inputs."""
    with jax.enable_x64(True), quick_compilation():
        if (transform := kw.get("transform")) is not None and isinstance(transform.temperature, jax.Array):
            kw["transform"] = dataclasses.replace(transform, temperature=widen(transform.temperature))
        out, gradient = value_and_gradient(reference, op, Problem(*map(widen, p)), **kw)
        return [np.asarray(o) for o in out], np.asarray(gradient)


def check_op(op: str, p: Problem, case: MeshCase = MESHES["none"], *, axis_type=AxisType.Auto, tolerance=None, **kw):
    """The op on a mesh against the oracle, in values and gradient. `kw` goes to both, `token_chunk` to the op."""
    chunk = {"token_chunk": kw.pop("token_chunk")} if "token_chunk" in kw else {}
    dtype = p.logits.dtype.name
    expected, dexpected = oracle(op, p, **kw)
    mesh = case.make(axis_type)
    placed = p.on(case, mesh)
    with quick_compilation():
        out, dlogits = value_and_gradient(jrl, op, placed, axes=case.axes, mesh=mesh, **chunk, **kw)
    assert dlogits.dtype == p.logits.dtype and dlogits.shape == p.logits.shape
    for o, e in zip(out, expected, strict=True):
        assert o.dtype == (jnp.float64 if dtype == "float64" else jnp.float32)
        assert_close(o, e, tolerance or VALUE_TOLERANCE[dtype], f"{op} value")
    if p.logits.dtype.itemsize == 2:
        assert_rounded_once(dlogits, dexpected, f"{op} gradient")
    else:
        assert_close(dlogits, dexpected, tolerance or VALUE_TOLERANCE[dtype], f"{op} gradient")
    return out, dlogits
