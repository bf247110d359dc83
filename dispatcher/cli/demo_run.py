"""The demonstration: a stand-in pool, an embedded Valkey, and the dispatcher as a process of its own.

First, realtime traffic runs alone, as a baseline. Then batch requests are submitted, and halfway the
dispatcher is killed (SIGKILL) and started again. The verdict is measured in this run, by the stand-in
gateway, which counts all requests, and by the results in Redis.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import aiohttp

from dispatcher.cli import bar
from dispatcher.client import BatchClient, Item
from dispatcher.queue.embedded import running_url
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
from dispatcher.requests.result import decode_result
from dispatcher.requests.submission import QueueUnavailableError
from dispatcher.telemetry.status import Status, decode_status

QUEUE_NAMES = QueueNames("batch:{demo}:requests", "batch:{demo}:results")
SLOTS = 64
RESERVE = 0.05
TRAFFIC_WARM_UP_S = 8.0
"""Time until as many realtime requests leave the pool as arrive."""
REALTIME_ONLY_S = 8.0
"""Duration of the baseline measurement with realtime traffic alone."""
REPORT_INTERVAL_S = 1.5
TIMEOUT_S = 180.0
TRACE_FROM_S = 525.0
"""Start in the trace, in seconds. The trace begins with little traffic."""
LEASE_S = 3.0
"""Lease time, short so that the requests of a killed dispatcher are soon available again."""

CONFIG = """\
pool: {{name: demo}}
gateway: {{url: "{gateway}"}}
queue: {{data_dir: "{data}", lease_s: {lease_s}}}
signals: {{epp: {{urls: ["{metrics}"]}}, interval_s: 0.5}}
budget: {{reserve: {reserve}, per_endpoint: {slots}}}
retry: {{base_s: 0.5}}
admin: {{host: 127.0.0.1, port: {port}}}
log: {{level: warning, format: json}}
"""

LABEL_WIDTH = len("1234 served")
TEXT_WIDTH = len("  realtime 64  batch 64  limit 64  nothing waits")
"""Largest width of the text beside the bar, so that all bars of a run have the same length."""
BAR_MIN_WIDTH = 10
LEGEND = (
    f"{bar.REALTIME} realtime  {bar.BATCH} batch  {bar.FREE} free; limit: what batch work may hold at most"
)
REASON_WORDS = {"idle": "nothing waits"}
"""Plain words for reasons of the gate that are misleading without an explanation."""
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the verdict."""

    ok: bool
    what: str


@dataclass(slots=True)
class Measurements:
    """Measurements of one run of the demonstration."""

    submitted_count: int
    results_by_status: Counter[int] = field(default_factory=Counter)
    """Number of results by HTTP status. 0 stands for errors of the dispatcher."""
    duplicate_count: int = 0
    peak_in_flight: int = 0
    realtime_only: dict[str, Any] = field(default_factory=dict)
    with_batch: dict[str, Any] = field(default_factory=dict)
    duration_s: float = 0.0

    def make_checks(self) -> Sequence[Check]:
        result_count = sum(self.results_by_status.values())
        # The observer counts from its last restart on, so these are the answers while batch work ran.
        refused = self.with_batch["gateway"]["answers"].get("429", 0)
        utilization = [
            observed["pool"]["running"]["mean"] / SLOTS for observed in (self.realtime_only, self.with_batch)
        ]
        p99_waits_s = [
            observed["pool"]["wait_s"]["realtime"]["p99"] or 0.0
            for observed in (self.realtime_only, self.with_batch)
        ]
        p50_times_s = [
            observed["pool"]["time_s"]["realtime"]["p50"] or 0.0
            for observed in (self.realtime_only, self.with_batch)
        ]
        return (
            Check(
                result_count == self.submitted_count and not self.duplicate_count,
                f"{result_count} of {self.submitted_count} requests have a result, "
                f"{self.duplicate_count} have two, "
                f"though the dispatcher was killed",
            ),
            Check(
                self.results_by_status[200] == self.submitted_count,
                f"{self.results_by_status[200]} of them are answers (200)",
            ),
            Check(
                self.peak_in_flight <= SLOTS * (1 - RESERVE) + 1,
                f"at most {self.peak_in_flight} batch requests at the gateway, in a pool of {SLOTS} less "
                f"{RESERVE:.0%}",
            ),
            Check(
                utilization[1] > utilization[0],
                f"the pool was {utilization[1]:.0%} in use; {utilization[0]:.0%} with realtime alone",
            ),
            Check(
                p99_waits_s[1] <= p99_waits_s[0] + 1.0,
                f"realtime waited {p99_waits_s[1] * 1000:.0f} ms for a slot (p99), alone "
                f"{p99_waits_s[0] * 1000:.0f} ms: "
                f"1 s more may be; a fuller pool answers slower: median {p50_times_s[1]:.2f} s, alone "
                f"{p50_times_s[0]:.2f} s",
            ),
            Check(refused <= self.submitted_count * 0.025, f"{refused} answers were 429"),
        )


async def run_demo(directory: Path, requests: int, report: Report, *, width: int = 140) -> Measurements:
    """Run the demonstration in a directory of its own, and report its progress.

    `width`: largest number of characters in a line.
    """
    measured = Measurements(requests)
    with as_file(files("dispatcher.lab.standin") / "data" / "azure-conv-900s.csv") as trace:
        standin = await _start_standin(trace)
        async with _terminate_on_exit(standin.process), aiohttp.ClientSession() as http:
            report(f"A pool of {SLOTS} slots serves a chat service's traffic (a real hour, replayed).")
            report(LEGEND)
            await asyncio.sleep(TRAFFIC_WARM_UP_S)
            await standin.restart_measurement(http)  # the warm-up does not count
            await asyncio.sleep(REALTIME_ONLY_S)
            measured.realtime_only = await standin.fetch_observed(http)
            report(format_line("alone", measured.realtime_only, None, width))
            await standin.restart_measurement(http)
            await _run_with_batch(directory, requests, standin, http, measured, report, width)
    return measured


async def _run_with_batch(
    directory: Path,
    requests: int,
    standin: _StandinProcess,
    http: aiohttp.ClientSession,
    measured: Measurements,
    report: Report,
    width: int,
) -> None:
    config, data, port = directory / "config.yaml", directory / "data", _free_port()
    text = CONFIG.format(
        gateway=standin.gateway,
        metrics=standin.metrics,
        data=data,
        lease_s=LEASE_S,
        reserve=RESERVE,
        slots=SLOTS,
        port=port,
    )
    config.write_text(text)
    report(f"batch-dispatcher run --config {config}")
    dispatcher = await _start_dispatcher(config, data)
    async with _terminate_last_on_exit() as dispatchers:
        dispatchers.append(dispatcher)
        admin = await _connect_admin(data)
        started_at = time.monotonic()
        await _submit_requests(data, requests)
        report(f"{requests} batch requests are submitted.")
        is_killed = False
        # After the timeout the verdict fails: it counts the results that are missing.
        while time.monotonic() - started_at < TIMEOUT_S:
            await asyncio.sleep(REPORT_INTERVAL_S)
            observed = await standin.fetch_observed(http)
            status = await _fetch_status(http, port)
            served_count = observed["gateway"]["ids"]["served"]
            report(format_line(f"{served_count:4d} served", observed, status, width))
            if served_count >= requests / 2 and not is_killed:
                is_killed = True
                # SIGKILL, so that the dispatcher cannot return its leases: they have to expire.
                dispatcher.send_signal(signal.SIGKILL)
                await dispatcher.wait()
                await admin.aclose()
                report("SIGKILL: the dispatcher died with requests in flight. It is started again.")
                dispatcher = await _start_dispatcher(config, data)
                dispatchers.append(dispatcher)
                # The embedded server ended with the killed dispatcher: connect to the new one.
                admin = await _connect_admin(data)
            if served_count >= requests and await _has_all_results(admin, requests):
                break
        measured.duration_s = time.monotonic() - started_at
        measured.with_batch = await standin.fetch_observed(http)
        measured.peak_in_flight = measured.with_batch["gateway"]["batch"]["peak"]
        await _count_results(admin, measured)
        await admin.aclose()
        report("SIGTERM: the dispatcher finishes its running requests, writes their results, and ends.")


@dataclass(frozen=True, slots=True)
class _StandinProcess:
    process: asyncio.subprocess.Process
    gateway: str
    metrics: str
    control: str

    async def fetch_observed(self, http: aiohttp.ClientSession) -> dict[str, Any]:
        async with http.get(f"{self.control}/observed") as answer:
            observed: dict[str, Any] = await answer.json()
        return observed

    async def restart_measurement(self, http: aiohttp.ClientSession) -> None:
        """Start a new measurement."""
        async with http.post(f"{self.control}/control", json={"restart": True}) as answer:
            answer.raise_for_status()


async def _start_standin(trace: Path) -> _StandinProcess:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dispatcher.lab.standin"),
        *("--slots", str(SLOTS), "--queue-limit", str(SLOTS // 2), "--pool", "demo"),
        *("--trace", str(trace), "--trace-from-s", str(TRACE_FROM_S)),
        stdout=asyncio.subprocess.PIPE,
    )
    if process.stdout is None:
        raise RuntimeError("the world has no standard output")
    # The stand-in prints its URLs on one line once it listens.
    urls = json.loads(await process.stdout.readline() or b"{}")
    return _StandinProcess(process, urls["gateway"], urls["metrics"], urls["control"])


async def _start_dispatcher(config: Path, data: Path) -> asyncio.subprocess.Process:
    """Start a dispatcher and wait until its embedded queue is available."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dispatcher", "run", "--config", str(config))
    )
    give_up_at = time.monotonic() + 30.0
    while running_url(data) is None:
        if process.returncode is not None or time.monotonic() > give_up_at:
            raise RuntimeError("the dispatcher did not start")
        await asyncio.sleep(0.05)
    return process


async def _connect_admin(data: Path) -> RedisQueueAdmin:
    """Connect to the queue of the dispatcher as an operator, and wait until the queue answers."""
    give_up_at = time.monotonic() + 30.0
    while True:
        url = running_url(data)
        if url is not None:
            admin = RedisQueueAdmin(connect(url), QUEUE_NAMES)
            with suppress(QueueUnavailableError):
                await admin.count_requests()
                return admin
            await admin.aclose()
        if time.monotonic() > give_up_at:
            raise RuntimeError("the queue does not answer")
        await asyncio.sleep(0.1)


async def _submit_requests(data: Path, requests: int) -> None:
    """Submit the requests with the Python client. The results go to the default list of the queue."""
    bodies = ({"model": "demo", "prompt": f"request {n}"} for n in range(requests))
    async with BatchClient(running_url(data) or "", pool="demo") as client:
        await client.enqueue_many([Item(body, results="") for body in bodies])


async def _read_result_list(admin: RedisQueueAdmin) -> list[bytes]:
    """Return all results in the default list of the queue."""
    scripts = admin.backend.scripts
    results: list[bytes] = await scripts.call_with_retries(
        lambda: scripts.client.lrange(QUEUE_NAMES.result_list, 0, -1)
    )
    return results


async def _has_all_results(admin: RedisQueueAdmin, requests: int) -> bool:
    with suppress(QueueUnavailableError):
        return len(await _read_result_list(admin)) >= requests
    return False


async def _count_results(admin: RedisQueueAdmin, measured: Measurements) -> None:
    counts: Counter[str] = Counter()
    for raw in await _read_result_list(admin):
        result = decode_result(raw)
        counts[result.id] += 1
        if counts[result.id] == 1:  # a second result of a request is counted as a duplicate, below
            measured.results_by_status[result.status_code or 0] += 1
    measured.duplicate_count = sum(count > 1 for count in counts.values())


async def _fetch_status(http: aiohttp.ClientSession, port: int) -> Status | None:
    try:
        async with http.get(f"http://127.0.0.1:{port}/status") as answer:
            return decode_status(await answer.json())
    except aiohttp.ClientError:
        return None


def format_line(label: str, observed: dict[str, Any], status: Status | None, width: int) -> str:
    """Format the state of the pool at one moment, as wide as the terminal."""
    running = observed["pool"]
    realtime, batch = running["realtime"]["now"], running["batch"]["now"]
    text = f"  realtime {realtime:2d}  batch {batch:2d}"
    if status:
        reason = status.gate.reason
        text += f"  limit {status.gate.limit:2d}  {REASON_WORDS.get(reason, reason)}"
    bar_width = max(BAR_MIN_WIDTH, min(SLOTS, width - TEXT_WIDTH - LABEL_WIDTH - 2))
    drawn = bar.draw_pool(
        realtime=realtime, waiting=0, batch=batch, reserve=0, capacity=SLOTS, width=bar_width
    )
    return f"{label:>{LABEL_WIDTH}}  {drawn}{text}"[:width]


@asynccontextmanager
async def _terminate_on_exit(process: asyncio.subprocess.Process) -> AsyncIterator[None]:
    """Terminate the process at the end of the block: with SIGTERM, then with SIGKILL."""
    try:
        yield
    finally:
        await _terminate_process(process)


@asynccontextmanager
async def _terminate_last_on_exit() -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Terminate the last process of the list at the end of the block.

    The processes before it have already ended.
    """
    processes: list[asyncio.subprocess.Process] = []
    try:
        yield processes
    finally:
        if processes:
            await _terminate_process(processes[-1])


async def _terminate_process(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):  # it may end between the check and the signal
            process.terminate()
        try:
            async with asyncio.timeout(15.0):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def _free_port() -> int:
    import socket

    # Another process may take the port before the dispatcher does; then the dispatcher fails to start.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
