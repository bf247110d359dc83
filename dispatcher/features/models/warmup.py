"""Warm-up files: requests that a server gets before any others. Parse them, plan their calls, and record
them.

A line is `{"url": "/v1/chat/completions", "body": {…}, "repeat": 3}`; lines of OpenAI's batch files are
valid, too. A file is accepted as a whole or not at all: every error is reported with its line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

import msgspec

from dispatcher.common.patterns import matches_any
from dispatcher.common.printable import truncate_text
from dispatcher.features.models.body_rewrite import replace_model
from dispatcher.requests.json_fields import NotUnderstoodError, check_utf8, parse_fields
from dispatcher.requests.routing import is_plain_path
from dispatcher.requests.surrogates import replace_surrogates

MAX_LINES = 1000
MAX_FILE_BYTES = 10_000_000
MAX_REPEAT = 1000
MAX_CALLS = 10_000
"""Largest number of calls of all lines, with their repeats."""
MAX_MERGED_CALLS = 1000
"""Largest number of further calls, which merge several copies of a request."""
MAX_RECORDED_REPEAT = 10
"""Largest repeat that is recorded. More repeats of a request would be answered from caches."""
MAX_FAULTS_SHOWN = 20

_MAX_SHOWN_CHARS = 60
_LINE_OVERHEAD_BYTES = 40
"""Estimated bytes of a line besides path and body."""
_KNOWN_FIELDS = ("url", "body", "repeat")
_IGNORED_FIELDS = ("custom_id", "method", "sequence")
"""Fields of batch files that are ignored."""


JoinCopies = Callable[[str, bytes, int], Iterable[tuple[bytes, int]]]
"""The hook `join_copies` of the kernel."""


@dataclass(frozen=True, slots=True)
class WarmupRequest:
    """One line of a warm-up file."""

    url: str
    body: bytes
    """A JSON object, byte for byte, that names a model once."""
    repeat: int = 1


@dataclass(frozen=True, slots=True)
class WarmupRules:
    """Rules for the content of a file."""

    path: str
    """Path of lines that name none: the gateway's default."""
    allowed_paths: Sequence[str] = ("/v1/*",)
    max_body_bytes: int = MAX_FILE_BYTES


@dataclass(frozen=True, slots=True)
class WarmupCall:
    """One call that warms a server up."""

    path: str
    body: bytes
    items: int
    """Number of requests that are merged in it."""


class _WarmupLine(msgspec.Struct):
    url: msgspec.Raw = msgspec.Raw()
    body: msgspec.Raw = msgspec.Raw()
    repeat: msgspec.Raw = msgspec.Raw()


class _WrittenRequest(msgspec.Struct, omit_defaults=True):
    body: msgspec.Raw
    url: str = ""
    repeat: int = 1


_decode = msgspec.json.Decoder(_WarmupLine).decode
_encode = msgspec.json.Encoder().encode


# Parsing.


def parse_warmup(text: bytes, rules: WarmupRules) -> tuple[WarmupRequest, ...] | list[str]:
    """Return the requests of a file in order, at least one, or a list of its errors. Never raises.

    At most MAX_FAULTS_SHOWN errors are listed, followed by the number of further ones.
    """
    if len(text) > MAX_FILE_BYTES:
        return [f"is larger than {MAX_FILE_BYTES // 1_000_000} MB"]
    requests: list[WarmupRequest] = []
    faults: list[str] = []
    lines = [(number, line.strip()) for number, line in enumerate(text.split(b"\n"), start=1)]
    # Blank lines are skipped, but they count in line numbers.
    lines = [each for each in lines if each[1]]
    if len(lines) > MAX_LINES:
        faults.append(f"has {len(lines):,} requests, {MAX_LINES:,} at most")
    # A file with more lines is rejected anyway.
    for number, line in lines[:MAX_LINES]:
        parsed = _parse_line(line, rules)
        if isinstance(parsed, WarmupRequest):
            requests.append(parsed)
        else:
            faults += [f"line {number}: {what}" for what in parsed]
    calls = sum(each.repeat for each in requests)
    if calls > MAX_CALLS:
        faults.append(f"asks for {calls:,} calls with all repeats, {MAX_CALLS:,} at most")
    if not lines:
        faults.append("holds no request")
    if not faults:
        return tuple(requests)
    more = len(faults) - MAX_FAULTS_SHOWN
    return [*faults[:MAX_FAULTS_SHOWN], f"and {more:,} more"] if more > 0 else faults


def _parse_line(line: bytes, rules: WarmupRules) -> WarmupRequest | list[str]:
    """Return the request in a line, or all its errors."""
    try:
        line_fields = parse_fields(check_utf8(line))
        decoded = _decode(line)
    except UnicodeDecodeError as error:
        return [f"is not UTF-8 at byte {error.start}"]
    except NotUnderstoodError as error:
        return [f"cannot be understood: {error}"]
    except msgspec.ValidationError:
        return ["must be a JSON object"]
    except RecursionError:
        return ["is nested too deeply"]
    except msgspec.DecodeError as error:
        if _is_json(replace_surrogates(line)):
            return ["holds a lone surrogate (\\ud800 to \\udfff), which is no character"]
        return [f"is no JSON: {str(error).removeprefix('JSON is malformed: ')}"]
    faults = [
        f"{truncate_text(name, _MAX_SHOWN_CHARS)}: unknown field; known are {', '.join(_KNOWN_FIELDS)}"
        for name in line_fields
        if name not in _KNOWN_FIELDS + _IGNORED_FIELDS
    ]
    url, new_faults = _parse_url(bytes(decoded.url), rules)
    faults += new_faults
    repeat, new_faults = _parse_repeat(bytes(decoded.repeat))
    faults += new_faults
    body = bytes(decoded.body)
    faults += _find_body_faults(body, rules)
    return faults or WarmupRequest(url, body, repeat)


def _parse_url(raw: bytes, rules: WarmupRules) -> tuple[str, list[str]]:
    if raw in (b"", b"null"):
        return rules.path, []
    try:
        url = msgspec.json.decode(raw, type=str)
    except msgspec.DecodeError:
        return "", ["url: must be a text"]
    shown = repr(truncate_text(url, _MAX_SHOWN_CHARS))
    if url == rules.path:
        return url, []
    if not is_plain_path(url):
        return "", [f"url: {shown} is no plain path, such as /v1/chat/completions"]
    if not matches_any(rules.allowed_paths, url):
        return "", [f"url: {shown} is not allowed; allowed are {', '.join(rules.allowed_paths)}"]
    return url, []


def _parse_repeat(raw: bytes) -> tuple[int, list[str]]:
    if not raw:
        return 1, []
    try:
        repeat = msgspec.json.decode(raw, type=int)
    except msgspec.DecodeError:
        repeat = 0
    if 1 <= repeat <= MAX_REPEAT:
        return repeat, []
    return 1, [f"repeat: must be a whole number between 1 and {MAX_REPEAT}"]


def _find_body_faults(body: bytes, rules: WarmupRules) -> list[str]:
    if not body:
        return ["body: is missing"]
    if not body.startswith(b"{"):
        return ["body: must be a JSON object"]
    if len(body) > rules.max_body_bytes:
        return [f"body: {len(body)} bytes, at most {rules.max_body_bytes} are accepted"]
    try:
        body_fields = parse_fields(body)
    except (NotUnderstoodError, msgspec.DecodeError) as error:
        return [f"body: cannot be understood: {error}"]
    faults = []
    model = bytes(body_fields.get("model", b""))
    if not model:
        faults.append("body.model: is missing: the version's name is put in its place")
    elif not model.startswith(b'"') or model == b'""':
        faults.append("body.model: must be the name of a model")
    if bytes(body_fields.get("stream", b"false")) not in (b"false", b"null"):
        faults.append("body.stream: cannot be had in a warm-up: leave it out")
    return faults


# Planning.


def plan_calls(
    requests: Sequence[WarmupRequest],
    join_copies: Iterable[JoinCopies],
    model: str,
    *,
    max_bytes: int = MAX_FILE_BYTES,
) -> Iterator[WarmupCall]:
    """Yield the calls that warm a server up for this model, in the order of the file: each request alone, as
    often as it says, then in the calls in which features merge several copies of it.

    There are at most MAX_CALLS of the first kind and MAX_MERGED_CALLS of the second kind, each with about
    `max_bytes` at most. A body in which the model cannot be replaced is skipped. The calls are generated one
    by one, because merged ones may be large.
    """
    merged_left = MAX_MERGED_CALLS
    for request in requests:
        body = replace_model(request.body, model)
        if body is None:
            continue
        for _ in range(request.repeat):
            yield WarmupCall(request.url, body, 1)
        for merge in join_copies:
            for merged, count in islice(merge(request.url, body, max_bytes), merged_left):
                merged_left -= 1
                yield WarmupCall(request.url, merged, count)


# Recording.


def encode_line(request: WarmupRequest) -> bytes:
    """Return the request as a line of a file, with its line end. An empty path is omitted."""
    body = request.body
    if b"\n" in body or b"\r" in body:
        # One line per request: whitespace between tokens is removed.
        body = msgspec.json.format(body, indent=-1)
    return _encode(_WrittenRequest(msgspec.Raw(body), request.url, request.repeat)) + b"\n"


@dataclass(slots=True, eq=False)
class _Sampled:
    url: str
    body: bytes
    count: int = 1


class WarmupSample:
    """Bounded sample of requests of all paths and sizes alike. Equal requests are kept once."""

    def __init__(self, max_requests: int, max_bytes: int = MAX_FILE_BYTES) -> None:
        self._max_requests = min(max_requests, MAX_LINES)
        self._max_bytes = max_bytes
        self._kept_bytes = 0
        self._kept: dict[bytes, _Sampled] = {}
        self._classes: dict[tuple[str, int], list[bytes]] = {}
        """Digests of the kept requests in order of arrival, by path and size rounded to the next power of
        two."""
        self.offered_count = 0

    def add_request(self, url: str, body: bytes) -> None:
        """Add a request of the queue. An empty path is the gateway's default. Requests that are invalid in
        warm-ups are skipped."""
        body = body.strip()
        # Submitted requests were not validated, so they may contain anything.
        if (url and not is_plain_path(url)) or not _is_json(body):
            return
        if _find_body_faults(body, WarmupRules(url, max_body_bytes=self._max_bytes)):
            return
        self.offered_count += 1
        digest = blake2b(url.encode() + b"\0" + body, digest_size=16).digest()
        if digest in self._kept:
            self._kept[digest].count += 1
            return
        kind = url, len(body).bit_length()
        size = _estimate_line_bytes(url, body)
        while len(self._kept) >= self._max_requests or self._kept_bytes + size > self._max_bytes:
            if not self._make_room(kind):
                return
        self._kept[digest] = _Sampled(url, body)
        self._classes.setdefault(kind, []).append(digest)
        self._kept_bytes += size

    def _make_room(self, kind: tuple[str, int]) -> bool:
        """Make room for a request of this class by removing the rarest one of the largest class.

        Return False if no class has more requests than this one would have.
        """
        fullest = max(self._classes, key=lambda each: len(self._classes[each]), default=kind)
        digests = self._classes.get(fullest, [])
        if len(digests) <= len(self._classes.get(kind, ())) + 1:
            return False
        rarest = min(reversed(digests), key=lambda digest: self._kept[digest].count)
        digests.remove(rarest)
        removed = self._kept.pop(rarest)
        self._kept_bytes -= _estimate_line_bytes(removed.url, removed.body)
        return True

    def list_requests(self) -> list[WarmupRequest]:
        """Return the requests of the sample, by path and size."""
        return [
            WarmupRequest(kept.url, kept.body, min(kept.count, MAX_RECORDED_REPEAT))
            for kind in sorted(self._classes)
            for kept in (self._kept[digest] for digest in self._classes[kind])
        ]


def _estimate_line_bytes(url: str, body: bytes) -> int:
    """Return the largest possible size of the request's line."""
    return len(url) + len(body) + _LINE_OVERHEAD_BYTES


def _is_json(body: bytes) -> bool:
    """Return whether the body is valid JSON for any parser."""
    try:
        msgspec.json.decode(check_utf8(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True
