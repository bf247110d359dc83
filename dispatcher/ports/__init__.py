"""What the dispatch loop needs of the world: the smallest Protocols, and the values that cross them.

Every time here is on one clock, the running event loop's (``loop.time()``, seconds). An adapter that
speaks to something with another clock (Redis TIME, Prometheus) translates at its boundary, so that no
decision ever compares two clocks. Deadlines alone are Unix seconds: ``Queue.unix_now`` tells the queue's
idea of them.
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
