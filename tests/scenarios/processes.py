"""The cast of the process scenarios: a live world, dispatchers, a producer.

Nothing here decides what is right: a test sets the stage, lets it run, and judges by what the world's
observer saw and by what lies in Redis. All calls block, because what they wait for happens in other
processes. Times are of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import redis
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from dispatcher.core.requests.request import encode_member
from dispatcher.queue.keys import QueueNames
from tests import kubelet
from tests.queue.servers import Server
from tests.support import plain_client, wait_until_sync
from tests.telemetry.throttle import Throttle
from tests.warm import Warm, cold, warm

POOL = "qwen"
NAMES = QueueNames(f"batch:{{{POOL}}}:requests", f"batch:{{{POOL}}}:results")
START_S = 30.0
"""An interpreter, its imports and a first reading; on a machine that does other things beside."""
Process = subprocess.Popen[bytes] | Warm


@dataclass(frozen=True)
class Entry:
    """One request as the gateway saw it: `dispatcher.lab.standin.gateway.LogEntry`."""

    number: int
    id: str
    batch: bool
    tenant: str
    arrived_at: float
    started_at: float | None
    ended_at: float | None
    status: int | None
    """None: not ended; 0: its client went away; -1: the gateway broke the connection."""
    server: str = ""
    """The model server that it went to."""
    model_server: int = -1
    """The number of that to which it came; -1: any will do, or it came to none."""
    model: str = ""
    """What it asked that one for."""
    cold: bool = False
    """It was the first that asked for it there, and took so much longer."""
    direct: bool = False
    """It came to the server past the gateway."""


@dataclass
class World:
    """Stand-in servers in a process of their own: `python -m dispatcher.lab.standin`."""

    gateway: str
    metrics: str
    http: httpx.Client = field(repr=False)
    servers: Sequence[str] = ()
    """URLs of the model servers' own addresses, in a world where they are `apart`."""

    def control(self, **changes: Any) -> dict[str, Any]:
        """Change the world (a `Control`), and return when it is changed; what the observer saw so far."""
        answer = self.http.post("/control", json=changes)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def observed(self) -> dict[str, Any]:
        return dict(self.http.get("/observed").json())

    def log(self, after: int = 0) -> list[Entry]:
        """The requests in the order of their arrival."""
        return [Entry(**entry) for entry in self.http.get("/log", params={"after": after}).json()]

    def in_flight(self) -> int:
        """Batch requests at the gateway now, both ways included."""
        return int(self.observed()["gateway"]["batch"]["now"])

    def mean_in_flight(self, seconds: float) -> dict[str, Any]:
        """What the observer measures over so long, from now on: mean, peak, counts."""
        until = self.control(restart=True)["at"] + seconds
        wait_until_sync(lambda: time.monotonic() >= until, seconds + 1.0, every_s=0.05)
        return self.observed()


@dataclass
class Dispatcher:
    """`python -m dispatcher run` on a configuration file of its own."""

    folder: Path
    settings: dict[str, Any]
    options: tuple[str, ...]
    before: tuple[str, ...]
    """The command that runs it, if it runs anywhere but here."""
    stack: ExitStack = field(repr=False)
    limit: Throttle | None = None
    """On its CPU, from its start."""
    is_warm: bool = True
    """Forked from a warm interpreter, where it runs here and without a limit."""
    environ: Mapping[str, str] = field(default_factory=dict)
    process: Process | None = field(default=None, repr=False)
    asked_to_end: bool = False
    _starts: int = 0
    _http: httpx.Client | None = field(default=None, repr=False)

    @property
    def config(self) -> Path:
        return self.folder / "etc" / kubelet.FILE

    @property
    def child(self) -> Process:
        assert self.process is not None
        return self.process

    @property
    def admin_port(self) -> int:
        assert self._http is not None
        return int(self._http.base_url.port or 0)

    def start(self) -> Dispatcher:
        """Start it, for the first time or again, and wait until its admin port answers."""
        self.write(self.settings)
        self._starts += 1
        self.asked_to_end = False
        arguments = ("run", "--config", str(self.config), *self.options)
        environ = _quiet_environment() | dict(self.environ)
        with self._log.open("wb") as log:
            run: AbstractContextManager[Process] = (
                warm("dispatcher", *arguments, stderr=log, env=environ)
                if self.is_warm and not self.before and self.limit is None
                else cold("dispatcher", *arguments, before=self.before, stderr=log, env=environ)
            )
            self.process = self.stack.enter_context(run)
        if self.limit is not None:
            self.limit.hold(self.process.pid)
        started = wait_until_sync(self._started, START_S, what=f"{self.folder.name} starts", every_s=0.02)
        self._http = self.stack.enter_context(plain_client(f"http://127.0.0.1:{started['admin_port']}"))
        return self

    def status(self) -> dict[str, Any]:
        assert self._http is not None
        return dict(self._http.get("/status").json())

    def claim_probe(self, path: str) -> tuple[int, str]:
        """Status and text of /livez or /readyz."""
        assert self._http is not None
        answer = self._http.get(path)
        return answer.status_code, answer.text.strip()

    def metrics(self) -> dict[str, float]:
        """The /metrics page: `name` or `name{value of its labels, …}` → value, without the common prefix
        and label."""
        assert self._http is not None

        def labels(sample: Sample) -> str:
            values = [value for label, value in sample.labels.items() if label != "pool"]
            return f"{{{','.join(values)}}}" if values else ""

        return {
            sample.name.removeprefix("batch_dispatcher_") + labels(sample): sample.value
            for family in text_string_to_metric_families(self._http.get("/metrics").text)
            for sample in family.samples
        }

    def tries(self, outcome: str) -> float:
        """How many ended so, whatever the status."""
        return sum(
            value for name, value in self.metrics().items() if name.startswith(f"attempts_total{{{outcome},")
        )

    def wait_for(self, timeout_s: float = 15.0, **wanted: Any) -> dict[str, Any]:
        """Wait until the status has these values."""

        def fits() -> dict[str, Any] | None:
            status = self.status()
            return status if all(status[name] == value for name, value in wanted.items()) else None

        found = wait_until_sync(fits, timeout_s, what=f"{self.folder.name} to show {wanted}", every_s=0.02)
        assert found is not None
        return found

    def write(self, settings: Mapping[str, Any] | str) -> None:
        """Change the mounted file as the kubelet does."""
        text = settings if isinstance(settings, str) else yaml.safe_dump(dict(settings))
        if self.config.exists():
            kubelet.swap(self.config.parent, text)
        else:
            kubelet.mount(self.config.parent, text)

    def reconfigure(self, **sections: Mapping[str, Any] | Sequence[Any]) -> None:
        """Change keys of sections in the file."""
        self.settings = merged(self.settings, sections)
        self.write(self.settings)

    def send(self, number: signal.Signals) -> None:
        self.asked_to_end = self.asked_to_end or number is not signal.SIGHUP
        self.child.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, as a lost node; returns when it is gone."""
        self.send(signal.SIGKILL)
        self.child.wait(10)

    def terminate(self, within_s: float = 20.0) -> int:
        """SIGTERM; the exit code."""
        self.send(signal.SIGTERM)
        return self.child.wait(within_s)

    @property
    def _log(self) -> Path:
        return self.folder / f"log.{self._starts}"

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """What all its runs have logged, or the events of this name."""
        lines = [line for log in sorted(self.folder.glob("log.*")) for line in log.read_text().splitlines()]
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [event for event in found if name in ("", event["event"])]

    def complaints(self) -> list[str]:
        """What no run should ever show: defects of ours, tracebacks, an end that nobody asked for."""
        found = [str(event) for event in self.events("internal-error")]
        for log in sorted(self.folder.glob("log.*")):
            text = log.read_text()
            if "Traceback" in text or "never retrieved" in text or "was never awaited" in text:
                found.append(text[-4000:])
        if self.process is not None and self.process.poll() is not None and not self.asked_to_end:
            found.append(f"{self.folder.name} ended by itself with {self.process.returncode}")
        return found

    def _started(self) -> dict[str, Any] | None:
        assert self.child.poll() is None, self._log.read_text()
        lines = [line for line in self._log.read_text().splitlines() if '"event": "started"' in line]
        return dict(json.loads(lines[-1])) if lines else None


@dataclass
class Producer:
    """A foreign producer: it knows the queue contract, and none of the dispatcher's code that submits."""

    client: redis.Redis
    names: QueueNames = NAMES
    submitted: list[str] = field(default_factory=list)
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """What was collected, by id; more than one for an id is a defect of the dispatcher."""

    def submit(
        self, count: int, payload: bytes = b'{"prompt":"hi"}', *, prefix: str = "r", **more: Any
    ) -> list[str]:
        """So many requests; their ids. `more`: `deadline_s`, and what `encode_member` takes."""
        first = len(self.submitted)
        ids = [f"{prefix}-{number}" for number in range(first, first + count)]
        deadline = int(time.time() + more.pop("deadline_s", 3600))
        self.put({encode_member(id_, payload, deadline, **more): deadline for id_ in ids})
        self.submitted += ids
        return ids

    def put(self, members: Mapping[bytes, float]) -> None:
        """Members as they are, with their scores, without waking anybody."""
        items = list(members.items())
        for start in range(0, len(items), 2000):
            self.client.zadd(self.names.queue, dict(items[start : start + 2000]))

    def collect(self) -> dict[str, list[dict[str, Any]]]:
        """Take what has arrived in the default result list; everything that ever did, by id."""
        while found := self.client.rpop(self.names.result_list, 1000):
            assert isinstance(found, list)
            for raw in found:
                result = json.loads(raw)
                self.results.setdefault(result["id"], []).append(result)
        return self.results

    def wait_for_all(
        self, ids: Iterable[str] | None = None, timeout_s: float = 60.0
    ) -> dict[str, list[dict[str, Any]]]:
        """Wait until each of these (None: of all submitted) has a result."""
        wanted = set(self.submitted if ids is None else ids)
        wait_until_sync(
            lambda: wanted <= self.collect().keys(), timeout_s, what=f"{len(wanted)} results", every_s=0.05
        )
        return self.results

    def answers(self) -> Counter[str]:
        """How often each kind of result was collected: a status, or an error code."""
        return Counter(
            str(result.get("error_code") or result.get("status_code"))
            for several in self.results.values()
            for result in several
        )

    def twice(self) -> list[str]:
        """Ids with more than one result."""
        return [id_ for id_, several in self.results.items() if len(several) > 1]

    def count_requests(self) -> dict[str, int]:
        """Where requests lie now, read in one step."""
        names = self.names
        with self.client.pipeline() as pipe:
            for key in names.claimable_keys:
                pipe.zcard(key)
            pipe.zcard(f"{names.pool_prefix}:leases")
            for suffix in ("delayed", "dead"):
                pipe.zcard(f"{names.queue_prefix}:{suffix}")
            pending, back, apart, leased, later, buried = pipe.execute()
        return {"pending": pending + back + apart, "leased": leased, "delayed": later, "dead": buried}

    def unaccounted(self) -> set[str]:
        """Ids with no result, when nothing lies in the queue any more: requests that were lost."""
        assert sum(self.count_requests().values()) == 0, f"not finished: {self.count_requests()}"
        return set(self.submitted) - self.collect().keys()


class Stage:
    """Makes the cast of one test, and takes it down in the reverse order."""

    def __init__(self, folder: Path, server: Server, stack: ExitStack, *, is_warm: bool = True) -> None:
        self.server = server
        self.dispatchers: list[Dispatcher] = []
        self._folder = folder
        self._stack = stack
        self._worlds = 0
        self._is_warm = is_warm
        self.producer = Producer(stack.enter_context(server.client(socket_timeout=30)))

    def world(self, **config: Any) -> World:
        """A live world, by the fields of its `Config`; 32 slots, 0.5 s a request unless told otherwise."""
        self._worlds += 1
        options = {"slots": 32, "seconds": 0.5, "pool": POOL} | config
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        log = self._stack.enter_context((self._folder / f"world-{self._worlds}.log").open("wb"))
        run: AbstractContextManager[Process] = (warm if self._is_warm else cold)(
            "dispatcher.lab.standin", *flags, stdout=subprocess.PIPE, stderr=log
        )
        process = self._stack.enter_context(run)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (self._folder / f"world-{self._worlds}.log").read_text()
        urls = json.loads(line)
        http = self._stack.enter_context(plain_client(urls["control"]))
        return World(urls["gateway"], urls["metrics"], http, urls["servers"])

    def settings(
        self, world: World, *, max_sys: int | None = 32, **sections: Mapping[str, Any] | Sequence[Any]
    ) -> dict[str, Any]:
        """A configuration for this world and the stage's Redis: readings each second, short leases."""
        plain = {
            "pool": {"name": POOL},
            "gateway": {"url": world.gateway},
            "queue": {"url": self.server.url, "lease_s": 5},
            "signals": {"source": "epp", "interval_s": 1.0, "epp": {"urls": [world.metrics]}},
            "budget": {"max_sys": max_sys},
            "admin": {"host": "127.0.0.1", "port": 0},
            "log": {"format": "json"},
        }
        return merged(plain, sections)

    def dispatcher(
        self,
        settings: Mapping[str, Any],
        *options: str,
        before: tuple[str, ...] = (),
        limit: Throttle | None = None,
        **environ: str,
    ) -> Dispatcher:
        """A dispatcher that runs until the test ends, or ends it; `environ`: what to add to its own."""
        folder = self._folder / f"dispatcher-{len(self.dispatchers) + 1}"
        folder.mkdir()
        made = Dispatcher(folder, dict(settings), options, before, self._stack, limit, self._is_warm, environ)
        self.dispatchers.append(made)
        return made.start()

    def complaints(self) -> list[str]:
        return [complaint for each in self.dispatchers for complaint in each.complaints()]


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with changes laid over them, section by section."""
    result = dict(settings)
    for name, value in changes.items():
        before = result.get(name)
        result[name] = merged(before, value) if isinstance(value, Mapping) and before else value
    return result


def hold(condition: Callable[[], bool], seconds: float, *, what: str = "") -> None:
    """The condition holds now, and at every look for so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert condition(), what
        time.sleep(0.02)


def _quiet_environment() -> dict[str, str]:
    """This process's, without a cluster that the dispatcher would watch and without settings."""
    apart = ("KUBE", "BATCH_DISPATCHER__")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(apart)}
    return kept | {"KUBECONFIG": "/nonexistent"}
