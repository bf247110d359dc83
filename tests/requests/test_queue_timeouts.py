"""Default timeouts of batching rules: which rule applies, and what follows for late requests."""

from __future__ import annotations

from typing import Any

import pytest

from dispatcher.common.patterns import RuleFinder
from dispatcher.features.sequences.turns import Turn
from dispatcher.requests.queue_timeouts import (
    DelayTimedOut,
    RejectTimedOut,
    RuleTimeout,
    TimeoutAction,
    decide_after_wait,
    find_timeout,
)
from dispatcher.requests.request import Request
from dispatcher.requests.score import compute_score

SUBMITTED_AT, DEADLINE = 1_700_000_000, 1_800_000_000
SETTING = "batching.rules[0].default_timeout_s"


def make_rule(action: str = "reject", timeout_s: float | None = 30.0, *paths: str) -> RuleTimeout:
    return RuleTimeout(SETTING, paths or ("/v1/*",), timeout_s, TimeoutAction(action))


def make_request(**changes: Any) -> Request:
    return Request("r-1", DEADLINE, b"{}", **{"created": SUBMITTED_AT, **changes})


@pytest.mark.parametrize(("waited_s", "is_late"), [(-60.0, False), (30.0, False), (30.5, True)])
def test_request_is_late_when_it_has_waited_longer_than_the_timeout(waited_s: float, is_late: bool) -> None:
    decision = decide_after_wait(make_rule(), make_request(), 0.0, SUBMITTED_AT + waited_s)
    assert isinstance(decision, RejectTimedOut) == is_late


def test_rejection_names_the_setting_and_both_times() -> None:
    decision = decide_after_wait(make_rule(), make_request(), 0.0, SUBMITTED_AT + 42.25)
    assert decision == RejectTimedOut(
        "claimed 42.2 s after its submission, and batching.rules[0].default_timeout_s is 30 s"
    )


def test_time_in_the_token_is_used_if_it_agrees_with_created() -> None:
    request = make_request(token=f"{int((SUBMITTED_AT + 0.9) * 1e9):016x}")
    assert decide_after_wait(make_rule(), request, 0.0, SUBMITTED_AT + 30.8) is None
    assert decide_after_wait(make_rule(), request, 0.0, SUBMITTED_AT + 31.0) is not None


@pytest.mark.parametrize("action", TimeoutAction)
def test_request_without_a_submission_time_has_no_timeout(action: TimeoutAction) -> None:
    assert decide_after_wait(make_rule(action), make_request(created=0), 0.0, SUBMITTED_AT + 1e6) is None


@pytest.mark.parametrize("score", [float(DEADLINE), compute_score(DEADLINE, 8), -1.0, float("-inf")])
def test_delayed_request_gets_the_lowest_priority_and_keeps_its_deadline(score: float) -> None:
    decision = decide_after_wait(make_rule("delay"), make_request(), score, SUBMITTED_AT + 31)
    assert decision == DelayTimedOut(compute_score(DEADLINE, 9))


@pytest.mark.parametrize("score", [compute_score(DEADLINE, 9), 1.7e12, float("inf")])
def test_request_at_the_end_of_the_queue_is_not_delayed_again(score: float) -> None:
    assert decide_after_wait(make_rule("delay"), make_request(), score, SUBMITTED_AT + 31) is None


def test_request_of_a_sequence_is_rejected_but_never_delayed() -> None:
    request = make_request(extra=Turn("s"))
    assert decide_after_wait(make_rule("delay"), request, 0.0, SUBMITTED_AT + 31) is None
    assert isinstance(decide_after_wait(make_rule(), request, 0.0, SUBMITTED_AT + 31), RejectTimedOut)


def test_first_rule_with_a_matching_path_applies_even_without_a_timeout() -> None:
    rules = [make_rule("reject", None, "/v1/chat"), make_rule("delay", 5.0, "/v1/*")]
    assert find_timeout(RuleFinder(rules), "/v1/chat") is None
    assert find_timeout(RuleFinder(rules), "/v1/embeddings") is rules[1]
    assert find_timeout(RuleFinder(rules), "/elsewhere") is None
