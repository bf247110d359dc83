"""Source for a pool without metrics, whose limit the operator has fixed."""

from __future__ import annotations

import asyncio
from typing import Final

from dispatcher.signals.epp.series import PoolView


class FixedSource:
    """Reports an empty pool at each poll, so that the capacity (`budget.max_in_flight`) is the limit.

    A refusal by the gateway still closes the gate, and lowers the capacity that the limiter assumes.
    """

    name: Final = "fixed"
    min_interval_s: Final = 0.0

    async def poll(self) -> tuple[PoolView, ...]:
        """Return a view of an empty pool."""
        now = asyncio.get_running_loop().time()
        return (PoolView(now, now, saturation=0.0, has_own_saturation=True),)

    async def read_latencies(self) -> None:
        """Return `None`, because no latencies are measured."""

    def set_replicas(self, addresses: tuple[str, ...] | None) -> None:
        """Ignore the endpoint picker's pods: no InferencePool is watched."""

    async def close(self) -> None:
        """Do nothing: there are no connections."""
