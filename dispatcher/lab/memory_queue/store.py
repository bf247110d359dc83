"""Queue in memory as the simulator uses it."""

from __future__ import annotations

from collections.abc import Callable

from dispatcher.lab.memory_queue.state import PoolState, QueueState
from dispatcher.queue.keys import QueueNames


class MemoryStore:
    """One queue and its pool. `clock`, `unix_origin` and `lease_s` are those of the `PoolState`."""

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

    def add_member(self, member: bytes, score: float) -> bool:
        """Add a member like ZADD of a foreign producer: without token and wake-up. Return True if it was not
        pending."""
        return self.queue.add_member(member, score)
