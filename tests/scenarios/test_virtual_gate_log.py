"""Gate events: one for each opening and closing, however short, with all fields of the budget."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

from dispatcher.requests.outcomes.outcome import Outcome, classify_answer
from dispatcher.requests.request import Request
from dispatcher.telemetry.events import Event
from tests.scenarios.virtual_stage import Stage, scenario

BUDGET_FIELDS = {
    *("reason", "limit", "in_flight", "signal", "reading_age_s", "explanation"),
    *("f_sys", "f_epp", "reserve", "budget", "headroom", "max_sys"),
}


def find_gate_events(stage: Stage) -> list[Mapping[str, Any]]:
    return [fields for event, fields in stage.events if event is Event.GATE]


@scenario(scrape_s=0.3)
async def test_gate_closed_for_less_than_a_second_is_logged_with_all_budget_fields(stage: Stage) -> None:
    await stage.submit(3000)
    await asyncio.sleep(10.05)
    count_before = len(find_gate_events(stage))
    request_count = 0

    async def refuse_first(request: Request) -> Outcome | None:
        nonlocal request_count
        request_count += 1
        return classify_answer(429, {}, b"", 0.0) if request_count == 1 else None

    stage.fault = refuse_first
    await asyncio.sleep(1.0)
    gate_events = find_gate_events(stage)[count_before:]
    closed, opened = gate_events[0], gate_events[1]
    assert closed["reason"] == "backpressure"
    assert closed["limit"] == 0
    assert opened["reason"] in ("full", "saturated", "open")
    assert opened["max_sys"] > 0
    for gate_event in gate_events:
        assert gate_event.keys() >= BUDGET_FIELDS
        assert str(gate_event["limit"]) in gate_event["explanation"] or gate_event["limit"] == 0
        assert gate_event["reading_age_s"] < 1.0
    all_events = find_gate_events(stage)
    assert all(first["reason"] != second["reason"] for first, second in itertools.pairwise(all_events))


@scenario(scrape_s=1.0)
async def test_full_gate_is_logged_at_most_once_per_second(stage: Stage) -> None:
    await stage.submit(5000)
    await asyncio.sleep(60)
    assert stage.answered_count > 1000
    assert len(find_gate_events(stage)) <= 62
