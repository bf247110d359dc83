"""A server that never answered a request as a gateway does has to show first that it is one."""

from __future__ import annotations

import pytest

from dispatcher.core.outcome import Delivered, Failed, Outcome, Overloaded, TooLarge, TooLate, classify
from dispatcher.core.stranger import Stranger


@pytest.mark.parametrize("status", [301, 302, 307, 403, 404, 405, 501])
@pytest.mark.parametrize("body", [b"", b"<html>nothing here</html>"], ids=["empty", "page"])
def test_what_a_stranger_does_not_have_is_no_answer_of_a_gateway(status: int, body: bytes) -> None:
    stranger = Stranger()
    for _ in range(3):
        judged = stranger.judged(classify(status, {}, body, 0.0))
        assert isinstance(judged, Failed)
        assert (judged.bare, judged.status, judged.body) == (True, status, body)
        assert ("gateway.url" in judged.why) or (status, body) == (404, b"")


@pytest.mark.parametrize("status", [400, 408, 409, 413, 422, 500, 503])
def test_all_else_counts_as_it_is(status: int) -> None:
    outcome = classify(status, {}, b"no", 0.0)
    assert Stranger().judged(outcome) is outcome


@pytest.mark.parametrize(
    "shown",
    [Delivered(200, b""), TooLarge(200, 9), Overloaded(429, "rejected-saturated", capacity=True)],
)
def test_once_it_answered_as_a_gateway_does_such_an_answer_is_the_request_s_own(shown: Outcome) -> None:
    stranger = Stranger()
    assert stranger.judged(shown) is shown
    for status in (404, 405):
        outcome = Delivered(status, b"no such model")
        assert stranger.judged(outcome) is outcome


@pytest.mark.parametrize(
    "shown", [Delivered(400, b""), TooLarge(404, 9), Overloaded(429, "", True), TooLate()]
)
def test_any_web_server_may_answer_so(shown: Outcome) -> None:
    stranger = Stranger()
    stranger.judged(shown)
    assert not stranger.known
