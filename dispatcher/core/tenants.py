"""Tenants whose requests are refused whatever the pool has room for.

A gateway may refuse one tenant's requests (a quota, an admission rule) while it takes all others'. Each such
429 closes the gate, as any does, and its request's own backoff is no help where the tenant has thousands of
them at the head of the queue. So refusals are also counted by tenant: once per closure of the gate, from
zero again with each request of the tenant that is accepted. From the REST_FROM-th on the tenant rests, for
a time that doubles, and then one of its requests is tried; its others go back to the queue unsent meanwhile.
One that is tried and never heard of again (cancelled, its lease lost) holds the others up for REST_MOST_S.
A tenant at rest teaches no ceiling: nothing of ours was accepted from it for several readings, so the room
was not what it lacked.

Requests that name no tenant have no standing: they never rest, and each refusal teaches.
"""

from __future__ import annotations

from dataclasses import dataclass

REST_FROM = 3
"""Closures of the gate by one tenant, none of its requests accepted between, until it rests."""
REST_FIRST_S = 1.0
REST_MOST_S = 16.0
KEPT = 4096
"""Tenants remembered at the most: their names come from producers."""


@dataclass(slots=True)
class _Standing:
    closures: int = 0
    since: float = 0.0
    """When the first refusal of the run came."""
    closed_by: float = float("-inf")
    """The reading that the newest counted refusal fell under."""
    rests_until: float = float("-inf")
    tried_until: float = float("-inf")
    """After a rest one request is out to see: no other goes before this."""


class Tenants:
    """Who rests, and until when."""

    def __init__(self) -> None:
        self._standing: dict[str, _Standing] = {}

    def refused(self, tenant: str, now: float, read_at: float) -> bool:
        """A request of the tenant was refused, under the reading of `read_at`. Whether that says anything
        about the pool: False once the tenant is known to be refused on its own."""
        if not tenant:
            return True
        standing = self._standing.pop(tenant, None) or _Standing(since=now)
        self._standing[tenant] = standing  # newest last
        if len(self._standing) > KEPT:
            del self._standing[next(iter(self._standing))]
        standing.tried_until = float("-inf")
        if read_at > standing.closed_by:
            standing.closed_by = read_at
            standing.closures += 1
        over = standing.closures - REST_FROM
        if over >= 0:
            standing.rests_until = now + min(REST_MOST_S, REST_FIRST_S * 2.0 ** min(over, 16))
        return over < 0

    def accepted(self, tenant: str, sent_at: float) -> None:
        """A request of the tenant, sent at `sent_at`, was answered."""
        standing = self._standing.get(tenant)
        if standing is not None and sent_at >= standing.since:
            del self._standing[tenant]

    def ended(self, tenant: str) -> None:
        """A request of the tenant came back with neither: the next one may try."""
        standing = self._standing.get(tenant)
        if standing is not None:
            standing.tried_until = float("-inf")

    def rest_s(self, tenant: str, now: float) -> float:
        """How long a request of the tenant must wait unsent; 0: it may go, and does."""
        standing = self._standing.get(tenant)
        if standing is None or standing.closures < REST_FROM:
            return 0.0
        if now < standing.rests_until:
            return standing.rests_until - now
        if now < standing.tried_until:
            return min(REST_FIRST_S, standing.tried_until - now)
        standing.tried_until = now + REST_MOST_S
        return 0.0
