"""Queue in memory as producers and operators use it, including producers that write to Redis themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from dispatcher.lab.memory_queue import admin_steps as steps
from dispatcher.lab.memory_queue.state import PoolState, QueueState
from dispatcher.queue.keys import QueueNames
from dispatcher.requests.queue_counts import QueueCounts
from dispatcher.requests.submission import Submission

T = TypeVar("T")


class MemoryStore:
    """One queue and its pool. Has the calls of `QueueAdmin` that the tests of dispatchers need.

    `clock`, `unix_origin` and `lease_s` are those of the `PoolState`. While `outage_message` is set, every
    call of every owner raises QueueUnavailableError with it. Result lists have no lifetime here.
    """

    queue_type: type[QueueState] = QueueState

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        unix_origin: float = 0.0,
        lease_s: float = 30.0,
        name: str = "batch:{pool}:requests",
        result_list: str = "batch:{pool}:results",
        allowed_lists: tuple[str, ...] | None = None,
    ) -> None:
        self.pool = PoolState(clock, unix_origin=unix_origin, lease_s=lease_s)
        names = QueueNames(name, result_list, allowed_lists)
        self.queue = self.queue_type(self.pool, names)
        self.default_result_list = result_list
        self.result_lists = self.pool.result_lists

    def __repr__(self) -> str:
        counts = self.queue.count_requests()
        return f"<MemoryStore {self.queue.names.queue} {counts.pending} pending, {counts.leased} leased>"

    @property
    def outage_message(self) -> str | None:
        return self.pool.outage_message

    @outage_message.setter
    def outage_message(self, why: str | None) -> None:
        self.pool.outage_message = why

    def add_member(self, member: bytes, score: float) -> bool:
        """Add a member like ZADD of a foreign producer: without token and wake-up. Return True if it was not
        pending."""
        return self.queue.add_member(member, score)

    def pop_result(self, name: str = "") -> bytes | None:
        """Take a result like RPOP of a consumer. Without a name, from the default list."""
        results = self.result_lists.get(name or self.default_result_list)
        return results.pop() if results else None

    def list_results(self) -> list[bytes]:
        """Return the results of the default list, oldest first."""
        return list(reversed(self.result_lists.get(self.default_result_list, ())))

    async def submit(self, submissions: Sequence[Submission]) -> int:
        self.pool.check_available()
        return steps.submit(self.queue, submissions)

    async def cancel_request(
        self, request_id: str, request_token: str = "", *, is_token_known: bool = False
    ) -> bool:
        self.pool.check_available()
        return steps.cancel_request(self.queue, request_id, request_token, is_token_known=is_token_known)

    async def pause(self, who: str, why: str) -> None:
        self.pool.check_available()
        self.pool.pause = (who, why)
        self.pool.wake_dispatchers()

    async def resume(self) -> None:
        self.pool.check_available()
        self.pool.pause = None
        self.pool.wake_dispatchers()

    async def count_requests(self) -> QueueCounts:
        self.pool.check_available()
        return self.queue.count_requests()
