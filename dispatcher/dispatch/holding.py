"""What this process holds: each lease from its claim until the queue has confirmed its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from dispatcher.core.request import Request
from dispatcher.ports import Lease
from dispatcher.telemetry.tracing import Trail

Cut = Literal["cancelled", "lost", "drain"]


@dataclass(slots=True, eq=False)
class Held:
    """One lease, and what has become of its request here."""

    lease: Lease
    probe: bool = False
    """It was claimed to see whether the gateway is back."""
    request: Request | None = None
    """None where the member is none."""
    task: asyncio.Task[None] | None = None
    """Set while it is at the gateway."""
    cut: Cut | None = None
    """Why its task was cancelled."""
    answered_at: float | None = None
    """When its try ended; None: it was not tried, or its try was cut."""
    claimed_at: float = 0.0
    confirmed_at: float = 0.0
    """When the newest call was asked that told it to be ours, by the clock of `Tenure`."""
    trail: Trail | None = None
    """What is traced of it; None: nothing."""


class Holding:
    """The leases by token, and those among them whose requests are at the gateway."""

    def __init__(self) -> None:
        self.units = 0
        """What the leases count of the limit."""
        self.running_units = 0
        """Those among them at the gateway."""
        self._by_token: dict[str, Held] = {}
        self._running: dict[str, Held] = {}
        self._stirred = asyncio.Event()

    def __len__(self) -> int:
        return len(self._by_token)

    def __iter__(self) -> Iterator[Held]:
        return iter(list(self._by_token.values()))

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def suspects(self) -> int:
        """How many of them are of requests whose owners died."""
        return sum(held.lease.suspect for held in self._by_token.values())

    def at_gateway(self) -> list[Held]:
        return list(self._running.values())

    def add(self, lease: Lease, confirmed_at: float, *, probe: bool) -> Held:
        held = self._by_token[lease.token] = Held(lease, probe, confirmed_at=confirmed_at)
        held.claimed_at = asyncio.get_running_loop().time()
        self.units += lease.units
        return held

    def weighs(self, held: Held, units: int) -> None:
        """Its lease counts so many now. It is not at the gateway yet."""
        self.units += units - held.lease.units
        held.lease = replace(held.lease, units=units)

    def started(self, held: Held, task: asyncio.Task[None]) -> None:
        held.task = task
        self._running[held.lease.token] = held
        self.running_units += held.lease.units

    def back(self, held: Held) -> None:
        """Its request is no longer at the gateway."""
        held.task = None
        if self._running.pop(held.lease.token, None) is not None:
            self.running_units -= held.lease.units

    def drop(self, token: str) -> Held | None:
        """The lease has ended; what was held of it."""
        held = self._by_token.pop(token, None)
        if held is not None:
            self.units -= held.lease.units
        if not self._by_token:
            self._stirred.set()
        return held

    def cut(self, held: Held, why: Cut) -> None:
        """Cancel its try, which closes the connection."""
        if held.task is not None and held.cut is None:
            held.cut = why
            held.task.cancel()

    def stir(self) -> None:
        """Have `emptied` look again at how long it may wait."""
        self._stirred.set()

    async def emptied(self, within_s: float) -> None:
        """Return when nothing is held, when the time has passed, or when stirred."""
        self._stirred.clear()
        if not self._by_token:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._stirred.wait()
