"""A wrong gateway.url eats no queue: another web server has answers, too."""

from __future__ import annotations

import asyncio

import pytest

from dispatcher.core.gateway.outcome import Outcome, RetryPolicy, classify_answer
from dispatcher.core.limit.allowance import explain_allowance
from dispatcher.core.limit.budget import Reason
from dispatcher.core.models.names import parse_model
from dispatcher.core.requests.request import Request
from tests.scenarios.virtual_stage import Stage, scenario

PAGE = b"<html><h1>nothing here</h1></html>"


@pytest.mark.parametrize(("status", "replicas"), [(302, 1), (404, 2), (405, 1)])
@scenario(retry=RetryPolicy(base_s=0.1, max_s=0.5, max_attempts=1))
async def test_web_server_that_is_no_gateway_eats_no_queue(stage: Stage, status: int, replicas: int) -> None:
    """One counted attempt would be the last."""

    async def fault(request: Request) -> Outcome | None:
        await asyncio.sleep(0.001)
        return classify_answer(status, {}, PAGE, 0.0)

    stage.fault = fault
    await stage.submit(200)
    await stage.until(lambda: stage.reasons() == {Reason.GATEWAY_UNREACHABLE}, 3)
    await asyncio.sleep(30)
    assert stage.reasons() == {Reason.GATEWAY_UNREACHABLE}
    told = explain_allowance(stage.alive[0].dispatcher.get_allowance(), stage.alive[0].limiter.in_flight)
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
        return classify_answer(status, {}, b"", 0.0)

    stage.fault = fault
    await stage.submit(3, deadline_s=60.0)
    await stage.until(lambda: stage.reasons() == {Reason.GATEWAY_UNREACHABLE}, 3)
    told = explain_allowance(stage.alive[0].dispatcher.get_allowance(), stage.alive[0].limiter.in_flight)
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
        return classify_answer(404, {}, b'{"error": "no such model"}', 0.0)

    stage.fault = fault
    await stage.submit(5, "wrong", deadline_s=1e5)
    honest = await stage.submit(20)
    took_s = await stage.until_answered(20, honest)
    print(f"{replicas} replicas: 20/20 in {took_s:.2f} s behind five of a wrong model")
    await stage.until_answered(90)
    assert stage.statuses() == {200: 20, 404: 5}
    took_s = await stage.until_answered(1, await stage.submit(3, "wrong"))
    assert stage.statuses() == {200: 20, 404: 8}, "it is known by now"


def says_no_model(model: str) -> bytes:
    return b'{"error": {"message": "The model %b does not exist.", "type": "NotFoundError"}}' % model.encode()


@scenario()
async def test_model_that_a_server_does_not_have_closes_no_gate(stage: Stage) -> None:
    """First in line of a new dispatcher, and alone there."""

    async def fault(request: Request) -> Outcome | None:
        await asyncio.sleep(0.001)
        return classify_answer(404, {}, says_no_model(parse_model(request.payload)), 0.0)

    stage.fault = fault
    await stage.submit(40, model="gone")
    assert await stage.until_answered(40) < 5
    assert stage.statuses() == {404: 40}
    assert Reason.GATEWAY_UNREACHABLE not in stage.reasons()


@scenario(retry=RetryPolicy(base_s=1.0, max_s=2.0, max_attempts=4))
async def test_model_without_a_route_closes_no_gate_while_others_have_one(stage: Stage) -> None:
    """Envoy answers its requests 404 with an empty body, and its requests alone are left after a while."""

    async def fault(request: Request) -> Outcome | None:
        await asyncio.sleep(0.001)
        return classify_answer(404, {}, b"", 0.0) if b"gone" in request.payload else None

    stage.fault = fault
    await stage.until_answered(1, await stage.submit(1))
    await stage.submit(40, model="gone")
    seen: set[Reason] = set()

    def all_answered() -> bool:
        seen.update(stage.reasons())
        return stage.answered == 41

    await stage.until(all_answered, 60)
    assert Reason.GATEWAY_UNREACHABLE not in seen
    assert stage.statuses() == {200: 1, 404: 40}
