"""Meshes and their axes, sequence layouts, the vocabulary partition, and how a per-shard function is put on a mesh.

Imports as `jaxrl_logprob.sharding`. Knows nothing of log-probabilities.
"""

from ._axes import MeshAxes as MeshAxes
from ._layout import redistribute as redistribute, SequenceLayout as SequenceLayout
from ._mesh import make_mesh as make_mesh
from ._placement import place as place, Placement as Placement, Role as Role
from ._vocab import VocabPartition as VocabPartition
