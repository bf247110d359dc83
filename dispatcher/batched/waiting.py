"""Queue of callers that wait for the result of a batched function. `common.grouping` decides which of
them go together, and when.

No other caller can come (`alone` in the grouping) if no call runs and no item has come for a moment. The
thread or loop that runs the calls knows that: callers that the last call answered have called again by then,
if they call again at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, InvalidStateError
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Generic, TypeVar, cast

from dispatcher.batched.calls import Raised
from dispatcher.common.errors import ClosedError, TooManyPendingError
from dispatcher.common.grouping import GroupingRule, GroupReady, WaitingItem, group_requests

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class CallTerms:
    """Name of a batched function, and the rules for its calls."""

    name: str
    rule: GroupingRule
    max_waiting: int
    """Maximum number of items that may wait."""
    concurrency: int
    """Number of calls that may run at once, or of workers."""
    isolate: bool
    context: Context
    """Context whose copies the function runs in. A call serves many callers, so it must not see the context
    of one of them."""


@dataclass(slots=True, eq=False)
class Waiter(Generic[T, R]):
    """A caller and its item."""

    item: T
    entry: WaitingItem
    future: asyncio.Future[R] | Future[R]
    loop: asyncio.AbstractEventLoop | None
    """Event loop of the caller. `None` if the caller waits in a thread."""
    is_taken: bool = False
    """True if the waiter has left the queue: its item runs, has run, or its result is not needed any more."""


class CallerQueue(Generic[T, R]):
    """Waiters in the order in which they came."""

    def __init__(self, terms: CallTerms) -> None:
        self._terms = terms
        self._closing_rule = replace(terms.rule, max_delay_s=0.0)
        self._waiters: deque[Waiter[T, R]] = deque()
        self._gone_count = 0
        """Number of these waiters that gave up."""
        self.running_calls = 0
        """Number of calls that run."""
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._waiters) - self._gone_count

    def add_waiter(self, waiter: Waiter[T, R]) -> None:
        """Add a waiter. Raises ClosedError or TooManyPendingError."""
        if self.is_closed:
            raise ClosedError(f"{self._terms.name} was closed")
        if len(self) >= self._terms.max_waiting:
            raise TooManyPendingError(
                f"{len(self)} items wait for {self._terms.name}, and max_waiting={self._terms.max_waiting} "
                "allows no more: call it with fewer items at once, or set a larger max_waiting"
            )
        self._waiters.append(waiter)

    def remove_waiter(self, waiter: Waiter[T, R]) -> None:
        """Count a waiter as gone. Its future is done."""
        if not waiter.is_taken:
            self._gone_count += 1

    def take_batch(self, now: float, *, is_quiet: bool, has_room: bool) -> list[Waiter[T, R]] | float:
        """Return the waiters of the next call, or the time until which there is nothing to do (infinite until
        something happens). `has_room`: a further call may run."""
        # `remove_waiter` only counts waiters that gave up. They are removed here, all at once.
        if self._gone_count:
            self._remove_gone()
        answer = group_requests(
            (each.entry for each in self._waiters),
            self._closing_rule if self.is_closed else self._terms.rule,
            now,
            has_room=has_room,
            is_idle=is_quiet and not self.running_calls,
        )
        if isinstance(answer, GroupReady):
            self.running_calls += 1
            taken = [self._waiters.popleft() for _ in range(answer.count)]
            for each in taken:
                each.is_taken = True
            return taken
        return answer.until

    def _remove_gone(self) -> None:
        """Remove waiters whose future is done. A caller that gave up but has not called `remove_waiter` yet
        is removed as well, and is not counted again when it does."""
        staying = deque[Waiter[T, R]]()
        for each in self._waiters:
            if each.future.done():
                each.is_taken = True
            else:
                staying.append(each)
        self._waiters, self._gone_count = staying, 0

    @property
    def flushes_when_quiet(self) -> bool:
        """True if the waiting items go as soon as it is quiet."""
        return self._terms.rule.idle_flush and not self.running_calls and len(self) > 0

    @property
    def is_batch_full(self) -> bool:
        """Return whether the next call is full: no waiting would make it larger."""
        return len(self) >= self._terms.rule.max_size

    def drop_all(self) -> list[Waiter[T, R]]:
        """Remove and return all waiters. None of them gets a result."""
        dropped = list(self._waiters)
        for each in dropped:
            each.is_taken = True
        self._waiters.clear()
        self._gone_count = 0
        return dropped


def deliver_outcomes(waiters: Iterable[Waiter[T, R]], outcomes: Iterable[R | Raised]) -> None:
    """Give each waiter its outcome, in the thread of its future. Skip waiters that have given up."""
    for waiter, outcome in zip(waiters, outcomes, strict=True):
        if waiter.future.done():
            continue
        try:
            # `isinstance` would read `__class__` of the result, which is code of the user.
            if type(outcome) is Raised:
                waiter.future.set_exception(outcome.error)
            else:
                waiter.future.set_result(cast(R, outcome))
        except (asyncio.InvalidStateError, InvalidStateError):
            continue  # the thread gave up since, so its future is cancelled
