"""Requests that are sent in place of others: one call for several requests, or for a piece of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from dispatcher.features.merging import shapes
from dispatcher.features.merging.shapes import BODY_ERRORS, Part, Shape, merge_parts
from dispatcher.requests.affinity import Affinity
from dispatcher.requests.json_fields import check_utf8, parse_fields
from dispatcher.requests.request import Request

if TYPE_CHECKING:
    from dispatcher.features.merging.rules import BatchRule

_SEQUENCE_FIELDS = ("sequence_id", "sequence_start", "sequence_end")
_NO_SEQUENCE = (b"null", b"false", b"0", b'""')
"""Values with which a request belongs to no sequence."""


def merge_requests(requests: Sequence[Request], parts: Sequence[Part]) -> Request:
    """Return one request for all: path, headers and id of the first one, and the latest deadline.

    Version and endpoints are also those of the first one, because only requests with equal ones are grouped.
    """
    deadline = max(request.deadline for request in requests)
    affinities = [request.affinity for request in requests if request.affinity is not None]
    merged = replace(
        requests[0], payload=merge_parts(_add_sequence_fields(parts, affinities)), deadline=deadline
    )
    return replace(merged, affinity=_merge_affinities(affinities)) if len(affinities) > 1 else merged


def _merge_affinities(affinities: Sequence[Affinity]) -> Affinity:
    """Return the affinity of a merged call: only the server that all of them may use. The header with the id
    can name one sequence only, so it is left out."""
    token_header = affinities[0].token_header
    token = next((affinity.sticky_token for affinity in affinities if affinity.sticky_token), "")
    return Affinity({token_header: token} if token else {}, token_header)


def _add_sequence_fields(parts: Sequence[Part], affinities: Sequence[Affinity]) -> Sequence[Part]:
    """Return the parts with what the server must know about their sequences, if the shape has a place for it.

    A single item has single values. The items of a call of several have lists with a value for each. Of a
    request with several items, only the first one begins the sequence and only the last one ends it.
    """
    name = parts[0].shape.sequence_field
    if not name or not affinities:
        return parts
    ids, starts, ends = list[str](), list[bool](), list[bool]()
    for part, affinity in zip(parts, affinities, strict=True):
        last = part.size - 1
        ids += [affinity.group_id] * part.size
        starts += [affinity.is_first and item == 0 for item in range(part.size)]
        ends += [affinity.is_last and item == last for item in range(part.size)]
    lists = (ids, starts, ends)
    values = dict(zip(_SEQUENCE_FIELDS, lists if len(ids) > 1 else [each[0] for each in lists], strict=True))
    fields = msgspec.json.decode(b"{%b}" % parts[0].other_fields, type=dict[str, msgspec.Raw])
    parameters = msgspec.json.decode(fields.pop(name, msgspec.Raw(b"{}")), type=dict[str, msgspec.Raw])
    fields[name] = msgspec.Raw(msgspec.json.encode({**parameters, **values}))
    first = replace(parts[0], other_fields=msgspec.json.encode(fields)[1:-1], payload=b"")
    return [first, *parts[1:]]


def check_sequence_fields(shape: Shape, payload: bytes) -> str:
    """Return why a producer may not send this body to a server that finds the state of a sequence by fields
    that the dispatcher writes. Empty if the body has none of these fields."""
    name = shape.sequence_field
    try:
        parameters = parse_fields(check_utf8(payload)).get(name, msgspec.Raw(b"null"))
        values = parse_fields(bytes(parameters)) if bytes(parameters)[:1] == b"{" else {}
    except BODY_ERRORS:
        return f"data.payload: the fields cannot be read without doubt, so {name} might name a sequence"
    for field in _SEQUENCE_FIELDS:
        if bytes(values.get(field, msgspec.Raw(b"null"))) not in _NO_SEQUENCE:
            return f"data.payload: {name}.{field} is written by the dispatcher: use data.sequence"
    return ""


def build_piece(request: Request, part: Part) -> Request:
    """Return the request with a piece of its list."""
    return replace(request, payload=merge_parts([part]))


def join_copies(rule: BatchRule, body: bytes, max_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield a request merged with itself, once for each size that the rule prefers, with the number of
    copies."""
    part = shapes.parse_part(rule.shape, body)
    if isinstance(part, shapes.Unfit):
        return
    grouping = rule.grouping
    largest = min(grouping.max_size, rule.max_items or grouping.max_size)
    sizes = {size for size in grouping.preferred_sizes if size <= largest} or {largest}
    for count in sorted({size // part.size for size in sizes}):
        fits = count * part.tokens <= grouping.max_weight and count * len(body) <= max_bytes
        if count > 1 and fits:
            yield shapes.merge_parts([part] * count), count
