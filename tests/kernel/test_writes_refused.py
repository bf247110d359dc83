"""A queue that can be read and refuses writes: a replica, a full disk, a missing permission."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dispatcher.lab.memory_queue import MemoryQueue
from dispatcher.limit.budget import Reason
from dispatcher.requests.submission import CallRefusedError, QueueUnavailableError
from dispatcher.telemetry.events import Event
from tests.kernel.scene import AnsweringGateway, Scene, run_in_scene

WRITE_METHODS = (
    "claim",
    "claim_probe",
    "renew",
    "share_state",
    "settle",
    "move_to_dead_letters",
    "release",
    "sweep",
    "settle_unleased",
)
REFUSED_FOR_S = 60.0


def refuse_writes(queue: MemoryQueue) -> None:
    async def refuse(*_: Any, **__: Any) -> None:
        raise QueueUnavailableError("Redis is a replica that takes no writes")

    for method_name in WRITE_METHODS:
        setattr(queue, method_name, refuse)


def allow_writes(queue: MemoryQueue) -> None:
    for method_name in WRITE_METHODS:
        delattr(queue, method_name)


def test_gate_stays_closed_while_writes_are_refused_and_one_event_is_logged() -> None:
    async def check(scene: Scene) -> None:
        refuse_writes(scene.queue)
        await scene.submit("a", "b")
        await asyncio.sleep(2)
        for _ in range(round(REFUSED_FOR_S / 0.1)):
            await asyncio.sleep(0.1)
            assert scene.dispatcher.get_allowance().reason is Reason.QUEUE_UNREACHABLE
        assert scene.list_queue_events() == ["queue-unreachable"]
        assert scene.dispatcher.view.problem == "Redis is a replica that takes no writes"
        assert scene.gateway.sent == []
        allow_writes(scene.queue)
        await asyncio.sleep(1.5)
        assert sorted(scene.gateway.sent) == ["a", "b"]
        assert scene.list_queue_events() == ["queue-unreachable", "queue-reachable"]
        assert scene.dispatcher.view.problem is None

    run_in_scene(check)


def test_gate_stays_closed_while_results_cannot_be_written_even_if_other_calls_work() -> None:
    async def check(scene: Scene) -> None:
        async def refuse(*_: Any) -> None:
            raise CallRefusedError("batch:{pool}:results is not a list")

        settle, scene.queue.settle = scene.queue.settle, refuse  # type: ignore[method-assign, assignment]
        await scene.submit("a")
        await asyncio.sleep(2)
        await scene.submit("b")
        for _ in range(round(REFUSED_FOR_S / 0.1)):
            await asyncio.sleep(0.1)
            assert scene.dispatcher.get_allowance().reason is Reason.QUEUE_UNREACHABLE
        assert (scene.list_queue_events(), scene.gateway.sent) == (["queue-unreachable"], ["a"])
        scene.queue.settle = settle  # type: ignore[method-assign]
        await asyncio.sleep(2.5)
        assert (scene.list_queue_events(), scene.gateway.sent) == (
            ["queue-unreachable", "queue-reachable"],
            ["a", "b"],
        )

    run_in_scene(check)


def test_outage_after_a_reply_that_was_not_understood_does_not_stop_the_turns() -> None:
    """After such a reply each result is written alone, but not while the queue answers none of the calls."""
    gateway = AnsweringGateway()
    gateway.answer_after_s = 1.0

    async def check(scene: Scene) -> None:
        call_count = 0

        async def fail(*_: Any) -> None:
            nonlocal call_count
            call_count += 1
            if call_count == 1:
                raise TypeError("cannot unpack non-iterable NoneType object")
            await asyncio.sleep(3.0)
            raise QueueUnavailableError("Redis did not answer in time")

        settle, scene.queue.settle = scene.queue.settle, fail  # type: ignore[method-assign, assignment]
        names = [f"r-{number}" for number in range(10)]
        await scene.submit(*names)
        for _ in range(60):
            await asyncio.sleep(1.0)
            assert asyncio.get_running_loop().time() - scene.dispatcher.last_round_at < 5.0
        assert call_count > 1
        scene.queue.settle = settle  # type: ignore[method-assign]
        await asyncio.sleep(5.0)
        assert len(scene.dispatcher._in_flight) == 0
        assert sorted(gateway.sent) == names

    run_in_scene(check, gateway)


@pytest.mark.parametrize(
    "method_name",
    [*WRITE_METHODS, "count_requests", "take_snapshot", "find_overdue", "check_cancelled", "wait_for_work"],
)
def test_unexpected_error_of_a_queue_method_closes_the_gate_and_stops_no_task(method_name: str) -> None:
    """A reply of an unknown shape, or a defect, is logged with its traceback."""

    async def check(scene: Scene) -> None:
        async def fail(*_: Any, **__: Any) -> None:
            raise TypeError("cannot unpack non-iterable NoneType object")

        setattr(scene.queue, method_name, fail)
        await scene.submit("a")
        await asyncio.sleep(20)
        # Nothing in this test makes the dispatcher call these.
        is_called = method_name not in ("claim_probe", "move_to_dead_letters", "release", "settle_unleased")
        internal_errors = [fields for event, fields in scene.events if event is Event.INTERNAL_ERROR]
        assert (
            len(internal_errors)
            == scene.list_queue_events().count("queue-unreachable")
            <= (10 if is_called else 0)
        )
        assert bool(internal_errors) == is_called
        delattr(scene.queue, method_name)
        await asyncio.sleep(12)
        assert scene.dispatcher.view.problem is None
        assert scene.gateway.sent == ["a"]

    run_in_scene(check)
