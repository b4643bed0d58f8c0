"""The entropy gate: whether an entropy is differentiated. One function decides, and every op asks it."""

import numbers

import jax
import numpy as np
from jax.typing import ArrayLike

from .sharding._errors import wrong


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
