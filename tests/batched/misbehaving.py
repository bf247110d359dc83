"""Results and errors of a function under `batched`, by name. Worker processes import this module."""

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
"""Number of a caller, and the name of what its item makes the function do. `fine` returns a result."""


def results(calls: list[Call]) -> list[Any]:
    return [("of", number) for number, _ in calls]


class Frame:
    """A data frame like those of pandas and polars: its length counts rows, and it iterates over columns."""

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


class Sized:
    """An object whose length need not be the number of items that it iterates over."""

    def __init__(self, length: Callable[[], int], over: Callable[[], Iterator[Any]]) -> None:
        self.length, self.over = length, over

    def __len__(self) -> int:
        return self.length()

    def __iter__(self) -> Iterator[Any]:
        return self.over()


def fails(error: BaseException) -> Never:
    raise error


class Odd(Exception):  # noqa: N818 -- its name says what it is
    """An exception that fails when it is inspected in one way: printed, pickled or unpickled, for example."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how
        if how == "notes":
            self.__notes__ = "no list"  # type: ignore[assignment]

    def __str__(self) -> str:
        return fails(ValueError("no words")) if self.how == "str" else self.how

    def __reduce__(self) -> Any:
        match self.how:
            case "reduce":
                fails(ValueError("no pickle"))
            case "reduce exits":
                fails(SystemExit(7))
            case "unpickling":
                return fails, (ValueError("not made again"),)
            case "unpickling exits":
                return fails, (SystemExit(7),)
            case "becomes a stop":
                return StopIteration, ("over",)
        return Odd, (self.how,)


class OddBaseError(BaseException):
    """An error that is a BaseException, but no Exception, and has no message."""

    def __str__(self) -> str:
        fails(KeyboardInterrupt())


class Claims:
    """A result that fails when it is asked for its class."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        fails(LookupError("no class"))

    def __reduce__(self) -> Any:
        return Claims, ()


def changes_its_list(calls: list[Call]) -> list[Any]:
    calls.pop()
    return results(calls)


def empties_its_list(calls: list[Call]) -> list[Any]:
    found = results(calls)
    calls.clear()
    return found


def array(calls: list[Call]) -> Any:
    return np.array([[number, number] for number, _ in calls])


RIGHT: dict[str, Callable[[list[Call]], Any]] = {
    "tuple": lambda calls: tuple(results(calls)),
    "deque": lambda calls: deque(results(calls)),
    "values of a dictionary": lambda calls: dict(enumerate(results(calls))).values(),
    "array": array,
    "column of an array": lambda calls: array(calls)[:, 0],
    "wrong length claimed": lambda calls: Sized(lambda: 9, lambda: iter(results(calls))),
    "length raises": lambda calls: Sized(
        lambda: fails(LookupError("no length")), lambda: iter(results(calls))
    ),
    "own list emptied": empties_its_list,
}
"""Functions after which each caller has its own result."""

REFUSED: dict[str, Callable[[list[Call]], Any]] = {
    "nothing": lambda _: None,
    "number": lambda _: 1,
    "string": lambda calls: "x" * len(calls),
    "bytes": lambda calls: b"x" * len(calls),
    "dictionary": lambda calls: dict(enumerate(results(calls))),
    "set": lambda calls: set(results(calls)),
    "generator": lambda calls: (each for each in results(calls)),
    "endless generator": lambda _: itertools.count(),
    "too short": lambda calls: results(calls)[1:],
    "too long": lambda calls: [*results(calls), "more"],
    "endless": lambda calls: Sized(lambda: len(calls), itertools.count),
    "array without a dimension": lambda _: np.array(1),
    "transposed array": lambda calls: array(calls * 2).T,
    "frame with few columns": lambda calls: Frame(len(calls), 2),
    "frame with many columns": lambda calls: Frame(len(calls), 9),
    "square frame": lambda calls: Frame(len(calls), len(calls)),
    "own list changed": changes_its_list,
}
"""Functions whose result is refused through no fault of an item: all callers get the same error, and the
function is called once."""

BLAMED: dict[str, Callable[[list[Call]], Any]] = {
    "raises": lambda _: fails(LookupError("bad")),
    "stop": lambda _: fails(StopIteration("over")),
    "asynchronous stop": lambda _: fails(StopAsyncIteration("over")),
    "concurrent time-out": lambda _: fails(TimeoutError("late")),
    "group": lambda _: fails(ExceptionGroup("two", [ValueError("one"), KeyError("two")])),
    **{
        f"odd: {how}": lambda _, how=how: fails(Odd(how))  # type: ignore[misc]
        for how in [
            "notes",
            "str",
            "reduce",
            "reduce exits",
            "unpickling",
            "unpickling exits",
            "becomes a stop",
        ]
    },
    "no iterator": lambda _: Sized(lambda: 4, lambda: fails(LookupError("no iterator"))),
    "iterates and raises": lambda calls: Sized(lambda: 4, lambda: map(fails, [LookupError("in it")])),
}
"""Functions that raise because of one item, whose caller gets the exception. The others get their results."""

FATAL: dict[str, Callable[[list[Call]], Any]] = {
    "exits": lambda _: fails(SystemExit(7)),
    "interrupted": lambda _: fails(KeyboardInterrupt()),
    "generator exit": lambda _: fails(GeneratorExit()),
    "cancelled": lambda _: fails(asyncio.CancelledError()),
    "no exception": lambda _: fails(OddBaseError()),
}
"""Functions that raise what ends a thread, a loop or a process."""


def killed(_: list[Call]) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def exits_beside_a_thread(_: list[Call]) -> Any:
    """Exit while another thread, which the interpreter waits for, never ends."""
    threading.Thread(target=threading.Event().wait).start()
    sys.exit(7)


ALONE: dict[str, Callable[[], Any]] = {
    "error in its place": lambda: KeyError("in its place"),
    "stop in its place": lambda: StopIteration("over"),
    "odd error in its place": lambda: Odd("str"),
    "exit in its place": lambda: SystemExit(7),
    "class in its place": lambda: ValueError,
}
"""Exceptions that are returned in the place of one item's result."""
FROM_PROCESS: dict[str, Callable[[], Any]] = {
    "result that exits when pickled": lambda: Odd("reduce exits"),
    "result that cannot be made again": lambda: [Odd("unpickling exits")],
}
RESULTS: dict[str, Callable[[], Any]] = {
    "mock of an exception": lambda: Mock(spec=ValueError),
    "object that fails when asked for its class": Claims,
}
"""Odd results that are no exceptions."""


def behave(calls: list[Call]) -> Any:
    """Do what the first item says that does not say `fine`."""
    whole = (
        RIGHT | REFUSED | BLAMED | FATAL | {"killed": killed, "exits beside a thread": exits_beside_a_thread}
    )
    for _, fate in calls:
        if fate in whole:
            return whole[fate](calls)
    single = ALONE | FROM_PROCESS | RESULTS
    return [single[fate]() if fate in single else ("of", number) for number, fate in calls]


class Misbehaving:
    """A class under `batched`, which runs in a worker process."""

    def transform(self, calls: list[Call]) -> Any:
        return behave(calls)
