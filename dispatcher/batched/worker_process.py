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

from dispatcher.batched.calls import Attempt, Raised, answers, described, is_error, raised
from dispatcher.batched.errors import BatchError, WorkerCrashedError

END_S = 5.0
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
from dispatcher.batched.worker_process import serve
serve(pipe)
"""
"""Program of the worker process. `prepare` sets the path, so it runs before any import of this package, and
imports the program. During that import the program must not start a worker, which would import the program
again; multiprocessing recognises this by the attribute `_inheriting`."""
BEGUN = b"begun"
NOTE = "In the worker process:\n"

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

    def found(self) -> type[Any]:
        """Return the class itself, also if its name refers to the `BatchedClass` made of it."""
        there = attrgetter(self.qualname)(import_module(self.module))
        return there if isinstance(there, type) else there.__wrapped__


class ProcessWorker:
    """This process's end of a worker process. Items arrive pickled; outcomes are returned unpickled."""

    def __init__(self, target: bytes, name: str) -> None:
        self._target = target
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Any, Any] | None = None

    def start(self) -> None:
        """Return when the object is created. Raises the exception of its creation, or WorkerCrashedError."""
        self._started()

    def run(self, items: list[bytes]) -> list[Any]:
        """Return an outcome for each item. If a worker dies before it started the batch, another one runs
        it."""
        batch, again = pickle.dumps(items), True
        while True:
            try:
                pipe = self._started()
            except Exception as error:
                return [raised(self._name, error)] * len(items)
            begun = False
            try:
                pipe.send_bytes(batch)
                begun = pipe.recv_bytes() == BEGUN
                return [unpacked(each) for each in _load(pipe.recv_bytes())]
            except (EOFError, OSError):
                crashed = self._crashed(f"while it held {len(items)} items")
            # A started batch may have had effects, so it is not run again.
            if begun or not again:
                return [Raised(crashed)] * len(items)
            again = False  # it was dying already, which could not be known

    def end(self) -> None:
        """Close the pipe, and wait until the process has ended."""
        self._give_up()

    def kill(self) -> None:
        """Kill the process, even during `run_batch`. Called from another thread."""
        process = self._process
        if process is not None:
            process.kill()

    def forget(self) -> None:
        """Forget the worker after a fork: it belongs to the parent process, which alone holds its pipe."""
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.returncode = 0  # not a child of this process, so it must not be waited for
        self._process = self._pipe = None

    def _started(self) -> Connection[Any, Any]:
        """Return the pipe to a worker whose object is created, and start one if needed."""
        if self._pipe is not None and self._process is not None:
            if self._process.poll() is None:
                return self._pipe
            self._give_up()  # it ended between two batches
        told = spawn.get_preparation_data(self._name)
        told.pop("authkey", None)  # only for children of multiprocessing, and it refuses to be pickled
        ours, theirs = Pipe()
        with theirs:
            code = STARTER.format(theirs.fileno())
            command = [spawn.get_executable(), "-c", code]
            self._process = subprocess.Popen(  # noqa: S603 -- starts this interpreter
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        self._pipe = ours
        try:
            ours.send_bytes(pickle.dumps(told))
            ours.send_bytes(self._target)
            ready = _load(ours.recv_bytes())
        except (EOFError, OSError):
            raise self._crashed("before it was ready: what it wrote on standard error tells why") from None
        if ready is not None:
            self._give_up()
            raise unpacked(ready).error
        return ours

    def _crashed(self, when: str) -> WorkerCrashedError:
        code = self._give_up()
        how = _SIGNALS.get(-code, f"signal {-code}") if code < 0 else f"exit code {code}"
        return WorkerCrashedError(f"the worker process of {self._name} ended by {how} {when}")

    def _give_up(self) -> int:
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
                return process.wait(END_S)
            except subprocess.TimeoutExpired:
                end()
        return process.wait()


def packed(outcome: Any) -> tuple[bool, bytes, str]:
    """Return whether the outcome is an answer, its pickle, and the traceback of an error. An outcome that
    cannot be pickled becomes an error."""
    if type(outcome) is Raised:
        return _packed_error(outcome.error)
    try:
        return True, pickle.dumps(outcome, pickle.HIGHEST_PROTOCOL), ""
    except BaseException as error:  # pickling runs code of the result, which may even call `sys.exit`
        told = TypeError(f"the result cannot be pickled: {described(error)}")
        told.__cause__ = error
        return _packed_error(told)


def _packed_error(error: Exception) -> tuple[bool, bytes, str]:
    try:
        trace = "".join(traceback.format_exception(error))
    except BaseException:  # notes and causes may be of any type
        trace = described(error)
    try:
        return False, pickle.dumps(error, pickle.HIGHEST_PROTOCOL), trace
    except BaseException:
        return False, b"", trace


def unpacked(sent: tuple[bool, bytes, str]) -> Any:
    """Return the outcome that was packed. An error has the traceback as a note."""
    is_answer, data, trace = sent
    try:
        found = _load(data) if data else None
    except BaseException as error:  # unpickling runs code of the class
        if is_answer:
            return raised("unpickling the result", error)
        found = None
    if is_answer:
        return found
    # The class of an exception may be missing here, or take other arguments than it stores.
    told = found if is_error(found) else BatchError(trace.strip().rpartition("\n")[2])
    with suppress(BaseException):  # `__notes__` may be something else than a list
        told.add_note(NOTE + trace)
    return raised("the worker", told)


def serve(pipe: Connection[Any, Any]) -> None:
    """Run the worker process until its pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the process at the other end
    try:
        target: WorkerTarget = _load(pipe.recv_bytes())
        made = target.found()(*target.args, **target.kwargs)
        run = _steps(made, target.isolate)
    except BaseException as error:
        pipe.send_bytes(pickle.dumps(packed(raised("making the worker", error))))
        return
    batches: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    busy = threading.Event()

    def read() -> None:
        """Read batches from the pipe. If it closes during a batch, end the process at once, because no caller
        waits."""
        try:
            while True:
                batches.put(pipe.recv_bytes())
        except (EOFError, OSError):
            batches.put(None)
            if busy.is_set():
                os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    pipe.send_bytes(pickle.dumps(None))
    try:
        while (batch := batches.get()) is not None:
            busy.set()
            pipe.send_bytes(BEGUN)
            pipe.send_bytes(pickle.dumps([packed(each) for each in run(_load(batch))]))
            busy.clear()
    finally:
        # Threads of the class may keep the process alive after a SystemExit. The shutdown ends the pipe for
        # the other end all the same.
        busy.clear()
        with socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
            end.shutdown(socket.SHUT_RDWR)
    sys.stdout.flush()


def _steps(made: Any, isolate: bool) -> Callable[[list[bytes]], list[Any]]:
    """Return the function that runs a batch through the object. Missing steps pass their input on."""
    name = type(made).__qualname__
    before = [_load, *([made.preprocess] if hasattr(made, "preprocess") else ())]
    after = [made.postprocess] if hasattr(made, "postprocess") else []

    def run(items: list[bytes]) -> list[Any]:
        outcomes = [_stepped(name, before, each) for each in items]
        places = [n for n, each in enumerate(outcomes) if type(each) is not Raised]
        attempt = Attempt[Any, Any]([outcomes[place] for place in places], isolate=isolate)
        while part := attempt.part():
            count = len(part)  # the class may change the list
            try:
                attempt.ran(answers(f"{name}.transform", made.transform(part), count))
            except Exception as error:
                attempt.ran(raised(name, error))
        for place, outcome in zip(places, attempt.outcomes, strict=True):
            outcomes[place] = outcome if type(outcome) is Raised else _stepped(name, after, outcome)
        return outcomes

    return run


def _stepped(name: str, steps: Sequence[Callable[[Any], Any]], value: Any) -> Any:
    """Return the result of one item after these steps."""
    try:
        for step in steps:
            value = step(value)
    except Exception as error:
        return raised(name, error)
    return raised(name, value) if is_error(value) else value
