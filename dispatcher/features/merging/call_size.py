"""Decide how large a merged call may be: what the server accepts, what pays, and why nothing is merged.

There is one `CallSize` for each model behind a path.

    accepted  The server refuses a list that is too long, and the refusal teaches the limit: the number that
              the server states, or half of the size. After RELEARN_S twice as much is tried, because
              another server may answer by then.
    pays      In mode `auto` a `SizeTuner` measures which size pays best.
    off       An answer that cannot be split, or that differs from the answers to single calls, turns merging
              off until the settings change or the process restarts.

docs/contributing/decisions/0018-merged-calls.md explains how the constants were measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

from dispatcher.features.merging.rules import MergeMode
from dispatcher.features.merging.shapes import parse_item_cap, parse_token_cap
from dispatcher.requests.outcomes.outcome import Delivered, TooLarge

RELEARN_S = 3600.0
MAX_LEARNED_ITEMS, MAX_LEARNED_TOKENS = 1 << 20, 1 << 32
"""No call is this large, so a learned limit above it is forgotten."""
INITIAL_CHECKS = 3
"""Number of merged calls whose answers must equal those to single calls, item by item, before checks become
rare."""
CHECK_EVERY = 200
"""Number of merged calls per check of one item, once checks are rare. They then add half a percent of calls,
and a fault that concerns two of 32 items is found after 16 checks on average."""
MAX_DELAY_SHARE, MAX_STRETCHED_DELAY_S = 0.6, 5.0
"""Fraction of the measured call time to wait for more requests if `can_stretch_delay` is set, and the longest
such wait in seconds. While the limit is full, other requests come when calls end, which on a slow server is
later than `max_delay_s`."""

EPOCH_CALLS = 8
"""Number of calls of one size that are measured before the size is judged."""
MIN_EPOCH_S = 0.02
"""Shortest time for which calls are measured. In a shorter time the overhead of this process dominates."""
PROBE_CALLS = 3
"""Number of calls of a trial that are sent before other calls may have its size."""
PROBE_TIMEOUT_S = 60.0
"""Shortest time to wait for the probe calls of a trial: some may have failed, or no requests came. If calls
are slow, the wait is a multiple of the time that they should take."""
CLEAR_LOSS_SHARE, WIN_FACTOR = 0.8, 1.05
"""A trial that reaches less than this share of the best size's rate ends at once. A trial that exceeds this
multiple of it wins."""
EPOCHS_BETWEEN_TRIALS, MAX_TRIAL_COST, MAX_TRIAL_PAUSE_S = 8, 0.01, 3600.0
"""After a lost trial, at least this number of epochs of the best size precede the next trial, and trials may
lose at most this share of all unit-seconds. Even an expensive trial is followed by another one after
MAX_TRIAL_PAUSE_S."""
FILLED_SHARE = 0.6
"""A larger size is tried only if calls reach this share of the present size. Otherwise there are not enough
requests to fill larger calls."""
LOAD_AVERAGE_CALLS = 16
"""Approximate number of recent calls over which the usual load is averaged."""


@dataclass(frozen=True, slots=True)
class CallMeasurement:
    """Measured cost of one call."""

    size: int
    """Largest size that was allowed when the call was formed (`CallSize.choose_max_items`)."""
    items: int
    unit_s: float
    """Units of the limit × seconds, from the lease of each item to the answer."""
    began_at: float
    ended_at: float
    load: float = 1.0
    """Units of this model's calls that were in flight when the call was formed, including its own."""


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
    check_every: int = CHECK_EVERY
    """Number of merged calls per check of one item, once the first calls have been checked."""
    off_reason: str = ""
    """Reason why nothing is merged although the mode asks for it. Empty if calls may be merged."""
    checked_calls: int = 0
    """Number of calls whose answers equalled those to single calls."""
    tuner: SizeTuner = field(init=False)
    """Measures which size pays. Used only in mode `auto`."""
    _learned_at: float = inf
    """Time at which the newest limit that still holds was learned."""
    _calls_since_check: int = 0
    _configured_limits: tuple[int | None, float] = field(init=False)

    def __post_init__(self) -> None:
        self.tuner = SizeTuner(self.preferred_sizes)
        self._configured_limits = self.server_max_items, self.server_max_tokens

    def choose_max_items(self, now: float) -> int:
        """Return the largest number of items that a merged call may have now. 1 if nothing is merged."""
        if self.mode is MergeMode.OFF or self.off_reason:
            return 1
        if now - self._learned_at >= RELEARN_S:
            self._relax_limits(now)
        if self.mode is MergeMode.ON:
            return self.allowed_size
        self.tuner.limit_size(self.allowed_size)
        return self.tuner.choose_size(now)

    @property
    def best_size(self) -> int:
        """Size that is known to pay best. The size of a running trial does not count."""
        if self.mode is MergeMode.OFF or self.off_reason:
            return 1
        tuned_size = self.tuner.best_size if self.mode is MergeMode.AUTO else self.allowed_size
        return min(self.allowed_size, tuned_size)

    @property
    def allowed_size(self) -> int:
        """Largest size that the operator allows and that the server accepts, as far as is known."""
        return self.max_size if self.server_max_items is None else min(self.max_size, self.server_max_items)

    @property
    def gain(self) -> float | None:
        """Items per unit-second of the best size, divided by those of single calls. `None` if it is not
        measured."""
        return self.tuner.gain

    @property
    def summary(self) -> str:
        """Sentence for operators that says what is merged, or why nothing is."""
        size, alone = self.best_size, "each request is sent alone"
        if self.off_reason or self.mode is MergeMode.OFF:
            return f"{alone}: {self.off_reason or 'batching is off'}"
        if self.allowed_size == 1:
            return f"{alone}: {'the rule says so' if self.max_size == 1 else 'the server takes one'}"
        if self.mode is MergeMode.AUTO and self.gain is None:
            return "whether merging pays is not measured yet"
        if size == 1:
            has_no_others = self.tuner.is_trial_unfilled
            why = "no other request arrives within max_delay_s" if has_no_others else "merging does not pay"
            return f"{alone}: {why}"
        text = f"up to {size} items a call"
        if self.gain is not None:
            text += f", {self.gain:.3g} times the items of single calls for the same units"
        if self.server_max_items is not None and self.server_max_items < self.max_size:
            text += f"; the server takes {self.server_max_items}"
        if self.checked_calls < INITIAL_CHECKS:
            text += "; its first answers are being compared"
        return text

    def compute_delay_s(self, rule_s: float) -> float:
        """Return how long a request waits for others to be merged with. The tuner's measurements include
        this wait."""
        return max(rule_s, min(MAX_STRETCHED_DELAY_S, MAX_DELAY_SHARE * self.tuner.call_s))

    def record_send(self, size: int) -> None:
        """Record that a call is sent for which `choose_max_items` returned this size."""
        self.tuner.record_send(size)

    def record_call(self, call: CallMeasurement) -> None:
        """Record an answered call, and what it took."""
        self.tuner.record_call(call)

    # Refusals of the server.

    def learn_from_refusal(self, outcome: Delivered | TooLarge, items: int, tokens: int, now: float) -> bool:
        """Learn from the outcome of a call with this many items and tokens. Return whether it was refused for
        its size.

        A call with a single item never is.
        """
        if items < 2:
            return False
        max_items, max_tokens = _parse_limits(outcome)
        if max_items is None and max_tokens is None:
            return False
        if max_items is not None:
            learned = _compute_learned_limit(max_items, items)
            self.server_max_items = min(self.server_max_items or learned, learned)
        if max_tokens is not None:
            self.server_max_tokens = min(self.server_max_tokens, _compute_learned_limit(max_tokens, tokens))
        self._learned_at = now
        self.tuner.limit_size(self.allowed_size)
        return True

    def _relax_limits(self, now: float) -> None:
        """Double the learned limits of the server, up to the configured ones."""
        items, tokens = self._configured_limits
        if self.server_max_items is not None:
            doubled = 2 * self.server_max_items
            self.server_max_items = items if doubled >= MAX_LEARNED_ITEMS else min(doubled, items or doubled)
        doubled_tokens = 2 * self.server_max_tokens
        self.server_max_tokens = (
            tokens if doubled_tokens >= MAX_LEARNED_TOKENS else min(doubled_tokens, tokens)
        )
        limits = self.server_max_items, self.server_max_tokens
        self._learned_at = inf if limits == self._configured_limits else now

    def turn_off(self, why: str) -> None:
        """Merge nothing from now on, and keep the first reason."""
        self.off_reason = self.off_reason or why

    # Checks of answers.

    def take_check_count(self) -> int | None:
        """Return how many items of the merged call that was just answered are to be sent alone as well.
        `None` for all."""
        if self.checked_calls < INITIAL_CHECKS:
            return None
        self._calls_since_check = (self._calls_since_check + 1) % self.check_every
        return 0 if self._calls_since_check else 1

    def record_match(self) -> None:
        """Record that a merged call had the same answers as single calls."""
        self.checked_calls += 1


def _parse_limits(outcome: Delivered | TooLarge) -> tuple[int | None, int | None]:
    """Return the limits of items and of tokens that a refusal states. 0 if a limit exists, but its number is
    not stated."""
    if isinstance(outcome, TooLarge):
        return 0, None
    items, tokens = (
        parse_item_cap(outcome.status, outcome.body),
        parse_token_cap(outcome.status, outcome.body),
    )
    is_unexplained = outcome.status == 413 and items is None and tokens is None
    return (0 if is_unexplained else items), tokens


def _compute_learned_limit(stated: int, sent: int) -> int:
    """Return the limit that the refusal of a call shows: the stated number, or half of the number sent."""
    return max(1, min(stated, sent - 1) if stated > 0 else sent // 2)


@dataclass(slots=True)
class SizeTuner:
    """Find the size of calls that pays best, in items per unit-second: the number of items, divided by the
    units of the limit that they held and by how long, including the wait for other requests.

    Sizes 1, 2, 4 … are compared one after the other, because calls of two sizes at once would wait for each
    other. Calls of one size are measured in epochs. From time to time the best size is compared with its
    neighbours in a trial. A trial begins with PROBE_CALLS calls, while all other calls have the best size, so
    these calls show most losses. A size that is clearly worse ends at once. The loss of a trial, including
    its effect on the calls after it, determines the pause before the next trial: until the loss is
    MAX_TRIAL_COST of the unit-seconds used since. On a server where merging does not pay, trials therefore
    cost about one percent.
    """

    preferred_sizes: tuple[int, ...] = ()
    best_size: int = 1
    rates_by_size: dict[int, float] = field(default_factory=dict)
    """Newest measured items per unit-second, by size."""
    gain: float | None = None
    """Rate of the best size, divided by the rate of single calls. `None` if it is not measured.

    It is the product of the gains of single steps, because older rates were measured under another load.
    """
    call_s: float = 0.0
    """Seconds that a call of the best size takes, from the lease of its first item on."""
    is_trial_unfilled: bool = False
    """True if too few requests came in time to fill calls in the newest trial of a larger size."""
    _max_size: int = 1
    _epoch: _Epoch | None = None
    _usual_load: float = 0.0
    """Average load of recent calls of the best size."""
    _epochs_until_trial: int = 1
    """Number of epochs of the best size until the next trial, at least."""
    _lost_trials: int = 0
    _trial_began_at: float = -inf
    _trial_loss_unit_s: float = 0.0
    """Number of unit-seconds that the newest trial lost."""
    _unit_s_since_trial: float = 0.0
    """Number of unit-seconds of calls since the newest trial began."""

    def limit_size(self, max_size: int) -> None:
        """Use no size above this one from now on."""
        self._max_size = max_size
        if self.best_size > max_size:
            # What was measured belongs to the size that is no longer possible.
            self.best_size, self.gain, self._epoch = max_size, None, None
        elif self._epoch is not None and self._epoch.size > max_size:
            self._epoch = None

    def choose_size(self, now: float) -> int:
        """Return the size of the next call."""
        epoch = self._epoch
        if epoch is None:
            epoch = self._epoch = _Epoch(self.best_size, now)
        if not epoch.is_probing:
            return epoch.size
        expected_s = epoch.size / self.rates_by_size[self.best_size]
        if now - self._trial_began_at > max(PROBE_TIMEOUT_S, 4 * expected_s):
            self._end_trial(now)  # the probes did not come back in time
            return self.best_size
        return epoch.size if epoch.sent_count < PROBE_CALLS else self.best_size

    def record_send(self, size: int) -> None:
        """Record that a call is sent for which `choose_size` returned this size."""
        if self._epoch is not None and size == self._epoch.size:
            self._epoch.sent_count += 1

    def record_call(self, call: CallMeasurement) -> None:
        """Record an answered call, and what it took."""
        epoch = self._epoch
        if epoch is None:
            return
        if call.size == self.best_size:
            change = (call.load - self._usual_load) / LOAD_AVERAGE_CALLS
            self._usual_load = self._usual_load + change if self._usual_load else call.load
        # A server with less load answers sooner at any size. Scaling to the usual load removes this effect.
        call = replace(call, unit_s=call.unit_s * max(1.0, self._usual_load / call.load))
        epoch.count_call(call)
        self._unit_s_since_trial += call.unit_s
        # Calls after a trial share the server with the last calls of the trial, so their loss is part of its
        # cost.
        if epoch.is_trial or (epoch.is_after_trial and call.began_at < epoch.measured_from_at):
            self._trial_loss_unit_s += call.unit_s - call.items / self.rates_by_size[self.best_size]
        if call.size == epoch.size:
            self._judge_epoch(epoch, call.ended_at)

    def _judge_epoch(self, epoch: _Epoch, now: float) -> None:
        """End the epoch if enough is known about its size."""
        probed, measured = epoch.all_calls, epoch.measured_calls
        if (
            epoch.is_trial
            and probed.calls >= PROBE_CALLS
            and not self._is_better(epoch, probed, CLEAR_LOSS_SHARE)
        ):
            self._end_trial(now)
            return
        if measured.calls < EPOCH_CALLS or now - epoch.measured_from_at < MIN_EPOCH_S:
            return
        self.rates_by_size[epoch.size] = measured.items_per_unit_s
        if epoch.size == 1 or self.gain is None:
            self.gain = self.rates_by_size[self.best_size] / self.rates_by_size[1]
        if epoch.is_trial and not self._is_better(epoch, measured, WIN_FACTOR):
            self._end_trial(now)
            return
        previous_size, self.best_size = self.best_size, epoch.size
        self.call_s = measured.total_call_s / measured.calls
        self._epoch = _Epoch(epoch.size, now)
        larger, smaller = self._list_other_sizes()
        if measured.items < FILLED_SHARE * measured.calls * epoch.size:
            larger = []
        if epoch.is_trial:
            # The trial has won. The next size in the same direction is tried at once.
            self.gain *= self.rates_by_size[epoch.size] / self.rates_by_size[previous_size]
            self._epochs_until_trial = EPOCHS_BETWEEN_TRIALS
            self._begin_trial(now, (larger if epoch.size > previous_size else smaller)[:1])
            return
        self._epochs_until_trial -= 1
        is_paid = self._trial_loss_unit_s <= MAX_TRIAL_COST * self._unit_s_since_trial
        if self._epochs_until_trial <= 0 and (is_paid or now - self._trial_began_at >= MAX_TRIAL_PAUSE_S):
            # These sizes take turns: two larger ones, the next smaller one, and 1.
            self._begin_trial(now, [*larger[:2], *smaller[:1], *smaller[-1:]])

    def _begin_trial(self, now: float, sizes: list[int]) -> None:
        """Begin a trial of the size whose turn it is, if there is any."""
        if sizes:
            self._epoch = _Epoch(sizes[self._lost_trials % len(sizes)], now, is_trial=True)
            self._trial_began_at, self._trial_loss_unit_s, self._unit_s_since_trial = now, 0.0, 0.0

    def _end_trial(self, now: float) -> None:
        """Return to the best size, and begin no trial for a time."""
        self._lost_trials += 1
        self._epochs_until_trial = EPOCHS_BETWEEN_TRIALS
        self._epoch = _Epoch(self.best_size, now, is_after_trial=True)

    def _is_better(self, trial: _Epoch, calls: _Tally, share: float) -> bool:
        """Return whether the calls of a trial have more than this share of the best rate, and had enough
        requests to fill them."""
        # A larger size whose calls have no more items than before proves nothing.
        is_filled = trial.size < self.best_size or calls.items > calls.calls * self.best_size
        if trial.size > self.best_size:
            self.is_trial_unfilled = not is_filled
        return is_filled and calls.items_per_unit_s > share * self.rates_by_size[self.best_size]

    def _list_other_sizes(self) -> tuple[list[int], list[int]]:
        """Return the sizes above the best one and those below it, the nearest first."""
        allowed = self._max_size
        powers = (1 << power for power in range(allowed.bit_length()))
        sizes = sorted({*powers, allowed, *(size for size in self.preferred_sizes if size < allowed)})
        larger = [size for size in sizes if size > self.best_size]
        return larger, [size for size in reversed(sizes) if size < self.best_size]


@dataclass(slots=True)
class _Tally:
    """Sums over several calls."""

    calls: int = 0
    items: int = 0
    unit_s: float = 0.0
    total_call_s: float = 0.0

    def add_call(self, call: CallMeasurement) -> None:
        self.calls += 1
        self.items += call.items
        self.unit_s += call.unit_s
        self.total_call_s += call.ended_at - call.began_at

    @property
    def items_per_unit_s(self) -> float:
        return self.items / max(self.unit_s, 1e-9)


@dataclass(slots=True)
class _Epoch:
    """Consecutive calls of one size.

    When the first calls of a size arrive, the server still works on calls of the previous size. Only calls
    are measured that began after two events: the last call of another size had ended, and so had a call of
    this size that began after that. Such calls shared the server with calls of their own size, as many as
    usual.
    """

    size: int
    others_ended_at: float
    """Time at which the last call of another size ended, or the epoch began."""
    is_trial: bool = False
    is_after_trial: bool = False
    """True if the epoch follows a trial that was lost. Its effect on the server's queue is part of the cost
    of the trial."""
    sent_count: int = 0
    measured_from_at: float = inf
    """Time from which on calls that begin are measured."""
    all_calls: _Tally = field(default_factory=_Tally)
    measured_calls: _Tally = field(default_factory=_Tally)

    def count_call(self, call: CallMeasurement) -> None:
        """Count a call, of this size or of another one."""
        if call.size != self.size:
            # The call shared the server with this epoch's calls, so measuring begins anew.
            self.others_ended_at, self.measured_from_at, self.measured_calls = call.ended_at, inf, _Tally()
            return
        self.all_calls.add_call(call)
        if call.began_at >= self.measured_from_at:
            self.measured_calls.add_call(call)
        # Probes run beside calls of the best size, so they never start the measurement.
        elif call.began_at >= self.others_ended_at and not (
            self.is_trial and self.all_calls.calls <= PROBE_CALLS
        ):
            self.measured_from_at = min(self.measured_from_at, call.ended_at)

    @property
    def is_probing(self) -> bool:
        """True until the first calls of a trial have returned."""
        return self.is_trial and self.all_calls.calls < PROBE_CALLS
