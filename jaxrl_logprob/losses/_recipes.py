"""The published algorithms as settings of `policy_loss`: which objective, whose ratio, which mean, which advantages."""

import dataclasses
from collections.abc import Callable
from functools import partial

from jaxtyping import Array

from ._advantages import centred_advantages, group_advantages, leave_one_out_advantages
from ._aggregate import LossAggMode
from ._objectives import cispo, ppo_clip, reinforce, sapo, Surrogate
from ._ratios import RatioLevel


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a paper fixes; `dataclasses.replace` changes a part of it.

    Args:
        objective: of (log_ratio, advantages), for `policy_loss`.
        level: whose ratio, for `policy_loss`.
        loss_agg_mode: the mode of `Aggregation`; "seq-mean-token-sum-norm" needs a max_length there.
        advantages: of rewards [*prompts, G].
    """

    objective: Callable[[Array, Array], Surrogate]
    level: RatioLevel
    loss_agg_mode: LossAggMode
    advantages: Callable[[Array], Array]


RECIPES = {
    # DeepSeekMath, https://arxiv.org/abs/2402.03300, eq. 3; its KL penalty is `kl_penalty`, with coefficient 0.04.
    "grpo": Recipe(ppo_clip, "token", "seq-mean-token-mean", group_advantages),
    # https://arxiv.org/abs/2503.20783, section 3.2.
    "dr-grpo": Recipe(ppo_clip, "token", "seq-mean-token-sum-norm", centred_advantages),
    # https://arxiv.org/abs/2503.14476, eq. 8: clip-higher and the mean over tokens.
    "dapo": Recipe(partial(ppo_clip, clip_low=0.2, clip_high=0.28), "token", "token-mean", group_advantages),
    # https://arxiv.org/abs/2507.18071, eq. 5 and 13; bounds of its section 5.1.
    "gspo": Recipe(
        partial(ppo_clip, clip_low=3e-4, clip_high=4e-4), "sequence", "seq-mean-token-mean", group_advantages
    ),
    "gspo-token": Recipe(
        partial(ppo_clip, clip_low=3e-4, clip_high=4e-4), "sequence-token", "seq-mean-token-mean", group_advantages
    ),
    # MiniMax-M1, https://arxiv.org/abs/2506.13585, eq. 4; the bound is ScaleRL's.
    "cispo": Recipe(cispo, "token", "token-mean", group_advantages),
    # https://arxiv.org/abs/2511.20347, eq. 5.
    "sapo": Recipe(sapo, "token", "seq-mean-token-mean", group_advantages),
    # https://arxiv.org/abs/2402.14740, section 4.2: on-policy, whole completions.
    "rloo": Recipe(reinforce, "token", "seq-mean-token-sum", leave_one_out_advantages),
}
