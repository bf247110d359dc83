"""Attempts for several leases: how each of the leases ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from dispatcher.core.gateway.outcome import Delivered, Failed, Outcome, Overloaded, RetryPolicy
from dispatcher.core.requests.lease_validity import LeaseValidity
from dispatcher.core.requests.request import Request
from dispatcher.core.requests.result import ErrorCode
from dispatcher.dispatch.attempts import AttemptRunner
from dispatcher.dispatch.completions import Completion, get_lease
from dispatcher.dispatch.in_flight import Attempt, InFlightLease, InFlightTable
from dispatcher.dispatch.journal import Journal
from dispatcher.dispatch.maintenance import Maintenance
from dispatcher.dispatch.merging.merger import RequestMerger
from dispatcher.dispatch.models.model_router import ModelRouter
from dispatcher.dispatch.options import Options
from dispatcher.dispatch.outcome_judge import OutcomeJudge
from dispatcher.dispatch.queue_access import QueueAccess
from dispatcher.dispatch.sequences.turns import TurnChecker
from dispatcher.dispatch.slices.slicer import Slicer
from dispatcher.forward.buffers import AnswerBuffer, AnswerBufferPool
from dispatcher.lab.memory_queue import MemoryQueue, MemoryStore
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.ports import AttemptResult, Release, Settlement
from dispatcher.telemetry.metrics import Metrics
from tests.dispatch.scene import lease, open_limiter, request


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
        self.completed: list[Completion] = []
        self.removed: list[str] = []
        options, journal = Options(RetryPolicy()), Journal(Metrics())
        queue = MemoryQueue(MemoryStore(clock=loop.time), "a")
        access = QueueAccess(queue, self.limiter, LeaseValidity(60.0, 60.0), loop.time)
        access.record_sign_of_life(loop.time())
        maintenance = Maintenance(access, self.table, self.limiter, options, journal)
        complete, remove_lease, rand = self.completed.append, self.removed.append, random.Random(0)
        self.runner = AttemptRunner(
            self.gateway,
            self.limiter,
            options,
            self.table,
            access,
            journal,
            OutcomeJudge(self.gateway, self.limiter, options, self.table, access, maintenance, rand),
            RequestMerger(options, rand),
            TurnChecker(access, self.table, options, complete, remove_lease),
            ModelRouter(access, self.table, options, complete),
            Slicer(access, self.gateway, options, lambda request: False),
            rand,
            complete,
            remove_lease,
        )

    def add_lease(self, number: int) -> InFlightLease:
        return self.table.add_lease(lease(number), asyncio.get_running_loop().time(), request(number))

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
    assert bench.removed == ["t-2"]


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
    assert bench.removed == ["t-2"]


def test_attempt_that_is_cancelled_before_its_first_step_completes_every_lease() -> None:
    async def then(bench: Bench, entries: list[InFlightLease]) -> None:
        for held in entries:
            bench.table.stop_waiting(held, "cancelled")

    bench = perform(Delivered(200, b"{}"), then)
    assert bench.gateway.sent == []
    assert set(bench.codes().values()) == {ErrorCode.CANCELLED}
