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


def build_small_capacity_status(
    budget: dict[str, Any], poll: SourcePoll | None, running: float, in_flight: int = 0
) -> Status:
    """Return the status after a quarter of an hour in a pool of 32 in which none waits."""
    limiter = Limiter(Policy(), (Signal.REQUESTS,))
    for key in range(in_flight):
        limiter.record_send(key, -60.0)
    for at in range(0, 900, 5):
        limiter.add_reading(
            Reading(Signal.REQUESTS, at, at, running / 32, 0.0, 32, running=running), float(at)
        )
        limiter.get_allowance(at + 0.5)
    settings = Settings.model_validate({"gateway": {"url": "http://gw"}, "budget": budget})
    return build_limiter_status(limiter, 896.0, settings, poll=poll)


LEARN = "or set budget.capacity to learn."


@pytest.mark.parametrize(
    ("budget", "poll", "sentence"),
    [
        (
            {"per_endpoint": 16},
            create_poll(16, "setting"),
            (
                "20 requests per endpoint ran while none waited, more than the 16 of budget.per_endpoint: "
                "raise it, "
            ),
        ),
        (
            {},
            create_poll(16, "picker"),
            (
                "20 requests per endpoint ran while none waited, more than the 16 of the endpoint picker: "
                "raise its maxConcurrency, "
            ),
        ),
        (
            {},
            create_poll(16, "server"),
            (
                "20 requests per endpoint ran while none waited, more than the 16 of the model servers' own "
                "pages: set budget.per_endpoint, "
            ),
        ),
        (
            {"max_sys": 32},
            None,
            "40 requests ran while none waited, more than the 32 of budget.max_sys: raise it, ",
        ),
    ],
)
def test_capacity_that_is_proven_to_be_too_small_is_explained_with_a_hint(
    budget: dict[str, Any], poll: SourcePoll | None, sentence: str
) -> None:
    assert build_small_capacity_status(budget, poll, 40).gate.explanation.endswith(sentence + LEARN)


def test_larger_capacity_is_suggested_while_the_limit_is_reached() -> None:
    poll = create_poll(16, "setting")
    status = build_small_capacity_status({"per_endpoint": 16}, poll, 30, in_flight=30)
    assert status.gate.explanation.endswith(
        "No request has waited in 15 minutes in which the pool was as full as 16 requests per endpoint allow "
        "(budget.per_endpoint). If the model servers can run more, raise it, " + LEARN
    )
    # Nobody misses room that is free.
    calm = build_small_capacity_status({"per_endpoint": 16}, poll, 29)
    assert "No request has waited" not in calm.gate.explanation
