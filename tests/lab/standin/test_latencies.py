"""What the live world's picker shows of its requests' latencies, beside what its pool knows."""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dispatcher.core.limit.budget import Policy
from dispatcher.lab.standin.live import Config, LiveWorld
from dispatcher.lab.standin.model import TOKEN_S, compute_work_s
from dispatcher.lab.standin.picker import TPOT_BOUNDS, TTFT_BOUNDS
from dispatcher.lab.standin.pool import Job
from dispatcher.settings import SignalsSettings
from dispatcher.signals.epp.source import EppSource
from dispatcher.signals.poller import Poller, SourcePoll
from dispatcher.signals.scrape import Targets
from tests.support import wait_until

REALTIME, BATCH = 0, -10


def bucket(value: float, bounds: tuple[float, ...]) -> tuple[float, float]:
    """The bucket that a value falls into."""
    high = next((bound for bound in bounds if value <= bound), math.inf)
    return max((bound for bound in bounds if bound < value), default=0.0), high


def series(page: str) -> dict[tuple[str, int], dict[float, float]]:
    """Buckets by name and priority."""
    found: dict[tuple[str, int], dict[float, float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                key = (family.name.removeprefix("llm_d_epp_request_"), int(sample.labels["priority"]))
                found.setdefault(key, {})[float(sample.labels["le"])] = sample.value
    return found


def watch(world: LiveWorld, done: list[Job]) -> None:
    """Keep what is answered from now on."""
    answered = world.pool._on_answer

    def on_answer(job: Job) -> None:
        answered(job)
        done.append(job)

    world.pool._on_answer = on_answer


async def test_the_page_shows_first_tokens_and_tokens_as_the_pool_made_them() -> None:
    async with LiveWorld(Config(slots=8, trace_speed=1.0)) as world:
        done: list[Job] = []
        watch(world, done)
        for number in range(10):
            for batch in (False, True):
                tokens = 10 + number
                world.pool.submit_job(
                    Job(
                        is_batch=batch,
                        work_s=compute_work_s(100, tokens),
                        seconds=None,
                        tokens=tokens,
                        on_finish=lambda: None,
                    )
                )
        await wait_until(lambda: len(done) == 20)
        async with aiohttp.ClientSession() as http, http.get(world.metrics_url) as reply:
            found = series(await reply.text())
    realtime = [job for job in done if not job.is_batch]
    ttft = [
        (job.started_at - job.arrived_at)
        + (job.finished_at - job.started_at) * (1 - TOKEN_S * (job.tokens - 1) / job.work_s)
        for job in realtime
    ]
    tpot = [(job.finished_at - job.started_at) * TOKEN_S / job.work_s for job in realtime]
    whole = [job.finished_at - job.arrived_at for job in done if job.is_batch]
    for key, values, bounds in (
        (("ttft_seconds", REALTIME), ttft, TTFT_BOUNDS),
        (("streaming_tpot_seconds", REALTIME), tpot, TPOT_BOUNDS),
        (("ttft_seconds", BATCH), whole, TTFT_BOUNDS),
    ):
        for bound in bounds:
            assert found[key][bound] == sum(value <= bound for value in values)
        assert found[key][math.inf] == 10
    assert ("streaming_tpot_seconds", BATCH) not in found, "batch requests are not streamed"


async def test_a_dispatcher_reads_from_it_what_realtime_pays() -> None:
    """The price in the live world: median and 95th percentile within the buckets of the true ones."""
    async with LiveWorld(Config(slots=16, realtime_seconds=0.4, seed=3)) as world:
        source = EppSource(
            "qwen",
            Targets(urls=(world.metrics_url,)),
            timeout_s=20,
            has_objective=True,
            latency_interval_s=0.2,
        )
        told: list[SourcePoll] = []
        settings = SignalsSettings.model_validate({"interval_s": 0.1})
        poller = Poller([source], settings, Policy(per_endpoint=16), told.append, batch_share=lambda: 0.5)
        polling = asyncio.create_task(poller.run())
        done: list[Job] = []
        watch(world, done)
        try:
            await wait_until(lambda: told and told[-1].realtime_impact.source)
            world.realtime.hold_level(12)
            await wait_until(lambda: told[-1].realtime_impact.request_count >= 60, 30)
            world.realtime.hold_level(0)
            await wait_until(lambda: world.pool.running == 0)
            await wait_until(lambda: told[-1].realtime_impact.request_count == len(done))
        finally:
            polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await polling
    price = told[-1].realtime_impact
    assert (price.scope, price.why_not) == ("realtime", "")
    assert price.batch_share == pytest.approx(0.5)
    truth = sorted(0.4 * (1 - TOKEN_S * (job.tokens - 1) / job.work_s) for job in done)
    for shown, q in ((price.ttft_p50_s, 0.5), (price.ttft_p95_s, 0.95)):
        low, high = bucket(truth[math.ceil(q * len(truth)) - 1], TTFT_BOUNDS)
        assert shown is not None
        assert low <= shown <= high
    assert price.tpot_p50_s is not None
    token_s = statistics.median(0.4 * TOKEN_S / job.work_s for job in done)
    low, high = bucket(token_s, TPOT_BOUNDS)
    assert low <= price.tpot_p50_s <= high
