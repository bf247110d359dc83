"""Parts that the kernel and its features share, instead of long lists of arguments."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dispatcher.kernel.hooks import Hooks
from dispatcher.kernel.in_flight import InFlightTable
from dispatcher.kernel.parsed_requests import ParsedRequestCache
from dispatcher.queue.contract import DeadLetter, Settlement
from dispatcher.telemetry.events import Event, emit

if TYPE_CHECKING:
    from dispatcher.gateway.contract import Gateway
    from dispatcher.kernel.completions import Completion
    from dispatcher.kernel.in_flight import InFlightLease
    from dispatcher.kernel.journal import Journal
    from dispatcher.kernel.options import Options
    from dispatcher.kernel.queue_access import QueueAccess
    from dispatcher.limit.limiter import Limiter


@dataclass(slots=True, eq=False)
class KernelContext:
    """The shared parts of one process, and the two ways in which a lease leaves it."""

    access: QueueAccess
    limiter: Limiter
    gateway: Gateway
    journal: Journal
    options: Options
    """Options in use. A reload replaces them, so read them here at each use."""
    random: random.Random = field(default_factory=random.Random)
    in_flight: InFlightTable = field(default_factory=InFlightTable)
    parsed_requests: ParsedRequestCache = field(default_factory=ParsedRequestCache)
    """Requests that returned to the queue and need not be parsed again."""
    pending: list[Completion] = field(default_factory=list)
    """Completions that are not flushed to the queue yet."""
    timeout_counts: dict[str, int] = field(default_factory=lambda: {"reject": 0, "delay": 0})
    """Number of requests that were claimed after the timeout of their rule, by what happened to them."""
    hooks: Hooks = field(default_factory=Hooks)

    def complete(self, completion: Completion) -> None:
        """End a lease: the next flush tells the queue."""
        if completion.__class__ is Settlement:
            if completion.request_extra is not None or completion.lease.progress:
                completion = self.end_request(completion)
        elif completion.__class__ is DeadLetter and completion.settlement.request_extra is not None:
            settlement = self.end_request(completion.settlement, is_dead_letter=True)
            completion = DeadLetter(settlement, completion.reason, completion.is_failed_attempt)
        self.pending.append(completion)
        self.access.wake.set()

    def end_request(self, settlement: Settlement, is_dead_letter: bool = False) -> Settlement:
        """Return the settlement of a request of which a feature knows more, with what features add to it."""
        for end in self.hooks.end_request:
            settlement = end(settlement, is_dead_letter)
        return settlement

    def remove_lease(self, token: str) -> InFlightLease | None:
        """Remove a lease that has ended, or that another owner has now. `None` if it is not known."""
        entry = self.in_flight.remove_lease(token)
        for part in self.hooks.lease_parts:
            if token in part.leases:
                try:
                    part.forget_lease(token)
                except Exception as error:  # the lease has ended, and the other features must forget it
                    emit(Event.INTERNAL_ERROR, where="ended lease", error=repr(error))
        return entry

    def remove_lost_lease(self, token: str) -> None:
        """Remove a lease whose units are free now, and wake the loop that may use them."""
        self.access.wake.set()
        self.remove_lease(token)
