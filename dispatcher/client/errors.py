"""What a client raises; errors that hold a result lie with it. All are a BatchError; a wrong argument is a
ValueError or a TypeError."""

from __future__ import annotations

from dispatcher.batched.errors import BatchError
from dispatcher.core.requests.submission import QueueUnavailableError


class QueueAwayError(BatchError, QueueUnavailableError):
    """Redis could not be reached for as long as the call may wait, or refuses this user or this call.

    A submission that ends so may have been made all the same.
    """


class NoResultError(BatchError):
    """No result came in time. The request may still be under way."""


class NameInUseError(BatchError):
    """Another client of this name takes its results."""


class SequenceBusyError(BatchError):
    """Others have submitted so much of a sequence that it cannot be seen which index comes next."""
