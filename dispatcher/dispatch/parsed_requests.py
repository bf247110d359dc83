"""Parsed requests that wait in the queue for their turn or their next slice, and need not be parsed again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dispatcher.core.requests.request import Request
    from dispatcher.ports import Lease

MAX_PARSED_BYTES = 16 << 20
"""Maximum size of the members in `ParsedRequestCache`."""


class ParsedRequestCache:
    """Parsed requests, by the number of the request. The oldest are dropped when their members exceed
    `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_PARSED_BYTES) -> None:
        self._max_bytes = max_bytes
        self.size_bytes = 0
        """Size of the members."""
        self._by_entry: dict[int, tuple[bytes, Request]] = {}

    def store_request(self, lease: Lease, request: Request) -> None:
        if not lease.member:  # the member was dropped, see LARGE_MEMBER_BYTES
            return
        # Drop an older entry, so that the size is counted once and the order is by age.
        self.take_request(lease, 0)
        self._by_entry[lease.entry_id] = lease.member, request
        self.size_bytes += len(lease.member)
        while self.size_bytes > self._max_bytes:
            member, _ = self._by_entry.pop(next(iter(self._by_entry)))
            self.size_bytes -= len(member)

    def take_request(self, lease: Lease, max_payload_bytes: int) -> Request | None:
        """Remove and return the parsed request of this lease. `None` if it is not known, has another member,
        or is too long by now."""
        kept = self._by_entry.pop(lease.entry_id, None)
        if kept is None:
            return None
        member, request = kept
        self.size_bytes -= len(member)
        return request if member == lease.member and len(request.payload) <= max_payload_bytes else None
