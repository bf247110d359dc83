"""Access of the loop to the queue: outages, cancel markers, and what replies change."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.kernel.in_flight import InFlightLease
from dispatcher.kernel.queue_access import (
    MAX_UNREAD_MARKERS,
    RETRY_PAUSE_S,
    QueueAccess,
    explain_empty_claim,
)
from dispatcher.kernel.queue_steps import MAX_HOLD_S, PAUSE_S, QueueStep, StepKind
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.limit.budget import Reason
from dispatcher.queue.contract import ClaimResult, LeaseCounts, Overload, Permit, RenewResult, SharedState
from dispatcher.requests.lease_validity import LeaseValidity
from dispatcher.requests.submission import CallRefusedError, QueueUnavailableError
from dispatcher.telemetry.events import Event, divert_events
from tests.kernel.scene import QueueWithUnreadableMarkers, lease, open_limiter, request
from tests.memory_queue import MemoryStore

PERMIT = Permit(limit=32, read_at=100.0, lost_units=0, retry_after_max_s=60.0)
OUTAGE = QueueUnavailableError("Redis refuses connections")
REFUSED = CallRefusedError("a right is missing")


class AccessBench:
    """Access to a queue in memory, with the events that it logged."""

    def __init__(self) -> None:
        clock = asyncio.get_running_loop().time
        self.events: list[tuple[Event, Mapping[str, Any]]] = []
        self.store = MemoryStore(clock=clock)
        self.queue = QueueWithUnreadableMarkers(self.store, "a")
        self.limiter = open_limiter()
        self.access = QueueAccess(self.queue, self.limiter, LeaseValidity(30.0, 5.0), clock)

    async def succeed(self, step: QueueStep) -> None:
        async def call() -> str:
            return "answer"

        assert await self.access.call_queue(step, call()) == "answer"

    async def fail(self, step: QueueStep, error: Exception = OUTAGE) -> None:
        async def call() -> str:
            raise error

        assert await self.access.call_queue(step, call()) is None

    def is_gate_closed(self) -> bool:
        now = asyncio.get_running_loop().time()
        reason = self.limiter.get_allowance(now).reason
        assert reason in (Reason.QUEUE_UNREACHABLE, Reason.OPEN)
        assert (self.access.view.problem is None) == (reason is Reason.OPEN), (
            "the status shows a problem exactly while the gate is closed"
        )
        return reason is Reason.QUEUE_UNREACHABLE

    def list_events(self) -> list[str]:
        return [event.event_name for event, _ in self.events]


def run_on_bench(check: Callable[[AccessBench], Awaitable[None]]) -> None:
    async def main() -> None:
        bench = AccessBench()
        with divert_events(lambda event, fields: bench.events.append((event, fields))):
            await check(bench)

    run_in_virtual_time(main(), start=2.0)


# Outages, which close the gate.


def test_outage_closes_the_gate_until_a_write_succeeds() -> None:
    async def check(bench: AccessBench) -> None:
        bench.access.has_work = False
        await bench.fail(QueueStep.CLAIM)
        assert bench.is_gate_closed()
        assert bench.access.view.problem == "Redis refuses connections"
        await bench.fail(QueueStep.RENEW)
        assert not bench.access.wake.is_set()
        await bench.succeed(QueueStep.SWEEP)
        assert not bench.is_gate_closed()
        assert bench.access.has_work, "new requests may have arrived during the outage"
        assert bench.access.wake.is_set()
        assert bench.list_events() == ["queue-unreachable", "queue-reachable"]

    run_on_bench(check)


def test_successful_read_does_not_open_the_gate_after_a_failed_write() -> None:
    async def check(bench: AccessBench) -> None:
        await bench.fail(QueueStep.SETTLE)
        await bench.succeed(QueueStep.COUNT)
        assert bench.is_gate_closed()
        await bench.succeed(QueueStep.SETTLE)
        assert not bench.is_gate_closed()

    run_on_bench(check)


@pytest.mark.parametrize("error", [OUTAGE, REFUSED])
def test_read_that_fails_while_writes_succeed_closes_the_gate_once(error: Exception) -> None:
    async def check(bench: AccessBench) -> None:
        await bench.fail(QueueStep.TAKE_SNAPSHOT, error)
        assert bench.is_gate_closed()
        await bench.succeed(QueueStep.CLAIM)
        await bench.fail(QueueStep.TAKE_SNAPSHOT)
        assert not bench.is_gate_closed()
        await bench.succeed(QueueStep.TAKE_SNAPSHOT)
        await bench.fail(QueueStep.TAKE_SNAPSHOT)
        assert bench.is_gate_closed(), "a success in between makes it a new outage"

    run_on_bench(check)


def test_refused_call_keeps_the_gate_closed_until_it_succeeds() -> None:
    async def check(bench: AccessBench) -> None:
        for _ in range(3600):
            await bench.fail(QueueStep.SETTLE, REFUSED)
            await asyncio.sleep(1.0)
            for step in (QueueStep.RENEW, QueueStep.SWEEP, QueueStep.RELEASE, QueueStep.COUNT):
                await bench.succeed(step)
            assert bench.is_gate_closed()
        await bench.succeed(QueueStep.SETTLE)
        assert not bench.is_gate_closed()

    run_on_bench(check)


CLAIMING = [step for step in QueueStep if step.kind is StepKind.CLAIMING]
OPTIONAL = [step for step in QueueStep if step.kind is StepKind.OPTIONAL]
REPEATED = [step for step in QueueStep if step.kind is StepKind.REPEATED]


@pytest.mark.parametrize("claiming_step", CLAIMING)
def test_refused_call_that_needs_an_open_gate_is_retried_after_growing_pauses(
    claiming_step: QueueStep,
) -> None:
    async def check(bench: AccessBench) -> None:
        for rest_s in (0.5, 1.0, 2.0, 4.0, 8.0, PAUSE_S[1], PAUSE_S[1]):
            await bench.fail(claiming_step, REFUSED)
            await asyncio.sleep(rest_s - 0.01)
            await bench.succeed(QueueStep.RENEW)
            assert bench.is_gate_closed()
            await asyncio.sleep(0.02)
            await bench.succeed(QueueStep.RENEW)
            assert not bench.is_gate_closed()
        await bench.succeed(claiming_step)
        await bench.fail(claiming_step, REFUSED)
        await asyncio.sleep(0.51)
        await bench.succeed(QueueStep.RENEW)
        assert not bench.is_gate_closed(), "a success resets the pause"

    run_on_bench(check)


@pytest.mark.parametrize("repeated_step", REPEATED)
def test_refused_call_that_is_not_repeated_does_not_keep_the_gate_closed_for_ever(
    repeated_step: QueueStep,
) -> None:
    """For example, there is nothing left to settle."""

    async def check(bench: AccessBench) -> None:
        await bench.fail(repeated_step, REFUSED)
        others = [step for step in REPEATED if step is not repeated_step]
        await asyncio.sleep(MAX_HOLD_S - 0.1)
        for step in others:
            await bench.succeed(step)
        assert bench.is_gate_closed()
        await asyncio.sleep(0.2)
        await bench.succeed(others[0])
        assert not bench.is_gate_closed()

    run_on_bench(check)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(QueueStep)),
            st.sampled_from([None, OUTAGE, REFUSED, TypeError("not understood")]),
            st.sampled_from([0.0, 0.1, 1.0, 20.0]),
        ),
        max_size=60,
    ),
    st.sets(st.sampled_from(OPTIONAL)),
)
def test_gate_is_closed_while_writes_fail_and_opens_when_the_loop_repeats_its_calls(
    calls: list[tuple[QueueStep, Exception | None, float]], failing_for_ever: set[QueueStep]
) -> None:
    """The calls that the loop makes while the gate is closed open it again after any failures. Optional calls
    may go on failing."""

    async def check(bench: AccessBench) -> None:
        failed_writes: set[QueueStep] = set()
        for step, error, pause_s in calls:
            await (bench.succeed(step) if error is None else bench.fail(step, error))
            if step.kind is not StepKind.OPTIONAL:
                failed_writes = failed_writes | {step} if error else set()
            # No write has succeeded since these failed.
            if failed_writes:
                assert bench.is_gate_closed()
            await asyncio.sleep(pause_s)
            if failed_writes:
                assert bench.is_gate_closed()
        for _ in range(round(PAUSE_S[1]) + 2):
            for step in OPTIONAL:
                await (bench.fail(step, REFUSED) if step in failing_for_ever else bench.succeed(step))
            for step in REPEATED:
                await bench.succeed(step)
            await asyncio.sleep(1.0)
        assert not bench.is_gate_closed()

    run_on_bench(check)


@pytest.mark.parametrize("error", [OUTAGE, REFUSED])
def test_reads_of_a_queue_that_takes_no_writes_keep_the_gate_closed(error: Exception) -> None:
    async def check(bench: AccessBench) -> None:
        for _ in range(600):
            for step in (*REPEATED, *CLAIMING):
                await bench.fail(step, error)
            for step in OPTIONAL:
                await bench.succeed(step)
            assert bench.is_gate_closed()
            await asyncio.sleep(1.0)
            assert bench.is_gate_closed()

    run_on_bench(check)


def test_retry_pause_doubles_up_to_a_second_and_is_reset_by_success() -> None:
    async def check(bench: AccessBench) -> None:
        pauses = []
        for _ in range(5):
            await bench.fail(QueueStep.CLAIM)
            pauses.append(bench.access.retry_pause_s)
        assert pauses == [0.2, 0.4, 0.8, 1.0, 1.0]
        await bench.succeed(QueueStep.CLAIM)
        assert bench.access.retry_pause_s == RETRY_PAUSE_S[0]

    run_on_bench(check)


def test_invalid_reply_is_an_outage_and_logged_once() -> None:
    async def check(bench: AccessBench) -> None:
        for _ in range(3):
            await bench.fail(QueueStep.CLAIM, TypeError("cannot unpack"))
        assert bench.is_gate_closed()
        problem = "the reply of the queue could not be understood: TypeError('cannot unpack')"
        assert bench.access.view.problem == problem
        assert bench.list_events() == ["internal-error", "queue-unreachable"], "the error is logged only once"
        assert bench.events[0][1] == {"where": "queue", "error": "TypeError('cannot unpack')"}

    run_on_bench(check)


def test_newest_problem_is_shown() -> None:
    async def check(bench: AccessBench) -> None:
        await bench.fail(QueueStep.SETTLE, REFUSED)
        await bench.fail(QueueStep.RENEW)
        assert bench.access.view.problem == "Redis refuses connections"
        await bench.succeed(QueueStep.RENEW)
        assert bench.access.view.problem == "a right is missing"

    run_on_bench(check)


# Cancel markers.


def build_entry(request_id: str, *, token: str = "t") -> InFlightLease:
    return InFlightLease(lease(), request=request(id=request_id, token=token))


def test_only_requests_with_a_token_are_looked_up_and_replies_match_them() -> None:
    async def check(bench: AccessBench) -> None:
        without_request = InFlightLease(lease())
        uncancellable = [without_request, build_entry("r-1", token="")]
        assert list(await bench.access.check_cancelled(uncancellable)) == [False, False]
        assert bench.queue.cancel_check_count == 0, "no call is needed"

        async def check_two(requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
            assert list(requests) == [("r-2", "t"), ("r-3", "t")]
            return [False, True]

        bench.queue.check_cancelled = check_two  # type: ignore[method-assign]
        entries = [uncancellable[1], build_entry("r-2"), without_request, build_entry("r-3")]
        assert list(await bench.access.check_cancelled(entries)) == [False, False, False, True]

    run_on_bench(check)


def test_gate_stays_closed_while_no_marker_can_be_read() -> None:
    async def check(bench: AccessBench) -> None:
        bench.queue.are_all_markers_unreadable = True
        assert list(await bench.access.check_cancelled([build_entry("r-1"), build_entry("x-1")])) == [
            None,
            None,
        ]
        assert bench.is_gate_closed()
        assert bench.access.markers_unreadable.is_set()
        await bench.succeed(QueueStep.CLAIM)
        await bench.access.retry_unread_markers()
        assert bench.is_gate_closed(), "a claim does not show that markers can be read"
        bench.queue.are_all_markers_unreadable = False
        await bench.access.retry_unread_markers()
        assert not bench.is_gate_closed()
        assert not bench.access.markers_unreadable.is_set()
        assert bench.list_events() == ["queue-unreachable", "queue-reachable"]

    run_on_bench(check)


def test_gate_stays_open_while_some_markers_cannot_be_read() -> None:
    async def check(bench: AccessBench) -> None:
        bench.queue.unreadable_prefixes = "r"
        entries = [build_entry("r-1"), build_entry("x-1")]
        assert list(await bench.access.check_cancelled(entries)) == [None, False]
        assert not bench.is_gate_closed()
        assert bench.access.view.markers_problem == "Redis did not answer in time"
        await bench.access.retry_unread_markers()
        assert bench.access.markers_unreadable.is_set()
        bench.queue.unreadable_prefixes = ""
        await bench.access.retry_unread_markers()
        assert not bench.access.markers_unreadable.is_set()
        assert str(bench.access.view.markers_problem) == "None"
        assert bench.list_events() == ["cancel-markers-unreadable", "cancel-markers-readable"]

    run_on_bench(check)


def test_delay_of_requests_with_unreadable_markers_grows_with_the_outage_up_to_a_bound() -> None:
    async def check(bench: AccessBench) -> None:
        bench.queue.unreadable_prefixes = "r"
        delays = []
        for pause_s in (0.0, 5.0, 1000.0):
            await asyncio.sleep(pause_s)
            await bench.access.check_cancelled([build_entry("r-1")])
            delays.append(bench.access.get_marker_retry_delay())
        assert delays == [1.0, 5.0, 30.0]

    run_on_bench(check)


def test_only_some_of_many_unread_markers_are_looked_up_again() -> None:
    async def check(bench: AccessBench) -> None:
        bench.queue.unreadable_prefixes = "r"
        await bench.access.check_cancelled([build_entry(f"r-{number}") for number in range(1000)])
        await bench.access.check_cancelled([build_entry(f"r-{number}") for number in range(1000, 2000)])
        asked: list[int] = []

        async def count_requests(requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
            asked.append(len(requests))
            return [False] * len(requests)

        bench.queue.check_cancelled = count_requests  # type: ignore[method-assign]
        await bench.access.retry_unread_markers()
        assert asked == [MAX_UNREAD_MARKERS]
        assert not bench.access.markers_unreadable.is_set()

    run_on_bench(check)


def test_markers_that_become_unreadable_during_a_retry_are_not_forgotten() -> None:
    async def check(bench: AccessBench) -> None:
        bench.queue.unreadable_prefixes = "r"
        await bench.access.check_cancelled([build_entry("r-1")])
        bench.queue.unreadable_prefixes = ""
        check_cancelled = bench.queue.check_cancelled

        async def fail_meanwhile(requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
            bench.queue.unreadable_prefixes, bench.queue.check_cancelled = "x", check_cancelled  # type: ignore[method-assign]
            await bench.access.check_cancelled([build_entry("x-1")])
            return [False]

        bench.queue.check_cancelled = fail_meanwhile  # type: ignore[method-assign]
        await bench.access.retry_unread_markers()
        assert bench.access.markers_unreadable.is_set()
        bench.queue.unreadable_prefixes = ""
        await bench.access.retry_unread_markers()
        assert not bench.access.markers_unreadable.is_set()

    run_on_bench(check)


# Replies of the queue.


def build_reply(
    *, live_units: int = 5, other_units: int = 3, lost_units: int = 0, **changes: Any
) -> RenewResult:
    fields: dict[str, Any] = {"limit": None, "read_at": 0.0, "overload": None, "probing_owner": None}
    return RenewResult(
        (),
        LeaseCounts(2.0, live_units, other_units, 0, lost_units),
        SharedState(**(fields | {"is_paused": False} | changes)),
    )


def test_growing_counter_of_lost_units_triggers_a_renewal() -> None:
    """The queue sends a counter because a reply can be lost. The first value is only the start."""

    async def check(bench: AccessBench) -> None:
        bench.access.record_lost_units(7)
        bench.access.record_lost_units(7)
        assert not bench.access.leases_were_lost.is_set()
        bench.access.update_from_reply(build_reply(lost_units=8))
        assert bench.access.leases_were_lost.is_set()

    run_on_bench(check)


def test_counts_and_pause_of_a_reply_reach_the_limiter() -> None:
    async def check(bench: AccessBench) -> None:
        bench.access.update_from_reply(build_reply(other_units=4))
        assert bench.limiter.other_owners_units == 4
        bench.access.update_from_reply(build_reply(is_paused=True))
        assert bench.limiter.get_allowance(2.0).reason is Reason.PAUSED
        assert bench.access.view.shared is not None
        assert bench.access.view.shared.is_paused
        bench.access.update_from_reply(build_reply())
        assert bench.limiter.get_allowance(2.0).reason is Reason.OPEN
        empty_claim = ClaimResult([], build_reply().lease_counts, build_reply().shared, claimable_count=0)
        bench.access.update_from_reply(empty_claim)
        assert bench.limiter.get_allowance(2.0).reason is Reason.IDLE

    run_on_bench(check)


def test_shared_refusal_closes_the_gate_and_counts_own_requests_in_flight() -> None:
    """The owner that shared the refusal may not have counted the requests of this one."""

    async def check(bench: AccessBench) -> None:
        recorded: list[tuple[int, bool]] = []
        original = bench.limiter.record_refusal

        def record_refusal(now: float, **fields: Any) -> None:
            recorded.append((fields["in_flight"], fields["is_remote"]))
            original(now, **fields)

        bench.limiter.record_refusal = record_refusal  # type: ignore[method-assign]
        for token_number in range(4):
            bench.limiter.record_send(token_number, 1.5)
        for in_flight in (3, 9):
            overload = Overload(2.0, 2.0, is_out_of_capacity=True, in_flight=in_flight)
            bench.access.update_from_reply(build_reply(other_units=2, overload=overload))
        assert recorded == [(6, True), (9, True)]
        assert bench.limiter.get_allowance(2.0).reason is Reason.BACKPRESSURE

    run_on_bench(check)


def test_lease_is_valid_while_the_queue_has_heard_from_this_owner() -> None:
    async def check(bench: AccessBench) -> None:
        entry = InFlightLease(lease(), confirmed_at=2.0)
        assert not bench.access.is_lease_valid(entry), "the queue has not heard from this owner yet"
        bench.access.record_sign_of_life(2.0)
        assert bench.access.is_lease_valid(entry)
        await asyncio.sleep(4.9)
        assert bench.access.is_lease_valid(entry)
        await asyncio.sleep(0.2)
        assert not bench.access.is_lease_valid(entry), (
            "after owner_timeout_s, other owners may presume this one dead"
        )

    run_on_bench(check)


# Explanations of empty claims.


HEAVY_REQUEST_REASON = (
    "the next request needs more than the {} units that are free, and is sent when there is room for it"
)


def build_claim_result(
    *,
    leases: int = 0,
    live_units: int = 32,
    waiting_count: int = 9,
    limit: int = 32,
    overload: Overload | None = None,
    lost_units: int = 0,
    is_paused: bool = False,
) -> ClaimResult:
    shared = SharedState(limit, 100.0, overload, None, is_paused=is_paused)
    return ClaimResult(
        [lease()] * leases, LeaseCounts(101.0, live_units, live_units, 0, lost_units), shared, waiting_count
    )


def build_overload(at: float, until: float) -> Overload:
    return Overload(at, until, is_out_of_capacity=True, in_flight=3)


@pytest.mark.parametrize(
    ("claim_result", "why"),
    [
        (
            build_claim_result(overload=build_overload(90.0, 86400.0)),
            "the gateway asked a dispatcher to wait another 49.0 s",
        ),
        (
            build_claim_result(overload=build_overload(100.5, 100.5)),
            "a dispatcher was refused after the newest reading here",
        ),
        (
            build_claim_result(limit=4, live_units=4),
            "a newer reading of another dispatcher leaves a limit of 4",
        ),
        (build_claim_result(overload=build_overload(30.0, 86400.0)), ""),
        (build_claim_result(leases=1, limit=4, live_units=4), ""),
        (build_claim_result(waiting_count=0, overload=build_overload(100.5, 100.5)), ""),
        (build_claim_result(live_units=32), ""),
        (build_claim_result(live_units=20), HEAVY_REQUEST_REASON.format(12)),
        (build_claim_result(live_units=20, lost_units=4), HEAVY_REQUEST_REASON.format(8)),
        (build_claim_result(live_units=20, lost_units=11), ""),
        (build_claim_result(live_units=31), ""),
        (build_claim_result(live_units=20, leases=1), ""),
        (build_claim_result(live_units=20, waiting_count=0), ""),
        (build_claim_result(live_units=20, is_paused=True), ""),
        (build_claim_result(live_units=20, limit=30), ""),
        (
            build_claim_result(live_units=20, overload=build_overload(100.5, 100.5)),
            "a dispatcher was refused after the newest reading here",
        ),
    ],
)
def test_empty_claim_is_explained(claim_result: ClaimResult, why: str) -> None:
    assert explain_empty_claim(claim_result, PERMIT) == why
