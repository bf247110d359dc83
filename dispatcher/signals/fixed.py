"""Source for a pool without metrics, whose limit the operator has fixed."""

from __future__ import annotations

import asyncio
from typing import Final

from dispatcher.signals.epp.series import View


class FixedSource:
    """Reports an empty pool at each poll, so that the capacity (`budget.max_in_flight`) is the limit.

    A refusal by the gateway still closes the gate, and lowers the capacity that the limiter assumes.
    """

    name: Final = "fixed"
    interval_least_s: Final = 0.0

    async def poll(self) -> tuple[View, ...]:
        """Return a view of an empty pool."""
        now = asyncio.get_running_loop().time()
        return (View(now, now, saturation=0.0, own=True),)

    async def latency(self) -> None:
        """Return `None`, because no latencies are measured."""

    def discovered(self, addresses: tuple[str, ...] | None) -> None:
        """Ignore the endpoint picker's pods: no InferencePool is watched."""

    async def close(self) -> None:
        """Do nothing: there are no connections."""
