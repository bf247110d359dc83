"""A queue that can be read and refuses to be written: a replica, a full disk, a right that is missing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dispatcher.core.limit.budget import Reason
from dispatcher.lab.memory_queue import MemoryQueue
from dispatcher.ports import CallRefusedError, QueueUnavailableError
from dispatcher.telemetry.events import Event
from tests.dispatch.scene import Scene, perform

WRITES = (
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
REFUSED_S = 60.0


def refuse_writes(queue: MemoryQueue) -> None:
    async def refused(*_: Any, **__: Any) -> None:
        raise QueueUnavailableError("Redis is a replica that takes no writes")

    for name in WRITES:
        setattr(queue, name, refused)


def allow_writes(queue: MemoryQueue) -> None:
    for name in WRITES:
        delattr(queue, name)


def test_the_gate_stays_closed_as_long_as_writes_are_refused_and_it_is_told_once() -> None:
    async def scene_of(scene: Scene) -> None:
        refuse_writes(scene.queue)
        await scene.submit("a", "b")
        await asyncio.sleep(2)
        for _ in range(round(REFUSED_S / 0.1)):
            await asyncio.sleep(0.1)
            assert scene.dispatcher.get_allowance().reason is Reason.QUEUE_UNREACHABLE
        assert scene.told() == ["queue-unreachable"]
        assert scene.dispatcher.view.problem == "Redis is a replica that takes no writes"
        assert scene.gateway.sent == []
        allow_writes(scene.queue)
        await asyncio.sleep(1.5)
        assert sorted(scene.gateway.sent) == ["a", "b"]
        assert scene.told() == ["queue-unreachable", "queue-reachable"]
        assert scene.dispatcher.view.problem is None

    perform(scene_of)


def test_results_that_find_no_place_keep_the_gate_closed_whatever_else_gets_through() -> None:
    async def scene_of(scene: Scene) -> None:
        async def refused(*_: Any) -> None:
            raise CallRefusedError("batch:{pool}:results is not a list")

        settle, scene.queue.settle = scene.queue.settle, refused  # type: ignore[method-assign, assignment]
        await scene.submit("a")
        await asyncio.sleep(2)
        await scene.submit("b")
        for _ in range(round(REFUSED_S / 0.1)):
            await asyncio.sleep(0.1)
            assert scene.dispatcher.get_allowance().reason is Reason.QUEUE_UNREACHABLE
        assert (scene.told(), scene.gateway.sent) == (["queue-unreachable"], ["a"])
        scene.queue.settle = settle  # type: ignore[method-assign]
        await asyncio.sleep(2.5)
        assert (scene.told(), scene.gateway.sent) == (["queue-unreachable", "queue-reachable"], ["a", "b"])

    perform(scene_of)


@pytest.mark.parametrize(
    "name", [*WRITES, "count_requests", "take_snapshot", "find_overdue", "check_cancelled", "wait_for_work"]
)
def test_what_no_call_should_ever_raise_closes_the_gate_and_ends_nothing(name: str) -> None:
    """A reply of another shape than ours, or a defect: told once, with its traceback."""

    async def scene_of(scene: Scene) -> None:
        async def fails(*_: Any, **__: Any) -> None:
            raise TypeError("cannot unpack non-iterable NoneType object")

        setattr(scene.queue, name, fails)
        await scene.submit("a")
        await asyncio.sleep(20)
        # Nothing here leads to these
        called = name not in ("claim_probe", "move_to_dead_letters", "release", "settle_unleased")
        surprises = [fields for event, fields in scene.events if event is Event.INTERNAL_ERROR]
        assert len(surprises) == scene.told().count("queue-unreachable") <= (10 if called else 0)
        assert bool(surprises) == called
        delattr(scene.queue, name)
        await asyncio.sleep(12)
        assert scene.dispatcher.view.problem is None
        assert scene.gateway.sent == ["a"]

    perform(scene_of)
