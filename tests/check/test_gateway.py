"""`check` judges the answer of the gateway by the same rules as the dispatcher."""

from __future__ import annotations

import pytest

from dispatcher.check.gateway import judge_answer
from dispatcher.check.plain_http import RawResponse
from dispatcher.requests.headers import DROP_REASON
from dispatcher.requests.outcomes.judge import GatewayRecord, judge_attempt
from dispatcher.requests.outcomes.outcome import Failed, classify_answer

STATUSES_WITH_OWN_RULE = {405}
"""A gateway that accepts POST may answer a GET with these."""


@pytest.mark.parametrize("body", [b"", b"{}"])
@pytest.mark.parametrize("headers", [{}, {DROP_REASON: "full"}, {"location": "/x"}])
def test_check_accepts_the_answers_that_the_dispatcher_accepts(headers: dict[str, str], body: bytes) -> None:
    for status in set(range(200, 600)) - STATUSES_WITH_OWN_RULE:
        outcome, _, _ = judge_attempt(classify_answer(status, headers, body, 0.0), GatewayRecord())
        is_accepted = not isinstance(outcome, Failed)
        finding = judge_answer(RawResponse(status, headers, body), "GET /", without_tls=True)
        assert (finding.level == "ok") == is_accepted, finding


@pytest.mark.parametrize(("allow", "level"), [("", "ok"), ("GET, post", "ok"), ("GET", "failed")])
def test_405_is_accepted_unless_post_is_not_allowed(allow: str, level: str) -> None:
    headers = {"allow": allow} if allow else {}
    assert judge_answer(RawResponse(405, headers, b"{}"), "GET /", without_tls=True).level == level


def test_refusal_that_may_concern_one_request_does_not_fail_the_check() -> None:
    """Once another request was answered with 2xx, such an answer becomes the result of its request."""
    for status in (403, 408, 429):
        assert judge_answer(RawResponse(status, {}, b"{}"), "GET /", without_tls=True).level != "failed"
