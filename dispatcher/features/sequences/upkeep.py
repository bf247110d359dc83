"""Upkeep of sequences beside their requests: changed settings, events, and answers to what is left of ended
ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatcher.features.sequences.change_log import SequenceChangeLog
from dispatcher.features.sequences.completions import build_remaining_error
from dispatcher.features.sequences.decisions import SequenceCounters, SequenceCounts
from dispatcher.features.sequences.options import SequenceOptions
from dispatcher.features.sequences.overrides import name_override
from dispatcher.features.sequences.queue.calls import SequenceCalls
from dispatcher.features.sequences.queue_steps import SequenceStep
from dispatcher.kernel.maintenance import EXPIRE_BATCH_SIZE, MAX_EXPIRE_BATCHES
from dispatcher.kernel.queue_access import loop_time
from dispatcher.kernel.queue_steps import QueueStep
from dispatcher.limit.health import Cause, WaitingReason
from dispatcher.telemetry.events import Event, emit

if TYPE_CHECKING:
    from dispatcher.kernel.context import KernelContext
    from dispatcher.queue.contract import Settlement, UnleasedRequest
    from dispatcher.requests.queue_counts import QueueCounts
    from dispatcher.requests.request import Request
    from dispatcher.wire_format import ErrorCode

SEQUENCES = Cause("sequences", "`batch-dispatcher sequences show`")


class SequenceUpkeep:
    """Upkeep of sequences in one process."""

    def __init__(self, context: KernelContext) -> None:
        self._context = context
        self._access = context.access
        self._calls = context.access.queue.open_calls(SequenceCalls)
        self._log = SequenceChangeLog()
        self.reconfigure()
        self._shared_terms = self._terms
        """Terms that the queue has, or gets with the first request of a sequence."""

    def reconfigure(self) -> None:
        """Use new options."""
        self._terms = self._context.options.of(SequenceOptions).terms

    def name_override(self, request: Request) -> Request:
        """Return the request with the override of the settings that applies to its sequence."""
        if not self._terms.overrides:
            return request
        return name_override(request, self._terms, self._context.options.default_path)

    def log_events(self, counts: QueueCounts) -> None:
        for event, fields in self._log.collect_events(counts.of(SequenceCounters), loop_time()):
            emit(event, **fields)

    def explain_waiting(self, counts: QueueCounts) -> WaitingReason | None:
        """Return why requests wait for their turn. `None` if none do."""
        waiting = counts.of(SequenceCounts).waiting
        if not waiting:
            return None
        requests = "request waits" if waiting == 1 else "requests wait"
        return WaitingReason(SEQUENCES, f"{waiting:,} {requests} for a turn in a sequence")

    async def after_sweep(self) -> None:
        await self._send_changed_terms()
        await self._answer_remaining()

    async def _send_changed_terms(self) -> None:
        """Send changed settings of sequences to the queue, so that waiting requests follow them without a new
        request."""
        terms = self._terms
        if self._shared_terms == terms:
            return
        asked_at = self._access.clock()
        reply = await self._access.call_queue(SequenceStep.CLAIM_TURNS, self._calls.claim_turns([], terms))
        if reply is not None:
            self._shared_terms = terms
            self._access.record_sign_of_life(asked_at)
            self._access.update_from_reply(reply)

    async def _answer_remaining(self) -> None:
        """Answer the remaining requests of sequences that have ended."""
        for _ in range(MAX_EXPIRE_BATCHES):
            found = (
                await self._access.call_queue(
                    SequenceStep.FIND_REMAINING, self._calls.find_remaining_requests(EXPIRE_BATCH_SIZE)
                )
                or ()
            )
            by_code: dict[ErrorCode, list[tuple[UnleasedRequest, Settlement]]] = {}
            for remaining in found:
                try:
                    settlement = self._context.end_request(build_remaining_error(remaining))
                except Exception as error:  # it must not hold up the others
                    emit(Event.INTERNAL_ERROR, where="remaining request", error=repr(error))
                    continue
                by_code.setdefault(remaining.error_code, []).append((remaining.request, settlement))
            ended_count = 0
            for code, items in by_code.items():
                answered_count = (
                    await self._access.call_queue(
                        QueueStep.SETTLE_UNLEASED, self._access.queue.settle_unleased(items)
                    )
                    or 0
                )
                self._context.journal.record_unsent(code, answered_count)
                ended_count += answered_count
            if not ended_count:
                return
