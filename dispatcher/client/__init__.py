"""For programs that submit work: requests in, results out. Needs redis and msgspec, nothing else of the
dispatcher's.

from dispatcher.client import BatchClient

async with BatchClient("redis://…", pool="qwen") as client:
    result = await client.submit({"model": "m", "prompt": "hi"}, deadline="10m")
"""

from __future__ import annotations

from dispatcher.client.batch import BatchClient
from dispatcher.client.batched import Batched, batched
from dispatcher.client.errors import (
    BatchError,
    ClosedError,
    NameInUseError,
    NoResultError,
    QueueAwayError,
    SequenceBusyError,
    TooManyPendingError,
    WorkerCrashedError,
    WrongLengthError,
)
from dispatcher.client.item import Handle, Item
from dispatcher.client.result import (
    DeadlineExceededError,
    HookError,
    RequestCancelledError,
    RequestFailedError,
    Result,
    SequenceAbortedError,
    SequenceEndedError,
    SequenceError,
    SequenceFullError,
    SequenceIndexError,
    TokenUsage,
)
from dispatcher.client.sequence import OpenSequence
from dispatcher.core.turns import OnError, SequenceSeen, SequenceStatus, Turn

__all__ = [
    "BatchClient",
    "BatchError",
    "Batched",
    "ClosedError",
    "DeadlineExceededError",
    "Handle",
    "HookError",
    "Item",
    "NameInUseError",
    "NoResultError",
    "OnError",
    "OpenSequence",
    "QueueAwayError",
    "RequestCancelledError",
    "RequestFailedError",
    "Result",
    "SequenceAbortedError",
    "SequenceBusyError",
    "SequenceEndedError",
    "SequenceError",
    "SequenceFullError",
    "SequenceIndexError",
    "SequenceSeen",
    "SequenceStatus",
    "TokenUsage",
    "TooManyPendingError",
    "Turn",
    "WorkerCrashedError",
    "WrongLengthError",
    "batched",
]
