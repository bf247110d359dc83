"""Queue in memory as producers and operators use it, including producers that write to Redis themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dispatcher.core.requests.found_request import FoundRequest, Looked, Whereabouts, Words
from dispatcher.core.sequences.decisions import SequencePage
from dispatcher.core.sequences.turns import SequenceSeen, SequenceStatus
from dispatcher.lab.memory_queue import admin_steps as steps
from dispatcher.lab.memory_queue import search, sequences
from dispatcher.lab.memory_queue.state import Line, Pool
from dispatcher.lab.memory_queue.steps import awaited
from dispatcher.ports import Counts, Dead, ModelMarks, Submission
from dispatcher.queue.constants import CANCEL_TTL_S
from dispatcher.queue.keys import Names
from dispatcher.queue.model_registry import check_names


class MemoryStore:
    """One queue and its pool. Implements `ports.QueueAdmin`.

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
        results: str = "batch:{pool}:results",
        lists: tuple[str, ...] | None = None,
        dead_max: int = 100_000,
        max_payload_bytes: int = 16 << 20,
        pool: Pool | None = None,
    ) -> None:
        """`pool` is that of another queue, to share its limit; its clock and lease time are used then."""
        self.pool = pool or Pool(clock, unix_origin=unix_origin, lease_s=lease_s)
        names = Names(name, results, lists)
        self.line = Line(self.pool, names, dead_max=dead_max, max_payload_bytes=max_payload_bytes)
        self.results = results
        self.lists = self.pool.lists

    def __repr__(self) -> str:
        counts = self.line.counts()
        return f"<MemoryStore {self.line.names.queue} {counts.pending} pending, {counts.leased} leased>"

    @property
    def down(self) -> str | None:
        return self.pool.down

    @down.setter
    def down(self, why: str | None) -> None:
        self.pool.down = why

    def add(self, member: bytes, score: float) -> bool:
        """Add a member like ZADD of a foreign producer: without token and wake-up. Return True if it was not
        pending."""
        return self.line.add(member, score)

    def pop(self, name: str = "") -> bytes | None:
        """Take a result like RPOP of a consumer. Without a name, from the default list."""
        results = self.lists.get(name or self.results)
        return results.pop() if results else None

    async def submit(self, submissions: Sequence[Submission]) -> int:
        self.pool.check_up()
        return steps.submit(self.line, submissions)

    async def cancel(self, request_id: str, request_token: str = "", *, found: bool = False) -> bool:
        self.pool.check_up()
        return steps.cancel(self.line, request_id, request_token, found=found)

    async def pause(self, by: str, why: str) -> None:
        self.pool.check_up()
        self.pool.pause = (by, why)
        self.pool.wake()

    async def resume(self) -> None:
        self.pool.check_up()
        self.pool.pause = None
        self.pool.wake()

    async def paused(self) -> tuple[str, str] | None:
        self.pool.check_up()
        return self.pool.pause

    async def peek(self, most: int) -> Sequence[tuple[float, bytes]]:
        self.pool.check_up()
        return steps.peek(self.line, most)

    async def lying(self, state: Whereabouts, most: int, after: str = "", *, whole: bool = False) -> Looked:
        self.pool.check_up()
        return search.lying(self.line, state, most, after)

    async def near(self, request_id: str, after: str = "") -> Looked:
        self.pool.check_up()
        return search.near(self.line, request_id)

    async def search(
        self, words: Words, after: str = "", *, entries_only: bool = False, whole: bool = False
    ) -> Looked:
        self.pool.check_up()
        return search.search(self.line, words, entries_only=entries_only)

    async def ahead(self, found: FoundRequest) -> int | None:
        self.pool.check_up()
        return search.ahead(self.line, found)

    async def restore(self, queue: str, requests: Sequence[FoundRequest]) -> int:
        self.pool.check_up()
        return search.restore(self.line, queue, requests)

    async def read_results(self, name: str, most: int, after: int = 0) -> Sequence[bytes]:
        self.pool.check_up()
        return search.results(self.line, name, most, after)

    async def take_result(self, name: str, result: bytes) -> bool:
        self.pool.check_up()
        return search.take(self.line, name, result)

    async def counts(self) -> Counts:
        self.pool.check_up()
        return self.line.counts()

    async def awaited(self) -> Mapping[str, int]:
        self.pool.check_up()
        return awaited(self.line)

    async def sequences(
        self, most: int, after: str = "", status: SequenceStatus | None = None
    ) -> SequencePage:
        self.pool.check_up()
        return sequences.page(self.line, most, after, status)

    async def sequence(self, sequence_id: str) -> SequenceSeen | None:
        self.pool.check_up()
        return sequences.show(self.line, sequence_id)

    async def release_sequence(self, sequence_id: str) -> bool:
        self.pool.check_up()
        return sequences.release(self.line, sequence_id)

    async def abort_sequence(self, sequence_id: str, why: str) -> bool:
        self.pool.check_up()
        return sequences.abort(self.line, sequence_id, why)

    async def cancel_sequence(
        self, sequence_id: str, at: float | None = None, for_s: float = CANCEL_TTL_S
    ) -> bool:
        self.pool.check_up()
        return sequences.cancel(self.line, sequence_id, at, for_s)

    async def forget_sequence(self, sequence_id: str) -> bool | None:
        self.pool.check_up()
        return sequences.forget(self.line, sequence_id)

    async def model_marks(self) -> ModelMarks:
        self.pool.check_up()
        return self.pool.board.look(self.pool.clock())

    async def label(self, family: str, label: str, version: str | None, who: str) -> bool:
        self.pool.check_up()
        check_names(family=family, label=label, version=family if version is None else version)
        return self.pool.board.label(self.pool.unix_now(), family, label, version, who)

    async def drain(self, model: str, who: str, why: str = "") -> None:
        self.pool.check_up()
        check_names(model=model)
        self.pool.board.drain(self.pool.unix_now(), model, who, why)

    async def undrain(self, model: str) -> bool:
        self.pool.check_up()
        return self.pool.board.undrain(model)

    async def dead_list(self, most: int, after: int = 0) -> Sequence[Dead]:
        self.pool.check_up()
        return steps.dead_after(self.line, after, most)

    async def dead_newest(self, most: int) -> Sequence[Dead]:
        self.pool.check_up()
        return steps.dead_newest(self.line, most)

    async def dead_requeue(self, entries: Sequence[int], deadline: int) -> int:
        self.pool.check_up()
        return sum(steps.requeue(self.line, entry, deadline) for entry in entries)

    async def dead_purge(self, entries: Sequence[int] | None = None) -> int:
        self.pool.check_up()
        return steps.purge(self.line, entries)
