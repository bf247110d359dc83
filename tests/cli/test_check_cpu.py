"""`check` where CPU is short: nothing is imported while a time limit runs, and no peer is blamed for us."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from dispatcher.cli.probes import Finding, ask
from tests.queue.servers import server
from tests.signals.apiserver import PODS, POOLS, SLICES, ApiServer, endpoint_slice, pod, pool
from tests.signals.fakes import fake_epp, fake_prometheus, serving
from tests.support import running
from tests.throttle import cpu_limit

HOOKED = """
import asyncio, os, sys
from pathlib import Path
from dispatcher.cli.probes import ask, prepare, reach
from dispatcher.settings import load

settings = load(Path(sys.argv[1]), os.environ)

async def main():
    probes = prepare(settings, await reach(settings))
    sys.addaudithook(lambda event, args: event == "import" and print("import", args[0]))
    await ask(probes, print)

asyncio.run(main())
"""
"""`connections`, step by step, telling what is imported once the probes have begun."""


@asynccontextmanager
async def everything(folder: Path) -> AsyncIterator[dict[str, Any]]:
    """One of each that `check` can ask, all well: the configuration that names them."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=405)

    with server("redis", folder / "redis", "--appendonly", "yes") as queue:
        async with (
            serving(answer) as gateway,
            fake_epp() as epp,
            fake_prometheus() as prometheus,
            ApiServer().serve(folder) as cluster,
        ):
            cluster.put(POOLS, pool())
            cluster.put(SLICES, endpoint_slice("qwen-epp-x1", "qwen-epp", "127.0.0.1"))
            cluster.put(PODS, pod("p0"))
            yield {
                "pool": {"name": "qwen", "namespace": "default"},
                "gateway": {"url": f"http://localhost:{gateway}", "objective": "batch"},
                "queue": {"url": f"redis://localhost:{queue.port}"},
                "signals": {"epp": {"port": epp.port}, "prometheus": {"url": prometheus.url}},
            }


async def python(folder: Path, *arguments: str | Path) -> list[str]:
    """What a Python process with a way into the cluster prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *map(str, arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"KUBECONFIG": str(folder / "kubeconfig")},
    )
    told, _ = await process.communicate()
    return told.decode().splitlines()


async def test_nothing_is_imported_while_probes_are_timed(tmp_path: Path) -> None:
    async with everything(tmp_path) as settings:
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
        told = await python(tmp_path, "-c", HOOKED, tmp_path / "config.yaml")
    levels = {line.partition(": ")[0] for line in told}
    asked = {line.split(": ")[1].split()[0] for line in told if line.startswith("ok: ")}
    assert {"gateway.url", "queue.url", "kubernetes", "signals.epp"} <= asked, told
    assert any("signals.prometheus" in line for line in told), told
    assert [line for line in told if line.startswith("import ")] == []
    assert levels <= {"ok", "warning", "failed"}, told


async def answer_after_stalls(stalls: int, of_s: float) -> list[Finding]:
    """A peer that answers in no time, asked by a loop that stands still during the first tries."""
    told: list[Finding] = []
    tries = 0

    async def probe() -> list[Finding]:
        nonlocal tries
        tries += 1
        try:
            async with asyncio.timeout(of_s / 2):
                if tries <= stalls:
                    time.sleep(of_s)  # noqa: ASYNC251 - this is the stall
                await asyncio.sleep(0.001)
        except TimeoutError:
            return [Finding("failed", "queue.url", "Redis did not answer in time")]
        return [Finding("ok", "queue.url", "Redis answers")]

    await ask({"queue.url": probe}, told.append)
    assert tries == min(stalls + 1, 2)
    return told


async def test_probe_that_failed_while_our_loop_stood_still_is_tried_again() -> None:
    assert await answer_after_stalls(1, 0.4) == [Finding("ok", "queue.url", "Redis answers")]


async def test_peer_is_not_blamed_for_a_loop_that_stands_still() -> None:
    [finding] = await answer_after_stalls(2, 0.4)
    assert finding.level == "failed"
    assert finding.what.startswith("not known, for this process gets too little CPU")
    assert "CPU limit" in finding.hint


async def test_peer_that_fails_while_our_loop_keeps_pace_is_asked_once() -> None:
    tries, told = 0, list[Finding]()

    async def probe() -> list[Finding]:
        nonlocal tries
        tries += 1
        return [Finding("failed", "queue.url", "connection refused")]

    await ask({"queue.url": probe}, told.append)
    assert (tries, [finding.what for finding in told]) == (1, ["connection refused"])


@pytest.mark.serial
@pytest.mark.parametrize(("cores", "times"), [(0.1, 1), (0.25, 2)])
def test_strict_check_of_healthy_parts_passes_under_a_cpu_limit(
    tmp_path: Path, cores: float, times: int
) -> None:
    world_of = [sys.executable, "-m", "dispatcher.sim.live", "--slots=32"]
    with (
        server("redis", tmp_path / "redis", "--appendonly", "yes") as queue,
        running(*world_of, stdout=subprocess.PIPE) as world,
        cpu_limit(cores) as limit,
    ):
        assert world.stdout is not None
        urls = json.loads(world.stdout.readline())
        settings = {
            "gateway": {"url": urls["gateway"], "objective": "batch"},
            "queue": {"url": queue.url},
            "signals": {"epp": {"urls": [urls["metrics"]]}},
            "budget": {"per_endpoint": 32},
            "pool": {"name": "qwen"},
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", "dispatcher", "check", "--strict", "--config"]
        for _ in range(times):
            with (tmp_path / "told").open("wb") as told:
                check = running(
                    *command,
                    tmp_path / "config.yaml",
                    stdout=told,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "HOME": str(tmp_path)},
                )
                with check as process:
                    limit.hold(process.pid)
                    code = process.wait(60)
            text = (tmp_path / "told").read_text()
            assert (code, [line for line in text.splitlines() if line.startswith("failed")]) == (0, []), text
