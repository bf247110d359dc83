"""Hooks that run in the program of the callers, around the worker process that runs `transform`."""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any

from dispatcher.batched.calls import replace_results, wrap_error
from dispatcher.batched.stages import Hooks, Stage
from dispatcher.batched.worker_process import ProcessWorker


class CallerHooksWorker:
    """Worker whose items and outcomes are those of the callers. Each thread runs the hooks of its batch."""

    def __init__(self, worker: ProcessWorker, hooks: Hooks, context: Context) -> None:
        self.depth = worker.depth
        self.start, self.end, self.kill = worker.start, worker.end, worker.kill
        self._worker = worker
        self._hooks = hooks
        self._context = context
        """Context whose copies the hooks run in."""
        self._reset_order()

    def _reset_order(self) -> None:
        self._changed = threading.Condition()
        self._batches: deque[object] = deque()
        """One object for each batch, the oldest first."""
        self._unsent: deque[object] = deque()
        """Batches that the worker process has not got. The oldest one is preprocessed."""

    def run_batch(self, items: list[Any], enter_stage: Callable[[Stage], None]) -> list[Any]:
        """Return an outcome for each item."""
        batch = object()

        def enter_inner_stage(stage: Stage) -> None:
            if stage is Stage.ACCEPTED:
                self._leave(self._unsent, batch)
            enter_stage(stage)

        with self._changed:
            self._batches.append(batch)
            self._unsent.append(batch)
        enter_stage(Stage.ACCEPTED)
        try:
            self._wait_until_oldest(self._unsent, batch)
            inputs = self._context.copy().run(self._hooks.preprocess, items)
            packed = replace_results(inputs, lambda values: [_pack_input(each) for each in values])
            results = replace_results(
                packed, lambda values: self._worker.run_batch(values, enter_inner_stage)
            )
            self._leave(self._unsent, batch)
            self._wait_until_oldest(self._batches, batch)
            enter_stage(Stage.POSTPROCESS)
            return self._context.copy().run(self._hooks.postprocess, inputs, results)
        finally:
            self._leave(self._unsent, batch)
            self._leave(self._batches, batch)

    def _wait_until_oldest(self, batches: deque[object], batch: object) -> None:
        with self._changed:
            self._changed.wait_for(lambda: batches[0] is batch)

    def _leave(self, batches: deque[object], batch: object) -> None:
        """Let the next batch go on. A batch may leave again, which has no effect."""
        with self._changed:
            if batch in batches:
                batches.remove(batch)
                self._changed.notify_all()

    def forget_after_fork(self) -> None:
        """Forget the worker and its batches after a fork: they belong to the parent process."""
        self._worker.forget_after_fork()
        self._reset_order()


def _pack_input(value: Any) -> Any:
    try:
        return pickle.dumps(value)
    except BaseException as error:  # pickling runs code of the value
        return wrap_error("pickling the input of transform", error)
