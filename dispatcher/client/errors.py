"""Exceptions of the client. Exceptions that carry a result are in `result.py`.

All are subclasses of BatchError. A wrong argument raises ValueError or TypeError instead.
"""

from __future__ import annotations

from dispatcher.common.errors import BatchError
from dispatcher.requests.submission import QueueUnavailableError


class QueueUnreachableError(BatchError, QueueUnavailableError):
    """Redis was unreachable for longer than the call may wait, or it rejects this user or this call.

    A submission that raises this error may still have reached the queue.
    """


class NoResultError(BatchError):
    """No result arrived in time. The request may still be in the queue or in flight."""


class NameInUseError(BatchError):
    """Another client with the same name reads the results."""


class SequenceBusyError(BatchError):
    """The next index of a sequence is unknown, because too many requests of other programs wait in it."""
