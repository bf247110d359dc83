"""One exchange with the gateway for several leases: each of them ends its own way."""

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
from dispatcher.dispatch.options import Options
from dispatcher.dispatch.queue_access import QueueAccess
from dispatcher.forward.buffers import AnswerBuffer, AnswerBufferPool
from dispatcher.lab.memory_queue import MemoryQueue, MemoryStore
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.ports import AttemptResult, Release, Settlement
from dispatcher.telemetry.metrics import Metrics
from tests.dispatch.scene import lease, open_limiter, request


class Answers:
    """A gateway that takes a second."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.buffers = AnswerBufferPool(100, 10)
        self.sent: list[str] = []
        self.record_completion: list[str] = []

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
            self.record_completion.append(token)
        hold = AnswerBuffer(self.buffers)
        await hold.grow_to(10)
        return AttemptResult(self.outcome, began, now(), memory=hold)

    def get_connected_at(self, token: str) -> float | None:
        return None

    def resize_connection_pool(self, max_requests: int) -> None: ...


class Scene:
    """Three leases on one try."""

    def __init__(self, outcome: Outcome) -> None:
        loop = asyncio.get_running_loop()
        self.gateway = Answers(outcome)
        self.limiter = open_limiter()
        self.holding = InFlightTable()
        self.record_completion: list[Completion] = []
        self.dropped: list[str] = []
        options, journal = Options(RetryPolicy()), Journal(Metrics())
        queue = MemoryQueue(MemoryStore(clock=loop.time), "a")
        access = QueueAccess(queue, self.limiter, LeaseValidity(60.0, 60.0), loop.time)
        access.record_sign_of_life(loop.time())
        upkeep = Maintenance(access, self.holding, self.limiter, options, journal)
        self.tries = AttemptRunner(
            self.gateway,
            self.limiter,
            options,
            self.holding,
            access,
            upkeep,
            journal,
            random.Random(0),
            self.record_completion.append,
            self.dropped.append,
        )

    def held(self, entry: int) -> InFlightLease:
        held = self.holding.add_lease(lease(entry), asyncio.get_running_loop().time(), is_probe=False)
        held.request = request(entry)
        return held

    def codes(self) -> dict[int, str]:
        return {
            get_lease(each).entry_id: each.result_class
            if isinstance(each, Settlement)
            else type(each).__name__
            for each in self.record_completion
        }


def perform(outcome: Outcome, then: Callable[[Scene, list[InFlightLease]], Awaitable[None]]) -> Scene:
    async def main() -> Scene:
        scene = Scene(outcome)
        riders = [scene.held(entry) for entry in (1, 2, 3)]
        async with asyncio.TaskGroup() as tasks:
            scene.tries.start_attempt(Attempt("t-1", request(1), riders), tasks)
            assert scene.holding.running_count == 3
            await then(scene, riders)
        assert scene.holding.running_count == 0
        assert scene.limiter.in_flight == 0
        assert scene.gateway.record_completion == scene.gateway.sent
        return scene

    return run_in_virtual_time(main(), start=2.0)


async def nothing(scene: Scene, riders: list[InFlightLease]) -> None:
    await asyncio.sleep(0.5)
    assert scene.limiter.in_flight == 3, "the units of its leases"


def test_an_answer_is_every_riders() -> None:
    scene = perform(Delivered(200, b"{}"), nothing)
    assert scene.gateway.sent == ["t-1"]
    assert scene.codes() == {1: "2xx", 2: "2xx", 3: "2xx"}
    assert [ending.request_id for ending in scene.record_completion if isinstance(ending, Settlement)] == [
        "r-1",
        "r-2",
        "r-3",
    ]


@pytest.mark.parametrize("outcome", [Failed("reset"), Overloaded(429, "", is_out_of_capacity=True)])
def test_a_failure_is_every_riders(outcome: Outcome) -> None:
    scene = perform(outcome, nothing)
    assert set(scene.codes().values()) == {"Release"}
    assert all(
        isinstance(ending, Release) and not ending.is_undelivered for ending in scene.record_completion
    )


def test_answer_takes_its_memory_until_the_queue_has_confirmed_the_end_of_every_lease() -> None:
    scene = perform(Delivered(200, b"{}"), nothing)
    held = []
    for entry in (1, 2, 3):
        held.append(scene.gateway.buffers.used_bytes)
        scene.holding.remove_lease(lease(entry).token)
    assert held == [10, 10, 10]
    assert scene.gateway.buffers.used_bytes == 0


def test_answer_of_leases_that_are_gone_takes_no_memory() -> None:
    async def lose(scene: Scene, riders: list[InFlightLease]) -> None:
        await asyncio.sleep(0.5)
        for held in riders:
            scene.holding.remove_lease(held.lease.token)

    assert perform(Delivered(200, b"{}"), lose).gateway.buffers.used_bytes == 0


def test_one_that_is_cancelled_or_lost_does_not_end_the_others() -> None:
    async def then(scene: Scene, riders: list[InFlightLease]) -> None:
        await asyncio.sleep(0.5)
        scene.holding.stop_waiting(riders[0], "cancelled")
        scene.holding.stop_waiting(riders[1], "lost")
        await asyncio.sleep(0.1)
        assert scene.gateway.record_completion == []

    scene = perform(Delivered(200, b"{}"), then)
    assert scene.codes() == {1: ErrorCode.CANCELLED, 3: "2xx"}
    assert scene.dropped == ["t-2"]


def test_exchange_ends_when_nobody_waits_for_its_answer() -> None:
    async def then(scene: Scene, riders: list[InFlightLease]) -> None:
        await asyncio.sleep(0.5)
        scene.holding.stop_waiting(riders[0], "cancelled")
        scene.holding.stop_waiting(riders[1], "lost")
        scene.holding.stop_waiting(riders[2], "drain")
        await asyncio.sleep(0.01)
        assert scene.gateway.record_completion == ["t-1"]

    scene = perform(Delivered(200, b"{}"), then)
    assert scene.codes() == {1: ErrorCode.CANCELLED, 3: "Release"}
    assert scene.dropped == ["t-2"]


def test_exchange_that_is_cut_before_its_first_step_ends_each_lease() -> None:
    async def then(scene: Scene, riders: list[InFlightLease]) -> None:
        for held in riders:
            scene.holding.stop_waiting(held, "cancelled")

    scene = perform(Delivered(200, b"{}"), then)
    assert scene.gateway.sent == []
    assert set(scene.codes().values()) == {ErrorCode.CANCELLED}
