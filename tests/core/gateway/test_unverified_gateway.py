"""A server that never answered a request as a gateway does has to show first that it is one."""

from __future__ import annotations

import pytest

from dispatcher.core.gateway.outcome import (
    Delivered,
    Failed,
    Outcome,
    Overloaded,
    TooLarge,
    TooLate,
    classify_answer,
)
from dispatcher.core.gateway.unverified_gateway import ROUTE_MEMORY_S, UnverifiedGateway


@pytest.mark.parametrize("status", [301, 302, 307, 403, 404, 405, 501])
@pytest.mark.parametrize("body", [b"", b"<html>nothing here</html>"], ids=["empty", "page"])
def test_what_a_stranger_does_not_have_is_no_answer_of_a_gateway(status: int, body: bytes) -> None:
    stranger = UnverifiedGateway()
    for _ in range(3):
        judged = stranger.judge_outcome(classify_answer(status, {}, body, 0.0))
        assert isinstance(judged, Failed)
        assert (judged.is_intermediary_error, judged.status, judged.body) == (True, status, body)
        assert ("gateway.url" in judged.why) or (status, body) == (404, b"")


@pytest.mark.parametrize("status", [400, 408, 409, 413, 422, 500, 503])
def test_all_else_counts_as_it_is(status: int) -> None:
    outcome = classify_answer(status, {}, b"no", 0.0)
    assert UnverifiedGateway().judge_outcome(outcome) is outcome


@pytest.mark.parametrize(
    "shown",
    [Delivered(200, b""), TooLarge(200, 9), Overloaded(429, "rejected-saturated", is_out_of_capacity=True)],
)
def test_once_it_answered_as_a_gateway_does_such_an_answer_is_the_request_s_own(shown: Outcome) -> None:
    stranger = UnverifiedGateway()
    assert stranger.judge_outcome(shown) is shown
    for status in (404, 405):
        outcome = Delivered(status, b"no such model")
        assert stranger.judge_outcome(outcome) is outcome


@pytest.mark.parametrize(
    "shown", [Delivered(400, b""), TooLarge(404, 9), Overloaded(429, "", True), TooLate()]
)
def test_any_web_server_may_answer_so(shown: Outcome) -> None:
    stranger = UnverifiedGateway()
    stranger.judge_outcome(shown)
    assert not stranger.is_verified


NO_MODEL = b'{"error":{"message":"The model `m` does not exist.","type":"NotFoundError","param":"model"}}'
NO_ROUTE = classify_answer(404, {}, b"", 0.0)
OK = Delivered(200, b"{}")
HERE = "/v1/completions"


def for_model(name: str) -> bytes:
    return b'{"model": "%b"}' % name.encode()


def test_404_that_names_the_model_is_the_requests_own_from_the_start() -> None:
    outcome = Delivered(404, NO_MODEL)
    assert UnverifiedGateway().judge_outcome(outcome, HERE, for_model("m"), 1.0) is outcome


@pytest.mark.parametrize("asked", [for_model("other"), b"{}", b"no JSON"])
def test_404_that_names_another_model_may_be_of_no_gateway(asked: bytes) -> None:
    """A web server that answers the same to everything has not read the request."""
    body = NO_MODEL.replace(b'"param":"model"', b'"param":""')
    judged = UnverifiedGateway().judge_outcome(Delivered(404, body), HERE, asked, 1.0)
    assert isinstance(judged, Failed)
    assert judged.is_intermediary_error


def test_404_that_names_the_model_shows_no_gateway() -> None:
    stranger = UnverifiedGateway()
    stranger.judge_outcome(Delivered(404, NO_MODEL), HERE, for_model("m"), 1.0)
    judged = stranger.judge_outcome(Delivered(404, b"nothing here"), HERE, for_model("m"), 2.0)
    assert isinstance(judged, Failed)
    assert judged.is_intermediary_error


@pytest.mark.parametrize(
    ("path", "model", "at", "bare"),
    [
        (HERE, "m", 2.0, True),
        (HERE, "other", 2.0, False),
        ("/v1/rerank", "m", 2.0, False),
        (HERE, "other", 1.0 + ROUTE_MEMORY_S, False),
        (HERE, "other", 1.5 + ROUTE_MEMORY_S, True),
    ],
    ids=["the same", "another model", "another path", "just lately", "long ago"],
)
def test_empty_404_is_its_requests_own_where_another_has_a_route(
    path: str, model: str, at: float, *, bare: bool
) -> None:
    stranger = UnverifiedGateway()
    stranger.judge_outcome(OK, HERE, for_model("m"), 1.0)
    judged = stranger.judge_outcome(NO_ROUTE, path, for_model(model), at)
    assert isinstance(judged, Failed)
    assert judged.is_intermediary_error is bare


def test_gateway_that_lost_the_route_of_what_it_answered_may_have_lost_all() -> None:
    stranger = UnverifiedGateway()
    stranger.judge_outcome(OK, HERE, for_model("m"), 1.0)
    for model in ("m", "other"):
        judged = stranger.judge_outcome(NO_ROUTE, HERE, for_model(model), 2.0)
        assert isinstance(judged, Failed)
        assert judged.is_intermediary_error, model
