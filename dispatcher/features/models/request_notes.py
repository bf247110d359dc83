"""Notes on a request in the queue that waits for its model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatcher.cli.request_notes import ParsedRequest, RequestNotes
from dispatcher.features.models.queue.waiting import LANE
from dispatcher.requests.found_request import FoundRequest

if TYPE_CHECKING:
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin


class ModelNotes(RequestNotes):
    def get_json_fields(self, found_request: FoundRequest, parsed: ParsedRequest) -> dict[str, Any]:
        return {"missing_model": found_request.missing_model or None}

    def format_note(self, found_request: FoundRequest, parsed: ParsedRequest) -> str:
        if found_request.location != LANE:
            return ""
        return f"waits for its model {found_request.missing_model!r}"

    def describe_progress(self, found_request: FoundRequest) -> str:
        if found_request.location != LANE:
            return ""
        # The reason why the model cannot be used, as a dispatcher recorded it.
        return found_request.reason or f"its model {found_request.missing_model!r} is not served"

    async def explain_obstacle(
        self, admin: RedisQueueAdmin, found_request: FoundRequest, parsed: ParsedRequest
    ) -> str:
        reason = self.describe_progress(found_request)
        return f"it waits, because {reason}" if reason else ""


NOTES = ModelNotes()
