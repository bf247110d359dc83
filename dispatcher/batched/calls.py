"""One batch and what comes of it, item by item. No thread, no loop, no process.

A function over lists answers, raises, or returns what is no list of that length. Where it raises, one item
may be to blame: the batch is run again in halves until whoever is to blame stands alone.

    run ── returned ──▶ each item has its answer, or the exception in its place
        ── raised ────▶ one item: the exception is its own;  more: the first half, then the second

What was answered is not run again. Where the first half of a part that raised is answered, the second is
known to raise: it is halved at once, and not run as a whole. Nobody is blamed but alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeGuard, TypeVar

from dispatcher.batched.errors import BatchError, WrongLengthError

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Raised:
    """An item's outcome, or a whole call's, that is no answer."""

    error: Exception


def raised(name: str, error: BaseException) -> Raised:
    """Return the outcome for callers: the error itself if a future can carry it, otherwise a BatchError.

    Never raises, even if the methods of the error do.
    """
    # A stop of an iteration would end the loop of a caller who iterates, and asyncio's futures refuse one.
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return Raised(error)
    told = BatchError(f"{name} raised {described(error)}")
    told.__cause__ = error
    return Raised(told)


def is_error(value: object) -> TypeGuard[BaseException]:
    """Return whether a value is an exception that can be raised.

    `isinstance` would believe the `__class__` of a mock, and no future takes a mock as its error.
    """
    return issubclass(type(value), BaseException)


def described(error: BaseException) -> str:
    """Return the error's type and message; only the type if its own `__str__` fails."""
    kind = type(error).__name__
    try:
        return f"{kind}: {error}"
    except BaseException:  # user code, which must not keep the callers from their error
        return kind


def answers(name: str, returned: Any, count: int) -> list[Any]:
    """Return the results of `count` items as a list; an exception among them becomes a `Raised`.

    Raises WrongLengthError unless `returned` has one result for each item, and any error of its iterator.
    """
    kind = type(returned).__name__
    wanted = f"it must return a list with one result for each of {count} items, in their order"
    if hasattr(type(returned), "columns"):
        # pandas, polars, Arrow: their length counts rows, or nothing at all, and they iterate over columns.
        raise WrongLengthError(
            f"{name} returned a {kind}, which iterates over columns: return a list of its rows"
        )
    if isinstance(returned, str | bytes | bytearray | Mapping | Set) or not hasattr(returned, "__len__"):
        if hasattr(returned, "close"):
            returned.close()  # a coroutine that nobody awaits, a generator
        raise WrongLengthError(f"{name} returned a {kind}: {wanted}")
    try:
        results = iter(returned)
    except TypeError as error:  # an array without a dimension has a length that raises, too
        raise WrongLengthError(f"{name} returned a {kind}: {wanted}") from error
    # An object may have another length than it iterates over, and may iterate without end.
    found = list(islice(results, count + 1))
    if len(found) != count:
        many = len(found) if len(found) < count else f"more than {count}"
        raise WrongLengthError(f"{name} returned {many} results: {wanted}")
    return [raised(name, each) if is_error(each) else each for each in found]


@dataclass(slots=True)
class _Share:
    start: int
    stop: int
    known: Exception | None = None
    """It is known to raise, and that it was this when it last did."""
    other: Exception | None = None
    """It is a first half, and this is what the whole raised."""


_NOT_RUN = Raised(BatchError("it was not run"))


class Attempt(Generic[T, R]):
    """A batch until each item has its outcome: run `part()`, tell `ran()`, until there is no further part."""

    def __init__(self, items: Sequence[T], *, isolate: bool = True) -> None:
        self._items = items
        self._isolate = isolate
        self._parts = [_Share(0, len(items))]
        self.outcomes: list[R | Raised] = [_NOT_RUN] * len(items)

    def part(self) -> list[T]:
        """The items to run next; none: all have their outcome."""
        while self._parts:
            part = self._parts[-1]
            if part.known is None or part.stop - part.start == 1:
                return list(self._items[part.start : part.stop])
            self._parts.pop()
            self._halve(part, part.known)
        return []

    def ran(self, came: Iterable[R | Raised] | Raised) -> None:
        """What came of `part()`: an outcome for each item, or what the call raised."""
        part = self._parts.pop()
        if not isinstance(came, Raised):
            self.outcomes[part.start : part.stop] = came
            if part.other is not None:
                self._parts[-1].known = part.other
        elif not self._isolate or part.stop - part.start == 1 or isinstance(came.error, WrongLengthError):
            self.outcomes[part.start : part.stop] = [came] * (part.stop - part.start)
        else:
            self._halve(part, came.error)

    def give_up(self, outcome: Raised) -> None:
        """What has no outcome yet has this one, and no further part is run."""
        while self._parts:
            part = self._parts.pop()
            self.outcomes[part.start : part.stop] = [outcome] * (part.stop - part.start)

    def _halve(self, part: _Share, error: Exception) -> None:
        middle = (part.start + part.stop) // 2
        self._parts += [_Share(middle, part.stop), _Share(part.start, middle, other=error)]
