"""Every surface shows what is wrong with a broken world, 30 s and 5 min after it broke.

A table lists the worlds with the health and its cause at both times. Each surface (/status, `status`, `top`,
`explain`, metrics, log) must show both in the same sentence, and none may report idle work or stale values as
current. The page shows the same fields of /status (tests/service/admin).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from dispatcher.cli import render
from dispatcher.cli.overview import COUNT_NAMES, Overview
from dispatcher.limit.health import Health
from dispatcher.requests.outcomes.outcome import Outcome, RetryPolicy, Unreachable, classify_answer
from dispatcher.requests.queue_counts import QueueCounts
from dispatcher.requests.request import Request
from dispatcher.requests.submission import CallRefusedError
from dispatcher.settings.model import Settings
from dispatcher.telemetry import catalogue as series
from dispatcher.telemetry.events import Event
from dispatcher.telemetry.status import Status, decode_status
from tests.scenarios.virtual_stage import MetricsState, Stage, run_scenario
from tests.service.limiter_status import build_context_status

SETTINGS = Settings.model_validate({"gateway": {"url": "http://gw"}})
NO_MODEL = b'{"error":{"message":"The model `x` does not exist.","type":"NotFoundError","code":404}}'
WRITE_CALLS = (
    "claim",
    "claim_probe",
    "renew",
    "share_state",
    "settle",
    "settle_and_claim_next",
    "move_to_dead_letters",
    "release",
    "sweep",
    "settle_unleased",
)
Break = Callable[[Stage], Awaitable[None]]


def answer_with(status: int, body: bytes = b"x", *, fraction: float = 1.0) -> Break:
    """Answer all attempts, or a fraction of them, with this status and body."""

    async def apply(stage: Stage) -> None:
        random_source = random.Random(0)

        async def fault(request: Request) -> Outcome | None:
            if random_source.random() >= fraction:
                return None
            await asyncio.sleep(0.01)
            return classify_answer(status, {}, body, 0.0)

        stage.fault = fault

    return apply


def break_metrics(state: MetricsState, *, duration_s: float = 1e9) -> Break:
    async def apply(stage: Stage) -> None:
        stage.metrics = state
        asyncio.get_running_loop().call_later(duration_s, setattr, stage, "metrics", MetricsState.OK)

    return apply


def fail_queue(message: str) -> Break:
    async def apply(stage: Stage) -> None:
        stage.store.outage_message = message

    return apply


async def refuse_writes(stage: Stage) -> None:
    async def raise_refused(*_: Any, **__: Any) -> None:
        raise CallRefusedError("Redis refuses writes: MISCONF, the disk is full")

    for name in WRITE_CALLS:
        setattr(stage.alive[0].queue, name, raise_refused)


async def refuse_connections(stage: Stage) -> None:
    async def fault(request: Request) -> Outcome | None:
        return Unreachable("no connection: gw:80: connection refused")

    stage.fault = fault


async def slow_down_gateway(stage: Stage) -> None:
    stage.setting = replace(stage.setting, work_s=1000.0)


async def step_clock_back(stage: Stage) -> None:
    clock = stage.store.pool.clock
    stage.store.pool.clock = lambda: clock() - 3600.0


@dataclass(frozen=True)
class BrokenWorld:
    """How a world breaks, and the expected health and cause 30 s and 5 min later."""

    name: str
    apply: Break
    after_30_s: str
    after_5_min: str
    expected_text: str = ""
    """Text that the health sentence contains both times."""
    requests: int = 6000
    """Number of requests; enough for 5 minutes. Where none is answered, few are enough and cost less CPU."""


WORLDS = [
    BrokenWorld(
        "all 429",
        answer_with(429),
        "waiting refusals",
        "failing refusals",
        "refuses every request as overloaded",
        requests=600,
    ),
    BrokenWorld(
        "all 500",
        answer_with(500),
        "failing failures",
        "failing failures",
        "20 failed: 500 (20)",
        requests=600,
    ),
    BrokenWorld(
        "all 401",
        answer_with(401),
        "failing gateway",
        "failing gateway",
        "gateway.token_file",
        requests=600,
    ),
    BrokenWorld(
        "half fail", answer_with(500, fraction=0.5), "degraded failures", "degraded failures", "failed: 500 ("
    ),
    BrokenWorld(
        "Redis stopped",
        fail_queue("no answer within 5 s"),
        "failing queue",
        "failing queue",
        "no answer within 5 s",
    ),
    BrokenWorld(
        "Redis gone", fail_queue("connection refused"), "failing queue", "failing queue", "connection refused"
    ),
    BrokenWorld(
        "metrics gone",
        break_metrics(MetricsState.GONE),
        "failing signals",
        "failing signals",
        "does not answer",
    ),
    BrokenWorld(
        "metrics frozen", break_metrics(MetricsState.FROZEN), "failing signals", "failing signals", "too old"
    ),
    BrokenWorld(
        "picker restarted", break_metrics(MetricsState.GONE, duration_s=8.0), "working none", "working none"
    ),
    BrokenWorld(
        "gateway gone", refuse_connections, "failing gateway", "failing gateway", "connection refused"
    ),
    BrokenWorld("gateway slow", slow_down_gateway, "working none", "degraded slow", "in flight"),
    BrokenWorld("clock step", step_clock_back, "working none", "working none"),
    BrokenWorld("disk full", refuse_writes, "failing queue", "failing queue", "disk is full"),
    BrokenWorld(
        "one model missing",
        answer_with(404, NO_MODEL, fraction=0.4),
        "degraded rejections",
        "degraded rejections",
        "404 (",
    ),
]


async def break_and_check(stage: Stage, world: BrokenWorld) -> None:
    await stage.submit(world.requests)
    await asyncio.sleep(20)
    assert get_shown_health(stage, None).startswith("working none")
    await world.apply(stage)
    await asyncio.sleep(30)
    after_30_s = get_shown_health(stage, stage.store.outage_message)
    await asyncio.sleep(270)
    after_5_min = get_shown_health(stage, stage.store.outage_message)
    assert after_30_s.startswith(f"{world.after_30_s}: ")
    assert after_5_min.startswith(f"{world.after_5_min}: ")
    assert world.expected_text in after_30_s
    assert world.expected_text in after_5_min
    stage.fault, stage.metrics, stage.store.outage_message = None, MetricsState.OK, None
    for name in WRITE_CALLS:
        vars(stage.alive[0].queue).pop(name, None)


def get_shown_health(stage: Stage, queue_problem: str | None) -> str:
    """Return the health that all surfaces show."""
    (replica,) = stage.alive
    dispatcher = replica.dispatcher
    dispatcher.health.assess_health(stage.now)
    status = build_context_status(dispatcher.context, stage.now, SETTINGS, health=dispatcher.health.record)
    status_json = status.to_dict()
    health, cause, sentence = (
        status_json["health"],
        status_json["health_cause"],
        status_json["health_sentence"],
    )
    pending, leased, delayed, dead = (status_json[name] or 0 for name in COUNT_NAMES)
    overview = Overview(
        queue=status_json["queue"],
        counts=None if queue_problem else QueueCounts(pending, leased, delayed, dead),
        queue_problem=queue_problem,
        document=status_json,
        dispatcher=decode_status(status_json),
    )
    first_line = render.format_status(overview)[0]
    assert (
        first_line
        == render.format_explanation(overview)[: len(first_line)]
        == render.format_page(overview, 100, "12:00:00")[2]
    )
    assert first_line.startswith(health.capitalize())
    assert sentence in first_line
    assert f"  {health} (" in render.format_log_line(overview)
    assert series.HEALTH.sampler is not None
    assert series.HEALTH.sampler(status) == {str(each): float(each == health) for each in Health}
    assert get_logged_health(stage) == f"{health} {cause}"
    if health not in (Health.WORKING, Health.IDLE):
        all_text = " ".join([*render.format_status(overview), render.format_explanation(overview)])
        assert "othing waits" not in all_text
        assert_no_stale_values(status)
    return f"{health} {cause}: {sentence}"


def assert_no_stale_values(status: Status) -> None:
    """Assert that values which are too old are shown as unknown."""
    if status.health.health_cause == "queue":
        queue_status = status.queue
        assert (
            queue_status.pending,
            queue_status.leased,
            queue_status.delayed,
            queue_status.dead,
            queue_status.service_rate,
        ) == (None,) * 5
    if status.health.health_cause == "signals":
        budget = status.budget
        assert (budget.f_sys, budget.budget, budget.headroom, budget.max_sys) == (None,) * 4
        assert (status.signals.realtime, status.gate.free_share) == (None, None)


def get_logged_health(stage: Stage) -> str:
    changes = [fields for event, fields in stage.events if event in (Event.HEALTH, Event.UNHEALTHY)]
    return f"{changes[-1]['health']} {changes[-1]['cause']}"


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_every_surface_shows_the_cause(world: BrokenWorld) -> None:
    async def body(stage: Stage) -> None:
        await break_and_check(stage, world)

    # No request may fail for good within the 5 minutes.
    run_scenario(body, journal=True, work_s=2.0, retry=RetryPolicy(max_attempts=1000))
