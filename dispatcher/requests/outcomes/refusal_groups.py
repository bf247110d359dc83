"""Requests that the gateway refuses regardless of free capacity: those with one fairness id, or single ones.

A gateway may refuse the requests of one user or team (a quota, an admission rule) while it accepts all
others, or refuse a request because of its content. Each such 429 closes the gate like any other, and the
backoff of the single request does not help if hundreds of them are first in the queue. Refusals are therefore
also counted by group: one per closure of the gate, and from zero again when a request of the group is
accepted.

    a fairness id  The group of requests that the gateway gets with the same fairness id. After MIN_CLOSURES
                   closures it rests for a time that doubles. Then one of its requests is tried, and its
                   others return unsent.
    the refused    All requests that were refused before form one more group, whatever fairness id they have,
                   if any. They give way to requests that were never refused, and a new fairness id each time
                   does not help them.
    all requests   After MIN_CLOSURES closures in a row while no request was accepted, and none from before is
                   at the gateway, at most MAX_TRIED_AT_ONCE requests are tried at a time, whatever the limit.
                   A refused one joins the refused, so every request that can be accepted is reached.

Refusals of a resting group do not count for the capacity, and neither do refusals while no request is
accepted: the cause was not a lack of capacity. A request that is tried and never ends (cancelled, its lease
lost) holds up the others of its group for MAX_REST_S. Requests without a fairness id form no group: all of
them would rest because of one, and most queues have no others.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

MIN_CLOSURES = 3
"""Number of closures of the gate by one group, without an accepted request in between, after which the group
rests."""
FIRST_REST_S = 1.0
MAX_REST_S = 16.0
MAX_TRIED_AT_ONCE = 8
"""Number of requests that are tried at a time while none is accepted."""
MAX_GROUPS = 4096
"""Maximum number of fairness ids that are remembered, because producers choose them. The ones refused longest
ago are dropped first, and then count only as part of the refused."""
_MAX_ID_CHARS = 64
"""Maximum length of a fairness id. A longer one is remembered by its digest."""


@dataclass(slots=True)
class _RefusalRecord:
    closures: int = 0
    first_refused_at: float = 0.0
    """Time of the first refusal in a row."""
    counted_read_at: float = float("-inf")
    """Time of the reading under which the newest counted refusal occurred."""
    rest_until: float = float("-inf")
    trial_until: float = float("-inf")
    """Time until which one request is on trial after a rest. No other request is sent before."""

    def record_refusal(self, now: float, read_at: float) -> bool:
        """Record a refusal. Return whether it says anything about the pool."""
        if not self.closures:
            self.first_refused_at = now
        self.trial_until = float("-inf")
        # Refusals under the same reading belong to the same closure of the gate, and count once.
        if read_at > self.counted_read_at:
            self.counted_read_at = read_at
            self.closures += 1
        excess = self.closures - MIN_CLOSURES
        if excess >= 0:
            self.rest_until = now + min(MAX_REST_S, FIRST_REST_S * 2.0 ** min(excess, 16))
        return excess < 0

    def compute_rest_s(self, now: float) -> float:
        if self.closures < MIN_CLOSURES:
            return 0.0
        if now < self.rest_until:
            return self.rest_until - now
        return min(FIRST_REST_S, self.trial_until - now) if now < self.trial_until else 0.0


class RefusalGroups:
    """Refusals by group of requests. `was_refused` says whether the request was refused before."""

    def __init__(self) -> None:
        self._by_fairness_id: dict[str, _RefusalRecord] = {}
        self._refused_before = _RefusalRecord()
        self._all_requests = _RefusalRecord()

    def record_refusal(
        self,
        fairness_id: str,
        now: float,
        read_at: float,
        *,
        was_refused: bool = False,
        is_alone: bool = False,
    ) -> bool:
        """Record that a request was refused under the reading of `read_at`. Return whether that says anything
        about the pool: False once its group is known to be refused on its own.

        `is_alone` is True if no batch request that was sent under an older reading is at the gateway.
        """
        if not is_alone:
            self._all_requests = _RefusalRecord()
        records = [self._all_requests] if is_alone else []
        records += [self._refused_before] if was_refused else []
        if fairness_id:
            key = _make_key(fairness_id)
            record = self._by_fairness_id.pop(key, None) or _RefusalRecord()
            self._by_fairness_id[key] = record  # the dict is ordered by refusal, newest last
            if len(self._by_fairness_id) > MAX_GROUPS:
                del self._by_fairness_id[next(iter(self._by_fairness_id))]
            records.append(record)
        informative = [record.record_refusal(now, read_at) for record in records]
        return all(informative)

    def record_acceptance(self, fairness_id: str, sent_at: float, *, was_refused: bool = False) -> None:
        """Record that a request sent at `sent_at` was answered."""
        if self._all_requests.closures and sent_at >= self._all_requests.first_refused_at:
            self._all_requests = _RefusalRecord()
        if was_refused and sent_at >= self._refused_before.first_refused_at:
            self._refused_before = _RefusalRecord()
        key = _make_key(fairness_id)
        record = self._by_fairness_id.get(key)
        if record is not None and sent_at >= record.first_refused_at:
            del self._by_fairness_id[key]

    def end_trial(self, fairness_id: str, *, was_refused: bool = False) -> None:
        """Record that a request ended neither refused nor answered, so that the next one may be tried."""
        for record in self._list_records(fairness_id, was_refused):
            record.trial_until = float("-inf")

    def admit_request(self, fairness_id: str, now: float, *, was_refused: bool = False) -> float:
        """Return how long a request must wait unsent. 0 admits it, and then the caller has to send it."""
        records = self._list_records(fairness_id, was_refused)
        if not records:
            return 0.0
        rest_s = max(each.compute_rest_s(now) for each in records)
        if rest_s <= 0:
            # The admitted request is the trial of each group that rested.
            for record in records:
                if record.closures >= MIN_CLOSURES:
                    record.trial_until = now + MAX_REST_S
        return rest_s

    @property
    def has_no_refusals(self) -> bool:
        """True if no group was refused. Every request may then be sent, and its answer changes nothing."""
        return not self._by_fairness_id and not self._all_requests.closures

    @property
    def max_tried_at_once(self) -> int | None:
        """Maximum number of requests that may be tried at a time. `None` for as many as the limit allows."""
        return MAX_TRIED_AT_ONCE if self._all_requests.closures >= MIN_CLOSURES else None

    def _list_records(self, fairness_id: str, was_refused: bool) -> list[_RefusalRecord]:
        records = [self._refused_before] if was_refused else []
        if (record := self._by_fairness_id.get(_make_key(fairness_id))) is not None:
            records.append(record)
        return records


def _make_key(fairness_id: str) -> str:
    if len(fairness_id) <= _MAX_ID_CHARS:
        return fairness_id
    return "\0" + blake2b(fairness_id.encode(errors="surrogatepass")).hexdigest()
