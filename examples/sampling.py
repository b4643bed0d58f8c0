"""Completions from `llama.py`'s model: a jitted sampler with a KV cache.

This module owns the cache and the loop over tokens. It is imported, not run: `for_sampling` lays the model
out for decoding, `sample` draws a completion for each prompt. As with the model, call them under
`jax.set_mesh(mesh)`, or without a mesh.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray
from llama import abstract_model, axis_names, KeysValues, Llama, ModelAxes, param_sharding, segment_mask


class Samples(NamedTuple):
    """Completions, padded with the end-of-sequence id (and log-probability 0) after `lengths` tokens."""

    tokens: Int[Array, "B T"]
    lengths: Int[Array, " B"]  # Up to and including the end-of-sequence token.
    logprobs: Float[Array, "B T"]  # Of each token under the distribution that it was drawn from.


def for_sampling(model: Llama, mesh: Mesh) -> Llama:
    """A copy of the model laid out for `sample`: weights split over the tensor axis only.

    A decode step does too little arithmetic to gather all weights for it. It has no sequence to split either,
    so the sequence axis takes part of the batch instead.
    """
    axes = model.axes
    axes = ModelAxes(axis_names(axes.batch) + axis_names(axes.sequence), None, axes.tensor, fsdp=False)
    sampler = abstract_model(model.config, axes)
    placed = jax.device_put(nnx.state(model, nnx.Param), param_sharding(sampler, mesh))
    nnx.update(sampler, placed)
    return sampler


def prefill(
    model: Llama, prompts: Int[Array, "B P"], lengths: Int[Array, " B"], cache_size: int
) -> tuple[Float[Array, "B P D"], KeysValues]:
    """Hidden states of right-padded prompts, and a cache of `cache_size` slots (slot = position)."""
    positions = jnp.broadcast_to(jnp.arange(prompts.shape[1])[None], prompts.shape)
    mask = segment_mask(positions, (positions < lengths[:, None]).astype(jnp.int32))
    hidden_states, cache = model.run(prompts, positions, mask)
    room = [(0, 0), (0, 0), (0, cache_size - prompts.shape[1]), (0, 0), (0, 0)]
    return hidden_states, jax.tree.map(lambda x: jnp.pad(x, room), cache)


def decode(
    model: Llama, tokens: Int[Array, " B"], positions: Int[Array, " B"], cache: KeysValues
) -> tuple[Float[Array, "B 1 D"], KeysValues]:
    """Hidden state of one more token in each row, and the cache with that token in it."""
    tokens, positions = tokens[:, None], positions[:, None]
    slots = jnp.arange(cache[0].shape[2])[None]
    mask = (slots <= positions)[:, None]  # Slots after it may hold padding of the prompt: never seen.
    return model.run(tokens, positions, mask, slots == positions, cache)


@functools.partial(jax.jit, static_argnames="max_new_tokens")
def sample(
    model: Llama,
    prompts: Int[Array, "B P"],
    prompt_lengths: Int[Array, " B"],
    key: PRNGKeyArray,
    *,
    max_new_tokens: int,
    temperature: float,
    eos_ids: Sequence[int],
) -> Samples:
    """Draws a completion for each right-padded prompt, until all have ended or are at full length.

    Args:
        model: Usually from `for_sampling`.
        prompts: Token ids; what stands after a row's length is ignored.
        prompt_lengths: At least 1.
        key: Each step folds its number into this key.
        max_new_tokens: Size of the completions, at least 1. Compiled once per shape.
        temperature: Divides the logits; above 0.
        eos_ids: The tokens that end a completion; after its end stands the first of them.
    """

    def draw(step, hidden, samples: Samples, running):
        logits = model.logits(hidden)[:, 0] / temperature
        tokens = jax.random.categorical(jax.random.fold_in(key, step), logits)
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=1)[:, 0]
        tokens = jnp.where(running, tokens, ends[0])
        samples = Samples(
            samples.tokens.at[:, step].set(tokens),
            samples.lengths + running.astype(jnp.int32),
            samples.logprobs.at[:, step].set(jnp.where(running, logprobs, 0.0)),
        )
        return samples, running & ~jnp.isin(tokens, ends)

    def going(state):
        step, _, _, running = state
        return (step < max_new_tokens) & jnp.any(running)

    def advance(state):
        step, cache, samples, running = state
        hidden, cache = decode(model, samples.tokens[:, step - 1], prompt_lengths + step - 1, cache)
        samples, running = draw(step, hidden, samples, running)
        return step + 1, cache, samples, running

    rows, prompt_size = prompts.shape
    ends = jnp.asarray(eos_ids, jnp.int32)
    hidden, cache = prefill(model, prompts, prompt_lengths, prompt_size + max_new_tokens)
    hidden = jnp.take_along_axis(hidden, (prompt_lengths - 1)[:, None, None], axis=1)
    samples = Samples(
        jnp.full((rows, max_new_tokens), ends[0]),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros((rows, max_new_tokens)),
    )
    samples, running = draw(0, hidden, samples, jnp.ones(rows, bool))
    return jax.lax.while_loop(going, advance, (1, cache, samples, running))[2]
