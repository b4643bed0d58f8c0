"""Ops from hidden states: the head of a language model and its log-probabilities in one, block by block.

Every public function here is one call of `_score`, as in `_logits`; what it does with a block of logits is in
`_scoring`, and its loops are in `_linear_loops`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import custom_vjp_primal_tree_values, CustomVJPPrimal, SymbolicZero
from jax.interpreters import ad
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Integer

from ._chunks import Chunks
from ._first_order import first_derivative_only, reverse_mode_only
from ._gate import apply_gate, entropy_gate, EntropyGate, NO_ENTROPY
from ._head import BIAS, check_bias, check_hidden_states, Head, head_activations, head_weights, LoraHead
from ._head_blocks import map_parts, Operands
from ._linear_loops import LinearScoring, local_backward, local_forward, local_gather
from ._operands import check_ids, TokenOperands
from ._scoring import arithmetic_dtype, LogprobsAndEntropy, operands_spec, prepare, TARGETS_REMEDY
from ._stats import Normalizer
from ._transform import LogitTransform
from .sharding import MeshAxes, place, Role
from .sharding._errors import wrong
from .sharding._placement import gathered_batch, hidden_roles, manual_shards, vocab_must_not_vary


def linear_token_logprobs(
    hidden_states: Float[Array, "*batch D"],
    lm_head: Head,
    targets: Integer[Array, "*batch"],
    *,
    bias: Float[Array, " V"] | None = None,
    loss_mask: Bool[Array, "*batch"] | None = None,
    transform: LogitTransform = LogitTransform(),
    ignore_index: int = -100,
    axes: MeshAxes | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    chunks: Chunks = Chunks(),
) -> Float[Array, "*batch"]:
    r"""Log-probability of each target under softmax(transform(hidden_states @ lm_head + bias)).

        logprob = z_y - log Σ_v exp z_v,   z = transform(hidden_states @ lm_head + bias)

    Nothing of size [tokens, vocabulary] exists, forward or backward. Everything else is as for `token_logprobs` of
    those logits.

    Sharding: batch dimensions over `axes.tokens`; V over `axes.vocab`; D of lm_head over `axes.features` too (FSDP),
        gathered once; hidden_states over `axes.vocab` along tokens too (`sequence_parallel`), gathered once. Forward:
        one max of N floats and one sum of 2N. Backward: dhidden_states is summed (or reduce-scattered) once over the
        vocabulary axes and dlm_head once over the token axes, block by block, in the dtypes of the inputs.
    Memory: for backward, the inputs and 8 bytes a token; the peak is the smaller of N x D and D x V floats, and blocks.
    Precision: products of hidden_states and lm_head in their own dtype (float32 where they differ), accumulated in
        float32, as is everything after; each gradient is rounded once on each device.
    Time: 1 product of N x D x V forward, 3 backward, over tokens that count: the others cost nothing.

    Args:
        hidden_states: last-layer activations, floating point.
        lm_head: [D, V], a `TiedEmbedding` or a `LoraHead`.
        targets: ids in [0, V), already aligned with the position that predicts them.
        bias: [V], added to the logits.
        loss_mask: True where the token counts; elsewhere hidden_states may hold anything.
        transform: softcap, vocabulary size and temperature.
        ignore_index: a target that does not count.
        axes: which mesh axes split what; may be left out where there is one device or the axes are Explicit.
        mesh: the mesh; that of `jax.set_mesh` when None.
        chunks: sizes of the blocks; by default chosen for the shapes and the platform.

    Returns:
        float32 (float64 where an input is), nats; 0 where the token does not count, NaN where a target is out of
        range.

    Raises:
        TypeError: hidden_states, lm_head or bias not floating point, targets not integers, loss_mask not bool.
        ValueError: shapes that do not match, `axes` that the mesh or the shapes do not allow, or several devices
            and no `axes`.

    Example:
        >>> hidden_states, lm_head = jnp.ones((2, 1)), jnp.array([[1.0, 2.0, 3.0]])
        >>> linear_token_logprobs(hidden_states, lm_head, jnp.array([2, -100])).round(4)
        Array([-0.4076,  0.    ], dtype=float32)
    """
    hidden_states = check_hidden_states(hidden_states)
    targets = check_ids("targets", targets, gathered_batch(hidden_states.shape[:-1], axes), TARGETS_REMEDY)
    return _validated_score(
        hidden_states, lm_head, bias, targets[..., None], loss_mask, transform, ignore_index, axes, mesh, chunks,
        NO_ENTROPY,
    )[0][..., 0]  # fmt: skip


def linear_token_logprobs_and_entropy(
    hidden_states: Float[Array, "*batch D"],
    lm_head: Head,
    targets: Integer[Array, "*batch"],
    *,
    entropy_coef: ArrayLike | None = 1.0,
    bias: Float[Array, " V"] | None = None,
    loss_mask: Bool[Array, "*batch"] | None = None,
    transform: LogitTransform = LogitTransform(),
    ignore_index: int = -100,
    axes: MeshAxes | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    chunks: Chunks = Chunks(),
) -> LogprobsAndEntropy:
    r"""Log-probability of each target, and the entropy of the distribution it was drawn from, in one pass.

    Arguments, sharding, memory, precision and time as for `linear_token_logprobs`, with one more float per token in
    the forward's sum and 4 more bytes a token kept for backward.

    Args:
        entropy_coef: the coefficient your loss gives the entropy. It is not multiplied in: it decides whether the
            entropy has a gradient, as in `token_logprobs_and_entropy`.

    Returns:
        `LogprobsAndEntropy`; both 0 where the token does not count.

    Example:
        >>> hidden_states, lm_head = jnp.ones((1, 1)), jnp.array([[2.0, 0.0, 0.0]])
        >>> out = linear_token_logprobs_and_entropy(hidden_states, lm_head, jnp.array([1]))
        >>> out.logprobs.round(4), out.entropy.round(4)
        (Array([-2.2395], dtype=float32), Array([0.6656], dtype=float32))
    """
    hidden_states = check_hidden_states(hidden_states)
    targets = check_ids("targets", targets, gathered_batch(hidden_states.shape[:-1], axes), TARGETS_REMEDY)
    logprobs, entropies = _validated_score(
        hidden_states, lm_head, bias, targets[..., None], loss_mask, transform, ignore_index, axes, mesh, chunks,
        entropy_gate(entropy_coef),
    )  # fmt: skip
    return LogprobsAndEntropy(logprobs[..., 0], entropies)


def linear_token_entropy(
    hidden_states: Float[Array, "*batch D"],
    lm_head: Head,
    *,
    entropy_coef: ArrayLike | None = 1.0,
    bias: Float[Array, " V"] | None = None,
    loss_mask: Bool[Array, "*batch"] | None = None,
    transform: LogitTransform = LogitTransform(),
    axes: MeshAxes | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    chunks: Chunks = Chunks(),
) -> Float[Array, "*batch"]:
    """Entropy of softmax(transform(hidden_states @ lm_head + bias)), nats; 0 where `loss_mask` is False.

    Arguments, sharding, memory, precision and time as for `linear_token_logprobs_and_entropy`.

    Example:
        >>> linear_token_entropy(jnp.ones((1, 1)), jnp.zeros((1, 2))).round(4)
        Array([0.6931], dtype=float32)
    """
    hidden_states = check_hidden_states(hidden_states)
    no_ids = jnp.zeros((*gathered_batch(hidden_states.shape[:-1], axes), 0), jnp.int32)
    gate = entropy_gate(entropy_coef)
    return _validated_score(hidden_states, lm_head, bias, no_ids, loss_mask, transform, -100, axes, mesh, chunks, gate)[
        1
    ]


def linear_gather_logprobs(
    hidden_states: Float[Array, "*batch D"],
    lm_head: Head,
    ids: Integer[Array, "*batch K"],
    *,
    bias: Float[Array, " V"] | None = None,
    loss_mask: Bool[Array, "*batch"] | None = None,
    transform: LogitTransform = LogitTransform(),
    ignore_index: int = -100,
    axes: MeshAxes | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    chunks: Chunks = Chunks(),
) -> Float[Array, "*batch K"]:
    """Log-probabilities of K ids for each token, under softmax(transform(hidden_states @ lm_head + bias)).

    Arguments, sharding, memory, precision and time as for `linear_token_logprobs`, with 1 + K floats a token in the
    forward's sum. An id may stand more than once; `ignore_index` leaves out one id, `loss_mask` the whole token.

    Example:
        >>> hidden_states, lm_head = jnp.ones((1, 1)), jnp.array([[1.0, 2.0, 3.0]])
        >>> linear_gather_logprobs(hidden_states, lm_head, jnp.array([[2, 0, -100]])).round(4)
        Array([[-0.4076, -2.4076,  0.    ]], dtype=float32)
    """
    hidden_states = check_hidden_states(hidden_states)
    num_ids = jnp.shape(ids)[-1] if jnp.ndim(ids) == jnp.ndim(hidden_states) else "K"
    remedy = "For one id per token without the last dimension, see `linear_token_logprobs`."
    ids = check_ids("ids", ids, (*gathered_batch(hidden_states.shape[:-1], axes), num_ids), remedy)
    return _validated_score(
        hidden_states, lm_head, bias, ids, loss_mask, transform, ignore_index, axes, mesh, chunks, NO_ENTROPY
    )[0]


def _validated_score(
    hidden_states, lm_head, bias, ids, loss_mask, transform, ignore_index, axes, mesh, chunks, gate: EntropyGate
) -> Any:
    *batch, width = hidden_states.shape
    if not isinstance(chunks, Chunks):
        raise TypeError(wrong("chunks", "be a Chunks", repr(chunks), "Chunks(token_chunk=..., vocab_chunk=...)."))
    weights, matrices = head_weights(lm_head, width, manual_shards(axes.features) if axes is not None else 1)
    columns = matrices[0].shape[weights[0].vocab_dimension]
    bias = check_bias(bias, columns)
    dtype = arithmetic_dtype(*jax.tree.leaves((hidden_states, matrices, bias)))
    rank = len(batch)
    arrays: dict[str, tuple[jax.Array, tuple[Role, ...]]] = {"hidden_states": (hidden_states, hidden_roles(rank))}
    arrays |= {w.name: (m, w.roles) for w, m in zip(weights, matrices)}
    if bias is not None:
        arrays["bias"] = (bias, ("vocab",))
    placement = place(axes, mesh, arrays, rank=rank)
    scoring, tokens = prepare(
        placement, ids, loss_mask, transform, ignore_index, gate,
        batch=ids.shape[:-1], width=columns, dtype=dtype, name="lm_head",
    )  # fmt: skip
    if not placement.axes.sequence_parallel:
        vocab_must_not_vary(hidden_states, placement, "hidden_states")
    if 0 in batch:
        return jnp.zeros(ids.shape, dtype), jnp.zeros(ids.shape[:-1], dtype)
    if isinstance(lm_head, LoraHead) and tokens.valid.shape != hidden_states.shape[:-1]:
        raise ValueError(
            wrong(
                "axes.sequence_parallel",
                "be False for a LoraHead inside your own shard_map",
                True,
                "Gather hidden_states there: jax.lax.all_gather(x, axis, axis=-2, tiled=True).",
            )
        )
    valid = placement.with_spec(tokens.valid, *placement.hidden[:-1])
    # The rule gives hidden_states what comes through the adapter: here that path is cut.
    (_, *adapted), low_rank = head_activations(lax.stop_gradient(hidden_states), lm_head, valid)
    low_rank = None if low_rank is None else placement.with_spec(lax.stop_gradient(low_rank), None, None)
    activations = [placement.with_spec(x, *placement.hidden) for x in (hidden_states, *adapted)]
    matrices = [placement.with_spec(m, *w.roles) for w, m in zip(weights, matrices)]
    bias = None if bias is None else placement.with_spec(bias, "vocab")
    activations, tokens = placement.vary_alike((activations, tokens))
    operands = jax.tree.map(reverse_mode_only, Operands(activations, matrices, bias, low_rank))
    out: Any = _score(LinearScoring(scoring, tuple(weights), chunks), operands, tokens)
    logprobs, entropies = out
    return logprobs, apply_gate(gate, entropies)


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Wanted:
    """Which weights are differentiated: a frozen lm_head costs neither its gradient's product nor its buffer."""

    names: frozenset[str]


class _Residuals(NamedTuple):
    """Kept for backward besides the operands: 8 bytes a token, 12 where the entropy is differentiated."""

    wanted: _Wanted
    operands: Operands
    tokens: TokenOperands
    norm: Normalizer
    entropies: Float[Array, "*batch"] | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _score(static: LinearScoring, operands: Operands, tokens: TokenOperands) -> Any:
    """(log-probabilities [*batch, K], entropies [*batch] or None), on any placement."""
    return _forward(static, _gathered(static, operands), tokens)[0]


def _score_fwd(static: LinearScoring, operands: Operands, tokens: TokenOperands):
    names = [*(w.name for w in static.weights), *([] if operands.bias is None else [BIAS.name])]
    primals = jax.tree.leaves((operands.weights, operands.bias), is_leaf=lambda x: isinstance(x, CustomVJPPrimal))
    wanted = _Wanted(frozenset(name for name, primal in zip(names, primals, strict=True) if primal.perturbed))
    operands, tokens = custom_vjp_primal_tree_values((operands, tokens))
    operands = _gathered(static, jax.tree.map(first_derivative_only, operands))
    out, norm = _forward(static, operands, tokens)
    entropies = out[1] if static.scoring.entropy.differentiated else None
    return out, _Residuals(wanted, operands, tokens, norm, entropies)


def _score_bwd(static: LinearScoring, residuals: _Residuals, cotangents):
    dlogprobs, dentropy = jax.tree.map(first_derivative_only, jax.tree.map(_instantiated, cotangents))
    dentropy = dentropy if static.scoring.entropy.differentiated else None
    place, wanted = static.scoring.placement, residuals.wanted.names
    ids, per_token = place.spec(*place.batch, None), place.spec(*place.batch)
    specs = _specs(static, gathered=False)
    only_wanted = map_parts(lambda _, spec: spec, static.parts(wanted), specs)
    doperands = place.run(
        partial(local_backward, static, wanted),
        (_specs(static, gathered=True), operands_spec(place), per_token, per_token, ids, per_token),
        only_wanted._replace(activations=specs.activations),
    )(*residuals[1:], dlogprobs, dentropy)
    return doperands, None


_score.defvjp(_score_fwd, _score_bwd, symbolic_zeros=True)


def _instantiated(cotangent: Any) -> jax.Array:
    if isinstance(cotangent, SymbolicZero):
        return cast(jax.Array, ad.instantiate_zeros(ad.Zero(cotangent.aval)))
    return cotangent


def _forward(static: LinearScoring, operands: Operands, tokens: TokenOperands) -> Any:
    place = static.scoring.placement
    ids, per_token = place.spec(*place.batch, None), place.spec(*place.batch)
    return place.run(
        partial(local_forward, static),
        (_specs(static, gathered=True), operands_spec(place)),
        ((ids, per_token), per_token),
    )(operands, tokens)


def _gathered(static: LinearScoring, operands: Operands) -> Operands:
    """The operands whole along features (FSDP) and along tokens over the vocabulary axes (sequence parallelism)."""
    place = static.scoring.placement
    if not place.features and not place.axes.sequence_parallel:
        return operands
    gather = partial(local_gather, static)
    return place.run(gather, (_specs(static, gathered=False),), _specs(static, gathered=True))(operands)


def _specs(static: LinearScoring, *, gathered: bool) -> Any:
    place = static.scoring.placement
    whole = lambda roles: (
        tuple({"sequence": "tokens", "features": None}.get(r, r) for r in roles) if gathered else roles
    )
    weights = [place.spec(*whole(w.roles)) for w in static.weights]
    activations = [place.spec(*whole(place.hidden))] * len(weights)
    return Operands(activations, weights, place.spec("vocab"), place.spec(None, None))
