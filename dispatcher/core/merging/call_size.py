"""Decide how large a merged call may be: what the server accepts, what pays, and why nothing is merged.

There is one `CallSize` for each model behind a path.

    accepted  The server refuses a list that is too long, and the refusal teaches the limit: the number that
              the server states, or half of the size. After RELEARN_S twice as much is tried, because
              another server may answer by then.
    pays      In mode `auto` the gain is measured, in items per unit-second: how many items a call had, for
              the units of the limit that they held and for how long, including the wait for other requests.
              Sizes 1, 2, 4 … are compared one after the other, because calls of two sizes at once would
              wait for each other. An epoch of one size counts the calls that began after the first call of
              the epoch had ended, when the calls of the previous size are gone.
    off       An answer that cannot be split, or that differs from the answers to single calls, turns merging
              off until the settings change or the process restarts.

From time to time the size that pays is compared with its neighbours. A trial begins with PROBE_CALLS calls,
while all other calls have the best size, so these calls show most losses. A size that is clearly worse ends
at once. The loss of a trial, including its effect on the calls after it, determines the pause before the next
trial: until the loss is MAX_TRIAL_COST of the unit-seconds used since. On a server where merging does not
pay, trials therefore cost about one percent.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

from dispatcher.core.gateway.outcome import Delivered, TooLarge
from dispatcher.core.merging.call_size_epochs import PROBES, CallTime, Epoch, Tally
from dispatcher.core.merging.grouping import CHECK_EVERY, Mode
from dispatcher.core.merging.shapes import too_many, too_many_tokens

# docs/decisions/0018-merged-calls.md explains how these constants were measured.
RELEARN_S = 3600.0
ITEMS_MOST, TOKENS_MOST = 1 << 20, 1 << 32
"""No call is this large, so a learned limit above it is forgotten."""
WINS_BY = 1.05
"""Factor by which a trial must exceed the items per unit-second of the best size to win."""
TRIAL_AFTER = 8
"""Number of epochs of the best size between a lost trial and the next trial, at least."""
TRIAL_COST = 0.01
"""Share of all unit-seconds that trials may lose."""
TRIAL_AGAIN_S = 3600.0
"""Seconds after which another trial may begin, however much the previous one has lost."""
LOAD_CALLS = 16
"""Approximate number of recent calls over which the usual load is averaged."""
PROBES_S = 60.0
"""Shortest time to wait for the probe calls of a trial: some may have failed, or no requests came. If calls
are slow, the wait is a multiple of the time that they should take."""
CLEARLY = 0.8
"""A trial that reaches less than this share of the best size's rate has lost, and ends at once."""
WAITS_MOST, WAITS_MOST_S = 0.6, 5.0
"""Fraction of the measured call time to wait for more requests if `can_stretch_delay` is set, and the longest
such wait in seconds. While the limit is full, other requests come when calls end, which on a slow server is
later than `max_delay_s`."""
CHECKED_FIRST = 3
"""Number of merged calls whose answers must equal those to single calls, item by item, before checks become
rare."""


@dataclass(slots=True)
class CallSize:
    """Size of the calls of one model behind one path."""

    mode: Mode
    max_size: int
    """Largest size of a merged call that the operator allows."""
    preferred: tuple[int, ...] = ()
    """Sizes that the server prefers. They are tried in addition to the powers of two."""
    takes: int | None = None
    """Length of the longest list that the server accepts, as configured or learned. `None` if it is not
    known."""
    tokens: float = inf
    """Largest number of tokens that the server accepts in a list, as configured or learned."""
    check_every: int = CHECK_EVERY
    """Number of merged calls per check of one item, once the first calls have been checked."""
    why_off: str = ""
    """Reason why nothing is merged although the mode asks for it. Empty if calls may be merged."""
    rates: dict[int, float] = field(default_factory=dict)
    """Newest measured items per unit-second, by size. Only in mode `auto`."""
    gain: float | None = None
    """Items per unit-second of the best size, divided by those of single calls. `None` if it is not measured.

    The gain is the product of the gains of single steps, because older measurements were made under another
    load.
    """
    checked: int = 0
    """Number of calls whose answers equalled those to single calls."""
    _best: int = 1
    _epoch: Epoch | None = None
    _lonely: bool = False
    """True if too few requests came in time to fill calls in the newest trial of a larger size."""
    _trial_in: int = 1
    """Number of epochs of the best size until the next trial, at least."""
    _trials: int = 0
    _lost_unit_s: float = 0.0
    """Number of unit-seconds that the newest trial lost."""
    _since_unit_s: float = 0.0
    """Number of unit-seconds of calls since the newest trial."""
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
        """Return the largest number of items that a merged call may have now. 1 if nothing is merged."""
        if self.mode is Mode.OFF or self.why_off:
            return 1
        if now - self._taught_at >= RELEARN_S:
            self._doubt(now)
        return self.allowed if self.mode is Mode.ON else min(self.allowed, self._auto(now))

    def _doubt(self, now: float) -> None:
        """Double the learned limits of the server, up to the configured ones."""
        items, tokens = self._configured
        if self.takes is not None:
            more = self.takes * 2 if items is None else min(self.takes * 2, items)
            self.takes = more if more < ITEMS_MOST else None
        self.tokens = min(self.tokens * 2, tokens) if self.tokens < TOKENS_MOST else tokens
        self._taught_at = inf if (self.takes, self.tokens) == self._configured else now

    @property
    def settled(self) -> int:
        """Size that is known to pay best. The size of a running trial does not count."""
        if self.mode is Mode.OFF or self.why_off:
            return 1
        return self.allowed if self.mode is Mode.ON else min(self.allowed, self._best)

    @property
    def allowed(self) -> int:
        """Largest size that the operator allows and that the server accepts, as far as is known."""
        return self.max_size if self.takes is None else min(self.max_size, self.takes)

    @property
    def sentence(self) -> str:
        """Sentence for operators that says what is merged, or why nothing is."""
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

    # Refusals of the server.

    def refused(self, outcome: Delivered | TooLarge, items: int, tokens: int, now: float) -> bool:
        """Learn from the outcome of a call with this many items and tokens. Return whether it was refused for
        its size.

        A call with a single item never is.
        """
        if items < 2:
            return False
        most: int | None = 0
        most_tokens: int | None = None
        if isinstance(outcome, Delivered):
            most = too_many(outcome.status, outcome.body)
            most_tokens = too_many_tokens(outcome.status, outcome.body)
            # A 413 without a known message: the size is the reason, but the limit is unknown.
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
            # The best size is no longer possible, and what was measured belongs to it.
            self._best, self.gain, self._epoch = allowed, None, None
        elif self._epoch is not None and self._epoch.size > allowed:
            self._epoch = None  # no call can have that size any more
        return True

    def off(self, why: str) -> None:
        """Merge nothing from now on, and keep the first reason."""
        self.why_off = self.why_off or why

    # Checks of answers.

    def to_check(self) -> int | None:
        """Return how many items of the merged call that was just answered are to be sent alone as well.
        `None` for all."""
        if self.checked < CHECKED_FIRST:
            return None
        self._since_check += 1
        if self._since_check < self.check_every:
            return 0
        self._since_check = 0
        return 1

    def same(self) -> None:
        """Record that a merged call had the same answers as single calls."""
        self.checked += 1

    # What pays.

    def _auto(self, now: float) -> int:
        epoch = self._epoch
        if epoch is None:
            epoch = self._epoch = Epoch(self._best, now)
        elif epoch.probing:
            expected_s = epoch.size / self.rates[self._best]
            if now - epoch.began_at > max(PROBES_S, 4 * expected_s):
                # The probes did not come back in time, so the trial ends.
                epoch = self._back(now)
        return self._best if epoch.probing and epoch.went >= PROBES else epoch.size

    def delay_s(self, rule_s: float) -> float:
        """Return how long a request waits for others. The cost of this wait is part of what is measured."""
        return max(rule_s, min(WAITS_MOST_S, WAITS_MOST * self._call_s))

    def goes(self, size: int) -> None:
        """Record that a call is sent for which `choose_max_items` returned this size."""
        if self._epoch is not None and size == self._epoch.size:
            self._epoch.went += 1

    def took(self, call: CallTime) -> None:
        """Record an answered call, and what it took."""
        epoch = self._epoch
        if self.mode is not Mode.AUTO or epoch is None:
            return
        if call.size == self._best:
            self._load += (call.load - self._load) / LOAD_CALLS if self._load else call.load
        # A server with less load answers sooner at any size. Scaling to the usual load removes this effect.
        call = replace(call, unit_s=call.unit_s * max(1.0, self._load / call.load))
        trial = epoch.size != self._best
        ours = epoch.count(call)
        self._since_unit_s += call.unit_s
        # Calls after a trial share the server with the last calls of the trial, so their loss is part of its
        # cost.
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
        """Return whether a trial has more than this share of the best rate, and had enough requests to fill
        its calls."""
        # A larger size whose calls have no more items than before proves nothing.
        filled = size < self._best or trial.items > trial.calls * self._best
        if size > self._best:
            self._lonely = not filled
        return filled and trial.rate > share * self.rates[self._best]

    def _won(self, trial: Epoch, now: float) -> None:
        """Make the size of the trial the best one, and try the next size in the same direction at once."""
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
        """Return to the best size, and begin no trial for a time."""
        self._trial_in = TRIAL_AFTER
        self._epoch = Epoch(self._best, now, after_trial=True)
        return self._epoch

    def _again(self, epoch: Epoch, now: float) -> None:
        """Begin an epoch after one of the best size: another one of the best size, or a trial."""
        self._epoch = Epoch(self._best, now)
        affordable = self._lost_unit_s <= TRIAL_COST * self._since_unit_s
        if self._trial_in > 0 or not (affordable or now - self._tried_at >= TRIAL_AGAIN_S):
            return
        above, below = self._neighbours()
        # Trials take turns: two larger sizes, the next smaller one, and size 1.
        trials = [*(above[:2] if epoch.filled else ()), *below[:1], *below[-1:]]
        if trials:
            self._try(trials[self._trials % len(trials)], now)
            self._trials += 1

    def _try(self, size: int, now: float, *, probed: bool = True) -> None:
        self._epoch = Epoch(size, now, probed=probed)
        self._tried_at, self._lost_unit_s, self._since_unit_s = now, 0.0, 0.0

    def _neighbours(self) -> tuple[list[int], list[int]]:
        """Return the sizes above the best one and those below it, the nearest first."""
        allowed = self.allowed
        sizes = {1, allowed, *(size for size in self.preferred if size < allowed)}
        size = 2
        while size < allowed:
            sizes.add(size)
            size *= 2
        above = sorted(size for size in sizes if size > self._best)
        return above, sorted((size for size in sizes if size < self._best), reverse=True)
