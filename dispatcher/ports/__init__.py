"""Protocols through which the dispatcher talks to the outside world, and the values that cross them.

`Queue` is the queue as one dispatcher process (an owner) uses it, `QueueAdmin` the queue as producers and
operators use it. `Gateway` sends requests, `ModelServers` calls single model servers for warm-ups.

All times are on the clock of the running event loop (``loop.time()``, in seconds). An adapter whose backend
has another clock (Redis TIME, Prometheus) translates at its boundary, so that no decision ever compares two
clocks. Deadlines are the exception: they are Unix seconds, and `Queue.unix_now` gives the current Unix time
by the clock of the queue.
"""

from dispatcher.core.requests.queue_counts import QueueCounts
from dispatcher.core.requests.submission import CallRefusedError, QueueUnavailableError, Submission
from dispatcher.ports.gateway import (
    AnswerMemory,
    AttemptResult,
    Gateway,
)
from dispatcher.ports.model_registry import ModelRegistry, ModelRegistryState, PinRequest
from dispatcher.ports.model_servers import ModelServers
from dispatcher.ports.queue import (
    MAX_PROGRESS_BYTES,
    ClaimResult,
    ClaimTurnsResult,
    DeadLetter,
    EndAndClaimResult,
    Lease,
    LeaseCounts,
    LeaseUnitsResult,
    Overload,
    Permit,
    Queue,
    Release,
    RemainingRequest,
    RenewResult,
    ReturnedRequests,
    Settlement,
    SettleStatus,
    SharedState,
    SweepSummary,
    UnleasedRequest,
)
from dispatcher.ports.queue_admin import DeadRequest, QueueAdmin

__all__ = [
    "MAX_PROGRESS_BYTES",
    "AnswerMemory",
    "AttemptResult",
    "CallRefusedError",
    "ClaimResult",
    "ClaimTurnsResult",
    "DeadLetter",
    "DeadRequest",
    "EndAndClaimResult",
    "Gateway",
    "Lease",
    "LeaseCounts",
    "LeaseUnitsResult",
    "ModelRegistry",
    "ModelRegistryState",
    "ModelServers",
    "Overload",
    "Permit",
    "PinRequest",
    "Queue",
    "QueueAdmin",
    "QueueCounts",
    "QueueUnavailableError",
    "Release",
    "RemainingRequest",
    "RenewResult",
    "ReturnedRequests",
    "SettleStatus",
    "Settlement",
    "SharedState",
    "Submission",
    "SweepSummary",
    "UnleasedRequest",
]
