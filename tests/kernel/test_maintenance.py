"""Background tasks beside the rounds of the loop: each at its own interval, whatever the gate says."""

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

from dispatcher.kernel import completions
from dispatcher.kernel.context import KernelContext
from dispatcher.kernel.in_flight import Attempt, InFlightLease, InFlightTable
from dispatcher.kernel.journal import Journal
from dispatcher.kernel.loop import build_feature_hooks
from dispatcher.kernel.maintenance import (
    EXPIRE_BATCH_SIZE,
    FORECAST_INTERVAL_S,
    INTERVAL_S,
    Maintenance,
    build_permit,
)
from dispatcher.kernel.options import Options
from dispatcher.kernel.queue_access import QueueAccess
from dispatcher.lab.memory_queue import MemoryQueue
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.limit.budget import Reason
from dispatcher.queue.contract import (
    Lease,
    Overload,
    Permit,
    RenewResult,
    SweepSummary,
    UnleasedRequest,
)
from dispatcher.requests.forecast import QueueSnapshot
from dispatcher.requests.lease_validity import LeaseValidity
from dispatcher.requests.outcomes.outcome import RetryPolicy
from dispatcher.requests.queue_counts import QueueCounts
from dispatcher.requests.result import decode_result
from dispatcher.requests.submission import QueueUnavailableError
from dispatcher.telemetry import catalogue as series
from dispatcher.telemetry.events import Event, divert_events
from dispatcher.telemetry.metrics import Metrics
from tests.kernel.faults import Fault, inject
from tests.kernel.scene import AnsweringGateway, open_limiter, request
from tests.memory_queue import MemoryStore
from tests.queue.factories import member

START_S = 2.0
OPTIONS = Options(RetryPolicy(), lease_s=30.0, owner_timeout_s=5.0)


class RecordingQueue(MemoryQueue):
    """Queue that records the times of its calls, and whose sweeps can be replaced."""

    def __init__(self, store: MemoryStore, owner: str) -> None:
        super().__init__(store, owner, poll_s=1e6)
        self.call_times: dict[str, list[float]] = defaultdict(list)
        self.permits: list[tuple[Permit, Overload | None]] = []
        self.rates: list[float | None] = []
        self.next_summaries: list[SweepSummary] = []
        """Results of the next sweeps."""

    def record_call(self, call_name: str) -> None:
        self.call_times[call_name].append(round(asyncio.get_running_loop().time() - START_S, 6))

    async def renew(self, leases: Sequence[Lease]) -> RenewResult:
        self.record_call("renew")
        return await super().renew(leases)

    async def sweep(self) -> SweepSummary:
        self.record_call("sweep")
        summary = await super().sweep()
        return self.next_summaries.pop(0) if self.next_summaries else summary

    async def share_state(self, permit: Permit, overload: Overload | None) -> RenewResult:
        self.record_call("share")
        self.permits.append((permit, overload))
        return await super().share_state(permit, overload)

    async def count_requests(self) -> QueueCounts:
        self.record_call("counts")
        return await super().count_requests()

    async def take_snapshot(self, rate: float | None = None, service_s: float = 0.0) -> QueueSnapshot:
        self.record_call("snapshot")
        self.rates.append(rate)
        return await super().take_snapshot(rate, service_s)

    async def find_overdue(self, max_count: int) -> Sequence[UnleasedRequest]:
        self.record_call("expired")
        return await super().find_overdue(max_count)

    async def check_cancelled(self, requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
        self.record_call("cancelled")
        return await super().check_cancelled(requests)

    async def wait_for_work(self) -> None:
        self.record_call("work")
        await super().wait_for_work()


class MaintenanceBench:
    """Maintenance of one owner, without the rounds of the loop."""

    def __init__(self, options: Options = OPTIONS) -> None:
        clock = asyncio.get_running_loop().time
        self.events: list[tuple[Event, Mapping[str, Any]]] = []
        self.store = MemoryStore(clock=clock, unix_origin=time.time(), lease_s=options.lease_s)
        self.queue = RecordingQueue(self.store, "a")
        self.limiter = open_limiter()
        self.table = InFlightTable()
        self.metrics = Metrics()
        lease_validity = LeaseValidity(options.lease_s, options.owner_timeout_s)
        self.access = QueueAccess(self.queue, self.limiter, lease_validity, clock)
        self.context = KernelContext(
            self.access,
            self.limiter,
            AnsweringGateway(),
            Journal(self.metrics),
            options,
            in_flight=self.table,
        )
        self.context.hooks = build_feature_hooks(self.context)
        self.maintenance = Maintenance(self.context)

    async def send_requests(self, count: int, *, token: str = "") -> list[InFlightLease]:
        """Claim requests and start an attempt for each, in a task that does not end by itself."""
        for number in range(count):
            self.store.add_member(member(f"r-{number}", 10**10, token=token), float(number))
        now = asyncio.get_running_loop().time()
        claimed = await self.queue.claim(count, "n", Permit(100, now, 0))
        entries = [self.table.add_lease(lease, now, is_probe=False) for lease in claimed.leases]
        for number, entry in enumerate(entries):
            entry.request = request(number, token=token)
            task = asyncio.create_task(_wait_until_cancelled())
            await asyncio.sleep(0)
            self.table.start_attempt(Attempt(entry.lease.token, entry.request, [entry], task))
        return entries

    def list_events(self, event: Event) -> list[Mapping[str, Any]]:
        return [fields for each, fields in self.events if each is event]


async def _wait_until_cancelled() -> None:
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()


def run_on_bench(check: Callable[[MaintenanceBench], Awaitable[None]], options: Options = OPTIONS) -> None:
    async def main() -> None:
        bench = MaintenanceBench(options)
        with divert_events(lambda event, fields: bench.events.append((event, fields))):
            async with asyncio.TaskGroup() as tasks:
                background_tasks = bench.maintenance.start_tasks(tasks)
                await check(bench)
                for task in background_tasks:
                    task.cancel()
        for entry in bench.table.list_at_gateway():
            bench.table.stop_waiting(entry, "drain")

    run_in_virtual_time(main(), start=START_S)


def test_each_task_runs_at_its_own_interval() -> None:
    async def check(bench: MaintenanceBench) -> None:
        await bench.send_requests(1, token="t")
        await asyncio.sleep(60.5)
        call_times = bench.queue.call_times
        assert call_times["renew"] == [10.0 * n for n in range(1, 7)], "three times within the lease time"
        assert len(call_times["sweep"]) == 73, (
            "every sixth of owner_timeout_s, which is shorter than the lease time"
        )
        assert len(call_times["expired"]) == 37, "after a sweep, and at most once a second"
        assert call_times["counts"] == [INTERVAL_S * n for n in range(61)]
        assert call_times["cancelled"] == [INTERVAL_S * n for n in range(1, 61)]
        assert call_times["snapshot"] == [FORECAST_INTERVAL_S * n for n in range(13)]
        assert call_times["share"] == [], "there was nothing new to share"

    run_on_bench(check)


def test_queue_is_swept_at_least_once_a_second() -> None:
    async def check(bench: MaintenanceBench) -> None:
        await asyncio.sleep(10.5)
        assert bench.queue.call_times["sweep"] == [INTERVAL_S * n for n in range(11)]

    run_on_bench(check, replace(OPTIONS, owner_timeout_s=60.0, lease_s=60.0))


def test_observer_reads_the_queue_and_changes_nothing() -> None:
    async def check(bench: MaintenanceBench) -> None:
        await bench.maintenance.reclaim_from_ended_owners()
        await asyncio.sleep(60.5)
        assert set(bench.queue.call_times) == {"counts", "snapshot"}
        assert bench.access.view.counts == QueueCounts(0, 0, 0, 0)
        assert bench.access.view.forecast is not None

    run_on_bench(check, replace(OPTIONS, observe=True))


def test_observer_counts_all_leases_as_those_of_other_owners() -> None:
    async def check(bench: MaintenanceBench) -> None:
        bench.store.pool.add_owner_units("b", 7)
        await asyncio.sleep(0.1)
        assert bench.limiter.other_owners_units == 7

    run_on_bench(check, replace(OPTIONS, observe=True))


# Leases.


def test_lost_lease_is_stopped_when_the_counter_of_lost_units_grows() -> None:
    async def check(bench: MaintenanceBench) -> None:
        lost, kept = await bench.send_requests(2)
        bench.store.pool.end_lease(bench.store.pool.leases[lost.lease.entry_id])
        await asyncio.sleep(3.0)
        assert bench.queue.call_times["renew"] == []
        bench.store.pool.lost_units = 1
        bench.access.record_lost_units(1)
        await asyncio.sleep(0.01)
        assert bench.queue.call_times["renew"] == [3.0]
        assert (lost.stop_reason, kept.stop_reason) == ("lost", None)
        assert bench.list_events(Event.LEASE_LOST) == [{"entry": lost.lease.entry_id}]
        assert bench.metrics.get_value(series.LEASES_LOST) == 1
        assert (lost.confirmed_at, kept.confirmed_at) == (START_S, START_S + 3.0)

    run_on_bench(check)


def test_renewal_updates_the_units_of_other_owners() -> None:
    async def check(bench: MaintenanceBench) -> None:
        await asyncio.sleep(9.0)
        bench.store.pool.add_owner_units("b", 5)
        assert bench.limiter.other_owners_units == 0
        await asyncio.sleep(1.1)
        assert bench.limiter.other_owners_units == 5

    run_on_bench(check)


def test_sweeps_alone_keep_leases_valid() -> None:
    async def check(bench: MaintenanceBench) -> None:
        (entry,) = await bench.send_requests(1)
        entry.confirmed_at = START_S + 0.001
        await asyncio.sleep(8.0)
        assert bench.queue.call_times["renew"] == []
        assert bench.access.is_lease_valid(entry)

    run_on_bench(check)


def test_failed_renewal_is_retried_within_a_second() -> None:
    async def check(bench: MaintenanceBench) -> None:
        await bench.send_requests(1)
        await asyncio.sleep(9.9)
        bench.store.outage_message = "Redis refuses connections"
        await asyncio.sleep(5.0)
        attempts = [at for at in bench.queue.call_times["renew"] if at >= 10.0]
        assert attempts[0] == 10.0
        assert len(attempts) >= 4
        assert all(later - earlier <= 1.0 for earlier, later in itertools.pairwise(attempts))
        bench.store.outage_message = None
        await asyncio.sleep(1.1)
        attempts = list(bench.queue.call_times["renew"])
        await asyncio.sleep(9.0)
        assert bench.queue.call_times["renew"] == attempts, (
            "after a success, renewals run at their interval again"
        )

    run_on_bench(check)


def test_cancelled_requests_are_stopped() -> None:
    async def check(bench: MaintenanceBench) -> None:
        first, second = await bench.send_requests(2, token="t")
        bench.store.queue.cancel_markers["r-0:t"] = "t", 1e12
        await asyncio.sleep(INTERVAL_S + 0.1)
        assert (first.stop_reason, second.stop_reason) == ("cancelled", None)

    run_on_bench(check)


def test_requests_in_closed_lanes_are_pending_but_no_work() -> None:
    closed = 1

    async def count_requests() -> QueueCounts:
        return QueueCounts(pending=1, leased=0, delayed=0, dead=0, closed=closed)

    async def check(bench: MaintenanceBench) -> None:
        nonlocal closed
        bench.queue.count_requests = count_requests  # type: ignore[method-assign]
        await asyncio.sleep(1.5)
        assert bench.access.view.counts is not None
        assert (bench.access.view.counts.pending, bench.limiter.has_work) == (1, False)
        closed = 0
        await asyncio.sleep(1.0)
        assert bench.limiter.has_work

    run_on_bench(check)


# Sweeps.


@pytest.mark.parametrize(
    "summary",
    [
        SweepSummary(3, 0, None, lost_units=0),
        SweepSummary(0, 1, None, lost_units=0),
        SweepSummary(0, 0, None, lost_units=0, freed_count=1),
    ],
)
def test_sweep_that_returns_requests_wakes_the_loop_and_reclaimed_leases_are_logged(
    summary: SweepSummary,
) -> None:
    async def check(bench: MaintenanceBench) -> None:
        await asyncio.sleep(2.0)
        bench.access.has_work = False
        bench.queue.next_summaries = [summary]
        await asyncio.sleep(1.0)
        assert bench.list_events(Event.LEASES_RECLAIMED) == (
            [{"leases": 3}] if summary.reclaimed_count else []
        )
        assert bench.metrics.get_value(series.LEASES_RECLAIMED) == summary.reclaimed_count
        assert bench.access.has_work
        assert bench.access.wake.is_set()

    run_on_bench(check)


def test_sweep_that_finds_nothing_logs_nothing() -> None:
    async def check(bench: MaintenanceBench) -> None:
        bench.access.has_work = False
        await asyncio.sleep(5.0)
        assert not bench.access.has_work
        assert bench.list_events(Event.LEASES_RECLAIMED) == []

    run_on_bench(check)


def test_leases_reclaimed_by_the_first_sweep_are_counted() -> None:
    async def check(bench: MaintenanceBench) -> None:
        await asyncio.sleep(2.0)
        bench.queue.next_summaries = [SweepSummary(2, 0, None, lost_units=0)]
        await bench.maintenance.reclaim_from_ended_owners()
        assert bench.metrics.get_value(series.LEASES_RECLAIMED) == 2

    run_on_bench(check)


def test_sweep_runs_at_the_time_of_the_next_retry() -> None:
    async def check(bench: MaintenanceBench) -> None:
        await asyncio.sleep(2.6)
        bench.queue.next_summaries = [SweepSummary(0, 0, START_S + 3.5, lost_units=0)]
        await asyncio.sleep(1.4)
        assert [at for at in bench.queue.call_times["sweep"] if at > 2.6] == [3.333333, 3.5]

    run_on_bench(check)


def test_overdue_requests_are_answered_without_a_claim() -> None:
    async def check(bench: MaintenanceBench) -> None:
        unix_now = int(bench.queue.unix_now())
        overdue_count = EXPIRE_BATCH_SIZE + 10
        for number in range(overdue_count):
            bench.store.add_member(member(f"late-{number}", unix_now - 5), float(unix_now - 5))
        bench.store.add_member(member("in-time", unix_now + 600), float(unix_now - 5))
        await asyncio.sleep(INTERVAL_S + 0.1)
        results = [decode_result(each) for each in bench.store.result_lists[bench.store.default_result_list]]
        assert len({each.id for each in results}) == len(results) == overdue_count, (
            "one round follows the other immediately"
        )
        assert {each.error_code for each in results} == {"DEADLINE_EXCEEDED"}
        assert bench.metrics.get_value(series.REQUESTS_EXPIRED) == overdue_count
        assert bench.store.queue.count_requests().pending == 1, "the deadline counts, not the score"

    run_on_bench(check)


def test_overdue_request_that_raises_an_exception_holds_up_no_other() -> None:
    async def check(bench: MaintenanceBench) -> None:
        overdue_at = int(bench.queue.unix_now()) - 5
        for number in range(3):
            bench.store.add_member(member(f"late-{number}", overdue_at), float(overdue_at))
        await asyncio.sleep(INTERVAL_S + 0.1)
        results = [decode_result(each) for each in bench.store.result_lists[bench.store.default_result_list]]
        assert sorted(str(each.id) for each in results) == ["late-0", "late-2"]
        assert Event.INTERNAL_ERROR in [event for event, _ in bench.events]

    with inject(Fault(completions, "build_overdue_error", request_id="late-1", is_active=True)):
        run_on_bench(check)


# Shared state.


def build_overload(at: float = START_S) -> Overload:
    return Overload(at, at, is_out_of_capacity=True, in_flight=3)


def test_newer_reading_is_shared_once() -> None:
    async def check(bench: MaintenanceBench) -> None:
        allowance = bench.limiter.get_allowance(START_S)
        for _ in range(3):
            bench.maintenance.schedule_share(allowance)
            await asyncio.sleep(0.1)
        assert bench.queue.permits == [(build_permit(allowance, OPTIONS), None)]
        assert bench.access.wake.is_set()

    run_on_bench(check)


def test_refusal_is_shared_until_the_queue_has_it() -> None:
    async def check(bench: MaintenanceBench) -> None:
        bench.store.outage_message = "Redis refuses connections"
        bench.maintenance.schedule_share(bench.limiter.get_allowance(START_S), build_overload())
        await asyncio.sleep(3.0)
        bench.store.outage_message = None
        await asyncio.sleep(2.0)
        attempts = len(bench.queue.permits)
        assert attempts > 2
        assert {refusal for _, refusal in bench.queue.permits} == {build_overload()}
        bench.maintenance.request_lease_count()
        await asyncio.sleep(0.1)
        assert bench.queue.permits[attempts:] == [(bench.queue.permits[0][0], None)], (
            "the queue knows the refusal by now"
        )

    run_on_bench(check)


def test_refusal_is_shared_even_without_a_newer_reading() -> None:
    async def check(bench: MaintenanceBench) -> None:
        allowance = bench.limiter.get_allowance(START_S)
        bench.maintenance.schedule_share(allowance)
        await asyncio.sleep(0.1)
        bench.maintenance.schedule_share(allowance, build_overload())
        await asyncio.sleep(0.1)
        assert [refusal for _, refusal in bench.queue.permits] == [None, build_overload()]

    run_on_bench(check)


def test_permit_contains_all_terms_of_the_limit() -> None:
    allowance = open_limiter().get_allowance(START_S).copy_with(lost_units=4)
    permit = build_permit(allowance, replace(OPTIONS, retry=RetryPolicy(max_s=17.0)))
    assert permit == Permit(limit=9, read_at=1.0, lost_units=4, retry_after_max_s=17.0)


def test_refusal_during_a_share_call_is_shared_by_the_next_call() -> None:
    async def check(bench: MaintenanceBench) -> None:
        share = bench.queue.share_state
        allowance = bench.limiter.get_allowance(START_S)

        async def share_slowly(permit: Permit, overload: Overload | None) -> RenewResult:
            await asyncio.sleep(1.0)
            return await share(permit, overload)

        bench.queue.share_state = share_slowly  # type: ignore[method-assign]
        bench.maintenance.schedule_share(allowance, build_overload())
        await asyncio.sleep(0.5)
        bench.maintenance.schedule_share(allowance, build_overload(START_S + 0.5))
        await asyncio.sleep(5.0)
        assert [refusal for _, refusal in bench.queue.permits] == [
            build_overload(),
            build_overload(START_S + 0.5),
        ]

    run_on_bench(check)


def test_permit_before_the_first_reading_has_no_limit_and_no_reading_time() -> None:
    async def check(bench: MaintenanceBench) -> None:
        bench.maintenance.request_lease_count()
        await asyncio.sleep(0.1)
        ((permit, refusal),) = bench.queue.permits
        assert (permit.limit, permit.read_at, permit.lost_units, refusal) == (0, 0.0, 0, None)

    run_on_bench(check)


def test_limit_of_a_gate_closed_for_a_local_reason_is_not_shared() -> None:
    """An unreachable gateway is a problem of this process; a full pool concerns all of them."""

    async def check(bench: MaintenanceBench) -> None:
        before = bench.limiter.get_allowance(START_S)
        bench.maintenance.schedule_share(before)
        await asyncio.sleep(0.1)
        closed = before.copy_with(limit=0, reason=Reason.GATEWAY_UNREACHABLE, read_at=before.read_at + 1)
        full = closed.copy_with(reason=Reason.NO_ROOM, read_at=before.read_at + 2)
        for allowance in (closed, full):
            bench.maintenance.schedule_share(allowance)
            await asyncio.sleep(0.1)
        assert [permit.limit for permit, _ in bench.queue.permits] == [before.limit, before.limit, 0]

    run_on_bench(check)


# New work, and values for operators.


def test_wake_up_sets_has_work_and_rereads_a_pause() -> None:
    async def check(bench: MaintenanceBench) -> None:
        bench.access.has_work = False
        bench.store.pool.wake_dispatchers()
        await asyncio.sleep(0.1)
        assert bench.access.has_work
        assert bench.queue.call_times["share"] == []
        await bench.store.pause("me", "why")
        bench.maintenance.request_lease_count()
        await asyncio.sleep(0.1)
        shares_before = len(bench.queue.call_times["share"])
        await bench.store.resume()
        await asyncio.sleep(0.1)
        assert len(bench.queue.call_times["share"]) > shares_before
        assert bench.limiter.get_allowance(START_S).reason is not Reason.PAUSED

    run_on_bench(check)


def test_unreadable_cancel_markers_are_retried_until_they_can_be_read() -> None:
    async def check(bench: MaintenanceBench) -> None:
        check_cancelled = bench.queue.check_cancelled

        async def raise_unavailable(requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
            raise QueueUnavailableError("Redis did not answer in time")

        bench.queue.check_cancelled = raise_unavailable  # type: ignore[method-assign]
        (entry,) = await bench.send_requests(1, token="t")
        assert list(await bench.access.check_cancelled([entry])) == [None]
        await asyncio.sleep(3.0)
        assert "cannot be read" in str(bench.access.view.problem)
        bench.queue.check_cancelled = check_cancelled  # type: ignore[method-assign]
        await asyncio.sleep(1.1)
        assert str(bench.access.view.problem) == "None"

    run_on_bench(check)


def test_forecast_uses_the_rate_of_results() -> None:
    async def check(bench: MaintenanceBench) -> None:
        bench.store.add_member(member("waits", 10**10), 1e10)
        for _ in range(6):
            bench.store.pool.settled_count += 50
            await asyncio.sleep(FORECAST_INTERVAL_S)
        assert bench.queue.rates[0] is None
        assert bench.queue.rates[-1] == pytest.approx(10.0, rel=0.05)

    run_on_bench(check)


def test_error_in_the_forecast_is_logged_and_stops_no_task() -> None:
    async def check(bench: MaintenanceBench) -> None:
        await asyncio.sleep(0.1)
        before = bench.access.view.forecast
        assert before is not None

        async def return_invalid_snapshot(*_: Any) -> str:
            return "no snapshot"

        bench.queue.take_snapshot = return_invalid_snapshot  # type: ignore[method-assign, assignment]
        await asyncio.sleep(3 * FORECAST_INTERVAL_S)
        assert bench.access.view.forecast is None
        assert {fields["where"] for fields in bench.list_events(Event.INTERNAL_ERROR)} == {"update_forecast"}
        assert bench.access.view.problem is None
        del bench.queue.take_snapshot
        await asyncio.sleep(FORECAST_INTERVAL_S)
        assert bench.access.view.forecast is not None

    run_on_bench(check)


def test_gate_change_between_turns_is_logged_with_the_age_of_the_reading() -> None:
    async def check(bench: MaintenanceBench) -> None:
        await asyncio.sleep(1.5)
        bench.limiter.set_paused(True, START_S)
        await asyncio.sleep(1.0)
        events = bench.list_events(Event.GATE)
        assert [fields["reason"] for fields in events][-1] == "paused"
        assert events[-1]["reading_age_s"] == 3.0
        assert (events[-1]["limit"], events[-1]["in_flight"]) == (0, 0)

    run_on_bench(check)


def test_outage_of_the_wake_up_channel_causes_no_busy_loop() -> None:
    async def check(bench: MaintenanceBench) -> None:
        call_count = 0

        async def raise_unavailable() -> None:
            nonlocal call_count
            call_count += 1
            raise QueueUnavailableError("no subscription")

        bench.queue.wait_for_work = raise_unavailable  # type: ignore[method-assign]
        bench.store.pool.wake_dispatchers()
        await asyncio.sleep(10.0)
        assert 10 <= call_count <= 120

    run_on_bench(check)
