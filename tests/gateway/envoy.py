"""A real Envoy in front of a scripted server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from tests.support import find_envoy, free_port, running_process, wait_until

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
    command = (find_envoy(), "-c", config, "--concurrency", "1", "--disable-hot-restart")
    with (folder / "log").open("wb") as log, running_process(*command, stderr=log) as process:

        async def listens() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return True
            return False

        await wait_until(listens, 30.0, what="Envoy to listen")
        yield f"http://127.0.0.1:{port}"
