"""A function of per-token arrays, run on each device's tokens: what segments and losses are made of."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from .sharding import MeshAxes, place, Placement
from .sharding._axes import axis_names
from .sharding._errors import wrong
from .sharding._placement import manual_axes, tokens_first, vma


def over_tokens(
    local: Callable,
    per_token: Mapping[str, jax.Array],
    whole: tuple[jax.Array, ...] = (),
    *,
    axes: MeshAxes | None,
    mesh: Mesh | AbstractMesh | None,
    out: Any,
) -> Any:
    """local(placement, *per_token, *whole) on each device's tokens; results "token" by token, or "whole" everywhere."""
    arrays = list(per_token.values())
    tokens = tokens_first(arrays[0].ndim)
    # The first says how all are split: masks and ids made on the spot come from wherever JAX puts them.
    name, first = next(iter(per_token.items()))
    placement = place(axes, mesh, {name: (first, tokens)}, rank=len(tokens))
    _must_vary(per_token, placement)
    specs = {"token": placement.spec(*tokens), "whole": placement.spec()}
    per_token_arrays = [placement.with_spec(array, *tokens) for array in arrays]
    whole_arrays = [placement.with_spec(array, None) for array in whole]
    run = placement.run(
        lambda *args: local(placement, *args),
        (specs["token"],) * len(arrays) + (specs["whole"],) * len(whole),
        jax.tree.map(specs.__getitem__, out),
    )
    return run(*per_token_arrays, *whole_arrays)


def _must_vary(per_token: Mapping[str, jax.Array], placement: Placement) -> None:
    """Inside the caller's shard_map: without varying types there would be no sum over devices, and no error."""
    missing = sorted(set(axis_names(placement.axes.tokens)) & manual_axes() - vma(list(per_token.values())))
    if missing:
        raise ValueError(
            wrong(
                " and ".join(f"`{name}`" for name in per_token).strip("`"),
                f"vary over the token axes {missing} inside your shard_map",
                "arrays that do not",
                "Split them there by in_specs, and keep check_vma=True.",
            )
        )
