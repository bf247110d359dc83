"""Requests that the gateway refuses regardless of free capacity: those of one tenant, or single ones.

A gateway may refuse the requests of one tenant (a quota, an admission rule) while it accepts all others, or
refuse a request because of its content. Each such 429 closes the gate like any other, and the backoff of the
single request does not help if hundreds of them are first in the queue. Refusals are therefore also counted
by group: one per closure of the gate, and from zero again when a request of the group is accepted.

    a tenant       The group of requests with the same tenant name. After MIN_CLOSURES closures it rests for a
                   time that doubles. Then one of its requests is tried, and its others return unsent.
    the refused    All requests that were refused before form one more group, whatever tenant they name, if
                   any. They give way to requests that were never refused, and a new tenant name each time
                   does not help them.
    all requests   After MIN_CLOSURES closures in a row while no request was accepted, and none from before is
                   at the gateway, at most MAX_TRIED_AT_ONCE requests are tried at a time, whatever the limit.
                   A refused one joins the refused, so every request that can be accepted is reached.

Refusals of a resting group do not count for the capacity, and neither do refusals while no request is
accepted: the cause was not a lack of capacity. A request that is tried and never ends (cancelled, its lease
lost) holds up the others of its group for MAX_REST_S. Requests without a tenant name form no group: all of
them would rest because of one, and most queues have no others.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

REST_FROM = 3
"""Number of closures of the gate by one group, without an accepted request in between, after which the group
rests."""
REST_FIRST_S = 1.0
REST_MOST_S = 16.0
SIFTED = 8
"""Number of requests that are tried at a time while none is accepted."""
KEPT = 4096
"""Maximum number of tenants that are remembered, because producers choose the names. The ones refused longest
ago are dropped first, and then count only as part of the refused."""
_NAME_CHARS = 64
"""Maximum length of a tenant name. A longer one is remembered by its digest."""


@dataclass(slots=True)
class _Standing:
    closures: int = 0
    since: float = 0.0
    """Time of the first refusal in a row."""
    closed_by: float = float("-inf")
    """Time of the reading under which the newest counted refusal occurred."""
    rests_until: float = float("-inf")
    tried_until: float = float("-inf")
    """Time until which one request is on trial after a rest. No other request is sent before."""

    def refused(self, now: float, read_at: float) -> bool:
        """Record a refusal. Return whether it says anything about the pool."""
        if not self.closures:
            self.since = now
        self.tried_until = float("-inf")
        # Refusals under the same reading belong to the same closure of the gate, and count once.
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
    """Refusals by group of requests. `was_refused` says whether the request was refused before."""

    def __init__(self) -> None:
        self._standing: dict[str, _Standing] = {}
        self._refused = _Standing()
        self._all = _Standing()

    def refused(
        self, tenant: str, now: float, read_at: float, *, again: bool = False, alone: bool = False
    ) -> bool:
        """Record that a request was refused under the reading of `read_at`. Return whether that says anything
        about the pool: False once its group is known to be refused on its own.

        `is_alone` is True if no batch request that was sent under an older reading is at the gateway.
        """
        if not alone:
            self._all = _Standing()
        standings = [self._all] if alone else []
        standings += [self._refused] if again else []
        if tenant:
            key = _key(tenant)
            standing = self._standing.pop(key, None) or _Standing()
            self._standing[key] = standing  # the dict is ordered by refusal, newest last
            if len(self._standing) > KEPT:
                del self._standing[next(iter(self._standing))]
            standings.append(standing)
        told = [standing.refused(now, read_at) for standing in standings]
        return all(told)

    def accepted(self, tenant: str, sent_at: float, *, again: bool = False) -> None:
        """Record that a request sent at `sent_at` was answered."""
        if self._all.closures and sent_at >= self._all.since:
            self._all = _Standing()
        if again and sent_at >= self._refused.since:
            self._refused = _Standing()
        key = _key(tenant)
        standing = self._standing.get(key)
        if standing is not None and sent_at >= standing.since:
            del self._standing[key]

    def ended(self, tenant: str, *, again: bool = False) -> None:
        """Record that a request ended neither refused nor answered, so that the next one may be tried."""
        for standing in self._standings(tenant, again):
            standing.tried_until = float("-inf")

    def rest_s(self, tenant: str, now: float, *, again: bool = False) -> float:
        """Return how long a request must wait unsent. 0 admits it, and then the caller has to send it."""
        standings = self._standings(tenant, again)
        if not standings:
            return 0.0
        rest_s = max(each.rest_s(now) for each in standings)
        if rest_s <= 0:
            # The admitted request is the trial of each group that rested.
            for standing in standings:
                if standing.closures >= REST_FROM:
                    standing.tried_until = now + REST_MOST_S
        return rest_s

    @property
    def calm(self) -> bool:
        """True if no group was refused. Every request may then be sent, and its answer changes nothing."""
        return not self._standing and not self._all.closures

    @property
    def at_once(self) -> int | None:
        """Maximum number of requests that may be tried at a time. `None` for as many as the limit allows."""
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
