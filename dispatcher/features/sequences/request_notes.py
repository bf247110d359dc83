"""Notes on a request in the queue that belongs to a sequence."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from dispatcher.cli.request_notes import ParsedRequest, RequestNotes
from dispatcher.common.duration import format_duration
from dispatcher.features.sequences.queue import open_sequences
from dispatcher.features.sequences.turns import LANE, SequenceStatus
from dispatcher.requests.found_request import FoundRequest
from dispatcher.requests.request import Request

if TYPE_CHECKING:
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin


class SequenceNotes(RequestNotes):
    def get_json_fields(self, found_request: FoundRequest, parsed: ParsedRequest) -> dict[str, Any]:
        return {"sequence": None if parsed.extra is None else parsed.extra.id}

    def list_details(self, request: Request) -> list[tuple[str, str]]:
        return [("sequence", request.extra.id)] if request.extra else []

    def format_note(self, found_request: FoundRequest, parsed: ParsedRequest) -> str:
        if found_request.location != LANE:
            return ""
        return "waits for its turn" + ("" if parsed.extra is None else f" in {parsed.extra.id}")

    async def explain_obstacle(
        self, admin: RedisQueueAdmin, found_request: FoundRequest, parsed: ParsedRequest
    ) -> str:
        if found_request.location != LANE or parsed.extra is None:
            return ""
        base = f"it waits for its turn in the sequence {parsed.extra.id}"
        if (sequence := await open_sequences(admin).get_sequence(parsed.extra.id)) is None:
            return base
        # Only the first waiting requests of a sequence are listed.
        index = next(
            (index for index, entry in sequence.waiting_requests if entry == found_request.entry), None
        )
        sentence = base if index is None else f"{base}, where it has index {index}"
        if sequence.status is SequenceStatus.HELD:
            cause = f": {sequence.cause}" if sequence.cause else ""
            return f"{sentence}; that is held until an operator releases or aborts it{cause}"
        if sequence.status is SequenceStatus.PARKED:
            of_model = f", or of the max_active for {sequence.override}," if sequence.override else ""
            return (
                f"{sentence}; that is parked: it begins when one of the sequences.max_active{of_model} that "
                "are alive has ended"
            )
        if sequence.next_entry is not None:
            ids = await open_sequences(admin).read_request_ids([sequence.next_entry])
            return (
                f"{sentence}, behind {ids.get(sequence.next_entry, f'entry {sequence.next_entry}')}, which "
                "has it now"
            )
        if sequence.gap_since is not None:
            return (
                f"{sentence}; index {sequence.expected_index} is missing for "
                f"{format_duration(time.time() - sequence.gap_since)}"
            )
        return sentence


NOTES = SequenceNotes()
