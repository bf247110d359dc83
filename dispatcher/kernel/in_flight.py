"""Leases of this process, each from its claim until the queue has confirmed its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dispatcher.gateway.contract import AnswerMemory
from dispatcher.queue.contract import Lease
from dispatcher.requests.lanes import Lane
from dispatcher.requests.request import Request

StopReason = Literal["cancelled", "lost", "deadline", "drain", "revoked"]


class Call(Protocol):
    """Record of a grouping about an attempt that it has created."""

    def release_waiting(self) -> list[InFlightLease]:
        """End the call and those that follow it. Return the leases that waited for them, unless they are also
        in another call at the gateway."""
        ...


@dataclass(slots=True, eq=False)
class Attempt:
    """One HTTP exchange with the gateway, for one lease or several."""

    token: str
    """Name for gateway and limiter, used once."""
    request: Request
    """Request that is sent."""
    leases: list[InFlightLease]
    """Leases that wait for the answer."""
    task: asyncio.Task[None] | None = None
    call: Call | None = None
    """Call of the grouping, which then decides what the answer means for each lease. `None` for others."""
    deadline_timer: asyncio.TimerHandle | None = None
    """Timer for leases whose deadline comes before the answer. `None` if there is none."""
    is_follow_up: bool = False
    """True if it follows from another attempt of these leases."""
    units: int = field(init=False)
    """Units of its leases in the limit, at least 1."""
    detached_units: int = 0
    """Units of leases that stopped waiting for the answer; the gateway still works on them."""

    def __post_init__(self) -> None:
        leases = self.leases
        # Almost every attempt has one lease, and this runs for each request: avoid the list.
        units = leases[0].lease.units if len(leases) == 1 else sum([entry.lease.units for entry in leases])
        self.units = units or 1


@dataclass(slots=True, eq=False)
class InFlightLease:
    """One lease and its request in this process. Only `InFlightTable` writes the fields.

    What features and the journal know about a lease they keep themselves, by its token.
    """

    lease: Lease
    is_probe: bool = False
    """True if it was claimed to see whether the gateway is back."""
    request: Request | None = None
    """Parsed request as it is sent. `None` if the member is not a valid request."""
    is_in_batch_group: bool = False
    """True while it waits in a batch group."""
    attempt: Attempt | None = None
    """Attempt at the gateway that the lease takes part in."""
    stop_reason: StopReason | None = None
    """Reason why the answer is no longer awaited."""
    answered_at: float | None = None
    """Time at which its attempt ended. `None` if there was no attempt, or it was stopped."""
    claimed_at: float = 0.0
    confirmed_at: float = 0.0
    """Start of the newest call that confirmed the lease, by the clock of `LeaseValidity`."""
    has_new_progress: bool = False
    """True if the queue does not have the progress of the lease yet."""
    answer_memory: AnswerMemory | None = None
    """Memory that the answer occupies. `None` if there is no answer, or its memory is not counted."""


class InFlightTable:
    """All leases of this process by token, and the attempts at the gateway."""

    def __init__(self) -> None:
        self.on_detached: Callable[[InFlightLease], object] = lambda _entry: None
        """Callback for each lease that leaves an attempt which continues for others."""
        self.units = 0
        """Units of all leases in the limit."""
        self.running_units = 0
        """Part of `units` that is at the gateway."""
        self.lane_counts: Counter[Lane] = Counter()
        """Number of leases of each lane."""
        self._by_token: dict[str, InFlightLease] = {}
        self._attempts: dict[str, Attempt] = {}
        self._running_count = 0
        self._recheck_event = asyncio.Event()

    def __len__(self) -> int:
        return len(self._by_token)

    def __contains__(self, entry: InFlightLease) -> bool:
        return self._by_token.get(entry.lease.token) is entry

    def __iter__(self) -> Iterator[InFlightLease]:
        return iter(list(self._by_token.values()))

    @property
    def running_count(self) -> int:
        """Number of leases at the gateway."""
        return self._running_count

    def list_at_gateway(self) -> list[InFlightLease]:
        return [entry for attempt in self._attempts.values() for entry in attempt.leases]

    def list_in_work(self) -> list[InFlightLease]:
        """Return the leases at the gateway, and those that wait in a batch group."""
        return [
            entry for entry in self._by_token.values() if entry.attempt is not None or entry.is_in_batch_group
        ]

    @property
    def attempts(self) -> list[Attempt]:
        return list(self._attempts.values())

    def find_lease(self, token: str) -> InFlightLease | None:
        return self._by_token.get(token)

    def add_lease(self, lease: Lease, confirmed_at: float, *, is_probe: bool = False) -> InFlightLease:
        (entry,) = self.add_leases((lease,), confirmed_at, is_probe=is_probe)
        return entry

    def add_leases(
        self, leases: Iterable[Lease], confirmed_at: float, *, is_probe: bool = False
    ) -> list[InFlightLease]:
        """Add the leases that one call has confirmed."""
        entries: list[InFlightLease] = []
        claimed_at = asyncio.get_running_loop().time()
        for lease in leases:
            entry = self._by_token[lease.token] = InFlightLease(
                lease, is_probe, claimed_at=claimed_at, confirmed_at=confirmed_at
            )
            self.units += lease.units
            if lease.lane is not None:
                self.lane_counts[lease.lane] += 1
            entries += (entry,)  # faster than `append`, because it needs no call
        return entries

    def drop_member(self, entry: InFlightLease) -> None:
        """Drop the bytes of a member, which are not needed once the request is parsed."""
        entry.lease = entry.lease.copy_with(member=b"")

    def confirm_leases(
        self, entries: Iterable[InFlightLease], lost_entry_ids: Set[int], confirmed_at: float
    ) -> None:
        """Record a call that confirmed these leases, except for the lost ones."""
        for entry in entries:
            if entry.lease.entry_id not in lost_entry_ids:
                entry.confirmed_at = confirmed_at

    def end_probes(self) -> None:
        """Count every probe as an ordinary request from now on, because the gateway is back."""
        for entry in self._by_token.values():
            entry.is_probe = False

    def set_request(self, entry: InFlightLease, request: Request) -> None:
        """Set the request of a lease, or replace it by the one that is sent."""
        entry.request = request

    def set_units(self, entry: InFlightLease, units: int) -> None:
        """Set the units that a lease counts. It must not be at the gateway yet."""
        self.units += units - entry.lease.units
        entry.lease = entry.lease.copy_with(units=units)

    def set_progress(self, entry: InFlightLease, progress: bytes) -> None:
        """Set the progress of the request, as it is to be stored with it."""
        entry.lease, entry.has_new_progress = entry.lease.copy_with(progress=progress), True

    def enter_batch_group(self, entry: InFlightLease) -> None:
        entry.is_in_batch_group = True

    def leave_batch_group(self, entries: Iterable[InFlightLease]) -> None:
        for entry in entries:
            entry.is_in_batch_group = False

    def start_attempt(self, attempt: Attempt) -> None:
        self._attempts[attempt.token] = attempt
        self._running_count += len(attempt.leases)
        self.running_units += attempt.units
        for entry in attempt.leases:
            entry.attempt = attempt

    def end_attempt(self, attempt: Attempt) -> None:
        """Record that an attempt is no longer at the gateway."""
        if self._attempts.pop(attempt.token, None) is not None:
            self._running_count -= len(attempt.leases)
            self.running_units -= attempt.units
            # Units of leases that left stay in the limit until here, because the gateway still worked on
            # them.
            self.units -= attempt.detached_units
            if attempt.deadline_timer is not None:
                attempt.deadline_timer.cancel()
                attempt.deadline_timer = None
            # Break the reference cycle of attempt and task, which only the garbage collector would free.
            attempt.task = None
            for entry in attempt.leases:
                entry.attempt = None

    def record_answer(self, entry: InFlightLease, answered_at: float) -> None:
        entry.answered_at = answered_at

    def keep_answer_memory(self, entries: Iterable[InFlightLease], memory: AnswerMemory) -> None:
        """Give the memory of an answer back when the queue has confirmed the end of all these leases."""
        entries = [entry for entry in entries if entry in self]
        for entry in entries:
            entry.answer_memory = memory
        # 0 if all leases have ended meanwhile, which gives the memory back at once.
        memory.split_into(len(entries))

    def remove_lease(self, token: str) -> InFlightLease | None:
        """Remove a lease that has ended, and return it. `None` if it was removed before."""
        entry = self._by_token.pop(token, None)
        if entry is not None:
            if entry.answer_memory is not None:
                entry.answer_memory.free_share()
            self.units -= entry.lease.units
            if entry.lease.lane is not None:
                self.lane_counts[entry.lease.lane] -= 1
        if not self._by_token:
            self._recheck_event.set()
        return entry

    def stop_waiting(self, entry: InFlightLease, reason: StopReason) -> None:
        """Stop waiting for the answer of a lease.

        If other leases wait for the same answer, this one leaves the attempt, and its units stay with the
        attempt. Else the attempt is cancelled, which closes the connection.
        """
        attempt = entry.attempt
        # The first reason wins; a lease that has finished has nothing to stop.
        if (attempt is None and not entry.is_in_batch_group) or entry.stop_reason is not None:
            return
        entry.stop_reason = reason
        if attempt is None:
            return
        if len(attempt.leases) > 1:
            attempt.leases = [other for other in attempt.leases if other is not entry]
            entry.attempt = None
            self._running_count -= 1
            # The caller removes the lease soon, which subtracts its units. The sum stays right: the attempt
            # still occupies them until it ends.
            attempt.detached_units += entry.lease.units
            self.units += entry.lease.units
            self.on_detached(entry)
        elif attempt.task is not None:
            attempt.task.cancel()

    def request_recheck(self) -> None:
        """Make `wait_until_empty` return, so that its caller can compute a new timeout."""
        self._recheck_event.set()

    async def wait_until_empty(self, within_s: float) -> None:
        """Return when no lease is left, after `within_s`, or after `request_recheck`."""
        self._recheck_event.clear()
        if not self._by_token:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._recheck_event.wait()
