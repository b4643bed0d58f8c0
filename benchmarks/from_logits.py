"""Time and temporaries of the ops from logits against plain JAX and optax, on this machine, interleaved in one process.

    python benchmarks/from_logits.py [--tokens 2048 --vocab 32768 --json FILE]

Three programs for each way of computing them: `forward` of given logits; `gradient` of given logits, which are kept (so
that the gradient is a second array whatever one does); and `head`, where the logits are hidden_states @ lm_head of the
same program and die in it, as in a train step. Times are medians, as ratios to this library's in the same row.
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxrl_logprob as jrl


def plain(logits, targets):
    logp = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(logp, targets[:, None], axis=1)[:, 0], -(jnp.exp(logp) * logp).sum(-1)


# Each way gives a tuple of arrays [tokens]; those of one group do the same work.
GROUPS = {
    "logprobs": {
        "jaxrl_logprob": lambda x, y: (jrl.token_logprobs(x, y),),
        "optax": lambda x, y: (-optax.softmax_cross_entropy_with_integer_labels(x, y),),
        "plain JAX": lambda x, y: plain(x, y)[:1],
    },
    "logprobs and entropy": {
        "jaxrl_logprob": lambda x, y: tuple(jrl.token_logprobs_and_entropy(x, y)),
        "plain JAX": plain,
    },
}


def programs(way, targets, weights):
    total = lambda x: sum((o * w).sum() for o, w in zip(way(x, targets), weights))
    return {
        "forward": lambda x, h, w: way(x, targets),
        "gradient": lambda x, h, w: jax.grad(total)(x),
        "head": lambda x, h, w: jax.grad(lambda h, w: total(h @ w), argnums=(0, 1))(h, w),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--width", type=int, default=64, help="of hidden_states in `head` (default: 64)")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--json", help="write the figures to this file too")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    logits, hidden, head = (
        2 * normal(args.tokens, args.vocab),
        normal(args.tokens, args.width),
        normal(args.width, args.vocab),
    )
    targets = jnp.asarray(rng.integers(0, args.vocab, args.tokens), jnp.int32)
    weights = normal(2, args.tokens)
    print(f"{jax.devices()[0].platform}, jax {jax.__version__}, float32, T={args.tokens} V={args.vocab}; "
          f"logits: {logits.nbytes / 2**20:.0f} MiB; medians of {args.repeats}")  # fmt: skip
    rows = []
    for group, ways in GROUPS.items():
        for program in ("forward", "gradient", "head"):
            compiled = {
                name: jax.jit(programs(way, targets, weights)[program]).lower(logits, hidden, head).compile()
                for name, way in ways.items()
            }
            seconds = {name: [] for name in ways}
            for _ in range(args.repeats):
                for name, run in compiled.items():
                    # Once untimed: whoever runs after plain JAX finds the caches full of its arrays.
                    jax.block_until_ready(run(logits, hidden, head))
                    start = time.perf_counter()
                    jax.block_until_ready(run(logits, hidden, head))
                    seconds[name].append(time.perf_counter() - start)
            for name, run in compiled.items():
                median = {n: statistics.median(s) for n, s in seconds.items()}
                memory = run.memory_analysis()
                assert memory is not None
                rows.append(
                    dict(
                        work=group, program=program, way=name, milliseconds=1e3 * median[name],
                        ratio=median[name] / median["jaxrl_logprob"], temporaries_mib=memory.temp_size_in_bytes / 2**20,
                    )
                )  # fmt: skip
                print("{work:21s} {program:9s} {way:14s} {milliseconds:7.1f} ms  x {ratio:4.2f}   "
                      "temporaries {temporaries_mib:6.0f} MiB".format(**rows[-1]), flush=True)  # fmt: skip
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {**{k: v for k, v in vars(args).items() if k != "json"}, "jax": jax.__version__, "rows": rows},
                file,
                indent=1,
            )


if __name__ == "__main__":
    main()
