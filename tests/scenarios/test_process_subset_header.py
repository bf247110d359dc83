"""The documented Envoy filters turn the subset header into the list of endpoints that the picker gets."""

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
from tests.support import find_envoy, free_port, running_process, wait_until_sync

HCM = "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
ROUTER = "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
HTTP2 = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def read_documented_filters() -> list[dict[str, Any]]:
    """Return the filters of docs/how-to/models.md, with the settings that every picker needs besides."""
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


def make_envoy_config(port: int, picker_port: int) -> dict[str, Any]:
    def make_address(port_value: int) -> dict[str, Any]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": port_value}}

    routes = [{"match": {"prefix": "/"}, "direct_response": {"status": 200}}]
    manager = {
        "@type": HCM,
        "stat_prefix": "test",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": routes}]},
        "http_filters": read_documented_filters(),
    }
    chain = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    endpoint = {"endpoint": {"address": make_address(picker_port)}}
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
    listener = {"address": make_address(port), "filter_chains": [{"filters": chain}]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def test_subset_header_reaches_the_picker_as_the_list_of_allowed_endpoints(tmp_path: Path) -> None:
    port, picker_port, record_path = free_port(), free_port(), tmp_path / "asked"
    (tmp_path / "envoy.json").write_text(json.dumps(make_envoy_config(port, picker_port)))
    command = (find_envoy(), "-c", tmp_path / "envoy.json", "--concurrency", "1", "--disable-hot-restart")
    with contextlib.ExitStack() as stack:
        stack.enter_context(running_process(sys.executable, picker.__file__, str(picker_port), record_path))
        log = stack.enter_context((tmp_path / "envoy.log").open("wb"))
        process = stack.enter_context(running_process(*command, stderr=log))

        def send_and_get_picker_message(**headers: str) -> bytes:
            """Send a request with these headers.

            Return the message that the picker got, or nothing if it got none.
            """
            assert process.poll() is None, (tmp_path / "envoy.log").read_text()
            record_path.write_bytes(b"")
            with contextlib.suppress(httpx.HTTPError):
                names = {name.replace("_", "-"): value for name, value in headers.items()}
                if httpx.post(f"http://127.0.0.1:{port}/v1/completions", headers=names).status_code == 200:
                    return record_path.read_bytes()
            return b""

        wait_until_sync(send_and_get_picker_message, 30, what="Envoy and the picker to answer", every_s=0.1)
        message = send_and_get_picker_message(x_batch_subset="10.0.0.1:8000,10.0.0.2:8000")
        assert b"envoy.lb.subset_hint" in message
        assert b"x-gateway-destination-endpoint-subset" in message
        # The value is a list of two strings, each preceded by its length, and not one string.
        assert b"\x0d10.0.0.1:8000" in message
        assert b"\x0d10.0.0.2:8000" in message
        assert b"x-batch-subset" not in message, "the header itself is removed"
        assert b"subset" not in send_and_get_picker_message()
