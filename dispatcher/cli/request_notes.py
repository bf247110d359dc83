"""Base class of the notes that features add to the description of a request in the queue.

A feature has an object `NOTES` of a subclass in its module `request_notes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatcher.requests.found_request import FoundRequest
from dispatcher.requests.request import Rejection, Request

if TYPE_CHECKING:
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin

ParsedRequest = Request | Rejection


class RequestNotes:
    """Notes of a feature on a request in the queue. Each method has a default that says nothing."""

    def get_json_fields(self, found_request: FoundRequest, parsed: ParsedRequest) -> dict[str, Any]:
        """Return further fields of the JSON. All are always there; `None` means that there is no value."""
        return {}

    def list_details(self, request: Request) -> list[tuple[str, str]]:
        """Return name and value of further lines of `describe`."""
        return []

    def format_note(self, found_request: FoundRequest, parsed: ParsedRequest) -> str:
        """Return the note in a table, if the request waits for something of the feature."""
        return ""

    def describe_progress(self, found_request: FoundRequest) -> str:
        """Return what a user who waits for the result reads, instead of the state of the gate."""
        return ""

    async def explain_obstacle(
        self, admin: RedisQueueAdmin, found_request: FoundRequest, parsed: ParsedRequest
    ) -> str:
        """Return a clause that says what the request waits for in the feature ("it waits for …")."""
        return ""
