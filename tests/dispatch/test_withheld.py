"""A claim that gets nothing because of what other dispatchers know: the sentence says so."""

from __future__ import annotations

import pytest

from dispatcher.core.budget import Policy, Reading, Reason, Signal
from dispatcher.core.limiter import Limiter
from dispatcher.dispatch.access import withheld
from dispatcher.ports import Claimed, Lease, Leases, Overload, Permit, Shared

PERMIT = Permit(limit=32, read_at=100.0, lost=0, retry_after_max_s=60.0)
LEASE = Lease(1, "t", b"", 0.0, 1, 0, 0, 0)


def claimed(
    *, leases: int = 0, live: int = 0, waiting: int = 9, limit: int = 32, overload: Overload | None = None
) -> Claimed:
    shared = Shared(limit, 100.0, overload, None, paused=False)
    return Claimed([LEASE] * leases, Leases(101.0, live, live, 0, 0), shared, waiting)


def refused(at: float, until: float) -> Overload:
    return Overload(at, until, capacity=True, in_flight=3)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (claimed(overload=refused(90.0, 86400.0)), "the gateway asked a dispatcher to wait another 49.0 s"),
        (claimed(overload=refused(100.5, 100.5)), "a dispatcher was refused after the newest reading here"),
        (claimed(limit=4, live=4), "a newer reading of another dispatcher leaves a limit of 4"),
        (claimed(overload=refused(30.0, 86400.0)), ""),
        (claimed(leases=1, limit=4, live=4), ""),
        (claimed(waiting=0, overload=refused(100.5, 100.5)), ""),
        (claimed(live=32), ""),
    ],
)
def test_it_is_known_why_a_claim_got_nothing(told: Claimed, why: str) -> None:
    assert withheld(told, PERMIT) == why


def test_an_open_gate_says_it_until_a_claim_gets_something() -> None:
    limiter = Limiter(Policy(), [Signal.SATURATION])
    limiter.reading(Reading(Signal.SATURATION, 0.0, 0.0, 0.0, 0.0, 32), 0.0)
    limiter.waiting(9, 1.0)
    limiter.withheld("why")
    assert (limiter.allowance(1.0).reason, limiter.allowance(1.0).because) == (Reason.OPEN, "why")
    limiter.waiting(0, 1.0)
    assert limiter.allowance(1.0).because == "", "nothing waits: nothing is withheld"
    limiter.waiting(9, 1.0)
    limiter.withheld("")
    assert limiter.allowance(1.0).because == ""
