"""For programs that submit work: requests in, results out. Needs redis and msgspec, nothing else of the
dispatcher's.

from dispatcher.client import BatchClient

async with BatchClient("redis://…", pool="qwen") as client:
    result = await client.submit({"model": "m", "prompt": "hi"}, deadline="10m")
"""

from __future__ import annotations

from dispatcher.client.batch import BatchClient
from dispatcher.client.errors import (
    BatchError,
    DeadlineExceededError,
    HookError,
    NameInUseError,
    NoResultError,
    QueueAwayError,
    RequestCancelledError,
    RequestFailedError,
    TooManyPendingError,
)
from dispatcher.client.item import Handle, Item
from dispatcher.client.result import Result, TokenUsage

__all__ = [
    "BatchClient",
    "BatchError",
    "DeadlineExceededError",
    "Handle",
    "HookError",
    "Item",
    "NameInUseError",
    "NoResultError",
    "QueueAwayError",
    "RequestCancelledError",
    "RequestFailedError",
    "Result",
    "TokenUsage",
    "TooManyPendingError",
]
