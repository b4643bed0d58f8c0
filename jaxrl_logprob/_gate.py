"""The entropy gate: whether an entropy is differentiated. One function decides, and every op asks it."""

import numbers
from typing import NamedTuple

import jax
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .sharding._errors import wrong


class EntropyGate(NamedTuple):
    """Whether an entropy is returned, and whether it has a gradient."""

    wanted: bool
    differentiated: bool


NO_ENTROPY = EntropyGate(False, False)


def entropy_gate(entropy_coef: ArrayLike | None) -> EntropyGate:
    """The gate of an op that returns the entropy."""
    return EntropyGate(True, entropy_is_differentiated(entropy_coef))


def apply_gate(gate: EntropyGate, entropies: jax.Array | None) -> jax.Array | None:
    """The entropies, stopped where the gate is shut."""
    return entropies if entropies is None or gate.differentiated else lax.stop_gradient(entropies)


def entropy_is_differentiated(entropy_coef: ArrayLike | None) -> bool:
    """False for None and for a Python or NumPy zero; True for any other number and for every JAX array.

    A JAX array is not looked at, traced or not: a schedule that happens to start at 0 compiles once.

    Raises:
        TypeError: `entropy_coef` is not a number, an array or None.
    """
    if entropy_coef is None:
        return False
    if isinstance(entropy_coef, jax.Array):
        return True
    if isinstance(entropy_coef, numbers.Number | np.ndarray | np.generic):
        return bool(np.any(np.asarray(entropy_coef) != 0))
    raise TypeError(wrong("entropy_coef", "be a number, an array or None", repr(entropy_coef)))
