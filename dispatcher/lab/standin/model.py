"""What requests are like and what they cost a model server: of the stand-ins and of the simulation alike.

work = 0.03 + 0.00025 × context tokens + 0.012 × generated tokens, in a pool that is otherwise empty; a full
pool is half as fast.
"""

from __future__ import annotations

import math
from functools import lru_cache
from random import Random

BATCH_CONTEXT = 500
"""Context tokens of a batch request."""
BATCH_TOKENS, BATCH_SPREAD = 145.0, 0.6
"""What it generates: lognormal, its mean and the spread of its logarithm."""
LEAST_TOKENS = 8
TOKEN_S = 0.012
"""What each generated token takes in a pool that is otherwise empty."""
WAITING_AT_FULL = 5
"""The utilization detector calls a model server full that has so many requests waiting,"""
KV_AT_FULL = 0.8
"""or so much of its KV cache in use."""


def work_s(context: int, generated: float) -> float:
    """How long a request of so many tokens runs in a pool that is otherwise empty."""
    return 0.03 + 0.00025 * context + TOKEN_S * generated


def slowdown(running: int, slots: int) -> float:
    """f: how much slower a request runs that starts as one of `running`; from 1, in an empty pool, to 2."""
    return 1.0 + (running - 1) / (slots - 1) if slots > 1 else 1.0


def generated(draws: Random, mean: float = BATCH_TOKENS, spread: float = BATCH_SPREAD) -> int:
    """How many tokens the next request generates."""
    mu, least = _lognormal(mean, spread)
    return max(least, round(draws.lognormvariate(mu, spread)))


@lru_cache(maxsize=16)
def _lognormal(mean: float, spread: float) -> tuple[float, int]:
    """The mean of the logarithm, and the fewest there are."""
    return math.log(mean) - spread**2 / 2, min(LEAST_TOKENS, round(mean))
