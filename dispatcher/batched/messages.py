"""Messages between a program and the worker process of a batched class. Each is one pickle.

    to the worker process           from the worker process
    what it needs to import ─▶
    WorkerTarget            ─▶
                                    ◀─ None if its object is created, otherwise a packed outcome
    (number, items)         ─▶
                                    ◀─ (number, stage, None) when the batch begins, and at each later stage
                                    ◀─ (number, DONE, packed outcomes)

Several batches may be on their way; their numbers tell them apart. Each item and each outcome is a pickle of
its own, so that one that cannot be pickled affects no other.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any

from dispatcher.batched.calls import Raised, describe_error, is_exception, wrap_error
from dispatcher.common.errors import BatchError

TRACEBACK_HEADING = "In the worker process:\n"

load_message = pickle.loads
"""Unpickles what the other end wrote: our own child, or the program that started us. No other process has the
pipe."""

PackedOutcome = tuple[bool, bytes, str]
"""Whether the outcome is an answer, its pickle, and the traceback of an error."""


@dataclass(frozen=True, slots=True)
class WorkerTarget:
    """Location of the class, and how to create and run the object in the worker."""

    module: str
    qualname: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    isolate: bool
    has_hooks: bool
    """True if the hooks run in the worker process."""
    batch_hooks: bool
    is_pipelined: bool

    def resolve_class(self) -> type[Any]:
        """Return the class itself, also if its name refers to the `BatchedClass` made of it."""
        target = attrgetter(self.qualname)(import_module(self.module))
        return target if isinstance(target, type) else target.__wrapped__


def pack_outcome(outcome: Any) -> PackedOutcome:
    """Return the message for an outcome. An outcome that cannot be pickled becomes an error."""
    if type(outcome) is Raised:
        return _pack_error(outcome.error)
    try:
        return True, pickle.dumps(outcome, pickle.HIGHEST_PROTOCOL), ""
    except BaseException as error:  # pickling runs code of the result, which may even call `sys.exit`
        type_error = TypeError(f"the result cannot be pickled: {describe_error(error)}")
        type_error.__cause__ = error
        return _pack_error(type_error)


def _pack_error(error: Exception) -> PackedOutcome:
    try:
        trace = "".join(traceback.format_exception(error))
    except BaseException:  # notes and causes may be of any type
        trace = describe_error(error)
    try:
        return False, pickle.dumps(error, pickle.HIGHEST_PROTOCOL), trace
    except BaseException:
        return False, b"", trace


def unpack_outcome(message: PackedOutcome) -> Any:
    """Return the outcome that was packed. An error has the traceback as a note."""
    is_answer, data, trace = message
    try:
        value = load_message(data) if data else None
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
