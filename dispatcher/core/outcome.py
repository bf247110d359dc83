"""What came of a try, and what happens to the request next."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Delivered:
    """The gateway answered, and no retry would change the answer: 2xx, and 4xx that retrying cannot mend."""

    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Overloaded:
    """The gateway refused for now: 429; 503 or 500 with a drop reason; 500 "request cannot be admitted"."""

    status: int
    reason: str
    """The drop reason, or the empty string."""
    capacity: bool
    """Refused for lack of capacity: teaches a ceiling."""
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The try failed in a way that counts: other 5xx, 408, cut body, time-out, reset before an answer."""

    why: str
    status: int | None = None
    """Set where the gateway answered."""
    body: bytes = b""
    nobody_home: bool = False
    """An empty 500, or a 502/503/504 without drop reason: three in a row mean an unreachable gateway."""
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Unreachable:
    """No gateway there: no connection, 401/407, 404 with an empty body. No attempt counted."""

    why: str


@dataclass(frozen=True, slots=True)
class TooLarge:
    """The answer passed gateway.max_response_bytes; retrying would not shrink it."""

    status: int
    limit_bytes: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Not sent: the request asks for what it must not have (endpoint, header). No retry can mend it."""

    why: str


@dataclass(frozen=True, slots=True)
class Expired:
    """The deadline passed before or during the try."""


Outcome = Delivered | Overloaded | Failed | Unreachable | TooLarge | Refused | Expired
