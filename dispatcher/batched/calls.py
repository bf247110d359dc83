"""One batch and its results, item by item, without threads, event loop or processes.

A function over lists returns answers, raises, or returns something that is not a list of that length. If it
raises, one item may be the cause: the batch is run again in halves until that item is alone.

    run ── returned ──▶ each item has its answer, or the exception in its place
        ── raised ────▶ one item: the exception is its own;  more: the first half, then the second

Answered items are not run again. If the first half of a part that raised is answered, the second half is
known to raise, so it is halved at once instead of being run as a whole. Only an item that ran alone gets the
exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeGuard, TypeVar

from dispatcher.common.errors import BatchError, WrongLengthError

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Raised:
    """Outcome of an item, or of a whole call, that is not an answer."""

    error: Exception


def wrap_error(name: str, error: BaseException) -> Raised:
    """Return the outcome for callers: the error itself if a future can carry it, otherwise a BatchError.

    Never raises, even if the methods of the error do.
    """
    # A StopIteration would end the loop of a caller that iterates, and asyncio's futures refuse it.
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return Raised(error)
    wrapped = BatchError(f"{name} raised {describe_error(error)}")
    wrapped.__cause__ = error
    return Raised(wrapped)


def is_exception(value: object) -> TypeGuard[BaseException]:
    """Return whether a value is an exception that can be raised.

    `isinstance` would believe the `__class__` of a mock, and no future takes a mock as its error.
    """
    return issubclass(type(value), BaseException)


def describe_error(error: BaseException) -> str:
    """Return the error's type and message; only the type if its own `__str__` fails."""
    kind = type(error).__name__
    try:
        return f"{kind}: {error}"
    except BaseException:  # user code may raise anything, and the callers still need their error
        return kind


def collect_results(name: str, returned: Any, count: int) -> list[Any]:
    """Return the results of `count` items as a list. An exception among them becomes a `Raised`.

    Raises WrongLengthError unless `returned` has one result for each item, and any error of its iterator.
    """
    kind = type(returned).__name__
    expected = f"it must return a list with one result for each of {count} items, in their order"
    if hasattr(type(returned), "columns"):
        # The length of a table of pandas, polars or Arrow counts rows or is missing, and iteration yields
        # columns.
        raise WrongLengthError(
            f"{name} returned a {kind}, which iterates over columns: return a list of its rows"
        )
    if isinstance(returned, str | bytes | bytearray | Mapping | Set) or not hasattr(returned, "__len__"):
        if hasattr(returned, "close"):
            returned.close()  # a coroutine that would never be awaited, or a generator
        raise WrongLengthError(f"{name} returned a {kind}: {expected}")
    try:
        results = iter(returned)
    except TypeError as error:  # a zero-dimensional array has `__len__`, but neither length nor iterator
        raise WrongLengthError(f"{name} returned a {kind}: {expected}") from error
    # The length of an object may differ from its iteration, and the iteration may never end.
    collected = list(islice(results, count + 1))
    if len(collected) != count:
        many = len(collected) if len(collected) < count else f"more than {count}"
        raise WrongLengthError(f"{name} returned {many} results: {expected}")
    return [wrap_error(name, each) if is_exception(each) else each for each in collected]


@dataclass(slots=True)
class _Part:
    start: int
    stop: int
    known_error: Exception | None = None
    """Error that this part is known to raise. `None` if it has not been run."""
    whole_error: Exception | None = None
    """Error that the whole raised, if this part is the first half of it."""


_NOT_RUN = Raised(BatchError("it was not run"))


class BatchRun(Generic[T, R]):
    """Run of a batch until each item has its outcome: run the items of `next_part()` and pass the result to
    `record_part()` until there is no further part."""

    def __init__(self, items: Sequence[T], *, isolate: bool = True) -> None:
        self._items = items
        self._isolate = isolate
        self._parts = [_Part(0, len(items))]
        self.outcomes: list[R | Raised] = [_NOT_RUN] * len(items)

    def next_part(self) -> list[T]:
        """Return the items to run next. Empty if all items have their outcome."""
        while self._parts:
            part = self._parts[-1]
            if part.known_error is None or part.stop - part.start == 1:
                return list(self._items[part.start : part.stop])
            self._parts.pop()
            self._split_part(part, part.known_error)
        return []

    def record_part(self, result: Iterable[R | Raised] | Raised) -> None:
        """Record the result of the last part: an outcome for each item, or the error of the call."""
        part = self._parts.pop()
        if not isinstance(result, Raised):
            self.outcomes[part.start : part.stop] = result
            if part.whole_error is not None:
                # The first half passed although the whole raised, so the second half must be the cause.
                self._parts[-1].known_error = part.whole_error
        # A wrong length is a defect of the function and not of an item, so halving would not help.
        elif not self._isolate or part.stop - part.start == 1 or isinstance(result.error, WrongLengthError):
            self.outcomes[part.start : part.stop] = [result] * (part.stop - part.start)
        else:
            self._split_part(part, result.error)

    def give_up(self, outcome: Raised) -> None:
        """Set this outcome for all items that have none, and run no further part."""
        while self._parts:
            part = self._parts.pop()
            self.outcomes[part.start : part.stop] = [outcome] * (part.stop - part.start)

    def _split_part(self, part: _Part, error: Exception) -> None:
        middle = (part.start + part.stop) // 2
        # The list is a stack: the first half runs first.
        self._parts += [_Part(middle, part.stop), _Part(part.start, middle, whole_error=error)]


def run_isolated(
    name: str,
    call: Callable[[list[T]], Any],
    items: Sequence[T],
    *,
    isolate: bool,
    catch: type[BaseException] = BaseException,
) -> list[Any]:
    """Call a function with these items, and again with halves of them if it raises, and return an outcome for
    each item. Errors of another kind than `catch` are raised."""
    attempt = BatchRun[T, Any](items, isolate=isolate)
    while part := attempt.next_part():
        count = len(part)  # the function may change the list
        try:
            attempt.record_part(collect_results(name, call(part), count))
        except catch as error:
            attempt.record_part(wrap_error(name, error))
    return attempt.outcomes


def replace_results(outcomes: Sequence[Any], call: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """Return the outcomes with each result replaced by the outcome that `call` returns for it. Errors
    stay."""
    places = [n for n, each in enumerate(outcomes) if type(each) is not Raised]
    replaced = list(outcomes)
    if places:
        for place, outcome in zip(places, call([outcomes[place] for place in places]), strict=True):
            replaced[place] = outcome
    return replaced
