"""A dispatcher reads from the stand-in's picker which requests are batch requests."""

from __future__ import annotations

import pytest

from dispatcher.lab.standin.config import Config
from dispatcher.lab.standin.live import LiveWorld
from dispatcher.lab.standin.pool import Job
from dispatcher.limit.budget import Policy
from dispatcher.limit.poll import ReadFailure
from dispatcher.signals.epp.series import InFlightLoad
from dispatcher.signals.epp.source import EppSource
from dispatcher.signals.readings import derive_readings
from dispatcher.signals.scrape import Targets

SLOTS, REALTIME, BATCH = 8, 5, 6


async def test_batch_requests_in_the_servers_and_in_the_queue_are_read_from_the_page() -> None:
    async with LiveWorld(Config(slots=SLOTS, endpoints=2, in_flight_load=True)) as world:
        for is_batch in [False] * REALTIME + [True] * BATCH:
            world.pool.submit_job(
                Job(is_batch=is_batch, work_s=60, seconds=None, tokens=10, on_finish=lambda: None)
            )
        source = EppSource("qwen", Targets(urls=(world.metrics_url,)), timeout_s=20)
        views = await source.poll()
        await source.close()
    assert not isinstance(views, ReadFailure)
    (view,) = views
    assert view.load == InFlightLoad(SLOTS, SLOTS - REALTIME, "inflight-load-producer")
    assert view.batch_queued == REALTIME + BATCH - SLOTS
    (reading,) = derive_readings(views, "requests", Policy(per_endpoint=SLOTS // 2), "epp").readings
    assert reading.load == pytest.approx(REALTIME + BATCH)
    assert reading.max_batch_requests == BATCH
