"""This program's end of a worker process: it starts the process, sends batches, and replaces one that died.

The process is a new interpreter (multiprocessing calls this spawn) on a pipe, and ends when the pipe closes,
whatever it is doing. The Process class of multiprocessing would leave a second process behind: its resource
tracker.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from multiprocessing import Pipe, spawn
from multiprocessing.connection import Connection
from typing import Any

from dispatcher.batched.calls import Raised, wrap_error
from dispatcher.batched.messages import load_message, unpack_outcome
from dispatcher.batched.stages import PIPELINE_DEPTH, Stage
from dispatcher.batched.worker_index import INDEX_VARIABLE
from dispatcher.common.errors import WorkerCrashedError

END_TIMEOUT_S = 5.0
"""Time that a process may take to end once its pipe is closed. After that it is terminated, and later
killed."""
MAX_SENDS = 3
"""Number of processes that a batch is sent to before its callers get the error of the last one. Each process
may die because of an earlier batch, or while it is idle, before it begins this one."""
STARTER = """
from multiprocessing import spawn
from multiprocessing.connection import Connection
from pickle import loads
pipe = Connection({})
is_importing_program = True
spawn.prepare(loads(pipe.recv_bytes()))
is_importing_program = False
from dispatcher.batched.worker_program import serve_batches
serve_batches(pipe)
"""
"""Program of the worker process. `prepare` sets the path, so it runs before any import of this package, and
imports the program. During that import, `__main__` is still this module, and `_check_program_is_imported`
finds `is_importing_program` in it."""

_SIGNALS = {each.value: each.name for each in signal.Signals}


class WorkerConnection:
    """One worker process and its pipe, shared by the threads that carry its batches.

    There is no thread that reads the pipe: of the threads that wait for a message, one reads, and passes
    messages of other batches on.
    """

    def __init__(self, process: subprocess.Popen[bytes], pipe: Connection[Any, Any]) -> None:
        self.process = process
        self._pipe = pipe
        self._changed = threading.Condition()
        self._messages: dict[int, deque[tuple[Stage, Any]]] = {}
        """Messages that have arrived and were not received yet, of each batch that the process has."""
        self._numbers = count()
        self._is_reading = False
        self._is_broken = False
        """True if the pipe has ended: no further message will come."""
        self._send_lock = threading.Lock()
        self._close_lock = threading.Lock()
        self._exit_code: int | None = None

    @property
    def is_alive(self) -> bool:
        """Return whether the process can be sent a batch."""
        return not self._is_broken and self.process.poll() is None

    def greet(self, preparation: bytes, target: bytes) -> Any:
        """Send what the process needs, and return its first message. Raises EOFError or OSError."""
        self._pipe.send_bytes(preparation)
        self._pipe.send_bytes(target)
        return load_message(self._pipe.recv_bytes())

    def add_batch(self) -> int:
        """Return the number of a new batch."""
        with self._changed:
            number = next(self._numbers)
            self._messages[number] = deque()
            return number

    def remove_batch(self, number: int) -> None:
        """Drop the messages of a batch."""
        with self._changed:
            del self._messages[number]
            self._changed.notify_all()

    def send(self, message: bytes) -> None:
        """Send a message. If the pipe has ended, `receive` raises the error, after the messages before it."""
        with self._send_lock, suppress(OSError):
            self._pipe.send_bytes(message)

    def receive(self, number: int) -> tuple[Stage, Any]:
        """Return the next message of a batch. Raises EOFError if the process died before it sent one."""
        while True:
            with self._changed:
                messages = self._messages[number]
                while self._is_reading and not messages:
                    self._changed.wait()
                if messages:
                    return messages.popleft()
                if self._is_broken:
                    raise EOFError
                self._is_reading = True
            self._read_message()

    def _read_message(self) -> None:
        try:
            message = load_message(self._pipe.recv_bytes())
        except (EOFError, OSError):
            message = None
        with self._changed:
            self._is_reading = False
            if message is None:
                self._is_broken = True
            else:
                number, stage, content = message
                self._messages[number].append((Stage(stage), content))
            self._changed.notify_all()

    def wait_until_read(self) -> None:
        """Wait until no thread reads the pipe of a process that has died."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_broken or not self._messages)

    def close(self) -> int:
        """Close the pipe, which no thread reads any more, wait until the process has ended, and return its
        exit code."""
        with self._close_lock:
            if self._exit_code is None:
                self._is_broken = True
                with self._send_lock:
                    self._pipe.close()
                self._exit_code = self._wait_for_exit()
            return self._exit_code

    def _wait_for_exit(self) -> int:
        # A closed pipe ends the process. One that does not notice is terminated, then killed.
        for end in (self.process.terminate, self.process.kill):
            try:
                return self.process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                end()
        return self.process.wait()

    def forget_after_fork(self) -> None:
        """Close this process's copy of the pipe. The worker belongs to the parent process."""
        self._pipe.close()
        self.process.returncode = 0  # not a child of this process, so it must not be waited for


class ProcessWorker:
    """A worker process and its successors. Items arrive pickled; outcomes are returned unpickled."""

    def __init__(self, target: bytes, name: str, index: int, *, is_pipelined: bool) -> None:
        self.depth = PIPELINE_DEPTH if is_pipelined else 1
        self._target = target
        self._name = name
        self._index = index
        self._connection: WorkerConnection | None = None
        self._is_killed = False
        self._lock = threading.Lock()
        """Held while a process is started, so that the threads of this worker start one together."""

    def start(self) -> None:
        """Return when the object is created. Raises the exception of its creation, or WorkerCrashedError."""
        with self._lock:
            self._ensure_started()

    def run_batch(self, items: list[bytes], enter_stage: Callable[[Stage], None]) -> list[Any]:
        """Return an outcome for each item. If a worker dies before the batch has begun, another one runs
        it."""
        send_count = 0
        while True:
            send_count += 1
            try:
                with self._lock:
                    connection = self._ensure_started()
                    number = connection.add_batch()
            except Exception as error:
                return [wrap_error(self._name, error)] * len(items)
            is_begun = False
            try:
                connection.send(pickle.dumps((number, items)))
                if self.depth > 1:
                    enter_stage(Stage.ACCEPTED)
                while True:
                    stage, content = connection.receive(number)
                    if stage is Stage.DONE:
                        return [unpack_outcome(each) for each in content]
                    is_begun = True
                    if self.depth > 1:
                        enter_stage(stage)
            except EOFError:
                crash = self._make_crash_error(connection, f"while it held {len(items)} items")
                # A batch that has begun may have had effects, so it is not run again.
                if is_begun or self._is_killed or send_count == MAX_SENDS:
                    return [Raised(crash)] * len(items)
            finally:
                connection.remove_batch(number)

    def end(self) -> None:
        """Close the pipe, and wait until the process has ended."""
        if self._connection is not None:
            self._connection.close()

    def kill(self) -> None:
        """Kill the process, even during `run_batch`. Called from another thread."""
        self._is_killed = True
        connection = self._connection
        if connection is not None:
            connection.process.kill()

    def forget_after_fork(self) -> None:
        """Forget the worker after a fork: it belongs to the parent process, which alone holds its pipe."""
        if self._connection is not None:
            self._connection.forget_after_fork()
        self._connection = None

    def _ensure_started(self) -> WorkerConnection:
        """Return the connection to a worker whose object is created, and start one if needed."""
        if self._connection is not None:
            if self._connection.is_alive:
                return self._connection
            # Two processes at once might need more memory than there is.
            self._connection.wait_until_read()
            self._connection.close()
        _check_program_is_imported()
        preparation = spawn.get_preparation_data(self._name)
        preparation.pop("authkey", None)  # only for children of multiprocessing, and it refuses to be pickled
        own_end, worker_end = Pipe()
        with worker_end:
            code = STARTER.format(worker_end.fileno())
            command = [spawn.get_executable(), "-c", code]
            process = subprocess.Popen(  # noqa: S603 -- starts this interpreter
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[worker_end.fileno()],
                env=os.environ | {INDEX_VARIABLE: str(self._index)},
            )
        connection = self._connection = WorkerConnection(process, own_end)
        try:
            created = connection.greet(pickle.dumps(preparation), self._target)
        except (EOFError, OSError):
            raise self._make_crash_error(
                connection, "before it was ready: what it wrote on standard error tells why"
            ) from None
        if created is not None:
            connection.close()
            raise unpack_outcome(created).error
        return connection

    def _make_crash_error(self, connection: WorkerConnection, when: str) -> WorkerCrashedError:
        code = connection.close()
        how = _SIGNALS.get(-code, f"signal {-code}") if code < 0 else f"exit code {code}"
        return WorkerCrashedError(f"the worker process of {self._name} ended by {how} {when}")


def _check_program_is_imported() -> None:
    """Raise RuntimeError in a worker process that imports the program.

    A program that starts a worker when it is imported would start one worker in the other, without end.
    """
    if getattr(sys.modules["__main__"], "is_importing_program", False):
        raise RuntimeError(
            "a worker process was started while the program was imported in another worker process: put what "
            "the program does under `if __name__ == '__main__':`"
        )
