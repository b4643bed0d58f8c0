"""Losses of an actor, of per-token log-probabilities: pure functions of arrays, each citing its paper.

Compose them: a log-ratio and an advantage give an objective's per-token losses (`ppo_clip`, `cispo`, `sapo`,
`reinforce`), weights correct for the sampler (`truncated_importance`, `masked_importance`), `kl_penalty` keeps to a
reference, and `aggregate` makes them one number; `policy_loss` does it in one call. `RECIPES` has the settings of
published algorithms by name.
"""

from ._advantages import (
    centred_advantages as centred_advantages,
    group_advantages as group_advantages,
    leave_one_out_advantages as leave_one_out_advantages,
)
from ._aggregate import aggregate as aggregate, Aggregation as Aggregation, loss_denominator as loss_denominator
from ._kl import kl_penalty as kl_penalty
from ._metrics import Metrics as Metrics, mismatch_metrics as mismatch_metrics, policy_metrics as policy_metrics
from ._mismatch import (
    effective_sample_size as effective_sample_size,
    ImportanceWeights as ImportanceWeights,
    masked_importance as masked_importance,
    truncated_importance as truncated_importance,
)
from ._objectives import (
    cispo as cispo,
    ppo_clip as ppo_clip,
    reinforce as reinforce,
    sapo as sapo,
    Surrogate as Surrogate,
)
from ._policy import policy_loss as policy_loss, PolicyLoss as PolicyLoss, TokenStats as TokenStats
from ._recipes import Recipe as Recipe, RECIPES as RECIPES
from ._sequences import Sequences as Sequences
