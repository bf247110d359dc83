"""Stages that a batch of a class with hooks passes: `preprocess`, `transform`, `postprocess`.

The stages form a pipeline. Each stage has one batch at a time, in order. A batch stays in its stage until the
next one is free. While `transform` runs, the next batch is preprocessed and the last one is postprocessed:

    batch 1   preprocess   transform    postprocess
    batch 2                preprocess   transform    postprocess
    batch 3                             preprocess   transform    postprocess

One more batch may wait for the first stage, so that this stage does not wait for the pipe. A class without
hooks has one batch at a time.

A batch is taken from the queue as late as possible, because callers may still join it:

    the batch is full           it is taken as soon as no other batch waits for the first stage
    its time is over, or it
    has a preferred size        it is taken when no batch is before the end of its `transform`: until then it
                                could only wait for that one
    no caller is expected       it is taken when no batch is in any stage: callers of those batches may call
                                again as soon as they are answered

So calls are not smaller than without the pipeline.

The stages run where `hooks` says. With "worker", all three run in the worker process: `transform` in its main
thread and each hook in a thread. With "caller", the hooks run in this process, in the thread that carries the
batch, and the items and results on the pipe are those of `transform`. What happens to a batch if a stage
fails:

    a hook raises               the item gets the error; a hook of lists is repeated in halves, as `transform`
    `transform` raises          it is repeated in halves (see `calls`)
    the worker process dies     a batch whose outcomes have arrived is complete. A batch that had begun (its
                                first stage in the worker has run, or may have) gets a WorkerCrashedError. Any
                                other batch is sent to the next process, without `preprocess` being repeated
                                in this one
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dispatcher.batched.calls import Raised, is_exception, replace_results, run_isolated, wrap_error


class Stage(enum.IntEnum):
    """Stage of a batch. A class without `preprocess` or `postprocess` passes that stage as well: items are
    unpickled in the first one, and results are pickled in the last one."""

    TAKEN = 0
    """A thread has taken the batch from the queue."""
    ACCEPTED = 1
    """The worker has the batch, and it will run the next one after it."""
    PREPROCESS = 2
    TRANSFORM = 3
    POSTPROCESS = 4
    DONE = 5


PIPELINE_DEPTH = 4
"""Number of batches that the worker of a class with hooks has at most: one in each stage, and one before the
first."""
HOOK_NAMES = ("preprocess", "postprocess")


@dataclass(frozen=True, slots=True)
class Hook:
    """A method `preprocess` or `postprocess`."""

    name: str
    function: Callable[..., Any]
    takes_list: bool
    """True if the hook gets all items of a batch at once, and returns a list of their results."""
    isolate: bool

    @property
    def takes_input(self) -> bool:
        """True if the hook requires two arguments: the input of `transform` and its result."""
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):  # an object without a signature, such as a function written in C
            return False
        positional = [each for each in parameters if each.kind <= each.POSITIONAL_OR_KEYWORD]
        return sum(each.default is each.empty for each in positional) == 2

    def run(self, rows: list[tuple[Any, ...]]) -> list[Any]:
        """Return an outcome for each row of arguments."""
        if not self.takes_list:
            return [self._run_one(row) for row in rows]
        return run_isolated(
            self.name,
            lambda part: self.function(*(list(column) for column in zip(*part, strict=True))),
            rows,
            isolate=self.isolate,
        )

    def _run_one(self, row: tuple[Any, ...]) -> Any:
        try:
            value = self.function(*row)
        except BaseException as error:  # SystemExit would end the thread of the stage; it fails the item
            return wrap_error(self.name, error)
        return wrap_error(self.name, value) if is_exception(value) else value


@dataclass(frozen=True, slots=True)
class Hooks:
    """The hooks of a class or of its object. Values pass a missing hook unchanged."""

    before: Hook | None = None
    after: Hook | None = None
    after_takes_input: bool = False

    def preprocess(self, items: Sequence[Any]) -> list[Any]:
        """Return the input of `transform` for each item, or its error."""
        if self.before is None:
            return list(items)
        hook = self.before
        return replace_results(items, lambda values: hook.run([(value,) for value in values]))

    def postprocess(self, inputs: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """Return the caller's outcome for each result of `transform` and its input."""
        if self.after is None:
            return list(results)
        hook = self.after
        if not self.after_takes_input:
            return replace_results(results, lambda values: hook.run([(value,) for value in values]))
        pairs = [
            result if type(result) is Raised else (item, result)
            for item, result in zip(inputs, results, strict=True)
        ]
        return replace_results(pairs, hook.run)


def find_hooks(owner: Any, name: str, *, take_list: bool, isolate: bool) -> Hooks:
    """Return the hooks of a class or of an object. `name` is that of the class."""
    before, after = (
        Hook(f"{name}.{each}", getattr(owner, each), take_list, isolate) if hasattr(owner, each) else None
        for each in HOOK_NAMES
    )
    return Hooks(before, after, after is not None and after.takes_input)
