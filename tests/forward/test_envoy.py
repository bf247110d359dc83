"""Behind a real Envoy: its own answers, when something behind it is missing, lead where the design says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from dispatcher.core.outcome import Delivered, Failed, Overloaded, Unreachable
from dispatcher.forward import HttpGateway
from tests.forward.scripted import Connection, a_request, outcome, serving
from tests.support import envoy_path, free_port, running, wait_until

MakeGateway = Callable[..., HttpGateway]

TYPES = "type.googleapis.com/envoy.extensions.filters"
CONFIG = """
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": {types}.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: test
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - match: {{prefix: /v1/gone}}
                route: {{cluster: nobody}}
              - match: {{prefix: /v1/partly}}
                route: {{cluster: partly}}
              - match: {{prefix: /v1/slow}}
                route: {{cluster: pool, timeout: 0.3s}}
              - match: {{prefix: /v1/plain}}
                route: {{cluster: pool}}
              - match: {{prefix: /v1/picked}}
                route: {{cluster: pool}}
                typed_per_filter_config:
                  envoy.filters.http.ext_proc:
                    "@type": {types}.http.ext_proc.v3.ExtProcPerRoute
                    overrides: {{}}
          http_filters:
          - name: envoy.filters.http.ext_proc
            disabled: true
            typed_config:
              "@type": {types}.http.ext_proc.v3.ExternalProcessor
              failure_mode_allow: false
              grpc_service: {{envoy_grpc: {{cluster_name: picker}}}}
          - name: envoy.filters.http.router
            typed_config:
              "@type": {types}.http.router.v3.Router
  clusters:
  - name: pool
    load_assignment:
      cluster_name: pool
      endpoints: [{{lb_endpoints: [{{endpoint: {{address: {{socket_address:
        {{address: 127.0.0.1, port_value: {upstream}}}}}}}}}]}}]
  - name: partly
    load_assignment:
      cluster_name: partly
      endpoints:
      - lb_endpoints:
        - {{endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {upstream}}}}}}}}}
        - {{endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {dead}}}}}}}}}
  - name: nobody
    load_assignment: &nowhere
      cluster_name: nobody
      endpoints: [{{lb_endpoints: [{{endpoint: {{address: {{socket_address:
        {{address: 127.0.0.1, port_value: {dead}}}}}}}}}]}}]
  - name: picker
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{http2_protocol_options: {{}}}}
    load_assignment: *nowhere
"""


@contextlib.asynccontextmanager
async def envoy_before(upstream: int, folder: Path) -> AsyncIterator[str]:
    port = free_port()
    config = folder / "envoy.yaml"
    config.write_text(CONFIG.format(types=TYPES, port=port, upstream=upstream, dead=free_port()))
    command = (envoy_path(), "-c", config, "--concurrency", "1", "--disable-hot-restart")
    with (folder / "log").open("wb") as log, running(*command, stderr=log) as process:

        async def listens() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return True
            return False

        await wait_until(listens, 30.0, what="Envoy to listen")
        yield f"http://127.0.0.1:{port}"


async def test_envoys_own_answers_lead_where_they_should(gateway_to: MakeGateway, tmp_path: Path) -> None:
    body = '{"text":"é 🙂"}'.encode()
    payload = b'{"prompt": "\\ud800 \xc3\xa9", "seed":9223372036854775807}'

    async def pool(connection: Connection) -> None:
        while True:
            received = await connection.receive()
            match received.line.split()[1]:
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
        assert isinstance(await at("/v1/plain/evicted"), Overloaded)
        no_route = await at("/v1/nowhere")
        assert isinstance(no_route, Failed)
        assert (no_route.status, no_route.bare) == (404, True)
        picker_down = await at("/v1/picked")
        assert picker_down == Failed("the gateway answered 500", 500, b"", bare=True)
        for endpoint, status in (("/v1/gone", 503), ("/v1/plain/reset", 503), ("/v1/slow", 504)):
            found = await at(endpoint)
            assert isinstance(found, Failed)
            assert (found.status, found.bare) == (status, True)
        # One endpoint of two is dead: Envoy says so itself, in milliseconds, and routes the others.
        partly = [await at("/v1/partly") for _ in range(10)]
        assert Delivered(200, body) in partly
        bounced = [each for each in partly if isinstance(each, Failed)]
        assert bounced
        assert all(each.bare for each in bounced)
    assert isinstance(await outcome(gateway), Unreachable)
