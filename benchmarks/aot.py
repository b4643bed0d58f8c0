"""Memory, products and collectives of an actor's loss on a TPU or GPU that is not there: XLA compiles ahead of time.

    python benchmarks/aot.py --target v5e:2x2            (needs jax[tpu])
    python benchmarks/aot.py --target h200               (needs jax[cuda13], Python 3.12 or newer)

The program is the loss segment of an actor update: log-probabilities and entropy of hidden_states @ lm_head, a clipped
ratio and an entropy bonus, the gradients of hidden_states and lm_head; T tokens over `context`, V columns over `vocab`.
Printed for each way of computing it, per device: temporaries; products as large as the logits, and MiB of collectives,
loops counted with their trips (all tokens counting); copies of a whole shard of logits.
"""

import argparse
import json
import os
import re
from pathlib import Path


os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"

import hlo
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxrl_logprob as jrl
from jaxrl_logprob.planner import plan


GIB = 2**30
# The published figures of GPUs in the form that XLA reads.
TARGETS = Path(__file__).parent / "targets"


def plain(logits, targets, **_):
    """What one writes first: log_softmax, a gather, and -sum p log p."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    return jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0], -(jnp.exp(logp) * logp).sum(-1)


def plain_stopped(logits, targets, **kw):
    logprobs, entropy = plain(logits, targets)
    return logprobs, jax.lax.stop_gradient(entropy)


def from_logits(entropy_coef):
    return lambda *a, **kw: jrl.token_logprobs_and_entropy(*a, entropy_coef=entropy_coef, **kw)


def from_hidden_states(entropy_coef):
    return lambda *a, **kw: jrl.linear_token_logprobs_and_entropy(*a, entropy_coef=entropy_coef, **kw)


# What each takes: logits and targets, or hidden_states, lm_head and targets.
WAYS = {
    "log_softmax": plain,
    "log_softmax, entropy stopped": plain_stopped,
    "from logits": from_logits(1.0),
    "from logits, entropy stopped": from_logits(0.0),
    "from hidden states": from_hidden_states(1.0),
    "from hidden states, entropy stopped": from_hidden_states(0.0),
}


def devices_of(target: str):
    if (config := TARGETS / f"{target}.txtpb").exists():
        kw = dict(topology_name=target, topology="1x1x4", target_config=config.read_text())
        return topologies.get_topology_desc(platform="cuda", **kw).devices
    return topologies.get_topology_desc(platform="tpu", topology_name=target).devices


def measure(name: str, mesh: Mesh, tokens: int, vocab: int, width: int) -> dict[str, float]:
    way = WAYS[name]
    options = {} if "log_softmax" in name else {"axes": jrl.MeshAxes(tokens="context", vocab="vocab"), "mesh": mesh}

    def loss(hidden_states, lm_head, targets, old_logprobs, advantages):
        if "hidden" in name:
            logprobs, entropy = way(hidden_states, lm_head, targets, **options)
        else:
            logits = hidden_states @ lm_head
            logits = jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, P("context", "vocab")))
            logprobs, entropy = way(logits, targets, **options)
        ratio = jnp.exp(logprobs - old_logprobs)
        surrogate = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)
        return -surrogate.mean() - 0.01 * entropy.mean()

    def argument(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    compiled = (
        jax.jit(jax.grad(loss, argnums=(0, 1)))
        .lower(
            argument((tokens, width), jnp.bfloat16, "context"),
            argument((width, vocab), jnp.bfloat16, None, "vocab"),
            argument((tokens,), jnp.int32, "context"),
            *[argument((tokens,), jnp.float32, "context")] * 2,
        )
        .compile()
    )
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    assert memory is not None
    shard = rf"(?:bf16|f32)\[{tokens // mesh.shape['context']},{vocab // mesh.shape['vocab']}\]"
    local = tokens // mesh.shape["context"], vocab // mesh.shape["vocab"]
    # Where all rows count there are as many steps as large tiles, and no small ones.
    rows = plan(tokens, width, vocab, token_shards=mesh.shape["context"], vocab_shards=mesh.shape["vocab"]).blocks.rows
    cost = hlo.cost(text, lambda body: local[0] // rows if f"[{rows}]" in body else 0)
    fixed = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return {
        # Of the temporaries, what is live at once; the rest is how XLA's allocator packs them.
        "live_gib": max(0, getattr(memory, "peak_memory_in_bytes", 0) - fixed) / GIB,
        "temporaries_gib": memory.temp_size_in_bytes / GIB,
        "arguments_gib": memory.argument_size_in_bytes / GIB,
        "products": cost.multiply_adds / (local[0] * local[1] * width),
        "collectives_mib": cost.collective_bytes / 2**20,
        "copies_of_logits": len(re.findall(rf"= {shard}\S* copy\(", text)),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="v5e:2x2", help="h100, h200, or a TPU topology such as v5e:2x2 (default)")
    parser.add_argument("--mesh", default="2x2", help="context x vocab (default: 2x2)")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--vocab", type=int, default=248320)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--only", default="", help="those ways whose name has this in it")
    parser.add_argument("--json", help="write the figures to this file too")
    args = parser.parse_args()
    shape = tuple(int(n) for n in args.mesh.split("x"))
    mesh = Mesh(np.array(devices_of(args.target))[: np.prod(shape)].reshape(shape), ("context", "vocab"))
    one = 2 * (args.tokens // shape[0]) * (args.vocab // shape[1]) / GIB
    print(f"{args.target}, jax {jax.__version__}, mesh context={shape[0]} x vocab={shape[1]}, bf16, "
          f"T={args.tokens} V={args.vocab} D={args.width}; one shard of logits: {one:.3f} GiB")  # fmt: skip
    figures = {}
    for name in (name for name in WAYS if args.only in name):
        figures[name] = measure(name, mesh, args.tokens, args.vocab, args.width)
        print("{:36s} temporaries {temporaries_gib:7.3f} GiB, live {live_gib:6.3f}   products {products:.2f}   "
              "collectives {collectives_mib:6.1f} MiB   copies of logits {copies_of_logits}"
              .format(name, **figures[name]), flush=True)  # fmt: skip
    if args.json:
        with open(args.json, "w") as file:
            call = {k: v for k, v in vars(args).items() if k != "json"}
            json.dump({**call, "jax": jax.__version__, "figures": figures}, file, indent=1)


if __name__ == "__main__":
    main()
