"""Retries of a client while Redis is unreachable, and the errors and log lines about it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis import exceptions as errors

from dispatcher.client.errors import QueueUnreachableError
from dispatcher.queue.redis.scripts import CallFailedError, WrongKeyError
from dispatcher.requests.submission import CallRefusedError, QueueUnavailableError

T = TypeVar("T")

FIRST_CONTACT_S = 10.0
"""Seconds of retries if the queue was never reached. The URL is probably wrong then."""
_RETRY_PAUSES_S = (0.1, 0.3, 1.0)
_log = logging.getLogger("batch_dispatcher.client")


class Outage:
    """Record of how long Redis has been unreachable, shared by all calls of one client.

    Permanent errors (a wrong password, a missing right, an unexpected reply, a key that belongs to another
    program) are raised at once. After other errors, calls are retried for `retry_for_s`. If that is `None`,
    they are retried until the time limit of the call, or for `first_contact_s` if the queue was never
    reached.
    """

    def __init__(
        self, retry_for_s: float | None, address: str, *, first_contact_s: float = FIRST_CONTACT_S
    ) -> None:
        """`address` is the address of Redis for error messages."""
        self._retry_for_s, self._first_contact_s = retry_for_s, first_contact_s
        self._address = address
        self._was_reached = False
        self._failing_since: float | None = None
        self._failure_count = 0
        self.current_error: QueueUnavailableError | None = None
        """Error of the last call, or `None` if the last call succeeded."""

    def record_success(self) -> None:
        """Record that a call succeeded."""
        if self.current_error is not None and self._failure_count > 1:  # only then was the outage logged
            _log.info("the queue is back")
        self._was_reached = True
        self._failing_since, self._failure_count, self.current_error = None, 0, None

    def record_failure(
        self, error: QueueUnavailableError, began_at: float | None = None
    ) -> QueueUnreachableError | None:
        """Record that a call failed. Return the error to raise, or `None` if the call should be retried.

        `began_at` is the time on the monotonic clock at which the call began. Without it, the outage begins
        now.
        """
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now if began_at is None else began_at
        self._failure_count += 1
        self.current_error = error
        # An error reply (Redis is loading its data, or is a replica) shows that the address is right.
        self._was_reached = self._was_reached or not isinstance(error, CallFailedError)
        retry_for_s = self._retry_for_s
        if retry_for_s is None and not self._was_reached:
            retry_for_s = self._first_contact_s
        if _is_permanent(error):
            return unreachable_error(error)
        if retry_for_s is not None and now - self._failing_since >= retry_for_s:
            return unreachable_error(error, "" if self._was_reached else self._address)
        if self._failure_count == 2:  # a single failed call is not worth a warning
            _log.warning("waiting for the queue: %s", error)
        return None

    async def retry_while_unreachable(self, call: Callable[[], Awaitable[T]], give_up_at: float) -> T:
        """Return the answer of a call, which is retried while Redis is unreachable.

        Raises QueueUnreachableError if the error is permanent, if the retries are used up, or if the call
        fails after `give_up_at` (monotonic clock).
        """
        while True:
            began_at = time.monotonic()
            try:
                answer = await call()
            except QueueUnavailableError as error:
                # Until the queue was reached, the time of the call itself counts. Later calls may wait long.
                outage_began_at = None if self._was_reached else began_at
                if (error_to_raise := self.record_failure(error, outage_began_at)) is not None:
                    raise error_to_raise from error
                if time.monotonic() >= give_up_at:
                    raise unreachable_error(error) from error
                await self.wait_before_retry()
            else:
                self.record_success()
                return answer

    async def wait_before_retry(self) -> None:
        await asyncio.sleep(_RETRY_PAUSES_S[min(self._failure_count, len(_RETRY_PAUSES_S)) - 1])


def unreachable_error(error: QueueUnavailableError, address: str = "") -> QueueUnreachableError:
    """Return the error for callers. `address` is added to the message if the message does not contain it."""
    raised_error = QueueUnreachableError(str(error) if address in str(error) else f"{error} ({address})")
    raised_error.__cause__ = error
    return raised_error


def _is_permanent(error: QueueUnavailableError) -> bool:
    return isinstance(error, CallRefusedError | WrongKeyError) or isinstance(
        error.__cause__, errors.AuthenticationError
    )
