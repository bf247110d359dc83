"""How large a merged call may be: what the server takes, what pays, and why nothing is merged. Pure.

One `CallSize` for each model behind a path.

    takes     a list longer than the server takes is refused by it, which teaches: half of it, or what it
              said. After RELEARN_S twice as much is tried, for the server may be another one by then.
    pays      in mode `auto` it is measured, not believed: items per unit-second, that is by how much of the
              limit they held for how long, the wait for company included. Sizes 1, 2, 4 … are compared one
              after the other, for calls of two sizes at once would wait for each other. An epoch of
              one size counts the calls that began after the first of them had ended, when those of the size
              before are gone.
    off       an answer that cannot be split, or that is not what single calls are answered: nothing is merged
              any more, until the settings change or the process does.

The size that pays is tried against its neighbours now and then. A trial begins with PROBES calls, while all
others are of the best size: most that loses is seen by these. One that is clearly worse ends at once. What a
trial has lost, with what it left behind for those after it, decides how long nothing is tried: until that is
TRIAL_COST of what was done since. A server where merging does not pay so loses a hundredth by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

from dispatcher.core.gateway.outcome import Delivered, TooLarge
from dispatcher.core.merging.call_size_epochs import PROBES, CallTime, Epoch, Tally
from dispatcher.core.merging.grouping import CHECK_EVERY, Mode
from dispatcher.core.merging.shapes import too_many, too_many_tokens

RELEARN_S = 3600.0
ITEMS_MOST, TOKENS_MOST = 1 << 20, 1 << 32
"""Nobody sends so many in a call: what was learned is forgotten there."""
WINS_BY = 1.05
"""A trial has won when it made so many times the items per unit-second."""
TRIAL_AFTER = 8
"""Epochs of the best size from one trial that lost to the next, at the least."""
TRIAL_COST = 0.01
"""What trials may lose, as a share of all unit-seconds."""
TRIAL_AGAIN_S = 3600.0
"""And after so long another one may be, whatever the one before has lost."""
LOAD_CALLS = 16
"""So many recent calls the usual load is of, more or less."""
PROBES_S = 60.0
"""So long they are waited for at the least: some may have failed, or nobody came. Where calls are slow, for a
multiple of what they should take."""
CLEARLY = 0.8
"""A trial that makes less than this share of what the best size made has lost: no more of it is made."""
WAITS_MOST, WAITS_MOST_S = 0.6, 5.0
"""Of what a call takes, so long company is waited for where the rule stretches: while the limit is full
others come as calls end, of a slow server later than suits a fast one."""
CHECKED_FIRST = 3
"""So many merged calls must be answered as single ones are, item by item, before one is believed."""


@dataclass(slots=True)
class CallSize:
    """What is known of one model behind one path."""

    mode: Mode
    max_size: int
    """The largest merged call that the operator allows."""
    preferred: tuple[int, ...] = ()
    """Sizes that the server likes: tried beside the powers of two."""
    takes: int | None = None
    """The longest list that the server takes, as configured or learned; None: not known."""
    tokens: float = inf
    """The largest number of tokens that the server takes in a list, as configured or learned."""
    check_every: int = CHECK_EVERY
    """Number of merged calls per check of one item, once the first calls have been checked."""
    why_off: str = ""
    """Reason why nothing is merged although the mode asks for it. Empty if calls may be merged."""
    rates: dict[int, float] = field(default_factory=dict)
    """Items per unit-second by size, as measured last. In `auto` only."""
    gain: float | None = None
    """How many times the items per unit-second the best size makes of what single calls make; None: not
    measured. Counted step by step, for what was measured long ago was measured under another load."""
    checked: int = 0
    """Calls that were answered as single ones were."""
    _best: int = 1
    _epoch: Epoch | None = None
    _lonely: bool = False
    """In the newest trial of a larger size nobody came in time."""
    _trial_in: int = 1
    """Epochs of the best size until the next trial, at the least."""
    _trials: int = 0
    _lost_unit_s: float = 0.0
    """Unit-seconds that the newest trial lost."""
    _since_unit_s: float = 0.0
    """Unit-seconds of calls since the newest trial."""
    _tried_at: float = float("-inf")
    _call_s: float = 0.0
    """Seconds that a call of the best size takes, from the lease of its first item on."""
    _load: float = 0.0
    """Average load of recent calls of the best size."""
    _taught_at: float = inf
    """Time at which the newest fact that still holds was learned."""
    _since_check: int = 0
    """Number of merged calls since the last check of an item."""
    _configured: tuple[int | None, float] = (None, inf)

    def __post_init__(self) -> None:
        self._configured = self.takes, self.tokens

    def most(self, now: float) -> int:
        """The most items that a merged call may have now; 1: nothing is merged."""
        if self.mode is Mode.OFF or self.why_off:
            return 1
        if now - self._taught_at >= RELEARN_S:
            self._doubt(now)
        return self.allowed if self.mode is Mode.ON else min(self.allowed, self._auto(now))

    def _doubt(self, now: float) -> None:
        """Take what was learned for half of the truth."""
        items, tokens = self._configured
        if self.takes is not None:
            more = self.takes * 2 if items is None else min(self.takes * 2, items)
            self.takes = more if more < ITEMS_MOST else None
        self.tokens = min(self.tokens * 2, tokens) if self.tokens < TOKENS_MOST else tokens
        self._taught_at = inf if (self.takes, self.tokens) == self._configured else now

    @property
    def settled(self) -> int:
        """The size that is known to pay best; that of a trial is none."""
        if self.mode is Mode.OFF or self.why_off:
            return 1
        return self.allowed if self.mode is Mode.ON else min(self.allowed, self._best)

    @property
    def allowed(self) -> int:
        """By the operator, and by the server as far as is known."""
        return self.max_size if self.takes is None else min(self.max_size, self.takes)

    @property
    def sentence(self) -> str:
        """What is merged, or why not, for people."""
        size, takes, alone = self.settled, self.takes, "each request goes alone"
        if self.why_off or self.mode is Mode.OFF:
            return f"{alone}: {self.why_off or 'batching is off'}"
        if self.allowed == 1:
            return f"{alone}: {'the rule says so' if self.max_size == 1 else 'the server takes one'}"
        if self.mode is Mode.AUTO and self.gain is None:
            return "whether merging pays is not measured yet"
        if size == 1:
            why = "no other comes within max_delay_s" if self._lonely else "merging does not pay"
            return f"{alone}: {why}"
        said = f"up to {size} items a call"
        if self.gain is not None:
            said += f", {self.gain:.3g} times the items of single calls for the same units"
        if takes is not None and takes < self.max_size:
            said += f"; the server takes {takes}"
        return said if self.checked >= CHECKED_FIRST else f"{said}; its first answers are being compared"

    # What the server says.

    def refused(self, outcome: Delivered | TooLarge, items: int, tokens: int, now: float) -> bool:
        """Whether a call of so much was refused for that, which is learned. One item alone never is."""
        if items < 2:
            return False
        most: int | None = 0
        most_tokens: int | None = None
        if isinstance(outcome, Delivered):
            most = too_many(outcome.status, outcome.body)
            most_tokens = too_many_tokens(outcome.status, outcome.body)
            if most is None and most_tokens is None and outcome.status == 413:
                most = 0
        if most is not None:
            learned = max(1, min(most, items - 1) if most > 0 else items // 2)
            self.takes = learned if self.takes is None else min(self.takes, learned)
        if most_tokens is not None:
            fewer = min(most_tokens, tokens - 1) if most_tokens > 0 else tokens // 2
            self.tokens = max(1, min(self.tokens, fewer))
        if most is None and most_tokens is None:
            return False
        self._taught_at = now
        allowed = self.allowed
        if self._best > allowed:
            self._best, self.gain, self._epoch = allowed, None, None
        elif self._epoch is not None and self._epoch.size > allowed:
            self._epoch = None  # no call will be of that size
        return True

    def off(self, why: str) -> None:
        """Nothing is merged from now on."""
        self.why_off = self.why_off or why

    # Whether its answers are right.

    def to_check(self) -> int | None:
        """How many items of a merged call that was just answered are to be asked alone as well; None: all."""
        if self.checked < CHECKED_FIRST:
            return None
        self._since_check += 1
        if self._since_check < self.check_every:
            return 0
        self._since_check = 0
        return 1

    def same(self) -> None:
        """A merged call was answered as single ones were."""
        self.checked += 1

    # What pays.

    def _auto(self, now: float) -> int:
        epoch = self._epoch
        if epoch is None:
            epoch = self._epoch = Epoch(self._best, now)
        elif epoch.probing:
            expected_s = epoch.size / self.rates[self._best]
            if now - epoch.began_at > max(PROBES_S, 4 * expected_s):
                epoch = self._back(now)
        return self._best if epoch.probing and epoch.went >= PROBES else epoch.size

    def delay_s(self, rule_s: float) -> float:
        """How long a request waits for company; what that costs is part of what is measured."""
        return max(rule_s, min(WAITS_MOST_S, WAITS_MOST * self._call_s))

    def goes(self, size: int) -> None:
        """A call is sent which might have had so many items (`most`)."""
        if self._epoch is not None and size == self._epoch.size:
            self._epoch.went += 1

    def took(self, call: CallTime) -> None:
        """A call was answered, and this is what it took."""
        epoch = self._epoch
        if self.mode is not Mode.AUTO or epoch is None:
            return
        if call.size == self._best:
            self._load += (call.load - self._load) / LOAD_CALLS if self._load else call.load
        # A server that has less to do answers sooner, whatever the size: that is no merit of it.
        call = replace(call, unit_s=call.unit_s * max(1.0, self._load / call.load))
        trial = epoch.size != self._best
        ours = epoch.count(call)
        self._since_unit_s += call.unit_s
        if trial or (epoch.after_trial and call.began_at < epoch.opens_at):
            self._lost_unit_s += call.unit_s - call.items / self.rates[self._best]
        if not ours:
            return
        over = epoch.over(call.ended_at)
        if not trial:
            if over:
                self._know(epoch)
                self._trial_in -= 1
                self._again(epoch, call.ended_at)
        elif epoch.seen.calls >= PROBES and not self._stands(epoch.size, epoch.seen, CLEARLY):
            self._back(call.ended_at)
        elif over:
            self._know(epoch)
            if self._stands(epoch.size, epoch.measured, WINS_BY):
                self._won(epoch, call.ended_at)
            else:
                self._back(call.ended_at)

    def _know(self, epoch: Epoch) -> None:
        self.rates[epoch.size] = epoch.measured.rate
        if epoch.size == self._best:
            self._call_s = epoch.measured.took_s / epoch.measured.calls
        if epoch.size == 1 or self.gain is None:
            self.gain = self.rates[self._best] / self.rates[1]

    def _stands(self, size: int, trial: Tally, share: float) -> bool:
        """Whether a trial makes more than that share of what the best size makes, and has company for it."""
        filled = size < self._best or trial.items > trial.calls * self._best
        if size > self._best:
            self._lonely = not filled
        return filled and trial.rate > share * self.rates[self._best]

    def _won(self, trial: Epoch, now: float) -> None:
        """It is the best, and the next one in its direction is tried at once."""
        before, self._best = self._best, trial.size
        if self.gain is not None:
            self.gain *= self.rates[trial.size] / self.rates[before]
        above, below = self._neighbours()
        further = (above if trial.filled else []) if trial.size > before else below
        if further:
            self._try(further[0], now, probed=False)
        else:
            self._back(now)

    def _back(self, now: float) -> Epoch:
        """To the best size, for a time."""
        self._trial_in = TRIAL_AFTER
        self._epoch = Epoch(self._best, now, after_trial=True)
        return self._epoch

    def _again(self, epoch: Epoch, now: float) -> None:
        """After an epoch of the best size: the same again, or a trial."""
        self._epoch = Epoch(self._best, now)
        affordable = self._lost_unit_s <= TRIAL_COST * self._since_unit_s
        if self._trial_in > 0 or not (affordable or now - self._tried_at >= TRIAL_AGAIN_S):
            return
        above, below = self._neighbours()
        trials = [*(above[:2] if epoch.filled else ()), *below[:1], *below[-1:]]
        if trials:
            self._try(trials[self._trials % len(trials)], now)
            self._trials += 1

    def _try(self, size: int, now: float, *, probed: bool = True) -> None:
        self._epoch = Epoch(size, now, probed=probed)
        self._tried_at, self._lost_unit_s, self._since_unit_s = now, 0.0, 0.0

    def _neighbours(self) -> tuple[list[int], list[int]]:
        """The sizes above the best one and those below it, the next ones first."""
        allowed = self.allowed
        sizes = {1, allowed, *(size for size in self.preferred if size < allowed)}
        size = 2
        while size < allowed:
            sizes.add(size)
            size *= 2
        above = sorted(size for size in sizes if size > self._best)
        return above, sorted((size for size in sizes if size < self._best), reverse=True)
