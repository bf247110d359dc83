"""`check` where CPU is short: what is well is said to be well, and no peer is blamed for us."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from dispatcher.check.connections import run_probes
from dispatcher.check.finding import Finding, SlowFinding
from dispatcher.lab.simulation.virtual_loop import VirtualLoop, run_in_virtual_time
from tests.queue.servers import server
from tests.support import running
from tests.telemetry.throttle import cpu_limit

LATE = Finding("failed", "queue.url", "Redis did not answer in time")


async def answer_after_stalls(stalls: int, of_s: float, late: Finding = LATE) -> list[Finding]:
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
            return [late]
        return [Finding("ok", "queue.url", "Redis answers")]

    await run_probes({"queue.url": probe}, told.append)
    assert tries == min(stalls + 1, 2)
    return told


async def test_probe_that_failed_while_our_loop_stood_still_is_tried_again() -> None:
    assert await answer_after_stalls(1, 0.4) == [Finding("ok", "queue.url", "Redis answers")]


async def test_peer_is_not_blamed_for_a_loop_that_stands_still() -> None:
    [finding] = await answer_after_stalls(2, 0.4)
    assert finding.level == "failed"
    assert finding.what.startswith(
        "not known (Redis did not answer in time): this process gets too little CPU"
    )
    assert "raise i" in finding.what


async def test_a_refused_connection_is_one_however_late_our_loop_is() -> None:
    refused = Finding("failed", "queue.url", "127.0.0.1:1: connection refused", is_certain=True)
    tries, told = 0, list[Finding]()

    async def probe() -> list[Finding]:
        nonlocal tries
        tries += 1
        time.sleep(0.4)  # noqa: ASYNC251 - the stall
        await asyncio.sleep(0.001)
        return [refused]

    await run_probes({"queue.url": probe}, told.append)
    assert (tries, told) == (1, [refused])


async def test_nor_is_a_gateway_that_only_seems_slow() -> None:
    slow = SlowFinding("warning", "gateway.url", "not answered within 3 s")
    assert await answer_after_stalls(1, 0.4, slow) == [Finding("ok", "queue.url", "Redis answers")]
    [finding] = await answer_after_stalls(2, 0.4, slow)
    assert finding.level == "warning", "the connection was there"
    assert finding.what.startswith("not known (not answered within 3 s): this process gets too little CPU")


@pytest.mark.parametrize("late_s", [0.0, 0.1])
def test_peer_that_fails_while_our_loop_keeps_pace_is_asked_once(late_s: float) -> None:
    """Or is behind by less than makes anything late, however short the probe was. In virtual time: a busy
    machine would hold up this loop, too."""
    tries, told = 0, list[Finding]()

    async def probe() -> list[Finding]:
        nonlocal tries
        tries += 1
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.stall_loop(late_s)
        return [Finding("failed", "queue.url", "connection refused")]

    run_in_virtual_time(run_probes({"queue.url": probe}, told.append))
    assert (tries, [finding.what for finding in told]) == (1, ["connection refused"])


@pytest.mark.parametrize(("cores", "times"), [(0.1, 1), (0.25, 2)])
def test_strict_check_of_healthy_parts_passes_under_a_cpu_limit(
    tmp_path: Path, cores: float, times: int
) -> None:
    world_of = [sys.executable, "-m", "dispatcher.lab.standin", "--slots=32"]
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
