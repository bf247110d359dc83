"""How many requests the pool runs at once, learned from what readings show. Pure.

The estimate is kept as a share of the configured capacity, so that it still fits when endpoints come and go.
Where the configuration or the endpoint picker names the capacity, the estimate starts there and never exceeds
it. Where nobody names it, `configured` is a small number of requests per endpoint to start with, and the
estimate has no upper bound: it grows as far as readings prove room.

    growth    Requests that run while nobody waits prove room for themselves. The next estimate lets GROWTH
              times as many run.
    ceiling   Requests that wait while others run show the capacity itself: it is what runs. The estimate falls
              to it. What waits in a model server does not run, and what ran earlier does not keep the estimate
              up. A few requests may wait for one endpoint while another is free, so waiting requests count
              from CROWD of the running ones on, and less where something was learned before.
    probe     A ceiling can be wrong or outdated. After a hold without anybody waiting, the estimate exceeds it
              by PROBE. If more then runs with nobody waiting, the ceiling is dropped and the estimate grows; if
              somebody waits, the ceiling stands, and the next hold is twice as long.
    refusal   The first reading after a refusal judges it (until then the gate is closed). If it shows a full
              pool or a crowd, that explains the refusal. Otherwise FITTED of what was there becomes the
              ceiling, but no less than what ran lately with nobody waiting, and no less than β of the estimate:
              a request may be refused however much room there is.

Bounds, with `beat` for the time between two readings that show something new (FLUSH_S for averages):
a growing estimate lets at most GROWTH times the true capacity run, or one request more than it; it reaches
any multiple m of what ran in ln(m) / ln(GROWTH) + 2 beats; a ceiling that is too low delays that by its hold and
two beats. The first hold of a ceiling is HOLD_S or two beats.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean

from dispatcher.core.budget import MOST_IN_FLIGHT
from dispatcher.core.counting import FLUSH_S

GROWTH = 1.24
"""Factor by which more requests may run than ran with nobody waiting."""
GROWTH_LIVE, LIVE_S = 1.16, 2.0
"""The same where a beat takes LIVE_S at the most: there are more steps then, and they are smaller."""
GROWTH_CAREFUL, LONG_S = 1.05, 10.0
"""The same for requests that are not ours, while ours take longer than LONG_S or none has been answered yet:
realtime that fills most of a pool leaves little room, and what is sent too much holds its slots for as long."""
PROBE = 0.04
"""Share of the ceiling by which a probe exceeds it; one request at least."""
HOLD_S, HOLD_MOST_S = 10.0, 120.0
"""Seconds without anybody waiting before a ceiling is probed: for a new one, and at the most."""
HOLD_BEATS, HOLD_MOST_BEATS = 2.0, 24.0
"""The same bounds in beats and in the time that a request of ours takes, for so long a failed probe holds slots;
the largest counts."""
BEAT_MOST_S = 60.0
SAME = 0.1
"""A ceiling within this share of the previous one confirms it."""
RIGHT = 0.97
"""A pool that runs this share of a known capacity has that capacity."""
LATELY_S = 30.0
"""Seconds for which a number of requests that ran with nobody waiting bounds what a refusal can teach."""
LEAST = 0.001
"""The smallest share: the estimate has to recover from it in time."""
ONE_WAITS = 0.5
"""Requests from which on somebody waits; the mean of several samples need not be whole."""
FEW = 0.01
"""Waiting requests up to this share of the running ones do not count: they wait for the server's next step."""
FITTED = 0.9
"""Share of the requests that were there at a refusal that ran; the others waited."""
STEADY = 0.05
"""Counts of different moments show a crowd only if they moved by no more than this share between them."""
CROWD, CROWD_TOGETHER = 0.1, 0.4
"""Waiting requests as a share of the running ones: a known capacity is doubted from CROWD on, in readings in a
row whose shares add up to CROWD_TOGETHER."""
KNOWN_TOGETHER = 0.08
"""The same sum where a ceiling is known, a request was refused, or the capacity is not known; each reading
counts from FEW on."""
ROW = 3
"""Readings in a row whose largest number of running requests is the ceiling, or whose mean is, where counters
that are read at different moments scatter."""

LONGEST_ROW = 30
"""Readings with a crowd in a row that are remembered."""


@dataclass(frozen=True, slots=True)
class Skew:
    """What is known of requests that ran, where they were counted later than those that waited."""

    surely_running: float
    """Requests that certainly ran: those that came in between may be waiting."""
    moved: float
    """By how many requests the count changed lately."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What one sample shows of the whole pool, in requests."""

    at: float
    """When the sample was taken."""
    configured: float
    """The capacity that the configuration or the picker names, else the number to start with."""
    known: bool
    """Whether `configured` is the capacity; otherwise it is only where the search starts."""
    running: float | None
    """Requests that ran while `waiting` waited. `None` if running and waiting requests cannot be told apart."""
    waiting: float
    """Requests that waited, in the picker or in the model servers, at the moment of `running`."""
    realtime: float
    """Requests in the pool, running or waiting, that are not ours."""
    skew: Skew | None = None
    """How far `running` may be off. `None` if `running` and `waiting` were counted at the same moment."""
    waiting_now: float = 0.0
    """Requests that wait in the picker now, where `running` and `waiting` are of an earlier moment."""
    took_s: float = 0.0
    """How long our requests take, on average."""
    flushed: bool = False
    """`running` and `waiting` are the picker's averages, which other samples show as well."""


@dataclass(slots=True)
class Capacity:
    """The estimate, and what it is made of. All requests are shares of the configured capacity."""

    share: float | None = None
    """The estimate. `None` if it is a known capacity and nothing else was learned."""
    ceiling: float | None = None
    """What ran while others waited. `None` if that was not seen, or was disproved."""
    confirmed: int = 0
    """How often in a row the ceiling was measured, by probes that failed."""
    _known: bool | None = None
    """Whether the capacity was known at the last reading. `None` before the first one."""
    _configured: float = 0.0
    """The configured capacity at the last reading."""
    _probing: bool = False
    """The estimate exceeds the ceiling."""
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
    """When how much ran with nobody waiting, for LATELY_S."""
    _crowds: list[tuple[float, float]] = field(default_factory=list)
    """For each reading in a row with a crowd: what ran, and how many waited as a share of that."""
    _flush: Sight | None = None
    """The first sight of the newest flush."""
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
        if ours is None and self._seen_before(sight):
            return
        turned_away, self._turned_away = self._turned_away, 0
        if self._seen_at is not None:
            self._beat_s = min(max(sight.at - self._seen_at, 0.0), BEAT_MOST_S)
        self._seen_at, self._took_s = sight.at, min(sight.took_s, BEAT_MOST_S)
        ran = None if sight.running is None else sight.running / sight.configured
        if sight.known and ran is not None and ran >= RIGHT:
            self._remember(sight.at, ran)
            self._crowds.clear()
            self.share = self.ceiling = None
            self._probing = False
            return
        if ran is not None and self._is_crowd(sight, refused=ours is not None):
            self._quiet_since = sight.at
            if self._crowd_suffices(sight, refused=ours is not None):
                row = [ran for ran, _ in self._crowds[-ROW:]]
                self._measured(max(row) if sight.skew is None else fmean(row))
            return
        self._crowds.clear()
        if max(sight.waiting, sight.waiting_now) >= max(ONE_WAITS, FEW * (sight.running or 0.0)):
            self._somebody_waits(sight.at, ran if sight.skew is None else None)
            return
        surely = ran if sight.skew is None else sight.skew.surely_running / sight.configured
        if surely is not None:
            self._remember(sight.at, surely)
        if ours is not None:
            fitted = FITTED * (max(0, ours - turned_away) + max(before or 0.0, sight.realtime))
            share = 1.0 if self.share is None else self.share
            self._quiet_since = sight.at
            self._measured(min(share, max(fitted / sight.configured, self._lately, backoff * share)))
        elif self.share is not None:
            self._nobody_waits(sight, surely, reserve)

    @property
    def hold_s(self) -> float:
        """Seconds without anybody waiting before the ceiling is probed."""
        beat_s = max(self._beat_s, self._took_s)
        most, first = max(HOLD_MOST_S, HOLD_MOST_BEATS * beat_s), max(HOLD_S, HOLD_BEATS * beat_s)
        return min(first * 2.0 ** min(max(0, self.confirmed - 1), 16), most)

    def _follow(self, sight: Sight) -> None:
        """Take over what the sample says about the configured capacity."""
        if self._known is sight.known:
            self._configured = sight.configured
            return
        scale = self._configured / sight.configured
        if not sight.known:  # at the start, or nobody names the capacity any more
            self.share, self.ceiling, self._probing = 1.0, None, False
        elif self._known is False:  # the picker has proven it, or a setting names it now
            self.ceiling = (
                None if self.ceiling is None or self.ceiling * scale >= RIGHT else self.ceiling * scale
            )
            self.share, self._probing = self.ceiling, False
        self._ran = deque((at, ran * scale) for at, ran in self._ran)
        self._crowds.clear()
        self._known, self._configured = sight.known, sight.configured

    def _seen_before(self, sight: Sight) -> bool:
        """Whether another sample has shown this very flush, which is one piece of evidence."""
        if not sight.flushed:
            return False
        last, shown = self._flush, (sight.running, sight.waiting)
        if last is not None and shown == (last.running, last.waiting) and sight.at - last.at < FLUSH_S:
            return True
        self._flush = sight
        return False

    def _certain(self, sight: Sight, *, refused: bool) -> bool:
        """Whether few waiting requests are evidence: nobody has named a capacity that they contradict."""
        return refused or self.share is not None or not sight.known

    def _is_crowd(self, sight: Sight, *, refused: bool) -> bool:
        running = sight.running or 0.0
        least = FEW if self._certain(sight, refused=refused) else CROWD
        if sight.skew is not None and sight.skew.moved > max(2.0, STEADY * (running + sight.waiting)):
            return False
        return running > 0 and sight.waiting >= max(2 * ONE_WAITS, least * running)

    def _crowd_suffices(self, sight: Sight, *, refused: bool) -> bool:
        """Note a crowd, and tell whether it and those before it in a row show the capacity.

        Averages are of one moment, and so is what a refusal and a reading show together. Two counters that are
        read at different moments (what was sent, what waits) can show a crowd that never was, but not twice.
        """
        running = sight.running or 0.0
        self._crowds = [
            *self._crowds[1 - LONGEST_ROW :],
            (running / sight.configured, sight.waiting / running),
        ]
        together = sum(crowd for _, crowd in self._crowds)
        if not self._certain(sight, refused=refused):
            return len(self._crowds) > 1 and together >= CROWD_TOGETHER
        return together >= KNOWN_TOGETHER and (sight.flushed or refused or len(self._crowds) > 1)

    def _measured(self, share: float) -> None:
        """The pool showed what it runs at once."""
        share = max(LEAST, share)
        if self._known and share >= 1.0:
            self.share = self.ceiling = None
            self._probing = False
            return
        same = self.ceiling is not None and abs(share - self.ceiling) <= SAME * self.ceiling
        if not same:
            self.confirmed = 1
        elif self._probing:
            self.confirmed += 1
        self.share = self.ceiling = share
        self._probing, self._above = False, 0

    def _somebody_waits(self, at: float, ran: float | None) -> None:
        """Too few wait to show the capacity, but the estimate must not grow."""
        self._quiet_since = at
        if self.share is None:
            return
        if self._probing and self.ceiling is not None:
            self._measured(self.ceiling)
        if ran is not None and ran > self.share:
            self.share = ran
            self.ceiling = None if self.ceiling is None else ran

    def _nobody_waits(self, sight: Sight, surely: float | None, reserve: float) -> None:
        """Let the estimate grow as far as what ran proves room."""
        one = 1.0 / sight.configured
        share = 1.0 if self.share is None else self.share
        if self.ceiling is not None:
            above = surely is not None and surely >= self.ceiling + ONE_WAITS * one
            self._above = self._above + 1 if above else 0
            if self._above < (1 if sight.skew is None else 2):
                self._hold_or_probe(sight, surely, self.ceiling, reserve)
                return
            self.ceiling, self.confirmed, self._probing = None, 0, False
            self._above = 0
        if surely is not None and surely > 0:
            realtime = min(surely, sight.realtime * one)
            growth = GROWTH_LIVE if self._beat_s <= LIVE_S else GROWTH
            careful = not 0.0 < self._took_s < LONG_S
            may_run = growth * (surely - realtime) + (GROWTH_CAREFUL if careful else growth) * realtime
            self._take(sight, max(share, max(may_run, surely + one) / (1.0 - reserve)))

    def _hold_or_probe(self, sight: Sight, surely: float | None, ceiling: float, reserve: float) -> None:
        """Nothing disproves the ceiling."""
        if sight.at - self._quiet_since < self.hold_s:
            self._take(sight, ceiling)
        elif surely is None and self._probing and self.share is not None:
            # No reading can show what runs, so that nobody waits has to do as proof.
            self._take(sight, self.share * GROWTH)
        else:
            self._probing = True
            self._take(sight, (ceiling + max(PROBE * ceiling, 1.0 / sight.configured)) / (1.0 - reserve))

    def _take(self, sight: Sight, share: float) -> None:
        most = MOST_IN_FLIGHT / sight.configured
        self.share = min(max(share, LEAST), max(1.0, most))
        if sight.known and self.share >= 1.0:
            self.share = self.ceiling = None
            self._probing = False

    def _remember(self, at: float, ran: float) -> None:
        self._ran.append((at, ran))
        while self._ran[0][0] < at - LATELY_S:
            self._ran.popleft()

    @property
    def _lately(self) -> float:
        return max((ran for _, ran in self._ran), default=0.0)
