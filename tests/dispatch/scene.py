"""A dispatcher, a queue in memory whose markers may be away, and a gateway, in virtual time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from dispatcher.core.gateway.outcome import Delivered, RetryPolicy
from dispatcher.core.limit.budget import Policy, Reading, Signal
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.requests.request import Request, encode_member
from dispatcher.dispatch import Dispatcher, Journal, Options
from dispatcher.lab.memory_queue import MemoryQueue, MemoryStore
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.ports import (
    AttemptResult,
    ClaimResult,
    Lease,
    ModelServers,
    Permit,
    QueueUnavailableError,
    Submission,
)
from dispatcher.telemetry.events import Event, divert_events
from dispatcher.telemetry.metrics import Metrics


class MarkersApart(MemoryQueue):
    """Markers of ids that begin with one of these letters lie on nodes that are away."""

    away = ""
    record_claim = looked_up = 0

    async def claim(self, max_count: int, nonce: str, permit: Permit, **how: Any) -> ClaimResult:
        claimed = await super().claim(max_count, nonce, permit, **how)
        self.record_claim += len(claimed.leases)
        return claimed

    async def check_cancelled(self, requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
        self.looked_up += 1
        if any(name.startswith(letter) for name, _ in requests for letter in self.away):
            await asyncio.sleep(0.1)
            raise QueueUnavailableError("Redis did not answer in time")
        return await super().check_cancelled(requests)


class Answers:
    """A gateway that answers after so long."""

    takes_s = 0.0

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: object
    ) -> AttemptResult:
        began = asyncio.get_running_loop().time()
        self.sent.append(request.id)
        await asyncio.sleep(self.takes_s)
        return AttemptResult(Delivered(200, b"{}"), began, asyncio.get_running_loop().time())

    def get_connected_at(self, token: str) -> float | None:
        return None

    def resize_connection_pool(self, max_requests: int) -> None: ...


def open_limiter() -> Limiter:
    """It has read at 1 s that a pool of ten is empty, and is told nothing more."""
    limiter = Limiter(Policy(max_sys=10, max_age_s=1e6), [Signal.REQUESTS])
    limiter.add_reading(Reading(Signal.REQUESTS, 1.0, 1.0, 0.0, 0.0, 10), 1.0)
    return limiter


def lease(entry: int = 1, **changes: Any) -> Lease:
    """One of its first delivery, by a token of its own."""
    first = Lease(
        entry, f"t-{entry}", b"", 0.0, deliveries=1, failed_attempts=0, refusals=0, deaths_as_suspect=0
    )
    return first.copy_with(**changes)


def request(number: int = 1, **changes: Any) -> Request:
    return Request(**{"id": f"r-{number}", "deadline": 10**10, "payload": b"{}", **changes})


class Scene:
    def __init__(
        self,
        gateway: Answers | None = None,
        options: Options | None = None,
        servers: ModelServers | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.events: list[tuple[Event, Mapping[str, Any]]] = []
        self.store = MemoryStore(clock=loop.time)
        self.queue, self.gateway = MarkersApart(self.store, "a"), gateway or Answers()
        self.limiter = open_limiter()
        self.dispatcher = Dispatcher(
            self.queue,
            self.gateway,
            self.limiter,
            options or Options(RetryPolicy()),
            Journal(Metrics()),
            servers=servers,
        )
        self.task = asyncio.create_task(self.dispatcher.run())

    async def record_completion(self) -> None:
        await self.task

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
        return [event.event_name for event, _ in self.events if event.event_name.startswith("queue-")]


def perform(
    scene_of: Callable[[Scene], Awaitable[None]],
    gateway: Answers | None = None,
    options: Options | None = None,
    *,
    servers: ModelServers | None = None,
) -> None:
    async def main() -> None:
        events: list[tuple[Event, Mapping[str, Any]]] = []
        with divert_events(lambda event, fields: events.append((event, fields))):
            scene = Scene(gateway, options, servers)
            scene.events = events
            await scene_of(scene)
            scene.dispatcher.drain(1.0)
            await scene.record_completion()

    run_in_virtual_time(main(), start=2.0)
