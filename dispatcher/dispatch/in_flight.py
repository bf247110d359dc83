"""What this process holds: each lease from its claim until the queue has confirmed its end."""

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
    """One exchange with the gateway, for the leases that ride on it."""

    token: str
    """Names it to gateway and limiter, and is used once."""
    request: Request
    """What is sent."""
    riders: list[HeldLease]
    """Those that wait for its answer."""
    task: asyncio.Task[None] | None = None
    bundled: bool = False
    """What its answer means for each of them is for `Batching` to say."""
    again: bool = False
    """It follows from another try of these leases."""
    units: int = field(init=False)
    """What its leases count of the limit, and a unit at least."""
    left: int = 0
    """Units of those that have left it, and are still at the gateway with it."""

    def __post_init__(self) -> None:
        riders = self.riders
        units = riders[0].lease.units if len(riders) == 1 else sum([held.lease.units for held in riders])
        self.units = units or 1


@dataclass(slots=True, eq=False)
class HeldLease:
    """One lease, and what has become of its request here."""

    lease: Lease
    probe: bool = False
    """It was claimed to see whether the gateway is back."""
    request: Request | None = None
    """None where the member is none."""
    waits: bool = False
    """It waits for company."""
    rides: Try | None = None
    """Set while it is at the gateway."""
    cut: Cut | None = None
    """Why its answer is no longer waited for."""
    answered_at: float | None = None
    """Time at which its try ended. `None` if it was not tried, or its try was cut."""
    claimed_at: float = 0.0
    confirmed_at: float = 0.0
    """Time of the newest call that confirmed the lease as ours, by the clock of `Tenure`."""
    answer: AnswerMemory | None = None
    """Memory that the answer takes. `None` if there is no answer, or its memory is not counted."""
    trail: Trail | None = None
    """What is traced of it; None: nothing."""
    goes: Goes | None = None
    """It is of a sequence, and its turn has come."""
    model: str = ""
    """What its body asks for, where models are watched."""
    version: str = ""
    """The version of that which it is sent to; empty: it has none, or none is open."""
    uses: str = ""
    """The version that is under way by it: that, or `model` where this is one itself."""


class Holding:
    """The leases by token, and the tries that are at the gateway."""

    def __init__(self) -> None:
        self.left: Callable[[HeldLease], object] = lambda _held: None
        """Told of each that leaves a try which goes on for others."""
        self.units = 0
        """What the leases count of the limit."""
        self.running_units = 0
        """Those among them at the gateway."""
        self.in_lanes: Counter[Lane] = Counter()
        """How many of the leases are of each lane."""
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
        """How many of them are at the gateway."""
        return self._running

    def at_gateway(self) -> list[HeldLease]:
        return [held for each in self._tries.values() for held in each.riders]

    def in_work(self) -> list[HeldLease]:
        """At the gateway, or waiting for company to go there."""
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
        """Its lease counts so many now. It is not at the gateway yet."""
        self.units += units - held.lease.units
        held.lease = held.lease.but(units=units)

    def started(self, begun: Try) -> None:
        self._tries[begun.token] = begun
        self._running += len(begun.riders)
        self.running_units += begun.units
        for held in begun.riders:
            held.rides = begun

    def back(self, ended: Try) -> None:
        """It is no longer at the gateway."""
        if self._tries.pop(ended.token, None) is not None:
            self._running -= len(ended.riders)
            self.running_units -= ended.units
            self.units -= ended.left
            # A task holds what it runs: in a circle they would live until they are searched for.
            ended.task = None
            for held in ended.riders:
                held.rides = None

    def drop(self, token: str) -> HeldLease | None:
        """The lease has ended; what was held of it."""
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
        """Its answer is not waited for any more. Where others wait for it the lease leaves the try, and what
        it counts stays with that; else the try is cancelled, which closes the connection."""
        tried = held.rides
        if (tried is None and not held.waits) or held.cut is not None:
            return
        held.cut = why
        if tried is None:
            return
        if len(tried.riders) > 1:
            tried.riders = [rider for rider in tried.riders if rider is not held]
            held.rides = None
            self._running -= 1
            tried.left += held.lease.units
            self.units += held.lease.units
            self.left(held)
        elif tried.task is not None:
            tried.task.cancel()

    def recheck(self) -> None:
        """Have `emptied` look again at how long it may wait."""
        self._recheck.set()

    async def emptied(self, within_s: float) -> None:
        """Return when nothing is held, when the time has passed, or to have the time looked at again."""
        self._recheck.clear()
        if not self._by_token:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._recheck.wait()
