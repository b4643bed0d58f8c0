"""The smallest complete use: log-probabilities and entropies in a jitted Flax train step, NNX and Linen.

    python examples/flax_train_step.py [--mesh 2x4]

A toy policy learns to repeat the token it has just seen, by REINFORCE with an entropy bonus. The two halves are the
same step; the only difference is how Flax holds the parameters. With `--mesh TxV` the tokens are split over T
devices and the vocabulary over V, emulated on CPU; the numbers do not change.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxrl_logprob as jrl
from jaxrl_logprob.heads import LinenLogprobHead, LogprobHead


VOCAB, WIDTH, BATCH, LENGTH, STEPS = 512, 64, 8, 32, 60
ENTROPY_COEF = 0.003
AXES = jrl.MeshAxes(tokens=(None, "context"), vocab="vocab")


class NnxPolicy(nnx.Module):
    """Embedding, one hidden layer, and a head for the token after each one."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.hidden = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.head = LogprobHead(nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs), axes=AXES)

    def hidden_states(self, tokens: jax.Array) -> jax.Array:
        return nnx.gelu(self.hidden(self.embed(tokens)))

    def logits(self, tokens: jax.Array) -> jax.Array:
        return self.head.logits(self.hidden_states(tokens))

    def __call__(self, tokens: jax.Array, actions: jax.Array) -> jrl.LogprobsAndEntropy:
        return self.head(self.hidden_states(tokens), actions, entropy_coef=ENTROPY_COEF)


class LinenPolicy(nn.Module):
    """The same in Linen."""

    def setup(self):
        self.embed = nn.Embed(VOCAB, WIDTH)
        self.hidden = nn.Dense(WIDTH)
        self.head = LinenLogprobHead(VOCAB, use_bias=False, axes=AXES)

    def hidden_states(self, tokens: jax.Array) -> jax.Array:
        return nn.gelu(self.hidden(self.embed(tokens)))

    def logits(self, tokens: jax.Array) -> jax.Array:
        return self.head.logits(self.hidden_states(tokens))

    def __call__(self, tokens: jax.Array, actions: jax.Array) -> jrl.LogprobsAndEntropy:
        return self.head(self.hidden_states(tokens), actions, entropy_coef=ENTROPY_COEF)


def policy_gradient_loss(out: jrl.LogprobsAndEntropy, rewards: jax.Array):
    """REINFORCE with an entropy bonus; rewards less their mean are the advantages."""
    advantages = rewards - rewards.mean()
    entropy = out.entropy.mean()
    return -(advantages * out.logprobs).mean() - ENTROPY_COEF * entropy, entropy


def act(logits: jax.Array, tokens: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Actions and their rewards; half of them are the right one, so that there is something to learn."""
    tried, sampled = jax.random.split(key)
    actions = jax.random.categorical(sampled, logits)
    actions = jnp.where(jax.random.bernoulli(tried, 0.5, actions.shape), tokens, actions)
    return actions, (actions == tokens).astype(jnp.float32)


@nnx.jit
def nnx_step(model: NnxPolicy, optimizer: nnx.Optimizer, tokens: jax.Array, key: jax.Array):
    actions, rewards = act(model.logits(tokens), tokens, key)
    loss = lambda model: policy_gradient_loss(model(tokens, actions), rewards)
    (_, entropy), grads = nnx.value_and_grad(loss, has_aux=True)(model)
    optimizer.update(model, grads)
    return rewards.mean(), entropy


@functools.partial(jax.jit, static_argnames=("model", "optimizer"))
def linen_step(model: LinenPolicy, optimizer: optax.GradientTransformation, state, tokens: jax.Array, key: jax.Array):
    params, opt_state = state
    actions, rewards = act(jnp.asarray(model.apply(params, tokens, method="logits")), tokens, key)
    out: Callable[..., Any] = lambda params: model.apply(params, tokens, actions)
    loss = lambda params: policy_gradient_loss(out(params), rewards)
    (_, entropy), grads = jax.value_and_grad(loss, has_aux=True)(params)
    updates, opt_state = optimizer.update(grads, opt_state)
    return (optax.apply_updates(params, updates), opt_state), (rewards.mean(), entropy)


def batches(seed: int):
    for key in jax.random.split(jax.random.key(seed), STEPS):
        yield jax.random.randint(key, (BATCH, LENGTH), 0, VOCAB), key


def train_nnx() -> list[tuple[float, ...]]:
    """(reward, entropy) of every step."""
    model = NnxPolicy(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    return [tuple(map(float, nnx_step(model, optimizer, tokens, key))) for tokens, key in batches(0)]


def train_linen() -> list[tuple[float, ...]]:
    """(reward, entropy) of every step."""
    model, optimizer = LinenPolicy(), optax.adam(1e-2)
    params = model.init(jax.random.key(0), *2 * [jnp.zeros((1, LENGTH), jnp.int32)])
    state, history = (params, optimizer.init(params)), []
    for tokens, key in batches(0):
        state, metrics = linen_step(model, optimizer, state, tokens, key)
        history.append(tuple(map(float, metrics)))
    return history


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="1x1", help="devices for tokens x devices for the vocabulary (default: 1x1)")
    tokens, vocab = (int(n) for n in parser.parse_args().mesh.split("x"))
    jax.config.update("jax_num_cpu_devices", tokens * vocab)
    with jax.set_mesh(jrl.make_mesh({"context": tokens, "vocab": vocab})):
        for name, train in (("NNX", train_nnx), ("Linen", train_linen)):
            history = train()
            for step in (0, STEPS // 2, STEPS - 1):
                reward, entropy = history[step]
                print(f"{name:6s} step {step:3d}  reward {reward:.2f}  entropy {entropy:.3f}")


if __name__ == "__main__":
    main()
