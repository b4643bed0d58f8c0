"""Memory of a whole actor step, at the size of a real model, on TPUs that are not there: XLA compiles ahead of time.

    PYTHONPATH=examples python benchmarks/train_step.py --target v5e:2x2        (needs jax[tpu], flax and optax)
    PYTHONPATH=examples python benchmarks/train_step.py --target v6e:4x4 --json train_step.json

The program is the `update` of `make_actor_step`: a Qwen3 of 1.9 billion parameters (`examples/llama.py`) forward and
backward, each layer computed again in the backward pass; log-probabilities and entropy, both differentiated; GRPO's
loss; AdamW; the actor donated. It is made from shapes alone: no parameter exists. The model computes in bf16, whatever
its parameters are kept in. Two heads: `hidden`, this library's; `plain`, log_softmax of the logits, split over the
same axes. Printed per device: what XLA reserves, and of what; of a step that does not fit, which XLA refuses to
compile, as much as it says.
"""

import argparse
import dataclasses
import functools
import json
import math
import re
import time
from collections.abc import Callable
from typing import Any

import aot
import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from llama import abstract_model, Llama, LlamaConfig, ModelAxes, param_sharding

import jaxrl_logprob as jrl
from jaxrl_logprob.planner import plan
from jaxrl_logprob.training import ActorBatch, ActorLoss, ActorStep, make_actor_step


MODEL_AXES = ModelAxes(batch="data", sequence="context", tensor="vocab")
MESHES = {1: "1x1x1", 4: "1x2x2", 16: "1x4x4"}  # Where --mesh is not given, by the number of devices.
HBM_GIB = {"v5e": 16, "v5p": 95, "v6e": 32}  # Of a chip, which is one device.
QWEN3 = LlamaConfig(
    vocab_size=248320,
    width=2048,
    mlp_width=6144,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=1e6,
    rms_eps=1e-6,
    qk_norm=True,
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a batch, and what the actor is kept in."""

    rows: int
    tokens: int
    accumulation: int
    params: str
    moments: str


def plain_head(model: Llama) -> Callable[..., jrl.LogprobsAndEntropy]:
    """What one writes first, in the place of `Llama.head`."""

    def head(hidden_states, targets, *, entropy_coef, loss_mask):
        found = aot.plain(model.logits(hidden_states), targets)
        return jrl.LogprobsAndEntropy(*(jnp.where(loss_mask, x, 0.0) for x in found))

    return head


HEADS = {"plain": plain_head, "hidden": Llama.head}


def in_bf16(model: Llama) -> Llama:
    return jax.tree.map(lambda p: p.astype(jnp.bfloat16), model)


def computing_in(optimizer: optax.GradientTransformation, dtype: str) -> optax.GradientTransformation:
    """The optimiser with its state and its arithmetic in this dtype."""
    cast = functools.partial(jax.tree.map, lambda x: x.astype(dtype))
    return optax.GradientTransformation(
        lambda params: optimizer.init(cast(params)),
        lambda updates, state, params=None: optimizer.update(cast(updates), state, cast(params)),
    )


def abstract_params(config: LlamaConfig, mesh: Mesh, dtype: str) -> Llama:
    """The model with shapes, dtypes and shardings in the place of its parameters."""
    model = abstract_model(config, MODEL_AXES)
    abstract = lambda p, sharding: jax.ShapeDtypeStruct(p.shape, jnp.dtype(dtype), sharding=sharding)
    nnx.update(model, jax.tree.map(abstract, nnx.state(model, nnx.Param), param_sharding(model, mesh)))
    return model


def abstract_batch(mesh: Mesh, sizes: Sizes) -> ActorBatch:
    def argument(shape: tuple[int, ...], dtype: Any, *spec: str | None) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    shape = sizes.accumulation, sizes.rows, sizes.tokens
    ids, mask, floats = (argument(shape, t, None, "data", "context") for t in (jnp.int32, jnp.bool, jnp.float32))
    advantages = argument((sizes.accumulation, 64), jnp.float32)
    return ActorBatch(ids, ids, ids, ids, mask, advantages, floats)


def make_step(config: LlamaConfig, mesh: Mesh, sizes: Sizes, head: str) -> ActorStep:
    return make_actor_step(
        abstract_params(config, mesh, sizes.params),
        lambda model, *batch: in_bf16(model)(*batch),
        lambda model: HEADS[head](in_bf16(model)),
        computing_in(optax.adamw(1e-6), sizes.moments),
        loss=ActorLoss(entropy_coef=0.01),
        axes=jrl.MeshAxes(tokens=("data", "context")),
        accumulation=sizes.accumulation,
    )


def gib(tree: Any) -> float:
    """What a device holds of these arrays."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)) / aot.GIB


def measure(config: LlamaConfig, mesh: Mesh, sizes: Sizes, head: str) -> dict[str, Any]:
    step, batch = make_step(config, mesh, sizes, head), abstract_batch(mesh, sizes)
    update: Any = step.update  # A jitted function.
    figures = {
        "parameters_gib": gib(step.actor.params),
        "optimiser_gib": gib(step.actor.opt_state),
        "batch_gib": gib(batch),
    }
    began = time.perf_counter()
    with jax.set_mesh(mesh):
        lowered = update.lower(step.actor, batch)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if not (needed := re.search(r"HLO temporaries \(([\d.]+)G\) exceeds", str(error))):
            raise
        temporaries = float(needed[1])
        kept = figures["parameters_gib"] + figures["optimiser_gib"] + figures["batch_gib"]
        return figures | {"refused": True, "temporaries_gib": temporaries, "total_gib": kept + temporaries}
    seconds, memory = time.perf_counter() - began, compiled.memory_analysis()
    assert memory is not None
    arguments, outputs = memory.argument_size_in_bytes, memory.output_size_in_bytes - memory.alias_size_in_bytes
    return figures | {
        "refused": False,
        "arguments_gib": arguments / aot.GIB,
        "outputs_gib": memory.output_size_in_bytes / aot.GIB,
        "aliased_gib": memory.alias_size_in_bytes / aot.GIB,
        "temporaries_gib": memory.temp_size_in_bytes / aot.GIB,
        "total_gib": (arguments + outputs + memory.temp_size_in_bytes) / aot.GIB,
        # What is live at once, where this jaxlib says it.
        "peak_gib": getattr(memory, "peak_memory_in_bytes", 0) / aot.GIB,
        "collectives_gib": collective_bytes(compiled.as_text() or "", config, mesh, sizes) / aot.GIB,
        "compile_seconds": seconds,
    }


def collective_bytes(text: str, config: LlamaConfig, mesh: Mesh, sizes: Sizes) -> float:
    """All tokens counting: this library's head then takes its large tiles of rows, as many as there are."""
    shards = mesh.shape["data"] * mesh.shape["context"]
    tokens = sizes.rows * sizes.tokens
    blocks = plan(tokens, config.width, config.vocab_size, token_shards=shards, vocab_shards=mesh.shape["vocab"]).blocks
    trips = lambda body: tokens // shards // blocks.rows if f"[{blocks.rows}]" in body else 0
    return hlo.cost(text, trips).collective_bytes


def describe(figures: dict[str, Any], hbm: float) -> str:
    text = (
        "total {total_gib:7.3f} GiB of {hbm}: parameters {parameters_gib:.3f}, optimiser {optimiser_gib:.3f}, "
        "batch {batch_gib:.4f}, temporaries {temporaries_gib:.3f}"
    )
    if figures["refused"]:
        return (text + "; does not fit, XLA says").format(hbm=hbm, **figures)
    text += (
        "; outputs {outputs_gib:.3f}, aliased {aliased_gib:.3f}; live at once {peak_gib:.3f}; "
        "collectives {collectives_gib:.1f}; compiled in {compile_seconds:.0f} s"
    )
    return text.format(hbm=hbm, **figures)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="v5e:2x2", help="a topology of v5e, v5p or v6e (default: v5e:2x2)")
    parser.add_argument("--mesh", help="data x context x vocab (default: 1x2x2 of 4 devices, 1x4x4 of 16)")
    parser.add_argument("--rows", type=int, default=1, help="of a micro-batch (default: 1)")
    parser.add_argument("--tokens", type=int, default=32768, help="of a row (default: 32768)")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of an update (default: 1)")
    parser.add_argument("--vocab", type=int, default=QWEN3.vocab_size)
    dtypes = ("bfloat16", "float32")
    parser.add_argument("--params", choices=dtypes, default="bfloat16", help="they are kept in (default: bfloat16)")
    parser.add_argument("--moments", choices=dtypes, default="float32", help="AdamW keeps them in (default: float32)")
    parser.add_argument("--head", choices=HEADS, help="one of the two (default: both)")
    parser.add_argument("--json", help="write the figures to this file too")
    args = parser.parse_args()
    devices, hbm = aot.devices_of(args.target), HBM_GIB[args.target.partition(":")[0]]
    args.mesh = args.mesh or MESHES[len(devices)]
    mesh = Mesh(np.array(devices).reshape(*map(int, args.mesh.split("x"))), ("data", "context", "vocab"))
    config = dataclasses.replace(QWEN3, vocab_size=args.vocab)
    sizes = Sizes(args.rows, args.tokens, args.accumulation, args.params, args.moments)
    count = sum(math.prod(p.shape) for p in jax.tree.leaves(abstract_params(config, mesh, args.params)))
    print(f"{args.target}, jax {jax.__version__}, mesh data x context x vocab = {args.mesh}, {args.accumulation} x "
          f"{args.rows} x {args.tokens} tokens, V={args.vocab}, {count / 1e9:.2f}e9 parameters in {args.params}, "
          f"moments in {args.moments}")  # fmt: skip
    figures = {}
    for head in [args.head] if args.head else HEADS:
        figures[head] = measure(config, mesh, sizes, head)
        print(f"{head:8s}{describe(figures[head], hbm)}", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            call = {k: v for k, v in vars(args).items() if k not in ("head", "json")}
            json.dump({**call, "jax": jax.__version__, "hbm_gib": hbm, "figures": figures}, file, indent=1)


if __name__ == "__main__":
    main()
