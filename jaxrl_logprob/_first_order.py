"""Errors for the two ways of differentiating that the custom rules do not have, in words that name the way out.

JAX's own error for forward mode says only that a custom_vjp is in the way, and second derivatives would
silently differentiate the backward's loop, at the price of the [N, V] arrays this library exists to avoid.
"""

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


_REMEDY = (
    "jaxrl_logprob.reference has every op in plain JAX, under the same name and arguments: it "
    "differentiates to any order and in both modes, and holds [tokens, vocabulary] arrays."
)

_marked = Primitive("jaxrl_logprob_reverse_mode_only")
_marked_tangent = Primitive("jaxrl_logprob_reverse_mode_only_tangent")


def reverse_mode_only(x: jax.Array) -> jax.Array:
    """x; forward-mode differentiation (jvp, jacfwd, hessian) of what uses it raises a TypeError."""
    return _marked.bind(x)


@jax.custom_jvp
def first_derivative_only(x: jax.Array) -> jax.Array:
    """x; for use inside a custom rule: differentiating the rule itself raises a TypeError."""
    return x


@first_derivative_only.defjvp
def _first_derivative_only_jvp(primals, tangents):
    raise TypeError(f"jaxrl_logprob ops have no second derivative. {_REMEDY}")


def _raise_forward_mode(*args, **kwargs):
    raise TypeError(f"jaxrl_logprob ops have no forward-mode derivative (jvp, jacfwd, hessian). {_REMEDY}")


def _marked_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    # Reverse mode only ever transposes the tangent's primitive; forward mode has to evaluate it.
    return _marked.bind(x), dx if type(dx) is ad.Zero else _marked_tangent.bind(dx)


_marked.def_impl(lambda x: x)
_marked.def_abstract_eval(lambda x: x)
_marked_tangent.def_impl(_raise_forward_mode)
_marked_tangent.def_abstract_eval(lambda x: x)
ad.primitive_jvps[_marked] = _marked_jvp
ad.deflinear2(_marked_tangent, lambda cotangent, x: [cotangent])
mlir.register_lowering(_marked, lambda ctx, x: [x])
mlir.register_lowering(_marked_tangent, _raise_forward_mode)
batching.defvectorized(_marked)
batching.primitive_batchers[_marked_tangent] = _raise_forward_mode
