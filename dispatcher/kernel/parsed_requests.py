"""Parsed requests that returned to the queue for a short time, and need not be parsed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dispatcher.queue.contract import Lease
    from dispatcher.requests.request import Request

MAX_PARSED_BYTES = 16 << 20
"""Maximum size of the members in `ParsedRequestCache`."""


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """Request, and what a feature has found out about it."""

    member: bytes
    request: Request
    remembered: object = None


class ParsedRequestCache:
    """Parsed requests, by the number of the request. The oldest are dropped when their members exceed
    `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_PARSED_BYTES) -> None:
        self._max_bytes = max_bytes
        self.size_bytes = 0
        """Size of the members."""
        self._by_entry: dict[int, ParsedRequest] = {}

    def store_request(self, lease: Lease, request: Request, remembered: object = None) -> None:
        if not lease.member:  # the member was dropped, see LARGE_MEMBER_BYTES
            return
        # Drop an older entry, so that the size is counted once and the order is by age.
        self.take_request(lease, 0)
        self._by_entry[lease.entry_id] = ParsedRequest(lease.member, request, remembered)
        self.size_bytes += len(lease.member)
        while self.size_bytes > self._max_bytes:
            dropped = self._by_entry.pop(next(iter(self._by_entry)))
            self.size_bytes -= len(dropped.member)

    def take_request(self, lease: Lease, max_payload_bytes: int) -> ParsedRequest | None:
        """Remove and return the parsed request of this lease. `None` if it is not known, has another member,
        or is too long by now."""
        parsed = self._by_entry.pop(lease.entry_id, None)
        if parsed is None:
            return None
        self.size_bytes -= len(parsed.member)
        is_same = parsed.member == lease.member
        return parsed if is_same and len(parsed.request.payload) <= max_payload_bytes else None
