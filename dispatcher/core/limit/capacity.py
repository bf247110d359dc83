"""How many requests the pool runs at once, learned from what readings show. Pure.

The estimate is kept as a share of the configured capacity, so that it still fits when endpoints come and go.
Where the configuration or the endpoint picker names the capacity, the estimate starts there and never exceeds
it. Where nobody names it, `configured` is a small number of requests per endpoint to start with, and the
estimate has no upper bound: it grows as far as readings prove room.

Growth. Requests that run while nobody waits prove room for themselves. The next estimate lets GROWTH times as
many run.

Ceiling. Requests that wait while others run show the capacity itself: it is what runs. The estimate falls to
it. What waits in a model server does not run, and what ran earlier does not keep the estimate up. A few
requests may wait for one endpoint while another is free, so a known capacity is doubted only from CROWD on.

Probe. A ceiling can be wrong or outdated. After a hold without anybody waiting, the estimate exceeds it by
PROBE. If more then runs with nobody waiting, the next probe exceeds it by twice as much, and after CLIMBS of
them the ceiling is dropped. If somebody waits, the ceiling stands, and the next hold is twice as long.

Refusal. The first reading after a refusal judges it (until then the gate is closed). If it shows a full pool
or somebody waiting, that explains the refusal. Otherwise FITTED of what was there becomes the ceiling, but no
less than what ran lately with nobody waiting, and no less than β of the estimate: a request may be refused
however much room there is.

Bounds, with `beat` for the time between two readings that show something new (FLUSH_S for averages): a
growing estimate lets at most GROWTH times the true capacity run, or one request more than it. It reaches m
times what runs in ln(m) / ln(GROWTH) + 2 beats. A ceiling that is too low delays that by its hold and CLIMBS
beats.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from dispatcher.core.limit.budget import MOST_IN_FLIGHT, SLACK
from dispatcher.core.limit.picker_inference import FLUSH_S

GROWTH = 1.24
"""Factor by which more requests may run than ran with nobody waiting."""
GROWTH_LIVE, LIVE_S = 1.16, 2.0
"""GROWTH if a beat takes no longer than LIVE_S: there are more steps then, and they are smaller."""
GROWTH_REALTIME = 1.1
"""GROWTH for requests that are not ours: realtime requests that fill most of a pool leave little room."""
GROWTH_CAREFUL, LONG_S = 1.04, 10.0
"""GROWTH_REALTIME if a beat takes no longer than LIVE_S, and if our requests take longer than LONG_S or none
has been answered yet. If too many requests are sent then, they hold their slots for long."""
PROBE, CLIMBS = 0.04, 3
"""Share of the ceiling by which the first probe exceeds it (one request at least); each further one that
follows a success exceeds it by twice as much, and after CLIMBS successes the ceiling is dropped."""
HOLD_S, HOLD_MOST_S = 10.0, 120.0
"""Seconds without anybody waiting before a ceiling is probed: for a new one, and at the most."""
HOLD_BEATS, HOLD_TOOK, HOLD_MOST = 4.0, 1.0, 24.0
"""The first hold in beats, and in the time that a request of ours takes, for so long a failed probe holds
slots; and the longest hold in either. The largest number of seconds counts."""
BEAT_MOST_S = 60.0
SAME = 0.1
"""A ceiling within this share of the previous one confirms it."""
RIGHT = 0.97
"""A pool that runs this share of a known capacity has that capacity."""
LATELY_S, LATELY_BEATS, LATELY_MOST_S = 30.0, 30.0, 450.0
"""For so long, in seconds and in beats, a number of requests that ran with nobody waiting bounds what a
refusal can teach."""
LEAST = 0.001
"""The smallest share: the estimate has to recover from it in time."""
ONE_WAITS = 0.5
"""Requests from which on somebody waits; the mean of several samples need not be whole."""
FEW = 0.01
"""Waiting requests up to this share of the running ones do not count: they wait for the server's next
step."""
FITTED = 0.9
"""Share of the requests that were there at a refusal that ran; the others waited."""
CROWD, CROWD_TOGETHER = 0.1, 0.4
"""Waiting requests as a share of the running ones: a known capacity is doubted from CROWD on, in readings in
a row whose shares add up to CROWD_TOGETHER."""
AGAIN, AGAIN_TOGETHER = 0.03, 0.08
"""The same two where a ceiling is known, a request was refused, or the capacity is not known."""
ROW = 3
"""Readings in a row whose largest number of running requests is the ceiling."""

LONGEST_ROW = 30
"""Readings with a crowd in a row that are remembered."""


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Requests that ran, and those that waited meanwhile."""

    running: float
    waiting: float
    surely_running: float
    """The part of `running` that certainly ran. It is less where `waiting` was counted before `running`, so
    that requests which came in between may be waiting."""
    steady: bool = True
    """The counts hardly changed lately, so that they fit together although they are of different moments."""
    exact: bool = True
    """Both were counted at the same moment."""
    in_picker: bool = False
    """All that wait do so in the picker, which counts them together with what it sent."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What one sample shows of the whole pool, in requests."""

    at: float
    """When the sample was taken."""
    configured: float
    """The capacity that the configuration or the picker names, else the number to start with."""
    known: bool
    """Whether `configured` is the capacity; otherwise it is only where the search starts."""
    realtime: float
    """Requests in the pool, running or waiting, that are not ours."""
    now: PoolCounts | None = None
    """Counts of the sample's moment. `None` if running and waiting requests cannot be told apart then."""
    averages: PoolCounts | None = None
    """The picker's averages, which are of its last flush, and which other samples show as well."""
    waiting: float = 0.0
    """Requests that are known to wait at the sample's moment, in the picker at least."""
    took_s: float = 0.0
    """How long our requests take, on average."""


@dataclass(slots=True)
class Capacity:
    """The estimate, and what it is made of. All requests are shares of the configured capacity."""

    share: float | None = None
    """The estimate. `None` if it is a known capacity and nothing else was learned."""
    ceiling: float | None = None
    """Requests that ran while others waited. `None` if no request was seen waiting, or the ceiling was
    disproved."""
    confirmed: int = 0
    """Number of times in a row that the ceiling was measured, by probes that failed."""
    _known: bool | None = None
    """Whether the capacity was known at the last reading. `None` before the first one."""
    _configured: float = 0.0
    """The configured capacity at the last reading."""
    _probing: bool = False
    """The estimate exceeds the ceiling."""
    _climbs: int = 0
    """Probes in a row that succeeded."""
    _above: int = 0
    """Readings in a row in which more than the ceiling ran with nobody waiting."""
    _quiet_since: float = float("-inf")
    """When somebody waited last, or the ceiling was measured."""
    _beat_s: float = 1.0
    """Time between the last two readings that showed something new."""
    _took_s: float = 0.0
    """How long our requests take, by the newest reading."""
    _seen_at: float | None = None
    _ran: deque[tuple[float, float]] = field(default_factory=deque)
    """When how much ran with nobody waiting, lately."""
    _crowds: list[tuple[float, float]] = field(default_factory=list)
    """For each reading in a row with a crowd: what ran, and how many waited as a share of that."""
    _flush: tuple[float, PoolCounts] | None = None
    """The averages of the newest flush, and when they were seen first."""
    _realtime: float | None = None
    """Requests that are not ours, as the newest reading showed them."""
    _ours: int | None = None
    """The most requests of ours in flight at a refusal that is not judged yet."""
    _turned_away: int = 0
    """How many of those were refused themselves."""

    def refused(self, ours: int, *, known: bool = False, heard: bool = False) -> None:
        """Note a refusal for lack of capacity with `ours` in flight, those that are refused with it included.

        Requests that are refused together count each other out one by one, and replicas do not know the
        newest of each other: of several refusals under one reading the largest number is the truth.
        `known`: of a time when another was. `heard`: another replica's, so none of those counted here.
        """
        if (known and self._ours is None) or self._realtime is None:
            return  # judged before, or of before anything was known of the pool
        self._ours = max(self._ours or 0, ours)
        self._turned_away += 0 if heard else 1

    def reading(self, sight: Sight, *, reserve: float, backoff: float) -> None:
        """Learn from a sample that was acted upon, taken after the newest refusal.

        `reserve`: the share of the pool that batch work never takes. `backoff`: β.
        """
        self._follow(sight)
        before, self._realtime = self._realtime, sight.realtime
        ours, self._ours = self._ours, None
        refused, now, flush = ours is not None, sight.now, self._new_averages(sight)
        if now is None and flush is None and sight.averages is not None and not refused:
            return  # another sample has shown these averages
        turned_away, self._turned_away = self._turned_away, 0
        if self._seen_at is not None:
            self._beat_s = min(max(sight.at - self._seen_at, 0.0), BEAT_MOST_S)
        self._seen_at, self._took_s = sight.at, min(sight.took_s, BEAT_MOST_S)
        most = max((each.surely_running for each in (now, flush) if each is not None), default=0.0)
        if sight.known and most >= RIGHT * sight.configured:
            self._remember(sight.at, most / sight.configured)
            self._crowds.clear()
            self._forget()
            return
        # Counts of different moments scatter, so that they show a crowd only where there are no averages.
        fits = now is not None and (now.exact or now.in_picker or sight.averages is None)
        witness = now if fits else flush
        if witness is not None and self._shows_crowd(witness, sight, refused=refused):
            return
        if self._somebody_waits(sight, now or flush):
            return
        surely = self._surely(sight, now, flush)
        if surely is not None:
            self._remember(sight.at, surely)
        if ours is not None:
            fitted = FITTED * (max(0, ours - turned_away) + max(before or 0.0, sight.realtime))
            share = 1.0 if self.share is None else self.share
            self._quiet_since = sight.at
            self._measured(min(share, max(fitted / sight.configured, self._lately, backoff * share)))
        elif self.share is not None:
            self._nobody_waits(sight, surely, witness, reserve)

    @property
    def hold_s(self) -> float:
        """Seconds without anybody waiting before the ceiling is probed."""
        first = max(HOLD_S, HOLD_BEATS * self._beat_s, HOLD_TOOK * self._took_s)
        most = max(HOLD_MOST_S, HOLD_MOST * self._beat_s, HOLD_MOST * self._took_s)
        return min(first * 2.0 ** min(max(0, self.confirmed - 1), 16), most)

    def _follow(self, sight: Sight) -> None:
        """Take over what the sample says about the configured capacity."""
        if self._known is not sight.known:
            scale = self._configured / sight.configured
            ceiling = None if self.ceiling is None else self.ceiling * scale
            self._forget()
            if not sight.known:  # at the start, or nobody names the capacity any more
                self.share = 1.0
            elif ceiling is not None and ceiling < RIGHT:
                self.share = self.ceiling = ceiling
            self._ran = deque((at, ran * scale) for at, ran in self._ran)
            self._crowds.clear()
        self._known, self._configured = sight.known, sight.configured

    def _new_averages(self, sight: Sight) -> PoolCounts | None:
        """The averages of a flush that no sample has shown before. All samples of a flush are one witness."""
        if sight.averages is None:
            return None
        last = self._flush
        if last is not None and sight.averages == last[1] and sight.at - last[0] < FLUSH_S:
            return None
        self._flush = sight.at, sight.averages
        return sight.averages

    def _shows_crowd(self, count: PoolCounts, sight: Sight, *, refused: bool) -> bool:
        """Whether so many wait that they show what the pool runs at once. If they have shown it often enough,
        that is the ceiling."""
        sure = refused or self.share is not None or not sight.known
        least, enough = (AGAIN, AGAIN_TOGETHER) if sure else (CROWD, CROWD_TOGETHER)
        crowd = count.waiting / count.running if count.running > 0 else 0.0
        if count.waiting < 2 * ONE_WAITS or crowd < least or not count.steady:
            self._crowds.clear()
            return False
        self._quiet_since = sight.at
        self._crowds = [*self._crowds[1 - LONGEST_ROW :], (count.running / sight.configured, crowd)]
        # A burst that has just arrived can look like a crowd in one sample, though not in the averages.
        alone = refused or (sure and count is sight.averages)
        if sum(crowd for _, crowd in self._crowds) >= enough and (alone or len(self._crowds) > 1):
            self._measured(max(ran for ran, _ in self._crowds[-ROW:]))
        return True

    def _somebody_waits(self, sight: Sight, count: PoolCounts | None) -> bool:
        """Whether anybody waits now. It may be too few to show the capacity, but then nothing grows."""
        running, waiting = (0.0, 0.0) if count is None else (count.running, count.waiting)
        if max(waiting, sight.waiting) < max(ONE_WAITS, FEW * running):
            return False
        self._quiet_since = sight.at
        if self._probing and self.ceiling is not None:
            self._measured(self.ceiling)
        ran = running / sight.configured
        if count is not None and count.exact and self.share is not None and ran > self.share:
            self.share = ran
            self.ceiling = None if self.ceiling is None else ran
        return True

    def _surely(self, sight: Sight, *counts: PoolCounts | None) -> float | None:
        """Return the largest number of requests that the counts prove to have run. `None` without counts."""
        shown = [each for each in counts if each is not None]
        # After a reading in which somebody waited, a picker that held requests back may just have sent them
        # to model servers whose queues it has not read again: only counts of one moment prove anything then.
        waited = sight.at <= self._quiet_since + self._beat_s
        proofs = [each.surely_running for each in shown if each.exact or not waited]
        return max(proofs, default=0.0) / sight.configured if shown else None

    def _measured(self, share: float) -> None:
        """The pool showed what it runs at once."""
        share = max(LEAST, share)
        if self._known and share >= 1.0:
            self._forget()
            return
        same = self.ceiling is not None and abs(share - self.ceiling) <= SAME * self.ceiling
        if not same:
            self.confirmed = 1
        elif self._probing:
            self.confirmed += 1
        self.share = self.ceiling = share
        self._probing, self._climbs, self._above = False, 0, 0

    def _nobody_waits(
        self, sight: Sight, surely: float | None, witness: PoolCounts | None, reserve: float
    ) -> None:
        """Let the estimate grow as far as the requests that ran prove room.

        `witness` is the count that may disprove a ceiling. If its numbers are of different moments, it has to
        contradict the ceiling in two readings in a row.
        """
        one = 1.0 / sight.configured
        share = 1.0 if self.share is None else self.share
        if self.ceiling is not None:
            proof = self._surely(sight, witness)
            if proof is not None:
                self._above = self._above + 1 if proof >= self.ceiling + ONE_WAITS * one else 0
            if witness is None or proof is None or self._above < (1 if witness.exact else 2):
                self._hold_or_probe(sight, surely, self.ceiling, reserve)
                return
            surely = proof
            self._climbs, self._above, self.confirmed = self._climbs + 1, 0, 0
            if self._climbs < CLIMBS:
                self.ceiling, self._probing = surely, True
                self._take(sight, max(share, _probed(surely, PROBE * 2.0**self._climbs, sight, reserve)))
                return
            self.ceiling, self._probing, self._climbs = None, False, 0
        if surely is not None and surely > 0:
            realtime = min(surely, sight.realtime * one)
            growth, others = GROWTH, GROWTH_REALTIME
            if self._beat_s <= LIVE_S:
                growth = GROWTH_LIVE
                others = GROWTH_REALTIME if 0.0 < self._took_s < LONG_S else GROWTH_CAREFUL
            may_run = growth * (surely - realtime) + others * realtime
            self._take(sight, max(share, max(may_run, surely + one) / (1.0 - reserve)))

    def _hold_or_probe(self, sight: Sight, surely: float | None, ceiling: float, reserve: float) -> None:
        """Nothing disproves the ceiling."""
        if self._probing and self.share is not None:
            # Endpoints that came or went, or another reserve, may ask for more than the probe began with.
            share = max(self.share, _probed(ceiling, PROBE * 2.0**self._climbs, sight, reserve))
            # Where no reading can show what runs, that nobody waits has to do as proof.
            self._take(sight, share * GROWTH if surely is None else share)
        elif sight.at - self._quiet_since >= self.hold_s:
            self._probing = True
            self._take(sight, _probed(ceiling, PROBE, sight, reserve))

    def _take(self, sight: Sight, share: float) -> None:
        self.share = min(max(share, LEAST), max(1.0, MOST_IN_FLIGHT / sight.configured))
        if sight.known and self.share >= 1.0:
            self._forget()

    def _forget(self) -> None:
        """Nothing was learned."""
        self.share = self.ceiling = None
        self._probing, self._climbs, self._above, self.confirmed = False, 0, 0, 0

    def _remember(self, at: float, ran: float) -> None:
        self._ran.append((at, ran))
        while self._ran[0][0] < at - min(max(LATELY_S, LATELY_BEATS * self._beat_s), LATELY_MOST_S):
            self._ran.popleft()

    @property
    def _lately(self) -> float:
        return max((ran for _, ran in self._ran), default=0.0)


def _probed(ceiling: float, by: float, sight: Sight, reserve: float) -> float:
    """The estimate that lets the ceiling be exceeded by this share of it, and by a whole request at least."""
    requests = ceiling * sight.configured
    return max(requests * (1.0 + by), math.ceil(requests - SLACK) + 1) / sight.configured / (1.0 - reserve)
