"""The gate's line in the log: one for each opening and closing, however short, with every term."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

from dispatcher.core.gateway.outcome import Outcome, classify_answer
from dispatcher.core.requests.request import Request
from dispatcher.telemetry.events import Event
from tests.scenarios.virtual_stage import Stage, scenario

TERMS = {
    *("reason", "limit", "in_flight", "signal", "reading_age_s", "explanation"),
    *("f_sys", "f_epp", "reserve", "budget", "headroom", "max_sys"),
}


def gates(stage: Stage) -> list[Mapping[str, Any]]:
    return [fields for event, fields in stage.events if event is Event.GATE]


@scenario(scrape_s=0.3)
async def test_a_gate_that_shuts_for_less_than_a_second_is_told_with_every_term(stage: Stage) -> None:
    await stage.submit(3000)
    await asyncio.sleep(10.05)
    before = len(gates(stage))
    refused = 0

    async def once(request: Request) -> Outcome | None:
        nonlocal refused
        refused += 1
        return classify_answer(429, {}, b"", 0.0) if refused == 1 else None

    stage.fault = once
    await asyncio.sleep(1.0)
    told = gates(stage)[before:]
    closed, opened = told[0], told[1]
    assert closed["reason"] == "backpressure"
    assert closed["limit"] == 0
    assert opened["reason"] in ("full", "saturated", "open")
    assert opened["max_sys"] > 0
    for line in told:
        assert line.keys() >= TERMS
        assert str(line["limit"]) in line["explanation"] or line["limit"] == 0
        assert line["reading_age_s"] < 1.0
    again = gates(stage)
    assert all(one["reason"] != other["reason"] for one, other in itertools.pairwise(again))


@scenario(scrape_s=1.0)
async def test_a_full_gate_whose_requests_come_and_go_is_told_by_the_second_at_most(stage: Stage) -> None:
    await stage.submit(5000)
    await asyncio.sleep(60)
    assert stage.answered > 1000
    assert len(gates(stage)) <= 62
