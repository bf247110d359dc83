"""Queue in memory with sequences and models, for dispatchers in virtual time and for the model tests.

What sequences and models promise is proved on the scripts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from dispatcher.features.models.queue.registry_rules import check_names
from dispatcher.features.models.queue.waiting import LANE as WAITING_FOR_MODEL
from dispatcher.features.models.queue.waiting import MAX_RETURNED_PER_CALL, ModelWait, ReturnedRequests
from dispatcher.features.models.registry import ModelRegistryState, PinRequest
from dispatcher.features.sequences.decisions import SequenceCounters, SequenceCounts, SequenceTerms
from dispatcher.features.sequences.queue.calls import RemainingRequest
from dispatcher.features.sequences.queue.steps import ClaimTurnsResult
from dispatcher.features.sequences.turns import LANE as SEQUENCED
from dispatcher.features.sequences.turns import SequenceSnapshot, Turn
from dispatcher.lab.memory_queue import MemoryQueue as PlainQueue
from dispatcher.lab.memory_queue.entries import AnyLane, Entry, Location
from dispatcher.lab.memory_queue.state import QueueState
from dispatcher.lab.memory_queue.steps import is_cancelled
from dispatcher.queue.constants import CANCEL_TTL_S
from dispatcher.queue.contract import Lease, Release, Settlement
from dispatcher.requests.lanes import shorten_model_name
from dispatcher.requests.queue_counts import QueueCounts
from dispatcher.requests.request import Request, parse_member
from tests.features.memory_queue import sequences
from tests.features.memory_queue.model_registry import MemoryModelRegistry
from tests.features.memory_queue.sequence_rules import SequenceTable
from tests.memory_queue import MemoryStore as PlainStore

T = TypeVar("T")


class FeatureQueueState(QueueState):
    """State of a queue, with what sequences and models keep in it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sequences = SequenceTable()
        self.model_registry = MemoryModelRegistry()
        self.model_waits: dict[int, tuple[str, tuple[str, str]]] = {}
        """Model that each entry waits for, and id and token by which the entry is cancelled meanwhile."""

    def count_requests(self) -> QueueCounts:
        counts, waiting = super().count_requests(), self.count_by_lane[SEQUENCED]
        status_counts, overrides = self.sequences.status_counts, self.sequences.count_overrides()
        of_sequences: dict[type, object] = {
            SequenceCounts: SequenceCounts.from_statuses(status_counts, waiting, overrides),
            SequenceCounters: replace(self.sequences.counters),
        }
        return replace(
            counts, closed=counts.closed + waiting, of_features={**counts.of_features, **of_sequences}
        )

    def count_waiting_by_model(self) -> Mapping[str, int]:
        return Counter(model for model, _ in self.model_waits.values())

    def leave_lane(self, entry: Entry, lane: AnyLane) -> None:
        super().leave_lane(entry, lane)
        self.model_waits.pop(entry.id, None)

    def hold_entry(self, entry: Entry, release: Release) -> None:
        assert isinstance(release.extra, ModelWait)
        entry.closed_lane = WAITING_FOR_MODEL
        self.model_waits[entry.id] = shorten_model_name(release.extra.model), release.cancel_key

    def end_entry(self, entry: Entry, settlement: Settlement, now: float) -> Sequence[Entry]:
        return sequences.end_turn(self, entry, settlement.extra, now)

    def get_extra(self, entry: Entry) -> tuple[int, bytes, bool, bytes]:
        granted = sequences.get_granted_turn(self, entry)
        return granted.index, granted.sticky_token.encode(), granted.is_first, granted.conversation

    def free_entries(self) -> int:
        freed_count = sequences.sweep_sequences(self)
        cancelled = [entry_id for entry_id, (_, key) in self.model_waits.items() if is_cancelled(self, *key)]
        for entry_id in cancelled:
            self.move_entry(self.entries[entry_id], Location.RETURNED)
        return freed_count + len(cancelled)

    def shift_times(self, delta_s: float) -> None:
        super().shift_times(delta_s)
        self.sequences.shift_checks(delta_s)


class MemoryStore(PlainStore):
    """The queue as producers and operators use it, with those calls of features that the tests need."""

    queue_type = FeatureQueueState
    queue: FeatureQueueState

    def open_calls(self, calls: Callable[[Any], T]) -> T:
        """Return this queue, which has the calls of all features itself."""
        itself: Any = self
        return cast("T", itself)

    def _get_queue(self) -> FeatureQueueState:
        self.pool.check_available()
        return self.queue

    async def get_sequence(self, sequence_id: str) -> SequenceSnapshot | None:
        return sequences.get_sequence(self._get_queue(), sequence_id)

    async def release_sequence(self, sequence_id: str) -> bool:
        return sequences.release_sequence(self._get_queue(), sequence_id)

    async def abort_sequence(self, sequence_id: str, why: str) -> bool:
        return sequences.abort_sequence(self._get_queue(), sequence_id, why)

    async def cancel_sequence(
        self, sequence_id: str, submitted_until: float | None = None, claimed_within_s: float = CANCEL_TTL_S
    ) -> bool:
        queue = self._get_queue()
        next_entry = sequences.cancel_sequence(queue, sequence_id, submitted_until, claimed_within_s)
        if next_entry:
            request = parse_member(queue.entries[next_entry].member)
            if isinstance(request, Request) and request.token:
                await self.cancel_request(request.id, request.token, is_token_known=True)
        self.pool.wake_dispatchers()
        return next_entry is not None

    async def forget_sequence(self, sequence_id: str) -> bool | None:
        return sequences.forget_sequence(self._get_queue(), sequence_id)

    async def read_model_registry(self) -> ModelRegistryState:
        return self._get_queue().model_registry.read_state(self.pool.clock())

    async def set_label(self, family: str, label: str, version: str | None, who: str) -> bool:
        check_names(family=family, label=label, version=family if version is None else version)
        registry = self._get_queue().model_registry
        return registry.set_label(self.pool.unix_now(), family, label, version, who)

    async def drain_version(self, model: str, who: str, why: str = "") -> None:
        check_names(model=model)
        self._get_queue().model_registry.drain_version(self.pool.unix_now(), model, who, why)

    async def undrain_version(self, model: str) -> bool:
        return self._get_queue().model_registry.undrain_version(model)


class MemoryQueue(PlainQueue):
    """The queue as one dispatcher uses it."""

    store: MemoryStore
    _queue: FeatureQueueState

    async def claim_turns(
        self, turns: Sequence[tuple[Lease, Turn]], terms: SequenceTerms
    ) -> ClaimTurnsResult:
        caller = self._begin_step()
        decisions = sequences.claim_turns(self._queue, turns, terms)
        return ClaimTurnsResult(decisions, self._count_leases(caller), self._read_shared_state())

    async def find_remaining_requests(self, max_count: int) -> Sequence[RemainingRequest]:
        self._begin_step()
        return sequences.find_remaining_requests(self._queue, max_count)

    async def return_waiting_for_models(self, models: Sequence[str]) -> ReturnedRequests:
        self._begin_step()
        queue, names = self._queue, set(map(shorten_model_name, models))
        waiting = [
            queue.entries[entry_id] for entry_id, (model, _) in queue.model_waits.items() if model in names
        ]
        returned = sorted(waiting, key=lambda entry: (entry.score, entry.id))[:MAX_RETURNED_PER_CALL]
        for entry in returned:
            queue.move_entry(entry, Location.RETURNED)
        return ReturnedRequests(len(returned), len(waiting) - len(returned))

    async def count_waiting_by_model(self) -> Mapping[str, int]:
        self._begin_step()
        return self._queue.count_waiting_by_model()

    async def refresh_warm_markers(
        self,
        keep: Collection[tuple[str, str]],
        remove: Collection[tuple[str, str]],
        models_in_use: Collection[str],
    ) -> ModelRegistryState:
        now, registry = self._begin_step().now, self._queue.model_registry
        return registry.refresh_warm_markers(now, self.owner, keep, remove, models_in_use)

    async def read_model_registry(self) -> ModelRegistryState:
        return self._queue.model_registry.read_state(self._begin_step().now)

    async def take_warm_up_lock(self, model: str, endpoint: str) -> bool:
        now, registry = self._begin_step().now, self._queue.model_registry
        return registry.take_warm_up_lock(now, self.owner, model, endpoint)

    async def mark_warm(self, model: str, endpoint: str) -> None:
        now, registry = self._begin_step().now, self._queue.model_registry
        registry.release_warm_up_lock(now, self.owner, model, endpoint, is_warm=True)

    async def release_warm_up_lock(self, model: str, endpoint: str) -> None:
        now, registry = self._begin_step().now, self._queue.model_registry
        registry.release_warm_up_lock(now, self.owner, model, endpoint, is_warm=False)

    async def pin_versions(self, pins: Sequence[PinRequest]) -> Sequence[str]:
        return self._queue.model_registry.pin_versions(self._begin_step().now, pins)
