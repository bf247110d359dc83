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
from dispatcher.core.requests.forecast import QueueSnapshot
from dispatcher.core.requests.lease_validity import LeaseValidity
from dispatcher.core.requests.result import decode_result
from dispatcher.dispatch.in_flight import Attempt, InFlightLease, InFlightTable
from dispatcher.dispatch.journal import Journal
from dispatcher.dispatch.maintenance import (
    EXPIRE_BATCH_SIZE,
    FORECAST_INTERVAL_S,
    INTERVAL_S,
    Maintenance,
    build_permit,
)
from dispatcher.dispatch.options import Options
from dispatcher.dispatch.queue_access import QueueAccess
from dispatcher.lab.memory_queue import MemoryQueue, MemoryStore
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.ports import (
    Lease,
    Overload,
    Permit,
    QueueCounts,
    QueueUnavailableError,
    Release,
    RenewResult,
    SweepSummary,
    UnleasedRequest,
)
from dispatcher.telemetry import catalogue as series
from dispatcher.telemetry.events import Event, divert_events
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
        self.swept: list[SweepSummary] = []
        """What the next sweeps say."""

    def noted(self, what: str) -> None:
        self.at[what].append(round(asyncio.get_running_loop().time() - START_S, 6))

    async def renew(self, leases: Sequence[Lease]) -> RenewResult:
        self.noted("renew")
        return await super().renew(leases)

    async def sweep(self) -> SweepSummary:
        self.noted("sweep")
        told = await super().sweep()
        return self.swept.pop(0) if self.swept else told

    async def share_state(self, permit: Permit, overload: Overload | None) -> RenewResult:
        self.noted("share")
        self.permits.append((permit, overload))
        return await super().share_state(permit, overload)

    async def count_requests(self) -> QueueCounts:
        self.noted("counts")
        return await super().count_requests()

    async def take_snapshot(self, rate: float | None = None, service_s: float = 0.0) -> QueueSnapshot:
        self.noted("line")
        self.rates.append(rate)
        return await super().take_snapshot(rate, service_s)

    async def find_overdue(self, max_count: int) -> Sequence[UnleasedRequest]:
        self.noted("expired")
        return await super().find_overdue(max_count)

    async def check_cancelled(self, requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
        self.noted("cancelled")
        return await super().check_cancelled(requests)

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
        self.holding = InFlightTable()
        self.metrics = Metrics()
        tenure = LeaseValidity(options.lease_s, options.owner_timeout_s)
        self.access = QueueAccess(self.queue, self.limiter, tenure, clock)
        journal = Journal(self.metrics)
        self.upkeep = Maintenance(self.access, self.holding, self.limiter, options, journal)

    async def at_gateway(self, count: int, *, token: str = "") -> list[InFlightLease]:
        """Claimed, and on their way; each in a task that never ends by itself."""
        for number in range(count):
            self.store.add_member(member(f"r-{number}", 10**10, token=token), float(number))
        now = asyncio.get_running_loop().time()
        claimed = await self.queue.claim(count, "n", Permit(100, now, 0))
        held = [self.holding.add_lease(lease, now, is_probe=False) for lease in claimed.leases]
        for number, each in enumerate(held):
            each.request = request(number, token=token)
            task = asyncio.create_task(_cut_in_the_end())
            await asyncio.sleep(0)
            self.holding.start_attempt(Attempt(each.lease.token, each.request, [each], task))
        return held

    def told(self, event: Event) -> list[Mapping[str, Any]]:
        return [fields for each, fields in self.events if each is event]


async def _cut_in_the_end() -> None:
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()


def on_duty(check: Callable[[Duties], Awaitable[None]], options: Options = OPTIONS) -> None:
    async def main() -> None:
        duties = Duties(options)
        with divert_events(lambda event, fields: duties.events.append((event, fields))):
            async with asyncio.TaskGroup() as tasks:
                beside = duties.upkeep.start_tasks(tasks)
                await check(duties)
                for task in beside:
                    task.cancel()
        for held in duties.holding.list_at_gateway():
            duties.holding.stop_waiting(held, "drain")

    run_in_virtual_time(main(), start=START_S)


def test_each_duty_has_its_pace() -> None:
    async def check(duties: Duties) -> None:
        await duties.at_gateway(1, token="t")
        await asyncio.sleep(60.5)
        at = duties.queue.at
        assert at["renew"] == [10.0 * n for n in range(1, 7)], "thrice in the time of a lease"
        assert len(at["sweep"]) == 73, "a sixth of owner_timeout_s, which is the shorter"
        assert len(at["expired"]) == 37, "with a sweep, and no two within a second"
        assert at["counts"] == [INTERVAL_S * n for n in range(61)]
        assert at["cancelled"] == [INTERVAL_S * n for n in range(1, 61)]
        assert at["line"] == [FORECAST_INTERVAL_S * n for n in range(13)]
        assert at["share"] == [], "there was nothing new to tell"

    on_duty(check)


def test_sweeps_are_no_rarer_than_each_second() -> None:
    async def check(duties: Duties) -> None:
        await asyncio.sleep(10.5)
        assert duties.queue.at["sweep"] == [INTERVAL_S * n for n in range(11)]

    on_duty(check, replace(OPTIONS, owner_timeout_s=60.0, lease_s=60.0))


def test_who_only_observes_looks_and_touches_nothing() -> None:
    async def check(duties: Duties) -> None:
        await duties.upkeep.reclaim_from_ended_owners()
        await asyncio.sleep(60.5)
        assert set(duties.queue.at) == {"counts", "line"}
        assert duties.access.view.counts == QueueCounts(0, 0, 0, 0)
        assert duties.access.view.forecast is not None

    on_duty(check, replace(OPTIONS, observe=True))


def test_who_only_observes_takes_all_leases_for_those_of_others() -> None:
    async def check(duties: Duties) -> None:
        duties.store.pool.add_owner_units("b", 7)
        await asyncio.sleep(0.1)
        assert duties.limiter.other_owners_units == 7

    on_duty(check, replace(OPTIONS, observe=True))


# Leases.


def test_what_was_taken_back_is_cut_as_soon_as_a_loss_is_heard_of() -> None:
    async def check(duties: Duties) -> None:
        lost, kept = await duties.at_gateway(2)
        duties.store.pool.end_lease(duties.store.pool.leases[lost.lease.entry_id])
        await asyncio.sleep(3.0)
        assert duties.queue.at["renew"] == []
        duties.store.pool.lost_units = 1
        duties.access.record_lost_units(1)
        await asyncio.sleep(0.01)
        assert duties.queue.at["renew"] == [3.0]
        assert (lost.stop_reason, kept.stop_reason) == ("lost", None)
        assert duties.told(Event.LEASE_LOST) == [{"entry": lost.lease.entry_id}]
        assert duties.metrics.get_value(series.LEASES_LOST) == 1
        assert (lost.confirmed_at, kept.confirmed_at) == (START_S, START_S + 3.0)

    on_duty(check)


def test_renewal_tells_what_others_hold() -> None:
    async def check(duties: Duties) -> None:
        await asyncio.sleep(9.0)
        duties.store.pool.add_owner_units("b", 5)
        assert duties.limiter.other_owners_units == 0
        await asyncio.sleep(1.1)
        assert duties.limiter.other_owners_units == 5

    on_duty(check)


def test_sweeps_alone_show_that_we_live() -> None:
    async def check(duties: Duties) -> None:
        (held,) = await duties.at_gateway(1)
        held.confirmed_at = START_S + 0.001
        await asyncio.sleep(8.0)
        assert duties.queue.at["renew"] == []
        assert duties.access.is_lease_valid(held)

    on_duty(check)


def test_renewal_that_fails_is_tried_again_soon() -> None:
    async def check(duties: Duties) -> None:
        await duties.at_gateway(1)
        await asyncio.sleep(9.9)
        duties.store.outage_message = "Redis refuses connections"
        await asyncio.sleep(5.0)
        tries = [at for at in duties.queue.at["renew"] if at >= 10.0]
        assert tries[0] == 10.0
        assert len(tries) >= 4
        assert all(later - earlier <= 1.0 for earlier, later in itertools.pairwise(tries))
        duties.store.outage_message = None
        await asyncio.sleep(1.1)
        tries = duties.queue.at["renew"]
        await asyncio.sleep(9.0)
        assert duties.queue.at["renew"] == tries, "and then at its pace again"

    on_duty(check)


def test_requests_that_were_cancelled_are_cut() -> None:
    async def check(duties: Duties) -> None:
        one, other = await duties.at_gateway(2, token="t")
        duties.store.queue.cancel_markers["r-0:t"] = "t", 1e12
        await asyncio.sleep(INTERVAL_S + 0.1)
        assert (one.stop_reason, other.stop_reason) == ("cancelled", None)

    on_duty(check)


def test_what_no_claim_may_take_is_no_work() -> None:
    """It is counted as pending, and the gate says that there is nothing to do."""

    async def check(duties: Duties) -> None:
        duties.store.add_member(member("r-1", 10**10), 1.0)
        claimed = await duties.queue.claim(1, "n", Permit(100, asyncio.get_running_loop().time(), 0))
        await duties.queue.release([Release(lease, missing_model="m") for lease in claimed.leases])
        await asyncio.sleep(1.5)
        assert duties.access.view.counts is not None
        assert (duties.access.view.counts.pending, duties.limiter.has_work) == (1, False)
        await duties.queue.return_waiting_for_models(["m"])
        await asyncio.sleep(1.0)
        assert duties.limiter.has_work

    on_duty(check)


# Sweeps.


@pytest.mark.parametrize(
    "swept",
    [
        SweepSummary(3, 0, None, lost_units=0),
        SweepSummary(0, 1, None, lost_units=0),
        SweepSummary(0, 0, None, lost_units=0, cancelled_count=1),
    ],
)
def test_what_a_sweep_brings_back_is_looked_for_and_what_it_took_back_is_told(swept: SweepSummary) -> None:
    async def check(duties: Duties) -> None:
        await asyncio.sleep(2.0)
        duties.access.has_work = False
        duties.queue.swept = [swept]
        await asyncio.sleep(1.0)
        assert duties.told(Event.LEASES_RECLAIMED) == ([{"leases": 3}] if swept.reclaimed_count else [])
        assert duties.metrics.get_value(series.LEASES_RECLAIMED) == swept.reclaimed_count
        assert duties.access.has_work
        assert duties.access.wake.is_set()

    on_duty(check)


def test_sweep_that_finds_nothing_says_nothing() -> None:
    async def check(duties: Duties) -> None:
        duties.access.has_work = False
        await asyncio.sleep(5.0)
        assert not duties.access.has_work
        assert duties.told(Event.LEASES_RECLAIMED) == []

    on_duty(check)


def test_first_sweep_comes_before_all_else_and_is_told_as_any() -> None:
    async def check(duties: Duties) -> None:
        await asyncio.sleep(2.0)
        duties.queue.swept = [SweepSummary(2, 0, None, lost_units=0)]
        await duties.upkeep.reclaim_from_ended_owners()
        assert duties.metrics.get_value(series.LEASES_RECLAIMED) == 2

    on_duty(check)


def test_retry_that_is_due_is_swept_when_it_is() -> None:
    async def check(duties: Duties) -> None:
        await asyncio.sleep(2.6)
        duties.queue.swept = [SweepSummary(0, 0, START_S + 3.5, lost_units=0)]
        await asyncio.sleep(1.4)
        assert [at for at in duties.queue.at["sweep"] if at > 2.6] == [3.333333, 3.5]

    on_duty(check)


def test_what_is_past_its_deadline_is_answered_without_a_claim() -> None:
    async def check(duties: Duties) -> None:
        unix_now = int(duties.queue.unix_now())
        many = EXPIRE_BATCH_SIZE + 10
        for number in range(many):
            duties.store.add_member(member(f"late-{number}", unix_now - 5), float(unix_now - 5))
        duties.store.add_member(member("in-time", unix_now + 600), float(unix_now - 5))
        await asyncio.sleep(INTERVAL_S + 0.1)
        results = [
            decode_result(each) for each in duties.store.result_lists[duties.store.default_result_list]
        ]
        assert len({each.id for each in results}) == len(results) == many, "rounds follow each other"
        assert {each.error_code for each in results} == {"DEADLINE_EXCEEDED"}
        assert duties.metrics.get_value(series.REQUESTS_EXPIRED) == many
        assert duties.store.queue.count_requests().pending == 1, "its score may lie, its deadline counts"

    on_duty(check)


# What is shared.


def overload(at: float = START_S) -> Overload:
    return Overload(at, at, is_out_of_capacity=True, in_flight=3)


def test_newer_reading_is_shared_once() -> None:
    async def check(duties: Duties) -> None:
        allowance = duties.limiter.get_allowance(START_S)
        for _ in range(3):
            duties.upkeep.schedule_share(allowance)
            await asyncio.sleep(0.1)
        assert duties.queue.permits == [(build_permit(allowance, OPTIONS), None)]
        assert duties.access.wake.is_set()

    on_duty(check)


def test_refusal_is_shared_until_the_queue_has_it() -> None:
    async def check(duties: Duties) -> None:
        duties.store.outage_message = "Redis refuses connections"
        duties.upkeep.schedule_share(duties.limiter.get_allowance(START_S), overload())
        await asyncio.sleep(3.0)
        duties.store.outage_message = None
        await asyncio.sleep(2.0)
        tries = len(duties.queue.permits)
        assert tries > 2
        assert {refusal for _, refusal in duties.queue.permits} == {overload()}
        duties.upkeep.request_lease_count()
        await asyncio.sleep(0.1)
        assert duties.queue.permits[tries:] == [(duties.queue.permits[0][0], None)], "it is known by now"

    on_duty(check)


def test_refusal_is_shared_though_no_reading_is_newer() -> None:
    async def check(duties: Duties) -> None:
        allowance = duties.limiter.get_allowance(START_S)
        duties.upkeep.schedule_share(allowance)
        await asyncio.sleep(0.1)
        duties.upkeep.schedule_share(allowance, overload())
        await asyncio.sleep(0.1)
        assert [refusal for _, refusal in duties.queue.permits] == [None, overload()]

    on_duty(check)


def test_permit_says_all_that_the_limit_was_made_of() -> None:
    allowance = open_limiter().get_allowance(START_S).copy_with(lost_units=4)
    permit = build_permit(allowance, replace(OPTIONS, retry=RetryPolicy(max_s=17.0)))
    assert permit == Permit(limit=9, read_at=1.0, lost_units=4, retry_after_max_s=17.0)


def test_refusal_that_comes_while_another_is_shared_is_not_forgotten() -> None:
    async def check(duties: Duties) -> None:
        share = duties.queue.share_state
        allowance = duties.limiter.get_allowance(START_S)

        async def slow(permit: Permit, overload: Overload | None) -> RenewResult:
            await asyncio.sleep(1.0)
            return await share(permit, overload)

        duties.queue.share_state = slow  # type: ignore[method-assign]
        duties.upkeep.schedule_share(allowance, overload())
        await asyncio.sleep(0.5)
        duties.upkeep.schedule_share(allowance, overload(START_S + 0.5))
        await asyncio.sleep(5.0)
        assert [refusal for _, refusal in duties.queue.permits] == [overload(), overload(START_S + 0.5)]

    on_duty(check)


def test_before_the_first_reading_nothing_is_claimed_to_be_known() -> None:
    async def check(duties: Duties) -> None:
        duties.upkeep.request_lease_count()
        await asyncio.sleep(0.1)
        ((permit, refusal),) = duties.queue.permits
        assert (permit.limit, permit.read_at, permit.lost_units, refusal) == (0, 0.0, 0, None)

    on_duty(check)


def test_limit_of_a_gate_that_this_process_alone_has_closed_is_not_shared() -> None:
    """What is paused, draining or out of reach here says nothing of the pool; that it is full does."""

    async def check(duties: Duties) -> None:
        before = duties.limiter.get_allowance(START_S)
        duties.upkeep.schedule_share(before)
        await asyncio.sleep(0.1)
        closed = before.copy_with(limit=0, reason=Reason.GATEWAY_UNREACHABLE, read_at=before.read_at + 1)
        full = closed.copy_with(reason=Reason.NO_ROOM, read_at=before.read_at + 2)
        for allowance in (closed, full):
            duties.upkeep.schedule_share(allowance)
            await asyncio.sleep(0.1)
        assert [permit.limit for permit, _ in duties.queue.permits] == [before.limit, before.limit, 0]

    on_duty(check)


# Work, and what is only shown.


def test_wake_up_is_work_to_look_for_and_may_be_the_end_of_a_pause() -> None:
    async def check(duties: Duties) -> None:
        duties.access.has_work = False
        duties.store.pool.wake_dispatchers()
        await asyncio.sleep(0.1)
        assert duties.access.has_work
        assert duties.queue.at["share"] == []
        await duties.store.pause("me", "why")
        duties.upkeep.request_lease_count()
        await asyncio.sleep(0.1)
        asked = len(duties.queue.at["share"])
        await duties.store.resume()
        await asyncio.sleep(0.1)
        assert len(duties.queue.at["share"]) > asked
        assert duties.limiter.get_allowance(START_S).reason is not Reason.PAUSED

    on_duty(check)


def test_markers_that_could_not_be_read_are_looked_at_until_they_can_be() -> None:
    async def check(duties: Duties) -> None:
        readable = duties.queue.check_cancelled

        async def away(requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
            raise QueueUnavailableError("Redis did not answer in time")

        duties.queue.check_cancelled = away  # type: ignore[method-assign]
        (held,) = await duties.at_gateway(1, token="t")
        assert list(await duties.access.check_cancelled([held])) == [None]
        await asyncio.sleep(3.0)
        assert "cannot be read" in str(duties.access.view.problem)
        duties.queue.check_cancelled = readable  # type: ignore[method-assign]
        await asyncio.sleep(1.1)
        assert str(duties.access.view.problem) == "None"

    on_duty(check)


def test_outlook_goes_by_the_pace_at_which_results_came() -> None:
    async def check(duties: Duties) -> None:
        duties.store.add_member(member("waits", 10**10), 1e10)
        for _ in range(6):
            duties.store.pool.settled_count += 50
            await asyncio.sleep(FORECAST_INTERVAL_S)
        assert duties.queue.rates[0] is None
        assert duties.queue.rates[-1] == pytest.approx(10.0, rel=0.05)

    on_duty(check)


def test_defect_in_the_outlook_ends_nothing() -> None:
    async def check(duties: Duties) -> None:
        await asyncio.sleep(0.1)
        before = duties.access.view.forecast
        assert before is not None

        async def nonsense(*_: Any) -> str:
            return "no line"

        duties.queue.take_snapshot = nonsense  # type: ignore[method-assign, assignment]
        await asyncio.sleep(3 * FORECAST_INTERVAL_S)
        assert duties.access.view.forecast is None
        assert {fields["where"] for fields in duties.told(Event.INTERNAL_ERROR)} == {"forecast"}
        assert duties.access.view.problem is None
        del duties.queue.take_snapshot
        await asyncio.sleep(FORECAST_INTERVAL_S)
        assert duties.access.view.forecast is not None

    on_duty(check)


def test_gate_that_changes_between_turns_is_told_with_the_age_of_what_was_read() -> None:
    async def check(duties: Duties) -> None:
        await asyncio.sleep(1.5)
        duties.limiter.set_paused(True, START_S)
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
        duties.store.pool.wake_dispatchers()
        await asyncio.sleep(10.0)
        assert 10 <= calls <= 120

    on_duty(check)
