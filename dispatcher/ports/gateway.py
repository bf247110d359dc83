"""The inference gateway, as the loop sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dispatcher.core.gateway.outcome import Outcome
from dispatcher.core.requests.request import Request
from dispatcher.core.value import Value


class AnswerMemory(Protocol):
    """Memory that an answer takes."""

    def share(self, shares: int) -> None:
        """Give the memory back after `shares` calls of `free`, or at once if it is 0."""
        ...

    def free(self) -> None:
        """Give up one share of the answer."""
        ...


class Forwarded(Value, frozen=True):
    """The result of one try."""

    outcome: Outcome
    sent_at: float
    """Time at which the connection for the request was ready; `ended_at` if there was none."""
    ended_at: float
    opened_s: float | None = None
    """Seconds that opening the connection took. `None` if it was open before, or was never opened."""
    session: str = ""
    """Value of the answer's header `Session.token_header`. Empty if there is none, or none was asked for."""
    queued_s: float | None = None
    """Seconds that the request waited in the endpoint picker. `None` if the answer does not say."""
    held: AnswerMemory | None = None
    """Memory that the answer takes until its result is written. `None` if it is not counted."""


class Gateway(Protocol):
    """The inference gateway: one try of one request."""

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: Callable[[], bool]
    ) -> Forwarded:
        """Try once. `token`: names this try, and no other one. `deadline`: loop time at which it ends,
        whatever happens. `may_send`: asked right before the first byte of each sending leaves, for it may be
        long until then; else it is Unsent.

        Never raises for what a network or a server can do: that is an Outcome. Cancelling it closes the
        connection, which is the gateway's cue to stop.
        """
        ...

    def connected(self, token: str) -> float | None:
        """Since when a running try holds a connection; None: it holds none (yet)."""
        ...

    def resize(self, limit: int) -> None:
        """Keep no more connections than `limit` requests can use at once; 0: only those in use."""
        ...
