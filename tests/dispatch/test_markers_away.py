"""Cancel markers that cannot be read, while the queue itself answers: their Cluster node is away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dispatcher.core.budget import Policy, Reading, Reason, Signal
from dispatcher.core.limiter import Limiter
from dispatcher.core.outcome import Delivered, RetryPolicy
from dispatcher.core.request import Request, encode_member
from dispatcher.dispatch import Dispatcher, Journal, Options
from dispatcher.ports import Claimed, Forwarded, Permit, QueueUnavailableError, Submission
from dispatcher.queue.memory import MemoryQueue, MemoryStore
from dispatcher.sim.virtual import run
from dispatcher.telemetry.events import Event, diverted
from dispatcher.telemetry.metrics import Metrics

AWAY_S = 60.0


class MarkersApart(MemoryQueue):
    """Markers of ids that begin with one of these letters lie on nodes that are away."""

    away = ""
    claimed = looked_up = 0

    async def claim(self, most: int, nonce: str, permit: Permit, **how: int) -> Claimed:
        claimed = await super().claim(most, nonce, permit, **how)
        self.claimed += len(claimed.leases)
        return claimed

    async def cancelled(self, requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
        self.looked_up += 1
        if any(name.startswith(letter) for name, _ in requests for letter in self.away):
            await asyncio.sleep(0.1)
            raise QueueUnavailableError("Redis did not answer in time")
        return await super().cancelled(requests)


class Answers:
    """A gateway that answers after so long."""

    takes_s = 0.0

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def forward(self, request: Request, *, token: str, deadline: float, may_send: object) -> Forwarded:
        began = asyncio.get_running_loop().time()
        self.sent.append(request.id)
        await asyncio.sleep(self.takes_s)
        return Forwarded(Delivered(200, b"{}"), began, asyncio.get_running_loop().time())

    def connected(self, token: str) -> float | None:
        return None

    def resize(self, limit: int) -> None: ...


class Scene:
    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.events: list[tuple[Event, Mapping[str, Any]]] = []
        self.store = MemoryStore(clock=loop.time)
        self.queue, self.gateway = MarkersApart(self.store, "a"), Answers()
        self.limiter = Limiter(Policy(max_sys=10, max_age_s=1e6), [Signal.REQUESTS])
        self.limiter.reading(Reading(Signal.REQUESTS, 1.0, 1.0, 0.0, 0.0, 10), 1.0)
        self.dispatcher = Dispatcher(
            self.queue, self.gateway, self.limiter, Options(RetryPolicy()), Journal(Metrics())
        )

    async def submit(self, *names: str) -> None:
        until = int(time.time()) + 10**6
        await self.store.submit(
            [
                Submission(encode_member(name, b"{}", until, token="t"), float(until), name, "t", until)
                for name in names
            ]
        )

    def told(self) -> list[str]:
        """Of the queue, to the log."""
        return [event.event for event, _ in self.events if event.event.startswith("queue-")]


def perform(scene_of: Any) -> None:
    async def main() -> None:
        scene = Scene()
        with diverted(lambda event, fields: scene.events.append((event, fields))):
            task = asyncio.create_task(scene.dispatcher.run())
            await scene_of(scene)
            scene.dispatcher.drain(1.0)
            await task

    run(main(), start=2.0)


def test_nothing_is_claimed_again_and_again_while_markers_cannot_be_read() -> None:
    async def scene_of(scene: Scene) -> None:
        scene.queue.away = "r"
        await scene.submit("r-1", "r-2")
        await asyncio.sleep(AWAY_S)
        assert scene.queue.claimed == 2, "once each"
        assert scene.queue.looked_up < AWAY_S + 10, "and looked up each second"
        assert scene.told() == ["queue-unreachable"]
        assert scene.dispatcher.allowance().reason is Reason.QUEUE_UNREACHABLE
        problem = "Redis did not answer in time: cancel markers cannot be read"
        assert scene.dispatcher.view.problem == problem
        assert (await scene.store.counts()).pending == 2
        scene.queue.away = ""
        await asyncio.sleep(1.5)
        assert sorted(scene.gateway.sent) == ["r-1", "r-2"]
        assert scene.told() == ["queue-unreachable", "queue-back"]
        assert scene.dispatcher.view.problem is None

    perform(scene_of)


def test_markers_that_can_be_read_say_nothing_of_those_that_cannot() -> None:
    """What runs is looked up each second: those markers lie on a node that answers."""

    async def scene_of(scene: Scene) -> None:
        scene.gateway.takes_s = AWAY_S / 2
        await scene.submit("here")
        await asyncio.sleep(0.5)
        assert scene.gateway.sent == ["here"]
        scene.queue.away = "r"
        await scene.submit("r-1")
        await asyncio.sleep(AWAY_S / 3)
        assert (scene.queue.claimed, scene.told()) == (2, ["queue-unreachable"])
        assert scene.dispatcher.running == 1
        scene.queue.away = ""
        await asyncio.sleep(1.5)
        assert scene.gateway.sent == ["here", "r-1"]

    perform(scene_of)


def test_queue_that_is_away_as_well_is_told_of_while_it_is() -> None:
    async def scene_of(scene: Scene) -> None:
        scene.queue.away = "r"
        await scene.submit("r-1")
        await asyncio.sleep(5)
        scene.store.down = "Redis refuses connections"
        await asyncio.sleep(5)
        assert scene.dispatcher.view.problem == "Redis refuses connections"
        scene.store.down = None
        await asyncio.sleep(5)
        assert "markers" in (scene.dispatcher.view.problem or "")
        scene.queue.away = ""
        await asyncio.sleep(1.5)
        assert scene.gateway.sent == ["r-1"]
        assert scene.told() == ["queue-unreachable", "queue-back"]

    perform(scene_of)


def test_cancelled_meanwhile_is_seen_when_markers_can_be_read() -> None:
    async def scene_of(scene: Scene) -> None:
        scene.queue.away = "r"
        await scene.submit("r-1")
        await asyncio.sleep(5)
        await scene.store.cancel("r-1")
        scene.queue.away = ""
        await asyncio.sleep(1.5)
        assert scene.gateway.sent == []
        assert len(scene.store.lists[scene.store.results]) == 1

    perform(scene_of)
