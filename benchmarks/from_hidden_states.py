"""Time and temporaries of the ops from hidden states against the bare products they have to do, on this machine.

    python benchmarks/from_hidden_states.py [--tokens 2048 --width 512 --vocab 32768 --json FILE]

One process, float32: `bare` is hidden_states @ lm_head alone, whose result is written out. A forward has one such
product in it, a gradient four. Times are medians of interleaved repeats, as ratios to one `bare` for a forward and to
four for a gradient; `quarter` has a quarter of the tokens unmasked, at random, as a ratio to the gradient of all.
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import jaxrl_logprob as jrl


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", help="write the figures to this file too")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    hidden_states, lm_head = normal(args.tokens, args.width) * 2 * args.width**-0.5, normal(args.width, args.vocab)
    targets = jnp.asarray(rng.integers(0, args.vocab, args.tokens), jnp.int32)
    weights = normal(2, args.tokens)
    every, quarter = jnp.ones(args.tokens, bool), jnp.asarray(rng.permutation(args.tokens) < args.tokens // 4)

    def logprobs(h, w, mask):
        return (jrl.linear_token_logprobs(h, w, targets, loss_mask=mask) * weights[0]).sum()

    def both(h, w, mask):
        out = jrl.linear_token_logprobs_and_entropy(h, w, targets, loss_mask=mask)
        return (out.logprobs * weights[0] + out.entropy * weights[1]).sum()

    gradient = lambda loss: jax.value_and_grad(loss, argnums=(0, 1))
    # name -> function, mask, and what it is a ratio to: a name and how many of them
    programs = {
        "bare": (lambda h, w, mask: h @ w, every, ("bare", 1)),
        "forward": (logprobs, every, ("bare", 1)),
        "forward, entropy": (both, every, ("bare", 1)),
        "gradient": (gradient(logprobs), every, ("bare", 4)),
        "gradient, entropy": (gradient(both), every, ("bare", 4)),
        "gradient, entropy, quarter": (gradient(both), quarter, ("gradient, entropy", 1)),
    }
    compiled = {
        name: jax.jit(run).lower(hidden_states, lm_head, mask).compile() for name, (run, mask, _) in programs.items()
    }
    seconds = {name: [] for name in programs}
    for repeat in range(args.repeats + 1):
        for name, (_, mask, _) in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(compiled[name](hidden_states, lm_head, mask))
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    median = {name: statistics.median(s) for name, s in seconds.items()}
    print(f"{jax.devices()[0].platform}, jax {jax.__version__}, float32, T={args.tokens} D={args.width} "
          f"V={args.vocab}; medians of {args.repeats}")  # fmt: skip
    rows = []
    for name, (_, _, (base, times)) in programs.items():
        memory = compiled[name].memory_analysis()
        assert memory is not None
        ratio = median[name] / (times * median[base])
        mib = memory.temp_size_in_bytes / 2**20
        rows.append(dict(program=name, milliseconds=1e3 * median[name], ratio=ratio, temporaries_mib=mib))
        print(f"{name:28s} {1e3 * median[name]:7.0f} ms   {ratio:4.2f} x {times} {base}   temporaries {mib:6.1f} MiB")
    if args.json:
        with open(args.json, "w") as file:
            call = {k: v for k, v in vars(args).items() if k != "json"}
            json.dump({**call, "jax": jax.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
