"""Blocks of the head: some rows of the activations, some columns of the weights, their logits and their gradients."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._chunks import ALIGNMENT
from ._head import operand_dtype, Weight
from ._loop import Platform
from ._tiles import take_rows


class Operands(NamedTuple):
    """What is differentiated: logits = Σ_i activations_i @ weights_i + bias.

    Of gradients and the like, whatever is asked of each; None where nothing is. Where the second activations are the
    first @ `low_rank`, the gradient of the first has what comes through there, so that it is rounded once.
    """

    activations: list[Any]
    weights: list[Any]
    bias: Any
    low_rank: Any = None


def map_parts(fun: Callable, parts: Operands, *rest: Operands) -> Operands:
    """fun(part, ...) of each weight and of the bias, where `parts` has one; None elsewhere."""
    only = lambda part, *arrays: None if part is None else fun(part, *arrays)
    weights = [o._replace(activations=[], low_rank=None) for o in (parts, *rest)]
    return jax.tree.map(only, *weights, is_leaf=lambda x: x is None)


def head_logits(weights: tuple[Weight, ...], operands: Operands, dtype: Any) -> jax.Array:
    """Σ_i x_i W_i + bias, of activations [..., D] and all columns that are there, accumulated in `dtype`."""
    terms = [
        _product(x, m, (x.ndim - 1, 1 - w.vocab_dimension), operand_dtype(x, m), dtype)
        for x, m, w in zip(operands.activations, operands.weights, weights, strict=True)
    ]
    logits = sum(terms[1:], start=terms[0])
    return logits if operands.bias is None else logits + jnp.broadcast_to(operands.bias.astype(dtype), logits.shape)


class HeadBlocks:
    """Rows of the activations, blocks of the weights, and the logits they make."""

    def __init__(self, weights: tuple[Weight, ...], platform: Platform, operands: Operands):
        self.weights, self.platform, self.operands = weights, platform, operands
        self.stored = jax.tree.map(platform.stored, operands)

    def rows(self, rows: jax.Array, counted: jax.Array) -> list[jax.Array]:
        """The activations of these rows; 0 where they do not count, whatever they hold."""

        def take(x, stored):
            block = self.platform.loaded(take_rows(stored, rows), x.dtype)
            return jnp.where(counted[:, None], block, jnp.zeros((), x.dtype))

        return [take(x, s) for x, s in zip(self.operands.activations, self.stored.activations)]

    def block(self, first: jax.Array, width: int) -> Operands:
        """The weights and the bias of some columns."""
        cut = lambda m, s, axis: self.platform.loaded(lax.dynamic_slice_in_dim(s, first, width, axis), m.dtype)
        weights = [
            cut(m, s, w.vocab_dimension) for w, m, s in zip(self.weights, self.operands.weights, self.stored.weights)
        ]
        bias = self.operands.bias
        return Operands([], weights, None if bias is None else cut(bias, self.stored.bias, 0))

    def logits(self, xs: list[jax.Array], block: Operands, dtype: Any) -> jax.Array:
        """Σ_i x_i W_i + bias of rows and columns, accumulated in `dtype`."""
        return head_logits(self.weights, block._replace(activations=xs), dtype)

    def gradients(self, xs: list[jax.Array], block: Operands, dx: jax.Array, wanted: Operands) -> Operands:
        """Of activations, and of those weights and the bias that are not None in `wanted`, for the gradient of their
        logits; in the dtype of `dx`."""
        dxs, dws = [], []
        for x, m, w, weight_wanted in zip(xs, block.weights, self.weights, wanted.weights):
            operands = operand_dtype(x, m)
            operands = operands if operands == jnp.bfloat16 and self._bfloat16_products() else dx.dtype
            dxs.append(_product(dx, m, (1, w.vocab_dimension), operands, dx.dtype))
            pair = (x, dx) if w.vocab_dimension else (dx, x)
            dws.append(_product(*pair, (0, 0), operands, dx.dtype) if weight_wanted else None)
        return Operands(dxs, dws, jnp.sum(dx, axis=0) if wanted.bias else None)

    def _bfloat16_products(self) -> bool:
        """Whether gradients of logits are rounded for products with bfloat16: where the hardware has those, and nobody
        asks for better. (XLA:CPU widens them anyway; float16 would underflow.)"""
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
        return not self.platform.is_cpu and precision in (None, "default", "bfloat16", "BF16_BF16_F32")


def vocabulary_first(
    weights: tuple[Weight, ...], operands: Operands, platform: Platform
) -> tuple[tuple[Weight, ...], Operands]:
    """Every matrix as [V, D] where its V columns do not fill whole lanes of an accelerator.

    XLA for TPU keeps such a [D, V] with D along the lanes; asked for blocks of columns it would turn a copy of it
    around. The transpose is no more than another name for what is there.
    """
    if platform.is_cpu or operands.weights[0].shape[weights[0].vocab_dimension] % ALIGNMENT == 0:
        return weights, operands
    turned = [m.T if w.vocab_dimension else m for m, w in zip(operands.weights, weights)]
    first = tuple(dataclasses.replace(w, roles=w.roles[::-1]) if w.vocab_dimension else w for w in weights)
    return first, operands._replace(weights=turned)


def _product(x: jax.Array, y: jax.Array, contract: tuple[int, int], operands: Any, dtype: Any) -> jax.Array:
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(x.astype(operands), y.astype(operands), dimensions, preferred_element_type=dtype)
