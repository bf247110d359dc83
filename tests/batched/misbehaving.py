"""Behaviours of a batched function by name: valid and invalid results, errors and crashes. Worker processes
import this module."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Never
from unittest.mock import Mock

import numpy as np

Call = tuple[int, str]
"""Number of a caller, and the name of the behaviour that its item causes. `fine` returns a result."""


def numbered_results(calls: list[Call]) -> list[Any]:
    return [("result", number) for number, _ in calls]


class DataFrame:
    """Data frame like those of pandas and polars: its length counts rows, and it iterates over columns."""

    def __init__(self, rows: int, columns: int) -> None:
        self._rows = rows
        self._columns = [f"column {n}" for n in range(columns)]

    @property
    def columns(self) -> list[str]:
        return self._columns

    def __len__(self) -> int:
        return self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)


class SizedIterable:
    """Object whose length may differ from the number of items that it iterates over."""

    def __init__(self, length: Callable[[], int], iterate: Callable[[], Iterator[Any]]) -> None:
        self.length, self.iterate = length, iterate

    def __len__(self) -> int:
        return self.length()

    def __iter__(self) -> Iterator[Any]:
        return self.iterate()


def raise_error(error: BaseException) -> Never:
    raise error


class MisbehavingError(Exception):
    """Exception that fails during one operation, for example when it is printed, pickled or unpickled."""

    def __init__(self, operation: str) -> None:
        super().__init__(operation)
        self.operation = operation
        if operation == "notes":
            self.__notes__ = "no list"  # type: ignore[assignment]

    def __str__(self) -> str:
        return raise_error(ValueError("no words")) if self.operation == "str" else self.operation

    def __reduce__(self) -> Any:
        match self.operation:
            case "reduce":
                raise_error(ValueError("no pickle"))
            case "reduce exits":
                raise_error(SystemExit(7))
            case "unpickling":
                return raise_error, (ValueError("not made again"),)
            case "unpickling exits":
                return raise_error, (SystemExit(7),)
            case "becomes a stop":
                return StopIteration, ("over",)
        return MisbehavingError, (self.operation,)


class MisbehavingBaseError(BaseException):
    """Error that is a BaseException and not an Exception, and that cannot be printed."""

    def __str__(self) -> str:
        raise_error(KeyboardInterrupt())


class ClasslessResult:
    """Result that raises when its class is read."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise_error(LookupError("no class"))

    def __reduce__(self) -> Any:
        return ClasslessResult, ()


def shorten_own_list(calls: list[Call]) -> list[Any]:
    calls.pop()
    return numbered_results(calls)


def empty_own_list(calls: list[Call]) -> list[Any]:
    results = numbered_results(calls)
    calls.clear()
    return results


def make_array(calls: list[Call]) -> Any:
    return np.array([[number, number] for number, _ in calls])


VALID_RESULTS: dict[str, Callable[[list[Call]], Any]] = {
    "tuple": lambda calls: tuple(numbered_results(calls)),
    "deque": lambda calls: deque(numbered_results(calls)),
    "values of a dictionary": lambda calls: dict(enumerate(numbered_results(calls))).values(),
    "array": make_array,
    "column of an array": lambda calls: make_array(calls)[:, 0],
    "wrong length reported": lambda calls: SizedIterable(lambda: 9, lambda: iter(numbered_results(calls))),
    "length raises": lambda calls: SizedIterable(
        lambda: raise_error(LookupError("no length")), lambda: iter(numbered_results(calls))
    ),
    "own list emptied": empty_own_list,
}
"""Functions that give each caller its own result."""

REJECTED_RESULTS: dict[str, Callable[[list[Call]], Any]] = {
    "nothing": lambda _: None,
    "number": lambda _: 1,
    "string": lambda calls: "x" * len(calls),
    "bytes": lambda calls: b"x" * len(calls),
    "dictionary": lambda calls: dict(enumerate(numbered_results(calls))),
    "set": lambda calls: set(numbered_results(calls)),
    "generator": lambda calls: (each for each in numbered_results(calls)),
    "endless generator": lambda _: itertools.count(),
    "too short": lambda calls: numbered_results(calls)[1:],
    "too long": lambda calls: [*numbered_results(calls), "more"],
    "endless": lambda calls: SizedIterable(lambda: len(calls), itertools.count),
    "array without a dimension": lambda _: np.array(1),
    "transposed array": lambda calls: make_array(calls * 2).T,
    "frame with few columns": lambda calls: DataFrame(len(calls), 2),
    "frame with many columns": lambda calls: DataFrame(len(calls), 9),
    "square frame": lambda calls: DataFrame(len(calls), len(calls)),
    "own list changed": shorten_own_list,
}
"""Functions whose result is rejected as a whole: all callers get the same error, and the function is called
once."""

ITEM_ERRORS: dict[str, Callable[[list[Call]], Any]] = {
    "raises": lambda _: raise_error(LookupError("bad")),
    "stop": lambda _: raise_error(StopIteration("over")),
    "asynchronous stop": lambda _: raise_error(StopAsyncIteration("over")),
    "concurrent time-out": lambda _: raise_error(TimeoutError("late")),
    "group": lambda _: raise_error(ExceptionGroup("two", [ValueError("one"), KeyError("two")])),
    **{
        f"error: {operation}": lambda _, operation=operation: raise_error(MisbehavingError(operation))  # type: ignore[misc]
        for operation in [
            "notes",
            "str",
            "reduce",
            "reduce exits",
            "unpickling",
            "unpickling exits",
            "becomes a stop",
        ]
    },
    "no iterator": lambda _: SizedIterable(lambda: 4, lambda: raise_error(LookupError("no iterator"))),
    "iterates and raises": lambda calls: SizedIterable(
        lambda: 4, lambda: map(raise_error, [LookupError("in it")])
    ),
}
"""Functions that raise because of one item. Its caller gets the exception, and the others get their results.
"""

FATAL_ERRORS: dict[str, Callable[[list[Call]], Any]] = {
    "exits": lambda _: raise_error(SystemExit(7)),
    "interrupted": lambda _: raise_error(KeyboardInterrupt()),
    "generator exit": lambda _: raise_error(GeneratorExit()),
    "cancelled": lambda _: raise_error(asyncio.CancelledError()),
    "no exception": lambda _: raise_error(MisbehavingBaseError()),
}
"""Functions that raise an exception that ends a thread, an event loop or a process."""


def kill_process(_: list[Call]) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def exit_with_running_thread(_: list[Call]) -> Any:
    """Exit while another thread never ends, for which the interpreter waits."""
    threading.Thread(target=threading.Event().wait).start()
    sys.exit(7)


RETURNED_EXCEPTIONS: dict[str, Callable[[], Any]] = {
    "error in its place": lambda: KeyError("in its place"),
    "stop in its place": lambda: StopIteration("over"),
    "misbehaving error in its place": lambda: MisbehavingError("str"),
    "exit in its place": lambda: SystemExit(7),
    "class in its place": lambda: ValueError,
}
"""Exceptions that are returned in the place of the result of one item."""
UNSENDABLE_RESULTS: dict[str, Callable[[], Any]] = {
    "result that exits when pickled": lambda: MisbehavingError("reduce exits"),
    "result that cannot be unpickled": lambda: [MisbehavingError("unpickling exits")],
}
UNUSUAL_RESULTS: dict[str, Callable[[], Any]] = {
    "mock of an exception": lambda: Mock(spec=ValueError),
    "object whose class cannot be read": ClasslessResult,
}
"""Results that look like exceptions and are not."""


def behave(calls: list[Call]) -> Any:
    """Behave as the first item says that is not `fine`."""
    call_behaviours = (
        VALID_RESULTS
        | REJECTED_RESULTS
        | ITEM_ERRORS
        | FATAL_ERRORS
        | {"killed": kill_process, "exits with running thread": exit_with_running_thread}
    )
    for _, behaviour in calls:
        if behaviour in call_behaviours:
            return call_behaviours[behaviour](calls)
    item_behaviours = RETURNED_EXCEPTIONS | UNSENDABLE_RESULTS | UNUSUAL_RESULTS
    return [
        item_behaviours[behaviour]() if behaviour in item_behaviours else ("result", number)
        for number, behaviour in calls
    ]


class Misbehaving:
    """A class under `batched`, which runs in a worker process."""

    def transform(self, calls: list[Call]) -> Any:
        return behave(calls)
