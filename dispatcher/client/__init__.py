"""The Python client: submit requests to a pool's queue and wait for their results.

It needs only `redis` and `msgspec`, not the other dependencies of the dispatcher.

from dispatcher.client import BatchClient

async with BatchClient("redis://…", pool="qwen") as client:
    result = await client.submit({"model": "m", "prompt": "hi"}, deadline="10m")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatcher.client.batch import BatchClient
from dispatcher.client.errors import NameInUseError, NoResultError, QueueUnreachableError, SequenceBusyError
from dispatcher.client.item import Handle, Item
from dispatcher.client.result import (
    DeadlineExceededError,
    HookError,
    RequestCancelledError,
    RequestFailedError,
    Result,
    SequenceAbortedError,
    SequenceDeniedError,
    SequenceEndedError,
    SequenceError,
    SequenceFullError,
    SequenceIndexError,
    TokenUsage,
)
from dispatcher.client.sequence import OpenSequence
from dispatcher.core.errors import (
    BatchError,
    ClosedError,
    TooManyPendingError,
    WorkerCrashedError,
    WrongLengthError,
)
from dispatcher.core.requests.named_stream import StreamRequest, StreamState, StreamStatus
from dispatcher.core.sequences.turns import OnError, SequenceSnapshot, SequenceStatus, Turn

if TYPE_CHECKING:
    from dispatcher.batched.decorator import Batched, batched
    from dispatcher.batched.worker_index import worker_index

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
    "QueueUnreachableError",
    "RequestCancelledError",
    "RequestFailedError",
    "Result",
    "SequenceAbortedError",
    "SequenceBusyError",
    "SequenceDeniedError",
    "SequenceEndedError",
    "SequenceError",
    "SequenceFullError",
    "SequenceIndexError",
    "SequenceSnapshot",
    "SequenceStatus",
    "StreamRequest",
    "StreamState",
    "StreamStatus",
    "TokenUsage",
    "TooManyPendingError",
    "Turn",
    "WorkerCrashedError",
    "WrongLengthError",
    "batched",
    "worker_index",
]


def __getattr__(name: str) -> Any:
    """Load `batched` on first use, so that programs without it start faster."""
    if name == "worker_index":
        from dispatcher.batched.worker_index import worker_index

        return worker_index
    if name not in ("Batched", "batched"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dispatcher.batched import decorator as module

    return getattr(module, name)
