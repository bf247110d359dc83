"""Requests that are sent in place of others: one call for several requests, or for a piece of one."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from dispatcher.core.merging.shapes import Part, merge_parts
from dispatcher.core.requests.request import Request


def merge_requests(requests: Sequence[Request], parts: Sequence[Part]) -> Request:
    """Return one request for all: path, headers and id of the first one, and the latest deadline.

    Version and endpoints are also those of the first one, because only requests with equal ones are grouped.
    """
    deadline = max(request.deadline for request in requests)
    return replace(requests[0], payload=merge_parts(parts), deadline=deadline)


def build_piece(request: Request, part: Part) -> Request:
    """Return the request with a piece of its list."""
    return replace(request, payload=merge_parts([part]))
