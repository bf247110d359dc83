"""Check whether the reserve is too small for the duration of the batch requests.

Running requests are never stopped. When realtime traffic grows beyond the reserve, realtime requests wait
until batch requests end. Requests that take seconds end all the time, requests that take minutes hardly ever,
and the utilization does not show the difference (docs/how-to/simulator.md has figures and a picture).
"""

from __future__ import annotations

LONG_REQUEST_S = 15.0
"""Mean duration from which batch requests are long. With a reserve of 0.05 the p99 wait of realtime requests
then exceeds one second."""
SUFFICIENT_RESERVE = 0.2
"""Reserve from which batch requests no longer cause such waits."""
MIN_BATCH_SHARE, MIN_REALTIME_SHARE = 0.2, 0.02
"""Shares of the capacity. Fewer batch requests than the first cause no delay, and with fewer realtime
requests than the second there is no request to delay."""


def explain_small_reserve(
    mean_duration_s: float, *, reserve: float, batch_requests: float, all_requests: float, max_sys: float
) -> str | None:
    """Return a warning without final punctuation if the reserve is too small. `None` if it is sufficient, or
    no realtime request waits.

    `mean_duration_s` is the mean duration of a batch request, 0 if it is not known. `all_requests` is the
    number of requests in the system, batch requests included.
    """
    # `not mean_s >= LONG_S` also rejects NaN.
    if not mean_duration_s >= LONG_REQUEST_S or reserve >= SUFFICIENT_RESERVE or max_sys <= 0:
        return None
    if (
        batch_requests < MIN_BATCH_SHARE * max_sys
        or all_requests - batch_requests < MIN_REALTIME_SHARE * max_sys
    ):
        return None
    return (
        f"batch requests last {mean_duration_s:.0f} s on average and are not taken back when realtime "
        "grows: with a "
        f"reserve of {reserve:g} it waits for them (budget.reserve: {SUFFICIENT_RESERVE:g} or more; "
        "`batch-dispatcher simulate --batch-tokens` shows what it comes to)"
    )
