"""What happens to logits before the softmax: softcap, absent columns, temperature, and the derivative of it."""

import numbers
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int32

from .sharding._errors import wrong


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LogitTransform:
    """Logits to the logits that are normalised: softcap, then leave out padded columns, then temperature.

        z = c tanh(x / c) / temperature,   with columns >= vocab_size absent

    Args:
        temperature: > 0, a number or an array, scalar or [*batch]. It may be traced: a change does not compile
            again. It is not differentiated; its gradient is zero.
        logit_softcap: c > 0 in the units of the logits, or None. Static. A logit of -inf becomes -c.
        vocab_size: the number of ids that exist where the logits have more columns (padding so that the
            vocabulary divides the mesh), or None: all of them. Static.

    Raises:
        ValueError: a softcap that is not positive and finite, vocab_size below 1; from the ops, a temperature that is
            a Python or NumPy value and not positive and finite.
        TypeError: a softcap that is not a number, vocab_size not an integer; from the ops, a temperature not real.

    References:
        Softcap: Gemma 2, https://arxiv.org/abs/2408.00118, section 2.
    """

    temperature: ArrayLike = 1.0
    logit_softcap: float | None = field(default=None, metadata={"static": True})
    vocab_size: int | None = field(default=None, metadata={"static": True})

    def __post_init__(self):
        # Not the temperature: it is data, and JAX puts placeholders there as it maps over trees. Each op checks it.
        if self.logit_softcap is not None:
            if isinstance(self.logit_softcap, bool) or not isinstance(self.logit_softcap, numbers.Real):
                raise TypeError(
                    wrong("logit_softcap", "be a Python number or None: it is static", repr(self.logit_softcap))
                )
            if not usable(self.logit_softcap):
                raise ValueError(wrong("logit_softcap", "be positive and finite, or None", repr(self.logit_softcap)))
            object.__setattr__(self, "logit_softcap", float(self.logit_softcap))
        if self.vocab_size is not None:
            check_static_int("vocab_size", self.vocab_size)
            if self.vocab_size < 1:
                raise ValueError(wrong("vocab_size", "be at least 1, or None", self.vocab_size))


def check_static_int(name: str, value: object) -> None:
    """Raises a TypeError for what is not a Python or NumPy integer."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(wrong(name, "be a Python integer: it is static", repr(value)))


def usable(values: ArrayLike) -> bool:
    """All positive, finite and not lost to overflow or underflow in float32."""
    values = np.asarray(values, np.float64)
    return bool(np.all((values >= np.finfo(np.float32).tiny) & (values <= np.finfo(np.float32).max / 4)))


def transform_logits(
    x: Float[Array, "*N V"], columns: Int32[Array, "*ones V"] | None, softcap: float | None, vocab_size: int
) -> Float[Array, "*N V"]:
    """Logits x, whose ids are `columns` (None where all of them exist), before the temperature."""
    # The case of -inf, which tanh would have got right, keeps XLA:CPU from computing tanh inside a reduction, where it
    # has another last bit: whether the entropy is asked for would show in the log-probabilities.
    z = x if softcap is None else jnp.where(x == -jnp.inf, -softcap, softcap * jnp.tanh(x / softcap))
    return z if columns is None else jnp.where(columns < vocab_size, z, -jnp.inf)


def transform_cotangent(
    dz: Float[Array, "N V"],
    x: Float[Array, "N V"],
    columns: Int32[Array, "1 V"] | None,
    softcap: float | None,
    vocab_size: int,
) -> Float[Array, "N V"]:
    """dx of `transform_logits`: exactly 0 at columns that do not exist, whatever they hold."""
    dx = dz if softcap is None else dz * (1.0 - jnp.square(jnp.tanh(x / softcap)))
    return dx if columns is None else jnp.where(columns < vocab_size, dx, 0.0)
