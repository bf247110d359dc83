"""Parts of several features take part in one lease, one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from dispatcher.gateway.contract import AttemptResult
from dispatcher.kernel import Dispatcher, Journal, Options
from dispatcher.kernel.claimed_request import ClaimedRequest
from dispatcher.kernel.hooks import Hooks, LeasePart
from dispatcher.kernel.in_flight import Attempt
from dispatcher.lab.memory_queue import MemoryQueue
from dispatcher.lab.simulation.virtual_loop import run_in_virtual_time
from dispatcher.requests.outcomes.outcome import Delivered, RetryPolicy
from dispatcher.requests.request import Request
from dispatcher.requests.result import decode_result
from dispatcher.telemetry.events import Event, divert_events
from dispatcher.telemetry.metrics import Metrics
from tests.kernel.scene import HeaderGateway, open_limiter
from tests.memory_queue import MemoryStore
from tests.queue.factories import member


class NamedPart(LeasePart):
    """Part that writes its name into a header of each request, or answers it before it is sent."""

    def __init__(self, name: str, *, answers: bool = False) -> None:
        self.name, self.answers = name, answers
        self.leases: set[str] = set()

    def look_up(self, requests: list[ClaimedRequest]) -> None: ...

    def apply(self, requests: list[ClaimedRequest]) -> list[ClaimedRequest]:
        self.leases |= {claimed.entry.lease.token for claimed in requests}
        return requests

    def forget_lease(self, token: str) -> None:
        self.leases.remove(token)

    async def prepare(
        self, attempt: Attempt, request: Request, deadline: float, may_send: Callable[[], bool]
    ) -> Request | AttemptResult:
        if self.answers:
            now = asyncio.get_running_loop().time()
            return AttemptResult(Delivered(204, b"{}"), now, now)
        return replace(request, headers={**request.headers, self.name: "yes"})


class FaultyPart(NamedPart):
    """Part that raises an exception each time it has forgotten a lease."""

    def forget_lease(self, token: str) -> None:
        super().forget_lease(token)
        raise RuntimeError("a defect")


def run_with_parts(*parts: NamedPart) -> tuple[HeaderGateway, int | None]:
    """Send one request. Return the gateway, and the status of the result."""
    gateway, statuses = HeaderGateway(), []

    async def main() -> None:
        store = MemoryStore(clock=asyncio.get_running_loop().time)
        dispatcher = Dispatcher(
            MemoryQueue(store, "a"),
            gateway,
            open_limiter(),
            Options(RetryPolicy()),
            Journal(Metrics()),
            build_hooks=lambda _context: Hooks(stages=parts, lease_parts=parts),
        )
        store.add_member(member("r-1"), 1.0)
        task = asyncio.create_task(dispatcher.run())
        await asyncio.sleep(1)
        while (popped := store.pop_result()) is not None:
            statuses.append(decode_result(popped).status_code)
        dispatcher.drain(1.0)
        await task

    run_in_virtual_time(main(), start=2.0)
    assert [part.leases for part in parts] == [set() for _ in parts], "each lease is forgotten once"
    (status,) = statuses
    return gateway, status


def test_each_part_prepares_what_the_part_before_it_has_prepared() -> None:
    gateway, status = run_with_parts(NamedPart("x-first"), NamedPart("x-second"))
    assert (gateway.headers, status) == ({"r-1": {"x-first": "yes", "x-second": "yes"}}, 200)


def test_request_that_a_part_has_answered_is_not_sent() -> None:
    gateway, status = run_with_parts(NamedPart("x-first", answers=True), NamedPart("x-second"))
    assert (gateway.headers, status) == ({}, 204)


def test_exception_of_a_part_that_forgets_a_lease_concerns_no_other_part() -> None:
    events: list[Event] = []
    with divert_events(lambda event, _: events.append(event)):
        _, status = run_with_parts(FaultyPart("x-first"), NamedPart("x-second"))
    assert status == 200
    assert events.count(Event.INTERNAL_ERROR) == 1
