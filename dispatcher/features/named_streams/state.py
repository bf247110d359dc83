"""State of a named stream of a client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class StreamState(StrEnum):
    """State of a request that a named stream submitted."""

    PENDING = "pending"
    """The request waits in the queue or is in flight."""
    ANSWERED = "answered"
    """The request has left the queue, or its deadline has passed, and its result is not consumed."""
    CONSUMED = "consumed"
    """The program took its result, and asked the stream for the next one."""


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """A request that a named stream submitted."""

    id: str
    state: StreamState
    deadline: int | None
    """Unix time of the deadline. `None` if the request is consumed."""


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """Status of a named stream: counts of all its requests, and a page of them."""

    unconsumed: int
    """Number of requests that are pending or answered."""
    consumed: int
    """Number of requests whose results were consumed."""
    kept: int
    """Number of results that wait in Redis for the stream."""
    requests: Sequence[StreamRequest]
    """A page of the unconsumed requests, or of the consumed ones, in no order."""
    after: str
    """Cursor of the next page. Empty if there is none."""
