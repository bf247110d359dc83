"""What goes on beside the turns: each duty at its own pace, whatever the gate says."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from dispatcher.core.gateway.outcome import RetryPolicy
from dispatcher.core.limit.budget import Reason
from dispatcher.core.requests.forecast import LineAhead
from dispatcher.core.requests.lease_validity import Tenure
from dispatcher.core.requests.result import decode_result
from dispatcher.dispatch.in_flight import HeldLease, Holding, Try
from dispatcher.dispatch.journal import Journal
from dispatcher.dispatch.maintenance import EACH_S, EXPIRED_AT_ONCE, OUTLOOK_EACH_S, Upkeep, permit_of
from dispatcher.dispatch.options import Options
from dispatcher.dispatch.queue_access import QueueAccess
from dispatcher.lab.memory_queue import MemoryQueue, MemoryStore
from dispatcher.lab.simulation.virtual_loop import run
from dispatcher.ports import (
    Counts,
    Expired,
    Lease,
    Overload,
    Permit,
    QueueUnavailableError,
    Release,
    Renewed,
    Swept,
)
from dispatcher.telemetry import catalogue as series
from dispatcher.telemetry.events import Event, diverted
from dispatcher.telemetry.metrics import Metrics
from tests.dispatch.scene import open_limiter, request
from tests.queue.made import member

START_S = 2.0
OPTIONS = Options(RetryPolicy(), lease_s=30.0, owner_timeout_s=5.0)


class Diary(MemoryQueue):
    """It keeps when it was asked what, and may have its own answers."""

    def __init__(self, store: MemoryStore, owner: str) -> None:
        super().__init__(store, owner, poll_s=1e6)
        self.at: dict[str, list[float]] = defaultdict(list)
        self.permits: list[tuple[Permit, Overload | None]] = []
        self.rates: list[float | None] = []
        self.swept: list[Swept] = []
        """What the next sweeps say."""

    def noted(self, what: str) -> None:
        self.at[what].append(round(asyncio.get_running_loop().time() - START_S, 6))

    async def renew(self, leases: Sequence[Lease]) -> Renewed:
        self.noted("renew")
        return await super().renew(leases)

    async def sweep(self) -> Swept:
        self.noted("sweep")
        told = await super().sweep()
        return self.swept.pop(0) if self.swept else told

    async def share(self, permit: Permit, overload: Overload | None) -> Renewed:
        self.noted("share")
        self.permits.append((permit, overload))
        return await super().share(permit, overload)

    async def counts(self) -> Counts:
        self.noted("counts")
        return await super().counts()

    async def line(self, rate: float | None = None, service_s: float = 0.0) -> LineAhead:
        self.noted("line")
        self.rates.append(rate)
        return await super().line(rate, service_s)

    async def expired(self, most: int) -> Sequence[Expired]:
        self.noted("expired")
        return await super().expired(most)

    async def cancelled(self, requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
        self.noted("cancelled")
        return await super().cancelled(requests)

    async def wait_for_work(self) -> None:
        self.noted("work")
        await super().wait_for_work()


class Duties:
    """The upkeep of one owner, without the turns."""

    def __init__(self, options: Options = OPTIONS) -> None:
        clock = asyncio.get_running_loop().time
        self.events: list[tuple[Event, Mapping[str, Any]]] = []
        self.store = MemoryStore(clock=clock, unix_origin=time.time(), lease_s=options.lease_s)
        self.queue = Diary(self.store, "a")
        self.limiter = open_limiter()
        self.holding = Holding()
        self.metrics = Metrics()
        tenure = Tenure(options.lease_s, options.owner_timeout_s)
        self.access = QueueAccess(self.queue, self.limiter, tenure, clock)
        journal = Journal(self.metrics)
        self.upkeep = Upkeep(self.access, self.holding, self.limiter, options, journal)

    async def at_gateway(self, count: int, *, token: str = "") -> list[HeldLease]:
        """Claimed, and on their way; each in a task that never ends by itself."""
        for number in range(count):
            self.store.add(member(f"r-{number}", 10**10, token=token), float(number))
        now = asyncio.get_running_loop().time()
        claimed = await self.queue.claim(count, "n", Permit(100, now, 0))
        held = [self.holding.add(lease, now, probe=False) for lease in claimed.leases]
        for number, each in enumerate(held):
            each.request = request(number, token=token)
            task = asyncio.create_task(_cut_in_the_end())
            await asyncio.sleep(0)
            self.holding.started(Try(each.lease.token, each.request, [each], task))
        return held

    def told(self, event: Event) -> list[Mapping[str, Any]]:
        return [fields for each, fields in self.events if each is event]


async def _cut_in_the_end() -> None:
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()


def on_duty(check: Callable[[Duties], Awaitable[None]], options: Options = OPTIONS) -> None:
    async def main() -> None:
        duties = Duties(options)
        with diverted(lambda event, fields: duties.events.append((event, fields))):
            async with asyncio.TaskGroup() as tasks:
                beside = duties.upkeep.start(tasks)
                await check(duties)
                for task in beside:
                    task.cancel()
        for held in duties.holding.at_gateway():
            duties.holding.cut(held, "drain")

    run(main(), start=START_S)


def test_each_duty_has_its_pace() -> None:
    async def check(duties: Duties) -> None:
        await duties.at_gateway(1, token="t")
        await asyncio.sleep(60.5)
        at = duties.queue.at
        assert at["renew"] == [10.0 * n for n in range(1, 7)], "thrice in the time of a lease"
        assert len(at["sweep"]) == 73, "a sixth of owner_timeout_s, which is the shorter"
        assert len(at["expired"]) == 37, "with a sweep, and no two within a second"
        assert at["counts"] == [EACH_S * n for n in range(61)]
        assert at["cancelled"] == [EACH_S * n for n in range(1, 61)]
        assert at["line"] == [OUTLOOK_EACH_S * n for n in range(13)]
        assert at["share"] == [], "there was nothing new to tell"

    on_duty(check)


def test_sweeps_are_no_rarer_than_each_second() -> None:
    async def check(duties: Duties) -> None:
        await asyncio.sleep(10.5)
        assert duties.queue.at["sweep"] == [EACH_S * n for n in range(11)]

    on_duty(check, replace(OPTIONS, owner_timeout_s=60.0, lease_s=60.0))


def test_who_only_observes_looks_and_touches_nothing() -> None:
    async def check(duties: Duties) -> None:
        await duties.upkeep.take_over()
        await asyncio.sleep(60.5)
        assert set(duties.queue.at) == {"counts", "line"}
        assert duties.access.view.counts == Counts(0, 0, 0, 0)
        assert duties.access.view.outlook is not None

    on_duty(check, replace(OPTIONS, observe=True))


def test_who_only_observes_takes_all_leases_for_those_of_others() -> None:
    async def check(duties: Duties) -> None:
        duties.store.pool.hold("b", 7)
        await asyncio.sleep(0.1)
        assert duties.limiter.others == 7

    on_duty(check, replace(OPTIONS, observe=True))


# Leases.


def test_what_was_taken_back_is_cut_as_soon_as_a_loss_is_heard_of() -> None:
    async def check(duties: Duties) -> None:
        lost, kept = await duties.at_gateway(2)
        duties.store.pool.end_lease(duties.store.pool.grants[lost.lease.entry])
        await asyncio.sleep(3.0)
        assert duties.queue.at["renew"] == []
        duties.store.pool.lost = 1
        duties.access.heard_of_losses(1)
        await asyncio.sleep(0.01)
        assert duties.queue.at["renew"] == [3.0]
        assert (lost.cut, kept.cut) == ("lost", None)
        assert duties.told(Event.LEASE_LOST) == [{"entry": lost.lease.entry}]
        assert duties.metrics.value(series.LOST) == 1
        assert (lost.confirmed_at, kept.confirmed_at) == (START_S, START_S + 3.0)

    on_duty(check)


def test_renewal_tells_what_others_hold() -> None:
    async def check(duties: Duties) -> None:
        await asyncio.sleep(9.0)
        duties.store.pool.hold("b", 5)
        assert duties.limiter.others == 0
        await asyncio.sleep(1.1)
        assert duties.limiter.others == 5

    on_duty(check)


def test_sweeps_alone_show_that_we_live() -> None:
    async def check(duties: Duties) -> None:
        (held,) = await duties.at_gateway(1)
        held.confirmed_at = START_S + 0.001
        await asyncio.sleep(8.0)
        assert duties.queue.at["renew"] == []
        assert duties.access.ours(held)

    on_duty(check)


def test_renewal_that_fails_is_tried_again_soon() -> None:
    async def check(duties: Duties) -> None:
        await duties.at_gateway(1)
        await asyncio.sleep(9.9)
        duties.store.down = "Redis refuses connections"
        await asyncio.sleep(5.0)
        tries = [at for at in duties.queue.at["renew"] if at >= 10.0]
        assert tries[0] == 10.0
        assert len(tries) >= 4
        assert all(later - earlier <= 1.0 for earlier, later in itertools.pairwise(tries))
        duties.store.down = None
        await asyncio.sleep(1.1)
        tries = duties.queue.at["renew"]
        await asyncio.sleep(9.0)
        assert duties.queue.at["renew"] == tries, "and then at its pace again"

    on_duty(check)


def test_requests_that_were_cancelled_are_cut() -> None:
    async def check(duties: Duties) -> None:
        one, other = await duties.at_gateway(2, token="t")
        duties.store.line.cancels["r-0:t"] = "t", 1e12
        await asyncio.sleep(EACH_S + 0.1)
        assert (one.cut, other.cut) == ("cancelled", None)

    on_duty(check)


def test_what_no_claim_may_take_is_no_work() -> None:
    """It is counted as pending, and the gate says that there is nothing to do."""

    async def check(duties: Duties) -> None:
        duties.store.add(member("r-1", 10**10), 1.0)
        claimed = await duties.queue.claim(1, "n", Permit(100, asyncio.get_running_loop().time(), 0))
        await duties.queue.release([Release(lease, awaits="m") for lease in claimed.leases])
        await asyncio.sleep(1.5)
        assert duties.access.view.counts is not None
        assert (duties.access.view.counts.pending, duties.limiter.work) == (1, False)
        await duties.queue.recall(["m"])
        await asyncio.sleep(1.0)
        assert duties.limiter.work

    on_duty(check)


# Sweeps.


@pytest.mark.parametrize(
    "swept",
    [Swept(3, 0, None, lost=0), Swept(0, 1, None, lost=0), Swept(0, 0, None, lost=0, revoked=1)],
)
def test_what_a_sweep_brings_back_is_looked_for_and_what_it_took_back_is_told(swept: Swept) -> None:
    async def check(duties: Duties) -> None:
        await asyncio.sleep(2.0)
        duties.access.work = False
        duties.queue.swept = [swept]
        await asyncio.sleep(1.0)
        assert duties.told(Event.TAKEN_BACK) == ([{"leases": 3}] if swept.reclaimed else [])
        assert duties.metrics.value(series.RECLAIMED) == swept.reclaimed
        assert duties.access.work
        assert duties.access.wake.is_set()

    on_duty(check)


def test_sweep_that_finds_nothing_says_nothing() -> None:
    async def check(duties: Duties) -> None:
        duties.access.work = False
        await asyncio.sleep(5.0)
        assert not duties.access.work
        assert duties.told(Event.TAKEN_BACK) == []

    on_duty(check)


def test_first_sweep_comes_before_all_else_and_is_told_as_any() -> None:
    async def check(duties: Duties) -> None:
        await asyncio.sleep(2.0)
        duties.queue.swept = [Swept(2, 0, None, lost=0)]
        await duties.upkeep.take_over()
        assert duties.metrics.value(series.RECLAIMED) == 2

    on_duty(check)


def test_retry_that_is_due_is_swept_when_it_is() -> None:
    async def check(duties: Duties) -> None:
        await asyncio.sleep(2.6)
        duties.queue.swept = [Swept(0, 0, START_S + 3.5, lost=0)]
        await asyncio.sleep(1.4)
        assert [at for at in duties.queue.at["sweep"] if at > 2.6] == [3.333333, 3.5]

    on_duty(check)


def test_what_is_past_its_deadline_is_answered_without_a_claim() -> None:
    async def check(duties: Duties) -> None:
        unix_now = int(duties.queue.unix_now())
        many = EXPIRED_AT_ONCE + 10
        for number in range(many):
            duties.store.add(member(f"late-{number}", unix_now - 5), float(unix_now - 5))
        duties.store.add(member("in-time", unix_now + 600), float(unix_now - 5))
        await asyncio.sleep(EACH_S + 0.1)
        results = [decode_result(each) for each in duties.store.lists[duties.store.results]]
        assert len({each.id for each in results}) == len(results) == many, "rounds follow each other"
        assert {each.error_code for each in results} == {"DEADLINE_EXCEEDED"}
        assert duties.metrics.value(series.EXPIRED) == many
        assert duties.store.line.counts().pending == 1, "its score may lie, its deadline counts"

    on_duty(check)


# What is shared.


def overload(at: float = START_S) -> Overload:
    return Overload(at, at, capacity=True, in_flight=3)


def test_newer_reading_is_shared_once() -> None:
    async def check(duties: Duties) -> None:
        allowance = duties.limiter.allowance(START_S)
        for _ in range(3):
            duties.upkeep.share(allowance)
            await asyncio.sleep(0.1)
        assert duties.queue.permits == [(permit_of(allowance, OPTIONS), None)]
        assert duties.access.wake.is_set()

    on_duty(check)


def test_refusal_is_shared_until_the_queue_has_it() -> None:
    async def check(duties: Duties) -> None:
        duties.store.down = "Redis refuses connections"
        duties.upkeep.share(duties.limiter.allowance(START_S), overload())
        await asyncio.sleep(3.0)
        duties.store.down = None
        await asyncio.sleep(2.0)
        tries = len(duties.queue.permits)
        assert tries > 2
        assert {refusal for _, refusal in duties.queue.permits} == {overload()}
        duties.upkeep.count()
        await asyncio.sleep(0.1)
        assert duties.queue.permits[tries:] == [(duties.queue.permits[0][0], None)], "it is known by now"

    on_duty(check)


def test_refusal_is_shared_though_no_reading_is_newer() -> None:
    async def check(duties: Duties) -> None:
        allowance = duties.limiter.allowance(START_S)
        duties.upkeep.share(allowance)
        await asyncio.sleep(0.1)
        duties.upkeep.share(allowance, overload())
        await asyncio.sleep(0.1)
        assert [refusal for _, refusal in duties.queue.permits] == [None, overload()]

    on_duty(check)


def test_permit_says_all_that_the_limit_was_made_of() -> None:
    allowance = open_limiter().allowance(START_S).but(lost=4)
    permit = permit_of(allowance, replace(OPTIONS, retry=RetryPolicy(max_s=17.0)))
    assert permit == Permit(limit=9, read_at=1.0, lost=4, retry_after_max_s=17.0)


def test_refusal_that_comes_while_another_is_shared_is_not_forgotten() -> None:
    async def check(duties: Duties) -> None:
        share = duties.queue.share
        allowance = duties.limiter.allowance(START_S)

        async def slow(permit: Permit, overload: Overload | None) -> Renewed:
            await asyncio.sleep(1.0)
            return await share(permit, overload)

        duties.queue.share = slow  # type: ignore[method-assign]
        duties.upkeep.share(allowance, overload())
        await asyncio.sleep(0.5)
        duties.upkeep.share(allowance, overload(START_S + 0.5))
        await asyncio.sleep(5.0)
        assert [refusal for _, refusal in duties.queue.permits] == [overload(), overload(START_S + 0.5)]

    on_duty(check)


def test_before_the_first_reading_nothing_is_claimed_to_be_known() -> None:
    async def check(duties: Duties) -> None:
        duties.upkeep.count()
        await asyncio.sleep(0.1)
        ((permit, refusal),) = duties.queue.permits
        assert (permit.limit, permit.read_at, permit.lost, refusal) == (0, 0.0, 0, None)

    on_duty(check)


def test_limit_of_a_gate_that_this_process_alone_has_closed_is_not_shared() -> None:
    """What is paused, draining or out of reach here says nothing of the pool; that it is full does."""

    async def check(duties: Duties) -> None:
        before = duties.limiter.allowance(START_S)
        duties.upkeep.share(before)
        await asyncio.sleep(0.1)
        closed = before.but(limit=0, reason=Reason.GATEWAY_UNREACHABLE, read_at=before.read_at + 1)
        full = closed.but(reason=Reason.NO_ROOM, read_at=before.read_at + 2)
        for allowance in (closed, full):
            duties.upkeep.share(allowance)
            await asyncio.sleep(0.1)
        assert [permit.limit for permit, _ in duties.queue.permits] == [before.limit, before.limit, 0]

    on_duty(check)


# Work, and what is only shown.


def test_wake_up_is_work_to_look_for_and_may_be_the_end_of_a_pause() -> None:
    async def check(duties: Duties) -> None:
        duties.access.work = False
        duties.store.pool.wake()
        await asyncio.sleep(0.1)
        assert duties.access.work
        assert duties.queue.at["share"] == []
        await duties.store.pause("me", "why")
        duties.upkeep.count()
        await asyncio.sleep(0.1)
        asked = len(duties.queue.at["share"])
        await duties.store.resume()
        await asyncio.sleep(0.1)
        assert len(duties.queue.at["share"]) > asked
        assert duties.limiter.allowance(START_S).reason is not Reason.PAUSED

    on_duty(check)


def test_markers_that_could_not_be_read_are_looked_at_until_they_can_be() -> None:
    async def check(duties: Duties) -> None:
        readable = duties.queue.cancelled

        async def away(requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
            raise QueueUnavailableError("Redis did not answer in time")

        duties.queue.cancelled = away  # type: ignore[method-assign]
        (held,) = await duties.at_gateway(1, token="t")
        assert list(await duties.access.cancelled([held])) == [None]
        await asyncio.sleep(3.0)
        assert "cannot be read" in str(duties.access.view.problem)
        duties.queue.cancelled = readable  # type: ignore[method-assign]
        await asyncio.sleep(1.1)
        assert str(duties.access.view.problem) == "None"

    on_duty(check)


def test_outlook_goes_by_the_pace_at_which_results_came() -> None:
    async def check(duties: Duties) -> None:
        duties.store.add(member("waits", 10**10), 1e10)
        for _ in range(6):
            duties.store.pool.settled += 50
            await asyncio.sleep(OUTLOOK_EACH_S)
        assert duties.queue.rates[0] is None
        assert duties.queue.rates[-1] == pytest.approx(10.0, rel=0.05)

    on_duty(check)


def test_defect_in_the_outlook_ends_nothing() -> None:
    async def check(duties: Duties) -> None:
        await asyncio.sleep(0.1)
        before = duties.access.view.outlook
        assert before is not None

        async def nonsense(*_: Any) -> str:
            return "no line"

        duties.queue.line = nonsense  # type: ignore[method-assign, assignment]
        await asyncio.sleep(3 * OUTLOOK_EACH_S)
        assert duties.access.view.outlook is None
        assert {fields["where"] for fields in duties.told(Event.SURPRISE)} == {"outlook"}
        assert duties.access.view.problem is None
        del duties.queue.line
        await asyncio.sleep(OUTLOOK_EACH_S)
        assert duties.access.view.outlook is not None

    on_duty(check)


def test_gate_that_changes_between_turns_is_told_with_the_age_of_what_was_read() -> None:
    async def check(duties: Duties) -> None:
        await asyncio.sleep(1.5)
        duties.limiter.pause(True, START_S)
        await asyncio.sleep(1.0)
        told = duties.told(Event.GATE)
        assert [fields["reason"] for fields in told][-1] == "paused"
        assert told[-1]["reading_age_s"] == 3.0
        assert (told[-1]["limit"], told[-1]["in_flight"]) == (0, 0)

    on_duty(check)


def test_outage_of_a_wake_up_channel_is_no_busy_loop() -> None:
    async def check(duties: Duties) -> None:
        calls = 0

        async def away() -> None:
            nonlocal calls
            calls += 1
            raise QueueUnavailableError("no subscription")

        duties.queue.wait_for_work = away  # type: ignore[method-assign]
        duties.store.pool.wake()
        await asyncio.sleep(10.0)
        assert 10 <= calls <= 120

    on_duty(check)
