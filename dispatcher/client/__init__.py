"""The Python client: submit requests to a pool's queue and wait for their results.

It needs only `redis` and `msgspec`, not the other dependencies of the dispatcher.

from dispatcher.client import BatchClient

async with BatchClient("redis://…", pool="qwen") as client:
    result = await client.submit({"model": "m", "prompt": "hi"}, deadline="10m")
"""

from __future__ import annotations

from importlib import import_module
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
from dispatcher.common.errors import (
    BatchError,
    ClosedError,
    TooManyPendingError,
    WorkerCrashedError,
    WrongLengthError,
)

if TYPE_CHECKING:
    from dispatcher.batched.decorator import Batched, batched
    from dispatcher.batched.worker_index import worker_index
    from dispatcher.features.named_streams.state import StreamRequest, StreamState, StreamStatus
    from dispatcher.features.sequences.client import OpenSequence
    from dispatcher.features.sequences.turns import OnError, SequenceSnapshot, SequenceStatus, Turn

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


_STREAM_STATE = "dispatcher.features.named_streams.state"
_TURNS = "dispatcher.features.sequences.turns"
_LAZY_MODULES = {
    "Batched": "dispatcher.batched.decorator",
    "batched": "dispatcher.batched.decorator",
    "worker_index": "dispatcher.batched.worker_index",
    "StreamRequest": _STREAM_STATE,
    "StreamState": _STREAM_STATE,
    "StreamStatus": _STREAM_STATE,
    "OpenSequence": "dispatcher.features.sequences.client",
    "OnError": _TURNS,
    "SequenceSnapshot": _TURNS,
    "SequenceStatus": _TURNS,
    "Turn": _TURNS,
}


def __getattr__(name: str) -> Any:
    """Load on first use what few programs use, so that the others start faster."""
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY_MODULES[name]), name)
