"""Retries of a client while Redis is unreachable, and the errors and log lines about it."""

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
"""Seconds of retries if the queue was never reached. The URL is probably wrong then."""
_PAUSES_S = (0.1, 0.3, 1.0)
_log = logging.getLogger("batch_dispatcher.client")


class Outage:
    """Record of how long Redis has been unreachable, shared by all calls of one client.

    Permanent errors (a wrong password, a missing right, an unexpected reply, a key that belongs to another
    program) are raised at once. After other errors, calls are retried for `retry_for_s`. If that is `None`,
    they are retried until the time limit of the call, or for `first_contact_s` if the queue was never
    reached.
    """

    def __init__(self, retry_for_s: float | None, place: str, *, first_s: float = FIRST_S) -> None:
        """`address` is the address of Redis for error messages."""
        self._retry_for_s, self._first_s = retry_for_s, first_s
        self._place = place
        self._reached = False
        self._since: float | None = None
        self._tries = 0
        self.trouble: QueueUnavailableError | None = None
        """Error of the last call, or `None` if the last call succeeded."""

    def well(self) -> None:
        """Record that a call succeeded."""
        if self.trouble is not None and self._tries > 1:  # only then was the outage logged
            _log.info("the queue is back")
        self._reached = True
        self._since, self._tries, self.trouble = None, 0, None

    def ill(self, error: QueueUnavailableError, began: float | None = None) -> QueueAwayError | None:
        """Record that a call failed. Return the error to raise, or `None` if the call should be retried.

        `began_at` is the time on the monotonic clock at which the call began. Without it, the outage begins
        now.
        """
        now = time.monotonic()
        if self._since is None:
            self._since = now if began is None else began
        self._tries += 1
        self.trouble = error
        # An error reply (Redis is loading its data, or is a replica) shows that the address is right.
        self._reached = self._reached or not isinstance(error, BrokenCallError)
        bears = self._retry_for_s
        if bears is None and not self._reached:
            bears = self._first_s
        if _lasting(error):
            return away(error)
        if bears is not None and now - self._since >= bears:
            return away(error, "" if self._reached else self._place)
        if self._tries == 2:  # a single failed call is not worth a warning
            _log.warning("waiting for the queue: %s", error)
        return None

    async def borne(self, act: Callable[[], Awaitable[T]], until: float) -> T:
        """Return the answer of a call, which is retried while Redis is unreachable.

        Raises QueueUnreachableError if the error is permanent, if the retries are used up, or if the call
        fails after `give_up_at` (monotonic clock).
        """
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
    """Return the error for callers. `address` is added to the message if the message does not contain it."""
    told = QueueAwayError(str(error) if place in str(error) else f"{error} ({place})")
    told.__cause__ = error
    return told


def _lasting(error: QueueUnavailableError) -> bool:
    return isinstance(error, CallRefusedError | WrongKeyError) or isinstance(
        error.__cause__, errors.AuthenticationError
    )
