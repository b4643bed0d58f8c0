"""Losses as the papers have them, in float64 NumPy, sequence by sequence: the oracle of the tests of losses."""

import math

import numpy as np


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def ppo(log_ratio, advantage, low=0.2, high=0.2, dual=None):
    r = math.exp(log_ratio)
    objective = min(r * advantage, min(max(r, 1 - low), 1 + high) * advantage)
    if dual is not None and advantage < 0:
        objective = max(objective, dual * advantage)
    return -objective


def cispo(log_ratio, advantage, low=0.0, high=5.0):
    return -min(max(math.exp(log_ratio), low), high) * advantage * log_ratio


def sapo(log_ratio, advantage):
    tau = 1.0 if advantage > 0 else 1.05
    return -4 / tau * sigmoid(tau * (math.exp(log_ratio) - 1)) * advantage


def reinforce(log_ratio, advantage):
    return -advantage * log_ratio


OBJECTIVES = {"ppo_clip": ppo, "cispo": cispo, "sapo": sapo, "reinforce": reinforce}


def per_token(objective, log_ratios, advantages, level):
    """The losses of one sequence's tokens."""
    if level != "token" and len(log_ratios):
        log_ratios = [np.mean(log_ratios)] * len(log_ratios)
    return [OBJECTIVES[objective](x, a) for x, a in zip(log_ratios, advantages, strict=True)]


def aggregated(mode, sequences, max_length):
    """The losses of the tokens of each sequence, as one number."""
    sequences = [s for s in sequences if len(s)]
    if not sequences:
        return 0.0
    if mode == "token-mean":
        return sum(map(sum, sequences)) / sum(map(len, sequences))
    of_one = {
        "seq-mean-token-sum": sum,
        "seq-mean-token-mean": lambda s: sum(s) / len(s),
        "seq-mean-token-sum-norm": lambda s: sum(s) / max_length,
    }[mode]
    return sum(map(of_one, sequences)) / len(sequences)
