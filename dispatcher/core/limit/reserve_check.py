"""Whether the reserve is little for requests as long as ours. Pure.

Nothing that runs is taken back: when realtime grows beyond what the reserve holds for it, it waits for as
many of ours to end. Requests of seconds end all the time, those of minutes hardly ever, and the harvest shows
nothing of it (docs/simulator.md has figures and a picture).
"""

from __future__ import annotations

LONG_S = 15.0
"""Ours are long from here on: with a reserve of 0.05 realtime's p99 waits more than a second."""
ENOUGH = 0.2
"""A reserve with which that is realtime's matter again."""
OURS, OTHERS = 0.2, 0.02
"""Of the capacity: with less of it ours hold nobody up, and with less there is nobody to be held up."""


def little_reserve(
    mean_s: float, *, reserve: float, ours: float, everybody: float, max_sys: float
) -> str | None:
    """A sentence where the reserve is little, without its end; None where it is enough, or nobody waits.

    `mean_s`: how long a request of ours lasts; 0: not known. `everybody`: requests in the system, `ours`
    among them.
    """
    if not mean_s >= LONG_S or reserve >= ENOUGH or max_sys <= 0:
        return None
    if ours < OURS * max_sys or everybody - ours < OTHERS * max_sys:
        return None
    return (
        f"batch requests last {mean_s:.0f} s on average and are not taken back when realtime grows: with a "
        f"reserve of {reserve:g} it waits for them (budget.reserve: {ENOUGH:g} or more; "
        "`batch-dispatcher simulate --batch-tokens` shows what it comes to)"
    )
