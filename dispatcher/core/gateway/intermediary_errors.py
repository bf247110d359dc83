"""Requests that were answered as if there were no gateway: is it the gateway's fault, or their own? Pure.

One such answer cannot tell. What follows it can: where another request, sent after it, was answered, there
was a gateway, and the try is charged to the request when it bounces again. Where nothing got through since,
nobody is blamed, however often it happens: a gateway that is away for an hour costs no request anything.

    charges   the first FREE are forgiven, for an endpoint that has died among several does the same to
              anybody; then each bounce costs an attempt
    rest      while there is no gateway, who has bounced makes way for the others that wait, and so each
              probe is of another request: whoever can get through comes to it, however many stand before.
              The rest grows with the time that nobody got through, and so does the number of requests that
              are tried in turn. In the queue it lies for DELAY_MOST_S at most, so that none is late when
              the gateway returns; whoever is claimed before it has rested goes back unsent.

Kept in memory: another replica, or a restart, begins to count anew; attempts are counted in the queue.
"""

from __future__ import annotations

from dataclasses import dataclass

from dispatcher.core.gateway.outcome import RetryPolicy

FREE = 5
"""So many charges cost no attempt."""
REST_LEAST_S = 10.0
RESTS_PER_S = 2.0
"""Rest for each second that nobody got through: two thirds of all probes are of requests not tried yet."""
TRY_MOST_S = 2.0
"""Whoever probes hears of it at least so often: a pause of a second, and an answer that takes no longer."""
DELAY_MOST_S = 30.0
SLOW_S = 1.0
"""Who held a slot for so long without an answer of use waits as long before it takes one again."""
KEPT = 8192
"""Requests remembered at the most."""


@dataclass(slots=True)
class _Record:
    at: float = 0.0
    """When it bounced last."""
    times: int = 0
    charges: int = 0
    rests_until: float = float("-inf")


class Bounces:
    """What is known of each request that has bounced, by its entry in the queue."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        self._answered_sent_at = float("-inf")
        """When the newest request that got an answer of a gateway was sent."""
        self._trouble = (float("-inf"), float("-inf"), 0.0)
        """Since when there is no gateway, when one bounced last, and for how long we tried: what another
        replica did meanwhile, which may have got through, is not in it."""

    def answered(self, entry: int, sent_at: float) -> None:
        """A request that was sent at `sent_at` got an answer that only a gateway gives."""
        self._answered_sent_at = max(self._answered_sent_at, sent_at)
        self._records.pop(entry, None)

    def bounced(self, entry: int, now: float) -> bool:
        """A request got an answer that no gateway gave. True: it did before, and others were answered after
        it, too often for it to be anybody's fault but its own."""
        record = self._records.pop(entry, None) or _Record()
        self._records[entry] = record  # newest last
        if len(self._records) > KEPT:
            del self._records[next(iter(self._records))]
        if record.times and self._answered_sent_at >= record.at:
            record.charges += 1
        record.at = now
        record.times += 1
        return record.charges > FREE

    def again_s(self, entry: int, took_s: float, policy: RetryPolicy) -> float:
        """After how long it is sent again while there is a gateway: at once the first time, when it may meet
        an endpoint that lives, then later each time."""
        times = self._records[entry].times
        again_s = min(policy.max_s, policy.base_s * 2.0 ** min(times - 2, 64)) if times > 1 else 0.0
        return max(again_s, min(took_s, DELAY_MOST_S)) if took_s >= SLOW_S else again_s

    def make_way(self, entry: int, now: float, *, since: float, left_s: float) -> float:
        """How long it lies aside for the others, as there is no gateway `since` then. `left_s`: to its
        deadline, of which it never rests for more than half."""
        record = self._records[entry]
        began_at, last_at, tried_s = self._trouble
        if began_at != since:
            last_at, tried_s = since, 0.0
        tried_s += min(now - last_at, TRY_MOST_S)
        self._trouble = since, now, tried_s
        record.rests_until = now + min(max(REST_LEAST_S, RESTS_PER_S * tried_s), max(0.0, left_s) / 2)
        return self.rest_s(entry, now)

    def rest_s(self, entry: int, now: float) -> float:
        """How long it ought to lie aside from now on, while there is no gateway and others wait; 0: it may
        probe."""
        record = self._records.get(entry)
        return 0.0 if record is None else min(DELAY_MOST_S, max(0.0, record.rests_until - now))
