"""Processes of our own programs that need not import anything: forked from one that has.

An interpreter that has imported the dispatcher has spent more than a second of CPU, and the scenarios start
hundreds. So each process of the tests that starts some keeps one warm interpreter (`python -m tests.warm`),
which has imported everything and does nothing; each program is a fork of it, with arguments, environment and
files of its own. From there on it is a process like any other: a pid, signals, an exit code. How the programs
start from nothing is shown by the tests that start them so (tests/cli, tests/docs/test_examples.py).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

from tests.paths import ROOT
from tests.support import die_with_parent, running, stop

PROGRAMS = ("dispatcher", "dispatcher.lab.standin", "tests.chaos.worker")
LATE = (
    "anyio._backends._asyncio",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "rich.markdown",
    "typer._adapters",
    "typer._click.decorators",
    "uvloop",
    "watchfiles",
)
"""What functions import, ours and those of libraries; not matplotlib, which takes as long as half of all else
and is seldom wanted."""
_REQUEST_MOST = 1 << 18
_FILES = 3
"""That come with each request: standard output, standard error, and where the exit code is told."""


class Warm:
    """What `subprocess.Popen` is, of a program that was forked."""

    def __init__(self, pid: int, ending: int, stdout: IO[bytes] | None) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._ending = ending

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        if self._look(timeout) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._ending], [], [], timeout)[0]:
            told = os.read(self._ending, 16)
            os.close(self._ending)
            assert told, "the warm interpreter has died"
            self.returncode = int(told)
        return self.returncode


@contextlib.contextmanager
def warm(
    program: str,
    *arguments: str | Path,
    stdout: IO[bytes] | int = subprocess.DEVNULL,
    stderr: IO[bytes] | int = subprocess.DEVNULL,
    env: Mapping[str, str] | None = None,
    stop_s: float = 5.0,
) -> Iterator[Warm]:
    """`python -m program` for the length of the block: then SIGTERM, and SIGKILL after `stop_s`."""
    child = _started(program, [str(each) for each in arguments], stdout, stderr, env)
    try:
        yield child
    finally:
        stop(child, stop_s)
        if child.stdout is not None:
            child.stdout.close()


def cold(
    program: str, *arguments: str | Path, before: Sequence[str] = (), **files: Any
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """The same by an interpreter of its own: where its start, its memory or its CPU is what is looked at."""
    command = (*before, sys.executable, "-m", program, *arguments)
    return running(*command, preexec_fn=die_with_parent, **files)


def warm_run(
    *arguments: str | Path, env: Mapping[str, str] | None = None, timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """`batch-dispatcher` with these arguments, to its end."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with warm("dispatcher", *arguments, stdout=out, stderr=err, env=env) as child:
            code = child.wait(timeout_s)
        told = []
        for file in (out, err):
            file.seek(0)
            told.append(file.read().decode())
    return subprocess.CompletedProcess(list(map(str, arguments)), code, *told)


def _started(
    program: str,
    arguments: list[str],
    stdout: IO[bytes] | int,
    stderr: IO[bytes] | int,
    env: Mapping[str, str] | None,
) -> Warm:
    request = {
        "program": program,
        "arguments": arguments,
        "environ": dict(os.environ if env is None else env),
        "folder": str(Path.cwd()),
    }
    interpreter = _interpreter()
    with contextlib.ExitStack() as stack:

        def opened(asked: IO[bytes] | int) -> int:
            if not isinstance(asked, int):
                return asked.fileno()
            assert asked == subprocess.DEVNULL, "a file, or nowhere"
            return stack.enter_context(Path(os.devnull).open("wb")).fileno()

        pipe = None
        if stdout == subprocess.PIPE:
            reading, writing = os.pipe()
            pipe = os.fdopen(reading, "rb")
            stdout = stack.enter_context(os.fdopen(writing, "wb"))
        ending, told = os.pipe()
        stack.callback(os.close, told)
        socket.send_fds(interpreter, [json.dumps(request).encode()], [opened(stdout), opened(stderr), told])
        pid = int(interpreter.recv(64))
    return Warm(pid, ending, pipe)


@cache
def _interpreter() -> socket.socket:
    """Of this process. It ends with it, for then nobody holds the other end of its socket; not with the
    thread that happened to ask first, as PR_SET_PDEATHSIG would have it."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        subprocess.Popen(
            [sys.executable, "-m", "tests.warm", str(its.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=ROOT,  # a test may have gone elsewhere
            pass_fds=[its.fileno()],
        )
    return ours


# The warm interpreter.


class _Interpreter:
    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._programs = programs()
        self._children: dict[int, int] = {}
        """By pid, where its exit code is told."""
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake)

    def serve(self) -> Callable[[], Any]:
        """Fork for each request. Returns in the child only, with what it shall run."""
        asked = self._requests.fileno()
        while True:
            ready, _, _ = select.select([asked, self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, 64)
                self._reap()
            if asked in ready:
                text, files, _, _ = socket.recv_fds(self._requests, _REQUEST_MOST, _FILES)
                if not text:
                    os._exit(0)  # who asked has ended
                stdout, stderr, told = files
                pid = os.fork()
                if pid == 0:
                    return self._become(json.loads(text), stdout, stderr, told)
                self._children[pid] = told
                os.close(stdout)
                os.close(stderr)
                self._requests.send(str(pid).encode())

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                told = self._children.pop(pid)
                with contextlib.suppress(BrokenPipeError):
                    os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(told)

    def _become(self, request: Mapping[str, Any], stdout: int, stderr: int, told: int) -> Callable[[], Any]:
        die_with_parent()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._requests.close()
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        for file in (stdout, stderr, told, self._woken, self._wake, *self._children.values()):
            os.close(file)
        os.environ.clear()
        os.environ.update(request["environ"])
        time.tzset()
        os.chdir(request["folder"])
        program = self._programs[request["program"]]
        sys.argv = [f"-m {request['program']}", *request["arguments"]]
        return program


def programs() -> Mapping[str, Callable[[], Any]]:
    """By name, with all imported that each verb would import when it is asked for."""
    import dispatcher

    for module in pkgutil.walk_packages(dispatcher.__path__, "dispatcher."):
        if not module.name.endswith(".__main__"):
            importlib.import_module(module.name)
    for name in LATE:
        importlib.import_module(name)

    from dispatcher import cli
    from dispatcher.lab.standin import live
    from dispatcher.signals.kubernetes import api
    from tests.chaos import worker

    api.import_client()
    return dict(zip(PROGRAMS, (cli.main, live.main, worker.run), strict=True))


def main(arguments: Sequence[str]) -> None:
    interpreter = _Interpreter(socket.socket(fileno=int(arguments[0])))
    gc.collect()
    gc.freeze()
    program = interpreter.serve()
    imported = gc.get_freeze_count()
    try:
        program()
    except SystemExit as ended:
        _leave(ended.code, imported)
    _leave(0, imported)


def _leave(code: object, imported: int) -> NoReturn:
    """End as an interpreter does, but leave imports whole: to take them apart costs more than a verb."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if gc.get_freeze_count() > imported:  # a dispatcher has settled its memory
        gc.unfreeze()
    gc.collect()  # what was left open, or never awaited, says so
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    main(sys.argv[1:])
