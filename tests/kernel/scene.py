"""A scene in virtual time: a dispatcher, a queue in memory, and a gateway that answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

from dispatcher.gateway.contract import AttemptResult
from dispatcher.kernel import Dispatcher, Journal, Options
from dispatcher.kernel.loop import build_feature_hooks
from dispatcher.lab.memory_queue import MemoryQueue
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.limit.budget import Policy, Reading, Signal
from dispatcher.limit.limiter import Limiter
from dispatcher.queue.contract import ClaimResult, Lease, Permit
from dispatcher.requests.outcomes.outcome import Delivered, RetryPolicy, Unreachable
from dispatcher.requests.request import Request, encode_member
from dispatcher.requests.submission import QueueUnavailableError, Submission
from dispatcher.telemetry.events import Event, divert_events
from dispatcher.telemetry.metrics import Metrics
from tests.memory_queue import MemoryStore

T = TypeVar("T")


class QueueWithUnreadableMarkers(MemoryQueue):
    """Queue whose cancel markers can be unreadable, some as if their Cluster node did not answer, or all."""

    unreadable_prefixes = ""
    """First letters of the request ids whose cancel markers cannot be read."""
    are_all_markers_unreadable = False
    """True if every lookup of cancel markers fails, such as for a missing permission."""
    claimed_count = 0
    """Number of leases that claims have returned."""
    highest_delivery = 0
    """Highest number of deliveries of a claimed request."""
    cancel_check_count = 0
    """Number of calls that look up cancel markers."""

    async def claim(self, max_count: int, nonce: str, permit: Permit, **options: Any) -> ClaimResult:
        claimed = await super().claim(max_count, nonce, permit, **options)
        self.claimed_count += len(claimed.leases)
        self.highest_delivery = max([self.highest_delivery, *(each.deliveries for each in claimed.leases)])
        return claimed

    async def check_cancelled(self, requests: Sequence[tuple[str, str]]) -> Sequence[Any]:
        self.cancel_check_count += 1
        error = QueueUnavailableError("Redis did not answer in time")
        if self.are_all_markers_unreadable:
            await asyncio.sleep(0.1)
            raise error
        return [
            error if request_id.startswith(tuple(self.unreadable_prefixes)) else flag
            for (request_id, _), flag in zip(requests, await super().check_cancelled(requests), strict=True)
        ]


class AnsweringGateway:
    """Gateway that answers every request with status 200."""

    answer_after_s = 0.0
    """Time from the request to its answer."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        """Ids of the requests, in the order in which they were sent."""

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: object
    ) -> AttemptResult:
        sent_at = asyncio.get_running_loop().time()
        self.sent.append(request.id)
        await asyncio.sleep(self.answer_after_s)
        return AttemptResult(Delivered(200, b"{}"), sent_at, asyncio.get_running_loop().time())

    def get_connected_at(self, token: str) -> float | None:
        return None

    def resize_connection_pool(self, max_requests: int) -> None: ...


class HeaderGateway(AnsweringGateway):
    """Gateway that notes the headers of each request."""

    def __init__(self) -> None:
        super().__init__()
        self.headers: dict[str, dict[str, str]] = {}

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: object
    ) -> AttemptResult:
        self.headers[request.id] = dict(request.headers)
        return await super().forward(request, token=token, deadline=deadline, may_send=may_send)


class UnreachableGateway(AnsweringGateway):
    """Gateway that cannot be reached while `is_unreachable` is true."""

    is_unreachable = True

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: object
    ) -> AttemptResult:
        result = await super().forward(request, token=token, deadline=deadline, may_send=may_send)
        return result.copy_with(outcome=Unreachable("no connection")) if self.is_unreachable else result


def open_limiter() -> Limiter:
    """Return a limiter whose only reading, taken at 1 s, shows an empty pool of ten."""
    limiter = Limiter(Policy(max_sys=10, max_age_s=1e6), [Signal.REQUESTS])
    limiter.add_reading(Reading(Signal.REQUESTS, 1.0, 1.0, 0.0, 0.0, 10), 1.0)
    return limiter


def lease(entry_id: int = 1, **changes: Any) -> Lease:
    """Return a lease of the first delivery, with the token `t-<entry_id>`."""
    first_lease = Lease(
        entry_id, f"t-{entry_id}", b"", 0.0, deliveries=1, failed_attempts=0, refusals=0, deaths_as_suspect=0
    )
    return first_lease.copy_with(**changes)


def request(number: int = 1, **changes: Any) -> Request:
    return Request(**{"id": f"r-{number}", "deadline": 10**10, "payload": b"{}", **changes})


def find_part(dispatcher: Dispatcher, kind: type[T]) -> T:
    """Return the part of this type that a feature has in the dispatcher."""
    hooks = dispatcher.context.hooks
    return next(part for part in (*hooks.lease_parts, *hooks.loads) if isinstance(part, kind))


class Scene:
    """A running dispatcher and everything that it talks to."""

    store_type: type[MemoryStore] = MemoryStore
    queue_type: type[QueueWithUnreadableMarkers] = QueueWithUnreadableMarkers
    build_hooks = staticmethod(build_feature_hooks)

    def __init__(
        self,
        gateway: AnsweringGateway | None = None,
        options: Options | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.events: list[tuple[Event, Mapping[str, Any]]] = []
        self.store = self.store_type(clock=loop.time)
        self.queue, self.gateway = self.queue_type(self.store, "a"), gateway or AnsweringGateway()
        self.limiter, self.metrics = open_limiter(), Metrics()
        self.dispatcher = Dispatcher(
            self.queue,
            self.gateway,
            self.limiter,
            options or Options(RetryPolicy()),
            Journal(self.metrics),
            build_hooks=self.build_hooks,
        )
        self.task = asyncio.create_task(self.dispatcher.run())

    async def wait_until_finished(self) -> None:
        """Wait until the dispatcher has stopped."""
        await self.task

    async def submit(self, *request_ids: str) -> None:
        deadline = int(time.time()) + 10**6
        await self.store.submit(
            [
                Submission(
                    encode_member(request_id, b"{}", deadline, token="t"),
                    float(deadline),
                    request_id,
                    "t",
                    deadline,
                )
                for request_id in request_ids
            ]
        )

    def list_queue_events(self) -> list[str]:
        """Return the names of the log events about the queue, in order."""
        return [event.event_name for event, _ in self.events if event.event_name.startswith("queue-")]

    @classmethod
    def run(
        cls,
        check: Callable[[Self], Awaitable[None]],
        gateway: AnsweringGateway | None = None,
        options: Options | None = None,
    ) -> None:
        """Run `check` beside the dispatcher, then drain it and wait until it has stopped."""

        async def main() -> None:
            events: list[tuple[Event, Mapping[str, Any]]] = []
            with divert_events(lambda event, fields: events.append((event, fields))):
                scene = cls(gateway, options)
                scene.events = events
                await check(scene)
                scene.dispatcher.drain(1.0)
                await scene.wait_until_finished()

        run_in_virtual_time(main(), start=2.0)


run_in_scene = Scene.run


async def read_results(scene: Scene) -> dict[str, dict[str, Any]]:
    """Return all results of the default list by the id of their request."""
    results = [json.loads(each) for each in scene.store.list_results()]
    return {result["id"]: result for result in results}
