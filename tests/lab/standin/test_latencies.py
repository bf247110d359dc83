"""Latencies on the metrics page of the stand-in's picker agree with those in its pool."""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dispatcher.lab.standin.config import Config
from dispatcher.lab.standin.live import LiveWorld
from dispatcher.lab.standin.model import TOKEN_S, compute_work_s
from dispatcher.lab.standin.picker import TPOT_BOUNDS, TTFT_BOUNDS
from dispatcher.lab.standin.pool import Job
from dispatcher.limit.budget import Policy
from dispatcher.settings.signals import SignalsSettings
from dispatcher.signals.epp.source import EppSource
from dispatcher.signals.poller import Poller, SourcePoll
from dispatcher.signals.scrape import Targets
from tests.support import wait_until

REALTIME, BATCH = 0, -10


def find_bucket(value: float, bounds: tuple[float, ...]) -> tuple[float, float]:
    """Return the bounds of the bucket that contains a value."""
    high = next((bound for bound in bounds if value <= bound), math.inf)
    return max((bound for bound in bounds if bound < value), default=0.0), high


def parse_histograms(page: str) -> dict[tuple[str, int], dict[float, float]]:
    """Return the histogram buckets by name and priority."""
    found: dict[tuple[str, int], dict[float, float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                key = (family.name.removeprefix("llm_d_epp_request_"), int(sample.labels["priority"]))
                found.setdefault(key, {})[float(sample.labels["le"])] = sample.value
    return found


def record_answers(world: LiveWorld, done: list[Job]) -> None:
    """Append every job that is answered from now on to `done`."""
    previous_on_answer = world.pool._on_answer

    def on_answer(job: Job) -> None:
        previous_on_answer(job)
        done.append(job)

    world.pool._on_answer = on_answer


async def test_page_shows_the_token_times_of_the_pool() -> None:
    async with LiveWorld(Config(slots=8, trace_speed=1.0)) as world:
        done: list[Job] = []
        record_answers(world, done)
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
            found = parse_histograms(await reply.text())
    realtime = [job for job in done if not job.is_batch]
    ttft = [
        (job.started_at - job.arrived_at)
        + (job.finished_at - job.started_at) * (1 - TOKEN_S * (job.tokens - 1) / job.work_s)
        for job in realtime
    ]
    tpot = [(job.finished_at - job.started_at) * TOKEN_S / job.work_s for job in realtime]
    request_s = [job.finished_at - job.arrived_at for job in done if job.is_batch]
    for key, values, bounds in (
        (("ttft_seconds", REALTIME), ttft, TTFT_BOUNDS),
        (("streaming_tpot_seconds", REALTIME), tpot, TPOT_BOUNDS),
        (("ttft_seconds", BATCH), request_s, TTFT_BOUNDS),
    ):
        for bound in bounds:
            assert found[key][bound] == sum(value <= bound for value in values)
        assert found[key][math.inf] == 10
    assert ("streaming_tpot_seconds", BATCH) not in found, "batch requests are not streamed"


async def test_dispatcher_reads_the_impact_on_realtime_from_the_page() -> None:
    """Median and 95th percentile are in the same buckets as the true values."""
    async with LiveWorld(Config(slots=16, realtime_seconds=0.4, seed=3)) as world:
        source = EppSource(
            "qwen",
            Targets(urls=(world.metrics_url,)),
            timeout_s=20,
            has_objective=True,
            latency_interval_s=0.2,
        )
        polls: list[SourcePoll] = []
        settings = SignalsSettings.model_validate({"interval_s": 0.1})
        poller = Poller([source], settings, Policy(per_endpoint=16), polls.append, batch_share=lambda: 0.5)
        polling = asyncio.create_task(poller.run())
        done: list[Job] = []
        record_answers(world, done)
        try:
            await wait_until(lambda: polls and polls[-1].realtime_impact.source)
            world.realtime.hold_level(12)
            await wait_until(lambda: polls[-1].realtime_impact.request_count >= 60, 30)
            world.realtime.hold_level(0)
            await wait_until(lambda: world.pool.running == 0)
            await wait_until(lambda: polls[-1].realtime_impact.request_count == len(done))
        finally:
            polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await polling
    impact = polls[-1].realtime_impact
    assert (impact.scope, impact.why_not) == ("realtime", "")
    assert impact.batch_share == pytest.approx(0.5)
    true_ttft_s = sorted(0.4 * (1 - TOKEN_S * (job.tokens - 1) / job.work_s) for job in done)
    for reported_s, q in ((impact.ttft_p50_s, 0.5), (impact.ttft_p95_s, 0.95)):
        low, high = find_bucket(true_ttft_s[math.ceil(q * len(true_ttft_s)) - 1], TTFT_BOUNDS)
        assert reported_s is not None
        assert low <= reported_s <= high
    assert impact.tpot_p50_s is not None
    token_s = statistics.median(0.4 * TOKEN_S / job.work_s for job in done)
    low, high = find_bucket(token_s, TPOT_BOUNDS)
    assert low <= impact.tpot_p50_s <= high
