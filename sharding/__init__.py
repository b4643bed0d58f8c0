"""Meshes and their axes, sequence layouts, the vocabulary partition, several processes, per-shard functions on a mesh.

Imports as `jaxrl_logprob.sharding`. Knows nothing of log-probabilities.
"""

from ._axes import MeshAxes as MeshAxes
from ._layout import redistribute as redistribute, SequenceLayout as SequenceLayout
from ._mesh import make_mesh as make_mesh
from ._placement import place as place, Placement as Placement, Role as Role
from ._processes import (
    from_process_data as from_process_data,
    from_same_data as from_same_data,
    start_processes as start_processes,
    to_host as to_host,
)
from ._vocab import VocabPartition as VocabPartition
