"""The actor step: from packed tokens to updated parameters, in one jitted, sharded, donated function.

`make_actor_step` joins a Flax model, the head, a loss and an optax optimiser. A batch is M micro-batches of one shape;
the gradients are those of the whole batch, whatever is in which micro-batch. Needs optax, which Flax brings.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from . import segments
from ._scoring import LogprobsAndEntropy
from .losses import aggregate, Aggregation, kl_penalty, loss_denominator, policy_loss, policy_metrics, Recipe, RECIPES
from .losses._kl import KlEstimator
from .losses._sequences import Sequences
from .packing import Packed
from .sharding import from_same_data, MeshAxes
from .sharding._errors import wrong


class ActorBatch(NamedTuple):
    """M micro-batches of packed sequences; those without a token that counts cost nothing.

    Attributes:
        tokens, segment_ids, positions: as in `Packed`; sequences are numbered in each micro-batch.
        targets, loss_mask: as `segments.shift_targets` gives them.
        advantages: of each sequence.
        old_logprobs: of the targets, by the policy before the update: `ActorStep.score`.
        weights: importance weights for what sampled them, or None.
        ref_logprobs: of the targets, by the reference of the KL penalty, or None.
    """

    tokens: Int[Array, "M B T"]
    segment_ids: Int[Array, "M B T"]
    positions: Int[Array, "M B T"]
    targets: Int[Array, "M B T"]
    loss_mask: Bool[Array, "M B T"]
    advantages: Float[Array, "M S"]
    old_logprobs: Float[Array, "M B T"]
    weights: Float[Array, "M B T"] | None = None
    ref_logprobs: Float[Array, "M B T"] | None = None

    @classmethod
    def of(
        cls, packed: Packed, advantages: Float[np.ndarray | Array, " samples"], mesh: Mesh, axes: MeshAxes
    ) -> "ActorBatch":
        """The batch of `packing.stack_micro_batches`, put on the mesh, with old_logprobs 0: to be scored.

        Args:
            packed: the same in all processes.
            advantages: of each sample that was packed.
            axes: which mesh axes split [B, T].
        """
        place = functools.partial(from_same_data, mesh=mesh)
        per_token = PartitionSpec(None, *axes.per_dimension(2))
        ids, tokens, positions, mask = place(
            (packed.segment_ids, packed.tokens, packed.positions, packed.response_mask), spec=per_token
        )
        shift = jax.jit(functools.partial(segments.shift_targets, axes=_stacked(axes), mesh=mesh))
        targets, loss_mask = shift(tokens, ids, token_mask=mask)
        per_sequence = np.where(packed.samples >= 0, np.asarray(advantages, np.float32)[packed.samples], 0.0)
        nothing = place(np.zeros(packed.tokens.shape, np.float32), spec=per_token)
        return cls(tokens, ids, positions, targets, loss_mask, place(per_sequence.astype(np.float32)), nothing)


class Actor(NamedTuple):
    """All that an update changes."""

    params: Any
    opt_state: Any
    step: Int[Array, ""]


@dataclasses.dataclass(frozen=True)
class ActorLoss:
    """policy_loss by a recipe + kl_coef · KL to the reference.

    Args:
        recipe: objective, ratio and mean; its advantages are the caller's to use.
        max_length: of the mode "seq-mean-token-sum-norm".
        entropy_coef: a number, or a schedule of the step, as optax has them; a static 0 leaves the entropy's gradient
            out of the program.
        kl_coef: 0 leaves the penalty out; otherwise batches have `ref_logprobs`.
        kl_estimator: as for `kl_penalty`.
    """

    recipe: Recipe = RECIPES["grpo"]
    max_length: int | None = None
    entropy_coef: float | Callable[[Array], Array] = 0.0
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"


class ActorStep(NamedTuple):
    """What `make_actor_step` makes.

    Attributes:
        actor: shapes and shardings of an `Actor`: for compiling ahead of time, and for restoring a checkpoint.
        init: (params) -> Actor, with the optimiser's state split as the parameters are.
        score: (params, batch) -> LogprobsAndEntropy [M, B, T], without gradient; the function that the loss uses, so
            that ratios to these are exactly 1 before the first update.
        update: (actor, batch) -> (actor, metrics); the actor given is donated. Compiled once for each shape of batch.
    """

    actor: Actor
    init: Callable[[Any], Actor]
    score: Callable[[Any, ActorBatch], LogprobsAndEntropy]
    update: Callable[[Actor, ActorBatch], tuple[Actor, dict[str, Array]]]


def make_actor_step(
    params: Any,
    hidden_states: Callable[..., Float[Array, "B T D"]],
    head: Callable[[Any], Callable[..., LogprobsAndEntropy]],
    optimizer: optax.GradientTransformation,
    *,
    loss: ActorLoss = ActorLoss(),
    axes: MeshAxes | None = None,
    accumulation: int = 1,
    remat: Callable[..., bool] | None = None,
) -> ActorStep:
    """The step of an actor: call what it makes under `jax.set_mesh(mesh)`, or without a mesh.

    Args:
        params: the model's parameters, a pytree (an NNX module is one), on their devices; or their shapes, dtypes and
            shardings as `jax.ShapeDtypeStruct`.
        hidden_states: (params, tokens, positions, segment_ids) -> [B, T, D], the model up to its head.
        head: (params) -> a function of (hidden_states, targets, *, entropy_coef, loss_mask), as `LogprobHead` is.
        optimizer: of optax.
        loss: what is minimised.
        axes: which mesh axes split [B, T]; the head has its own.
        accumulation: M, the micro-batches of an update. The memory is that of one of them, and f32 gradients.
        remat: what the backward pass may keep of `hidden_states` instead of computing it again, a policy of
            `jax.checkpoint_policies`; None: as the model itself decides.

    Raises:
        ValueError: a batch of another number of micro-batches, or kl_coef without ref_logprobs.
    """
    if remat is not None:
        hidden_states = jax.checkpoint(hidden_states, policy=remat)
    aggregation = functools.partial(Aggregation, loss.recipe.loss_agg_mode, loss.max_length)

    def sequences(part: ActorBatch) -> Sequences:
        return Sequences(part.segment_ids, part.advantages.shape[0], axes)

    def scored(params: Any, part: ActorBatch, entropy_coef: Any) -> LogprobsAndEntropy:
        hidden = hidden_states(params, part.tokens, part.positions, part.segment_ids)
        return head(params)(hidden, part.targets, entropy_coef=entropy_coef, loss_mask=part.loss_mask)

    def part_of_loss(params: Any, part: ActorBatch, denominator: Array, entropy_coef: Any) -> tuple[Array, Any]:
        logprobs, entropy = scored(params, part, entropy_coef)
        of_part = aggregation(denominator, sequences(part))
        advantages = segments.spread_segments(part.advantages, part.segment_ids, axes=axes)
        value, tokens = policy_loss(
            logprobs,
            part.old_logprobs,
            advantages,
            loss_mask=part.loss_mask,
            objective=loss.recipe.objective,
            level=loss.recipe.level,
            weights=part.weights,
            entropy=entropy,
            entropy_coef=entropy_coef,
            aggregation=of_part,
        )
        kl = jnp.zeros_like(value)
        if loss.kl_coef and part.ref_logprobs is not None:
            penalty = kl_penalty(logprobs, part.ref_logprobs, estimator=loss.kl_estimator, loss_mask=part.loss_mask)
            kl = aggregate(penalty, of_part, loss_mask=part.loss_mask)
        return value + loss.kl_coef * kl, (tokens, kl)

    def where_tokens_count(compute: Callable, part: ActorBatch, there: Array) -> Any:
        nothing = lambda part: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(compute, part))
        return lax.cond(there, compute, nothing, part)

    def score(params: Any, batch: ActorBatch) -> LogprobsAndEntropy:
        static = loss.entropy_coef if not callable(loss.entropy_coef) else 1.0
        compute = lambda part: scored(params, part, static)
        scored_parts = lax.map(lambda xs: where_tokens_count(compute, *xs), (batch, _with_tokens(batch)))
        return lax.stop_gradient(scored_parts)

    def update(actor: Actor, batch: ActorBatch) -> tuple[Actor, dict[str, Array]]:
        _check_batch(batch, accumulation, loss)
        coef = loss.entropy_coef(actor.step) if callable(loss.entropy_coef) else loss.entropy_coef
        whole = Sequences(*_numbered(batch), axes and _stacked(axes))
        denominator = loss_denominator(batch.loss_mask, aggregation(None, whole))
        gradient = jax.value_and_grad(part_of_loss, has_aux=True)
        compute = lambda part: gradient(actor.params, part, denominator, coef)

        def add(gradients: Any, xs: tuple[ActorBatch, Array]) -> tuple[Any, Any]:
            (value, aux), more = where_tokens_count(compute, *xs)
            return jax.tree.map(lambda total, g: total + g.astype(total.dtype), gradients, more), (value, *aux)

        start = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.promote_types(p.dtype, jnp.float32)), actor.params)
        gradients, (values, tokens, kl) = lax.scan(add, start, (batch, _with_tokens(batch)))
        gradients = jax.tree.map(lambda g, p: g.astype(p.dtype), gradients, actor.params)
        updates, opt_state = optimizer.update(gradients, actor.opt_state, actor.params)
        metrics = {
            "loss": jnp.sum(values),
            "grad_norm": optax.tree.norm(gradients),
            **policy_metrics(tokens, sequences=whole),
        }
        if loss.kl_coef:
            metrics["kl_ref"] = jnp.sum(kl)
        if callable(loss.entropy_coef):
            metrics["entropy_coef"] = jnp.asarray(coef)
        return Actor(optax.apply_updates(actor.params, updates), opt_state, actor.step + 1), metrics

    actor = _abstract_actor(params, optimizer)
    shardings = jax.tree.map(lambda x: x.sharding, actor)
    make = lambda params: (optimizer.init(params), jnp.zeros((), jnp.int32))
    make = jax.jit(make, out_shardings=shardings[1:])
    return ActorStep(
        actor,
        lambda params: Actor(params, *make(params)),
        jax.jit(score),
        # The old actor's buffers become the new one's, which so must lie on the devices in just the same way.
        jax.jit(update, donate_argnums=0, out_shardings=(shardings, None)),
    )


def _with_tokens(batch: ActorBatch) -> Bool[Array, " M"]:
    """Which micro-batches have tokens that count."""
    return jnp.any(batch.loss_mask, axis=(1, 2))


def _numbered(batch: ActorBatch) -> tuple[Int[Array, "M B T"], int]:
    """The sequences numbered through all micro-batches, and how many there may be."""
    parts, each = batch.advantages.shape
    first = jnp.arange(parts, dtype=jnp.int32)[:, None, None] * each
    return jnp.where(batch.segment_ids > 0, batch.segment_ids + first, 0), parts * each


def _stacked(axes: MeshAxes) -> MeshAxes:
    """The axes of [M, B, T], of those of [B, T]."""
    return MeshAxes(tokens=(None, *axes.per_dimension(2)))


def _abstract_actor(params: Any, optimizer: optax.GradientTransformation) -> Actor:
    """Shapes and shardings: the optimiser's moments are split as their parameters are, its counts not at all."""
    abstract = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    params = jax.tree.map(lambda p: abstract(p, p.sharding), params)
    sharding = jax.tree.leaves(params)[0].sharding
    whole = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
    opt_state = optax.tree.map_params(
        optimizer,
        lambda s, p: abstract(s, p.sharding),
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda s: abstract(s, whole),
    )
    step: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    return Actor(params, opt_state, step)


def _check_batch(batch: ActorBatch, accumulation: int, loss: ActorLoss) -> None:
    if batch.tokens.shape[0] != accumulation:
        raise ValueError(wrong("batch", f"have accumulation={accumulation} micro-batches", batch.tokens.shape[0]))
    if loss.kl_coef and batch.ref_logprobs is None:
        raise ValueError(wrong("batch.ref_logprobs", "be given where kl_coef is not 0", None))
