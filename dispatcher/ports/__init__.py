"""Protocols through which the dispatcher talks to the outside world, and the values that cross them.

`Queue` is the queue as one dispatcher process (an owner) uses it, `QueueAdmin` the queue as producers and
operators use it. `Gateway` sends requests, `ModelServers` calls single model servers for warm-ups.

All times are on the clock of the running event loop (``loop.time()``, in seconds). An adapter whose backend
has another clock (Redis TIME, Prometheus) translates at its boundary, so that no decision ever compares two
clocks. Deadlines are the exception: they are Unix seconds, and `Queue.unix_now` gives the current Unix time
by the clock of the queue.
"""

from dispatcher.core.requests.queue_counts import Counts
from dispatcher.core.requests.submission import CallRefusedError, QueueUnavailableError, Submission
from dispatcher.ports.gateway import (
    AnswerMemory,
    Forwarded,
    Gateway,
)
from dispatcher.ports.model_registry import ModelBoard, ModelMarks, PinAsked
from dispatcher.ports.model_servers import ModelServers
from dispatcher.ports.queue import (
    Burial,
    Claimed,
    Expired,
    HandedOver,
    Lease,
    Leases,
    LinedUp,
    Overload,
    Permit,
    Queue,
    Recalled,
    Release,
    Renewed,
    Settled,
    Settlement,
    Shared,
    Swept,
    Unserved,
    Weighed,
)
from dispatcher.ports.queue_admin import Dead, Desk

__all__ = [
    "AnswerMemory",
    "Burial",
    "CallRefusedError",
    "Claimed",
    "Counts",
    "Dead",
    "Desk",
    "Expired",
    "Forwarded",
    "Gateway",
    "HandedOver",
    "Lease",
    "Leases",
    "LinedUp",
    "ModelBoard",
    "ModelMarks",
    "ModelServers",
    "Overload",
    "Permit",
    "PinAsked",
    "Queue",
    "QueueUnavailableError",
    "Recalled",
    "Release",
    "Renewed",
    "Settled",
    "Settlement",
    "Shared",
    "Submission",
    "Swept",
    "Unserved",
    "Weighed",
]
