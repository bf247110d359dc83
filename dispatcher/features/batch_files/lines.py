"""Lines of batch files in the format of OpenAI's batch API: parses requests, and builds answers and errors.

A request is `{"custom_id", "method", "url", "body"}`, an answer `{"id", "custom_id", "response", "error"}`.
Answers with a status of 2xx go into the output file, all others into the errors file. The body of a request
is passed on byte for byte. Does no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import blake2b
from json import JSONDecodeError, loads

import msgspec

from dispatcher.common.patterns import matches_any
from dispatcher.common.printable import truncate_text
from dispatcher.features.batch_files.line_sequences import LineTurn, TurnFaultError, parse_turn
from dispatcher.requests.routing import is_plain_path
from dispatcher.requests.surrogates import replace_surrogates
from dispatcher.wire_format import ErrorCode, PoppedResult

MAX_CUSTOM_ID_CHARS = 1024
DEFAULT_URLS = ("/v1/*",)
"""Paths that a line may name by default, as in the setting `gateway.allowed_paths`."""
DEFAULT_MAX_BODY_BYTES = 16_777_216
"""Default of the setting `queue.max_payload_bytes`."""
MAX_OVERHEAD_BYTES = 65_536
"""Largest size of a line without its body."""
GROUP_KEY_BYTES = 8
EXPIRED_CODE = "batch_expired"
"""Error code of a request whose deadline has passed."""

_MAX_SHOWN_CHARS = 60
_MAX_UNKNOWN_FIELDS = 20
"""Largest number of unknown fields that are reported for one line."""
_FIELDS = ("custom_id", "method", "url", "body", "sequence", "slicing")
_QUOTED = tuple(f'"{name}"'.encode() for name in _FIELDS)
_SYSTEM_ROLES = ("system", "developer")
"""Roles of the leading messages, which are usually the same in many lines."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """Valid line, which is a request."""

    custom_id: str
    url: str
    body: bytes
    """JSON object, exactly as in the file."""
    turn: LineTurn | None = None
    """Turn in a sequence, or `None` if the line belongs to no sequence."""
    unknown_fields: tuple[str, ...] = ()
    """Names of unknown fields, which are ignored. Some may be misspelt."""
    slicing: bool = True
    """False to send the request in one call."""


@dataclass(frozen=True, slots=True)
class LineFault:
    """One fault of a line."""

    code: str
    """Error code, as in OpenAI's API if it has one for this fault."""
    message: str


@dataclass(frozen=True, slots=True)
class BadLine:
    """Line that is not a valid request, with all its faults."""

    faults: tuple[LineFault, ...]
    custom_id: str | None = None
    """Id of the line, or `None` if it cannot be read."""


@dataclass(frozen=True, slots=True)
class LineRules:
    """Rules for valid lines."""

    urls: Sequence[str] = DEFAULT_URLS
    """Patterns of allowed paths."""
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    sequence_by: str = ""
    """Field that names the sequence of a line without the field `sequence`. Empty if there is none."""

    @property
    def max_line_bytes(self) -> int:
        """Size of the longest line that can be valid."""
        return self.max_body_bytes + MAX_OVERHEAD_BYTES


class _StrictLine(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw
    sequence: msgspec.Raw = msgspec.Raw()
    slicing: bool = True


class _LooseLine(msgspec.Struct):
    """Fields of a line, whatever their types."""

    custom_id: msgspec.Raw = msgspec.Raw()
    method: msgspec.Raw = msgspec.Raw()
    url: msgspec.Raw = msgspec.Raw()
    body: msgspec.Raw = msgspec.Raw()
    params: msgspec.Raw = msgspec.Raw()
    sequence: msgspec.Raw = msgspec.Raw()
    slicing: msgspec.Raw = msgspec.Raw()


class _BodyFields(msgspec.Struct):
    """Fields of a body that decide whether it is valid, and to which group it belongs."""

    model: msgspec.Raw = msgspec.Raw()
    stream: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()


class _PromptMessage(msgspec.Struct):
    role: str = ""
    content: msgspec.Raw = msgspec.Raw()


class _LineResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw | str


class _LineError(msgspec.Struct, omit_defaults=True):
    code: str
    message: str
    line: int | None = None


class _WrittenLine(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _LineResponse | None
    error: _LineError | None
    partial: msgspec.Raw | str | msgspec.UnsetType = msgspec.UNSET
    """Part of the answer that was generated before the error. Lines of OpenAI's API have no such field."""


_decode_line = msgspec.json.Decoder(_StrictLine).decode
_decode_any = msgspec.json.Decoder(_LooseLine).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_body = msgspec.json.Decoder(_BodyFields).decode
_decode_messages = msgspec.json.Decoder(list[_PromptMessage]).decode
_encode = msgspec.json.Encoder().encode

_OPENAI_CODES: dict[str, str] = {
    ErrorCode.DEADLINE_EXCEEDED: EXPIRED_CODE,
    ErrorCode.CANCELLED: "batch_cancelled",
}
"""OpenAI's error codes by code of the queue contract. Other codes are used in lower case."""


def parse_line(text: bytes, rules: LineRules) -> BatchLine | BadLine:
    """Parse a line of an input file. Never raises."""
    if len(text) > rules.max_line_bytes:
        return _bad_line("line_too_large", f"longer than {rules.max_line_bytes} bytes")
    if not text.isascii():
        try:
            text.decode()
        except UnicodeDecodeError as error:
            return _bad_line("invalid_encoding", _utf_8_error_message(text, error))
    # The fast path, for valid lines. A line that fails any check is parsed again to find all its faults.
    try:
        line = _decode_line(text)
        body = _decode_body(bytes(line.body))
        turn = parse_turn(bytes(line.sequence), text, rules.sequence_by)
    except (msgspec.DecodeError, RecursionError, TurnFaultError):
        return _explain_line(text, rules)
    is_valid = (
        line.method == "POST"
        and 0 < len(line.custom_id) <= MAX_CUSTOM_ID_CHARS
        and not _url_faults(line.url, rules)
        and not _body_faults(bytes(line.body), body, rules)
        and not _repeated_fields(text)
    )
    return (
        BatchLine(line.custom_id, line.url, bytes(line.body), turn, slicing=line.slicing)
        if is_valid
        else _explain_line(text, rules)
    )


def _explain_line(text: bytes, rules: LineRules) -> BatchLine | BadLine:
    """Return all faults of a line, or the request if its only oddity is unknown fields."""
    try:
        line = _decode_any(text)
        unknown = [
            truncate_text(name, _MAX_SHOWN_CHARS) for name in _decode_fields(text) if name not in _FIELDS
        ]
    except msgspec.ValidationError:
        return _bad_line("invalid_json_line", f"must be a JSON object, not {_json_kind(text.strip())}")
    except msgspec.DecodeError as error:
        return _bad_line("invalid_json_line", _json_error_message(text, error))
    except RecursionError:
        return _bad_line("invalid_json_line", "nested too deeply")
    del unknown[_MAX_UNKNOWN_FIELDS:]
    faults = [LineFault("invalid_json_line", f"{name}: given twice") for name in _repeated_fields(text)]
    custom_id, string_faults = _parse_string("custom_id", bytes(line.custom_id), unknown)
    faults += string_faults
    if custom_id is not None and len(custom_id) > MAX_CUSTOM_ID_CHARS:
        faults.append(
            LineFault("invalid_custom_id", f"custom_id: longer than {MAX_CUSTOM_ID_CHARS} characters")
        )
        custom_id = None
    method, string_faults = _parse_string("method", bytes(line.method), unknown)
    faults += string_faults
    if method is not None and method != "POST":
        faults.append(LineFault("invalid_method", f"method: must be POST, not {_quote_short(method)}"))
    url, string_faults = _parse_string("url", bytes(line.url), unknown)
    faults += string_faults
    if url is not None:
        faults += _url_faults(url, rules)
    raw = bytes(line.body)
    if raw.startswith(b"{"):
        faults += _body_faults(raw, _decode_body(raw), rules)
    else:
        faults.append(_missing_body_fault(raw, bytes(line.params), unknown))
    turn = None
    try:
        turn = parse_turn(bytes(line.sequence), text, rules.sequence_by)
    except (TurnFaultError, msgspec.DecodeError) as error:
        faults.append(LineFault("invalid_sequence", str(error)))
    slicing = bytes(line.slicing) or b"true"
    if slicing not in (b"true", b"false"):
        faults.append(LineFault("invalid_type", f"slicing: must be true or false, not {_json_kind(slicing)}"))
    if faults or custom_id is None or url is None:
        return BadLine(tuple(faults), custom_id)
    sequence_field = rules.sequence_by.partition(".")[0]
    unknown_fields = tuple(name for name in unknown if name != sequence_field)
    return BatchLine(custom_id, url, raw, turn, unknown_fields, slicing == b"true")


def _bad_line(code: str, message: str) -> BadLine:
    return BadLine((LineFault(code, message),))


def _missing_message(name: str, unknown: Sequence[str]) -> str:
    """Return the message about a missing field. It names an unknown field with a similar name."""
    named = {each.lower(): each for each in unknown}
    near = get_close_matches(name, named, 1, 0.65)
    return f"{name}: is missing" + (
        f" (is it what stands under {_quote_short(named[near[0]])}?)" if near else ""
    )


def _parse_string(name: str, raw: bytes, unknown: Sequence[str]) -> tuple[str | None, list[LineFault]]:
    """Parse a field that must be a string and not empty. Return the value, or `None` and the faults."""
    if not raw:
        return None, [LineFault("missing_required_parameter", _missing_message(name, unknown))]
    if not raw.startswith(b'"'):
        return None, [LineFault("invalid_type", f"{name}: must be a string, not {_json_kind(raw)}")]
    value = msgspec.json.decode(raw, type=str)
    if not value:
        return None, [LineFault("missing_required_parameter", f"{name}: is empty")]
    return value, []


def _url_faults(url: str, rules: LineRules) -> list[LineFault]:
    if "://" in url:
        why = "give the path alone, such as /v1/chat/completions"
    elif not is_plain_path(url):
        why = "is no plain path, such as /v1/chat/completions"
    elif not matches_any(rules.urls, url):
        why = f"is not allowed; allowed are {', '.join(rules.urls)}"
    else:
        return []
    return [LineFault("invalid_url", f"url: {_quote_short(url)}: {why}")]


def _body_faults(raw: bytes, body: _BodyFields, rules: LineRules) -> list[LineFault]:
    faults = []
    if len(raw) > rules.max_body_bytes:
        what = f"body: {len(raw)} bytes, at most {rules.max_body_bytes} are accepted"
        faults.append(LineFault("line_too_large", what))
    model, stream = bytes(body.model), bytes(body.stream)
    if model and (not model.startswith(b'"') or model == b'""'):
        kind = "an empty string" if model == b'""' else _json_kind(model)
        faults.append(LineFault("invalid_type", f"body.model: must be the name of a model, not {kind}"))
    if stream == b"true":
        faults.append(
            LineFault("invalid_request", "body.stream: true cannot be had in a batch: leave it out")
        )
    elif stream not in (b"", b"false", b"null"):
        faults.append(LineFault("invalid_type", f"body.stream: must be false, not {_json_kind(stream)}"))
    return faults


def _missing_body_fault(raw: bytes, params: bytes, unknown: Sequence[str]) -> LineFault:
    if not raw and params:
        what = "body: is missing (params is what Anthropic's message batches call it)"
        return LineFault("missing_required_parameter", what)
    if not raw:
        return LineFault("missing_required_parameter", _missing_message("body", unknown))
    what = f"body: must be a JSON object, not {_json_kind(raw)}"
    if raw.startswith(b'"{'):
        what += ": it was encoded twice"
    return LineFault("invalid_type", what)


def _repeated_fields(text: bytes) -> list[str]:
    """Return the fields that the line has twice."""
    if all(text.count(quoted) <= 1 for quoted in _QUOTED):
        return []
    # The decoders do not report duplicate keys. This slower parser runs only for suspicious lines.
    try:
        pairs = loads(text, object_pairs_hook=list)
    except (JSONDecodeError, RecursionError, ValueError):
        return []
    names = [pair[0] for pair in pairs]
    return [name for name in _FIELDS if names.count(name) > 1]


def _json_kind(raw: bytes) -> str:
    kinds = {b"{": "an object", b"[": "a list", b'"': "a string", b"t": "true", b"f": "false", b"n": "null"}
    return kinds.get(raw[:1], "a number")


def _quote_short(text: str) -> str:
    return repr(truncate_text(text, _MAX_SHOWN_CHARS))


def _json_error_message(text: bytes, error: msgspec.DecodeError) -> str:
    if text.startswith(b"\xef\xbb\xbf"):
        return "begins with a byte order mark"
    if b"\0" in text:
        return "holds NUL bytes"
    if replace_surrogates(text) != text:
        try:
            _decode_any(replace_surrogates(text))
        except (msgspec.DecodeError, RecursionError):
            pass
        else:
            return "a lone surrogate (\\ud800 to \\udfff), which is no character"
    return f"no JSON: {str(error).removeprefix('JSON is malformed: ')}"


def _utf_8_error_message(text: bytes, error: UnicodeDecodeError) -> str:
    if text.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "not UTF-8: this looks like UTF-16"
    return f"not UTF-8 at byte {error.start}"


def group_key(line: BatchLine) -> bytes:
    """Return a key that is equal for lines whose prompts probably have a common prefix.

    Such lines have the same url, model, tools and system prompt. The system prompt is the field
    `instructions`, or the leading messages with the role `system` or `developer`.
    """
    body = _decode_body(line.body)
    parts = [line.url.encode(), bytes(body.model), bytes(body.instructions), bytes(body.tools)]
    if body.messages:
        try:
            messages = _decode_messages(body.messages)
        except (msgspec.DecodeError, RecursionError):
            messages = []
        for message in messages:
            if message.role not in _SYSTEM_ROLES:
                break
            parts += (message.role.encode(), bytes(message.content))
    digest = blake2b(digest_size=GROUP_KEY_BYTES)
    for part in parts:
        digest.update(b"%d:" % len(part))  # the length separates the parts, which may hold any byte
        digest.update(part)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class OutLine:
    """Line of the output file or of the errors file."""

    text: bytes
    """Bytes of the line, with the line end."""
    is_answer: bool
    """True if the line goes into the output file."""


def build_answer_line(request_id: str, custom_id: str, result: PoppedResult) -> OutLine:
    """Return the line for a request with a result."""
    status, code = result.status_code, result.error_code
    response = None if status is None else _LineResponse(status, request_id, _response_body(result.payload))
    error = None
    if code is not None or status is None:
        error_code = code or ErrorCode.GATE_ERROR
        error = _LineError(
            _OPENAI_CODES.get(error_code, error_code.lower()), result.error_message or "no answer"
        )
    is_partial = error is not None and response is None and bool(result.partial)
    partial = _response_body(result.payload) if is_partial else msgspec.UNSET
    return _build_out_line(request_id, custom_id, response, error, partial)


def build_error_line(request_id: str, custom_id: str | None, code: str, message: str, line: int) -> OutLine:
    """Return the line for a request without a result, or for a bad line."""
    return _build_out_line(request_id, custom_id, None, _LineError(code, message, line))


def _build_out_line(
    request_id: str,
    custom_id: str | None,
    response: _LineResponse | None,
    error: _LineError | None,
    partial: msgspec.Raw | str | msgspec.UnsetType = msgspec.UNSET,
) -> OutLine:
    text = _encode(_WrittenLine(f"batch_req_{request_id}", custom_id, response, error, partial)) + b"\n"
    return OutLine(text, error is None and response is not None and 200 <= response.status_code < 300)


def _response_body(payload: str) -> msgspec.Raw | str:
    """Return the body of an answer as JSON on one line, or as a string if it is not JSON."""
    raw = payload.encode(errors="replace")
    try:
        # Puts the body on one line, and leaves numbers and the order of keys as they are.
        return msgspec.Raw(msgspec.json.format(raw, indent=-1))
    except (msgspec.DecodeError, RecursionError):
        return raw.decode()
