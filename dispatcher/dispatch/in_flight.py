"""Leases of this process, each from its claim until the queue has confirmed its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from dispatcher.core.requests.lanes import Lane
from dispatcher.core.requests.request import Request
from dispatcher.core.sequences.decisions import Goes
from dispatcher.ports import AnswerMemory, Lease
from dispatcher.telemetry.tracing import Trail

Cut = Literal["cancelled", "lost", "late", "drain"]


@dataclass(slots=True, eq=False)
class Try:
    """One HTTP exchange with the gateway, for one lease or several."""

    token: str
    """Name for gateway and limiter, used once."""
    request: Request
    """Request that is sent."""
    riders: list[HeldLease]
    """Leases that wait for the answer."""
    task: asyncio.Task[None] | None = None
    bundled: bool = False
    """True if `RequestMerger` decides what the answer means for each lease."""
    again: bool = False
    """True if it follows from another attempt of these leases."""
    units: int = field(init=False)
    """Units of its leases in the limit, at least 1."""
    left: int = 0
    """Units of leases that stopped waiting for the answer; the gateway still works on them."""

    def __post_init__(self) -> None:
        riders = self.riders
        # Almost every attempt has one lease, and this runs for each request: avoid the list.
        units = riders[0].lease.units if len(riders) == 1 else sum([held.lease.units for held in riders])
        self.units = units or 1


@dataclass(slots=True, eq=False)
class HeldLease:
    """One lease and the state of its request in this process."""

    lease: Lease
    probe: bool = False
    """True if it was claimed to see whether the gateway is back."""
    request: Request | None = None
    """Parsed request. `None` if the member is not a valid request."""
    waits: bool = False
    """True while it waits in a batch group."""
    rides: Try | None = None
    """Attempt at the gateway that the lease takes part in."""
    cut: Cut | None = None
    """Reason why the answer is no longer awaited."""
    answered_at: float | None = None
    """Time at which its attempt ended. `None` if there was no attempt, or it was stopped."""
    claimed_at: float = 0.0
    confirmed_at: float = 0.0
    """Start of the newest call that confirmed the lease, by the clock of `LeaseValidity`."""
    answer: AnswerMemory | None = None
    """Memory that the answer occupies. `None` if there is no answer, or its memory is not counted."""
    trail: Trail | None = None
    """Trace of this delivery. `None` if it is not traced."""
    goes: Goes | None = None
    """Granted turn in its sequence. `None` if it belongs to no sequence, or its turn is not known yet."""
    model: str = ""
    """Model that the body names. Empty if served models are not watched."""
    version: str = ""
    """Version of the model that the request is sent to. Empty if the model has none, or none is open."""
    uses: str = ""
    """Version that counts as in use because of this lease: `version`, or `model` if the body names a version
    itself."""


class Holding:
    """All leases of this process by token, and the attempts at the gateway."""

    def __init__(self) -> None:
        self.left: Callable[[HeldLease], object] = lambda _held: None
        """Callback for each lease that leaves an attempt which continues for others."""
        self.units = 0
        """Units of all leases in the limit."""
        self.running_units = 0
        """Part of `units` that is at the gateway."""
        self.in_lanes: Counter[Lane] = Counter()
        """Number of leases of each lane."""
        self._by_token: dict[str, HeldLease] = {}
        self._tries: dict[str, Try] = {}
        self._running = 0
        self._recheck = asyncio.Event()

    def __len__(self) -> int:
        return len(self._by_token)

    def __contains__(self, held: HeldLease) -> bool:
        return self._by_token.get(held.lease.token) is held

    def __iter__(self) -> Iterator[HeldLease]:
        return iter(list(self._by_token.values()))

    @property
    def running(self) -> int:
        """Number of leases at the gateway."""
        return self._running

    def at_gateway(self) -> list[HeldLease]:
        return [held for each in self._tries.values() for held in each.riders]

    def in_work(self) -> list[HeldLease]:
        """Return the leases at the gateway, and those that wait in a batch group."""
        return [held for held in self._by_token.values() if held.rides is not None or held.waits]

    @property
    def tries(self) -> list[Try]:
        return list(self._tries.values())

    def add(self, lease: Lease, confirmed_at: float, *, probe: bool) -> HeldLease:
        held = self._by_token[lease.token] = HeldLease(lease, probe, confirmed_at=confirmed_at)
        held.claimed_at = asyncio.get_running_loop().time()
        self.units += lease.units
        if lease.lane is not None:
            self.in_lanes[lease.lane] += 1
        return held

    def weighs(self, held: HeldLease, units: int) -> None:
        """Set the units that a lease counts. It must not be at the gateway yet."""
        self.units += units - held.lease.units
        held.lease = held.lease.but(units=units)

    def started(self, begun: Try) -> None:
        self._tries[begun.token] = begun
        self._running += len(begun.riders)
        self.running_units += begun.units
        for held in begun.riders:
            held.rides = begun

    def back(self, ended: Try) -> None:
        """Record that an attempt is no longer at the gateway."""
        if self._tries.pop(ended.token, None) is not None:
            self._running -= len(ended.riders)
            self.running_units -= ended.units
            # Units of leases that left stay in the limit until here, because the gateway still worked on
            # them.
            self.units -= ended.left
            # Break the reference cycle of attempt and task, which only the garbage collector would free.
            ended.task = None
            for held in ended.riders:
                held.rides = None

    def drop(self, token: str) -> HeldLease | None:
        """Remove a lease that has ended, and return it. `None` if it was removed before."""
        held = self._by_token.pop(token, None)
        if held is not None:
            if held.answer is not None:
                held.answer.free()
            self.units -= held.lease.units
            if held.lease.lane is not None:
                self.in_lanes[held.lease.lane] -= 1
        if not self._by_token:
            self._recheck.set()
        return held

    def cut(self, held: HeldLease, why: Cut) -> None:
        """Stop waiting for the answer of a lease.

        If other leases wait for the same answer, this one leaves the attempt, and its units stay with the
        attempt. Else the attempt is cancelled, which closes the connection.
        """
        tried = held.rides
        # The first reason wins; a lease that has finished has nothing to stop.
        if (tried is None and not held.waits) or held.cut is not None:
            return
        held.cut = why
        if tried is None:
            return
        if len(tried.riders) > 1:
            tried.riders = [rider for rider in tried.riders if rider is not held]
            held.rides = None
            self._running -= 1
            # The caller removes the lease soon, which subtracts its units. The sum stays right: the attempt
            # still occupies them until it ends.
            tried.left += held.lease.units
            self.units += held.lease.units
            self.left(held)
        elif tried.task is not None:
            tried.task.cancel()

    def recheck(self) -> None:
        """Make `wait_until_empty` return, so that its caller can compute a new timeout."""
        self._recheck.set()

    async def emptied(self, within_s: float) -> None:
        """Return when no lease is left, after `within_s`, or after `request_recheck`."""
        self._recheck.clear()
        if not self._by_token:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._recheck.wait()
