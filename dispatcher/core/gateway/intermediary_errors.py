"""Intermediary errors (responses without gateway headers) per request: is the gateway at fault, or the
request?

One such response cannot tell. Later responses can: if another request, sent after it, was answered, there was
a gateway, and the request is charged when it gets such a response again. If no request got through since, no
request is charged, however often it happens: a gateway outage of an hour costs no request an attempt.

    charges   The first FREE_CHARGES cost nothing, because a dead endpoint among several does the same to any
              request. After that, each intermediary error counts as a failed attempt.
    rest      While there is no gateway, requests with such errors give way to the others that wait, so that
              each probe is a different request, and a request that can get through is reached however many
              are ahead of it. The rest time grows with the duration of the outage, and with it the number of
              requests that are tried in turn. A request stays delayed in the queue for MAX_DELAY_S at most,
              so that it is sent soon after the gateway is back; if it is claimed while it still has to rest,
              it is returned unsent.

The records are kept in memory: another replica, or a restart, begins to count anew. Failed attempts are
counted in the queue.
"""

from __future__ import annotations

from dataclasses import dataclass

from dispatcher.core.gateway.outcome import RetryPolicy

FREE_CHARGES = 5
"""Number of charges that cost no failed attempt."""
MIN_REST_S = 10.0
REST_PER_SECOND = 2.0
"""Rest time per second without a success. At this rate, two thirds of all probes are requests that were not
tried before."""
MAX_PROBE_INTERVAL_S = 2.0
"""Maximum time that one probe adds to the outage: a pause of a second, and a response that takes as long."""
MAX_DELAY_S = 30.0
SLOW_ANSWER_S = 1.0
"""Time from which a request that held a slot without a useful answer has to wait as long before it takes one
again."""
MAX_RECORDS = 8192
"""Maximum number of requests that are remembered."""


@dataclass(slots=True)
class _Record:
    last_error_at: float = 0.0
    """Time of the newest error."""
    error_count: int = 0
    charges: int = 0
    rest_until: float = float("-inf")


class IntermediaryErrors:
    """Record of each request that got an intermediary error, by its entry in the queue."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        self._answered_sent_at = float("-inf")
        """Time at which the newest request was sent that the gateway answered."""
        self._outage = (float("-inf"), float("-inf"), 0.0)
        """Start of the outage, time of the newest error in it, and the time for which this process probed.
        Probes of other replicas, which may have got through, are not included."""

    def record_answer(self, entry: int, sent_at: float) -> None:
        """Record that a request sent at `sent_at` got an answer that only a gateway gives."""
        self._answered_sent_at = max(self._answered_sent_at, sent_at)
        self._records.pop(entry, None)

    def record_error(self, entry: int, now: float) -> bool:
        """Record an intermediary error. Return True if the request got one before and others were answered
        since, too often for the gateway to be at fault."""
        record = self._records.pop(entry, None) or _Record()
        self._records[entry] = record  # newest last
        if len(self._records) > MAX_RECORDS:
            del self._records[next(iter(self._records))]
        # A request that was sent after the last error got through, so there was a gateway in between.
        if record.error_count and self._answered_sent_at >= record.last_error_at:
            record.charges += 1
        record.last_error_at = now
        record.error_count += 1
        return record.charges > FREE_CHARGES

    def compute_retry_delay_s(self, entry: int, took_s: float, policy: RetryPolicy) -> float:
        """Return after how many seconds the request is sent again while there is a gateway: at once the first
        time, because it may reach another endpoint, then later each time."""
        times = self._records[entry].error_count
        again_s = min(policy.max_s, policy.base_s * 2.0 ** min(times - 2, 64)) if times > 1 else 0.0
        # A slow failure held a slot for `took_s`, so the request gives it to others for as long.
        return max(again_s, min(took_s, MAX_DELAY_S)) if took_s >= SLOW_ANSWER_S else again_s

    def set_aside(self, entry: int, now: float, *, since: float, time_left_s: float) -> float:
        """Return for how long the request gives way to others in the outage that began at `since`. It never
        rests for more than half of `time_left_s`, the time until its deadline."""
        record = self._records[entry]
        began_at, last_at, tried_s = self._outage
        # This is a new outage, so the time without success starts again.
        if began_at != since:
            last_at, tried_s = since, 0.0
        tried_s += min(now - last_at, MAX_PROBE_INTERVAL_S)
        self._outage = since, now, tried_s
        record.rest_until = now + min(max(MIN_REST_S, REST_PER_SECOND * tried_s), max(0.0, time_left_s) / 2)
        return self.compute_rest_s(entry, now)

    def compute_rest_s(self, entry: int, now: float) -> float:
        """Return for how long the request has to rest from now on, while there is no gateway and others wait.
        0 if it may probe."""
        record = self._records.get(entry)
        return 0.0 if record is None else min(MAX_DELAY_S, max(0.0, record.rest_until - now))
