"""Per-token log-probabilities and entropies of language-model actions, over sharded vocabularies and sequences."""

from . import losses as losses, packing as packing, reference as reference, segments as segments, sharding as sharding
from ._chunks import Chunks as Chunks
from ._head import LoraHead as LoraHead, TiedEmbedding as TiedEmbedding
from ._linear import (
    linear_gather_logprobs as linear_gather_logprobs,
    linear_token_entropy as linear_token_entropy,
    linear_token_logprobs as linear_token_logprobs,
    linear_token_logprobs_and_entropy as linear_token_logprobs_and_entropy,
)
from ._logits import (
    gather_logprobs as gather_logprobs,
    token_entropy as token_entropy,
    token_logprobs as token_logprobs,
    token_logprobs_and_entropy as token_logprobs_and_entropy,
)
from ._scoring import LogprobsAndEntropy as LogprobsAndEntropy
from ._transform import LogitTransform as LogitTransform
from .losses import policy_loss as policy_loss, PolicyLoss as PolicyLoss
from .sharding import make_mesh as make_mesh, MeshAxes as MeshAxes, VocabPartition as VocabPartition


__version__ = "0.1.0"
