"""`check` with too little CPU: healthy parts pass, and no peer is blamed for a slow event loop."""

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
from tests.support import running_process
from tests.telemetry.throttle import cpu_limit

TIMED_OUT = Finding("failed", "queue.url", "Redis did not answer in time")


async def probe_after_stalls(
    stall_count: int, stall_s: float, timeout_finding: Finding = TIMED_OUT
) -> list[Finding]:
    """Run a probe of a peer that answers at once, in an event loop that stalls during the first attempts."""
    findings: list[Finding] = []
    attempts = 0

    async def probe() -> list[Finding]:
        nonlocal attempts
        attempts += 1
        try:
            async with asyncio.timeout(stall_s / 2):
                if attempts <= stall_count:
                    time.sleep(stall_s)  # noqa: ASYNC251 - stalls the event loop
                await asyncio.sleep(0.001)
        except TimeoutError:
            return [timeout_finding]
        return [Finding("ok", "queue.url", "Redis answers")]

    await run_probes({"queue.url": probe}, findings.append)
    assert attempts == min(stall_count + 1, 2)
    return findings


async def test_probe_that_failed_while_the_event_loop_stalled_is_repeated() -> None:
    assert await probe_after_stalls(1, 0.4) == [Finding("ok", "queue.url", "Redis answers")]


async def test_peer_is_not_blamed_for_a_stalled_event_loop() -> None:
    [finding] = await probe_after_stalls(2, 0.4)
    assert finding.level == "failed"
    assert finding.what.startswith(
        "not known (Redis did not answer in time): this process gets too little CPU"
    )
    assert "raise i" in finding.what


async def test_refused_connection_is_reported_even_if_the_event_loop_stalls() -> None:
    refused = Finding("failed", "queue.url", "127.0.0.1:1: connection refused", is_certain=True)
    attempts, findings = 0, list[Finding]()

    async def probe() -> list[Finding]:
        nonlocal attempts
        attempts += 1
        time.sleep(0.4)  # noqa: ASYNC251 - stalls the event loop
        await asyncio.sleep(0.001)
        return [refused]

    await run_probes({"queue.url": probe}, findings.append)
    assert (attempts, findings) == (1, [refused])


async def test_gateway_is_not_called_slow_if_the_event_loop_stalled() -> None:
    slow = SlowFinding("warning", "gateway.url", "not answered within 3 s")
    assert await probe_after_stalls(1, 0.4, slow) == [Finding("ok", "queue.url", "Redis answers")]
    [finding] = await probe_after_stalls(2, 0.4, slow)
    assert finding.level == "warning", "the connection was accepted"
    assert finding.what.startswith("not known (not answered within 3 s): this process gets too little CPU")


@pytest.mark.parametrize("lag_s", [0.0, 0.1])
def test_probe_that_failed_without_a_stall_is_not_repeated(lag_s: float) -> None:
    """A small lag of the event loop does not count.

    The test runs in virtual time, because a busy machine would stall a real event loop.
    """
    attempts, findings = 0, list[Finding]()

    async def probe() -> list[Finding]:
        nonlocal attempts
        attempts += 1
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.stall_loop(lag_s)
        return [Finding("failed", "queue.url", "connection refused")]

    run_in_virtual_time(run_probes({"queue.url": probe}, findings.append))
    assert (attempts, [finding.what for finding in findings]) == (1, ["connection refused"])


@pytest.mark.slow
@pytest.mark.parametrize(("cores", "repetitions"), [(0.1, 1), (0.25, 2)])
def test_strict_check_of_healthy_parts_passes_under_a_cpu_limit(
    tmp_path: Path, cores: float, repetitions: int
) -> None:
    standin_command = [sys.executable, "-m", "dispatcher.lab.standin", "--slots=32"]
    with (
        server("redis", tmp_path / "redis", "--appendonly", "yes") as queue,
        running_process(*standin_command, stdout=subprocess.PIPE) as standin,
        cpu_limit(cores) as limit,
    ):
        assert standin.stdout is not None
        urls = json.loads(standin.stdout.readline())
        settings = {
            "gateway": {"url": urls["gateway"], "objective": "batch"},
            "queue": {"url": queue.url},
            "signals": {"epp": {"urls": [urls["metrics"]]}},
            "budget": {"per_endpoint": 32},
            "pool": {"name": "qwen"},
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", "dispatcher", "check", "--strict", "--config"]
        for _ in range(repetitions):
            with (tmp_path / "output").open("wb") as output:
                check = running_process(
                    *command,
                    tmp_path / "config.yaml",
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "HOME": str(tmp_path)},
                )
                with check as process:
                    limit.limit_process(process.pid)
                    code = process.wait(60)
            text = (tmp_path / "output").read_text()
            assert (code, [line for line in text.splitlines() if line.startswith("failed")]) == (0, []), text
