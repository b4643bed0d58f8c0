"""Several processes, one program: how they start, and how host data becomes global arrays and comes back.

Every process runs the same program on the same mesh. What differs between them is data: never let a shape, or whether
something is computed at all, depend on a process's own numbers, or the processes wait for each other for ever.
"""

import os
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ._errors import wrong


_started: list[bool] = []


def start_processes(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    num_cpu_devices: int | None = None,
) -> int:
    """Joins this process with the others, before JAX is first used; how many there are: 1 where there are no others.

    What is not given is read from the environment: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; and
    what is not there either is found by JAX: SLURM, MPI, Kubernetes and Cloud TPU tell it. A second call does nothing.
    On CPU the collectives between processes are gloo's.

    Args:
        coordinator_address: "host:port" of process 0, the same in all processes.
        num_processes: how many there are.
        process_id: which of them this is, from 0.
        num_cpu_devices: where JAX runs on CPU, emulate so many devices, over all processes together.

    Raises:
        ValueError: some of the three and not the others, and no cluster that tells; or devices that the processes
            do not divide.
        RuntimeError: JAX was used before.

    Example:
        Two processes on one machine, from two shells (process 1 with JAX_PROCESS_ID=1):

            JAX_COORDINATOR_ADDRESS=localhost:8476 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 python train.py
    """
    if _started or jax.distributed.is_initialized():
        return jax.process_count()
    given = {
        "coordinator_address": coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS"),
        "num_processes": _number("JAX_NUM_PROCESSES", num_processes),
        "process_id": _number("JAX_PROCESS_ID", process_id),
    }
    if num_cpu_devices is not None:
        processes = given["num_processes"] or 1
        if num_cpu_devices % processes:
            raise ValueError(wrong("num_cpu_devices", f"be a multiple of the {processes} processes", num_cpu_devices))
        jax.config.update("jax_num_cpu_devices", num_cpu_devices // processes)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(**given)
    except ValueError as error:
        if all(value is None for value in given.values()) and "coordinator_address should be defined" in str(error):
            _started.append(True)
            return 1  # No cluster that JAX knows.
        missing = [name for name, value in given.items() if value is None]
        if missing:
            remedy = "Give all three, or none where SLURM, MPI, Kubernetes or Cloud TPU tell."
            raise ValueError(wrong(missing[0], "be given with the others", None, remedy)) from error
        raise
    _started.append(True)
    return jax.process_count()


def from_process_data(tree: Any, mesh: Mesh, spec: PartitionSpec = PartitionSpec()) -> Any:
    """Global arrays of which each process has its own part: the rows it loaded.

    Args:
        tree: NumPy arrays, the part of this process: along a dimension that `spec` splits over processes, its share.
        mesh: all devices of all processes.
        spec: how the global arrays are split.
    """
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda a: jax.make_array_from_process_local_data(sharding, np.asarray(a)), tree)


def from_same_data(tree: Any, mesh: Mesh, spec: PartitionSpec = PartitionSpec()) -> Any:
    """Global arrays of which every process has the whole, and takes the parts of its devices.

    Args:
        tree: NumPy arrays, the same in every process; nothing checks that.
        mesh, spec: as for `from_process_data`.
    """
    sharding = NamedSharding(mesh, spec)

    def place(a):
        a = np.asarray(a)
        return jax.make_array_from_callback(a.shape, sharding, a.__getitem__)

    return jax.tree.map(place, tree)


def to_host(tree: Any) -> Any:
    """Whole NumPy arrays of global arrays, in every process; all processes have to call it.

    The shapes are those of the arrays, in one process and in several.
    """

    def fetch(a):
        whole = not isinstance(a, jax.Array) or a.is_fully_addressable or a.is_fully_replicated
        return np.asarray(a if whole else multihost_utils.process_allgather(a, tiled=True))

    return jax.tree.map(fetch, tree)


def _number(variable: str, value: int | None) -> int | None:
    if value is not None or variable not in os.environ:
        return value
    try:
        return int(os.environ[variable])
    except ValueError:
        raise ValueError(wrong(variable, "be a number", repr(os.environ[variable]))) from None
