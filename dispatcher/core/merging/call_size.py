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
from dispatcher.core.merging.call_size_epochs import PROBE_CALLS, CallMeasurement, Epoch, Tally
from dispatcher.core.merging.grouping import DEFAULT_CHECK_EVERY, MergeMode
from dispatcher.core.merging.shapes import parse_item_cap, parse_token_cap

# docs/decisions/0018-merged-calls.md explains how these constants were measured.
RELEARN_S = 3600.0
MAX_LEARNED_ITEMS, MAX_LEARNED_TOKENS = 1 << 20, 1 << 32
"""No call is this large, so a learned limit above it is forgotten."""
WIN_FACTOR = 1.05
"""Factor by which a trial must exceed the items per unit-second of the best size to win."""
EPOCHS_BETWEEN_TRIALS = 8
"""Number of epochs of the best size between a lost trial and the next trial, at least."""
MAX_TRIAL_COST = 0.01
"""Share of all unit-seconds that trials may lose."""
MAX_TRIAL_PAUSE_S = 3600.0
"""Seconds after which another trial may begin, however much the previous one has lost."""
LOAD_AVERAGE_CALLS = 16
"""Approximate number of recent calls over which the usual load is averaged."""
PROBE_TIMEOUT_S = 60.0
"""Shortest time to wait for the probe calls of a trial: some may have failed, or no requests came. If calls
are slow, the wait is a multiple of the time that they should take."""
CLEAR_LOSS_SHARE = 0.8
"""A trial that reaches less than this share of the best size's rate has lost, and ends at once."""
MAX_DELAY_SHARE, MAX_STRETCHED_DELAY_S = 0.6, 5.0
"""Fraction of the measured call time to wait for more requests if `can_stretch_delay` is set, and the longest
such wait in seconds. While the limit is full, other requests come when calls end, which on a slow server is
later than `max_delay_s`."""
INITIAL_CHECKS = 3
"""Number of merged calls whose answers must equal those to single calls, item by item, before checks become
rare."""


@dataclass(slots=True)
class CallSize:
    """Size of the calls of one model behind one path."""

    mode: MergeMode
    max_size: int
    """Largest size of a merged call that the operator allows."""
    preferred_sizes: tuple[int, ...] = ()
    """Sizes that the server prefers. They are tried in addition to the powers of two."""
    server_max_items: int | None = None
    """Length of the longest list that the server accepts, as configured or learned. `None` if it is not
    known."""
    server_max_tokens: float = inf
    """Largest number of tokens that the server accepts in a list, as configured or learned."""
    check_every: int = DEFAULT_CHECK_EVERY
    """Number of merged calls per check of one item, once the first calls have been checked."""
    off_reason: str = ""
    """Reason why nothing is merged although the mode asks for it. Empty if calls may be merged."""
    rates_by_size: dict[int, float] = field(default_factory=dict)
    """Newest measured items per unit-second, by size. Only in mode `auto`."""
    gain: float | None = None
    """Items per unit-second of the best size, divided by those of single calls. `None` if it is not measured.

    The gain is the product of the gains of single steps, because older measurements were made under another
    load.
    """
    checked_calls: int = 0
    """Number of calls whose answers equalled those to single calls."""
    _best_size: int = 1
    _epoch: Epoch | None = None
    _is_trial_unfilled: bool = False
    """True if too few requests came in time to fill calls in the newest trial of a larger size."""
    _epochs_until_trial: int = 1
    """Number of epochs of the best size until the next trial, at least."""
    _trial_count: int = 0
    _trial_loss_unit_s: float = 0.0
    """Number of unit-seconds that the newest trial lost."""
    _unit_s_since_trial: float = 0.0
    """Number of unit-seconds of calls since the newest trial."""
    _trial_began_at: float = float("-inf")
    _call_s: float = 0.0
    """Seconds that a call of the best size takes, from the lease of its first item on."""
    _usual_load: float = 0.0
    """Average load of recent calls of the best size."""
    _learned_at: float = inf
    """Time at which the newest fact that still holds was learned."""
    _calls_since_check: int = 0
    """Number of merged calls since the last check of an item."""
    _configured_caps: tuple[int | None, float] = (None, inf)

    def __post_init__(self) -> None:
        self._configured_caps = self.server_max_items, self.server_max_tokens

    def choose_max_items(self, now: float) -> int:
        """Return the largest number of items that a merged call may have now. 1 if nothing is merged."""
        if self.mode is MergeMode.OFF or self.off_reason:
            return 1
        if now - self._learned_at >= RELEARN_S:
            self._relax_caps(now)
        return (
            self.allowed_size
            if self.mode is MergeMode.ON
            else min(self.allowed_size, self._choose_auto_size(now))
        )

    def _relax_caps(self, now: float) -> None:
        """Double the learned limits of the server, up to the configured ones."""
        items, tokens = self._configured_caps
        if self.server_max_items is not None:
            doubled = self.server_max_items * 2 if items is None else min(self.server_max_items * 2, items)
            self.server_max_items = doubled if doubled < MAX_LEARNED_ITEMS else None
        self.server_max_tokens = (
            min(self.server_max_tokens * 2, tokens) if self.server_max_tokens < MAX_LEARNED_TOKENS else tokens
        )
        self._learned_at = (
            inf if (self.server_max_items, self.server_max_tokens) == self._configured_caps else now
        )

    @property
    def best_size(self) -> int:
        """Size that is known to pay best. The size of a running trial does not count."""
        if self.mode is MergeMode.OFF or self.off_reason:
            return 1
        return self.allowed_size if self.mode is MergeMode.ON else min(self.allowed_size, self._best_size)

    @property
    def allowed_size(self) -> int:
        """Largest size that the operator allows and that the server accepts, as far as is known."""
        return self.max_size if self.server_max_items is None else min(self.max_size, self.server_max_items)

    @property
    def summary(self) -> str:
        """Sentence for operators that says what is merged, or why nothing is."""
        size, server_max_items, alone = self.best_size, self.server_max_items, "each request is sent alone"
        if self.off_reason or self.mode is MergeMode.OFF:
            return f"{alone}: {self.off_reason or 'batching is off'}"
        if self.allowed_size == 1:
            return f"{alone}: {'the rule says so' if self.max_size == 1 else 'the server takes one'}"
        if self.mode is MergeMode.AUTO and self.gain is None:
            return "whether merging pays is not measured yet"
        if size == 1:
            why = (
                "no other request arrives within max_delay_s"
                if self._is_trial_unfilled
                else "merging does not pay"
            )
            return f"{alone}: {why}"
        text = f"up to {size} items a call"
        if self.gain is not None:
            text += f", {self.gain:.3g} times the items of single calls for the same units"
        if server_max_items is not None and server_max_items < self.max_size:
            text += f"; the server takes {server_max_items}"
        return (
            text if self.checked_calls >= INITIAL_CHECKS else f"{text}; its first answers are being compared"
        )

    # Refusals of the server.

    def learn_from_refusal(self, outcome: Delivered | TooLarge, items: int, tokens: int, now: float) -> bool:
        """Learn from the outcome of a call with this many items and tokens. Return whether it was refused for
        its size.

        A call with a single item never is.
        """
        if items < 2:
            return False
        max_items: int | None = 0
        max_tokens: int | None = None
        if isinstance(outcome, Delivered):
            max_items = parse_item_cap(outcome.status, outcome.body)
            max_tokens = parse_token_cap(outcome.status, outcome.body)
            # A 413 without a known message: the size is the reason, but the limit is unknown.
            if max_items is None and max_tokens is None and outcome.status == 413:
                max_items = 0
        if max_items is not None:
            learned = max(1, min(max_items, items - 1) if max_items > 0 else items // 2)
            self.server_max_items = (
                learned if self.server_max_items is None else min(self.server_max_items, learned)
            )
        if max_tokens is not None:
            learned_tokens = min(max_tokens, tokens - 1) if max_tokens > 0 else tokens // 2
            self.server_max_tokens = max(1, min(self.server_max_tokens, learned_tokens))
        if max_items is None and max_tokens is None:
            return False
        self._learned_at = now
        allowed = self.allowed_size
        if self._best_size > allowed:
            # The best size is no longer possible, and what was measured belongs to it.
            self._best_size, self.gain, self._epoch = allowed, None, None
        elif self._epoch is not None and self._epoch.size > allowed:
            self._epoch = None  # no call can have that size any more
        return True

    def turn_off(self, why: str) -> None:
        """Merge nothing from now on, and keep the first reason."""
        self.off_reason = self.off_reason or why

    # Checks of answers.

    def take_check_count(self) -> int | None:
        """Return how many items of the merged call that was just answered are to be sent alone as well.
        `None` for all."""
        if self.checked_calls < INITIAL_CHECKS:
            return None
        self._calls_since_check += 1
        if self._calls_since_check < self.check_every:
            return 0
        self._calls_since_check = 0
        return 1

    def record_match(self) -> None:
        """Record that a merged call had the same answers as single calls."""
        self.checked_calls += 1

    # What pays.

    def _choose_auto_size(self, now: float) -> int:
        epoch = self._epoch
        if epoch is None:
            epoch = self._epoch = Epoch(self._best_size, now)
        elif epoch.is_probing:
            expected_s = epoch.size / self.rates_by_size[self._best_size]
            if now - epoch.began_at > max(PROBE_TIMEOUT_S, 4 * expected_s):
                # The probes did not come back in time, so the trial ends.
                epoch = self._return_to_best(now)
        return self._best_size if epoch.is_probing and epoch.sent_count >= PROBE_CALLS else epoch.size

    def compute_delay_s(self, rule_s: float) -> float:
        """Return how long a request waits for others. The cost of this wait is part of what is measured."""
        return max(rule_s, min(MAX_STRETCHED_DELAY_S, MAX_DELAY_SHARE * self._call_s))

    def record_send(self, size: int) -> None:
        """Record that a call is sent for which `choose_max_items` returned this size."""
        if self._epoch is not None and size == self._epoch.size:
            self._epoch.sent_count += 1

    def record_call(self, call: CallMeasurement) -> None:
        """Record an answered call, and what it took."""
        epoch = self._epoch
        if self.mode is not MergeMode.AUTO or epoch is None:
            return
        if call.size == self._best_size:
            self._usual_load += (
                (call.load - self._usual_load) / LOAD_AVERAGE_CALLS if self._usual_load else call.load
            )
        # A server with less load answers sooner at any size. Scaling to the usual load removes this effect.
        call = replace(call, unit_s=call.unit_s * max(1.0, self._usual_load / call.load))
        is_trial = epoch.size != self._best_size
        is_counted = epoch.count_call(call)
        self._unit_s_since_trial += call.unit_s
        # Calls after a trial share the server with the last calls of the trial, so their loss is part of its
        # cost.
        if is_trial or (epoch.is_after_trial and call.began_at < epoch.measured_from_at):
            self._trial_loss_unit_s += call.unit_s - call.items / self.rates_by_size[self._best_size]
        if not is_counted:
            return
        is_over = epoch.is_over(call.ended_at)
        if not is_trial:
            if is_over:
                self._record_rate(epoch)
                self._epochs_until_trial -= 1
                self._begin_next_epoch(epoch, call.ended_at)
        elif epoch.all_calls.calls >= PROBE_CALLS and not self._is_trial_better(
            epoch.size, epoch.all_calls, CLEAR_LOSS_SHARE
        ):
            self._return_to_best(call.ended_at)
        elif is_over:
            self._record_rate(epoch)
            if self._is_trial_better(epoch.size, epoch.measured_calls, WIN_FACTOR):
                self._adopt_trial(epoch, call.ended_at)
            else:
                self._return_to_best(call.ended_at)

    def _record_rate(self, epoch: Epoch) -> None:
        self.rates_by_size[epoch.size] = epoch.measured_calls.items_per_unit_s
        if epoch.size == self._best_size:
            self._call_s = epoch.measured_calls.total_call_s / epoch.measured_calls.calls
        if epoch.size == 1 or self.gain is None:
            self.gain = self.rates_by_size[self._best_size] / self.rates_by_size[1]

    def _is_trial_better(self, size: int, trial: Tally, share: float) -> bool:
        """Return whether a trial has more than this share of the best rate, and had enough requests to fill
        its calls."""
        # A larger size whose calls have no more items than before proves nothing.
        is_filled = size < self._best_size or trial.items > trial.calls * self._best_size
        if size > self._best_size:
            self._is_trial_unfilled = not is_filled
        return is_filled and trial.items_per_unit_s > share * self.rates_by_size[self._best_size]

    def _adopt_trial(self, trial: Epoch, now: float) -> None:
        """Make the size of the trial the best one, and try the next size in the same direction at once."""
        previous_size, self._best_size = self._best_size, trial.size
        if self.gain is not None:
            self.gain *= self.rates_by_size[trial.size] / self.rates_by_size[previous_size]
        larger, smaller = self._list_other_sizes()
        next_sizes = (larger if trial.is_filled else []) if trial.size > previous_size else smaller
        if next_sizes:
            self._begin_trial(next_sizes[0], now, has_probes=False)
        else:
            self._return_to_best(now)

    def _return_to_best(self, now: float) -> Epoch:
        """Return to the best size, and begin no trial for a time."""
        self._epochs_until_trial = EPOCHS_BETWEEN_TRIALS
        self._epoch = Epoch(self._best_size, now, is_after_trial=True)
        return self._epoch

    def _begin_next_epoch(self, epoch: Epoch, now: float) -> None:
        """Begin an epoch after one of the best size: another one of the best size, or a trial."""
        self._epoch = Epoch(self._best_size, now)
        is_affordable = self._trial_loss_unit_s <= MAX_TRIAL_COST * self._unit_s_since_trial
        if self._epochs_until_trial > 0 or not (
            is_affordable or now - self._trial_began_at >= MAX_TRIAL_PAUSE_S
        ):
            return
        larger, smaller = self._list_other_sizes()
        # Trials take turns: two larger sizes, the next smaller one, and size 1.
        trials = [*(larger[:2] if epoch.is_filled else ()), *smaller[:1], *smaller[-1:]]
        if trials:
            self._begin_trial(trials[self._trial_count % len(trials)], now)
            self._trial_count += 1

    def _begin_trial(self, size: int, now: float, *, has_probes: bool = True) -> None:
        self._epoch = Epoch(size, now, has_probes=has_probes)
        self._trial_began_at, self._trial_loss_unit_s, self._unit_s_since_trial = now, 0.0, 0.0

    def _list_other_sizes(self) -> tuple[list[int], list[int]]:
        """Return the sizes above the best one and those below it, the nearest first."""
        allowed = self.allowed_size
        sizes = {1, allowed, *(size for size in self.preferred_sizes if size < allowed)}
        size = 2
        while size < allowed:
            sizes.add(size)
            size *= 2
        larger = sorted(size for size in sizes if size > self._best_size)
        return larger, sorted((size for size in sizes if size < self._best_size), reverse=True)
