"""Nothing is imported while time limits run, because under a CPU limit an import may exceed them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio
import yaml
from aiohttp import web

from dispatcher.queue.keys import QueueNames
from dispatcher.requests.request import encode_member
from tests.queue.servers import server
from tests.signals.apiserver import PODS, POOLS, SLICES, ApiServer, endpoint_slice, pod, pool
from tests.signals.fakes import fake_epp, fake_prometheus, serving
from tests.support import free_port, wait_until

CHECK = """
import asyncio, os, sys
from pathlib import Path
from dispatcher.check.connections import build_probes, find_unreachable, run_probes
from dispatcher.settings.load import load_settings

settings = load_settings(Path(sys.argv[1]), os.environ)

async def main():
    probes = build_probes(settings, await find_unreachable(settings))
    sys.addaudithook(lambda event, args: event == "import" and print("import", args[0]))
    await run_probes(probes, print)

asyncio.run(main())
"""
"""Program that runs `connections` step by step and prints imports after the probes have begun."""


PAGE = """
llm_d_epp_flow_control_pool_saturation{inference_pool="qwen",stage="effective"} 0.1
llm_d_epp_average_running_requests{name="qwen"} 1
llm_d_epp_average_queue_size{name="qwen"} 0
llm_d_epp_ready_endpoints{name="qwen"} 1
"""


@asynccontextmanager
async def serve_everything(folder: Path) -> AsyncIterator[dict[str, Any]]:
    """Start one server of each kind that `check` connects to. Return a configuration with all of them."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({}, status=200 if request.method == "POST" else 405)

    with server("redis", folder / "redis", "--appendonly", "yes") as queue:
        async with (
            serving(answer) as gateway,
            fake_epp() as epp,
            fake_prometheus() as prometheus,
            ApiServer().serve(folder) as cluster,
        ):
            epp.page = PAGE
            cluster.put(POOLS, pool())
            cluster.put(SLICES, endpoint_slice("qwen-epp-x1", "qwen-epp", "127.0.0.1"))
            cluster.put(PODS, pod("p0"))
            yield {
                "pool": {"name": "qwen", "namespace": "default"},
                "gateway": {"url": f"http://localhost:{gateway}", "objective": "batch"},
                "queue": {"url": f"redis://localhost:{queue.port}"},
                "budget": {"per_endpoint": 100},
                "signals": {"epp": {"port": epp.port}, "prometheus": {"url": prometheus.url}},
            }


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"KUBECONFIG": str(folder / "kubeconfig")}


async def run_python(folder: Path, *arguments: str | Path) -> list[str]:
    """Return the output of a Python process that can reach the cluster."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *map(str, arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment(folder),
    )
    printed, _ = await process.communicate()
    return printed.decode().splitlines()


async def test_nothing_is_imported_while_probes_are_timed(tmp_path: Path) -> None:
    async with serve_everything(tmp_path) as settings:
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
        printed = await run_python(tmp_path, "-c", CHECK, tmp_path / "config.yaml")
    levels = {line.partition(": ")[0] for line in printed}
    asked = {line.split(": ")[1].split()[0] for line in printed if line.startswith("ok: ")}
    assert {"gateway.url", "queue.url", "kubernetes", "signals.epp"} <= asked, printed
    assert any("signals.prometheus" in line for line in printed), printed
    assert [line for line in printed if line.startswith("import ")] == []
    assert levels <= {"ok", "warning", "failed"}, printed


RUN = """
import sys

sys.addaudithook(
    lambda event, args: event == "import" and print(json_of(args[0]), file=sys.stderr, flush=True)
)

def json_of(module):
    return '{"event": "import", "module": "' + module + '"}'

from dispatcher.cli import app

app(["run", "--config", sys.argv[1]])
"""
"""Program that runs `run` and logs imports."""


@pytest.mark.slow
@pytest.mark.parametrize("traced", [False, True], ids=["not traced", "traced"])
async def test_nothing_is_imported_once_the_dispatcher_has_started(tmp_path: Path, traced: bool) -> None:
    async with serve_everything(tmp_path) as settings:
        if traced:
            settings["tracing"] = {"endpoint": f"http://127.0.0.1:{free_port()}"}
        settings |= {"admin": {"host": "127.0.0.1", "port": 0}, "log": {"format": "json"}}
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump(settings))
        with (tmp_path / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", RUN, config, stderr=log, env=environment(tmp_path)
            )
        try:

            def events(*names: str) -> list[dict[str, Any]]:
                lines = (tmp_path / "log").read_text().splitlines()
                found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
                return [event for event in found if not names or event["event"] in names]

            [started] = await wait_until(lambda: events("started"), 30)
            await check_dispatcher(settings, f"http://127.0.0.1:{started['admin_port']}")
            config.write_text(yaml.safe_dump(settings | {"budget": {"per_endpoint": 100, "reserve": 0.1}}))
            await wait_until(lambda: events("config-reloaded"), 10)
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
    printed = [event.get("module", event["event"]) for event in events()]
    assert "stopped" in (printed[-1:] if not traced else printed[-2:]), "traces may be lost after that"
    since = printed.index("started")
    assert "kubernetes.aio.client" in printed[:since]
    assert [event["module"] for event in events()[since:] if event["event"] == "import"] == []
    exporters = [name for name in printed if name.startswith("opentelemetry.exporter")]
    assert bool(exporters) is traced, "nothing is imported for traces if tracing is off"


async def check_dispatcher(settings: dict[str, Any], admin: str) -> None:
    """Check that the dispatcher answers a request and serves all its pages."""
    names = QueueNames("batch:{qwen}:requests", "batch:{qwen}:results")
    async with redis.asyncio.Redis.from_url(settings["queue"]["url"]) as client, httpx.AsyncClient() as http:

        async def ready() -> bool:
            return (await http.get(f"{admin}/readyz")).status_code == 200

        await wait_until(ready, 20)
        await client.zadd(names.queue, {encode_member("r-1", b"{}", 2**31): 2**31})
        await wait_until(lambda: client.llen(names.result_list), 20)
        for page in ("livez", "metrics", "status"):
            assert (await http.get(f"{admin}/{page}")).status_code == 200
