"""A queue that can be read and refuses to be written: a replica, a full disk, a right that is missing."""

from __future__ import annotations

import asyncio
from typing import Any

from dispatcher.core.budget import Reason
from dispatcher.ports import QueueUnavailableError
from dispatcher.queue.memory import MemoryQueue
from tests.dispatch.test_markers_away import Scene, perform

WRITES = ("claim", "probe", "renew", "share", "settle", "bury", "release", "sweep", "expire")
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
            assert scene.dispatcher.allowance().reason is Reason.QUEUE_UNREACHABLE
        assert scene.told() == ["queue-unreachable"]
        assert scene.dispatcher.view.problem == "Redis is a replica that takes no writes"
        assert scene.gateway.sent == []
        allow_writes(scene.queue)
        await asyncio.sleep(1.5)
        assert sorted(scene.gateway.sent) == ["a", "b"]
        assert scene.told() == ["queue-unreachable", "queue-back"]
        assert scene.dispatcher.view.problem is None

    perform(scene_of)
