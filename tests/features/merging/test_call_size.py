"""Size of merged calls: it is found by measurements, at low cost, and never exceeds the limits."""

from __future__ import annotations

from math import inf, isclose
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dispatcher.features.merging.call_size import (
    CHECK_EVERY,
    EPOCH_CALLS,
    EPOCHS_BETWEEN_TRIALS,
    INITIAL_CHECKS,
    MAX_TRIAL_PAUSE_S,
    MIN_EPOCH_S,
    PROBE_CALLS,
    PROBE_TIMEOUT_S,
    RELEARN_S,
    CallMeasurement,
    CallSize,
    SizeTuner,
)
from dispatcher.features.merging.rules import MergeMode
from dispatcher.requests.outcomes.outcome import Delivered, TooLarge
from tests.features.merging.call_simulation import (
    ModelServer,
    SimulatedDispatcher,
    logarithmic,
    measure_rate_of_size,
    parallel,
    serial,
)

SIZES = (1, 2, 4, 8, 16, 32, 64)
ITEM_TIMES = st.floats(0.0001, 0.01)
SERVERS = st.one_of(
    st.builds(serial, st.floats(0.0, 0.01), ITEM_TIMES, st.sampled_from([1, 1, 2, 4])),
    st.builds(parallel, st.floats(0.0, 0.01), ITEM_TIMES),
    st.builds(logarithmic, st.floats(0.0, 0.01), ITEM_TIMES),
)
LIMITS = st.integers(1, 128)


def tuned_size(**tuner: Any) -> CallSize:
    """Return a size in mode `auto` for which measurements exist."""
    size = CallSize(MergeMode.AUTO, 8, checked_calls=INITIAL_CHECKS)
    size.tuner = SizeTuner(**{"gain": 1.0} | tuner)
    return size


def build_size_refusal(items: int, max_items: int) -> Delivered:
    error = f"batch size {items} > maximum allowed batch size {max_items}"
    return Delivered(413, msgspec.json.encode({"error": error, "error_type": "Validation"}))


# Which size pays.


@pytest.mark.slow
@pytest.mark.first
@settings(max_examples=25, deadline=None)
@given(SERVERS, LIMITS, st.sampled_from(SIZES))
@example(serial(0.005, 0.0001), 32, 32)
@example(serial(0.001, 0.001), 64, 64)
@example(parallel(0.0, 0.005), 64, 32)
@example(logarithmic(0.0, 0.005), 128, 64)
@example(serial(0.005, 0.0001, workers=4), 32, 32)
@example(serial(0.1, 0.005), 64, 32)
@example(serial(0.05, 0.001), 32, 32)
@example(serial(0.0078125, 0.0078125, workers=4), 7, 2)
@example(serial(0.0078125, 0.0078125, workers=4), 32, 8)
def test_size_that_is_found_has_nine_tenths_of_the_best_rate(
    server: ModelServer, limit: int, max_items: int
) -> None:
    """All sizes are compared in items per unit-second. Delays are stretched if calls are slow."""
    dispatcher = SimulatedDispatcher(
        CallSize(MergeMode.AUTO, max_items), server, limit, can_stretch_delay=True, jitter=0.05
    ).run_batch(20_000)
    rates = {
        size: measure_rate_of_size(size, server, limit, jitter=0.05) for size in SIZES if size <= max_items
    }
    assert rates[dispatcher.size.best_size] >= 0.9 * max(rates.values())


@pytest.mark.parametrize(("item_s", "limit", "best"), [(0.0078125, 32, 8), (0.003, 32, 8), (0.0005, 5, 2)])
def test_rates_are_not_distorted_by_calls_of_other_sizes(item_s: float, limit: int, best: int) -> None:
    """With four workers, single calls beside the last large ones are answered sooner than usual."""
    server = serial(0.0078125, item_s, workers=4)
    dispatcher = SimulatedDispatcher(
        CallSize(MergeMode.AUTO, best), server, limit, can_stretch_delay=True
    ).run_batch(60_000)
    assert dispatcher.size.best_size == best
    for size, measure_rate in dispatcher.size.tuner.rates_by_size.items():
        assert measure_rate == pytest.approx(measure_rate_of_size(size, server, limit), rel=0.02)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    st.one_of(
        st.builds(parallel, st.floats(0.0, 0.01), ITEM_TIMES),
        st.builds(lambda item_s: ModelServer(lambda items: item_s * items**1.2), ITEM_TIMES),
        st.builds(serial, st.just(0.0), ITEM_TIMES),
    ),
    st.integers(1, 256),
)
@example(parallel(0.0, 0.005), 256)
@example(parallel(0.003, 0.001), 256)
def test_trials_cost_little_if_merging_does_not_pay(server: ModelServer, limit: int) -> None:
    """The time for 5,000 items is compared, while merging is tried repeatedly."""
    merged = SimulatedDispatcher(CallSize(MergeMode.AUTO, 32), server, limit).run_batch(5000)
    single = SimulatedDispatcher(CallSize(MergeMode.OFF, 32), server, limit).run_batch(5000)
    assert (merged.now - 1000.0) * 0.95 <= single.now - 1000.0 + server.compute_call_s(2), (
        "except for the newest call"
    )
    assert merged.size.best_size == 1


@pytest.mark.slow
@pytest.mark.parametrize("limit", [8, 64, 256])
@pytest.mark.parametrize(
    "server",
    [
        serial(0.005, 0.0001),
        serial(0.001, 0.001),
        serial(0.005, 0.0001, workers=4),
        parallel(0.0, 0.005),
        logarithmic(0.005, 0.001),
    ],
)
def test_trials_cost_little_in_a_long_run(server: ModelServer, limit: int) -> None:
    dispatcher = SimulatedDispatcher(CallSize(MergeMode.AUTO, 32), server, limit).run_batch(20_000)
    assert dispatcher.measure_rate(10_000) >= 0.96 * measure_rate_of_size(
        dispatcher.size.best_size, server, limit
    )


def test_best_size_is_found_again_after_the_server_was_replaced() -> None:
    dispatcher = SimulatedDispatcher(CallSize(MergeMode.AUTO, 32), parallel(0.0, 0.005), 64).run_batch(5000)
    assert dispatcher.size.best_size == 1
    dispatcher.replace_server(serial(0.005, 0.0001))
    assert dispatcher.run_batch(20_000).size.best_size == 32
    assert dispatcher.size.gain is not None
    assert dispatcher.size.gain > 15
    dispatcher.replace_server(parallel(0.0, 0.005))
    assert dispatcher.run_batch(100_000).size.best_size == 1


def test_gain_is_the_rate_of_the_best_size_relative_to_single_calls() -> None:
    server = serial(0.005, 0.0001)
    dispatcher = SimulatedDispatcher(CallSize(MergeMode.AUTO, 32), server, 64)
    assert not dispatcher.size.gain, "it is not measured yet"
    dispatcher.run_batch(20_000)
    gain = measure_rate_of_size(32, server, 64) / measure_rate_of_size(1, server, 64)
    assert dispatcher.size.gain is not None
    assert isclose(dispatcher.size.gain, gain, rel_tol=0.1)
    # Later trials measure single calls under another load, which must not distort the gain.
    assert isclose(dispatcher.run_batch(100_000).size.gain or 0.0, gain, rel_tol=0.1)


def test_gain_is_updated_when_single_calls_are_measured_again() -> None:
    calls = SequentialCalls(CallSize(MergeMode.AUTO, 2))
    calls.run_until_size(2, 0.1)
    for _ in range(PROBE_CALLS + 1 + EPOCH_CALLS):
        calls.run_call(0.09)
    assert isclose(calls.size.gain or 0.0, 0.1 / 0.09)
    calls.run_until_size(1, 0.09)
    for _ in range(PROBE_CALLS + 1 + EPOCH_CALLS):
        assert calls.run_call(0.093) == 1
    assert calls.size.best_size == 2
    assert isclose(calls.size.gain or 0.0, 0.093 / 0.09)


def test_preferred_sizes_above_the_allowed_size_do_not_stop_the_trials() -> None:
    calls = SequentialCalls(CallSize(MergeMode.AUTO, 2, preferred_sizes=(100,)))
    calls.run_until_size(2, 0.1)
    for _ in range(PROBE_CALLS + 1 + EPOCH_CALLS):
        calls.run_call(0.05)
    sent = [calls.run_call(0.05) for _ in range(2 * EPOCHS_BETWEEN_TRIALS * EPOCH_CALLS)]
    assert 1 in sent, "the trials continue"


def test_gain_of_single_calls_is_one() -> None:
    assert (
        SimulatedDispatcher(CallSize(MergeMode.AUTO, 32), parallel(0.0, 0.005), 64).run_batch(5000).size.gain
        == 1.0
    )


def test_preferred_size_is_tried_in_addition_to_the_powers_of_two() -> None:
    """A call with more than 24 items takes ten times as long."""
    server = ModelServer(lambda items: 0.005 if items <= 24 else 0.05)
    dispatcher = SimulatedDispatcher(
        CallSize(MergeMode.AUTO, 64, preferred_sizes=(24, 100)), server, 128
    ).run_batch(20_000)
    assert dispatcher.size.best_size == 24
    assert set(dispatcher.size.tuner.rates_by_size) <= {1, 2, 4, 8, 16, 24, 32, 64}


def test_largest_size_is_tried_even_if_it_is_no_power_of_two() -> None:
    assert (
        SimulatedDispatcher(CallSize(MergeMode.AUTO, 48), serial(0.005, 0.0001), 128)
        .run_batch(20_000)
        .size.best_size
        == 48
    )


def test_mode_on_measures_nothing() -> None:
    size = CallSize(MergeMode.ON, 32)
    SimulatedDispatcher(size, parallel(0.0, 0.005), 64).run_batch(1000)
    assert (size.choose_max_items(5000.0), size.best_size, size.gain, size.tuner.rates_by_size) == (
        32,
        32,
        None,
        {},
    )


def test_mode_off_merges_nothing() -> None:
    size = CallSize(MergeMode.OFF, 32)
    assert set(SimulatedDispatcher(size, serial(0.005, 0.0001), 64).run_batch(1000).call_sizes) == {1}
    assert size.best_size == 1


# Trials.


def make_call(size: int, items: int, item_s: float, at: float, load: float = 1.0) -> CallMeasurement:
    """Return a call whose items were leased for `item_s` each."""
    return CallMeasurement(size, items, items * item_s, at - item_s, at, load)


class SequentialCalls:
    """Calls one after the other, whose items are leased for the given time each."""

    def __init__(self, size: CallSize) -> None:
        self.size = size
        self.now = 0.0
        self.load = 1.0

    def run_call(self, item_s: float, *, items: int | None = None) -> int:
        """Run one call whose items take this long. Return its size."""
        max_items = self.size.choose_max_items(self.now)
        self.size.record_send(max_items)
        self.now += item_s
        self.size.record_call(make_call(max_items, items or max_items, item_s, self.now, self.load))
        return max_items

    def run_until_size(self, size: int, item_s: float) -> None:
        """Run calls until the next one would have this size."""
        for _ in range(10_000):
            if self.size.choose_max_items(self.now) == size:
                return
            self.run_call(item_s)
        raise AssertionError(f"no call of size {size} was sent")


def test_first_trial_follows_one_epoch_and_begins_with_a_few_calls() -> None:
    calls = SequentialCalls(CallSize(MergeMode.AUTO, 32))
    assert [calls.run_call(0.1) for _ in range(EPOCH_CALLS + 1)] == [1] * (EPOCH_CALLS + 1)
    sent = []
    for _ in range(10):
        sent.append(calls.size.choose_max_items(calls.now))
        calls.size.record_send(sent[-1])
    assert sent == [2] * PROBE_CALLS + [1] * (10 - PROBE_CALLS)
    for _ in range(PROBE_CALLS):
        assert calls.size.choose_max_items(calls.now) == 1, "until the first calls are answered"
        calls.now += 0.1
        calls.size.record_call(make_call(2, 2, 0.1, calls.now))
    assert calls.size.choose_max_items(calls.now) == 2


def test_trial_that_is_clearly_worse_ends_with_its_first_calls() -> None:
    calls = SequentialCalls(CallSize(MergeMode.AUTO, 32))
    calls.run_until_size(2, 0.1)
    assert [calls.run_call(0.13) for _ in range(PROBE_CALLS)] == [2] * PROBE_CALLS
    assert calls.size.choose_max_items(calls.now) == 1
    assert 2 not in calls.size.tuner.rates_by_size, (
        "calls that shared the server with others are not measured"
    )


def test_trial_that_is_slightly_worse_or_not_better_is_measured_and_lost() -> None:
    for item_s in (0.11, 0.1, 0.0955):
        calls = SequentialCalls(CallSize(MergeMode.AUTO, 32))
        calls.run_until_size(2, 0.1)
        assert [calls.run_call(item_s) for _ in range(PROBE_CALLS + 1 + EPOCH_CALLS)] == [2] * (
            PROBE_CALLS + 1 + EPOCH_CALLS
        )
        assert calls.size.choose_max_items(calls.now) == 1
        assert isclose(calls.size.tuner.rates_by_size[2], 1 / item_s)
        assert calls.size.best_size == 1
        call_count = 0
        while calls.size.choose_max_items(calls.now) == 1:
            calls.run_call(0.1)
            call_count += 1
        assert call_count >= EPOCHS_BETWEEN_TRIALS * EPOCH_CALLS, "even if the trial has cost nothing"


def test_won_trial_is_followed_by_another_at_once_and_lost_trial_by_a_pause() -> None:
    calls = SequentialCalls(CallSize(MergeMode.AUTO, 8))
    calls.run_until_size(2, 0.1)
    for _ in range(PROBE_CALLS + 1 + EPOCH_CALLS):
        calls.run_call(0.09)
    assert calls.size.best_size == 2
    assert calls.size.choose_max_items(calls.now) == 4
    for _ in range(3):
        assert calls.run_call(0.2) == 4
    # The next trial waits for some epochs, and until the loss is a hundredth of the work done since.
    call_count = 0
    while calls.run_call(0.09) == 2:
        call_count += 1
    assert call_count >= EPOCHS_BETWEEN_TRIALS * EPOCH_CALLS
    lost_s = 3 * 4 * 0.2 - 3 * 4 * 0.09
    assert call_count * 2 * 0.09 >= 100 * 0.9 * lost_s


def test_lower_load_during_a_trial_is_not_credited_to_its_size() -> None:
    calls = SequentialCalls(CallSize(MergeMode.AUTO, 8))
    calls.load = 10.0
    calls.run_until_size(2, 0.1)
    calls.load = 5.0
    for _ in range(PROBE_CALLS + 1 + EPOCH_CALLS):
        assert calls.run_call(0.05) == 2
    assert calls.size.best_size == 1
    calls.load = 10.0
    calls.run_until_size(2, 0.1)
    for _ in range(PROBE_CALLS + 1 + EPOCH_CALLS):
        assert calls.run_call(0.05) == 2
    assert calls.size.best_size == 2, "under the same load the size wins"


def test_pause_after_an_expensive_trial_is_limited() -> None:
    """A trial that hung for an hour would otherwise have to be paid for by many days of work."""
    calls = SequentialCalls(CallSize(MergeMode.AUTO, 8))
    calls.run_until_size(2, 0.1)
    for _ in range(3):
        calls.run_call(3600.0)
    assert calls.size.choose_max_items(calls.now) == 1
    began_at = calls.now
    calls.run_until_size(2, 1.0)
    assert calls.now - began_at <= MAX_TRIAL_PAUSE_S + 100


def test_trial_ends_if_its_first_calls_are_never_answered() -> None:
    calls = SequentialCalls(CallSize(MergeMode.AUTO, 8))
    calls.run_until_size(2, 0.1)
    for _ in range(PROBE_CALLS):
        calls.size.record_send(2)
    assert calls.size.choose_max_items(calls.now + PROBE_TIMEOUT_S - 1) == 1
    assert calls.size.choose_max_items(calls.now + PROBE_TIMEOUT_S + 1) == 1
    calls.now += PROBE_TIMEOUT_S + 2
    for _ in range(EPOCH_CALLS):
        assert calls.run_call(0.1) == 1
    calls.run_until_size(2, 0.1)


def test_first_calls_of_a_trial_have_more_time_on_a_slow_server() -> None:
    calls = SequentialCalls(CallSize(MergeMode.AUTO, 8))
    calls.run_until_size(2, 100.0)
    for _ in range(PROBE_CALLS):
        calls.size.record_send(2)
    assert calls.size.choose_max_items(calls.now + 700.0) == 1
    for _ in range(PROBE_CALLS):
        calls.size.record_call(CallMeasurement(2, 2, 200.0, calls.now, calls.now + 700.0))
    assert calls.size.choose_max_items(calls.now + 700.0) == 2


def test_trial_is_lost_if_its_calls_are_not_filled() -> None:
    """The second request of each call arrives too late."""
    calls = SequentialCalls(CallSize(MergeMode.AUTO, 8))
    calls.run_until_size(2, 0.1)
    for _ in range(PROBE_CALLS):
        assert calls.run_call(0.01, items=1) == 2
    assert calls.size.choose_max_items(calls.now) == 1


def test_larger_size_is_not_tried_if_calls_are_half_empty() -> None:
    calls = SequentialCalls(CallSize(MergeMode.AUTO, 32))
    calls.run_until_size(2, 0.1)
    for _ in range(PROBE_CALLS + 1 + EPOCH_CALLS):
        calls.run_call(0.05)
    assert calls.size.choose_max_items(calls.now) == 4
    for _ in range(PROBE_CALLS + 1 + EPOCH_CALLS + PROBE_CALLS):
        calls.run_call(0.025, items=3)
    assert calls.size.best_size == 4
    tried_sizes = {calls.run_call(0.025, items=2) for _ in range(2000)}
    assert tried_sizes == {1, 2, 4}


def test_requests_that_arrive_one_by_one_are_sent_one_by_one() -> None:
    dispatcher = SimulatedDispatcher(
        CallSize(MergeMode.AUTO, 32), serial(0.005, 0.0001), 64, max_delay_s=0.02, arrival_interval_s=0.05
    ).run_batch(5000)
    assert dispatcher.size.best_size == 1
    assert set(dispatcher.call_sizes) == {1}
    assert dispatcher.unit_s / dispatcher.answered_items < 0.0052, "no request waits for others"


def test_delay_is_stretched_on_a_slow_server_if_the_rule_allows_it() -> None:
    """A unit becomes free every 0.1 s, so that no second request arrives within 0.02 s."""
    slow = SimulatedDispatcher(
        CallSize(MergeMode.AUTO, 32), serial(0.1, 0.001), 64, max_delay_s=0.02, can_stretch_delay=True
    )
    assert slow.size.compute_delay_s(0.02) == 0.02, "nothing is measured yet"
    slow.run_batch(10_000)
    assert slow.size.best_size == 32
    assert 0.1 < slow.size.compute_delay_s(0.02) < 0.2
    assert slow.size.compute_delay_s(1.0) == 1.0
    very_slow = SimulatedDispatcher(
        CallSize(MergeMode.AUTO, 32), serial(20.0, 0.0), 64, can_stretch_delay=True
    ).run_batch(100)
    assert very_slow.size.compute_delay_s(0.02) == 5.0
    mode_on = SimulatedDispatcher(CallSize(MergeMode.ON, 32), serial(0.1, 0.001), 64).run_batch(1000)
    assert mode_on.size.compute_delay_s(0.02) == 0.02, "the delay of the rule is used if nothing is measured"


def test_very_short_calls_are_measured_for_a_minimum_time() -> None:
    """A few microseconds are mostly the overhead of this process."""
    calls = SequentialCalls(CallSize(MergeMode.AUTO, 8))
    while not calls.size.tuner.rates_by_size:
        calls.run_call(1e-5)
    assert calls.now >= MIN_EPOCH_S


def test_calls_of_the_previous_size_are_not_measured() -> None:
    calls = SequentialCalls(CallSize(MergeMode.AUTO, 8))
    calls.run_until_size(2, 0.1)
    for _ in range(100):
        calls.size.record_call(make_call(1, 1, 0.001, calls.now + 0.1))
        calls.size.record_call(CallMeasurement(2, 2, 0.002, calls.now - 1.0, calls.now + 0.1))
    assert calls.size.choose_max_items(calls.now) == 2, "these calls began before, or have another size"
    assert 2 not in calls.size.tuner.rates_by_size


# Limits of the server.


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([MergeMode.ON, MergeMode.AUTO]),
    st.integers(1, 64),
    st.integers(1, 40),
    st.integers(1, 128),
    SERVERS,
)
def test_no_call_exceeds_the_limits_of_operator_and_server(
    mode: MergeMode, max_size: int, server_max: int, limit: int, server: ModelServer
) -> None:
    """The limit is learned from the first refusal. Only calls that were in flight then are refused, too."""
    bounded_server = ModelServer(server.compute_call_s, server.workers, server_max)
    dispatcher = SimulatedDispatcher(CallSize(mode, max_size), bounded_server, limit).run_batch(3000)
    assert max(dispatcher.call_sizes) <= max_size
    assert dispatcher.max_leased <= limit
    assert len(dispatcher.refusal_times) <= limit
    if dispatcher.refusal_times:
        assert max(dispatcher.refusal_times) - min(dispatcher.refusal_times) <= 0.001
        assert dispatcher.size.server_max_items == server_max
        assert dispatcher.size.choose_max_items(dispatcher.now) <= server_max
    else:
        assert dispatcher.size.server_max_items is None


def test_best_size_falls_to_a_new_limit_of_the_server() -> None:
    slow = serial(5.0, 0.1)
    dispatcher = SimulatedDispatcher(CallSize(MergeMode.AUTO, 32), slow, 64, max_delay_s=100.0).run_batch(
        10_000
    )
    assert dispatcher.size.best_size == 32
    dispatcher.size.learn_from_refusal(build_size_refusal(32, 10), 32, 0, dispatcher.now)
    assert dispatcher.size.best_size == 10
    assert not dispatcher.size.gain, "that size was not measured yet"
    dispatcher.run_batch(3000)
    assert dispatcher.size.best_size == 10
    assert isclose(
        dispatcher.size.gain or 0.0,
        measure_rate_of_size(10, slow, 64) / measure_rate_of_size(1, slow, 64),
        rel_tol=0.1,
    )
    # After an hour twice as much is tried, and trials find the best size again.
    assert dispatcher.run_batch(30_000).size.best_size == 32


def test_size_that_pays_is_found_beyond_one_that_does_not() -> None:
    """Calls of two items take twice as long as single ones, and calls of four no longer than those of two."""
    server = ModelServer(lambda items: 0.005 if items == 1 else 0.01 + 0.0001 * items)
    assert (
        SimulatedDispatcher(CallSize(MergeMode.AUTO, 32), server, 64).run_batch(30_000).size.best_size == 32
    )


def test_trial_ends_if_the_server_refuses_its_size() -> None:
    calls = SequentialCalls(CallSize(MergeMode.AUTO, 32))
    calls.run_until_size(2, 0.1)
    for _ in range(PROBE_CALLS + 1 + EPOCH_CALLS):
        calls.run_call(0.09)
    assert calls.size.choose_max_items(calls.now) == 4
    calls.size.record_send(4)
    assert calls.size.learn_from_refusal(build_size_refusal(4, 3), 4, 0, calls.now)
    assert calls.run_call(0.09) == 2
    assert calls.size.gain is not None, "the best size is kept"
    calls.run_until_size(3, 0.09)


@pytest.mark.parametrize(
    ("outcome", "items", "server_max", "tokens"),
    [
        (build_size_refusal(32, 8), 32, 8, inf),
        (build_size_refusal(32, 40), 32, 31, inf),
        (TooLarge(2000, 1000), 32, 16, inf),
        (Delivered(413, b""), 9, 4, inf),
        (Delivered(413, b"<html>too large</html>"), 3, 1, inf),
        (Delivered(400, b'{"error": {"message": "Too many inputs"}}'), 2, 1, inf),
        (Delivered(400, b'{"error": {"message": "max 500 tokens per request"}}'), 4, None, 500),
        (Delivered(400, b'{"error": {"message": "max 5000 tokens per request"}}'), 4, None, 999),
        (Delivered(400, b'{"error": {"code": "max_tokens_per_request"}}'), 4, None, 500),
    ],
)
def test_limit_of_the_server_is_learned_from_a_refusal(
    outcome: Delivered | TooLarge, items: int, server_max: int | None, tokens: float
) -> None:
    size = CallSize(MergeMode.ON, 64)
    assert size.learn_from_refusal(outcome, items, 1000, 5.0)
    assert (size.server_max_items, size.server_max_tokens) == (server_max, tokens)
    assert size.choose_max_items(5.0) == (server_max or 64)
    assert size.best_size == (server_max or 64)


def test_no_limit_is_learned_from_other_refusals_or_single_items() -> None:
    size = CallSize(MergeMode.ON, 64)
    assert not size.learn_from_refusal(Delivered(400, b'{"error": "no such model"}'), 32, 1000, 5.0)
    assert not size.learn_from_refusal(build_size_refusal(1, 0), 1, 1000, 5.0)
    assert (size.server_max_items, size.server_max_tokens) == (None, inf)


def test_learned_limits_never_exceed_the_configured_ones() -> None:
    size = CallSize(MergeMode.ON, 64, server_max_items=10, server_max_tokens=100)
    assert size.learn_from_refusal(build_size_refusal(60, 50), 60, 1000, 5.0)
    assert size.learn_from_refusal(
        Delivered(400, b'{"error": "max 5000 tokens per request"}'), 60, 10_000, 5.0
    )
    assert (size.server_max_items, size.server_max_tokens) == (10, 100)


@pytest.mark.parametrize(("configured", "max_items"), [(None, 512), (40, 40), (4, 4)])
def test_learned_limits_are_doubled_each_hour_up_to_the_configured_ones(
    configured: int | None, max_items: int
) -> None:
    size = CallSize(MergeMode.ON, 512, server_max_items=configured, server_max_tokens=900.0)
    assert size.learn_from_refusal(build_size_refusal(512, 4), 512, 0, 0.0)
    assert size.learn_from_refusal(Delivered(400, b'{"error": "max 100 tokens per request"}'), 4, 5000, 0.0)
    assert (size.choose_max_items(RELEARN_S - 1), size.server_max_tokens) == (4, 100)
    assert (size.choose_max_items(RELEARN_S), size.server_max_tokens) == (min(8, max_items), 200)
    assert (size.choose_max_items(RELEARN_S + 1), size.server_max_tokens) == (min(8, max_items), 200)
    for hour in range(2, 12):
        size.choose_max_items(hour * RELEARN_S)
    assert (size.choose_max_items(12 * RELEARN_S), size.server_max_tokens) == (max_items, 900)


def test_learned_limits_are_forgotten_once_they_are_very_large() -> None:
    size = CallSize(MergeMode.ON, 512)
    assert size.learn_from_refusal(build_size_refusal(512, 4), 512, 0, 0.0)
    assert size.learn_from_refusal(Delivered(400, b'{"error": "max 100 tokens per request"}'), 4, 5000, 0.0)
    for hour in range(1, 40):
        size.choose_max_items(hour * RELEARN_S)
    assert (size.server_max_items, size.server_max_tokens) == (None, inf)
    assert size.choose_max_items(40 * RELEARN_S) == 512


def test_configured_limits_are_not_relaxed() -> None:
    size = CallSize(MergeMode.ON, 512, server_max_items=8)
    assert {size.choose_max_items(hour * RELEARN_S) for hour in range(10)} == {8}


# Checks of answers, and the summary.


@pytest.mark.parametrize("check_every", [1, 7, CHECK_EVERY])
def test_first_calls_are_checked_completely_and_later_ones_rarely(check_every: int) -> None:
    size = CallSize(MergeMode.ON, 32, check_every=check_every)
    assert size.take_check_count() is None
    assert size.take_check_count() is None, "until the first answers have been equal"
    for _ in range(INITIAL_CHECKS):
        assert size.take_check_count() is None
        size.record_match()
    checks = [size.take_check_count() for _ in range(3 * check_every)]
    assert checks == [*[0] * (check_every - 1), 1] * 3


@pytest.mark.parametrize(
    ("size", "sentence"),
    [
        (CallSize(MergeMode.OFF, 8), "each request is sent alone: batching is off"),
        (
            CallSize(MergeMode.ON, 8, off_reason="it mixes items up"),
            "each request is sent alone: it mixes items up",
        ),
        (CallSize(MergeMode.ON, 1), "each request is sent alone: the rule says so"),
        (CallSize(MergeMode.AUTO, 8, server_max_items=1), "each request is sent alone: the server takes one"),
        (CallSize(MergeMode.AUTO, 8), "whether merging pays is not measured yet"),
        (tuned_size(), "each request is sent alone: merging does not pay"),
        (
            tuned_size(is_trial_unfilled=True),
            "each request is sent alone: no other request arrives within max_delay_s",
        ),
        (
            tuned_size(best_size=4, gain=4.5678),
            "up to 4 items a call, 4.57 times the items of single calls for the same units",
        ),
        (CallSize(MergeMode.ON, 8, checked_calls=3), "up to 8 items a call"),
        (CallSize(MergeMode.ON, 8, server_max_items=9, checked_calls=3), "up to 8 items a call"),
        (
            CallSize(MergeMode.ON, 8, server_max_items=4),
            "up to 4 items a call; the server takes 4; its first answers are being compared",
        ),
    ],
)
def test_summary_says_what_is_merged_or_why_nothing_is(size: CallSize, sentence: str) -> None:
    assert size.summary == sentence


def test_summary_names_a_delay_that_is_too_short_for_a_slow_server() -> None:
    """A unit becomes free every 0.1 s, so that no second request arrives within 0.02 s."""
    slow = serial(0.1, 0.001)
    short_delay = SimulatedDispatcher(
        CallSize(MergeMode.AUTO, 32), slow, 64, can_stretch_delay=False
    ).run_batch(3000)
    assert short_delay.size.best_size == 1
    assert short_delay.size.summary.endswith("no other request arrives within max_delay_s")
    long_delay = SimulatedDispatcher(
        CallSize(MergeMode.AUTO, 32), slow, 64, max_delay_s=0.2, can_stretch_delay=False
    ).run_batch(10_000)
    assert long_delay.size.best_size == 32
    no_gain = SimulatedDispatcher(CallSize(MergeMode.AUTO, 32), parallel(0.0, 0.005), 64).run_batch(3000)
    assert no_gain.size.summary.endswith("merging does not pay")


def test_turning_off_is_permanent_and_keeps_the_first_reason() -> None:
    size = CallSize(MergeMode.ON, 32)
    size.turn_off("the first reason")
    size.turn_off("another reason")
    assert size.off_reason == "the first reason"
    assert (size.choose_max_items(10 * RELEARN_S), size.best_size) == (1, 1)


# Any history.

TIMES = st.floats(-1e6, 1e6)
EVENTS = st.one_of(
    st.tuples(st.just("choose"), TIMES),
    st.tuples(st.just("send"), st.integers(1, 64)),
    st.tuples(st.just("record"), st.integers(1, 64), st.integers(1, 4096), st.floats(0, 1e6), TIMES, TIMES),
    st.tuples(st.just("run"), st.integers(1, 30), st.floats(0.0001, 1.0)),
    st.tuples(st.just("refuse"), st.integers(0, 64), st.integers(0, 64), TIMES),
    st.tuples(st.just("too large"), st.integers(0, 64), st.integers(0, 10**6), TIMES),
    st.tuples(st.just("tokens"), st.integers(0, 64), st.integers(0, 10**6), TIMES),
    st.tuples(st.just("check")),
    st.tuples(st.just("off")),
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(MergeMode),
    st.integers(1, 64),
    st.sampled_from([(), (3,), (24, 100)]),
    st.one_of(st.none(), st.integers(1, 100)),
    st.lists(EVENTS, max_size=60),
)
def test_allowed_size_stays_within_its_limits_after_any_history(
    mode: MergeMode,
    max_size: int,
    preferred_sizes: tuple[int, ...],
    server_max: int | None,
    history: list[tuple[object, ...]],
) -> None:
    size = CallSize(mode, max_size, preferred_sizes, server_max)
    allowed = max_size if server_max is None else min(max_size, server_max)
    calls, is_off = SequentialCalls(size), False
    for event in history:
        match event:
            case ("choose", float(now)):
                size.choose_max_items(now)
            case ("send", int(max_items)):
                size.record_send(max_items)
            case ("record", int(max_items), int(items), float(unit_s), float(began_at), float(ended_at)):
                size.record_call(CallMeasurement(max_items, items, unit_s, began_at, ended_at))
            case ("run", int(count), float(item_s)):
                for _ in range(count):
                    calls.run_call(item_s)
            case ("refuse", int(items), int(max_items), float(now)):
                size.learn_from_refusal(build_size_refusal(items, max_items), items, 0, now)
            case ("too large", int(items), int(tokens), float(now)):
                size.learn_from_refusal(TooLarge(6, 5), items, tokens, now)
            case ("tokens", int(items), int(tokens), float(now)):
                answer = Delivered(400, b'{"error": {"code": "max_tokens_per_request"}}')
                size.learn_from_refusal(answer, items, tokens, now)
            case ("check",):
                assert size.take_check_count() in (None, 0, 1)
                size.record_match()
            case _:
                size.turn_off("for a reason")
                is_off = True
        assert 1 <= size.choose_max_items(calls.now) <= allowed
        assert 1 <= size.best_size <= allowed
        assert size.server_max_tokens >= 1
        assert size.server_max_items is None or size.server_max_items >= 1
        assert size.gain is None or size.gain > 0
        if is_off or mode is MergeMode.OFF:
            assert size.choose_max_items(calls.now) == size.best_size == 1
