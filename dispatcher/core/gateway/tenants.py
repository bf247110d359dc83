"""Requests that are refused whatever the pool has room for: a tenant's, or single ones. Pure.

A gateway may refuse one tenant's requests (a quota, an admission rule) while it takes all others', or a
request for what it asks. Each such 429 closes the gate, as any does, and its request's own backoff is no help
where there are hundreds of them at the head of the queue. So refusals are also counted by standing: once per
closure of the gate, from zero again with each request of that standing that is accepted.

    a tenant     by the name that its requests bear. From the REST_FROM-th closure on it rests, for a time
                 that doubles, and then one of its requests is tried; its others go back to the queue unsent.
    the refused  all requests that were refused before have one more standing together, whatever tenant they
                 name, or none. So they yield to those that never were, and naming a new one each time helps
                 nobody.
    all of us    where REST_FROM closures came in a row and nothing of ours was accepted, or is at the gateway
                 from before, at most SIFTED are tried at a time, whatever the limit. Who is refused by this
                 joins the refused, and so whoever can be served is come to, however many stand before.

Whoever rests teaches nothing of the capacity, nor does anybody while nothing of ours is accepted: it was not
room that it lacked. One that is tried and never heard of again (cancelled, its lease lost) holds the others
of its standing up for REST_MOST_S. Requests that name no tenant have no standing as such: they would all
rest for one of them, and in most queues there are no others.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

REST_FROM = 3
"""Closures of the gate by one standing, none of its requests accepted between, until it rests."""
REST_FIRST_S = 1.0
REST_MOST_S = 16.0
SIFTED = 8
"""As many are tried at a time while nothing of ours is accepted."""
KEPT = 4096
"""Tenants remembered at the most: their names come from producers. Those refused longest ago go first, and
then have the standing of the refused alone."""
_NAME_CHARS = 64
"""A longer name is remembered by its digest."""


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

    def refused(self, now: float, read_at: float) -> bool:
        """Whether that says anything about the pool."""
        if not self.closures:
            self.since = now
        self.tried_until = float("-inf")
        if read_at > self.closed_by:
            self.closed_by = read_at
            self.closures += 1
        over = self.closures - REST_FROM
        if over >= 0:
            self.rests_until = now + min(REST_MOST_S, REST_FIRST_S * 2.0 ** min(over, 16))
        return over < 0

    def rest_s(self, now: float) -> float:
        if self.closures < REST_FROM:
            return 0.0
        if now < self.rests_until:
            return self.rests_until - now
        return min(REST_FIRST_S, self.tried_until - now) if now < self.tried_until else 0.0


class Tenants:
    """Who rests, and until when. `again`: the request was refused before."""

    def __init__(self) -> None:
        self._standing: dict[str, _Standing] = {}
        self._refused = _Standing()
        self._all = _Standing()

    def refused(
        self, tenant: str, now: float, read_at: float, *, again: bool = False, alone: bool = False
    ) -> bool:
        """A request was refused, under the reading of `read_at`. Whether that says anything about the pool:
        False once it is known to be refused on its own.

        `alone`: nothing of ours that was sent under an older reading is at the gateway.
        """
        if not alone:
            self._all = _Standing()
        standings = [self._all] if alone else []
        standings += [self._refused] if again else []
        if tenant:
            key = _key(tenant)
            standing = self._standing.pop(key, None) or _Standing()
            self._standing[key] = standing  # newest last
            if len(self._standing) > KEPT:
                del self._standing[next(iter(self._standing))]
            standings.append(standing)
        told = [standing.refused(now, read_at) for standing in standings]
        return all(told)

    def accepted(self, tenant: str, sent_at: float, *, again: bool = False) -> None:
        """A request, sent at `sent_at`, was answered."""
        if self._all.closures and sent_at >= self._all.since:
            self._all = _Standing()
        if again and sent_at >= self._refused.since:
            self._refused = _Standing()
        key = _key(tenant)
        standing = self._standing.get(key)
        if standing is not None and sent_at >= standing.since:
            del self._standing[key]

    def ended(self, tenant: str, *, again: bool = False) -> None:
        """A request came back with neither: the next one may try."""
        for standing in self._standings(tenant, again):
            standing.tried_until = float("-inf")

    def rest_s(self, tenant: str, now: float, *, again: bool = False) -> float:
        """How long a request must wait unsent; 0: it may go, and does."""
        standings = self._standings(tenant, again)
        if not standings:
            return 0.0
        rest_s = max(each.rest_s(now) for each in standings)
        if rest_s <= 0:
            for standing in standings:
                if standing.closures >= REST_FROM:
                    standing.tried_until = now + REST_MOST_S
        return rest_s

    @property
    def calm(self) -> bool:
        """Nobody is known to have been refused: who was not goes, and an answer to it changes nothing."""
        return not self._standing and not self._all.closures

    @property
    def at_once(self) -> int | None:
        """How many may be tried at a time; None: as many as there is room for."""
        return SIFTED if self._all.closures >= REST_FROM else None

    def _standings(self, tenant: str, again: bool) -> list[_Standing]:
        standings = [self._refused] if again else []
        if (standing := self._standing.get(_key(tenant))) is not None:
            standings.append(standing)
        return standings


def _key(tenant: str) -> str:
    if len(tenant) <= _NAME_CHARS:
        return tenant
    return "\0" + blake2b(tenant.encode(errors="surrogatepass")).hexdigest()
