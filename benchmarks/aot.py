"""Memory and collectives of a loss over logits on a TPU or GPU that is not there: XLA compiles for it ahead of time.

    python benchmarks/aot.py --target v5e:2x2            (needs jax[tpu])
    python benchmarks/aot.py --target h200               (needs jax[cuda13], Python 3.12 or newer)

The program is the loss segment of an actor update: logits = hidden_states @ lm_head, log-probabilities and entropy,
and the gradients of hidden_states and lm_head; T tokens over `context`, V columns over `vocab`. Printed for each way of
computing it: temporaries per device, and how many collectives and copies of a whole shard of logits the program has.
"""

import argparse
import json
import os
import re
from pathlib import Path


os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxrl_logprob as jrl


GIB = 2**30
COLLECTIVE = r" (?:all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
# The published figures of GPUs in the form that XLA reads.
TARGETS = Path(__file__).parent / "targets"


def plain(logits, targets, **_):
    """What one writes first: log_softmax, a gather, and -sum p log p."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    return jnp.take_along_axis(logp, targets[:, None], axis=1)[:, 0], -(jnp.exp(logp) * logp).sum(-1)


def plain_stopped(logits, targets, **kw):
    logprobs, entropy = plain(logits, targets)
    return logprobs, jax.lax.stop_gradient(entropy)


WAYS = {
    "log_softmax": plain,
    "log_softmax, entropy stopped": plain_stopped,
    "from logits": jrl.token_logprobs_and_entropy,
    "from logits, entropy stopped": lambda *a, **kw: jrl.token_logprobs_and_entropy(*a, entropy_coef=0.0, **kw),
}


def devices_of(target: str):
    if (config := TARGETS / f"{target}.txtpb").exists():
        kw = dict(topology_name=target, topology="1x1x4", target_config=config.read_text())
        return topologies.get_topology_desc(platform="cuda", **kw).devices
    return topologies.get_topology_desc(platform="tpu", topology_name=target).devices


def measure(way, mesh: Mesh, tokens: int, vocab: int, width: int) -> dict[str, float]:
    axes = jrl.MeshAxes(tokens="context", vocab="vocab")

    def loss(hidden_states, lm_head, targets, advantages):
        logits = hidden_states @ lm_head
        logits = jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, P("context", "vocab")))
        kw = {} if way in (plain, plain_stopped) else {"axes": axes, "mesh": mesh}
        logprobs, entropy = way(logits, targets, **kw)
        return -(logprobs * advantages).mean() - 0.01 * entropy.mean()

    def argument(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    compiled = (
        jax.jit(jax.grad(loss, argnums=(0, 1)))
        .lower(
            argument((tokens, width), jnp.bfloat16, "context"),
            argument((width, vocab), jnp.bfloat16, None, "vocab"),
            argument((tokens,), jnp.int32, "context"),
            argument((tokens,), jnp.float32, "context"),
        )
        .compile()
    )
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    assert memory is not None
    shard = rf"(?:bf16|f32)\[{tokens // mesh.shape['context']},{vocab // mesh.shape['vocab']}\]"
    fixed = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return {
        # Of the temporaries, what is live at once; the rest is how XLA's allocator packs them.
        "live_gib": max(0, getattr(memory, "peak_memory_in_bytes", 0) - fixed) / GIB,
        "temporaries_gib": memory.temp_size_in_bytes / GIB,
        "arguments_gib": memory.argument_size_in_bytes / GIB,
        "collectives": len(re.findall(COLLECTIVE, text)),
        "copies_of_logits": len(re.findall(rf"= {shard}\S* copy\(", text)),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="v5e:2x2", help="h100, h200, or a TPU topology such as v5e:2x2 (default)")
    parser.add_argument("--mesh", default="2x2", help="context x vocab (default: 2x2)")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--vocab", type=int, default=248320)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--json", help="write the figures to this file too")
    args = parser.parse_args()
    shape = tuple(int(n) for n in args.mesh.split("x"))
    mesh = Mesh(np.array(devices_of(args.target))[: np.prod(shape)].reshape(shape), ("context", "vocab"))
    one = 2 * (args.tokens // shape[0]) * (args.vocab // shape[1]) / GIB
    print(f"{args.target}, jax {jax.__version__}, mesh context={shape[0]} x vocab={shape[1]}, bf16, "
          f"T={args.tokens} V={args.vocab} D={args.width}; one shard of logits: {one:.3f} GiB")  # fmt: skip
    figures = {}
    for name, way in WAYS.items():
        figures[name] = measure(way, mesh, args.tokens, args.vocab, args.width)
        print("{:30s} temporaries {temporaries_gib:7.3f} GiB, live {live_gib:6.3f}   collectives {collectives}   "
              "copies of logits {copies_of_logits}".format(name, **figures[name]), flush=True)  # fmt: skip
    if args.json:
        with open(args.json, "w") as file:
            call = {k: v for k, v in vars(args).items() if k != "json"}
            json.dump({**call, "jax": jax.__version__, "figures": figures}, file, indent=1)


if __name__ == "__main__":
    main()
