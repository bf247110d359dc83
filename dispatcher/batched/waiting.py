"""Who waits for an answer of what `batched` made, in a line: the former of batches says who goes.

Nobody else can come (the former's `alone`) where no call runs and it has become quiet, as whoever runs the
calls knows: those whom the last call answered have asked again by then, if they ask again at once.
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
from dispatcher.batched.errors import ClosedError, TooManyPendingError
from dispatcher.core.merging.grouping import Form, Forming, Waiting, form

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class CallTerms:
    """What a function is called by, and by which rule."""

    name: str
    rule: Forming
    most: float
    """Items that may wait; inf: any number."""
    concurrency: int
    isolate: bool
    context: Context
    """In a copy of it the function runs: a call is made for many, and none of their contexts is its own."""


@dataclass(slots=True, eq=False)
class Waiter(Generic[T, R]):
    """A caller and its item."""

    item: T
    place: Waiting
    future: asyncio.Future[R] | Future[R]
    loop: asyncio.AbstractEventLoop | None
    """Where it waits; None: in a thread."""
    taken: bool = False
    """It is in line no longer: its item runs, or has run, or nobody wants its result."""


class Gathering(Generic[T, R]):
    """Waiters in the order in which they came."""

    def __init__(self, terms: CallTerms) -> None:
        self._terms = terms
        self._at_once = replace(terms.rule, max_delay_s=0.0)
        self._waiters: deque[Waiter[T, R]] = deque()
        self._gone = 0
        """Of these, who wait no longer."""
        self.running = 0
        """Calls."""
        self.closed = False

    def __len__(self) -> int:
        return len(self._waiters) - self._gone

    def join(self, waiter: Waiter[T, R]) -> None:
        """Raises ClosedError or TooManyPendingError."""
        if self.closed:
            raise ClosedError(f"{self._terms.name} was closed")
        if len(self) >= self._terms.most:
            raise TooManyPendingError(f"{len(self)} items wait for {self._terms.name}, as many as may")
        self._waiters.append(waiter)

    def leave(self, waiter: Waiter[T, R]) -> None:
        """It waits no longer. Its future is done."""
        if not waiter.taken:
            self._gone += 1

    def take(self, now: float, *, quiet: bool) -> list[Waiter[T, R]] | float:
        """Who goes now; or until when there is nothing to do (inf: until something happens)."""
        if self._gone:
            self._take_out_the_gone()
        answer = form(
            (each.place for each in self._waiters),
            self._at_once if self.closed else self._terms.rule,
            now,
            room=self.running < self._terms.concurrency,
            alone=quiet and not self.running,
        )
        if isinstance(answer, Form):
            self.running += 1
            taken = [self._waiters.popleft() for _ in range(answer.count)]
            for each in taken:
                each.taken = True
            return taken
        return answer.until

    def _take_out_the_gone(self) -> None:
        """Who has given up but has not left yet is among them, and leaves later: it is counted no more."""
        staying = deque[Waiter[T, R]]()
        for each in self._waiters:
            if each.future.done():
                each.taken = True
            else:
                staying.append(each)
        self._waiters, self._gone = staying, 0

    @property
    def hastens(self) -> bool:
        """Once it is quiet, what waits goes."""
        return self._terms.rule.idle_flush and not self.running and len(self) > 0

    def drop(self) -> list[Waiter[T, R]]:
        """All that wait, who get nothing."""
        dropped = list(self._waiters)
        for each in dropped:
            each.taken = True
        self._waiters.clear()
        self._gone = 0
        return dropped


def tell(waiters: Iterable[Waiter[T, R]], outcomes: Iterable[R | Raised]) -> None:
    """Give each waiter its outcome, in the thread of its future. Skip waiters that have given up."""
    for waiter, outcome in zip(waiters, outcomes, strict=True):
        if waiter.future.done():
            continue
        try:
            # isinstance would ask a result for its class, which is the user's code.
            if type(outcome) is Raised:
                waiter.future.set_exception(outcome.error)
            else:
                waiter.future.set_result(cast(R, outcome))
        except (asyncio.InvalidStateError, InvalidStateError):
            continue  # a thread has given up since: its future is cancelled
