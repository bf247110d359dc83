"""An allowance as a sentence."""

from __future__ import annotations

import pytest

from dispatcher.core.limit.allowance import Allowance, explain_allowance
from dispatcher.core.limit.budget import Policy, Reading, Reason, Signal, compute_budget
from dispatcher.core.limit.limiter import Limiter

BUDGET = compute_budget(Reading(Signal.SATURATION, 0, 0, 0.5, 0.1, 50), Policy())
FAULTY = compute_budget(Reading(Signal.SATURATION, 0, 0, float("nan"), 0.1, 50), Policy())
TERMS = " (saturation: pool 50% full, queue 10%, reserve 5% leave D = 0.350 of 50 requests, headroom 17)"


def allowance(reason: Reason, limit: int = 17, **changes: object) -> Allowance:
    terms: dict[str, object] = {
        "limit": limit,
        "reason": reason,
        "detail": "",
        "signal": Signal.SATURATION,
        "budget": BUDGET,
        "read_at": 0.0,
        "lost_units": 0,
        "next_check_at": None,
    }
    return Allowance(**(terms | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reason", "in_flight", "sentence"),
    [
        (Reason.OPEN, 5, "5 in flight under a limit 17: sending 12 more"),
        (Reason.IDLE, 0, "No request is ready to be sent, 0 in flight under a limit 17"),
        (Reason.FULL, 17, "17 in flight fill the limit 17: each completion is replaced"),
        (Reason.SATURATED, 20, "20 in flight over a limit 17: the pool is too full to replace completions"),
    ],
)
def test_open_states_say_what_is_sent_and_why_not_more(reason: Reason, in_flight: int, sentence: str) -> None:
    assert explain_allowance(allowance(reason), in_flight) == f"{sentence}{TERMS}."


def test_claim_that_got_nothing_is_told() -> None:
    open_ = allowance(Reason.OPEN, detail="the gateway asked a dispatcher to wait another 9.0 s")
    sentence = (
        "5 in flight under a limit 17, and the queue gives no more: the gateway asked a dispatcher to wait"
    )
    assert explain_allowance(open_, 5).startswith(sentence)


def test_closed_state_says_why_nothing_is_sent() -> None:
    closed = allowance(Reason.NO_ROOM, limit=0, detail="others take all but the reserve")
    assert (
        explain_allowance(closed, 3) == f"Nothing is sent: no-room, others take all but the reserve{TERMS}."
    )


@pytest.mark.parametrize("reason", [Reason.UNREADABLE, Reason.STALE])
def test_reading_that_no_longer_counts_is_not_told_as_if_it_were_current(reason: Reason) -> None:
    told = explain_allowance(allowance(reason, limit=0, detail="HTTP 503"), 0)
    assert told == f"Nothing is sent: {reason}, HTTP 503."


@pytest.mark.parametrize("budget", [None, FAULTY])
def test_terms_that_are_not_known_are_left_out(budget: object) -> None:
    closed = allowance(Reason.STALE, limit=0, detail="the newest sample is old", budget=budget)
    assert explain_allowance(closed, 0) == "Nothing is sent: stale, the newest sample is old."


def test_learned_capacity_is_told_beside_what_is_configured() -> None:
    learned = compute_budget(Reading(Signal.SATURATION, 0, 0, 0.25, 0.0, 192), Policy(), learned_share=1 / 3)
    told = explain_allowance(allowance(Reason.FULL, limit=12, budget=learned), 12)
    assert "pool 75% full" in told
    assert "leave D = 0.200 of 64 requests, which fitted where 192 are configured, headroom 12" in told


def test_an_open_gate_says_it_until_a_claim_gets_something() -> None:
    limiter = Limiter(Policy(), [Signal.SATURATION])
    limiter.add_reading(Reading(Signal.SATURATION, 0.0, 0.0, 0.0, 0.0, 32), 0.0)
    limiter.set_waiting_count(9, 1.0)
    limiter.set_withheld_reason("why")
    assert (limiter.get_allowance(1.0).reason, limiter.get_allowance(1.0).detail) == (Reason.OPEN, "why")
    limiter.set_waiting_count(0, 1.0)
    assert limiter.get_allowance(1.0).detail == "", "nothing waits: nothing is withheld"
    limiter.set_waiting_count(9, 1.0)
    limiter.set_withheld_reason("")
    assert limiter.get_allowance(1.0).detail == ""
