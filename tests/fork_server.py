"""Fork server: starts our programs as forks of an interpreter that has imported everything already.

Importing the dispatcher costs more than a second of CPU, and the scenarios start hundreds of processes. So
each test process that needs it keeps one fork server (`python -m tests.fork_server`), which imports
everything and then waits. Each program is a fork of it with its own arguments, environment and files. The
fork is an ordinary process with a pid, signals and an exit code. Other tests start the programs in a fresh
interpreter (tests/cli, tests/docs/test_examples.py).
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
from contextlib import AbstractContextManager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

from tests.paths import ROOT
from tests.support import die_with_parent, running_process, stop_process

PROGRAMS = ("dispatcher", "dispatcher.lab.standin", "tests.chaos.worker")
LAZY_IMPORTS = (
    "anyio._backends._asyncio",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "rich.markdown",
    "uvloop",
    "watchfiles",
)
"""Modules that functions of ours or of libraries import when they are called.

matplotlib is missing because it takes half as long as everything else together and is rarely needed.
"""
TYPER_MODULES = ("typer._adapters", "typer._click.decorators")
"""The same of typer. Not every version that pyproject.toml allows has them."""
_MAX_REQUEST_BYTES = 1 << 18
_FDS_PER_REQUEST = 3
"""File descriptors sent with each request: standard output, standard error, and a pipe for the exit code."""


class ForkedProcess:
    """Program started by the fork server, with the interface of `subprocess.Popen`."""

    def __init__(self, pid: int, exit_code_fd: int, stdout: IO[bytes] | None) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._exit_code_fd = exit_code_fd

    def poll(self) -> int | None:
        return self._poll_exit_code(0.0)

    def wait(self, timeout: float | None = None) -> int:
        if self._poll_exit_code(timeout) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _poll_exit_code(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._exit_code_fd], [], [], timeout)[0]:
            text = os.read(self._exit_code_fd, 16)
            os.close(self._exit_code_fd)
            assert text, "the fork server has died"
            self.returncode = int(text)
        return self.returncode


@contextlib.contextmanager
def forked_process(
    program: str,
    *arguments: str | Path,
    stdout: IO[bytes] | int = subprocess.DEVNULL,
    stderr: IO[bytes] | int = subprocess.DEVNULL,
    env: Mapping[str, str] | None = None,
    stop_s: float = 5.0,
) -> Iterator[ForkedProcess]:
    """Run `python -m program` for the duration of the block.

    Then send SIGTERM, and SIGKILL after `stop_s`.
    """
    child = _fork_program(program, [str(each) for each in arguments], stdout, stderr, env)
    try:
        yield child
    finally:
        stop_process(child, stop_s)
        if child.stdout is not None:
            child.stdout.close()


def fresh_process(
    program: str, *arguments: str | Path, command_prefix: Sequence[str] = (), **files: Any
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Run a program like `forked_process`, but in a new interpreter.

    For tests that measure its start, its memory or its CPU time.
    """
    command = (*command_prefix, sys.executable, "-m", program, *arguments)
    return running_process(*command, preexec_fn=die_with_parent, **files)


def run_cli(
    *arguments: str | Path, env: Mapping[str, str] | None = None, timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run `batch-dispatcher` with these arguments until it exits."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with forked_process("dispatcher", *arguments, stdout=out, stderr=err, env=env) as child:
            code = child.wait(timeout_s)
        output = []
        for file in (out, err):
            file.seek(0)
            output.append(file.read().decode())
    return subprocess.CompletedProcess(list(map(str, arguments)), code, *output)


def _fork_program(
    program: str,
    arguments: list[str],
    stdout: IO[bytes] | int,
    stderr: IO[bytes] | int,
    env: Mapping[str, str] | None,
) -> ForkedProcess:
    request = {
        "program": program,
        "arguments": arguments,
        "environ": dict(os.environ if env is None else env),
        "folder": str(Path.cwd()),
    }
    server = _connect_server()
    with contextlib.ExitStack() as stack:

        def open_fd(file: IO[bytes] | int) -> int:
            if not isinstance(file, int):
                return file.fileno()
            assert file == subprocess.DEVNULL, "only a file or DEVNULL is supported"
            return stack.enter_context(Path(os.devnull).open("wb")).fileno()

        pipe = None
        if stdout == subprocess.PIPE:
            read_fd, write_fd = os.pipe()
            pipe = os.fdopen(read_fd, "rb")
            stdout = stack.enter_context(os.fdopen(write_fd, "wb"))
        exit_code_fd, exit_code_write_fd = os.pipe()
        stack.callback(os.close, exit_code_write_fd)
        socket.send_fds(
            server, [json.dumps(request).encode()], [open_fd(stdout), open_fd(stderr), exit_code_write_fd]
        )
        pid = int(server.recv(64))
    return ForkedProcess(pid, exit_code_fd, pipe)


@cache
def _connect_server() -> socket.socket:
    """Start the fork server of this process and return the socket to it.

    The server ends when this process does, because the other end of its socket is closed then.
    PR_SET_PDEATHSIG would end it together with the thread that called this function first.
    """
    client_socket, server_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with server_socket:
        subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", str(server_socket.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=ROOT,  # a test may have changed the working directory
            pass_fds=[server_socket.fileno()],
        )
    return client_socket


# The fork server.


class _ForkServer:
    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._programs = import_programs()
        self._children: dict[int, int] = {}
        """Pipe for the exit code, by pid of the child."""
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write)

    def serve(self) -> Callable[[], Any]:
        """Fork for each request. Returns only in the child process, with the program to run."""
        request_fd = self._requests.fileno()
        while True:
            ready, _, _ = select.select([request_fd, self._wake_read], [], [])
            if self._wake_read in ready:
                os.read(self._wake_read, 64)
                self._reap()
            if request_fd in ready:
                text, files, _, _ = socket.recv_fds(self._requests, _MAX_REQUEST_BYTES, _FDS_PER_REQUEST)
                if not text:
                    os._exit(0)  # the client has ended
                stdout, stderr, exit_code_fd = files
                pid = os.fork()
                if pid == 0:
                    return self._enter_child(json.loads(text), stdout, stderr, exit_code_fd)
                self._children[pid] = exit_code_fd
                os.close(stdout)
                os.close(stderr)
                self._requests.send(str(pid).encode())

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                exit_code_fd = self._children.pop(pid)
                with contextlib.suppress(BrokenPipeError):
                    os.write(exit_code_fd, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(exit_code_fd)

    def _enter_child(
        self, request: Mapping[str, Any], stdout: int, stderr: int, exit_code_fd: int
    ) -> Callable[[], Any]:
        die_with_parent()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._requests.close()
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        for file in (
            stdout,
            stderr,
            exit_code_fd,
            self._wake_read,
            self._wake_write,
            *self._children.values(),
        ):
            os.close(file)
        os.environ.clear()
        os.environ.update(request["environ"])
        time.tzset()
        os.chdir(request["folder"])
        program = self._programs[request["program"]]
        sys.argv = [f"-m {request['program']}", *request["arguments"]]
        return program


def import_programs() -> Mapping[str, Callable[[], Any]]:
    """Import everything that any command would import, and return the programs by name."""
    import dispatcher

    for module in pkgutil.walk_packages(dispatcher.__path__, "dispatcher."):
        if not module.name.endswith(".__main__"):
            importlib.import_module(module.name)
    for name in LAZY_IMPORTS:
        importlib.import_module(name)
    for name in TYPER_MODULES:
        with suppress(ImportError):
            importlib.import_module(name)

    from dispatcher import cli
    from dispatcher.lab.standin import live
    from dispatcher.signals.kubernetes import api
    from tests.chaos import worker

    api.import_client()
    return dict(zip(PROGRAMS, (cli.main, live.main, worker.run), strict=True))


def main(arguments: Sequence[str]) -> None:
    server = _ForkServer(socket.socket(fileno=int(arguments[0])))
    gc.collect()
    gc.freeze()
    program = server.serve()
    frozen_count = gc.get_freeze_count()
    try:
        program()
    except SystemExit as exit_error:
        _exit_quickly(exit_error.code, frozen_count)
    _exit_quickly(0, frozen_count)


def _exit_quickly(code: object, frozen_count: int) -> NoReturn:
    """Exit like an interpreter does, but without destroying modules, which costs more than most commands."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if gc.get_freeze_count() > frozen_count:  # a dispatcher has frozen its own objects
        gc.unfreeze()
    gc.collect()  # emits warnings about unclosed resources and coroutines that were never awaited
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    main(sys.argv[1:])
