"""Function calls of a plain request in the dispatch loop: settings are defaults, no feature is in use.

Calls do not depend on the machine and its load, so that a change of one call in a hundred is seen. A feature
that is not in use must cost a plain request nothing. Counted tokens, which are on where the size of the KV
memory is known, have a bound of their own.
"""

from __future__ import annotations

from typing import Any

import pytest

from dispatcher.limit.budget import KvUse
from tests.function_calls import ProductCallCounter
from tests.kernel.plain_requests import run_plain_requests

FEW, MANY = 200, 400
CALLS_PER_REQUEST = {0.0: 228.86, 1.0: 353.68}
"""Function calls per request by the spread of the answer times, in seconds: with 0, requests are claimed and
settled in batches, with 1, a few at a time.

Measured on Python 3.11 as the difference between 400 and 200 requests, divided by 200."""
TOLERANCE = 0.01
TOKEN_CALLS = {0.0: 28.0, 1.0: 39.0}
"""Function calls more if tokens are counted."""


def count_calls(requests: int, spread_s: float, **more: Any) -> float:
    counter = ProductCallCounter()
    with counter.count():
        run_plain_requests(requests, spread_s, **more)
    return counter()


@pytest.mark.parametrize("spread_s", CALLS_PER_REQUEST)
def test_plain_request_makes_no_more_function_calls(spread_s: float) -> None:
    run_plain_requests(1)  # fills the caches
    calls = (count_calls(MANY, spread_s) - count_calls(FEW, spread_s)) / (MANY - FEW)
    print(f"answers within {spread_s:g} s: {calls:.2f} function calls per plain request")
    assert calls <= CALLS_PER_REQUEST[spread_s] * (1 + TOLERANCE)


@pytest.mark.parametrize("spread_s", TOKEN_CALLS)
def test_counted_tokens_make_few_function_calls(spread_s: float) -> None:
    calls = []
    for mode in ("off", "auto"):
        more: dict[str, Any] = {
            "kv_use": KvUse(0.1, None, 1, 1.0, 1.0),
            "tokens": {"mode": mode, "per_endpoint": 10**6},
        }
        run_plain_requests(50, spread_s, **more)  # fills the caches
        calls.append(
            (count_calls(MANY, spread_s, **more) - count_calls(FEW, spread_s, **more)) / (MANY - FEW)
        )
    print(f"answers within {spread_s:g} s: counted tokens make {calls[1] - calls[0]:.2f} function calls more")
    assert calls[1] - calls[0] <= TOKEN_CALLS[spread_s]
