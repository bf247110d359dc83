"""A request that is sent in the place of others: one call for several, or for a piece of one. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from dispatcher.core.merging.shapes import Part, merge
from dispatcher.core.requests.request import Request


def together(requests: Sequence[Request], parts: Sequence[Part]) -> Request:
    """One call for all of them: path, headers and id are of the first, the deadline is the last. Version and
    endpoints are the first's too: whoever forms the call lets only equal ones travel together."""
    deadline = max(request.deadline for request in requests)
    return replace(requests[0], payload=merge(parts), deadline=deadline)


def piece(request: Request, part: Part) -> Request:
    """The same request with a piece of its list."""
    return replace(request, payload=merge([part]))
