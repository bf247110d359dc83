"""The queue as producers and operators use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from dispatcher.queue.keys import CLOSED_LANES
from dispatcher.requests.found_request import CLAIMABLE_LOCATIONS, FoundRequest, LookupPage, SearchTerms
from dispatcher.requests.queue_counts import QueueCounts
from dispatcher.requests.submission import Submission

WAITING_LOCATIONS = (*CLAIMABLE_LOCATIONS, *CLOSED_LANES)
"""Locations of requests that wait in the queue."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DeadRequest:
    """A request in the dead-letter set."""

    entry_id: int
    member: bytes
    score: float
    reason: str
    died_at: float
    """Unix seconds."""
    deliveries: int
    failed_attempts: int
    refusals: int
    deaths_as_suspect: int


class QueueAdmin(Protocol):
    """The queue as producers and operators use it. Every method raises QueueUnavailableError like `Queue`."""

    def open_calls(self, calls: Callable[[Any], T]) -> T:
        """Return the calls that a feature adds to the queue."""
        ...

    async def submit(self, submissions: Sequence[Submission]) -> int:
        """Add the requests to the queue and wake the dispatchers. Return how many were not pending yet."""
        ...

    async def cancel_request(
        self, request_id: str, request_token: str = "", *, is_token_known: bool = False
    ) -> bool:
        """Cancel the requests with this id, or only the one with this token. Return False if there is none.

        Set `is_token_known` if the token was read from the request in the queue. It then counts for every
        producer.
        """
        ...

    async def pause(self, who: str, why: str) -> None:
        """Stop all claims until `resume`."""
        ...

    async def resume(self) -> None:
        """Allow claims again."""
        ...

    async def read_pause(self) -> tuple[str, str] | None:
        """Return who paused the queue and why. `None` if it is not paused."""
        ...

    async def peek_next(self, max_count: int) -> Sequence[tuple[float, bytes]]:
        """Return score and member of the next requests to be claimed, in order. Requests in lanes are
        included, except for closed lanes."""
        ...

    async def list_requests(
        self, state: str, max_count: int, after: str = "", *, full_members: bool = False
    ) -> LookupPage:
        """Return a page of the requests in one location, in order.

        Pages are numbered by rank, so requests that leave meanwhile shift the next page. With `full_members`,
        long members are returned with all bytes.
        """
        ...

    async def find_by_id(self, request_id: str, after: str = "") -> LookupPage:
        """Return a page of the requests with this id that can be found cheaply: those of our client, and
        leased ones."""
        ...

    async def search_requests(
        self, terms: SearchTerms, after: str = "", *, entries_only: bool = False, full_members: bool = False
    ) -> LookupPage:
        """Return a page of a walk over all requests, or with `entries_only` over those that were claimed at
        least once.

        A request matches if it contains one spelling of each term. A request that is in the queue during the
        whole walk is found; some are returned twice. `full_members` as in `list_requests`.
        """
        ...

    async def count_ahead(self, request: FoundRequest) -> int | None:
        """Return the number of requests ahead of this one. `None` if it does not wait there (any more)."""
        ...

    async def restore_requests(self, queue: str, requests: Sequence[FoundRequest]) -> int:
        """Take over requests that were found in the other `queue` and are not leased, each in the place where
        it was stored. Return how many are new.

        Each request is taken over once in a week, however often it is passed in.
        """
        ...

    async def read_results(self, name: str, max_count: int, after: int = 0) -> Sequence[bytes]:
        """Return the results of a list after the first `after`, oldest first, up to about 1 MB. Nothing is
        removed."""
        ...

    async def take_result(self, name: str, result: bytes) -> bool:
        """Remove the oldest result that equals `result`. Return False if there is none."""
        ...

    async def count_requests(self) -> QueueCounts:
        """Return the number of requests by where they are."""
        ...

    async def list_dead(self, max_count: int, after: int = 0) -> Sequence[DeadRequest]:
        """Return dead requests with an entry id above `after`, in order of their ids."""
        ...

    async def list_newest_dead(self, max_count: int) -> Sequence[DeadRequest]:
        """Return the dead requests with the highest entry ids, highest first."""
        ...

    async def requeue_dead(self, entry_ids: Sequence[int], deadline: int) -> int:
        """Accept dead requests again with this deadline, which is written to member and score; the priority
        is kept. Return how many were accepted."""
        ...

    async def purge_dead(self, entry_ids: Sequence[int] | None = None) -> int:
        """Delete dead requests, or all of them with `None`. Return how many were deleted."""
        ...
