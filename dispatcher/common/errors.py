"""Errors that the client and functions made by `batched` have in common, and their base `BatchError`."""

from __future__ import annotations


class BatchError(Exception):
    """Base class of every error that `dispatcher.client` and `dispatcher.batched` raise.

    Wrong arguments raise `ValueError` or `TypeError` instead.
    """


class ClosedError(BatchError):
    """The batched function was closed, or the sequence was left or has had its last request."""


class TooManyPendingError(BatchError):
    """The number of unanswered requests, or of results that nobody has read, has reached its bound.

    The bound is `max_pending` of a client, which raises the error only with `when_full="raise"` and otherwise
    waits, `max_pending` of a sequence over whose results a program iterates, and `max_waiting` of a batched
    function.
    """


class WrongLengthError(BatchError):
    """A batched function did not return exactly one result for each item."""


class WorkerCrashedError(BatchError):
    """The worker process of a batched class ended while it held this item, or could not start."""
