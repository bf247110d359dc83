"""What a person is told of a pool that takes less than its configuration says."""

from __future__ import annotations

from typing import Any

import pytest

from dispatcher.core.limit.budget import Policy, Reading, Signal
from dispatcher.core.limit.limiter import NO_ROOM_BY_REALTIME, Limiter
from dispatcher.settings import Settings
from dispatcher.signals.poller import SourcePoll
from dispatcher.telemetry.status import Status
from tests.app.status_worlds import status_of


def learned(budget: dict[str, Any], poll: SourcePoll | None = None) -> Status:
    """Of three readings of a pool of 500: 35 run, and as many wait."""
    limiter = Limiter(Policy(), (Signal.REQUESTS,))
    for at in range(3):
        shown = Reading(Signal.REQUESTS, at, at, 70 / 500, 0.0, 500, running=35, waiting=35 + at)
        limiter.add_reading(shown, at)
        limiter.get_allowance(at + 0.5)
    settings = Settings.model_validate({"gateway": {"url": "http://gw"}, "budget": budget})
    return status_of(limiter, 3.0, settings, poll=poll)


def polled(per_endpoint: float, source: Any) -> SourcePoll:
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
            polled(500, "setting"),
            "35 requests per endpoint fit where budget.per_endpoint says 500: lower it.",
        ),
        (
            {},
            polled(250, "picker"),
            (
                "17.5 requests per endpoint fit where the endpoint picker counts with 250: "
                "lower its maxConcurrency."
            ),
        ),
        (
            {},
            polled(250, "server"),
            "17.5 requests per endpoint fit where the model servers' own pages say 250.",
        ),
        ({"max_sys": 500}, None, "35 requests fit where budget.max_sys says 500: lower it."),
    ],
)
def test_what_fitted_is_told_with_what_to_do(
    budget: dict[str, Any], poll: SourcePoll | None, sentence: str
) -> None:
    shown = learned(budget, poll)
    assert shown.gate.explanation.endswith(sentence)
    assert (shown.budget.max_sys, shown.budget.configured_max_sys) == (35, 500)
    assert shown.budget.max_sys_source == "learned"
    # The reason of the closed gate names realtime; no other sentence does.
    assert "realtime" not in shown.gate.explanation.replace(NO_ROOM_BY_REALTIME, "")
