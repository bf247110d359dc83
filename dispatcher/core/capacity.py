"""What the pool really takes, learned from who waits and from refusals. Pure.

The configuration says how many requests a pool runs at once, and it can say too much. Then readings promise
room that is not there. What is learned here is a share of the configured capacity, of the whole pool and not
of ours, so that it fits when endpoints come and go. It only ever lowers what the configuration says.

    who waits    Requests wait while fewer run than configured: what runs is the capacity. A few may wait for
                 an endpoint while another is free, or for the server's next step; so, until something is
                 learned, only crowds count: a tenth of what runs, in readings in a row, four tenths together.
                 With a refusal before it, or something learned, a twentieth does in one reading, unless
                 more was seen to run lately.
    a refusal    It is judged by the first reading taken after it (until then the gate is closed anyway). If
                 that one shows a full pool, or somebody waiting, the refusal is explained and teaches
                 nothing by itself. Else the capacity is FITTED of what was there, realtime as read and what
                 of ours was not refused; but no less than what ran lately with nobody waiting (realtime had
                 filled the pool between two readings, and a full pool has nothing to teach), nor than β of
                 what it was (one may be refused whatever the room).
    it rises     HOLD readings after what taught it last, ever faster, so that it is forgotten within thirty
                 readings whatever it was; at once to what a reading shows running with nobody waiting; and
                 not at all by a reading in which anybody waits. It is forgotten, too, by a reading that runs
                 RIGHT of the configuration.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dispatcher.core.counting import FLUSH_S

RIGHT = 0.97
"""A pool that runs this share of its configuration has the capacity that it says."""
LATELY = 30
"""Readings for which it is remembered what ran."""
HOLD = 8
RISE = 0.01
FASTER = 1.4
"""Without anything that contradicts it the share stays for HOLD readings, and then rises by RISE × FASTER,
RISE × FASTER², … of itself a reading."""
LEAST = 0.001
"""No share is smaller, or it would not be forgotten in time."""
ONE_WAITS = 0.5
"""Requests from which on somebody waits; several samples' mean need not be whole."""
FITTED = 0.9
"""Of what was there when one was refused, some waited."""
CROWD, CROWD_AGAIN = 0.1, 0.05
"""Who waits, as a share of what runs, from which on it counts: at first, and where a capacity is learned or a
request was refused."""
TOGETHER = 0.4
"""Crowds in a row teach when they come to this."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What one sample shows of the whole pool, in requests."""

    at: float
    """When it was taken."""
    configured: float
    running: float | None
    """What ran while `waiting` waited; None: not known apart."""
    waiting: float
    flushed: bool
    """These two are of the picker's last flush, which other samples show as well."""
    realtime: float
    """What was there and is not ours, running or waiting."""


@dataclass(slots=True)
class Capacity:
    """The share of the configured capacity that the pool takes. None: nothing else was learned."""

    share: float | None = None
    _ran: deque[float] = field(default_factory=lambda: deque(maxlen=LATELY))
    """Shares of the configuration that ran with nobody waiting, or that taught."""
    _quiet: int = 0
    """Readings since anything contradicted the share."""
    _crowds: list[tuple[float, float]] = field(default_factory=list)
    """In a row: what ran, and who waited as a share of that."""
    _flush: Sight | None = None
    """The first sight of the newest flush."""
    _realtime: float | None = None
    """As the newest reading showed it."""
    _ours: int | None = None
    """The most of ours in flight at a refusal that is not judged yet."""
    _turned_away: int = 0
    """How many of those were refused themselves."""

    def refused(self, ours: int, *, known: bool = False, heard: bool = False) -> None:
        """A refusal for lack of capacity with `ours` in flight, those that are refused with it included.

        Requests that are refused together count each other out one by one, and replicas do not know the
        newest of each other: of several refusals under one reading the largest number is the truth.
        `known`: of a time when another was. `heard`: another replica's, so none of those counted here.
        """
        if (known and self._ours is None) or self._realtime is None:
            return  # judged before, or of before anything was known of the pool
        self._ours = max(self._ours or 0, ours)
        self._turned_away += 0 if heard else 1

    def reading(self, sight: Sight, backoff: float) -> None:
        """A sample that was acted upon, taken after the newest refusal."""
        before, self._realtime = self._realtime, sight.realtime
        ours, self._ours = self._ours, None
        if ours is None and self._seen_before(sight):
            return
        turned_away, self._turned_away = self._turned_away, 0
        ran = None if sight.running is None else sight.running / sight.configured
        if ran is not None and ran >= RIGHT:
            self._ran.append(ran)
            self._crowds.clear()
            self.share = None
            return
        refused = ours is not None
        crowd = sight.waiting / sight.running if sight.running else 0.0
        least = CROWD if self.share is None and not refused else CROWD_AGAIN
        if ran is not None and sight.waiting >= 2 * ONE_WAITS and crowd >= least:
            self._crowded(ran, crowd, certain=refused or self.share is not None)
            return
        self._crowds.clear()
        if sight.waiting >= ONE_WAITS:
            return  # somebody waits: it rises no further
        if ran is not None:
            self._ran.append(ran)
        if ours is not None:
            fitted = FITTED * (max(0, ours - turned_away) + max(before or 0.0, sight.realtime))
            share = 1.0 if self.share is None else self.share
            self._take(min(share, max(fitted / sight.configured, self._lately, backoff * share)))
        elif self.share is not None:
            self._quiet += 1
            rise = RISE * FASTER ** (self._quiet - HOLD) if self._quiet > HOLD else 0.0
            self.share = max(self.share * (1.0 + rise), self._lately)
            if self.share >= 1.0:
                self.share = None

    def _seen_before(self, sight: Sight) -> bool:
        """Whether another sample has shown this very flush: it is one witness."""
        if not sight.flushed:
            return False
        last, shown = self._flush, (sight.running, sight.waiting)
        if last is not None and shown == (last.running, last.waiting) and sight.at - last.at < FLUSH_S:
            return True
        self._flush = sight
        return False

    def _crowded(self, ran: float, crowd: float, *, certain: bool) -> None:
        self._quiet = 0
        self._crowds = [*self._crowds[1 - LATELY :], (ran, crowd)]
        together = len(self._crowds) > 1 and sum(crowd for _, crowd in self._crowds) >= TOGETHER
        if together or (certain and ran >= self._lately):
            most = max(ran for ran, _ in self._crowds)
            self._ran.clear()
            self._ran.append(most)
            self._take(most)

    def _take(self, share: float) -> None:
        self._quiet = 0
        self.share = max(LEAST, share) if share < 1.0 else None

    @property
    def _lately(self) -> float:
        return max(self._ran, default=0.0)
