"""A wrong gateway.url eats no queue: another web server has answers, too."""

from __future__ import annotations

import asyncio

import pytest

from dispatcher.core.allowance import explain
from dispatcher.core.budget import Reason
from dispatcher.core.outcome import Outcome, RetryPolicy, classify
from dispatcher.core.request import Request
from tests.scenarios.virtual_stage import Stage, scenario

PAGE = b"<html><h1>nothing here</h1></html>"


@pytest.mark.parametrize(("status", "replicas"), [(302, 1), (404, 2), (405, 1)])
@scenario(retry=RetryPolicy(base_s=0.1, max_s=0.5, max_attempts=1))
async def test_web_server_that_is_no_gateway_eats_no_queue(stage: Stage, status: int, replicas: int) -> None:
    """One counted attempt would be the last."""

    async def fault(request: Request) -> Outcome | None:
        await asyncio.sleep(0.001)
        return classify(status, {}, PAGE, 0.0)

    stage.fault = fault
    await stage.submit(200)
    await stage.until(lambda: stage.reasons() == {Reason.GATEWAY_UNREACHABLE}, 3)
    await asyncio.sleep(30)
    assert stage.reasons() == {Reason.GATEWAY_UNREACHABLE}
    told = explain(stage.alive[0].dispatcher.allowance(), stage.alive[0].limiter.in_flight)
    assert str(status) in told
    assert "gateway.url" in told
    print(f"{replicas} replicas, {status}: {len(stage.tries)} tries in half a minute, no result")
    assert stage.answered == 0
    assert len(stage.tries) < 200 * replicas
    stage.fault = None
    await stage.until_answered(200)
    assert stage.statuses() == {200: 200}


@pytest.mark.parametrize("status", [401, 403, 407])
@scenario()
async def test_requests_that_end_while_credentials_are_refused_say_so(stage: Stage, status: int) -> None:
    async def fault(request: Request) -> Outcome | None:
        await asyncio.sleep(0.001)
        return classify(status, {}, b"", 0.0)

    stage.fault = fault
    await stage.submit(3, deadline_s=60.0)
    await stage.until(lambda: stage.reasons() == {Reason.GATEWAY_UNREACHABLE}, 3)
    told = explain(stage.alive[0].dispatcher.allowance(), stage.alive[0].limiter.in_flight)
    assert "gateway.token_file" in told
    await stage.until_answered(70)
    assert stage.statuses() == {"DEADLINE_EXCEEDED": 3}
    for each in stage.results:
        assert f"answered {status}" in (each.error_message or "")
        assert "gateway.token_file" in (each.error_message or "")


@pytest.mark.parametrize("replicas", [1, 2])
@scenario()
async def test_requests_of_a_wrong_model_among_others_end_with_their_404(stage: Stage, replicas: int) -> None:
    """First in line of a new dispatcher, which has not seen yet that its gateway is one."""

    async def fault(request: Request) -> Outcome | None:
        if not request.id.startswith("wrong"):
            return None
        await asyncio.sleep(0.001)
        return classify(404, {}, b'{"error": "no such model"}', 0.0)

    stage.fault = fault
    await stage.submit(5, "wrong", deadline_s=1e5)
    honest = await stage.submit(20)
    took_s = await stage.until_answered(20, honest)
    print(f"{replicas} replicas: 20/20 in {took_s:.2f} s behind five of a wrong model")
    await stage.until_answered(90)
    assert stage.statuses() == {200: 20, 404: 5}
    took_s = await stage.until_answered(1, await stage.submit(3, "wrong"))
    assert stage.statuses() == {200: 20, 404: 8}, "it is known by now"
