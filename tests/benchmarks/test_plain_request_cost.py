"""Function calls of a plain request in the dispatch loop: settings are defaults, no feature is in use.

Calls do not depend on the machine and its load, so that a change of one call in a hundred is seen. A feature
that is not in use must cost a plain request nothing.
"""

from __future__ import annotations

import pytest

from tests.function_calls import ProductCallCounter
from tests.kernel.plain_requests import run_plain_requests

FEW, MANY = 200, 400
CALLS_PER_REQUEST = {0.0: 228.86, 1.0: 353.68}
"""Function calls per request by the spread of the answer times, in seconds: with 0, requests are claimed and
settled in batches, with 1, a few at a time.

Measured on Python 3.11 as the difference between 400 and 200 requests, divided by 200."""
TOLERANCE = 0.01


def count_calls(requests: int, spread_s: float) -> float:
    counter = ProductCallCounter()
    with counter.count():
        run_plain_requests(requests, spread_s)
    return counter()


@pytest.mark.parametrize("spread_s", CALLS_PER_REQUEST)
def test_plain_request_makes_no_more_function_calls(spread_s: float) -> None:
    run_plain_requests(1)  # fills the caches
    calls = (count_calls(MANY, spread_s) - count_calls(FEW, spread_s)) / (MANY - FEW)
    print(f"answers within {spread_s:g} s: {calls:.2f} function calls per plain request")
    assert calls <= CALLS_PER_REQUEST[spread_s] * (1 + TOLERANCE)
