"""Attempts for several leases: how each of the leases ends."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable

import pytest

from dispatcher.gateway.buffers import AnswerBuffer, AnswerBufferPool
from dispatcher.gateway.contract import AttemptResult
from dispatcher.kernel.attempts import AttemptRunner
from dispatcher.kernel.completions import get_lease
from dispatcher.kernel.context import KernelContext
from dispatcher.kernel.error_guard import ErrorGuard
from dispatcher.kernel.in_flight import Attempt, InFlightLease, InFlightTable
from dispatcher.kernel.journal import Journal
from dispatcher.kernel.loop import build_feature_hooks
from dispatcher.kernel.maintenance import Maintenance
from dispatcher.kernel.options import Options
from dispatcher.kernel.outcome_judge import MAX_RECORDS, OutcomeJudge
from dispatcher.kernel.queue_access import QueueAccess
from dispatcher.lab.memory_queue import MemoryQueue
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.queue.contract import Release, Settlement
from dispatcher.requests.lease_validity import LeaseValidity
from dispatcher.requests.outcomes.outcome import (
    Delivered,
    Evicted,
    Failed,
    Outcome,
    Overloaded,
    RetryPolicy,
    UncountedError,
)
from dispatcher.requests.request import Request
from dispatcher.telemetry.metrics import Metrics
from dispatcher.wire_format import ErrorCode
from tests.kernel.scene import lease, open_limiter, request
from tests.memory_queue import MemoryStore


class SlowGateway:
    """Gateway whose answer takes a second."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.buffers = AnswerBufferPool(100, 10)
        self.sent: list[str] = []
        self.ended: list[str] = []

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: Callable[[], bool]
    ) -> AttemptResult:
        now = asyncio.get_running_loop().time
        began = now()
        assert may_send()
        self.sent.append(token)
        try:
            await asyncio.sleep(1.0)
        finally:
            self.ended.append(token)
        memory = AnswerBuffer(self.buffers)
        await memory.grow_to(10)
        return AttemptResult(self.outcome, began, now(), memory=memory)

    def get_connected_at(self, token: str) -> float | None:
        return None

    def resize_connection_pool(self, max_requests: int) -> None: ...


class Bench:
    """An attempt runner and its parts."""

    def __init__(self, outcome: Outcome) -> None:
        loop = asyncio.get_running_loop()
        self.gateway = SlowGateway(outcome)
        self.limiter = open_limiter()
        self.table = InFlightTable()
        queue = MemoryQueue(MemoryStore(clock=loop.time), "a")
        access = QueueAccess(queue, self.limiter, LeaseValidity(60.0, 60.0), loop.time)
        access.record_sign_of_life(loop.time())
        context = KernelContext(
            access,
            self.limiter,
            self.gateway,
            Journal(Metrics()),
            Options(RetryPolicy()),
            in_flight=self.table,
        )
        self.completed = context.pending
        context.hooks = build_feature_hooks(context)
        self.access = access
        self.judge = OutcomeJudge(context, Maintenance(context))
        self.runner = AttemptRunner(context, self.judge, ErrorGuard(context))

    def add_lease(self, number: int) -> InFlightLease:
        entry = self.table.add_lease(lease(number), asyncio.get_running_loop().time())
        self.table.set_request(entry, request(number))
        return entry

    def codes(self) -> dict[int, str]:
        return {
            get_lease(each).entry_id: each.result_class
            if isinstance(each, Settlement)
            else type(each).__name__
            for each in self.completed
        }


def perform(outcome: Outcome, then: Callable[[Bench, list[InFlightLease]], Awaitable[None]]) -> Bench:
    async def main() -> Bench:
        bench = Bench(outcome)
        entries = [bench.add_lease(entry) for entry in (1, 2, 3)]
        async with asyncio.TaskGroup() as tasks:
            bench.runner.use_task_group(tasks)
            bench.runner.start_attempt(Attempt("t-1", request(1), entries))
            assert bench.table.running_count == 3
            await then(bench, entries)
        assert bench.table.running_count == 0
        assert bench.limiter.in_flight == 0
        assert bench.gateway.ended == bench.gateway.sent
        return bench

    return run_in_virtual_time(main(), start=2.0)


async def check_units(bench: Bench, entries: list[InFlightLease]) -> None:
    await asyncio.sleep(0.5)
    assert bench.limiter.in_flight == 3, "the units of its leases"


def test_answer_completes_every_lease() -> None:
    bench = perform(Delivered(200, b"{}"), check_units)
    assert bench.gateway.sent == ["t-1"]
    assert bench.codes() == {1: "2xx", 2: "2xx", 3: "2xx"}
    assert [ending.request_id for ending in bench.completed if isinstance(ending, Settlement)] == [
        "r-1",
        "r-2",
        "r-3",
    ]


@pytest.mark.parametrize("outcome", [Failed("reset"), Overloaded(429, "", is_out_of_capacity=True)])
def test_failure_completes_every_lease(outcome: Outcome) -> None:
    bench = perform(outcome, check_units)
    assert set(bench.codes().values()) == {"Release"}
    assert all(isinstance(ending, Release) and not ending.is_undelivered for ending in bench.completed)


class WatchedAttempt(Attempt):
    """Attempt that can be referenced weakly."""

    __slots__ = ("__weakref__",)


def test_finished_attempt_is_freed_before_the_deadlines_of_its_leases() -> None:
    """The timer for the earlier deadline refers to the attempt, and so to all payloads."""

    async def main() -> int:
        bench, attempts = Bench(Delivered(200, b"{}")), []
        async with asyncio.TaskGroup() as tasks:
            bench.runner.use_task_group(tasks)
            for first in range(1, 11, 2):
                entries = [bench.add_lease(number) for number in (first, first + 1)]
                for number, entry in enumerate(entries):
                    bench.table.set_request(entry, request(first + number, deadline=10**10 + number))
                attempt = WatchedAttempt(f"t-{first}", request(deadline=10**10 + 1), entries)
                bench.runner.start_attempt(attempt)
                attempts.append(weakref.ref(attempt))
                del attempt, entries, entry
        assert len(bench.completed) == 10
        for completion in bench.completed:
            bench.table.remove_lease(get_lease(completion).token)
        gc.collect()
        return sum(reference() is not None for reference in attempts)

    assert run_in_virtual_time(main(), start=2.0) == 0


def test_answer_memory_is_kept_until_the_last_lease_is_removed() -> None:
    bench = perform(Delivered(200, b"{}"), check_units)
    held = []
    for entry in (1, 2, 3):
        held.append(bench.gateway.buffers.used_bytes)
        bench.table.remove_lease(lease(entry).token)
    assert held == [10, 10, 10]
    assert bench.gateway.buffers.used_bytes == 0


def test_answer_without_leases_keeps_no_memory() -> None:
    async def lose(bench: Bench, entries: list[InFlightLease]) -> None:
        await asyncio.sleep(0.5)
        for held in entries:
            bench.table.remove_lease(held.lease.token)

    assert perform(Delivered(200, b"{}"), lose).gateway.buffers.used_bytes == 0


def test_cancelled_or_lost_lease_does_not_end_the_attempt_of_the_others() -> None:
    async def then(bench: Bench, entries: list[InFlightLease]) -> None:
        await asyncio.sleep(0.5)
        bench.table.stop_waiting(entries[0], "cancelled")
        bench.table.stop_waiting(entries[1], "lost")
        await asyncio.sleep(0.1)
        assert bench.gateway.ended == []

    bench = perform(Delivered(200, b"{}"), then)
    assert bench.codes() == {1: ErrorCode.CANCELLED, 3: "2xx"}
    assert bench.table.find_lease("t-2") is None


def test_attempt_is_cancelled_when_its_last_lease_leaves() -> None:
    async def then(bench: Bench, entries: list[InFlightLease]) -> None:
        await asyncio.sleep(0.5)
        bench.table.stop_waiting(entries[0], "cancelled")
        bench.table.stop_waiting(entries[1], "lost")
        bench.table.stop_waiting(entries[2], "drain")
        await asyncio.sleep(0.01)
        assert bench.gateway.ended == ["t-1"]

    bench = perform(Delivered(200, b"{}"), then)
    assert bench.codes() == {1: ErrorCode.CANCELLED, 3: "Release"}
    assert bench.table.find_lease("t-2") is None


def test_attempt_that_is_cancelled_before_its_first_step_completes_every_lease() -> None:
    async def then(bench: Bench, entries: list[InFlightLease]) -> None:
        for held in entries:
            bench.table.stop_waiting(held, "cancelled")

    bench = perform(Delivered(200, b"{}"), then)
    assert bench.gateway.sent == []
    assert set(bench.codes().values()) == {ErrorCode.CANCELLED}


def test_only_the_newest_requests_with_evictions_or_errors_are_remembered() -> None:
    async def main() -> None:
        bench = Bench(Delivered(200, b"{}"))

        def evict(number: int) -> float:
            entry = InFlightLease(lease(number))
            outcome = bench.judge.judge_lease(entry, AttemptResult(Evicted(429, "evicted"), 0.0, 1.0), 0.0)
            assert isinstance(outcome, Evicted)
            return outcome.delay_s

        assert {evict(number) for number in range(MAX_RECORDS)} == {1.0}
        assert evict(0) == 2.0, "it is the newest now"
        assert evict(MAX_RECORDS) == 1.0
        assert [evict(number) for number in (1, 0)] == [1.0, 4.0], "only the oldest is forgotten"

    run_in_virtual_time(main(), start=2.0)


@pytest.mark.parametrize("has_others", [False, True])
def test_request_is_tried_once_while_the_address_is_unverified_and_others_wait(*, has_others: bool) -> None:
    async def main() -> list[bool]:
        bench = Bench(Delivered(404, b"<html>"))
        bench.access.has_claimable_requests = has_others
        entry, is_trial = bench.add_lease(1), []
        for at in (1.0, 2.0):
            result = AttemptResult(bench.gateway.outcome, at, at)
            judged = bench.judge.judge_attempt(Attempt("t-1", request(1), [entry]), result, result.outcome)
            bench.judge.judge_lease(entry, judged, 0.5)
            is_trial.append(isinstance(judged.outcome, UncountedError))
        return is_trial

    assert run_in_virtual_time(main(), start=2.0) == [has_others, False]


@pytest.mark.parametrize(
    ("outcome", "rests_s"),
    [(Failed("reset"), [0.0, 1.0]), (Delivered(200, b""), [0.0, 0.0]), (None, [1.0, 1.0])],
    ids=["neither accepted nor refused", "accepted", "not ended"],
)
def test_end_of_a_tried_request_decides_whether_the_next_refused_ones_are_sent(
    outcome: Outcome | None, rests_s: list[float]
) -> None:
    async def main() -> list[float]:
        bench = Bench(Delivered(200, b"{}"))
        for at in (1.0, 2.0, 3.0):  # the gate was closed so often by requests that were refused before
            bench.judge._refusal_groups.record_refusal("", at, at - 0.5, was_refused=True)
        refused = InFlightLease(lease(1, refusals=1))
        await asyncio.sleep(10.0)
        assert bench.judge.get_rest_s(refused) == 0.0, "it is tried"
        if outcome is not None:
            bench.judge.judge_lease(refused, AttemptResult(outcome, 5.0, 6.0), 0.0)
        return [bench.judge.get_rest_s(refused) for _ in rests_s]

    assert run_in_virtual_time(main(), start=2.0) == rests_s


@pytest.mark.parametrize(
    ("outcome", "ends_outage"),
    [
        (Delivered(400, b""), True),
        (Overloaded(429, "", is_out_of_capacity=True), True),
        (Failed("the gateway answered 500", 500, b"no"), True),
        (Failed("reset"), False),
    ],
    ids=repr,
)
def test_every_answer_of_the_gateway_ends_an_outage(outcome: Outcome, *, ends_outage: bool) -> None:
    async def main() -> bool:
        bench = Bench(outcome)
        bench.limiter.record_connection_failure(2.0, "refused")
        attempt = Attempt("t-1", request(1), [bench.add_lease(1)])
        bench.judge.judge_attempt(attempt, AttemptResult(outcome, 3.0, 4.0), outcome)
        bench.judge.close()
        return bench.limiter.gateway_unreachable_since is None

    assert run_in_virtual_time(main(), start=5.0) is ends_outage
