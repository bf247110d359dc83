"""How long a client bears it that Redis is away, and what it says of that."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis import exceptions as errors

from dispatcher.client.errors import QueueAwayError
from dispatcher.core.requests.submission import CallRefusedError, QueueUnavailableError
from dispatcher.queue.redis.scripts import BrokenCallError, WrongKeyError

T = TypeVar("T")

FIRST_S = 10.0
"""A client that never reached its queue has probably a wrong URL, and says so after this."""
_PAUSES_S = (0.1, 0.3, 1.0)
_log = logging.getLogger("batch_dispatcher.client")


class Outage:
    """Record of how long Redis has been unreachable, shared by all calls of one client.

    Errors that do not pass by themselves (a wrong password, a missing right, an unexpected reply, a key of
    another program under one of our names) are raised at once. Calls are retried after other errors for
    `retry_for_s`. With `None` they are retried until the call's own time limit, but for no more than
    `first_s` if the queue was never reached.
    """

    def __init__(self, retry_for_s: float | None, place: str, *, first_s: float = FIRST_S) -> None:
        """`place`: where Redis is, for who is told that it cannot be reached."""
        self._retry_for_s, self._first_s = retry_for_s, first_s
        self._place = place
        self._reached = False
        self._since: float | None = None
        self._tries = 0
        self.trouble: QueueUnavailableError | None = None
        """Why the queue cannot be reached now."""

    def well(self) -> None:
        """A call got through."""
        if self.trouble is not None and self._tries > 1:
            _log.info("the queue is back")
        self._reached = True
        self._since, self._tries, self.trouble = None, 0, None

    def ill(self, error: QueueUnavailableError, began: float | None = None) -> QueueAwayError | None:
        """A call did not get through, which began then (None: now). What to raise; None: it is to be tried
        again after `pause`."""
        now = time.monotonic()
        if self._since is None:
            self._since = now if began is None else began
        self._tries += 1
        self.trouble = error
        # A refusal (it loads its data, it is a replica) shows that there is a Redis.
        self._reached = self._reached or not isinstance(error, BrokenCallError)
        bears = self._retry_for_s
        if bears is None and not self._reached:
            bears = self._first_s
        if _lasting(error):
            return away(error)
        if bears is not None and now - self._since >= bears:
            return away(error, "" if self._reached else self._place)
        if self._tries == 2:
            _log.warning("waiting for the queue: %s", error)
        return None

    async def borne(self, act: Callable[[], Awaitable[T]], until: float) -> T:
        """What the call brings, made again until it gets through. Raises QueueAwayError where it is not to
        be, or when it fails past that time (of the monotonic clock)."""
        while True:
            try:
                done = await act()
            except QueueUnavailableError as error:
                if (told := self.ill(error)) is not None:
                    raise told from error
                if time.monotonic() >= until:
                    raise away(error) from error
                await self.pause()
            else:
                self.well()
                return done

    async def pause(self) -> None:
        await asyncio.sleep(_PAUSES_S[min(self._tries, len(_PAUSES_S)) - 1])


def away(error: QueueUnavailableError, place: str = "") -> QueueAwayError:
    """`place`: said where the error does not name it."""
    told = QueueAwayError(str(error) if place in str(error) else f"{error} ({place})")
    told.__cause__ = error
    return told


def _lasting(error: QueueUnavailableError) -> bool:
    return isinstance(error, CallRefusedError | WrongKeyError) or isinstance(
        error.__cause__, errors.AuthenticationError
    )
