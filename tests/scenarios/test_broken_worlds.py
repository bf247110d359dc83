"""Every surface says what is wrong with a broken world, 30 s and 5 min after it broke.

A table of worlds: the health and its cause at both times. Each surface (/status, `status`, `top`, `explain`,
metrics, log) must say that, in the same sentence, and none of them may call the state idle or current where
it is not. The page shows the same fields of /status (tests/admin).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from dispatcher.cli import render, top
from dispatcher.core.gateway.outcome import Outcome, RetryPolicy, Unreachable, classify_answer
from dispatcher.core.health import Health
from dispatcher.core.requests.request import Request
from dispatcher.ports import CallRefusedError
from dispatcher.settings import Settings
from dispatcher.telemetry import catalogue as series
from dispatcher.telemetry.events import Event
from dispatcher.telemetry.status import Status
from tests.app.status_worlds import status_of
from tests.scenarios.virtual_stage import Metrics, Stage, perform

SETTINGS = Settings.model_validate({"gateway": {"url": "http://gw"}})
NO_MODEL = b'{"error":{"message":"The model `x` does not exist.","type":"NotFoundError","code":404}}'
WRITES = (
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


def answered(status: int, body: bytes = b"x", *, share: float = 1.0) -> Break:
    """Answer every try like this, or a share of them."""

    async def break_(stage: Stage) -> None:
        chance = random.Random(0)

        async def fault(request: Request) -> Outcome | None:
            if chance.random() >= share:
                return None
            await asyncio.sleep(0.01)
            return classify_answer(status, {}, body, 0.0)

        stage.fault = fault

    return break_


def metrics(kind: Metrics, *, for_s: float = 1e9) -> Break:
    async def break_(stage: Stage) -> None:
        stage.metrics = kind
        asyncio.get_running_loop().call_later(for_s, setattr, stage, "metrics", Metrics.FINE)

    return break_


def queue_away(why: str) -> Break:
    async def break_(stage: Stage) -> None:
        stage.store.outage_message = why

    return break_


async def disk_full(stage: Stage) -> None:
    async def refused(*_: Any, **__: Any) -> None:
        raise CallRefusedError("Redis refuses writes: MISCONF, the disk is full")

    for name in WRITES:
        setattr(stage.alive[0].queue, name, refused)


async def gateway_gone(stage: Stage) -> None:
    async def fault(request: Request) -> Outcome | None:
        return Unreachable("no connection: gw:80: connection refused")

    stage.fault = fault


async def gateway_slow(stage: Stage) -> None:
    stage.setting = replace(stage.setting, work_s=1000.0)


async def clock_steps(stage: Stage) -> None:
    clock = stage.store.pool.clock
    stage.store.pool.clock = lambda: clock() - 3600.0


@dataclass(frozen=True)
class BrokenWorld:
    """A way in which a world breaks, and the health 30 s and 5 min later."""

    name: str
    break_: Break
    soon: str
    later: str
    holds: str = ""
    """Words that the sentence holds both times."""


WORLDS = [
    BrokenWorld(
        "all 429",
        answered(429),
        "waiting refusals",
        "failing refusals",
        "refuses every request as overloaded",
    ),
    BrokenWorld("all 500", answered(500), "failing failures", "failing failures", "20 failed: 500 (20)"),
    BrokenWorld("all 401", answered(401), "failing gateway", "failing gateway", "gateway.token_file"),
    BrokenWorld(
        "half fail", answered(500, share=0.5), "degraded failures", "degraded failures", "failed: 500 ("
    ),
    BrokenWorld(
        "Redis stopped",
        queue_away("no answer within 5 s"),
        "failing queue",
        "failing queue",
        "no answer within 5 s",
    ),
    BrokenWorld(
        "Redis gone", queue_away("connection refused"), "failing queue", "failing queue", "connection refused"
    ),
    BrokenWorld(
        "metrics gone", metrics(Metrics.GONE), "failing signals", "failing signals", "does not answer"
    ),
    BrokenWorld("metrics frozen", metrics(Metrics.FROZEN), "failing signals", "failing signals", "too old"),
    BrokenWorld("picker restarted", metrics(Metrics.GONE, for_s=8.0), "working none", "working none"),
    BrokenWorld("gateway gone", gateway_gone, "failing gateway", "failing gateway", "connection refused"),
    BrokenWorld("gateway slow", gateway_slow, "working none", "degraded slow", "in flight"),
    BrokenWorld("clock step", clock_steps, "working none", "working none"),
    BrokenWorld("disk full", disk_full, "failing queue", "failing queue", "disk is full"),
    BrokenWorld(
        "one model missing",
        answered(404, NO_MODEL, share=0.4),
        "degraded rejections",
        "degraded rejections",
        "404 (",
    ),
]


async def live(stage: Stage, world: BrokenWorld) -> None:
    await stage.submit(6000)
    await asyncio.sleep(20)
    assert said_by_all(stage, None).startswith("working none")
    await world.break_(stage)
    await asyncio.sleep(30)
    soon = said_by_all(stage, stage.store.outage_message)
    await asyncio.sleep(270)
    later = said_by_all(stage, stage.store.outage_message)
    assert soon.startswith(f"{world.soon}: ")
    assert later.startswith(f"{world.later}: ")
    assert world.holds in soon
    assert world.holds in later
    stage.fault, stage.metrics, stage.store.outage_message = None, Metrics.FINE, None
    for name in WRITES:
        vars(stage.alive[0].queue).pop(name, None)


def said_by_all(stage: Stage, queue_problem: str | None) -> str:
    """Return the health that all surfaces show."""
    (replica,) = stage.alive
    dispatcher = replica.dispatcher
    dispatcher.health.assess_health(stage.now)
    status = status_of(
        replica.limiter,
        stage.now,
        SETTINGS,
        queue=dispatcher.view,
        running=dispatcher.running_count,
        recent=dispatcher.health.recent_attempts,
        health=dispatcher.health.record,
    )
    told = status.to_dict()
    health, cause, sentence = told["health"], told["health_cause"], told["health_sentence"]
    counts = (
        dict.fromkeys(render.COUNT_NAMES)
        if queue_problem
        else {name: told[name] or 0 for name in render.COUNT_NAMES}
    )
    shown = {
        "queue": told["queue"],
        **counts,
        "paused": None,
        "queue_problem": queue_problem,
        "dispatcher": told,
        "dispatcher_problem": None,
        "dispatcher_problem_kind": None,
    }
    first = render.format_status(shown)[0]
    assert (
        first == render.format_explanation(shown)[: len(first)] == top.format_page(shown, 100, "12:00:00")[2]
    )
    assert first.startswith(health.capitalize())
    assert sentence in first
    assert f"  {health} (" in render.format_log_line(shown)
    assert series.HEALTH.sampler is not None
    assert series.HEALTH.sampler(status) == {str(each): float(each == health) for each in Health}
    assert logged(stage) == f"{health} {cause}"
    if health not in (Health.WORKING, Health.IDLE):
        everything = " ".join([*render.format_status(shown), render.format_explanation(shown)])
        assert "othing waits" not in everything
        nothing_stale(status)
    return f"{health} {cause}: {sentence}"


def nothing_stale(status: Status) -> None:
    """Assert that values which are too old are shown as unknown."""
    if status.health.health_cause == "queue":
        line = status.queue
        assert (line.pending, line.leased, line.delayed, line.dead, line.service_rate) == (None,) * 5
    if status.health.health_cause == "signals":
        budget = status.budget
        assert (budget.f_sys, budget.budget, budget.headroom, budget.max_sys) == (None,) * 4
        assert (status.signals.realtime, status.gate.free_share) == (None, None)


def logged(stage: Stage) -> str:
    changes = [fields for event, fields in stage.events if event in (Event.HEALTH, Event.UNHEALTHY)]
    return f"{changes[-1]['health']} {changes[-1]['cause']}"


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.name)
def test_every_surface_says_what_is_wrong(world: BrokenWorld) -> None:
    async def scene(stage: Stage) -> None:
        await live(stage, world)

    # No request dies of its failed tries within the 5 minutes.
    perform(scene, journal=True, work_s=2.0, retry=RetryPolicy(max_attempts=1000))
