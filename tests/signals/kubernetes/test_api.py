"""Client of the Kubernetes API."""

from __future__ import annotations

import asyncio

import pytest

from dispatcher.signals.kubernetes.api import Api
from dispatcher.signals.kubernetes.cluster import NO_CLUSTER


@pytest.mark.parametrize("steps", range(5))
async def test_pause_that_is_woken_and_cancelled_at_the_same_time_is_cancelled(steps: int) -> None:
    """A watch whose cancellation is lost goes on, and the process does not end."""
    wake = asyncio.Event()
    pausing = asyncio.create_task(Api(NO_CLUSTER).pause(60.0, wake))
    await asyncio.sleep(0.01)
    wake.set()
    for _ in range(steps):
        await asyncio.sleep(0)
    if pausing.cancel():
        with pytest.raises(asyncio.CancelledError):
            await pausing
