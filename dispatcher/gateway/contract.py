"""The inference gateway as the dispatch loop uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dispatcher.common.value import Value
from dispatcher.requests.outcomes.outcome import Outcome
from dispatcher.requests.request import Request


class AnswerMemory(Protocol):
    """Memory that one answer occupies until the queue has confirmed its results."""

    def split_into(self, share_count: int) -> None:
        """Give the memory back after `share_count` calls of `free_share`. With 0, give it back at once."""
        ...

    def free_share(self) -> None:
        """Give up one share of the answer."""
        ...


class AttemptResult(Value, frozen=True):
    """Result of one attempt."""

    outcome: Outcome
    sent_at: float
    """Time at which the connection for the request was ready; `ended_at` if there was no connection."""
    ended_at: float
    connect_s: float | None = None
    """Seconds that opening the connection took. `None` if it was open before, or was never opened."""
    sticky_token: str = ""
    """Value of the answer's header `Affinity.token_header`. Empty if there is none, or none was asked for."""
    queued_s: float | None = None
    """Seconds that the request waited in the endpoint picker. `None` if the answer does not say."""
    memory: AnswerMemory | None = None
    """Memory that the answer occupies until its result is written. `None` if it is not counted."""


class Gateway(Protocol):
    """The inference gateway. One call of `forward` is one attempt."""

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: Callable[[], bool]
    ) -> AttemptResult:
        """Send the request once and return the outcome.

        `token` names this attempt and is never used again. `deadline` is the loop time at which the attempt
        ends in any case. `may_send` is called right before the first byte leaves, for each connection that is
        tried, because opening a connection may take long; if it returns False, the outcome is `Unsent`.

        Failures of the network or of a server never raise: they are an `Outcome`. Cancelling the call closes
        the connection, so that the gateway stops working on the request.
        """
        ...

    def get_connected_at(self, token: str) -> float | None:
        """Return the time since which a running attempt has a connection. `None` if it has no connection
        (yet)."""
        ...

    def resize_connection_pool(self, max_requests: int) -> None:
        """Keep at most as many idle connections as `max_requests` requests can use at once. With 0, keep only
        connections that are in use."""
        ...
