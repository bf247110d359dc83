"""Requests that are sent in place of others: one call for several requests, or for a piece of one."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from dispatcher.core.merging.shapes import Part, merge_parts
from dispatcher.core.requests.request import Request
from dispatcher.core.sequences.turns import Session


def merge_requests(requests: Sequence[Request], parts: Sequence[Part]) -> Request:
    """Return one request for all: path, headers and id of the first one, and the latest deadline.

    Version and endpoints are also those of the first one, because only requests with equal ones are grouped.
    """
    deadline = max(request.deadline for request in requests)
    sessions = [request.session for request in requests if request.session is not None]
    merged = replace(
        requests[0], payload=merge_parts(_add_sequence_fields(parts, sessions)), deadline=deadline
    )
    return replace(merged, session=_merge_sessions(sessions)) if len(sessions) > 1 else merged


def _merge_sessions(sessions: Sequence[Session]) -> Session:
    """Return the session of a merged call: only the server that all of them may use. The header with the id
    can name one sequence only, so it is left out."""
    token_header = sessions[0].token_header
    token = next((session.sticky_token for session in sessions if session.sticky_token), "")
    return Session({token_header: token} if token else {}, token_header)


def _add_sequence_fields(parts: Sequence[Part], sessions: Sequence[Session]) -> Sequence[Part]:
    """Return the parts with what the server must know about their sequences, if the shape has a place for it.

    A single item has single values. The items of a call of several have lists with a value for each. Of a
    request with several items, only the first one begins the sequence and only the last one ends it.
    """
    name = parts[0].shape.sequence_field
    if not name or not sessions:
        return parts
    ids, starts, ends = list[str](), list[bool](), list[bool]()
    for part, session in zip(parts, sessions, strict=True):
        last = part.size - 1
        ids += [session.sequence_id] * part.size
        starts += [session.is_first and item == 0 for item in range(part.size)]
        ends += [session.is_last and item == last for item in range(part.size)]
    values: dict[str, object] = {"sequence_id": ids, "sequence_start": starts, "sequence_end": ends}
    if len(ids) == 1:
        values = {"sequence_id": ids[0], "sequence_start": starts[0], "sequence_end": ends[0]}
    fields = msgspec.json.decode(b"{%b}" % parts[0].other_fields, type=dict[str, msgspec.Raw])
    parameters = msgspec.json.decode(fields.pop(name, msgspec.Raw(b"{}")), type=dict[str, msgspec.Raw])
    fields[name] = msgspec.Raw(msgspec.json.encode({**parameters, **values}))
    first = replace(parts[0], other_fields=msgspec.json.encode(fields)[1:-1], payload=b"")
    return [first, *parts[1:]]


def build_piece(request: Request, part: Part) -> Request:
    """Return the request with a piece of its list."""
    return replace(request, payload=merge_parts([part]))
