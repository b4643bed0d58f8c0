"""Run by test_processes.py, in one process of four CPU devices or in two of two: losses and gradients, as JSON.

python two_processes.py PORT PROCESS NUM_PROCESSES FILE
"""

import json
import pathlib
import sys

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxrl_logprob as jrl
from jaxrl_logprob import packing, segments
from jaxrl_logprob.sharding import from_process_data, from_same_data, SequenceLayout, start_processes, to_host


port, process, num_processes = map(int, sys.argv[1:4])
# data x context x vocab. The first process has the first two devices.
MESHES = {"rows across processes": (2, 1, 2), "vocabulary across": (1, 1, 4), "sequence across": (1, 4, 1)}


def main():
    others = (f"localhost:{port}", num_processes, process) if num_processes > 1 else ()
    count = start_processes(*others, num_cpu_devices=4)
    assert count == num_processes == jax.process_count() and start_processes() == count
    results = {}
    for name, sizes in MESHES.items():
        mesh = jrl.make_mesh(dict(zip(("data", "context", "vocab"), sizes)))
        results |= {f"{name}, {masked}": result for masked, result in run(mesh).items()}
    if process == 0:
        pathlib.Path(sys.argv[4]).write_text(json.dumps(results))


def run(mesh) -> dict:
    """A loss over packed rows in zigzag, and its gradients. The rows differ in how many tokens count."""
    axes = jrl.MeshAxes(tokens=("data", "context"), vocab="vocab")
    layout, tokens = SequenceLayout("zigzag", mesh.shape["context"]), P("data", "context")
    rng = np.random.default_rng(0)
    sequences, prompts = [rng.integers(0, 64, n) for n in (9, 3, 14, 5, 1, 2)], [2, 3, 4, 0, 1, 1]
    (packed,) = packing.pack_sequences(sequences, prompts, max_tokens=16, rows=4, multiple=8)
    hidden = layout.arrange(rng.normal(size=(*packed.tokens.shape, 8)).astype(np.float32), axis=1)
    lm_head = rng.normal(size=(8, 64)).astype(np.float32)
    # Rows are loaded by the process that has them, where rows are split over processes; else every process has all.
    mine = slice(None)
    if mesh.shape["data"] > 1 and num_processes > 1:
        mine = slice(2 * process, 2 * process + 2)
    place = from_process_data if mesh.shape["data"] > 1 else from_same_data
    hidden = place(hidden[mine], mesh, P("data", "context", None))
    put = lambda array: place(layout.arrange(array)[mine], mesh, tokens)
    lm_head = from_same_data(lm_head, mesh, P(None, "vocab"))

    def loss(hidden, lm_head, tokens, ids, counts):
        options = dict(axes=axes, mesh=mesh)
        targets, mask = segments.shift_targets(tokens, ids, token_mask=counts, layout=layout, **options)
        out = jrl.linear_token_logprobs_and_entropy(hidden, lm_head, targets, loss_mask=mask, **options)
        per_sequence = segments.segment_mean(out.logprobs + 0.1 * out.entropy, ids, 8, loss_mask=mask, **options)
        number = segments.segment_count(ids, 8, loss_mask=mask, **options)
        return -per_sequence.sum() / jax.numpy.maximum((number > 0).sum(), 1)

    grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    results = {}
    for masked, rows in {"no row masked": 4, "the last rows masked": 2, "every row masked": 0}.items():
        counts = packed.response_mask & (np.arange(4)[:, None] < rows)
        value, gradients = grad(hidden, lm_head, *map(put, (packed.tokens, packed.segment_ids, counts)))
        dhidden, dlm_head = to_host(gradients)
        assert dhidden.shape == hidden.shape and dlm_head.shape == lm_head.shape
        dhidden = layout.restore(dhidden, 16, axis=1)
        results[masked] = dict(loss=float(value), dhidden=dhidden.tolist(), dlm_head=dlm_head.tolist())
    return results


if __name__ == "__main__":
    main()
