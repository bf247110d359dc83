"""What a client raises; errors that hold a result lie with it. All are a BatchError; a wrong argument is a
ValueError or a TypeError."""

from __future__ import annotations

from dispatcher.core.submission import QueueUnavailableError


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
    """As many are unanswered as may be (`max_pending`; `max_queue` of `batched`), and it was told to raise
    then."""


class ClosedError(BatchError):
    """What `batched` made was closed, or a sequence was left or has had its last request: it takes no
    more."""


class SequenceBusyError(BatchError):
    """Others have submitted so much of a sequence that it cannot be seen which index comes next."""


class WrongLengthError(BatchError):
    """A function under `batched` returned something else than one result for each item."""


class WorkerCrashedError(BatchError):
    """The worker process of a class under `batched` ended while it held this item, or could not start."""
