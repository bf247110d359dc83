"""The page's filters in a real Envoy: the header that we send becomes the subset that a picker is told."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.paths import DOCS
from tests.scenarios import picker
from tests.support import envoy_path, free_port, running, wait_until_sync

HCM = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
ROUTER = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
HTTP2 = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def filters_of_the_page() -> list[dict[str, Any]]:
    """As docs/how-to/models.md has them, with what every picker needs besides."""
    (block,) = re.findall(
        r"```yaml\n(http_filters:\n.*?)```", (DOCS / "how-to" / "models.md").read_text(), re.DOTALL
    )
    lua, ext_proc = yaml.safe_load(block)["http_filters"]
    ext_proc["typed_config"] |= {
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}},
        "processing_mode": {"response_header_mode": "SKIP"},
    }
    router = {"name": "envoy.filters.http.router", "typed_config": {"@type": ROUTER}}
    return [lua, ext_proc, router]


def config(port: int, picker_port: int) -> dict[str, Any]:
    def address(of: int) -> dict[str, Any]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": of}}

    routes = [{"match": {"prefix": "/"}, "direct_response": {"status": 200}}]
    manager = {
        "@type": HCM,
        "stat_prefix": "test",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": filters_of_the_page(),
    }
    chain = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    endpoint = {"endpoint": {"address": address(picker_port)}}
    cluster = {
        "name": "picker",
        "type": "STATIC",
        "load_assignment": {"cluster_name": "picker", "endpoints": [{"lb_endpoints": [endpoint]}]},
        "typed_extension_protocol_options": {
            HTTP2: {
                "@type": f"type.googleapis.com/{HTTP2}",
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
    }
    listener = {"address": address(port), "filter_chains": [{"filters": chain}]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def test_header_reaches_the_picker_as_the_subset_it_may_choose_from(tmp_path: Path) -> None:
    port, picker_port, noted = free_port(), free_port(), tmp_path / "asked"
    (tmp_path / "envoy.json").write_text(json.dumps(config(port, picker_port)))
    command = (envoy_path(), "-c", tmp_path / "envoy.json", "--concurrency", "1", "--disable-hot-restart")
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(sys.executable, picker.__file__, str(picker_port), noted))
        log = stack.enter_context((tmp_path / "envoy.log").open("wb"))
        process = stack.enter_context(running(*command, stderr=log))

        def asked(**headers: str) -> bytes:
            """What the picker is told of a request with these headers; empty: it was not asked."""
            assert process.poll() is None, (tmp_path / "envoy.log").read_text()
            noted.write_bytes(b"")
            with contextlib.suppress(httpx.HTTPError):
                names = {name.replace("_", "-"): value for name, value in headers.items()}
                if httpx.post(f"http://127.0.0.1:{port}/v1/completions", headers=names).status_code == 200:
                    return noted.read_bytes()
            return b""

        wait_until_sync(asked, 30, what="Envoy and the picker to answer", every_s=0.1)
        told = asked(x_batch_subset="10.0.0.1:8000,10.0.0.2:8000")
        assert b"envoy.lb.subset_hint" in told
        assert b"x-gateway-destination-endpoint-subset" in told
        # A list of two, each with its length before it: not a text of both.
        assert b"\x0d10.0.0.1:8000" in told
        assert b"\x0d10.0.0.2:8000" in told
        assert b"x-batch-subset" not in told, "the header goes no further"
        assert b"subset" not in asked()
