"""Explanation of an allowance in one sentence."""

from __future__ import annotations

import pytest

from dispatcher.limit.allowance import Allowance, explain_allowance
from dispatcher.limit.budget import Policy, Reading, Reason, Signal, compute_budget
from dispatcher.limit.limiter import Limiter

BUDGET = compute_budget(Reading(Signal.SATURATION, 0, 0, 0.5, 0.1, 50), Policy())
FAULTY_BUDGET = compute_budget(Reading(Signal.SATURATION, 0, 0, float("nan"), 0.1, 50), Policy())
TERMS_TEXT = " (saturation: pool 50% full, queue 10%, reserve 5% leave D = 0.350 of 50 requests, headroom 17)"


def make_allowance(reason: Reason, limit: int = 17, **changes: object) -> Allowance:
    fields: dict[str, object] = {
        "limit": limit,
        "reason": reason,
        "detail": "",
        "signal": Signal.SATURATION,
        "budget": BUDGET,
        "read_at": 0.0,
        "lost_units": 0,
        "next_check_at": None,
    }
    return Allowance(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reason", "in_flight", "sentence"),
    [
        (Reason.OPEN, 5, "5 in flight under a limit 17: sending 12 more"),
        (Reason.IDLE, 0, "No request is ready to be sent, 0 in flight under a limit 17"),
        (Reason.FULL, 17, "17 in flight fill the limit 17: each completion is replaced"),
        (Reason.SATURATED, 20, "20 in flight over a limit 17: the pool is too full to replace completions"),
    ],
)
def test_explanation_of_an_open_gate_says_what_is_sent_and_why_no_more(
    reason: Reason, in_flight: int, sentence: str
) -> None:
    assert explain_allowance(make_allowance(reason), in_flight) == f"{sentence}{TERMS_TEXT}."


def test_explanation_says_why_a_claim_returned_nothing() -> None:
    open_allowance = make_allowance(
        Reason.OPEN, detail="the gateway asked a dispatcher to wait another 9.0 s"
    )
    sentence = (
        "5 in flight under a limit 17, and the queue gives no more: the gateway asked a dispatcher to wait"
    )
    assert explain_allowance(open_allowance, 5).startswith(sentence)


def test_explanation_of_a_closed_gate_says_why_nothing_is_sent() -> None:
    closed_allowance = make_allowance(Reason.NO_ROOM, limit=0, detail="others take all but the reserve")
    assert (
        explain_allowance(closed_allowance, 3)
        == f"Nothing is sent: no-room, others take all but the reserve{TERMS_TEXT}."
    )


@pytest.mark.parametrize("reason", [Reason.UNREADABLE, Reason.STALE])
def test_explanation_leaves_out_a_reading_that_is_not_current(reason: Reason) -> None:
    explanation = explain_allowance(make_allowance(reason, limit=0, detail="HTTP 503"), 0)
    assert explanation == f"Nothing is sent: {reason}, HTTP 503."


@pytest.mark.parametrize("budget", [None, FAULTY_BUDGET])
def test_explanation_leaves_out_an_unknown_or_faulty_budget(budget: object) -> None:
    closed_allowance = make_allowance(Reason.STALE, limit=0, detail="the newest sample is old", budget=budget)
    assert explain_allowance(closed_allowance, 0) == "Nothing is sent: stale, the newest sample is old."


def test_explanation_names_learned_and_configured_capacity() -> None:
    learned = compute_budget(Reading(Signal.SATURATION, 0, 0, 0.25, 0.0, 192), Policy(), learned_share=1 / 3)
    explanation = explain_allowance(make_allowance(Reason.FULL, limit=12, budget=learned), 12)
    assert "pool 75% full" in explanation
    assert "leave D = 0.200 of 64 requests, which fitted where 192 are configured, headroom 12" in explanation


def test_withheld_reason_is_shown_until_a_claim_returns_requests() -> None:
    limiter = Limiter(Policy(), [Signal.SATURATION])
    limiter.add_reading(Reading(Signal.SATURATION, 0.0, 0.0, 0.0, 0.0, 32), 0.0)
    limiter.set_waiting_count(9, 1.0)
    limiter.set_withheld_reason("why")
    assert (limiter.get_allowance(1.0).reason, limiter.get_allowance(1.0).detail) == (Reason.OPEN, "why")
    limiter.set_waiting_count(0, 1.0)
    assert limiter.get_allowance(1.0).detail == "", "no request waits, so none is withheld"
    limiter.set_waiting_count(9, 1.0)
    limiter.set_withheld_reason("")
    assert limiter.get_allowance(1.0).detail == ""
