"""Check whether the reserve is too small for the duration of the calls of batch requests.

Running calls are not stopped. When realtime traffic grows beyond the reserve, realtime requests wait until
calls of batch requests end. Calls that take seconds end all the time, calls that take minutes hardly ever,
and the utilization does not show the difference (docs/how-to/simulator.md has figures and a picture).
"""

from __future__ import annotations

LONG_CALL_S = 15.0
"""Mean duration from which calls are long. With a reserve of 0.05 the p99 wait of realtime requests then
exceeds one second."""
SUFFICIENT_RESERVE = 0.2
"""Reserve from which batch requests no longer cause such waits."""
MIN_BATCH_SHARE, MIN_REALTIME_SHARE = 0.2, 0.02
"""Shares of the capacity. Fewer batch requests than the first cause no delay, and with fewer realtime
requests than the second there is no request to delay."""


def explain_small_reserve(
    mean_duration_s: float | None,
    *,
    reserve: float,
    batch_requests: float,
    all_requests: float,
    max_sys: float,
    why_long: str = "",
) -> str | None:
    """Return a warning without final punctuation if the reserve is too small. `None` if it is sufficient, or
    no realtime request waits.

    `mean_duration_s` is the mean duration of a call, `None` if it is not known. `all_requests` is the number
    of requests in the system, batch requests included. `why_long` says why the calls are that long, if
    that is known.
    """
    # `not mean_s >= LONG_CALL_S` also rejects NaN.
    if mean_duration_s is None or not mean_duration_s >= LONG_CALL_S:
        return None
    if reserve >= SUFFICIENT_RESERVE or max_sys <= 0:
        return None
    if (
        batch_requests < MIN_BATCH_SHARE * max_sys
        or all_requests - batch_requests < MIN_REALTIME_SHARE * max_sys
    ):
        return None
    return (
        f"calls of batch requests take {mean_duration_s:.0f} s on average"
        f"{f' ({why_long})' if why_long else ''}, and a realtime request that finds no free slot may "
        f"wait that long; budget.reserve is {reserve:g}, and {SUFFICIENT_RESERVE:g} or more keeps slots free "
        "(`batch-dispatcher simulate --batch-tokens` shows what it comes to)"
    )
