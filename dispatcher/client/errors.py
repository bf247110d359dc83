"""What a client raises. All are a BatchError; a wrong argument is a ValueError or a TypeError."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatcher.core.submission import QueueUnavailableError

if TYPE_CHECKING:
    from dispatcher.client.result import Result


class BatchError(Exception):
    """Whatever a client raises that is no wrong argument."""


class QueueAwayError(BatchError, QueueUnavailableError):
    """Redis could not be reached for as long as the call may wait, or refuses this user or this call.

    A submission that ends so may have been made all the same.
    """


class NoResultError(BatchError):
    """No result came in time. The request may still be under way."""


class NameInUseError(BatchError):
    """Another client of this name takes its results."""


class TooManyPendingError(BatchError):
    """`max_pending` requests of this client are unanswered, and it was told to raise then."""


class HookError(BatchError):
    """`before` or `after` raised; the cause is what it raised."""

    result: Result | None = None
    """The answer that had come, where it was `after`."""


class RequestFailedError(BatchError):
    """A request that has no answer, or one with a status of 400 or more."""

    def __init__(self, message: str, result: Result) -> None:
        super().__init__(message)
        self.result = result

    @property
    def id(self) -> str:
        """Of the request."""
        return self.result.id

    @property
    def code(self) -> str:
        """Why there is no answer: an error code of the queue contract, or empty where there was one."""
        return self.result.code

    @property
    def status(self) -> int | None:
        """Of the last answer; None: there was none."""
        return self.result.status

    @property
    def body(self) -> str:
        """Of the last answer, or what was told instead."""
        return self.result.text


class RequestCancelledError(RequestFailedError):
    """Somebody cancelled it."""


class DeadlineExceededError(RequestFailedError):
    """Its deadline passed before it was answered."""
