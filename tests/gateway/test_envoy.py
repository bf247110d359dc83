"""Answers that a real Envoy gives itself when a part behind it is missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dispatcher.gateway.http_gateway import HttpGateway
from dispatcher.requests.outcomes.outcome import Delivered, Evicted, Failed, Unreachable
from tests.gateway.envoy import envoy_before
from tests.gateway.scripted_server import Connection, a_request, outcome, serving

MakeGateway = Callable[..., HttpGateway]


async def test_answers_of_envoy_itself_have_the_designed_outcomes(
    gateway_to: MakeGateway, tmp_path: Path
) -> None:
    body = '{"text":"é 🙂"}'.encode()
    payload = b'{"prompt": "\\ud800 \xc3\xa9", "seed":9223372036854775807}'

    async def pool(connection: Connection) -> None:
        while True:
            received = await connection.receive()
            match received.first_line.split()[1]:
                case "/v1/slow":
                    await connection.server.go_on.wait()
                case "/v1/plain/reset":
                    return connection.reset()
                case "/v1/plain/evicted":
                    await connection.answer(
                        status="429 Too Many Requests",
                        headers="x-llm-d-request-dropped-reason: evicted\r\n",
                    )
                case _:
                    await connection.answer(body)

    async with serving(pool) as server, envoy_before(server.port, tmp_path) as url:
        gateway = gateway_to(url)

        async def at(endpoint: str) -> object:
            return await outcome(gateway, a_request(payload, endpoint=endpoint))

        assert await at("/v1/plain") == Delivered(200, body)
        assert server.received[0].body == payload
        assert isinstance(await at("/v1/plain/evicted"), Evicted)
        no_route = await at("/v1/nowhere")
        assert isinstance(no_route, Failed)
        assert (no_route.status, no_route.is_intermediary_error) == (404, True)
        picker_down = await at("/v1/picked")
        assert picker_down == Failed("the gateway answered 500", 500, b"", is_intermediary_error=True)
        for endpoint, status in (("/v1/gone", 503), ("/v1/plain/reset", 503), ("/v1/slow", 504)):
            found = await at(endpoint)
            assert isinstance(found, Failed)
            assert (found.status, found.is_intermediary_error) == (status, True)
        # One of two endpoints is dead: Envoy answers within milliseconds itself, and routes other requests.
        partly = [await at("/v1/partly") for _ in range(10)]
        assert Delivered(200, body) in partly
        bounced = [each for each in partly if isinstance(each, Failed)]
        assert bounced
        assert all(each.is_intermediary_error for each in bounced)
    assert isinstance(await outcome(gateway), Unreachable)
