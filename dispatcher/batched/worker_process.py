"""A class under `batched` in a process of its own: made once there, and run for one batch after the other.

    ours                                   the worker process
    what it needs to import the program ─▶ imports it
    the class and its arguments         ─▶ makes the object, with its model
                                        ◀─ ready, or what was raised
    a batch: each item pickled          ─▶
                                        ◀─ begun
                                           preprocess each, transform all, postprocess each
                                        ◀─ an outcome for each, pickled

Each item and each outcome is a pickle of its own, so that one that cannot be pickled harms no other. The
process is a new interpreter (what multiprocessing calls spawn) on a pipe, and ends when that closes, whatever
it does. multiprocessing's own Process would leave a second one behind: its resource tracker.
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
"""What a process may take to end once its pipe is closed; then it is asked to, and then it is killed."""
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
"""`prepare` sets the path, so nothing of ours is imported before it, and imports the program, which may not
start a worker then, for that would import the program again. multiprocessing knows it by that mark."""
BEGUN = b"begun"
NOTE = "In the worker process:\n"

_SIGNALS = {each.value: each.name for each in signal.Signals}
_load = pickle.loads
"""Of what the other end wrote: our own child, or the program that started us. Nobody else has the pipe."""


@dataclass(frozen=True, slots=True)
class WorkerTarget:
    """The class, by where it is found, and how it is made and run there."""

    module: str
    qualname: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    isolate: bool

    def found(self) -> type[Any]:
        """The class itself, also where its name leads to what `batched` made of it."""
        there = attrgetter(self.qualname)(import_module(self.module))
        return there if isinstance(there, type) else there.__wrapped__


class ProcessWorker:
    """Our end. Items are pickled already; what comes of them is not any more."""

    def __init__(self, target: bytes, name: str) -> None:
        self._target = target
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Any, Any] | None = None

    def start(self) -> None:
        """Return when the object is made. Raises what making it raised, or WorkerCrashedError."""
        self._started()

    def run(self, items: list[bytes]) -> list[Any]:
        """An outcome for each. What a worker has not begun another one runs."""
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
            if begun or not again:
                return [Raised(crashed)] * len(items)
            again = False  # it was dying already, which nobody could know

    def end(self) -> None:
        """Close the pipe, and wait until it has ended."""
        self._give_up()

    def kill(self) -> None:
        """Also in the midst of a `run`, from another thread."""
        process = self._process
        if process is not None:
            process.kill()

    def forget(self) -> None:
        """This process was forked: the worker is the other one's, who alone holds its pipe."""
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.returncode = 0  # it is no child of this process
        self._process = self._pipe = None

    def _started(self) -> Connection[Any, Any]:
        """The pipe to an object that is made."""
        if self._pipe is not None and self._process is not None:
            if self._process.poll() is None:
                return self._pipe
            self._give_up()  # it ended while it held nothing
        told = spawn.get_preparation_data(self._name)
        told.pop("authkey", None)  # it is for children of multiprocessing, and no pickle takes it
        ours, theirs = Pipe()
        with theirs:
            code = STARTER.format(theirs.fileno())
            command = [spawn.get_executable(), "-c", code]
            self._process = subprocess.Popen(  # noqa: S603 -- of ourselves
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
        """Close the pipe, and wait until the process has ended; how it did."""
        process, pipe = self._process, self._pipe
        self._process = self._pipe = None
        if pipe is not None:
            pipe.close()
        if process is None:
            return 0
        for end in (process.terminate, process.kill):
            try:
                return process.wait(END_S)
            except subprocess.TimeoutExpired:
                end()
        return process.wait()


def packed(outcome: Any) -> tuple[bool, bytes, str]:
    """Whether it is an answer, its pickle, and an error's traceback. What cannot be pickled is an error."""
    if type(outcome) is Raised:
        return _packed_error(outcome.error)
    try:
        return True, pickle.dumps(outcome, pickle.HIGHEST_PROTOCOL), ""
    except BaseException as error:  # pickling runs the result's code, which may even leave the process
        told = TypeError(f"the result cannot be pickled: {described(error)}")
        told.__cause__ = error
        return _packed_error(told)


def _packed_error(error: Exception) -> tuple[bool, bytes, str]:
    try:
        trace = "".join(traceback.format_exception(error))
    except BaseException:  # its notes and causes may be of any kind
        trace = described(error)
    try:
        return False, pickle.dumps(error, pickle.HIGHEST_PROTOCOL), trace
    except BaseException:
        return False, b"", trace


def unpacked(sent: tuple[bool, bytes, str]) -> Any:
    """What was packed; an error has the traceback as a note."""
    is_answer, data, trace = sent
    try:
        found = _load(data) if data else None
    except BaseException as error:  # unpickling runs the code of what was pickled
        if is_answer:
            return raised("unpickling the result", error)
        found = None
    if is_answer:
        return found
    # The class of an exception may be missing here, or take other arguments than it keeps.
    told = found if is_error(found) else BatchError(trace.strip().rpartition("\n")[2])
    with suppress(BaseException):  # notes that are no list take no further one
        told.add_note(NOTE + trace)
    return raised("the worker", told)


def serve(pipe: Connection[Any, Any]) -> None:
    """The worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who holds the other end
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
        """The other end may go while a batch runs, which nobody waits for then."""
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
        # Threads of the class may keep the process alive after a SystemExit. The other end waits for none.
        busy.clear()
        with socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
            end.shutdown(socket.SHUT_RDWR)
    sys.stdout.flush()


def _steps(made: Any, isolate: bool) -> Callable[[list[bytes]], list[Any]]:
    """How the object runs a batch. A step that it does not have passes on what it gets."""
    name = type(made).__qualname__
    before = [_load, *([made.preprocess] if hasattr(made, "preprocess") else ())]
    after = [made.postprocess] if hasattr(made, "postprocess") else []

    def run(items: list[bytes]) -> list[Any]:
        outcomes = [_stepped(name, before, each) for each in items]
        places = [n for n, each in enumerate(outcomes) if type(each) is not Raised]
        attempt = Attempt[Any, Any]([outcomes[place] for place in places], isolate=isolate)
        while part := attempt.part():
            count = len(part)  # the list is the class's now, which may change it
            try:
                attempt.ran(answers(f"{name}.transform", made.transform(part), count))
            except Exception as error:
                attempt.ran(raised(name, error))
        for place, outcome in zip(places, attempt.outcomes, strict=True):
            outcomes[place] = outcome if type(outcome) is Raised else _stepped(name, after, outcome)
        return outcomes

    return run


def _stepped(name: str, steps: Sequence[Callable[[Any], Any]], value: Any) -> Any:
    """One item through these steps."""
    try:
        for step in steps:
            value = step(value)
    except Exception as error:
        return raised(name, error)
    return raised(name, value) if is_error(value) else value
