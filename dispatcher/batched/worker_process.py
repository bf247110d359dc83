"""Worker process of a batched class: the object is created once in it, and runs one batch after the other.

    this process                           the worker process
    what it needs to import the program ─▶ imports it
    the class and its arguments         ─▶ creates the object, with its model
                                        ◀─ ready, or the exception
    a batch: each item pickled          ─▶
                                        ◀─ started
                                           preprocess each, transform all, postprocess each
                                        ◀─ an outcome for each, pickled

Each item and each outcome is a pickle of its own, so that one that cannot be pickled affects no other. The
process is a new interpreter (multiprocessing calls this spawn) on a pipe, and ends when the pipe closes,
whatever it is doing. The Process class of multiprocessing would leave a second process behind: its resource
tracker.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import Pipe, spawn
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any

from dispatcher.batched.calls import (
    BatchRun,
    Raised,
    collect_results,
    describe_error,
    is_exception,
    wrap_error,
)
from dispatcher.core.errors import BatchError, WorkerCrashedError

END_TIMEOUT_S = 5.0
"""Time that a process may take to end once its pipe is closed. After that it is terminated, and later
killed."""
STARTER = """
from multiprocessing import process, spawn
from multiprocessing.connection import Connection
from pickle import loads
pipe = Connection({})
me = process.current_process()
me._inheriting = True
spawn.prepare(loads(pipe.recv_bytes()))
del me._inheriting
from dispatcher.batched.worker_process import serve_batches
serve_batches(pipe)
"""
"""Program of the worker process. `prepare` sets the path, so it runs before any import of this package, and
imports the program. During that import the program must not start a worker, which would import the program
again; multiprocessing recognises this by the attribute `_inheriting`."""
BATCH_STARTED = b"begun"
TRACEBACK_HEADING = "In the worker process:\n"

_SIGNALS = {each.value: each.name for each in signal.Signals}
_load = pickle.loads
"""Unpickles what the other end wrote: our own child, or the program that started us. No other process has the
pipe."""


@dataclass(frozen=True, slots=True)
class WorkerTarget:
    """Location of the class, and how to create and run the object in the worker."""

    module: str
    qualname: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    isolate: bool

    def resolve_class(self) -> type[Any]:
        """Return the class itself, also if its name refers to the `BatchedClass` made of it."""
        target = attrgetter(self.qualname)(import_module(self.module))
        return target if isinstance(target, type) else target.__wrapped__


class ProcessWorker:
    """This process's end of a worker process. Items arrive pickled; outcomes are returned unpickled."""

    def __init__(self, target: bytes, name: str) -> None:
        self._target = target
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Any, Any] | None = None

    def start(self) -> None:
        """Return when the object is created. Raises the exception of its creation, or WorkerCrashedError."""
        self._ensure_started()

    def run_batch(self, items: list[bytes]) -> list[Any]:
        """Return an outcome for each item. If a worker dies before it started the batch, another one runs
        it."""
        batch, can_retry = pickle.dumps(items), True
        while True:
            try:
                pipe = self._ensure_started()
            except Exception as error:
                return [wrap_error(self._name, error)] * len(items)
            is_started = False
            try:
                pipe.send_bytes(batch)
                is_started = pipe.recv_bytes() == BATCH_STARTED
                return [unpack_outcome(each) for each in _load(pipe.recv_bytes())]
            except (EOFError, OSError):
                crashed = self._make_crash_error(f"while it held {len(items)} items")
            # A started batch may have had effects, so it is not run again.
            if is_started or not can_retry:
                return [Raised(crashed)] * len(items)
            can_retry = False  # it was dying already, which could not be known

    def end(self) -> None:
        """Close the pipe, and wait until the process has ended."""
        self._close_process()

    def kill(self) -> None:
        """Kill the process, even during `run_batch`. Called from another thread."""
        process = self._process
        if process is not None:
            process.kill()

    def forget_after_fork(self) -> None:
        """Forget the worker after a fork: it belongs to the parent process, which alone holds its pipe."""
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.returncode = 0  # not a child of this process, so it must not be waited for
        self._process = self._pipe = None

    def _ensure_started(self) -> Connection[Any, Any]:
        """Return the pipe to a worker whose object is created, and start one if needed."""
        if self._pipe is not None and self._process is not None:
            if self._process.poll() is None:
                return self._pipe
            self._close_process()  # it ended between two batches
        preparation = spawn.get_preparation_data(self._name)
        preparation.pop("authkey", None)  # only for children of multiprocessing, and it refuses to be pickled
        own_end, worker_end = Pipe()
        with worker_end:
            code = STARTER.format(worker_end.fileno())
            command = [spawn.get_executable(), "-c", code]
            self._process = subprocess.Popen(  # noqa: S603 -- starts this interpreter
                command, stdin=subprocess.DEVNULL, pass_fds=[worker_end.fileno()]
            )
        self._pipe = own_end
        try:
            own_end.send_bytes(pickle.dumps(preparation))
            own_end.send_bytes(self._target)
            ready = _load(own_end.recv_bytes())
        except (EOFError, OSError):
            raise self._make_crash_error(
                "before it was ready: what it wrote on standard error tells why"
            ) from None
        if ready is not None:
            self._close_process()
            raise unpack_outcome(ready).error
        return own_end

    def _make_crash_error(self, when: str) -> WorkerCrashedError:
        code = self._close_process()
        how = _SIGNALS.get(-code, f"signal {-code}") if code < 0 else f"exit code {code}"
        return WorkerCrashedError(f"the worker process of {self._name} ended by {how} {when}")

    def _close_process(self) -> int:
        """Close the pipe, wait until the process has ended, and return its exit code."""
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if pipe is not None:
            pipe.close()
        if process is None:
            return 0
        # A closed pipe ends the process. One that does not notice is terminated, then killed.
        for end in (process.terminate, process.kill):
            try:
                return process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                end()
        return process.wait()


def pack_outcome(outcome: Any) -> tuple[bool, bytes, str]:
    """Return whether the outcome is an answer, its pickle, and the traceback of an error. An outcome that
    cannot be pickled becomes an error."""
    if type(outcome) is Raised:
        return _pack_error(outcome.error)
    try:
        return True, pickle.dumps(outcome, pickle.HIGHEST_PROTOCOL), ""
    except BaseException as error:  # pickling runs code of the result, which may even call `sys.exit`
        type_error = TypeError(f"the result cannot be pickled: {describe_error(error)}")
        type_error.__cause__ = error
        return _pack_error(type_error)


def _pack_error(error: Exception) -> tuple[bool, bytes, str]:
    try:
        trace = "".join(traceback.format_exception(error))
    except BaseException:  # notes and causes may be of any type
        trace = describe_error(error)
    try:
        return False, pickle.dumps(error, pickle.HIGHEST_PROTOCOL), trace
    except BaseException:
        return False, b"", trace


def unpack_outcome(message: tuple[bool, bytes, str]) -> Any:
    """Return the outcome that was packed. An error has the traceback as a note."""
    is_answer, data, trace = message
    try:
        value = _load(data) if data else None
    except BaseException as error:  # unpickling runs code of the class
        if is_answer:
            return wrap_error("unpickling the result", error)
        value = None
    if is_answer:
        return value
    # The class of an exception may be missing here, or take other arguments than it stores.
    worker_error = value if is_exception(value) else BatchError(trace.strip().rpartition("\n")[2])
    with suppress(BaseException):  # `__notes__` may be something else than a list
        worker_error.add_note(TRACEBACK_HEADING + trace)
    return wrap_error("the worker", worker_error)


def serve_batches(pipe: Connection[Any, Any]) -> None:
    """Run the worker process until its pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the process at the other end
    try:
        target: WorkerTarget = _load(pipe.recv_bytes())
        made = target.resolve_class()(*target.args, **target.kwargs)
        run = _make_batch_function(made, target.isolate)
    except BaseException as error:
        pipe.send_bytes(pickle.dumps(pack_outcome(wrap_error("making the worker", error))))
        return
    batches: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    busy = threading.Event()

    def read_batches() -> None:
        """Read batches from the pipe. If it closes during a batch, end the process at once, because no caller
        waits."""
        try:
            while True:
                batches.put(pipe.recv_bytes())
        except (EOFError, OSError):
            batches.put(None)
            if busy.is_set():
                os._exit(1)

    threading.Thread(target=read_batches, daemon=True).start()
    pipe.send_bytes(pickle.dumps(None))
    try:
        while (batch := batches.get()) is not None:
            busy.set()
            pipe.send_bytes(BATCH_STARTED)
            pipe.send_bytes(pickle.dumps([pack_outcome(each) for each in run(_load(batch))]))
            busy.clear()
    finally:
        # Threads of the class may keep the process alive after a SystemExit. The shutdown ends the pipe for
        # the other end all the same.
        busy.clear()
        with socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
            end.shutdown(socket.SHUT_RDWR)
    sys.stdout.flush()


def _make_batch_function(made: Any, isolate: bool) -> Callable[[list[bytes]], list[Any]]:
    """Return the function that runs a batch through the object. Missing steps pass their input on."""
    name = type(made).__qualname__
    before = [_load, *([made.preprocess] if hasattr(made, "preprocess") else ())]
    after = [made.postprocess] if hasattr(made, "postprocess") else []

    def run_batch(items: list[bytes]) -> list[Any]:
        outcomes = [_run_steps(name, before, each) for each in items]
        places = [n for n, each in enumerate(outcomes) if type(each) is not Raised]
        attempt = BatchRun[Any, Any]([outcomes[place] for place in places], isolate=isolate)
        while part := attempt.next_part():
            count = len(part)  # the class may change the list
            try:
                attempt.record_part(collect_results(f"{name}.transform", made.transform(part), count))
            except Exception as error:
                attempt.record_part(wrap_error(name, error))
        for place, outcome in zip(places, attempt.outcomes, strict=True):
            outcomes[place] = outcome if type(outcome) is Raised else _run_steps(name, after, outcome)
        return outcomes

    return run_batch


def _run_steps(name: str, steps: Sequence[Callable[[Any], Any]], value: Any) -> Any:
    """Return the result of one item after these steps."""
    try:
        for step in steps:
            value = step(value)
    except Exception as error:
        return wrap_error(name, error)
    return wrap_error(name, value) if is_exception(value) else value
