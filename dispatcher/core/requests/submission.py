"""What a producer hands in at the queue's desk, and how a call to the queue fails. Pure.

Part of `ports`, where all others take these from; apart, because a producer's program needs nothing else of
it and should load little.
"""

from __future__ import annotations

from dataclasses import dataclass


class QueueUnavailableError(Exception):
    """The queue cannot be reached, or refuses to work for now (loading, read-only, out of memory).

    The message is one sentence for an operator. A call that raised this may or may not have happened:
    every step can be repeated (claims by nonce, the others because the lease's token fences them).
    """


class CallRefusedError(QueueUnavailableError):
    """This very call was refused, or its answer not understood. That others get through shows nothing."""


class QueueFullError(QueueUnavailableError):
    """The call would leave more requests waiting than `queue.max_pending`. Nothing of it was accepted."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as a producer hands it in."""

    member: bytes
    score: float
    request_id: str = ""
    request_token: str = ""
    deadline: int = 0
    """Unix seconds. All three given: the request can be cancelled until then."""
