"""Answers of an address count as those of a gateway only after one of them proved that it is a gateway."""

from __future__ import annotations

import pytest

from dispatcher.core.gateway.gateway_verification import ROUTE_MEMORY_S, GatewayVerification
from dispatcher.core.gateway.outcome import (
    Delivered,
    Failed,
    Outcome,
    Overloaded,
    TooLarge,
    TooLate,
    classify_answer,
)


@pytest.mark.parametrize("status", [301, 302, 307, 403, 404, 405, 501])
@pytest.mark.parametrize("body", [b"", b"<html>nothing here</html>"], ids=["empty", "page"])
def test_not_found_of_an_unverified_address_counts_as_intermediary_error(status: int, body: bytes) -> None:
    verification = GatewayVerification()
    for _ in range(3):
        judged = verification.judge_outcome(classify_answer(status, {}, body, 0.0))
        assert isinstance(judged, Failed)
        assert (judged.is_intermediary_error, judged.status, judged.body) == (True, status, body)
        assert ("gateway.url" in judged.why) or (status, body) == (404, b"")


@pytest.mark.parametrize("status", [400, 408, 409, 413, 422, 500, 503])
def test_other_answers_of_an_unverified_address_are_unchanged(status: int) -> None:
    outcome = classify_answer(status, {}, b"no", 0.0)
    assert GatewayVerification().judge_outcome(outcome) is outcome


@pytest.mark.parametrize(
    "outcome",
    [Delivered(200, b""), TooLarge(200, 9), Overloaded(429, "rejected-saturated", is_out_of_capacity=True)],
)
def test_not_found_of_a_verified_gateway_is_the_answer_of_its_request(outcome: Outcome) -> None:
    verification = GatewayVerification()
    assert verification.judge_outcome(outcome) is outcome
    for status in (404, 405):
        outcome = Delivered(status, b"no such model")
        assert verification.judge_outcome(outcome) is outcome


@pytest.mark.parametrize(
    "outcome", [Delivered(400, b""), TooLarge(404, 9), Overloaded(429, "", True), TooLate()]
)
def test_answer_that_any_web_server_gives_does_not_verify_the_address(outcome: Outcome) -> None:
    verification = GatewayVerification()
    verification.judge_outcome(outcome)
    assert not verification.is_verified


NO_MODEL = b'{"error":{"message":"The model `m` does not exist.","type":"NotFoundError","param":"model"}}'
NO_ROUTE = classify_answer(404, {}, b"", 0.0)
OK = Delivered(200, b"{}")
HERE = "/v1/completions"


def for_model(name: str) -> bytes:
    return b'{"model": "%b"}' % name.encode()


def test_404_that_names_the_requested_model_is_delivered_from_the_start() -> None:
    outcome = Delivered(404, NO_MODEL)
    assert GatewayVerification().judge_outcome(outcome, HERE, for_model("m"), 1.0) is outcome


@pytest.mark.parametrize("payload", [for_model("other"), b"{}", b"no JSON"])
def test_404_that_does_not_name_the_requested_model_is_an_intermediary_error(payload: bytes) -> None:
    """A web server that answers everything alike has not read the request."""
    body = NO_MODEL.replace(b'"param":"model"', b'"param":""')
    judged = GatewayVerification().judge_outcome(Delivered(404, body), HERE, payload, 1.0)
    assert isinstance(judged, Failed)
    assert judged.is_intermediary_error


def test_404_that_names_the_requested_model_does_not_verify_the_address() -> None:
    verification = GatewayVerification()
    verification.judge_outcome(Delivered(404, NO_MODEL), HERE, for_model("m"), 1.0)
    judged = verification.judge_outcome(Delivered(404, b"nothing here"), HERE, for_model("m"), 2.0)
    assert isinstance(judged, Failed)
    assert judged.is_intermediary_error


@pytest.mark.parametrize(
    ("path", "model", "at", "is_intermediary_error_expected"),
    [
        (HERE, "m", 2.0, True),
        (HERE, "other", 2.0, False),
        ("/v1/rerank", "m", 2.0, False),
        (HERE, "other", 1.0 + ROUTE_MEMORY_S, False),
        (HERE, "other", 1.5 + ROUTE_MEMORY_S, True),
    ],
    ids=["same model and path", "another model", "another path", "recent route", "old route"],
)
def test_empty_404_is_blamed_on_its_request_if_another_request_has_a_route(
    path: str, model: str, at: float, *, is_intermediary_error_expected: bool
) -> None:
    verification = GatewayVerification()
    verification.judge_outcome(OK, HERE, for_model("m"), 1.0)
    judged = verification.judge_outcome(NO_ROUTE, path, for_model(model), at)
    assert isinstance(judged, Failed)
    assert judged.is_intermediary_error is is_intermediary_error_expected


def test_empty_404_is_an_intermediary_error_after_the_known_route_was_lost() -> None:
    verification = GatewayVerification()
    verification.judge_outcome(OK, HERE, for_model("m"), 1.0)
    for model in ("m", "other"):
        judged = verification.judge_outcome(NO_ROUTE, HERE, for_model(model), 2.0)
        assert isinstance(judged, Failed)
        assert judged.is_intermediary_error, model
