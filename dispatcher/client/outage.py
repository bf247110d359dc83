"""How long a client bears it that Redis is away, and what it says of that."""

from __future__ import annotations

import asyncio
import logging
import time

from redis import exceptions as errors

from dispatcher.client.errors import QueueAwayError
from dispatcher.core.submission import CallRefusedError, QueueUnavailableError

FIRST_S = 10.0
"""A client that never reached its queue has probably a wrong URL, and says so after this."""
_PAUSES_S = (0.1, 0.3, 1.0)
_log = logging.getLogger("batch_dispatcher.client")


class Outage:
    """Of one client, for all of its calls.

    What will not pass by itself (a wrong password, a right that is missing, a reply that nobody foresaw) is
    raised at once. The rest is borne for `retry_for_s`; None: until the call's own end, but FIRST_S at most
    where the queue was never reached.
    """

    def __init__(self, retry_for_s: float | None) -> None:
        self._retry_for_s = retry_for_s
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

    def ill(self, error: QueueUnavailableError) -> QueueAwayError | None:
        """A call did not get through. What to raise; None: it is to be tried again after `pause`."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        self._tries += 1
        self.trouble = error
        bears = self._retry_for_s
        if bears is None and not self._reached:
            bears = FIRST_S
        if _lasting(error) or (bears is not None and now - self._since >= bears):
            return away(error)
        if self._tries == 2:
            _log.warning("waiting for the queue: %s", error)
        return None

    async def pause(self) -> None:
        await asyncio.sleep(_PAUSES_S[min(self._tries, len(_PAUSES_S)) - 1])


def away(error: QueueUnavailableError) -> QueueAwayError:
    told = QueueAwayError(str(error))
    told.__cause__ = error
    return told


def _lasting(error: QueueUnavailableError) -> bool:
    return isinstance(error, CallRefusedError) or isinstance(error.__cause__, errors.AuthenticationError)
