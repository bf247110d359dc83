"""`check` judges the gateway's answer by the same rules as the dispatcher."""

from __future__ import annotations

import pytest

from dispatcher.check.gateway import judge_answer
from dispatcher.check.plain_http import RawResponse
from dispatcher.core.gateway.outcome import Failed, classify_answer
from dispatcher.core.gateway.unverified_gateway import UnverifiedGateway
from dispatcher.core.requests.headers import DROP_REASON

OWN = {405}
"""A GET may be answered so where a POST is taken."""


@pytest.mark.parametrize("body", [b"", b"{}"])
@pytest.mark.parametrize("headers", [{}, {DROP_REASON: "full"}, {"location": "/x"}])
def test_what_counts_for_the_dispatcher_is_ok_and_nothing_else(headers: dict[str, str], body: bytes) -> None:
    for status in set(range(200, 600)) - OWN:
        counts = not isinstance(
            UnverifiedGateway().judge_outcome(classify_answer(status, headers, body, 0.0)), Failed
        )
        finding = judge_answer(RawResponse(status, headers, body), "GET /", without_tls=True)
        assert (finding.level == "ok") == counts, finding


@pytest.mark.parametrize(("allow", "level"), [("", "ok"), ("GET, post", "ok"), ("GET", "failed")])
def test_a_get_may_be_refused_where_a_post_is_taken(allow: str, level: str) -> None:
    headers = {"allow": allow} if allow else {}
    assert judge_answer(RawResponse(405, headers, b"{}"), "GET /", without_tls=True).level == level


def test_a_refusal_that_may_be_one_request_s_own_fails_no_check() -> None:
    """Once another request was answered with 2xx, whoever asked gets it as a result."""
    for status in (403, 408, 429):
        assert judge_answer(RawResponse(status, {}, b"{}"), "GET /", without_tls=True).level != "failed"
