"""Two processes of two CPU devices compute what one process of four does; arrays go to the devices and come back."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close
from jax.sharding import PartitionSpec as P

import jaxrl_logprob as jrl
from jaxrl_logprob.sharding import from_process_data, from_same_data, start_processes, to_host


PROGRAM = pathlib.Path(__file__).parent / "programs" / "two_processes.py"
REPOSITORY = PROGRAM.parents[2]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def launch(*commands: list, port: int | None = None) -> list[str]:
    """Runs commands of Python side by side, as processes of one program where there is a port; their output, when all
    have ended well."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    if port is not None:
        env |= {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}", "JAX_NUM_PROCESSES": str(len(commands))}
    run = lambda command, process: subprocess.Popen(
        [sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=env if port is None else env | {"JAX_PROCESS_ID": str(process)},
    )  # fmt: skip
    processes = [run(command, process) for process, command in enumerate(commands)]
    try:
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs):
        assert process.returncode == 0, output
    return outputs


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of one process and of two."""
    folder = tmp_path_factory.mktemp("processes")
    one, two, port = folder / "one.json", folder / "two.json", free_port()
    launch([PROGRAM, 0, 0, 1, one])
    launch(*([PROGRAM, port, process, 2, two] for process in range(2)))
    return json.loads(one.read_text()), json.loads(two.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("where", ["rows across processes", "vocabulary across", "sequence across"])
@pytest.mark.parametrize("masked", ["no row masked", "the last rows masked", "every row masked"])
def test_m04_two_processes_equal_one(results, where, masked):
    """Processes with different numbers of tokens that count, one with none at all, and none in either."""
    one, two = (result[f"{where}, {masked}"] for result in results)
    for name in ("loss", "dhidden", "dlm_head"):
        assert_close(two[name], one[name], 1e-6, name)
    assert (np.abs(one["dlm_head"]).max() == 0) == (masked == "every row masked")
    assert (one["loss"] == 0) == (masked == "every row masked")


@pytest.mark.slow
def test_the_loss_is_that_of_every_mesh(results):
    for masked in ("no row masked", "the last rows masked"):
        losses = [result["loss"] for name, result in results[1].items() if name.endswith(f", {masked}")]
        assert len(losses) == 3
        assert_close(losses, [losses[0]] * 3, 1e-6)


@pytest.mark.parametrize("place", [from_process_data, from_same_data])
def test_host_data_goes_to_the_devices_and_comes_back(place):
    mesh = jrl.make_mesh({"data": 4, "vocab": 2})
    tree = {"a": np.arange(24).reshape(8, 3), "b": np.ones((4, 2), np.float32)}
    placed = place(tree, mesh, P("data"))
    assert placed["a"].sharding.spec == P("data") and placed["a"].shape == (8, 3)
    back = to_host(placed)
    assert all((back[k] == tree[k]).all() and back[k].shape == tree[k].shape for k in tree)


def test_m04_shapes_on_the_host_are_those_of_the_arrays():
    """`process_allgather` adds a dimension, or does not, by the number of processes."""
    assert to_host(jnp.ones((2, 3))).shape == (2, 3) and to_host(1.0).shape == ()


def test_one_process_needs_no_start():
    code = (
        "from jaxrl_logprob.sharding import start_processes as s; import jax; assert s() == s() == len(jax.devices())"
    )
    launch(["-c", code])


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"JAX_COORDINATOR_ADDRESS": "localhost:1"}, "`num_processes` must be given with the others, got None"),
        ({"JAX_NUM_PROCESSES": "two"}, "`JAX_NUM_PROCESSES` must be a number, got 'two'"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "`coordinator_address` must be given with the others"),
    ],
)
def test_errors_of_starting(environment, message, monkeypatch):
    monkeypatch.setattr("jaxrl_logprob.sharding._processes._started", [])
    monkeypatch.setattr(jax.distributed, "initialize", initialize_as_if_first)
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        start_processes()


def initialize_as_if_first(**given):
    """JAX's own check of these, which comes after one that this process has used JAX already."""
    from jax._src.distributed import State

    State().initialize(**given)
