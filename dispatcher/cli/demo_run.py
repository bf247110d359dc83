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
from dispatcher.core.requests.result import decode_result
from dispatcher.ports import QueueUnavailableError
from dispatcher.queue.embedded import running_url
from dispatcher.queue.keys import Names
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.queue_admin import RedisDesk

NAMES = Names("batch:{demo}:requests", "batch:{demo}:results")
SLOTS = 64
RESERVE = 0.05
WARM_UP_S = 8.0
"""Time until as many realtime requests leave the pool as arrive."""
ALONE_S = 8.0
"""Duration of the baseline measurement with realtime traffic alone."""
TELL_S = 1.5
GIVE_UP_S = 180.0
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

LABEL = len("1234 served")
BESIDE = len("  realtime 64  batch 64  limit 64  nothing waits")
"""Largest width of the text beside the bar, so that all bars of a run have the same length."""
BAR_LEAST = 10
LEGEND = (
    f"{bar.REALTIME} realtime  {bar.OURS} batch  {bar.FREE} free; limit: what batch work may hold at most"
)
WORDS = {"idle": "nothing waits"}
"""Plain words for reasons of the gate that are misleading without an explanation."""
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the verdict."""

    ok: bool
    what: str


@dataclass(slots=True)
class Measured:
    """Measurements of one run of the demonstration."""

    submitted: int
    answers: Counter[int] = field(default_factory=Counter)
    """Number of results by HTTP status. 0 stands for errors of the dispatcher."""
    twice: int = 0
    peak: int = 0
    alone: dict[str, Any] = field(default_factory=dict)
    together: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def checks(self) -> Sequence[Check]:
        results = sum(self.answers.values())
        # The observer counts from its last restart on, so these are the answers while batch work ran.
        refused = self.together["gateway"]["answers"].get("429", 0)
        use = [shown["pool"]["running"]["mean"] / SLOTS for shown in (self.alone, self.together)]
        wait = [shown["pool"]["wait_s"]["realtime"]["p99"] or 0.0 for shown in (self.alone, self.together)]
        times = [shown["pool"]["time_s"]["realtime"]["p50"] or 0.0 for shown in (self.alone, self.together)]
        return (
            Check(
                results == self.submitted and not self.twice,
                f"{results} of {self.submitted} requests have a result, {self.twice} have two, "
                f"though the dispatcher was killed",
            ),
            Check(self.answers[200] == self.submitted, f"{self.answers[200]} of them are answers (200)"),
            Check(
                self.peak <= SLOTS * (1 - RESERVE) + 1,
                f"at most {self.peak} batch requests at the gateway, in a pool of {SLOTS} less {RESERVE:.0%}",
            ),
            Check(use[1] > use[0], f"the pool was {use[1]:.0%} in use; {use[0]:.0%} with realtime alone"),
            Check(
                wait[1] <= wait[0] + 1.0,
                f"realtime waited {wait[1] * 1000:.0f} ms for a slot (p99), alone {wait[0] * 1000:.0f} ms: "
                f"1 s more may be; a fuller pool answers slower: median {times[1]:.2f} s, alone "
                f"{times[0]:.2f} s",
            ),
            Check(refused <= self.submitted * 0.025, f"{refused} answers were 429"),
        )


async def play(directory: Path, requests: int, tell: Tell, *, width: int = 140) -> Measured:
    """Run the demonstration in a directory of its own, and report its progress.

    `width`: largest number of characters in a line.
    """
    measured = Measured(requests)
    with as_file(files("dispatcher.lab.standin") / "data" / "azure-conv-900s.csv") as trace:
        world = await _start_world(trace)
        async with _ending(world.process), aiohttp.ClientSession() as http:
            tell(f"A pool of {SLOTS} slots serves a chat service's traffic (a real hour, replayed).")
            tell(LEGEND)
            await asyncio.sleep(WARM_UP_S)
            await world.restart(http)  # the warm-up does not count
            await asyncio.sleep(ALONE_S)
            measured.alone = await world.observed(http)
            tell(line("alone", measured.alone, None, width))
            await world.restart(http)
            await _with_batch(directory, requests, world, http, measured, tell, width)
    return measured


async def _with_batch(
    directory: Path,
    requests: int,
    world: _StandinProcess,
    http: aiohttp.ClientSession,
    measured: Measured,
    tell: Tell,
    width: int,
) -> None:
    config, data, port = directory / "config.yaml", directory / "data", _free_port()
    text = CONFIG.format(
        gateway=world.gateway,
        metrics=world.metrics,
        data=data,
        lease_s=LEASE_S,
        reserve=RESERVE,
        slots=SLOTS,
        port=port,
    )
    config.write_text(text)
    tell(f"batch-dispatcher run --config {config}")
    dispatcher = await _run(config, data)
    async with _ending_last() as last:
        last.append(dispatcher)
        desk = await _desk(data)
        began = time.monotonic()
        await _submit(data, requests)
        tell(f"{requests} batch requests are submitted.")
        killed = False
        # After the timeout the verdict fails: it counts the results that are missing.
        while time.monotonic() - began < GIVE_UP_S:
            await asyncio.sleep(TELL_S)
            shown = await world.observed(http)
            status = await _status(http, port)
            served = shown["gateway"]["ids"]["served"]
            tell(line(f"{served:4d} served", shown, status, width))
            if served >= requests / 2 and not killed:
                killed = True
                # SIGKILL, so that the dispatcher cannot return its leases: they have to expire.
                dispatcher.send_signal(signal.SIGKILL)
                await dispatcher.wait()
                await desk.aclose()
                tell("SIGKILL: the dispatcher is gone, with what it held. It is started again.")
                dispatcher = await _run(config, data)
                last.append(dispatcher)
                # The embedded server ended with the killed dispatcher: connect to the new one.
                desk = await _desk(data)
            if served >= requests and await _finished(desk, requests):
                break
        measured.seconds = time.monotonic() - began
        measured.together = await world.observed(http)
        measured.peak = measured.together["gateway"]["batch"]["peak"]
        await _read_results(desk, measured)
        await desk.aclose()
        tell("SIGTERM: the dispatcher hands in what it has and ends.")


@dataclass(frozen=True, slots=True)
class _StandinProcess:
    process: asyncio.subprocess.Process
    gateway: str
    metrics: str
    control: str

    async def observed(self, http: aiohttp.ClientSession) -> dict[str, Any]:
        async with http.get(f"{self.control}/observed") as answer:
            shown: dict[str, Any] = await answer.json()
        return shown

    async def restart(self, http: aiohttp.ClientSession) -> None:
        """Start a new measurement."""
        async with http.post(f"{self.control}/control", json={"restart": True}) as answer:
            answer.raise_for_status()


async def _start_world(trace: Path) -> _StandinProcess:
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


async def _run(config: Path, data: Path) -> asyncio.subprocess.Process:
    """Start a dispatcher and wait until its embedded queue is available."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dispatcher", "run", "--config", str(config))
    )
    until = time.monotonic() + 30.0
    while running_url(data) is None:
        if process.returncode is not None or time.monotonic() > until:
            raise RuntimeError("the dispatcher did not start")
        await asyncio.sleep(0.05)
    return process


async def _desk(data: Path) -> RedisDesk:
    """Connect to the queue of the dispatcher as an operator, and wait until the queue answers."""
    until = time.monotonic() + 30.0
    while True:
        url = running_url(data)
        if url is not None:
            desk = RedisDesk(connect(url), NAMES)
            with suppress(QueueUnavailableError):
                await desk.counts()
                return desk
            await desk.aclose()
        if time.monotonic() > until:
            raise RuntimeError("the queue does not answer")
        await asyncio.sleep(0.1)


async def _submit(data: Path, requests: int) -> None:
    """Submit the requests with the Python client. The results go to the default list of the queue."""
    bodies = ({"model": "demo", "prompt": f"request {n}"} for n in range(requests))
    async with BatchClient(running_url(data) or "", pool="demo") as client:
        await client.enqueue_many([Item(body, results="") for body in bodies])


async def _results(desk: RedisDesk) -> list[bytes]:
    """Return all results in the default list of the queue."""
    scripts = desk.backend.scripts
    found: list[bytes] = await scripts.attempt(lambda: scripts.client.lrange(NAMES.results, 0, -1))
    return found


async def _finished(desk: RedisDesk, requests: int) -> bool:
    with suppress(QueueUnavailableError):
        return len(await _results(desk)) >= requests
    return False


async def _read_results(desk: RedisDesk, measured: Measured) -> None:
    seen: Counter[str] = Counter()
    for raw in await _results(desk):
        result = decode_result(raw)
        seen[result.id] += 1
        if seen[result.id] == 1:  # a second result of a request is counted as a duplicate, below
            measured.answers[result.status_code or 0] += 1
    measured.twice = sum(count > 1 for count in seen.values())


async def _status(http: aiohttp.ClientSession, port: int) -> dict[str, Any] | None:
    try:
        async with http.get(f"http://127.0.0.1:{port}/status") as answer:
            status: dict[str, Any] = await answer.json()
    except aiohttp.ClientError:
        return None
    return status


def line(label: str, shown: dict[str, Any], status: dict[str, Any] | None, width: int) -> str:
    """Format the state of the pool at one moment, as wide as the terminal."""
    running = shown["pool"]
    realtime, batch = running["realtime"]["now"], running["batch"]["now"]
    told = f"  realtime {realtime:2d}  batch {batch:2d}"
    if status:
        told += f"  limit {status['limit']:2d}  {WORDS.get(status['reason'], status['reason'])}"
    room = max(BAR_LEAST, min(SLOTS, width - BESIDE - LABEL - 2))
    drawn = bar.pool(realtime=realtime, waiting=0, ours=batch, reserve=0, capacity=SLOTS, width=room)
    return f"{label:>{LABEL}}  {drawn}{told}"[:width]


@asynccontextmanager
async def _ending(process: asyncio.subprocess.Process) -> AsyncIterator[None]:
    """Terminate the process at the end of the block: with SIGTERM, then with SIGKILL."""
    try:
        yield
    finally:
        await _end(process)


@asynccontextmanager
async def _ending_last() -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Terminate the last process of the list at the end of the block.

    The processes before it have already ended.
    """
    processes: list[asyncio.subprocess.Process] = []
    try:
        yield processes
    finally:
        if processes:
            await _end(processes[-1])


async def _end(process: asyncio.subprocess.Process) -> None:
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
