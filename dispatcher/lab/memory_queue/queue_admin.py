"""Queue in memory as producers and operators use it, including producers that write to Redis themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from dispatcher.features.models.queue.registry_rules import check_names
from dispatcher.features.models.registry import ModelRegistryState
from dispatcher.features.sequences.turns import SequenceSnapshot
from dispatcher.lab.memory_queue import admin_steps as steps
from dispatcher.lab.memory_queue import sequences
from dispatcher.lab.memory_queue.state import PoolState, QueueState
from dispatcher.lab.memory_queue.steps import count_waiting_by_model
from dispatcher.queue.constants import CANCEL_TTL_S
from dispatcher.queue.keys import QueueNames
from dispatcher.requests.queue_counts import QueueCounts
from dispatcher.requests.submission import Submission

T = TypeVar("T")


class MemoryStore:
    """One queue and its pool. Has the calls of `QueueAdmin` that the tests of dispatchers need.

    `clock`, `unix_origin` and `lease_s` are those of the `PoolState`. While `outage_message` is set, every
    call of every owner raises QueueUnavailableError with it. Result lists have no lifetime here.
    """

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
        self.queue = QueueState(self.pool, names)
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

    def open_calls(self, calls: Callable[[Any], T]) -> T:
        """Return this queue, which has the calls of all features itself."""
        itself: Any = self
        return cast("T", itself)

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

    async def count_waiting_by_model(self) -> Mapping[str, int]:
        self.pool.check_available()
        return count_waiting_by_model(self.queue)

    async def get_sequence(self, sequence_id: str) -> SequenceSnapshot | None:
        self.pool.check_available()
        return sequences.get_sequence(self.queue, sequence_id)

    async def release_sequence(self, sequence_id: str) -> bool:
        self.pool.check_available()
        return sequences.release_sequence(self.queue, sequence_id)

    async def abort_sequence(self, sequence_id: str, why: str) -> bool:
        self.pool.check_available()
        return sequences.abort_sequence(self.queue, sequence_id, why)

    async def cancel_sequence(
        self, sequence_id: str, submitted_until: float | None = None, claimed_within_s: float = CANCEL_TTL_S
    ) -> bool:
        self.pool.check_available()
        return sequences.cancel_sequence(self.queue, sequence_id, submitted_until, claimed_within_s)

    async def forget_sequence(self, sequence_id: str) -> bool | None:
        self.pool.check_available()
        return sequences.forget_sequence(self.queue, sequence_id)

    async def read_model_registry(self) -> ModelRegistryState:
        self.pool.check_available()
        return self.pool.model_registry.read_state(self.pool.clock())

    async def set_label(self, family: str, label: str, version: str | None, who: str) -> bool:
        self.pool.check_available()
        check_names(family=family, label=label, version=family if version is None else version)
        return self.pool.model_registry.set_label(self.pool.unix_now(), family, label, version, who)

    async def drain_version(self, model: str, who: str, why: str = "") -> None:
        self.pool.check_available()
        check_names(model=model)
        self.pool.model_registry.drain_version(self.pool.unix_now(), model, who, why)

    async def undrain_version(self, model: str) -> bool:
        self.pool.check_available()
        return self.pool.model_registry.undrain_version(model)
