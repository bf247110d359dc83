"""Requests before they are submitted (`Item`), and handles of submitted requests (`Handle`)."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from math import isfinite
from typing import TYPE_CHECKING, Any

import msgspec

from dispatcher.client.result import Result
from dispatcher.common.duration import parse_duration
from dispatcher.requests.request import encode_member
from dispatcher.requests.score import compute_score
from dispatcher.requests.submission import Submission
from dispatcher.telemetry.tracing import trace_submission
from dispatcher.wire_format import ONE_CALL

if TYPE_CHECKING:
    from dispatcher.features.sequences.turns import Turn

Body = Mapping[str, Any] | bytes
Deadline = str | float | timedelta | datetime
"""Time from now (`"10m"`, `"1h30m"`, a number of seconds, a timedelta), or a datetime with a time zone."""

MAX_DEADLINE_S = 10 * 365 * 86_400
MAX_MEMBER_BYTES = 500_000_000
"""Largest member that is submitted. Redis accepts no value of 512 MB or more."""
_EMPTY_MAP: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One request to submit."""

    body: Body
    """Body of the request: a mapping, or the bytes of a JSON object, which are sent unchanged."""
    path: str = ""
    """Path at the gateway, such as `/v1/embeddings`. If empty, the dispatcher's `gateway.path`."""
    id: str = ""
    """Id of the request. If empty, a random one."""
    deadline: Deadline = "1h"
    """Time by which the request has a result. If it is not answered by then, it fails with
    DEADLINE_EXCEEDED."""
    priority: int | None = None
    """Priority from 0 (served first) to 9 (served last). `None` is the same as 0."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers for the gateway. Only allowed ones are sent (`gateway.allowed_headers`)."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata of the request. `userid` names the tenant, `traceparent` the trace of the request."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels for listing and cancelling requests."""
    results: str | None = None
    """Result list. `None` stands for the list of this client, an empty string for the default list of the
    queue. A result that goes to another list than the client's cannot be awaited with this client."""
    sequence: Turn | str | None = None
    """Turn of the request in a sequence. With only the id of a sequence, the request comes after all
    requests that the sequence has."""
    slicing: bool = True
    """False to send the request in one call, even if it is a long generation that the dispatcher would send
    in slices."""


def to_item(item: Item | Body) -> Item:
    """Return the item, or make one of a body."""
    return item if isinstance(item, Item) else Item(item)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Handle:
    """Handle of a submitted request, to wait for its result or to cancel it. The token is a secret."""

    id: str
    """Id of the request."""
    token: str
    """Secret of the request, which proves that a result belongs to it."""
    deadline: int
    """Deadline in Unix seconds."""
    results: str
    """Result list of the request."""
    item: Item | None = field(default=None, init=False, repr=False)
    """The submitted item, for the hook `after`."""
    received_result: Result | None = field(default=None, init=False, repr=False)
    waiters: list[asyncio.Future[None]] = field(default_factory=list, init=False, repr=False)
    """Futures of the callers that wait for the result. Only the mailbox uses them."""

    @property
    def done(self) -> bool:
        """True if the result has arrived."""
        return self.received_result is not None


def seconds_until(deadline: Deadline, now: float) -> float:
    """Return the seconds from `now` to the deadline, at least 1.

    Raises ValueError if the deadline is not in the next ten years, or is no valid time.
    """
    if isinstance(deadline, str):
        try:
            remaining_s = parse_duration(deadline)
        except ValueError as error:
            raise ValueError(f"deadline {error}") from error
    elif isinstance(deadline, timedelta):
        remaining_s = deadline.total_seconds()
    elif isinstance(deadline, datetime):
        if deadline.tzinfo is None:
            raise ValueError(f"deadline {deadline}: give a time zone")
        remaining_s = deadline.timestamp() - now
    else:
        remaining_s = float(deadline)
    if not 0 < remaining_s <= MAX_DEADLINE_S:
        raise ValueError(f"deadline {deadline!r}: must be after now, and within ten years")
    return max(1.0, remaining_s)  # deadlines are whole seconds, so a shorter time could already be over


class TokenGenerator:
    """Generator of request tokens that sort in the order in which they were made.

    A token is the time at which it was made, as 16 hexadecimal digits of nanoseconds, followed by 128 random
    bits. A member begins with its token, and Redis orders members of equal scores by their bytes, so requests
    with equal scores are served in the order of their submission.
    """

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        self._clock = clock
        self._last_ns = 0

    def make_token(self) -> str:
        # Two tokens of the same nanosecond, or a clock that was set back, must not change the order.
        self._last_ns = max(self._last_ns + 1, self._clock())
        return f"{self._last_ns:016x}{secrets.token_hex(16)}"

    def current_time(self) -> float:
        """Return the Unix time, but no earlier than the time in any token made so far."""
        return max(self._last_ns, self._clock()) / 1e9


def build_submission(item: Item, token: str, *, queue: str, results: str) -> Submission:
    """Return the submission of an item. Raises ValueError or TypeError if no dispatcher would accept it.

    If the program traces with OpenTelemetry, the request continues its trace.
    """
    now = time.time()
    deadline = int(now + seconds_until(item.deadline, now))
    score = compute_score(deadline, item.priority)
    request_id = item.id or f"r-{secrets.token_hex(8)}"
    body = encode_body(item.body)
    try:
        metadata = item.metadata if item.slicing else {**item.metadata, **ONE_CALL}
        with trace_submission(queue, request_id, metadata) as metadata:
            member = encode_member(
                request_id,
                body,
                deadline,
                created=int(now),
                token=token,
                results=results,
                endpoint=item.path,
                headers=item.headers,
                metadata=metadata,
                labels=item.labels,
                extra=_make_turn(item.sequence),
            )
    except UnicodeEncodeError as error:
        raise ValueError("the request holds a lone surrogate, which is no character") from error
    if len(member) > MAX_MEMBER_BYTES:
        raise ValueError(f"the body: {len(body)} bytes are more than Redis takes")
    return Submission(member, score, request_id, token, deadline)


def _make_turn(sequence: Turn | str | None) -> Turn | None:
    if not isinstance(sequence, str):
        return sequence
    # Imported here, because most programs have no sequences.
    from dispatcher.features.sequences.turns import Turn

    return Turn(sequence)


def encode_mapping(body: Mapping[str, Any]) -> bytes:
    """Return a mapping as JSON. Raises ValueError if it cannot be encoded."""
    try:
        text = msgspec.json.encode(body)
        # msgspec encodes NaN and infinity as null. So the slow search is needed only if there is a null.
        invalid_number = (
            find_invalid_number(msgspec.to_builtins(body, enc_hook=str)) if b"null" in text else None
        )
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise ValueError(f"the body cannot be encoded as JSON: {error}") from error
    if invalid_number is not None:
        raise ValueError(f"the body: {invalid_number}, which JSON has no number for")
    return text


def find_invalid_number(value: Any, path: str = "") -> str | None:
    """Return where a value contains NaN or infinity (`logit_bias.7 is nan`), or `None` if nowhere."""
    if isinstance(value, float) and not isfinite(value):
        return f"{path} is {value}"
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    descriptions = (
        find_invalid_number(each, f"{path}.{name}" if path else str(name)) for name, each in inner
    )
    return next((each for each in descriptions if each is not None), None)


def encode_body(body: Body) -> bytes:
    """Return the body as it is sent to the gateway. Raises ValueError or TypeError if it is not a JSON
    object."""
    if isinstance(body, Mapping):
        return encode_mapping(body)
    if not isinstance(body, bytes | bytearray | memoryview):
        raise TypeError(f"the body: give a mapping or bytes, not {type(body).__name__}")
    body = bytes(body)
    try:
        msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the body is no JSON object: {error}") from error
    return body
