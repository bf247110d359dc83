"""Program of the worker process of a batched class: it creates the object once and runs batches through it.

    reader ─▶ preprocess ─▶ transform ─▶ postprocess ─▶ pipe
    thread    thread        main thread  thread

Without hooks, the main thread does everything, one batch after the other. Otherwise a batch stays in its
stage until the next stage is free, so each stage has one batch at most.

A batch is reported as begun before any code of the class sees it, so that the other end knows after a crash
whether the batch may have had effects. If the pipe closes while a batch is being processed, no caller waits
any more, and the process ends at once.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from dispatcher.batched.calls import replace_results, run_isolated, wrap_error
from dispatcher.batched.messages import WorkerTarget, load_message, pack_outcome
from dispatcher.batched.stages import Hooks, Stage, find_hooks


@dataclass(slots=True)
class _Batch:
    number: int
    pickled_items: list[bytes]
    inputs: list[Any] = field(default_factory=list)
    """Input of `transform` for each item, or the error that the item has already."""
    results: list[Any] = field(default_factory=list)


class _StageEntry:
    """Entry of a stage, which has one batch at a time."""

    def __init__(self) -> None:
        self._is_free = threading.Semaphore(1)
        self._batches: SimpleQueue[_Batch | None] = SimpleQueue()

    def enter(self, batch: _Batch | None) -> None:
        """Pass a batch to the stage when it is free. `None`: no further batch comes."""
        self._is_free.acquire()
        self._batches.put(batch)

    def take(self) -> _Batch | None:
        """Wait for a batch that enters, and return it. `None`: no further batch comes."""
        return self._batches.get()

    def leave(self) -> None:
        """Record that the batch has entered the next stage."""
        self._is_free.release()


def serve_batches(pipe: Connection[Any, Any]) -> None:
    """Run the worker process until its pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the process at the other end
    try:
        target: WorkerTarget = load_message(pipe.recv_bytes())
        made = target.resolve_class()(*target.args, **target.kwargs)
        server = _BatchServer(pipe, made, target)
    except BaseException as error:
        pipe.send_bytes(pickle.dumps(pack_outcome(wrap_error("making the worker", error))))
        return
    pipe.send_bytes(pickle.dumps(None))
    server.run()


class _BatchServer:
    """Reads batches from the pipe and answers each."""

    def __init__(self, pipe: Connection[Any, Any], made: Any, target: WorkerTarget) -> None:
        self._pipe = pipe
        self._send_lock = threading.Lock()
        self._transform = made.transform
        self._name = type(made).__qualname__
        self._isolate = target.isolate
        self._is_pipelined = target.is_pipelined
        self._hooks = Hooks()
        if target.has_hooks:
            self._hooks = find_hooks(made, self._name, take_list=target.batch_hooks, isolate=target.isolate)
        self._received: SimpleQueue[_Batch | None] = SimpleQueue()
        """Batches that have not entered a stage: one at most, if the stages form a pipeline."""
        self._transform_entry = _StageEntry()
        self._postprocess_entry = _StageEntry()
        self._received_count = self._answered_count = 0
        self._is_ending = False

    def run(self) -> None:
        """Answer batches until the pipe closes."""
        loops = [self._read_batches]
        loops += [self._preprocess_batches, self._postprocess_batches] if self._is_pipelined else []
        for each in loops:
            threading.Thread(target=each, daemon=True).start()
        try:
            with suppress(OSError):  # the other end is gone
                self._transform_batches()
        finally:
            # Threads of the class may keep the process alive after a SystemExit. The shutdown ends the pipe
            # for the other end all the same.
            self._is_ending = True
            with socket.fromfd(self._pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
                end.shutdown(socket.SHUT_RDWR)
        sys.stdout.flush()

    def _read_batches(self) -> None:
        """Read batches from the pipe. If it closes during a batch, end the process at once."""
        try:
            while True:
                batch = _Batch(*load_message(self._pipe.recv_bytes()))
                self._received_count += 1
                self._received.put(batch)
                del batch
        except (EOFError, OSError):
            self._received.put(None)
            if self._received_count != self._answered_count and not self._is_ending:
                os._exit(1)

    def _preprocess_batches(self) -> None:
        with suppress(OSError):  # the other end is gone
            while (batch := self._received.get()) is not None:
                if self._hooks.before is not None:
                    self._report(batch, Stage.PREPROCESS)
                self._preprocess(batch)
                self._transform_entry.enter(batch)
                del batch
        self._transform_entry.enter(None)

    def _transform_batches(self) -> None:
        take = self._transform_entry.take if self._is_pipelined else self._received.get
        while (batch := take()) is not None:
            self._report(batch, Stage.TRANSFORM)
            if not self._is_pipelined:
                self._preprocess(batch)
            batch.results = replace_results(batch.inputs, self._run_transform)
            if self._is_pipelined:
                self._postprocess_entry.enter(batch)
                self._transform_entry.leave()
            else:
                self._answer(batch)
            del batch  # the next one may take long to come

    def _postprocess_batches(self) -> None:
        with suppress(OSError):  # the other end is gone
            while (batch := self._postprocess_entry.take()) is not None:
                if self._hooks.after is not None:
                    self._report(batch, Stage.POSTPROCESS)
                self._answer(batch)
                self._postprocess_entry.leave()
                del batch

    def _preprocess(self, batch: _Batch) -> None:
        batch.inputs = self._hooks.preprocess([_load_item(each) for each in batch.pickled_items])
        batch.pickled_items = []

    def _run_transform(self, inputs: list[Any]) -> list[Any]:
        """Return an outcome for each input. Raises an error that is no Exception, which ends the process."""
        return run_isolated(
            f"{self._name}.transform", self._transform, inputs, isolate=self._isolate, catch=Exception
        )

    def _answer(self, batch: _Batch) -> None:
        outcomes = self._hooks.postprocess(batch.inputs, batch.results)
        message = pickle.dumps((batch.number, int(Stage.DONE), [pack_outcome(each) for each in outcomes]))
        # Counted before it is sent, because the other end may close the pipe as soon as it has the answer.
        self._answered_count += 1
        self._send(message)

    def _report(self, batch: _Batch, stage: Stage) -> None:
        self._send(pickle.dumps((batch.number, int(stage), None)))

    def _send(self, message: bytes) -> None:
        with self._send_lock:
            self._pipe.send_bytes(message)


def _load_item(pickled: bytes) -> Any:
    try:
        return load_message(pickled)
    except BaseException as error:  # unpickling runs code of the item
        return wrap_error("unpickling the item", error)
