"""The explanation for a pool whose learned capacity is below its configuration."""

from __future__ import annotations

from typing import Any

import pytest

from dispatcher.limit.budget import Policy, Reading, Signal
from dispatcher.limit.limiter import NO_ROOM_BY_REALTIME, Limiter
from dispatcher.settings.model import Settings
from dispatcher.signals.poller import SourcePoll
from dispatcher.telemetry.status import Status
from tests.service.limiter_status import build_limiter_status


def build_learned_status(budget: dict[str, Any], poll: SourcePoll | None = None) -> Status:
    """Return the status after three readings of a pool of 500, in which 35 requests run and as many wait."""
    limiter = Limiter(Policy(), (Signal.REQUESTS,))
    for at in range(3):
        status = Reading(Signal.REQUESTS, at, at, 70 / 500, 0.0, 500, running=35, waiting=35 + at)
        limiter.add_reading(status, at)
        limiter.get_allowance(at + 0.5)
    settings = Settings.model_validate({"gateway": {"url": "http://gw"}, "budget": budget})
    return build_limiter_status(limiter, 3.0, settings, poll=poll)


def create_poll(per_endpoint: float, source: Any) -> SourcePoll:
    return SourcePoll(
        completed_at=3.0,
        source="epp",
        signals=(Signal.REQUESTS,),
        per_endpoint=per_endpoint,
        per_endpoint_source=source,
    )


@pytest.mark.parametrize(
    ("budget", "poll", "sentence"),
    [
        (
            {"per_endpoint": 500},
            create_poll(500, "setting"),
            "35 requests per endpoint fit where budget.per_endpoint says 500: lower it.",
        ),
        (
            {},
            create_poll(250, "picker"),
            (
                "17.5 requests per endpoint fit where the endpoint picker counts with 250: "
                "lower its maxConcurrency."
            ),
        ),
        (
            {},
            create_poll(250, "server"),
            "17.5 requests per endpoint fit where the model servers' own pages say 250.",
        ),
        ({"max_sys": 500}, None, "35 requests fit where budget.max_sys says 500: lower it."),
    ],
)
def test_learned_capacity_is_explained_with_a_hint(
    budget: dict[str, Any], poll: SourcePoll | None, sentence: str
) -> None:
    status = build_learned_status(budget, poll)
    assert status.gate.explanation.endswith(sentence)
    assert (status.budget.max_sys, status.budget.configured_max_sys) == (35, 500)
    assert status.budget.max_sys_source == "learned"
    # Only the reason of the closed gate mentions realtime.
    assert "realtime" not in status.gate.explanation.replace(NO_ROOM_BY_REALTIME, "")
