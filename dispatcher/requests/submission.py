"""Requests as producers submit them, and errors of calls to the queue.

`ports` re-exports these names. They are in a module of their own so that a producer's program, which needs
nothing else from `ports`, loads little.
"""

from __future__ import annotations

from dataclasses import dataclass


class QueueUnavailableError(Exception):
    """The queue cannot be reached, or refuses to work for now (loading, read-only, out of memory).

    The message is one sentence for an operator. A call that raised this may or may not have been executed.
    Every step can be repeated: claims are identified by a nonce, and other steps are fenced by the token of
    the lease.
    """


class CallRefusedError(QueueUnavailableError):
    """The queue refused this call, or its answer was not understood. Other calls may still succeed."""


class QueueFullError(QueueUnavailableError):
    """The call would leave more requests waiting than `queue.max_pending`. No request of the call was
    accepted."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as a producer submits it."""

    member: bytes
    score: float
    request_id: str = ""
    request_token: str = ""
    deadline: int = 0
    """Unix seconds. If id, token and deadline are given, the request can be cancelled until the deadline."""
