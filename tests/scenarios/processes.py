"""Environment of the process scenarios: stand-in servers ("world"), dispatchers and a producer as processes.

Nothing here asserts what is right: a test starts processes, lets them run, and checks what the observer of
the world recorded and what is stored in Redis. All calls block, because they wait for other processes. Times
are of CLOCK_MONOTONIC, which all processes of a machine share.
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

from dispatcher.queue.keys import QueueNames
from dispatcher.requests.request import encode_member
from tests import kubelet
from tests.fork_server import ForkedProcess, forked_process, fresh_process
from tests.queue.servers import Server
from tests.support import TIMEOUT_FACTOR, make_http_client, wait_until_sync
from tests.telemetry.throttle import Throttle

POOL = "qwen"
NAMES = QueueNames(f"batch:{{{POOL}}}:requests", f"batch:{{{POOL}}}:results")
START_TIMEOUT_S = 30.0
"""Time for an interpreter to start, its imports and a first reading, on a busy machine."""
NEARLY_FULL = 24
"""Batch requests in flight that show that the dispatchers use the idle capacity of 32 slots. With a reserve
of 5 % the limit is 30. It is lower if requests end while a reading is taken, as on a busy machine."""
Process = subprocess.Popen[bytes] | ForkedProcess


@dataclass(frozen=True)
class LogEntry:
    """One request as the gateway saw it (`dispatcher.lab.standin.gateway.LogEntry`)."""

    number: int
    id: str
    batch: bool
    tenant: str
    arrived_at: float
    started_at: float | None
    ended_at: float | None
    status: int | None
    """`None` while the request runs, 0 if its client disconnected, -1 if the gateway broke the connection."""
    server: str = ""
    """Name of the model server to which the session token sent the request."""
    model_server: int = -1
    """Number of the model server that got the request; -1 if any would do or none got it."""
    model: str = ""
    """Model for which the request asked the model server."""
    cold: bool = False
    """Whether this was the first request for its model on that server, which takes longer."""
    direct: bool = False
    """Whether the request was sent to the server directly, bypassing the gateway."""
    prompt_tokens: int = 0
    """Number of tokens of the prompt, where the text of the answer is generated."""
    cached_tokens: int = 0
    """Number of tokens of the prompt that the model server had in its cache."""
    generated_tokens: int = 0
    """Number of tokens that were generated until the request ended."""


@dataclass
class World:
    """Stand-in servers in a separate process (`python -m dispatcher.lab.standin`)."""

    gateway: str
    metrics: str
    http: httpx.Client = field(repr=False)
    servers: Sequence[str] = ()
    """URLs of the model servers, if the world was started with `apart`."""

    def control(self, **changes: Any) -> dict[str, Any]:
        """Change the world (fields of `Control`).

        Return the figures of its observer when the change is done.
        """
        answer = self.http.post("/control", json=changes)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def observed(self) -> dict[str, Any]:
        return dict(self.http.get("/observed").json())

    def log(self, after: int = 0) -> list[LogEntry]:
        """Return the log of requests in the order of their arrival."""
        return [LogEntry(**entry) for entry in self.http.get("/log", params={"after": after}).json()]

    def in_flight(self) -> int:
        """Return the number of batch requests at the gateway now, including transit to and from the pool."""
        return int(self.observed()["gateway"]["batch"]["now"])

    def is_filled(self, limit: int) -> bool:
        """Return whether nine tenths of the limit are at the gateway.

        On a busy machine some requests are always on their way, so that the limit itself may never be seen.
        """
        return self.in_flight() >= 0.9 * limit

    def observe_for(self, seconds: float) -> dict[str, Any]:
        """Restart the observer, wait, and return the means, peaks and counts of this time."""
        end_at = self.control(restart=True)["at"] + seconds
        wait_until_sync(lambda: time.monotonic() >= end_at, seconds + 1.0, every_s=0.05)
        return self.observed()


@dataclass
class Dispatcher:
    """Dispatcher process (`python -m dispatcher run`) with its own configuration file."""

    folder: Path
    settings: dict[str, Any]
    options: tuple[str, ...]
    command_prefix: tuple[str, ...]
    """Command that runs the dispatcher as its arguments, for example in another namespace."""
    stack: ExitStack = field(repr=False)
    cpu_limit: Throttle | None = None
    """Limit of its CPU time, which applies from its start."""
    is_forked: bool = True
    """Whether the fork server starts it if it can."""
    environ: Mapping[str, str] = field(default_factory=dict)
    source: Path | None = None
    """Folder with the package of another version, which runs instead of this one."""
    process: Process | None = field(default=None, repr=False)
    is_stop_expected: bool = False
    _start_count: int = 0
    _http: httpx.Client | None = field(default=None, repr=False)

    @property
    def config(self) -> Path:
        return self.folder / "etc" / kubelet.FILE_NAME

    @property
    def child(self) -> Process:
        assert self.process is not None
        return self.process

    @property
    def admin_port(self) -> int:
        assert self._http is not None
        return int(self._http.base_url.port or 0)

    @property
    def can_be_forked(self) -> bool:
        return self.is_forked and not self.command_prefix and self.cpu_limit is None and self.source is None

    def start(self) -> Dispatcher:
        """Start or restart the process, and wait until its admin port answers."""
        self.write_config(self.settings)
        self._start_count += 1
        self.is_stop_expected = False
        arguments = ("run", "--config", str(self.config), *self.options)
        environ = _make_clean_environment() | dict(self.environ)
        if self.source is not None:
            environ |= build_source_environment(self.source)
        with self._log.open("wb") as log:
            process_context: AbstractContextManager[Process] = (
                forked_process("dispatcher", *arguments, stderr=log, env=environ)
                if self.can_be_forked
                else fresh_process(
                    "dispatcher", *arguments, command_prefix=self.command_prefix, stderr=log, env=environ
                )
            )
            self.process = self.stack.enter_context(process_context)
        if self.cpu_limit is not None:
            self.cpu_limit.limit_process(self.process.pid)
        started = wait_until_sync(
            self._started, START_TIMEOUT_S, what=f"{self.folder.name} starts", every_s=0.02
        )
        self._http = self.stack.enter_context(make_http_client(f"http://127.0.0.1:{started['admin_port']}"))
        return self

    def status(self) -> dict[str, Any]:
        assert self._http is not None
        return dict(self._http.get("/status").json())

    def get_probe(self, path: str) -> tuple[int, str]:
        """Return status code and text of /livez or /readyz."""
        assert self._http is not None
        answer = self._http.get(path)
        return answer.status_code, answer.text.strip()

    def metrics(self) -> dict[str, float]:
        """Return the /metrics page as `name` or `name{label values}` → value.

        The common prefix of all names and the label `pool` are removed.
        """
        assert self._http is not None

        def labels(sample: Sample) -> str:
            values = [value for label, value in sample.labels.items() if label != "pool"]
            return f"{{{','.join(values)}}}" if values else ""

        return {
            sample.name.removeprefix("batch_dispatcher_") + labels(sample): sample.value
            for family in text_string_to_metric_families(self._http.get("/metrics").text)
            for sample in family.samples
        }

    def count_attempts(self, outcome: str) -> float:
        """Return the number of attempts with this outcome, whatever their status code."""
        return sum(
            value for name, value in self.metrics().items() if name.startswith(f"attempts_total{{{outcome},")
        )

    def wait_for(self, timeout_s: float = 15.0, **expected: Any) -> dict[str, Any]:
        """Wait until /status has these values, and return it."""

        def get_matching_status() -> dict[str, Any] | None:
            status = self.status()
            return status if all(status[name] == value for name, value in expected.items()) else None

        found = wait_until_sync(
            get_matching_status, timeout_s, what=f"{self.folder.name} to show {expected}", every_s=0.02
        )
        assert found is not None
        return found

    def write_config(self, settings: Mapping[str, Any] | str) -> None:
        """Write the mounted configuration file like the kubelet does."""
        text = settings if isinstance(settings, str) else yaml.safe_dump(dict(settings))
        if self.config.exists():
            kubelet.replace_file(self.config.parent, text)
        else:
            kubelet.mount_file(self.config.parent, text)

    def reconfigure(self, **sections: Mapping[str, Any] | Sequence[Any]) -> None:
        """Change keys of some sections in the configuration file."""
        self.settings = merge_settings(self.settings, sections)
        self.write_config(self.settings)

    def send_signal(self, number: signal.Signals) -> None:
        self.is_stop_expected = self.is_stop_expected or number is not signal.SIGHUP
        self.child.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL, and return when the process has ended."""
        self.send_signal(signal.SIGKILL)
        self.child.wait(10)

    def terminate(self, within_s: float = 20.0) -> int:
        """Send SIGTERM, and return the exit code."""
        self.send_signal(signal.SIGTERM)
        return self.child.wait(TIMEOUT_FACTOR * within_s)

    @property
    def _log(self) -> Path:
        return self.folder / f"log.{self._start_count}"

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """Return the log events of all runs of this dispatcher, or those with this name."""
        lines = [line for log in sorted(self.folder.glob("log.*")) for line in log.read_text().splitlines()]
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [event for event in found if name in ("", event["event"])]

    def find_defects(self) -> list[str]:
        """Return internal errors, tracebacks and unexpected exits of all runs of this dispatcher."""
        found = [str(event) for event in self.events("internal-error")]
        for log in sorted(self.folder.glob("log.*")):
            text = log.read_text()
            if "Traceback" in text or "never retrieved" in text or "was never awaited" in text:
                found.append(text[-4000:])
        if self.process is not None and self.process.poll() is not None and not self.is_stop_expected:
            found.append(f"{self.folder.name} ended by itself with {self.process.returncode}")
        return found

    def _started(self) -> dict[str, Any] | None:
        assert self.child.poll() is None, self._log.read_text()
        lines = [line for line in self._log.read_text().splitlines() if '"event": "started"' in line]
        return dict(json.loads(lines[-1])) if lines else None


@dataclass
class Producer:
    """Producer that follows the queue contract without using the Python client of the dispatcher."""

    client: redis.Redis
    names: QueueNames = NAMES
    submitted: list[str] = field(default_factory=list)
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Collected results by id. More than one result for an id is a defect of the dispatcher."""

    def submit(
        self, count: int, payload: bytes = b'{"prompt":"hi"}', *, prefix: str = "r", **options: Any
    ) -> list[str]:
        """Submit requests and return their ids.

        `options` are `deadline_s` and arguments of `encode_member`.
        """
        first = len(self.submitted)
        ids = [f"{prefix}-{number}" for number in range(first, first + count)]
        deadline = int(time.time() + options.pop("deadline_s", 3600))
        self.add_members({encode_member(id_, payload, deadline, **options): deadline for id_ in ids})
        self.submitted += ids
        return ids

    def add_members(self, members: Mapping[bytes, float]) -> None:
        """Add members with their scores to the queue, without waking any dispatcher."""
        items = list(members.items())
        for start in range(0, len(items), 2000):
            self.client.zadd(self.names.queue, dict(items[start : start + 2000]))

    def collect(self) -> dict[str, list[dict[str, Any]]]:
        """Pop all results from the default result list. Return all results collected so far by id."""
        while found := self.client.rpop(self.names.result_list, 1000):
            assert isinstance(found, list)
            for raw in found:
                result = json.loads(raw)
                self.results.setdefault(result["id"], []).append(result)
        return self.results

    def wait_for_all(
        self, ids: Iterable[str] | None = None, timeout_s: float = 60.0
    ) -> dict[str, list[dict[str, Any]]]:
        """Wait until each of these requests (default: all submitted ones) has a result."""
        missing_ids = set(self.submitted if ids is None else ids)
        wait_until_sync(
            lambda: missing_ids <= self.collect().keys(),
            timeout_s,
            what=f"{len(missing_ids)} results",
            every_s=0.05,
        )
        return self.results

    def count_results(self) -> Counter[str]:
        """Count the collected results by error code or status code."""
        return Counter(
            str(result.get("error_code") or result.get("status_code"))
            for results in self.results.values()
            for result in results
        )

    def find_duplicates(self) -> list[str]:
        """Return the ids with more than one result."""
        return [id_ for id_, results in self.results.items() if len(results) > 1]

    def count_requests(self) -> dict[str, int]:
        """Count the requests in each place of the queue in one transaction."""
        names = self.names
        with self.client.pipeline() as pipe:
            for key in names.claimable_keys:
                pipe.zcard(key)
            pipe.zcard(f"{names.pool_prefix}:leases")
            for suffix in ("delayed", "dead"):
                pipe.zcard(f"{names.queue_prefix}:{suffix}")
            *claimable, leased, delayed, dead = pipe.execute()
        return {"pending": sum(claimable), "leased": leased, "delayed": delayed, "dead": dead}

    def find_lost_requests(self) -> set[str]:
        """Return the ids without a result. The queue must be empty, so these requests were lost."""
        assert sum(self.count_requests().values()) == 0, f"not finished: {self.count_requests()}"
        return set(self.submitted) - self.collect().keys()


class Stage:
    """Starts the processes of one test, and stops them in reverse order."""

    def __init__(self, folder: Path, server: Server, stack: ExitStack, *, is_forked: bool = True) -> None:
        self.server = server
        self.dispatchers: list[Dispatcher] = []
        self._folder = folder
        self._stack = stack
        self._world_count = 0
        self._is_forked = is_forked
        self.producer = Producer(stack.enter_context(server.client(socket_timeout=30)))

    def world(self, **config: Any) -> World:
        """Start a world with these fields of its `Config`. Defaults: 32 slots, 0.5 s for a request."""
        self._world_count += 1
        options = {"slots": 32, "seconds": 0.5, "pool": POOL} | config
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        log = self._stack.enter_context((self._folder / f"world-{self._world_count}.log").open("wb"))
        process_context: AbstractContextManager[Process] = (
            forked_process if self._is_forked else fresh_process
        )("dispatcher.lab.standin", *flags, stdout=subprocess.PIPE, stderr=log)
        process = self._stack.enter_context(process_context)
        assert process.stdout is not None
        first_line = process.stdout.readline()
        assert first_line, (self._folder / f"world-{self._world_count}.log").read_text()
        urls = json.loads(first_line)
        http = self._stack.enter_context(make_http_client(urls["control"]))
        return World(urls["gateway"], urls["metrics"], http, urls["servers"])

    def settings(
        self, world: World, *, max_sys: int | None = 32, **sections: Mapping[str, Any] | Sequence[Any]
    ) -> dict[str, Any]:
        """Return a configuration for this world and Redis, with a reading per second and short leases."""
        defaults = {
            "pool": {"name": POOL},
            "gateway": {"url": world.gateway},
            "queue": {"url": self.server.url, "lease_s": 5},
            "signals": {"source": "epp", "interval_s": 1.0, "epp": {"urls": [world.metrics]}},
            "budget": {"max_sys": max_sys},
            "admin": {"host": "127.0.0.1", "port": 0},
            "log": {"format": "json"},
        }
        return merge_settings(defaults, sections)

    def dispatcher(
        self,
        settings: Mapping[str, Any],
        *options: str,
        command_prefix: tuple[str, ...] = (),
        cpu_limit: Throttle | None = None,
        source: Path | None = None,
        **environ: str,
    ) -> Dispatcher:
        """Start a dispatcher that runs until the test ends or stops it.

        `environ` is added to its environment. `source` is the folder with the package of another version.
        """
        folder = self._folder / f"dispatcher-{len(self.dispatchers) + 1}"
        folder.mkdir()
        dispatcher = Dispatcher(
            folder,
            dict(settings),
            options,
            command_prefix,
            self._stack,
            cpu_limit,
            self._is_forked,
            environ,
            source,
        )
        self.dispatchers.append(dispatcher)
        return dispatcher.start()

    def find_defects(self) -> list[str]:
        return [defect for each in self.dispatchers for defect in each.find_defects()]


def build_source_environment(source: Path) -> dict[str, str]:
    """Return the variables with which an interpreter imports the package of this folder."""
    # Without the safe path, the package of the working directory would come first.
    return {"PYTHONPATH": str(source), "PYTHONSAFEPATH": "1"}


def merge_settings(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with changes merged into them, section by section."""
    result = dict(settings)
    for name, value in changes.items():
        previous = result.get(name)
        result[name] = merge_settings(previous, value) if isinstance(value, Mapping) and previous else value
    return result


def assert_stays_true(condition: Callable[[], bool], seconds: float, *, what: str = "") -> None:
    """Assert repeatedly, for this time, that the condition is true."""
    end_at = time.monotonic() + seconds
    while time.monotonic() < end_at:
        assert condition(), what
        time.sleep(0.02)


def _make_clean_environment() -> dict[str, str]:
    """Return the environment of this process without Kubernetes variables and dispatcher settings."""
    removed = ("KUBE", "BATCH_DISPATCHER__")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(removed)}
    return kept | {"KUBECONFIG": "/nonexistent"}
