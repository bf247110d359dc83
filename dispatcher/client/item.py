"""A request before it is submitted, and what its submitter holds of it afterwards."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from math import isfinite
from typing import Any

import msgspec

from dispatcher.client.result import Result
from dispatcher.core.duration import seconds_of
from dispatcher.core.requests.request import encode_member
from dispatcher.core.requests.score import score_of
from dispatcher.core.requests.submission import Submission
from dispatcher.core.sequences.turns import Turn
from dispatcher.telemetry.tracing import sending

Body = Mapping[str, Any] | bytes
Deadline = str | float | timedelta | datetime
"""From now: `"10m"`, `"1h30m"`, seconds, a timedelta; or a moment: a datetime with its time zone."""

LONGEST_S = 10 * 365 * 86_400
MOST_BYTES = 500_000_000
"""Redis takes no value of 512 MB."""
_NONE: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One request to submit."""

    body: Body
    """A mapping, or the bytes of a JSON object, which go to the gateway as they are."""
    path: str = ""
    """At the gateway, such as `/v1/embeddings`; empty: the dispatcher's `gateway.path`."""
    id: str = ""
    """Empty: a random one."""
    deadline: Deadline = "1h"
    """It is answered by then, if only with DEADLINE_EXCEEDED."""
    priority: int | None = None
    """0 is served first, 9 last; None as 0."""
    headers: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    """`userid` is the tenant; `traceparent` the trace that it belongs to."""
    labels: Mapping[str, str] = field(default_factory=dict)
    results: str | None = None
    """The list its result goes to. None: this client's; empty: the queue's own. Of another list than this
    client's nothing can be awaited here."""
    sequence: Turn | str | None = None
    """Its turn in a sequence, or the id of one: then it comes behind all that the sequence has."""


def item_of(item: Item | Body) -> Item:
    """A body alone is an item, too."""
    return item if isinstance(item, Item) else Item(item)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Handle:
    """A request that was submitted: what it takes to await or cancel it. The token is a secret."""

    id: str
    token: str
    deadline: int
    """Unix seconds."""
    results: str
    """The list its result goes to."""
    item: Item | None = field(default=None, init=False, repr=False)
    """What it was, for the hook `after`."""
    arrived: Result | None = field(default=None, init=False, repr=False)
    waiters: list[asyncio.Future[None]] = field(default_factory=list, init=False, repr=False)
    """The mailbox's."""

    @property
    def done(self) -> bool:
        """Its result has come."""
        return self.arrived is not None


def seconds_from(deadline: Deadline, now: float) -> float:
    """How long from now. Raises ValueError for what is no duration or moment of the next ten years."""
    if isinstance(deadline, str):
        try:
            within = seconds_of(deadline)
        except ValueError as error:
            raise ValueError(f"deadline {error}") from error
    elif isinstance(deadline, timedelta):
        within = deadline.total_seconds()
    elif isinstance(deadline, datetime):
        if deadline.tzinfo is None:
            raise ValueError(f"deadline {deadline}: give a time zone")
        within = deadline.timestamp() - now
    else:
        within = float(deadline)
    if not 0 < within <= LONGEST_S:
        raise ValueError(f"deadline {deadline!r}: must be after now, and within ten years")
    return max(1.0, within)


class Tokens:
    """Secrets of requests, in the order in which they were made.

    Each begins with its time of making, in hexadecimal nanoseconds that only grow; behind that are 128 random
    bits. A token stands at the head of its member, so requests of equal scores leave in this order.
    """

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        self._clock = clock
        self._last = 0

    def make(self) -> str:
        self._last = max(self._last + 1, self._clock())
        return f"{self._last:016x}{secrets.token_hex(16)}"

    def now(self) -> float:
        """Return Unix seconds that are no earlier than the time in any token made so far."""
        return max(self._last, self._clock()) / 1e9


def submission_of(item: Item, token: str, *, queue: str, results: str) -> Submission:
    """The item as it goes into the queue. Raises ValueError or TypeError for what no dispatcher would take.

    Where the program traces with OpenTelemetry, the trace goes on in the dispatcher and the gateway.
    """
    now = time.time()
    deadline = int(now + seconds_from(item.deadline, now))
    score = score_of(deadline, item.priority)
    request_id = item.id or f"r-{secrets.token_hex(8)}"
    body = body_of(item.body)
    try:
        with sending(queue, request_id, item.metadata) as metadata:
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
                sequence=Turn(item.sequence) if isinstance(item.sequence, str) else item.sequence,
            )
    except UnicodeEncodeError as error:
        raise ValueError("the request holds a lone surrogate, which is no character") from error
    if len(member) > MOST_BYTES:
        raise ValueError(f"the body: {len(body)} bytes are more than Redis takes")
    return Submission(member, score, request_id, token, deadline)


def encoded(body: Mapping[str, Any]) -> bytes:
    """As JSON. Raises ValueError for what JSON has no form for."""
    try:
        found = msgspec.json.encode(body)
        # A number that JSON does not have is null by now: without one there is none.
        astray = _no_number(msgspec.to_builtins(body, enc_hook=str)) if b"null" in found else None
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise ValueError(f"the body cannot be encoded as JSON: {error}") from error
    if astray is not None:
        raise ValueError(f"the body: {astray}, which JSON has no number for")
    return found


def _no_number(value: Any, path: str = "") -> str | None:
    """Where a number is infinite or none at all: `logit_bias.7 is nan`."""
    if isinstance(value, float) and not isfinite(value):
        return f"{path} is {value}"
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    told = (_no_number(each, f"{path}.{name}" if path else str(name)) for name, each in inner)
    return next((each for each in told if each is not None), None)


def body_of(body: Body) -> bytes:
    """The body as it goes to the gateway. Raises ValueError or TypeError for what is no JSON object."""
    if isinstance(body, Mapping):
        return encoded(body)
    if not isinstance(body, bytes | bytearray | memoryview):
        raise TypeError(f"the body: give a mapping or bytes, not {type(body).__name__}")
    body = bytes(body)
    try:
        msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"the body is no JSON object: {error}") from error
    return body
