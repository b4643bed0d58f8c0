"""Per-token log-probabilities and entropies of language-model actions, over sharded vocabularies and sequences."""

from . import reference as reference, sharding as sharding
from ._logits import (
    gather_logprobs as gather_logprobs,
    LogprobsAndEntropy as LogprobsAndEntropy,
    token_entropy as token_entropy,
    token_logprobs as token_logprobs,
    token_logprobs_and_entropy as token_logprobs_and_entropy,
)
from ._transform import LogitTransform as LogitTransform
from .sharding import make_mesh as make_mesh, MeshAxes as MeshAxes, VocabPartition as VocabPartition


__version__ = "0.1.0"
