"""A wrong gateway.url loses no requests, although another web server answers them, too."""

from __future__ import annotations

import asyncio

import pytest

from dispatcher.limit.allowance import explain_allowance
from dispatcher.limit.budget import GATEWAY_OUTAGES, Reason
from dispatcher.requests.model_names import parse_model
from dispatcher.requests.outcomes.outcome import Outcome, RetryPolicy, classify_answer
from dispatcher.requests.request import Request
from tests.scenarios.virtual_stage import Stage, scenario

PAGE = b"<html><h1>nothing here</h1></html>"


@pytest.mark.parametrize(("status", "replicas"), [(302, 1), (404, 2), (405, 1)])
@scenario(retry=RetryPolicy(base_s=0.1, max_s=0.5, max_attempts=1))
async def test_web_server_that_is_no_gateway_answers_no_requests(
    stage: Stage, status: int, replicas: int
) -> None:
    """The first counted attempt would be the last one."""

    async def fault(request: Request) -> Outcome | None:
        await asyncio.sleep(0.001)
        return classify_answer(status, {}, PAGE, 0.0)

    stage.fault = fault
    await stage.submit(200)
    await stage.wait_until(lambda: stage.reasons() == {Reason.GATEWAY_FAILING}, 3)
    await asyncio.sleep(30)
    assert stage.reasons() == {Reason.GATEWAY_FAILING}
    explanation = explain_allowance(
        stage.alive[0].dispatcher.get_allowance(), stage.alive[0].limiter.in_flight
    )
    assert str(status) in explanation
    assert "gateway.url" in explanation
    print(f"{replicas} replicas, {status}: {len(stage.attempts)} attempts in half a minute, no result")
    assert stage.answered_count == 0
    assert len(stage.attempts) < 200 + 200 * replicas, "each request is tried once, then some in turn"
    stage.fault = None
    await stage.wait_until_answered(200)
    assert stage.count_statuses() == {200: 200}


@pytest.mark.parametrize("status", [401, 403, 407])
@scenario()
async def test_requests_that_expire_while_credentials_are_rejected_report_it(
    stage: Stage, status: int
) -> None:
    async def fault(request: Request) -> Outcome | None:
        await asyncio.sleep(0.001)
        return classify_answer(status, {}, b"", 0.0)

    stage.fault = fault
    await stage.submit(3, deadline_s=60.0)
    await stage.wait_until(lambda: stage.reasons() == {Reason.GATEWAY_FAILING}, 3)
    explanation = explain_allowance(
        stage.alive[0].dispatcher.get_allowance(), stage.alive[0].limiter.in_flight
    )
    assert "gateway.token_file" in explanation
    await stage.wait_until_answered(70)
    assert stage.count_statuses() == {"DEADLINE_EXCEEDED": 3}
    for each in stage.results:
        assert f"answered {status}" in (each.error_message or "")
        assert "gateway.token_file" in (each.error_message or "")


@pytest.mark.parametrize("replicas", [1, 2])
@scenario()
async def test_requests_for_an_unknown_model_among_others_get_404(stage: Stage, replicas: int) -> None:
    """They are first in the queue of a new dispatcher, whose gateway is not verified yet."""

    async def fault(request: Request) -> Outcome | None:
        if not request.id.startswith("wrong"):
            return None
        await asyncio.sleep(0.001)
        return classify_answer(404, {}, b'{"error": "no such model"}', 0.0)

    stage.fault = fault
    await stage.submit(5, "wrong", deadline_s=1e5)
    ordinary = await stage.submit(20)
    took_s = await stage.wait_until_answered(20, ordinary)
    print(f"{replicas} replicas: 20/20 in {took_s:.2f} s behind five for an unknown model")
    await stage.wait_until_answered(90)
    assert stage.count_statuses() == {200: 20, 404: 5}
    took_s = await stage.wait_until_answered(1, await stage.submit(3, "wrong"))
    assert stage.count_statuses() == {200: 20, 404: 8}, "the gateway is verified by now"


def make_unknown_model_error(model: str) -> bytes:
    return b'{"error": {"message": "The model %b does not exist.", "type": "NotFoundError"}}' % model.encode()


@scenario()
async def test_gate_stays_open_if_a_server_does_not_have_the_model(stage: Stage) -> None:
    """The requests are the only ones of a new dispatcher."""

    async def fault(request: Request) -> Outcome | None:
        await asyncio.sleep(0.001)
        return classify_answer(404, {}, make_unknown_model_error(parse_model(request.payload)), 0.0)

    stage.fault = fault
    await stage.submit(40, model="gone")
    assert await stage.wait_until_answered(40) < 5
    assert stage.count_statuses() == {404: 40}
    assert not stage.reasons().intersection(GATEWAY_OUTAGES)


@scenario(retry=RetryPolicy(base_s=1.0, max_s=2.0, max_attempts=4))
async def test_gate_stays_open_if_one_model_has_no_route(stage: Stage) -> None:
    """Envoy answers these requests with an empty 404, and after a while no other requests remain."""

    async def fault(request: Request) -> Outcome | None:
        await asyncio.sleep(0.001)
        return classify_answer(404, {}, b"", 0.0) if b"gone" in request.payload else None

    stage.fault = fault
    await stage.wait_until_answered(1, await stage.submit(1))
    await stage.submit(40, model="gone")
    seen_reasons: set[Reason] = set()

    def are_all_answered() -> bool:
        seen_reasons.update(stage.reasons())
        return stage.answered_count == 41

    await stage.wait_until(are_all_answered, 60)
    assert not set(seen_reasons).intersection(GATEWAY_OUTAGES)
    assert stage.count_statuses() == {200: 1, 404: 40}


@pytest.mark.parametrize(
    ("count", "body"), [(60, b'{"error": "not here"}'), (200, b'{"error": "not here"}'), (200, b"")]
)
@scenario(slots=16)
async def test_requests_that_get_404_from_a_new_gateway_do_not_delay_others(
    stage: Stage, count: int, body: bytes
) -> None:
    async def fault(request: Request) -> Outcome | None:
        if not request.id.startswith("wrong"):
            return None
        await asyncio.sleep(0.001)
        return classify_answer(404, {}, body, 0.0)

    stage.fault = fault
    await stage.submit(count, "wrong", deadline_s=1e5, model="gone")
    ordinary = await stage.submit(10)
    took_s = await stage.wait_until_answered(40, ordinary)
    print(f"10/10 in {took_s:.2f} s behind {count}")
    assert took_s < 1.0 + 2 * stage.setting.work_s
