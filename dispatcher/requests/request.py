"""Parse the queue's envelope: a member becomes a `Request`, or a `Rejection`.

`docs/reference/queue-contract.md` describes the format. Two rules shape this module. The payload is never
decoded: it is sent with the bytes it came in. And parsing never raises, whatever a producer wrote, because a
member that raises would stop all other requests of the queue.

A member with a duplicate of a known field is rejected: JSON parsers disagree about which one counts, and a
request must not be cancelled under one id and answered under another. Inside `headers`, `metadata` and
`labels` the last one counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import msgspec

from dispatcher.common.printable import truncate_text
from dispatcher.features import import_modules
from dispatcher.requests.affinity import Affinity
from dispatcher.requests.duplicate_keys import collect_outer_keys
from dispatcher.requests.headers import NAME as HEADER_NAME
from dispatcher.requests.headers import VALUE as HEADER_VALUE
from dispatcher.requests.oversize import MAX_ENVELOPE_BYTES, parse_cut_size
from dispatcher.requests.score import PRIORITY_STEP
from dispatcher.requests.submission_time import parse_submission_time
from dispatcher.requests.surrogates import replace_surrogates
from dispatcher.wire_format import ErrorCode

MAX_ID_BYTES = 1024
"""An id is part of two Redis keys and is sent as a header. A longer one would be refused by the gateway."""
MAX_HEADERS_CHARS = 16_384
"""Limit for names and values of a request's own headers. Gateways refuse longer ones, and some close the
connection."""
_MESSAGE_CHARS = 200


class MemberExtra(Protocol):
    """Part of a member that a feature has read: how the request belongs together with others."""

    @property
    def key(self) -> str:
        """Name that the requests that belong together share."""

    @property
    def last(self) -> bool:
        """True if no other request follows that belongs together with this one."""

    def move_to_end(self) -> MemberExtra:
        """Return the value for a copy of the request, after all others that it belongs together with."""

    def to_fields(self) -> object:
        """Return what is written into a member."""


class Request(msgspec.Struct, frozen=True):
    """A valid request. Optional fields that are missing are empty."""

    id: str
    deadline: int
    """Unix seconds, 0 < deadline < 10^11."""
    payload: bytes
    """A JSON object, byte for byte as in the member."""
    created: int = 0
    """Unix seconds, 0 < created < 10^11. 0 if it is missing or not in this range (milliseconds, for
    example)."""
    endpoint: str = ""
    """Path to send the request to. Empty for the gateway's default. It is not validated here, because the
    allowed paths are settings."""
    headers: Mapping[str, str] = {}
    """Names are RFC 9110 tokens, values hold no control characters."""
    metadata: Mapping[str, str] = {}
    token: str = ""
    """Token that is required to cancel the request. If it is empty, the request cannot be cancelled."""
    results: str = ""
    """Result list. Empty for the queue's default."""
    labels: Mapping[str, str] = {}
    kind: str = "redis"
    queue: str = ""
    queue_id: str = ""
    correlation_id: str = ""
    retry_count: int = 0
    """Value that the producer wrote. The queue counts attempts separately."""
    extra: Any = None
    """Part of the member that a feature has read (`MemberExtra`). `None` for a plain request."""
    affinity: Affinity | None = None
    """Model server that the request needs, set by the dispatcher. Members do not contain it."""
    chosen_model: str = ""
    """Name of the model that the request is sent to, set by the dispatcher if the member names another one.
    Members do not contain it."""
    endpoints: str = ""
    """Model servers that may receive the request, as `ip:port,ip:port`, set by the dispatcher. Empty for any
    server. Members do not contain it."""
    received: list[bytes] | None = None
    """List to which the parts of the answer are added as they arrive, so that they are known even if it
    breaks off. Set by the dispatcher. Members do not contain it."""


class Rejection(msgspec.Struct, frozen=True):
    """A member that can never be sent. With an id it gets a result, without an id it becomes a dead-letter
    request."""

    code: ErrorCode
    message: str
    """One sentence that says what is wrong, and where in the member."""
    id: str | None = None
    token: str = ""
    results: str = ""
    extra: Any = None
    """Part of the member that a feature has read, if it is unambiguous: others may wait for the end of the
    request."""


class _Internal(msgspec.Struct):
    retry_count: int | None = None
    request_token: str | None = None
    request_queue_name: str | None = None
    result_queue_name: str | None = None
    queue_id: str | None = None
    transport_correlation_id: str | None = None
    labels: dict[str, str] | None = None


class _PlainData(msgspec.Struct):
    id: str
    deadline: int
    payload: msgspec.Raw
    created: int | None = None
    endpoint: str | None = None
    headers: dict[str, str] | None = None
    metadata: dict[str, str] | None = None
    extra: ClassVar[Any] = None


_EXTRA = next(iter(import_modules("member").values()), None)
"""Module of the feature that reads a part of members. There is at most one. Its field is the last one of
`data`."""
if TYPE_CHECKING or _EXTRA is None:
    _Data = _PlainData
else:
    _Data = msgspec.defstruct(
        "_Data", [("extra", _EXTRA.Fields | None, None)], bases=(_PlainData,), rename={"extra": _EXTRA.FIELD}
    )


class _Member(msgspec.Struct):
    request_kind: Literal["plain", "redis", "pubsub"]
    data: _Data
    internal: _Internal | None = None


class _OutlineData(msgspec.Struct):
    payload: msgspec.Raw


class _Outline(msgspec.Struct):
    """A member that is JSON and has a payload, with any errors elsewhere."""

    data: _OutlineData


class _Invalid(Exception):  # noqa: N818 - never leaves this module
    """The member is rejected. The message says why."""

    code = ErrorCode.INVALID_REQUEST


class _TooLong(_Invalid):
    """The member is rejected before it is decoded."""

    code = ErrorCode.TOO_LARGE


_NO_INTERNAL = _Internal()
_EMPTY: Mapping[str, str] = {}
_decode = msgspec.json.Decoder(_Member).decode
_decode_outline = msgspec.json.Decoder(_Outline).decode
_encode = msgspec.json.Encoder().encode

_SECTIONS = {"": _Member, "internal": _Internal, "data": _Data}
_KNOWN_FIELDS = frozenset(
    (section, name) for section, kind in _SECTIONS.items() for name in kind.__struct_encode_fields__
)
_KNOWN_NAMES = frozenset(name.encode() for _, name in _KNOWN_FIELDS)
_EXTRA_NAME = f'"{_EXTRA.FIELD}"'.encode() if _EXTRA is not None else b""


def parse_member(member: bytes, *, max_payload_bytes: int | None = None) -> Request | Rejection:
    """Return the request in a queue member, or why the member is rejected. Never raises."""
    if (whole_bytes := parse_cut_size(member)) is not None:
        return _build_rejection(
            member, f"member: {whole_bytes} bytes are too many to be moved", ErrorCode.TOO_LARGE
        )
    try:
        request = _decode_request(member)
    except _Invalid as error:
        return _build_rejection(member, str(error), error.code)
    except msgspec.ValidationError as error:
        return _build_rejection(member, _describe_validation_error(error))
    except msgspec.DecodeError as error:
        return _build_rejection(member, f"not JSON: {error}")
    except UnicodeDecodeError:
        return _build_rejection(member, "not UTF-8")
    except RecursionError:
        return _build_rejection(member, "nested too deeply")
    if max_payload_bytes is not None and len(request.payload) > max_payload_bytes:
        why = f"data.payload: {len(request.payload)} bytes, at most {max_payload_bytes} are accepted"
        return Rejection(ErrorCode.TOO_LARGE, why, request.id, request.token, request.results, request.extra)
    return request


def _decode_request(member: bytes) -> Request:
    if not member.isascii():
        member.decode()  # msgspec does not check that the inside of a Raw is UTF-8
    masked = _check_envelope_size(member) if len(member) > MAX_ENVELOPE_BYTES else None
    try:
        decoded = _decode(member)
        payload = bytes(decoded.data.payload)
        envelope = _remove_payload(member, payload)
    except msgspec.DecodeError as error:
        if isinstance(error, msgspec.ValidationError):
            raise
        decoded, payload, envelope = _decode_with_surrogates(
            member, masked or replace_surrogates(member), error
        )
    data, internal = decoded.data, decoded.internal or _NO_INTERNAL
    # The scan for duplicates is slow, so it runs only if a cheap check cannot rule duplicates out. With
    # escapes the cheap check cannot see all names.
    if b"\\" in envelope or _may_have_duplicates(envelope if data.extra is None else _remove_extra(envelope)):
        _reject_duplicates(member, payload)
    if payload[:1] != b"{":
        raise _Invalid("data.payload: must be a JSON object")
    if not data.id:
        raise _Invalid("data.id: must not be empty")
    # The first comparison avoids encoding a very long id.
    if len(data.id) > MAX_ID_BYTES or len(data.id.encode()) > MAX_ID_BYTES:
        raise _Invalid(f"data.id: longer than {MAX_ID_BYTES} bytes")
    if not 0 < data.deadline < PRIORITY_STEP:
        raise _Invalid("data.deadline: must be Unix seconds above 0 and below 10^11")
    if data.headers:
        _check_headers(data.headers)
    return Request(
        data.id,
        data.deadline,
        payload,
        data.created if data.created is not None and 0 < data.created < PRIORITY_STEP else 0,
        data.endpoint or "",
        data.headers or _EMPTY,
        data.metadata or _EMPTY,
        internal.request_token or "",
        internal.result_queue_name or "",
        internal.labels or _EMPTY,
        decoded.request_kind,
        internal.request_queue_name or "",
        internal.queue_id or "",
        internal.transport_correlation_id or "",
        internal.retry_count or 0,
        _read_extra(data, internal) if data.extra is not None or data.metadata else None,
    )


def _read_extra(data: _PlainData, internal: _Internal) -> MemberExtra | None:
    if _EXTRA is None:
        return None
    created = data.created if data.created is not None and 0 < data.created < PRIORITY_STEP else 0
    submitted_at = parse_submission_time(created, internal.request_token or "")
    try:
        extra: MemberExtra | None = _EXTRA.read_extra(
            data.extra, data.metadata or _EMPTY, internal.result_queue_name or "", submitted_at
        )
    except ValueError as error:
        raise _Invalid(str(error)) from None
    return extra


def _check_envelope_size(member: bytes) -> bytes | None:
    """Reject a member whose envelope is too long, before it is decoded, which would be expensive.

    Return the member without surrogates if it had to be made, else `None`.
    """
    masked = None
    try:
        payload = _decode_outline(member).data.payload
    except msgspec.ValidationError:
        payload = msgspec.Raw()
    except msgspec.DecodeError:
        masked = replace_surrogates(member)
        payload = _decode_outline(masked).data.payload
    if (size := len(member) - len(bytes(payload))) > MAX_ENVELOPE_BYTES:
        raise _TooLong(f"member: {size} bytes beside its payload, at most {MAX_ENVELOPE_BYTES} are accepted")
    return masked


def _remove_payload(member: bytes, payload: bytes) -> bytes:
    """Return the member without the text of its payload, to check the rest for duplicates. If the text occurs
    more than once, the first occurrence may be removed instead."""
    start = member.find(b"{", member.find(b'"payload"') + 9)
    if start < 0 or not member.startswith(payload, start):
        start = member.find(payload)  # the key is escaped, or the payload is not an object
    return member[:start] + member[start + len(payload) :]


def _decode_with_surrogates(member: bytes, masked: bytes, error: Exception) -> tuple[_Member, bytes, bytes]:
    """Decode a member whose payload contains a lone surrogate such as `\\ud800`. The JSON grammar allows it,
    the decoder does not.

    `masked` is the member with all surrogates replaced. It has the same length, so the payload can be cut out
    of the original.
    """
    if masked == member:
        raise error
    payload = bytes(_decode_outline(masked).data.payload)
    start = masked.find(payload)
    end = start + len(payload)
    readable = member[:start] + payload + member[end:]
    envelope = _remove_payload(readable, payload)
    try:
        decoded = _decode(readable)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        raise _Invalid("a lone surrogate outside data.payload") from None
    # The payload's text was found elsewhere, so the replaced part was not the payload.
    if bytes(decoded.data.payload) != payload or envelope != member[:start] + member[end:]:
        raise _Invalid("a lone surrogate outside data.payload")
    return decoded, member[start:end], envelope


def _check_headers(headers: Mapping[str, str]) -> None:
    size = sum(len(name) + len(value) for name, value in headers.items())
    if size > MAX_HEADERS_CHARS:
        raise _Invalid(f"data.headers: {size} characters, at most {MAX_HEADERS_CHARS} are accepted")
    for name, value in headers.items():
        if not HEADER_NAME.fullmatch(name):
            raise _Invalid(f"data.headers: {name!r} is no header name")
        if not HEADER_VALUE.fullmatch(value):
            raise _Invalid(f"data.headers: the value of {name} holds a control character")


def _remove_extra(envelope: bytes) -> bytes:
    """Return the envelope without the content of the feature's field, whose names are not duplicates of the
    request's.

    The envelope has no escapes, and the field is an object in it. If the end of the object is not obvious,
    return the whole envelope.
    """
    if envelope.count(_EXTRA_NAME) != 1:
        return envelope
    start = envelope.index(b"{", envelope.index(_EXTRA_NAME)) + 1
    end = envelope.index(b"}", start)
    inside = envelope[start:end]
    return envelope if b"{" in inside or inside.count(b'"') % 2 else envelope[:start] + envelope[end:]


def _may_have_duplicates(envelope: bytes) -> bool:
    """Return whether a string equal to a field's name occurs twice. Correct only for envelopes without
    escapes."""
    # Without escapes, every second part between quotes is a string.
    names = list(filter(_KNOWN_NAMES.__contains__, envelope.split(b'"')[1::2]))
    return len(names) != len(set(names))


def _reject_duplicates(member: bytes, payload: bytes) -> None:
    for (section, name), values in collect_outer_keys(member, payload).items():
        if len(values) > 1 and (section, name) in _KNOWN_FIELDS:
            raise _Invalid(f"{section + '.' if section else ''}{name}: given twice")


def _build_rejection(member: bytes, why: str, code: ErrorCode = ErrorCode.INVALID_REQUEST) -> Rejection:
    """Return the rejection, with id, token and result list if each of them is unambiguous."""
    try:
        payload = bytes(_decode_outline(member).data.payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        payload = b""
    values_by_key = collect_outer_keys(member, payload)

    def get_unique_value(section: str, name: str) -> str:
        values = values_by_key.get((section, name), [])
        # A value that occurs twice with different contents is ambiguous.
        return (values[0] or "") if len(set(values)) == 1 else ""

    return Rejection(
        code,
        truncate_text(why, _MESSAGE_CHARS),
        get_unique_value("data", "id") or None,
        get_unique_value("internal", "request_token"),
        get_unique_value("internal", "result_queue_name"),
    )


def _describe_validation_error(error: msgspec.ValidationError) -> str:
    """Return a message of msgspec such as "Expected `int`, got `float` - at `$.data.deadline`" with the field
    first."""
    what, _, where = str(error).replace("`", "").rpartition(" - at $")
    return f"{where.lstrip('.') or 'member'}: {what}" if what else str(error).replace("`", "")


def encode_member(
    request_id: str,
    payload: bytes | Mapping[str, Any],
    deadline: int,
    *,
    created: int | None = None,
    endpoint: str = "",
    headers: Mapping[str, str] = _EMPTY,
    metadata: Mapping[str, str] = _EMPTY,
    token: str = "",
    results: str = "",
    labels: Mapping[str, str] = _EMPTY,
    kind: str = "redis",
    queue: str = "",
    queue_id: str = "",
    correlation_id: str = "",
    extra: MemberExtra | None = None,
) -> bytes:
    """Return the member for a request. Raise `ValueError` if `parse_member` would reject it.

    A payload of bytes is inserted unchanged; a mapping is encoded.
    """
    internal = {
        "retry_count": 0,
        "request_token": token,
        "request_queue_name": queue,
        "result_queue_name": results,
        "queue_id": queue_id,
        "transport_correlation_id": correlation_id,
        "labels": labels,
    }
    data: dict[str, Any] = {
        "id": request_id,
        "created": created,
        "deadline": deadline,
        "payload": msgspec.Raw(payload) if isinstance(payload, bytes) else payload,
        "metadata": metadata,
        "headers": headers,
        "endpoint": endpoint,
    }
    if extra is not None and _EXTRA is not None:
        data[_EXTRA.FIELD] = extra.to_fields()
    member = _encode(
        {
            "internal": {name: value for name, value in internal.items() if value or name == "retry_count"},
            "request_kind": kind,
            "data": {
                name: value for name, value in data.items() if value or name in ("id", "payload", "deadline")
            },
        }
    )
    # The same rules as on the consumer's side, so that invalid requests fail at the producer.
    parsed = parse_member(member)
    if isinstance(parsed, Rejection):
        raise ValueError(f"request {request_id!r:.100}: {parsed.message}")  # noqa: TRY004 - a value
    return member
