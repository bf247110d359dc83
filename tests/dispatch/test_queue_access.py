"""The queue as the loop uses it: what an outage closes, what opens it again, and what its answers teach."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest

from dispatcher.core.limit.budget import Reason
from dispatcher.core.requests.lease_validity import LeaseValidity
from dispatcher.dispatch.in_flight import InFlightLease
from dispatcher.dispatch.queue_access import GATE_REST_S, RETRY_PAUSE_S, QueueAccess, explain_empty_claim
from dispatcher.lab.memory_queue import MemoryStore
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.ports import (
    CallRefusedError,
    ClaimResult,
    LeaseCounts,
    Overload,
    Permit,
    QueueUnavailableError,
    RenewResult,
    SharedState,
)
from dispatcher.telemetry.events import Event, divert_events
from tests.dispatch.scene import MarkersApart, lease, open_limiter, request

PERMIT = Permit(limit=32, read_at=100.0, lost_units=0, retry_after_max_s=60.0)
AWAY = QueueUnavailableError("Redis refuses connections")
REFUSED = CallRefusedError("a right is missing")


class Desk:
    """An access, and what it tells."""

    def __init__(self) -> None:
        clock = asyncio.get_running_loop().time
        self.events: list[tuple[Event, Mapping[str, Any]]] = []
        self.store = MemoryStore(clock=clock)
        self.queue = MarkersApart(self.store, "a")
        self.limiter = open_limiter()
        self.access = QueueAccess(self.queue, self.limiter, LeaseValidity(30.0, 5.0), clock)

    async def works(self, what: str) -> None:
        async def call() -> str:
            return "answer"

        assert await self.access.call_queue(what, call()) == "answer"

    async def fails(self, what: str, error: Exception = AWAY) -> None:
        async def call() -> str:
            raise error

        assert await self.access.call_queue(what, call()) is None

    def closed(self) -> bool:
        now = asyncio.get_running_loop().time()
        reason = self.limiter.get_allowance(now).reason
        assert reason in (Reason.QUEUE_UNREACHABLE, Reason.OPEN)
        assert (self.access.view.problem is None) == (reason is Reason.OPEN), "people are told the same"
        return reason is Reason.QUEUE_UNREACHABLE

    def told(self) -> list[str]:
        return [event.event_name for event, _ in self.events]


def at_desk(check: Callable[[Desk], Awaitable[None]]) -> None:
    async def main() -> None:
        desk = Desk()
        with divert_events(lambda event, fields: desk.events.append((event, fields))):
            await check(desk)

    run_in_virtual_time(main(), start=2.0)


# What closes the gate, and what opens it.


def test_outage_closes_the_gate_until_some_write_gets_through() -> None:
    async def check(desk: Desk) -> None:
        desk.access.has_work = False
        await desk.fails("claim")
        assert desk.closed()
        assert desk.access.view.problem == "Redis refuses connections"
        await desk.fails("renew")
        assert not desk.access.wake.is_set()
        await desk.works("sweep")
        assert not desk.closed()
        assert desk.access.has_work, "whatever came meanwhile is to be looked for"
        assert desk.access.wake.is_set()
        assert desk.told() == ["queue-unreachable", "queue-reachable"]

    at_desk(check)


def test_that_a_queue_can_be_looked_at_does_not_show_that_it_can_be_written() -> None:
    async def check(desk: Desk) -> None:
        await desk.fails("settle")
        await desk.works("counts")
        assert desk.closed()
        await desk.works("settle")
        assert not desk.closed()

    at_desk(check)


@pytest.mark.parametrize("error", [AWAY, REFUSED])
def test_look_that_fails_while_writes_get_through_closes_the_gate_once(error: Exception) -> None:
    async def check(desk: Desk) -> None:
        await desk.fails("snapshot", error)
        assert desk.closed()
        await desk.works("claim")
        await desk.fails("snapshot")
        assert not desk.closed()
        await desk.works("snapshot")
        await desk.fails("snapshot")
        assert desk.closed(), "it had worked again"

    at_desk(check)


def test_call_that_is_refused_by_itself_keeps_the_gate_closed_until_it_gets_through() -> None:
    async def check(desk: Desk) -> None:
        await desk.fails("settle", REFUSED)
        await asyncio.sleep(3600.0)
        for other in ("renew", "sweep", "release", "counts"):
            await desk.works(other)
        assert desk.closed()
        await desk.works("settle")
        assert not desk.closed()

    at_desk(check)


@pytest.mark.parametrize("what", ["claim", "probe", "settle-unleased"])
def test_call_that_nobody_makes_through_a_closed_gate_is_tried_again_later_each_time(what: str) -> None:
    async def check(desk: Desk) -> None:
        for rest_s in (0.5, 1.0, 2.0, 4.0, 8.0, GATE_REST_S[1], GATE_REST_S[1]):
            await desk.fails(what, REFUSED)
            await asyncio.sleep(rest_s - 0.01)
            await desk.works("renew")
            assert desk.closed()
            await asyncio.sleep(0.02)
            await desk.works("renew")
            assert not desk.closed()
        await desk.works(what)
        await desk.fails(what, REFUSED)
        await asyncio.sleep(0.51)
        await desk.works("renew")
        assert not desk.closed(), "it had worked: it begins anew"

    at_desk(check)


def test_pauses_between_tries_double_up_to_a_second_and_begin_anew() -> None:
    async def check(desk: Desk) -> None:
        pauses = []
        for _ in range(5):
            await desk.fails("claim")
            pauses.append(desk.access.retry_pause_s)
        assert pauses == [0.2, 0.4, 0.8, 1.0, 1.0]
        await desk.works("claim")
        assert desk.access.retry_pause_s == RETRY_PAUSE_S[0]

    at_desk(check)


def test_answer_that_nobody_understands_is_an_outage_and_told_with_what_is_known() -> None:
    async def check(desk: Desk) -> None:
        for _ in range(3):
            await desk.fails("claim", TypeError("cannot unpack"))
        assert desk.closed()
        problem = "the reply of the queue could not be understood: TypeError('cannot unpack')"
        assert desk.access.view.problem == problem
        assert desk.told() == ["internal-error", "queue-unreachable"], "once, or a log would be full of it"
        assert desk.events[0][1] == {"where": "queue", "error": "TypeError('cannot unpack')"}

    at_desk(check)


def test_newest_trouble_is_the_one_that_is_shown() -> None:
    async def check(desk: Desk) -> None:
        await desk.fails("settle", REFUSED)
        await desk.fails("renew")
        assert desk.access.view.problem == "Redis refuses connections"
        await desk.works("renew")
        assert desk.access.view.problem == "a right is missing"

    at_desk(check)


# Cancel markers.


def held(name: str, *, token: str = "t") -> InFlightLease:
    return InFlightLease(lease(), request=request(id=name, token=token))


def test_only_what_can_be_cancelled_is_looked_up_and_each_gets_its_answer() -> None:
    async def check(desk: Desk) -> None:
        member = InFlightLease(lease())
        nobody = [member, held("r-1", token="")]
        assert list(await desk.access.check_cancelled(nobody)) == [False, False]
        assert desk.queue.looked_up == 0, "a call for nothing"

        async def second(requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
            assert list(requests) == [("r-2", "t"), ("r-3", "t")]
            return [False, True]

        desk.queue.check_cancelled = second  # type: ignore[method-assign]
        several = [nobody[1], held("r-2"), member, held("r-3")]
        assert list(await desk.access.check_cancelled(several)) == [False, False, False, True]

    at_desk(check)


def test_gate_stays_closed_until_the_very_markers_are_read_that_could_not_be() -> None:
    async def check(desk: Desk) -> None:
        desk.queue.away = "r"
        assert list(await desk.access.check_cancelled([held("r-1"), held("x-1")])) == [None, None]
        assert desk.closed()
        assert desk.access.markers_unreadable.is_set()
        assert list(await desk.access.check_cancelled([held("x-2")])) == [False]
        await desk.works("claim")
        await desk.access.retry_unread_markers()
        assert desk.closed(), "others can be read, and those still cannot"
        desk.queue.away = ""
        await desk.access.retry_unread_markers()
        assert not desk.closed()
        assert not desk.access.markers_unreadable.is_set()
        assert desk.told() == ["queue-unreachable", "queue-reachable"]

    at_desk(check)


def test_markers_that_could_not_be_read_while_others_were_are_not_forgotten() -> None:
    async def check(desk: Desk) -> None:
        desk.queue.away = "r"
        await desk.access.check_cancelled([held("r-1")])
        desk.queue.away = ""
        readable = desk.queue.check_cancelled

        async def meanwhile(requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
            desk.queue.away, desk.queue.check_cancelled = "x", readable  # type: ignore[method-assign]
            await desk.access.check_cancelled([held("x-1")])
            return [False]

        desk.queue.check_cancelled = meanwhile  # type: ignore[method-assign]
        await desk.access.retry_unread_markers()
        assert desk.closed()
        desk.queue.away = ""
        await desk.access.retry_unread_markers()
        assert not desk.closed()

    at_desk(check)


# What answers teach.


def told(*, live: int = 5, others: int = 3, lost: int = 0, **changes: Any) -> RenewResult:
    terms: dict[str, Any] = {"limit": None, "read_at": 0.0, "overload": None, "probing_owner": None}
    return RenewResult(
        (), LeaseCounts(2.0, live, others, 0, lost), SharedState(**(terms | {"is_paused": False} | changes))
    )


def test_grown_counter_of_losses_has_what_is_held_looked_at() -> None:
    """A counter, for the reply that told of a loss may itself be lost; the first value says nothing."""

    async def check(desk: Desk) -> None:
        desk.access.record_lost_units(7)
        desk.access.record_lost_units(7)
        assert not desk.access.leases_were_lost.is_set()
        desk.access.update_from_reply(told(lost=8))
        assert desk.access.leases_were_lost.is_set()

    at_desk(check)


def test_counts_pause_and_the_limit_of_others_reach_the_limiter() -> None:
    async def check(desk: Desk) -> None:
        desk.access.update_from_reply(told(others=4))
        assert desk.limiter.other_owners_units == 4
        desk.access.update_from_reply(told(is_paused=True))
        assert desk.limiter.get_allowance(2.0).reason is Reason.PAUSED
        assert desk.access.view.shared is not None
        assert desk.access.view.shared.is_paused
        desk.access.update_from_reply(told())
        assert desk.limiter.get_allowance(2.0).reason is Reason.OPEN
        waiting = ClaimResult([], told().lease_counts, told().shared, claimable_count=0)
        desk.access.update_from_reply(waiting)
        assert desk.limiter.get_allowance(2.0).reason is Reason.IDLE

    at_desk(check)


def test_refusal_that_another_saw_closes_the_gate_here_with_all_that_is_in_flight_here() -> None:
    """Whoever told it may not have known of ours."""

    async def check(desk: Desk) -> None:
        counted: list[tuple[int, bool]] = []
        overloaded = desk.limiter.record_refusal

        def heard(now: float, **terms: Any) -> None:
            counted.append((terms["in_flight"], terms["is_remote"]))
            overloaded(now, **terms)

        desk.limiter.record_refusal = heard  # type: ignore[method-assign]
        for key in range(4):
            desk.limiter.record_send(key, 1.5)
        for in_flight in (3, 9):
            overload = Overload(2.0, 2.0, is_out_of_capacity=True, in_flight=in_flight)
            desk.access.update_from_reply(told(others=2, overload=overload))
        assert counted == [(6, True), (9, True)]
        assert desk.limiter.get_allowance(2.0).reason is Reason.BACKPRESSURE

    at_desk(check)


def test_lease_is_ours_as_long_as_the_queue_has_heard_of_us_since_it_was_confirmed() -> None:
    async def check(desk: Desk) -> None:
        mine = InFlightLease(lease(), confirmed_at=2.0)
        assert not desk.access.is_lease_valid(mine), "nothing was heard of us yet"
        desk.access.record_sign_of_life(2.0)
        assert desk.access.is_lease_valid(mine)
        await asyncio.sleep(4.9)
        assert desk.access.is_lease_valid(mine)
        await asyncio.sleep(0.2)
        assert not desk.access.is_lease_valid(mine), "silent for owner_timeout_s: we may be taken for dead"

    at_desk(check)


# Why a claim got nothing.


HEAVY = "the next request needs more than the {} units that are free, and is sent when there is room for it"


def claimed(
    *,
    leases: int = 0,
    live: int = 32,
    waiting: int = 9,
    limit: int = 32,
    overload: Overload | None = None,
    lost: int = 0,
    paused: bool = False,
) -> ClaimResult:
    shared = SharedState(limit, 100.0, overload, None, is_paused=paused)
    return ClaimResult([lease()] * leases, LeaseCounts(101.0, live, live, 0, lost), shared, waiting)


def refused(at: float, until: float) -> Overload:
    return Overload(at, until, is_out_of_capacity=True, in_flight=3)


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
        (claimed(live=20), HEAVY.format(12)),
        (claimed(live=20, lost=4), HEAVY.format(8)),
        (claimed(live=20, lost=11), ""),
        (claimed(live=31), ""),
        (claimed(live=20, leases=1), ""),
        (claimed(live=20, waiting=0), ""),
        (claimed(live=20, paused=True), ""),
        (claimed(live=20, limit=30), ""),
        (
            claimed(live=20, overload=refused(100.5, 100.5)),
            "a dispatcher was refused after the newest reading here",
        ),
    ],
)
def test_it_is_known_why_a_claim_got_nothing(told: ClaimResult, why: str) -> None:
    assert explain_empty_claim(told, PERMIT) == why
