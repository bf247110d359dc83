"""How large merged calls are: found by measuring, at little cost, and never above what anybody allows."""

from __future__ import annotations

from math import inf, isclose

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dispatcher.core.gateway.outcome import Delivered, TooLarge
from dispatcher.core.merging.call_size import (
    EPOCHS_BETWEEN_TRIALS,
    INITIAL_CHECKS,
    MAX_TRIAL_PAUSE_S,
    PROBE_TIMEOUT_S,
    RELEARN_S,
    CallSize,
)
from dispatcher.core.merging.call_size_epochs import EPOCH_CALLS, MIN_EPOCH_S, PROBE_CALLS, CallMeasurement
from dispatcher.core.merging.grouping import DEFAULT_CHECK_EVERY, MergeMode
from tests.core.merging.calls import PoolLine, Server, logarithmic, parallel, rate_of, serial

SIZES = (1, 2, 4, 8, 16, 32, 64)
spans_s = st.floats(0.0001, 0.01)
servers = st.one_of(
    st.builds(serial, st.floats(0.0, 0.01), spans_s, st.sampled_from([1, 1, 2, 4])),
    st.builds(parallel, st.floats(0.0, 0.01), spans_s),
    st.builds(logarithmic, st.floats(0.0, 0.01), spans_s),
)
limits = st.integers(1, 128)


def too_long(items: int, most: int) -> Delivered:
    error = f"batch size {items} > maximum allowed batch size {most}"
    return Delivered(413, msgspec.json.encode({"error": error, "error_type": "Validation"}))


# What pays.


@pytest.mark.first
@settings(max_examples=25, deadline=None)
@given(servers, limits, st.sampled_from(SIZES))
@example(serial(0.005, 0.0001), 32, 32)
@example(serial(0.001, 0.001), 64, 64)
@example(parallel(0.0, 0.005), 64, 32)
@example(logarithmic(0.0, 0.005), 128, 64)
@example(serial(0.005, 0.0001, workers=4), 32, 32)
@example(serial(0.1, 0.005), 64, 32)
@example(serial(0.05, 0.001), 32, 32)
@example(serial(0.0078125, 0.0078125, workers=4), 7, 2)
@example(serial(0.0078125, 0.0078125, workers=4), 32, 8)
def test_the_size_that_is_found_makes_nine_tenths_of_the_best(server: Server, limit: int, most: int) -> None:
    """Of the sizes that are compared, in items per unit-second, wherever it began; company is waited for as
    long as calls are slow."""
    line = PoolLine(CallSize(MergeMode.AUTO, most), server, limit, stretches=True, jitter=0.05).run_batch(
        20_000
    )
    rates = {size: rate_of(size, server, limit, jitter=0.05) for size in SIZES if size <= most}
    assert rates[line.size.best_size] >= 0.9 * max(rates.values())


@pytest.mark.parametrize(("item_s", "limit", "best"), [(0.0078125, 32, 8), (0.003, 32, 8), (0.0005, 5, 2)])
def test_what_was_under_way_of_another_size_is_no_part_of_what_is_measured(
    item_s: float, limit: int, best: int
) -> None:
    """Four workers at once: single calls beside the last large ones are answered soon, and cost those."""
    server = serial(0.0078125, item_s, workers=4)
    line = PoolLine(CallSize(MergeMode.AUTO, best), server, limit, stretches=True).run_batch(60_000)
    assert line.size.best_size == best
    for size, rate in line.size.rates_by_size.items():
        assert rate == pytest.approx(rate_of(size, server, limit), rel=0.02)


@settings(max_examples=20, deadline=None)
@given(
    st.one_of(
        st.builds(parallel, st.floats(0.0, 0.01), spans_s),
        st.builds(lambda item_s: Server(lambda items: item_s * items**1.2), spans_s),
        st.builds(serial, st.just(0.0), spans_s),
    ),
    st.integers(1, 256),
)
@example(parallel(0.0, 0.005), 256)
@example(parallel(0.003, 0.001), 256)
def test_where_merging_does_not_pay_it_costs_next_to_nothing(server: Server, limit: int) -> None:
    """Of 5,000 calls, while merging is tried again and again."""
    auto = PoolLine(CallSize(MergeMode.AUTO, 32), server, limit).run_batch(5000)
    off = PoolLine(CallSize(MergeMode.OFF, 32), server, limit).run_batch(5000)
    assert (auto.now - 1000.0) * 0.95 <= off.now - 1000.0 + server.takes_s(2), "but for the newest call"
    assert auto.size.best_size == 1


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
def test_trials_of_a_long_run_cost_little(server: Server, limit: int) -> None:
    line = PoolLine(CallSize(MergeMode.AUTO, 32), server, limit).run_batch(20_000)
    assert line.rate(10_000) >= 0.96 * rate_of(line.size.best_size, server, limit)


def test_what_pays_is_found_out_again_when_the_server_becomes_another_one() -> None:
    line = PoolLine(CallSize(MergeMode.AUTO, 32), parallel(0.0, 0.005), 64).run_batch(5000)
    assert line.size.best_size == 1
    line.becomes(serial(0.005, 0.0001))
    assert line.run_batch(20_000).size.best_size == 32
    assert line.size.gain is not None
    assert line.size.gain > 15
    line.becomes(parallel(0.0, 0.005))
    assert line.run_batch(100_000).size.best_size == 1


def test_the_gain_is_that_of_the_best_size_over_single_calls() -> None:
    server = serial(0.005, 0.0001)
    line = PoolLine(CallSize(MergeMode.AUTO, 32), server, 64)
    assert not line.size.gain, "not measured"
    line.run_batch(20_000)
    gain = rate_of(32, server, 64) / rate_of(1, server, 64)
    assert line.size.gain is not None
    assert isclose(line.size.gain, gain, rel_tol=0.1)
    # Later trials tell what single calls make under the load of then, and do not spoil it.
    assert isclose(line.run_batch(100_000).size.gain or 0.0, gain, rel_tol=0.1)


def test_single_calls_that_are_measured_again_tell_the_gain_anew() -> None:
    trials = Trials(CallSize(MergeMode.AUTO, 2))
    trials.until(2, 0.1)
    for _ in range(PROBE_CALLS + 1 + EPOCH_CALLS):
        trials.go(0.09)
    assert isclose(trials.size.gain or 0.0, 0.1 / 0.09)
    trials.until(1, 0.09)
    for _ in range(PROBE_CALLS + 1 + EPOCH_CALLS):
        assert trials.go(0.093) == 1
    assert trials.size.best_size == 2
    assert isclose(trials.size.gain or 0.0, 0.093 / 0.09)


def test_preferred_sizes_above_what_is_allowed_are_not_waited_for() -> None:
    trials = Trials(CallSize(MergeMode.AUTO, 2, preferred_sizes=(100,)))
    trials.until(2, 0.1)
    for _ in range(PROBE_CALLS + 1 + EPOCH_CALLS):
        trials.go(0.05)
    sent = [trials.go(0.05) for _ in range(2 * EPOCHS_BETWEEN_TRIALS * EPOCH_CALLS)]
    assert 1 in sent, "the trials go on"


def test_the_gain_of_single_calls_is_one() -> None:
    assert PoolLine(CallSize(MergeMode.AUTO, 32), parallel(0.0, 0.005), 64).run_batch(5000).size.gain == 1.0


def test_a_preferred_size_is_tried_beside_the_powers_of_two() -> None:
    """Here a call of more than 24 takes ten times as long."""
    server = Server(lambda items: 0.005 if items <= 24 else 0.05)
    line = PoolLine(CallSize(MergeMode.AUTO, 64, preferred_sizes=(24, 100)), server, 128).run_batch(20_000)
    assert line.size.best_size == 24
    assert set(line.size.rates_by_size) <= {1, 2, 4, 8, 16, 24, 32, 64}


def test_a_largest_size_that_is_no_power_of_two_is_tried_as_well() -> None:
    assert (
        PoolLine(CallSize(MergeMode.AUTO, 48), serial(0.005, 0.0001), 128).run_batch(20_000).size.best_size
        == 48
    )


def test_mode_on_asks_nobody_whether_it_pays() -> None:
    size = CallSize(MergeMode.ON, 32)
    PoolLine(size, parallel(0.0, 0.005), 64).run_batch(1000)
    assert (size.choose_max_items(5000.0), size.best_size, size.gain, size.rates_by_size) == (
        32,
        32,
        None,
        {},
    )


def test_mode_off_merges_nothing() -> None:
    size = CallSize(MergeMode.OFF, 32)
    assert set(PoolLine(size, serial(0.005, 0.0001), 64).run_batch(1000).calls) == {1}
    assert size.best_size == 1


# How it is tried.


def call(size: int, items: int, each_s: float, at: float, load: float = 1.0) -> CallMeasurement:
    """One whose items were held for so long each."""
    return CallMeasurement(size, items, items * each_s, at - each_s, at, load)


class Trials:
    """One call after the other, each item held for as long as `each_s` says of the call's size."""

    def __init__(self, size: CallSize) -> None:
        self.size = size
        self.now = 0.0
        self.load = 1.0

    def go(self, each_s: float, *, items: int | None = None) -> int:
        """The size of the call that went, whose items took so long."""
        most = self.size.choose_max_items(self.now)
        self.size.record_send(most)
        self.now += each_s
        self.size.record_call(call(most, items or most, each_s, self.now, self.load))
        return most

    def until(self, size: int, each_s: float) -> None:
        """Until a call of that size would go."""
        for _ in range(10_000):
            if self.size.choose_max_items(self.now) == size:
                return
            self.go(each_s)
        raise AssertionError(f"no call of {size} went")


def test_a_trial_comes_after_one_epoch_and_begins_with_a_few_calls_while_the_others_go_on_as_before() -> None:
    trials = Trials(CallSize(MergeMode.AUTO, 32))
    assert [trials.go(0.1) for _ in range(EPOCH_CALLS + 1)] == [1] * (EPOCH_CALLS + 1)
    sent = []
    for _ in range(10):
        sent.append(trials.size.choose_max_items(trials.now))
        trials.size.record_send(sent[-1])
    assert sent == [2] * PROBE_CALLS + [1] * (10 - PROBE_CALLS)
    for _ in range(PROBE_CALLS):
        assert trials.size.choose_max_items(trials.now) == 1, "until they are back"
        trials.now += 0.1
        trials.size.record_call(call(2, 2, 0.1, trials.now))
    assert trials.size.choose_max_items(trials.now) == 2


def test_a_trial_that_is_clearly_worse_ends_with_its_first_calls() -> None:
    trials = Trials(CallSize(MergeMode.AUTO, 32))
    trials.until(2, 0.1)
    assert [trials.go(0.13) for _ in range(PROBE_CALLS)] == [2] * PROBE_CALLS
    assert trials.size.choose_max_items(trials.now) == 1
    assert 2 not in trials.size.rates_by_size, "calls that shared the server with others are no measure"


def test_a_trial_that_is_a_little_worse_or_no_better_is_measured_and_loses() -> None:
    for each_s in (0.11, 0.1, 0.0955):
        trials = Trials(CallSize(MergeMode.AUTO, 32))
        trials.until(2, 0.1)
        assert [trials.go(each_s) for _ in range(PROBE_CALLS + 1 + EPOCH_CALLS)] == [2] * (
            PROBE_CALLS + 1 + EPOCH_CALLS
        )
        assert trials.size.choose_max_items(trials.now) == 1
        assert isclose(trials.size.rates_by_size[2], 1 / each_s)
        assert trials.size.best_size == 1
        epochs = 0
        while trials.size.choose_max_items(trials.now) == 1:
            trials.go(0.1)
            epochs += 1
        assert epochs >= EPOCHS_BETWEEN_TRIALS * EPOCH_CALLS, "even if it has cost nothing"


def test_who_wins_goes_on_at_once_and_who_loses_waits() -> None:
    trials = Trials(CallSize(MergeMode.AUTO, 8))
    trials.until(2, 0.1)
    for _ in range(PROBE_CALLS + 1 + EPOCH_CALLS):
        trials.go(0.09)
    assert trials.size.best_size == 2
    assert trials.size.choose_max_items(trials.now) == 4
    for _ in range(3):
        assert trials.go(0.2) == 4
    # The next one comes after so many epochs, and when what was lost is a hundredth of what was done since.
    went = 0
    while trials.go(0.09) == 2:
        went += 1
    assert went >= EPOCHS_BETWEEN_TRIALS * EPOCH_CALLS
    lost_s = 3 * 4 * 0.2 - 3 * 4 * 0.09
    assert went * 2 * 0.09 >= 100 * 0.9 * lost_s


def test_a_server_that_has_less_to_do_for_a_while_answers_sooner_and_that_is_no_merit_of_a_size() -> None:
    trials = Trials(CallSize(MergeMode.AUTO, 8))
    trials.load = 10.0
    trials.until(2, 0.1)
    trials.load = 5.0
    for _ in range(PROBE_CALLS + 1 + EPOCH_CALLS):
        assert trials.go(0.05) == 2
    assert trials.size.best_size == 1
    trials.load = 10.0
    trials.until(2, 0.1)
    for _ in range(PROBE_CALLS + 1 + EPOCH_CALLS):
        assert trials.go(0.05) == 2
    assert trials.size.best_size == 2, "under the same load it is"


def test_what_was_lost_is_no_reason_for_ever() -> None:
    """Here a trial hung for an hour, which many days of work would not make up for."""
    trials = Trials(CallSize(MergeMode.AUTO, 8))
    trials.until(2, 0.1)
    for _ in range(3):
        trials.go(3600.0)
    assert trials.size.choose_max_items(trials.now) == 1
    began_at = trials.now
    trials.until(2, 1.0)
    assert trials.now - began_at <= MAX_TRIAL_PAUSE_S + 100


def test_a_trial_whose_first_calls_never_come_back_is_given_up() -> None:
    trials = Trials(CallSize(MergeMode.AUTO, 8))
    trials.until(2, 0.1)
    for _ in range(PROBE_CALLS):
        trials.size.record_send(2)
    assert trials.size.choose_max_items(trials.now + PROBE_TIMEOUT_S - 1) == 1
    assert trials.size.choose_max_items(trials.now + PROBE_TIMEOUT_S + 1) == 1
    trials.now += PROBE_TIMEOUT_S + 2
    for _ in range(EPOCH_CALLS):
        assert trials.go(0.1) == 1
    trials.until(2, 0.1)


def test_where_calls_are_slow_the_first_ones_of_a_trial_are_waited_for_longer() -> None:
    trials = Trials(CallSize(MergeMode.AUTO, 8))
    trials.until(2, 100.0)
    for _ in range(PROBE_CALLS):
        trials.size.record_send(2)
    assert trials.size.choose_max_items(trials.now + 700.0) == 1
    for _ in range(PROBE_CALLS):
        trials.size.record_call(CallMeasurement(2, 2, 200.0, trials.now, trials.now + 700.0))
    assert trials.size.choose_max_items(trials.now + 700.0) == 2


def test_where_calls_cannot_be_filled_no_larger_ones_are_measured() -> None:
    """The second of two comes too late each time."""
    trials = Trials(CallSize(MergeMode.AUTO, 8))
    trials.until(2, 0.1)
    for _ in range(PROBE_CALLS):
        assert trials.go(0.01, items=1) == 2
    assert trials.size.choose_max_items(trials.now) == 1


def test_a_larger_size_is_not_tried_where_half_of_this_one_stays_empty() -> None:
    trials = Trials(CallSize(MergeMode.AUTO, 32))
    trials.until(2, 0.1)
    for _ in range(PROBE_CALLS + 1 + EPOCH_CALLS):
        trials.go(0.05)
    assert trials.size.choose_max_items(trials.now) == 4
    for _ in range(PROBE_CALLS + 1 + EPOCH_CALLS):
        trials.go(0.025, items=3)
    assert trials.size.best_size == 4
    tried = {trials.go(0.025, items=2) for _ in range(2000)}
    assert tried == {1, 2, 4}


def test_where_requests_come_one_by_one_they_go_one_by_one() -> None:
    line = PoolLine(
        CallSize(MergeMode.AUTO, 32), serial(0.005, 0.0001), 64, max_delay_s=0.02, every_s=0.05
    ).run_batch(5000)
    assert line.size.best_size == 1
    assert set(line.calls) == {1}
    assert line.unit_s / line.done < 0.0052, "nobody waits for company"


def test_company_is_waited_for_longer_where_calls_are_slow_it_pays_and_the_rule_says_so() -> None:
    """A unit comes free each 0.1 s, and within 0.02 s nobody could ever join another."""
    slow = PoolLine(CallSize(MergeMode.AUTO, 32), serial(0.1, 0.001), 64, max_delay_s=0.02, stretches=True)
    assert slow.size.compute_delay_s(0.02) == 0.02, "nothing is measured"
    slow.run_batch(10_000)
    assert slow.size.best_size == 32
    assert 0.1 < slow.size.compute_delay_s(0.02) < 0.2
    assert slow.size.compute_delay_s(1.0) == 1.0
    slower = PoolLine(CallSize(MergeMode.AUTO, 32), serial(20.0, 0.0), 64, stretches=True).run_batch(100)
    assert slower.size.compute_delay_s(0.02) == 5.0
    asked = PoolLine(CallSize(MergeMode.ON, 32), serial(0.1, 0.001), 64).run_batch(1000)
    assert asked.size.compute_delay_s(0.02) == 0.02, "what the operator said, where nothing is measured"


def test_calls_that_take_no_time_are_measured_for_a_while_all_the_same() -> None:
    """What takes a few microseconds is noise of ours."""
    trials = Trials(CallSize(MergeMode.AUTO, 8))
    while not trials.size.rates_by_size:
        trials.go(1e-5)
    assert trials.now >= MIN_EPOCH_S


def test_calls_of_the_size_before_do_not_count() -> None:
    trials = Trials(CallSize(MergeMode.AUTO, 8))
    trials.until(2, 0.1)
    for _ in range(100):
        trials.size.record_call(call(1, 1, 0.001, trials.now + 0.1))
        trials.size.record_call(CallMeasurement(2, 2, 0.002, trials.now - 1.0, trials.now + 0.1))
    assert trials.size.choose_max_items(trials.now) == 2, "these began before, or are of another size"
    assert 2 not in trials.size.rates_by_size


# What the server takes.


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([MergeMode.ON, MergeMode.AUTO]),
    st.integers(1, 64),
    st.integers(1, 40),
    st.integers(1, 128),
    servers,
)
def test_no_call_is_larger_than_anybody_allows(
    mode: MergeMode, max_size: int, takes: int, limit: int, server: Server
) -> None:
    """The server's word is learned by the first refusal, but for calls that were under way by then."""
    bounded = Server(server.takes_s, server.workers, takes)
    line = PoolLine(CallSize(mode, max_size), bounded, limit).run_batch(3000)
    assert max(line.calls) <= max_size
    assert line.most_held <= limit
    assert len(line.refused) <= limit
    if line.refused:
        assert max(line.refused) - min(line.refused) <= 0.001
        assert line.size.server_max_items == takes
        assert line.size.choose_max_items(line.now) <= takes
    else:
        assert line.size.server_max_items is None


def test_a_server_that_takes_less_than_what_pays_ends_what_was_measured_of_more() -> None:
    slow = serial(5.0, 0.1)
    line = PoolLine(CallSize(MergeMode.AUTO, 32), slow, 64, max_delay_s=100.0).run_batch(10_000)
    assert line.size.best_size == 32
    line.size.learn_from_refusal(too_long(32, 10), 32, 0, line.now)
    assert line.size.best_size == 10
    assert not line.size.gain, "of that size nothing was measured"
    line.run_batch(3000)
    assert line.size.best_size == 10
    assert isclose(line.size.gain or 0.0, rate_of(10, slow, 64) / rate_of(1, slow, 64), rel_tol=0.1)
    # After an hour twice as much is tried, and found by the way of all trials.
    assert line.run_batch(30_000).size.best_size == 32


def test_a_size_that_pays_is_found_behind_one_that_does_not() -> None:
    """Here two take twice as long as one, and four no longer than two."""
    server = Server(lambda items: 0.005 if items == 1 else 0.01 + 0.0001 * items)
    assert PoolLine(CallSize(MergeMode.AUTO, 32), server, 64).run_batch(30_000).size.best_size == 32


def test_a_trial_that_the_server_refuses_is_over() -> None:
    trials = Trials(CallSize(MergeMode.AUTO, 32))
    trials.until(2, 0.1)
    for _ in range(PROBE_CALLS + 1 + EPOCH_CALLS):
        trials.go(0.09)
    assert trials.size.choose_max_items(trials.now) == 4
    trials.size.record_send(4)
    assert trials.size.learn_from_refusal(too_long(4, 3), 4, 0, trials.now)
    assert trials.go(0.09) == 2
    assert trials.size.gain is not None, "the best one stands"
    trials.until(3, 0.09)


@pytest.mark.parametrize(
    ("outcome", "items", "takes", "tokens"),
    [
        (too_long(32, 8), 32, 8, inf),
        (too_long(32, 40), 32, 31, inf),
        (TooLarge(2000, 1000), 32, 16, inf),
        (Delivered(413, b""), 9, 4, inf),
        (Delivered(413, b"<html>odd</html>"), 3, 1, inf),
        (Delivered(400, b'{"error": {"message": "Too many inputs"}}'), 2, 1, inf),
        (Delivered(400, b'{"error": {"message": "max 500 tokens per request"}}'), 4, None, 500),
        (Delivered(400, b'{"error": {"message": "max 5000 tokens per request"}}'), 4, None, 999),
        (Delivered(400, b'{"error": {"code": "max_tokens_per_request"}}'), 4, None, 500),
    ],
)
def test_a_refusal_teaches_what_the_server_takes(
    outcome: Delivered | TooLarge, items: int, takes: int | None, tokens: float
) -> None:
    size = CallSize(MergeMode.ON, 64)
    assert size.learn_from_refusal(outcome, items, 1000, 5.0)
    assert (size.server_max_items, size.server_max_tokens) == (takes, tokens)
    assert size.choose_max_items(5.0) == (takes or 64)
    assert size.best_size == (takes or 64)


def test_a_refusal_of_another_kind_teaches_nothing_and_neither_does_one_item() -> None:
    size = CallSize(MergeMode.ON, 64)
    assert not size.learn_from_refusal(Delivered(400, b'{"error": "no such model"}'), 32, 1000, 5.0)
    assert not size.learn_from_refusal(too_long(1, 0), 1, 1000, 5.0)
    assert (size.server_max_items, size.server_max_tokens) == (None, inf)


def test_less_is_learned_and_never_more() -> None:
    size = CallSize(MergeMode.ON, 64, server_max_items=10, server_max_tokens=100)
    assert size.learn_from_refusal(too_long(60, 50), 60, 1000, 5.0)
    assert size.learn_from_refusal(
        Delivered(400, b'{"error": "max 5000 tokens per request"}'), 60, 10_000, 5.0
    )
    assert (size.server_max_items, size.server_max_tokens) == (10, 100)


@pytest.mark.parametrize(("configured", "most"), [(None, 512), (40, 40), (4, 4)])
def test_what_was_learned_is_doubted_each_hour_and_never_beyond_what_is_configured(
    configured: int | None, most: int
) -> None:
    size = CallSize(MergeMode.ON, 512, server_max_items=configured, server_max_tokens=900.0)
    assert size.learn_from_refusal(too_long(512, 4), 512, 0, 0.0)
    assert size.learn_from_refusal(Delivered(400, b'{"error": "max 100 tokens per request"}'), 4, 5000, 0.0)
    assert (size.choose_max_items(RELEARN_S - 1), size.server_max_tokens) == (4, 100)
    assert (size.choose_max_items(RELEARN_S), size.server_max_tokens) == (min(8, most), 200)
    assert (size.choose_max_items(RELEARN_S + 1), size.server_max_tokens) == (min(8, most), 200)
    for hour in range(2, 12):
        size.choose_max_items(hour * RELEARN_S)
    assert (size.choose_max_items(12 * RELEARN_S), size.server_max_tokens) == (most, 900)


def test_what_was_learned_is_forgotten_in_the_end_and_counts_for_no_number_without_bounds() -> None:
    size = CallSize(MergeMode.ON, 512)
    assert size.learn_from_refusal(too_long(512, 4), 512, 0, 0.0)
    assert size.learn_from_refusal(Delivered(400, b'{"error": "max 100 tokens per request"}'), 4, 5000, 0.0)
    for hour in range(1, 40):
        size.choose_max_items(hour * RELEARN_S)
    assert (size.server_max_items, size.server_max_tokens) == (None, inf)
    assert size.choose_max_items(40 * RELEARN_S) == 512


def test_what_is_configured_is_not_doubted() -> None:
    size = CallSize(MergeMode.ON, 512, server_max_items=8)
    assert {size.choose_max_items(hour * RELEARN_S) for hour in range(10)} == {8}


# Whether its answers are right.


@pytest.mark.parametrize("every", [1, 7, DEFAULT_CHECK_EVERY])
def test_the_first_calls_are_checked_whole_and_then_one_item_now_and_then(every: int) -> None:
    size = CallSize(MergeMode.ON, 32, check_every=every)
    assert size.take_check_count() is None
    assert size.take_check_count() is None, "until they have come out as the same"
    for _ in range(INITIAL_CHECKS):
        assert size.take_check_count() is None
        size.record_match()
    checks = [size.take_check_count() for _ in range(3 * every)]
    assert checks == [*[0] * (every - 1), 1] * 3


@pytest.mark.parametrize(
    ("size", "sentence"),
    [
        (CallSize(MergeMode.OFF, 8), "each request is sent alone: batching is off"),
        (
            CallSize(MergeMode.ON, 8, off_reason="it mixes them up"),
            "each request is sent alone: it mixes them up",
        ),
        (CallSize(MergeMode.ON, 1), "each request is sent alone: the rule says so"),
        (CallSize(MergeMode.AUTO, 8, server_max_items=1), "each request is sent alone: the server takes one"),
        (CallSize(MergeMode.AUTO, 8), "whether merging pays is not measured yet"),
        (CallSize(MergeMode.AUTO, 8, gain=1.0), "each request is sent alone: merging does not pay"),
        (
            CallSize(MergeMode.AUTO, 8, gain=1.0, _is_trial_unfilled=True),
            "each request is sent alone: no other request arrives within max_delay_s",
        ),
        (
            CallSize(MergeMode.AUTO, 8, gain=4.5678, checked_calls=3, _best_size=4),
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
def test_what_is_merged_or_why_not_is_said_in_a_sentence(size: CallSize, sentence: str) -> None:
    assert size.summary == sentence


def test_where_a_delay_is_too_short_for_a_slow_server_it_is_said_and_a_longer_one_helps() -> None:
    """A unit comes free each 0.1 s: within 0.02 s nobody can ever join another."""
    slow = serial(0.1, 0.001)
    short = PoolLine(CallSize(MergeMode.AUTO, 32), slow, 64, stretches=False).run_batch(3000)
    assert short.size.best_size == 1
    assert short.size.summary.endswith("no other request arrives within max_delay_s")
    long = PoolLine(CallSize(MergeMode.AUTO, 32), slow, 64, max_delay_s=0.2, stretches=False).run_batch(
        10_000
    )
    assert long.size.best_size == 32
    no_use = PoolLine(CallSize(MergeMode.AUTO, 32), parallel(0.0, 0.005), 64).run_batch(3000)
    assert no_use.size.summary.endswith("merging does not pay")


def test_off_is_for_good_and_says_the_first_reason() -> None:
    size = CallSize(MergeMode.ON, 32)
    size.turn_off("it mixes things up")
    size.turn_off("it mixes more things up")
    assert size.off_reason == "it mixes things up"
    assert (size.choose_max_items(10 * RELEARN_S), size.best_size) == (1, 1)


# Whatever happens.

times = st.floats(-1e6, 1e6)
events = st.one_of(
    st.tuples(st.just("most"), times),
    st.tuples(st.just("goes"), st.integers(1, 64)),
    st.tuples(st.just("took"), st.integers(1, 64), st.integers(1, 4096), st.floats(0, 1e6), times, times),
    st.tuples(st.just("answered"), st.integers(1, 30), st.floats(0.0001, 1.0)),
    st.tuples(st.just("refused"), st.integers(0, 64), st.integers(0, 64), times),
    st.tuples(st.just("large"), st.integers(0, 64), st.integers(0, 10**6), times),
    st.tuples(st.just("tokens"), st.integers(0, 64), st.integers(0, 10**6), times),
    st.tuples(st.just("check")),
    st.tuples(st.just("off")),
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(MergeMode),
    st.integers(1, 64),
    st.sampled_from([(), (3,), (24, 100)]),
    st.one_of(st.none(), st.integers(1, 100)),
    st.lists(events, max_size=60),
)
def test_whatever_happens_a_call_may_have_one_item_and_never_more_than_is_allowed(
    mode: MergeMode,
    max_size: int,
    preferred: tuple[int, ...],
    takes: int | None,
    history: list[tuple[object, ...]],
) -> None:
    size = CallSize(mode, max_size, preferred, takes)
    allowed = max_size if takes is None else min(max_size, takes)
    trials, off = Trials(size), False
    for event in history:
        match event:
            case ("most", float(now)):
                size.choose_max_items(now)
            case ("goes", int(most)):
                size.record_send(most)
            case ("took", int(most), int(items), float(unit_s), float(began_at), float(ended_at)):
                size.record_call(CallMeasurement(most, items, unit_s, began_at, ended_at))
            case ("answered", int(times_of_it), float(each_s)):
                for _ in range(times_of_it):
                    trials.go(each_s)
            case ("refused", int(items), int(most), float(now)):
                size.learn_from_refusal(too_long(items, most), items, 0, now)
            case ("large", int(items), int(tokens), float(now)):
                size.learn_from_refusal(TooLarge(6, 5), items, tokens, now)
            case ("tokens", int(items), int(tokens), float(now)):
                said = Delivered(400, b'{"error": {"code": "max_tokens_per_request"}}')
                size.learn_from_refusal(said, items, tokens, now)
            case ("check",):
                assert size.take_check_count() in (None, 0, 1)
                size.record_match()
            case _:
                size.turn_off("for a reason")
                off = True
        assert 1 <= size.choose_max_items(trials.now) <= allowed
        assert 1 <= size.best_size <= allowed
        assert size.server_max_tokens >= 1
        assert size.server_max_items is None or size.server_max_items >= 1
        assert size.gain is None or size.gain > 0
        if off or mode is MergeMode.OFF:
            assert size.choose_max_items(trials.now) == size.best_size == 1
