"""Cost of requests on a model server, used by the stand-ins and the simulator.

work = 0.03 + 0.00025 × context tokens + 0.012 × generated tokens, in an otherwise empty pool; a full pool is
half as fast.
"""

from __future__ import annotations

import math
from functools import lru_cache
from random import Random

BATCH_CONTEXT = 500
"""Context tokens of a batch request."""
BATCH_TOKENS, BATCH_SPREAD = 145.0, 0.6
"""Generated tokens of a batch request are lognormal: their mean, and the standard deviation of their
logarithm."""
MIN_TOKENS = 8
TOKEN_S = 0.012
"""Time for each generated token in an otherwise empty pool."""
CONTEXT_TOKEN_S = 0.00025
"""Time for each context token in an otherwise empty pool."""
WAITING_AT_FULL = 5
"""Number of waiting requests at which the utilization detector considers a model server full."""
KV_AT_FULL = 0.8
"""Share of the KV cache at which the utilization detector considers a model server full."""


def compute_work_s(context: int, generated: float) -> float:
    """Return the duration of a request with these tokens in an otherwise empty pool."""
    return 0.03 + CONTEXT_TOKEN_S * context + TOKEN_S * generated


def compute_context(work_s: float, generated: int) -> int:
    """Return the context tokens of a request with this duration and this number of generated tokens."""
    return max(0, round((work_s - compute_work_s(0, generated)) / CONTEXT_TOKEN_S))


def compute_slowdown(running: int, slots: int) -> float:
    """Return how much slower a request runs that starts as one of `running`: from 1 in an empty pool to 2 in
    a full one."""
    return 1.0 + (running - 1) / (slots - 1) if slots > 1 else 1.0


def draw_tokens(draws: Random, mean: float = BATCH_TOKENS, spread: float = BATCH_SPREAD) -> int:
    """Draw the number of tokens that a request generates."""
    mu, least = _get_lognormal_parameters(mean, spread)
    return max(least, round(draws.lognormvariate(mu, spread)))


@lru_cache(maxsize=16)
def _get_lognormal_parameters(mean: float, spread: float) -> tuple[float, int]:
    """Return the mean of the logarithm, and the minimum number of tokens."""
    return math.log(mean) - spread**2 / 2, min(MIN_TOKENS, round(mean))
