"""Meshes by axis names and sizes, on whatever devices there are."""

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh

from ._errors import wrong


def make_mesh(
    sizes: Mapping[str, int], *, axis_type: AxisType = AxisType.Auto, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh with the given axis names and sizes, in that order, slowest axis first.

    The same call works on one CPU device, on emulated CPU devices, on TPU and on GPU. One size may be -1:
    whatever the other sizes leave. A mesh smaller than the machine takes its first devices.

    Args:
        sizes: axis name -> number of devices along it, for example {"data": 2, "context": 2, "vocab": -1}.
        axis_type: `AxisType.Auto` (the compiler propagates shardings) or `AxisType.Explicit` (they are types).
        devices: the devices to use; all of `jax.devices()` when None.

    Raises:
        ValueError: a size below 1, more than one -1, or more devices asked for than there are.

    Example:
        >>> make_mesh({"data": 1, "vocab": 1}).shape
        OrderedDict({'data': 1, 'vocab': 1})
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = list(sizes.values())
    free = [i for i, size in enumerate(shape) if size == -1]
    if len(free) > 1 or any(size < 1 and size != -1 for size in shape):
        raise ValueError(wrong("sizes", "be positive, with at most one -1", dict(sizes)))
    if free:
        shape[free[0]] = len(devices) // -math.prod(shape)
    count = math.prod(shape)
    if count > len(devices) or count == 0:
        raise ValueError(
            wrong(
                "sizes",
                f"ask for at most the {len(devices)} {devices[0].platform} device(s) there are",
                dict(sizes),
                "On CPU, emulate more before JAX is first used: "
                f'jax.config.update("jax_num_cpu_devices", {max(count, abs(math.prod(sizes.values())))}).',
            )
        )
    return jax.make_mesh(tuple(shape), tuple(sizes), (axis_type,) * len(shape), devices=devices[:count])
