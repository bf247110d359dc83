"""How readings become limits: which readings apply, and what they say of requests that ran and waited."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest

from dispatcher.limit.budget import MAX_PLAUSIBLE_REQUESTS, Policy, Reading, Reason, Signal
from dispatcher.limit.capacity import CapacityEstimate, PoolCounts, PoolSnapshot
from dispatcher.limit.limit_tracking import CALLS_COUNTED_S, MAX_WINDOW_S, REALTIME_RECENT_S, LimitTracker
from dispatcher.limit.limiter import Limiter
from dispatcher.limit.load_ledger import DELTA_S
from dispatcher.limit.transit_time import MAX_LOOP_DELAY_S, MAX_TRANSIT_S

SATURATION, REQUESTS = Signal.SATURATION, Signal.REQUESTS
T0 = 1000.0
SLOTS = 64.0
"""Capacity of the pool: a power of two, so that shares of it are exact."""


def make_reading(
    at: float,
    load: float,
    signal: Signal = SATURATION,
    *,
    window_s: float = 0.0,
    capacity: float = SLOTS,
    is_request_count: bool = True,
    items_beyond_calls: float = math.inf,
    running: float | None = None,
    waiting: float = 0.0,
    averages: tuple[float, float] | None = None,
    max_batch_requests: float | None = None,
) -> Reading:
    return Reading(
        signal,
        at - window_s,
        at,
        load / capacity,
        0.0,
        capacity,
        is_request_count=is_request_count,
        items_beyond_calls=items_beyond_calls,
        running=running,
        waiting=waiting,
        averages=averages,
        max_batch_requests=max_batch_requests,
    )


def make_limiter(*signals: Signal, in_flight: int = 0) -> Limiter:
    """Return a limiter without a reserve, with requests in flight that were sent long ago."""
    limiter = Limiter(Policy(reserve=0.0), signals or (SATURATION,))
    send(limiter, range(in_flight), T0 - 60)
    return limiter


def send(limiter: Limiter, keys: Iterable[int], at: float) -> None:
    for key in keys:
        limiter.record_send(key, at)


def apply(limiter: Limiter, *readings: Reading) -> int:
    """Return the limit after these readings."""
    for reading in readings:
        limiter.add_reading(reading, reading.closed_at)
    return limiter.get_allowance(readings[-1].closed_at + 0.25).limit


# What priorities say of the requests in a reading.


@pytest.mark.parametrize(
    ("old_requests", "max_batch_requests", "limit"),
    [
        (20, None, 64),
        (20, 30.0, 64),
        (20, 24.5, 59),
        (20, 20.0, 54),
        # Requests of this process are not among those with a negative priority.
        (20, 19.0, 64),
        # No request is certain, so their priority is not known.
        (0, 0.0, 64),
    ],
)
def test_priorities_limit_the_batch_requests_that_a_reading_may_contain(
    old_requests: int, max_batch_requests: float | None, limit: int
) -> None:
    """Ten requests are sent within the window of the reading, which may or may not contain them."""
    limiter = make_limiter(in_flight=old_requests)
    assert apply(limiter, make_reading(T0, old_requests)) == SLOTS
    send(limiter, range(100, 110), T0 + 0.5)
    reading = make_reading(T0 + 1, old_requests + 10, window_s=0.9, max_batch_requests=max_batch_requests)
    assert apply(limiter, reading) == limit


def test_priority_of_batch_requests_is_remembered_while_none_is_in_flight() -> None:
    limiter = make_limiter(in_flight=1)
    apply(limiter, make_reading(T0, 1, max_batch_requests=1.0))
    limiter.record_answer(0, T0 + 0.25)
    send(limiter, range(100, 110), T0 + 1.5)
    assert apply(limiter, make_reading(T0 + 2, 10, window_s=0.9, max_batch_requests=4.0)) == 58


# Which readings apply.


def test_window_that_ends_in_the_future_keeps_its_beginning() -> None:
    limiter = make_limiter()
    limiter.add_reading(Reading(SATURATION, T0 - 1, T0 + 3600, 0.5, 0.0, SLOTS), T0)
    assert limiter.get_allowance(T0 + 0.25).read_at == T0 - 1


def test_second_sample_of_one_time_is_not_applied() -> None:
    limiter = make_limiter()
    assert apply(limiter, make_reading(T0, 30)) == 34
    assert apply(limiter, make_reading(T0, 40)) == 34


def test_reading_within_the_transit_time_is_applied_after_it() -> None:
    limiter = make_limiter()
    for at, load in ((T0, 30), (T0 + 0.0625, 40)):
        limiter.add_reading(make_reading(at, load), T0 + 0.0625)
    early = limiter.get_allowance(T0 + 0.0625)
    assert (early.limit, early.next_check_at) == (34, T0 + 0.0625 + DELTA_S)
    assert limiter.get_allowance(T0 + 0.0625 + DELTA_S).limit == 24


def test_smaller_one_of_configured_and_known_capacity_applies() -> None:
    for max_sys, bound in ((40, 50), (50, 40)):
        limiter = Limiter(Policy(reserve=0.0, max_sys=max_sys), (SATURATION,))
        limiter.set_capacity_bound(bound, T0)
        assert apply(limiter, make_reading(T0, 30)) == 10


def test_gate_stays_closed_until_every_signal_can_be_read_again() -> None:
    limiter = make_limiter(SATURATION, REQUESTS)
    apply(limiter, make_reading(T0, 30), make_reading(T0, 30, REQUESTS))
    limiter.record_read_failure(Reason.UNREADABLE, "timed out", T0 + 1)
    assert apply(limiter, make_reading(T0 + 2, 30)) == 0
    assert apply(limiter, make_reading(T0 + 2, 30, REQUESTS)) == 34


def test_one_signal_read_after_a_refusal_reopens_the_gate() -> None:
    limiter = make_limiter(SATURATION, REQUESTS)
    apply(limiter, make_reading(T0, 30), make_reading(T0, 30, REQUESTS))
    limiter.record_refusal(T0 + 1, retry_at=0.0, is_out_of_capacity=False, in_flight=0)
    assert apply(limiter, make_reading(T0 + 2, 30)) == 34
    assert limiter.get_allowance(T0 + 2.25).read_at == T0 + 2


def test_first_of_two_signals_with_equal_limits_is_named() -> None:
    limiter = make_limiter(SATURATION, REQUESTS)
    apply(limiter, make_reading(T0, 30), make_reading(T0, 30, REQUESTS))
    assert limiter.get_allowance(T0 + 1).signal is SATURATION


def test_lease_count_from_the_time_of_the_sample_bounds_it() -> None:
    limiter = make_limiter()

    def count_leases(at: float) -> None:
        limiter.record_lease_counts(at, other_owners_units=10, just_leased_units=0, lost_units=0)

    count_leases(T0 - 1)
    assert apply(limiter, make_reading(T0, 40)) == 24
    count_leases(T0)
    assert limiter.get_allowance(T0 + 1).limit == 34


def test_requests_are_remembered_as_long_as_a_usable_reading_may_contain_them() -> None:
    def needed_s(max_age_s: float) -> float:
        return max_age_s + MAX_WINDOW_S + 2 * (MAX_TRANSIT_S + MAX_LOOP_DELAY_S)

    tracker = LimitTracker(Policy(max_age_s=10), (SATURATION,))
    assert tracker.ledger.horizon_s >= needed_s(10)
    tracker.add_reading(Reading(SATURATION, T0, T0, 0.5, 0.0, SLOTS, max_age_s=60), T0)
    assert tracker.ledger.horizon_s >= needed_s(60)
    tracker.set_policy(Policy(max_age_s=90))
    assert tracker.ledger.horizon_s >= needed_s(90)
    tracker.set_policy(Policy(max_age_s=5))
    tracker.add_reading(Reading(SATURATION, T0, T0 + 1, 0.5, 0.0, SLOTS, max_age_s=5), T0 + 1)
    assert tracker.ledger.horizon_s >= needed_s(90), "an older reading may be in use still"


def test_reading_half_a_request_below_ours_is_plausible() -> None:
    """Averages are not whole numbers."""
    for load, reason in ((16.5, Reason.OPEN), (16.25, Reason.IMPLAUSIBLE)):
        limiter = make_limiter(in_flight=17)
        apply(limiter, make_reading(T0, 17))
        for second in (1, 2):
            apply(limiter, make_reading(T0 + second, load))
        assert limiter.get_allowance(T0 + 3).reason is reason


def test_longer_transit_time_explains_a_reading_half_a_request_below_ours() -> None:
    limiter = make_limiter(in_flight=16)
    apply(limiter, make_reading(T0, 16))
    send(limiter, [16], T0 + 0.9)  # this request may still be in transit at the next sample
    apply(limiter, make_reading(T0 + 1, 15.5))
    limiter.record_answer(16, T0 + 1.5)
    limiter.record_answer(15, T0 + 1.5)
    # The longer transit time is kept, so the next reading needs no explanation. Otherwise it would be the
    # second one that lacks our requests.
    send(limiter, [16], T0 + 1.9)
    apply(limiter, make_reading(T0 + 2, 14.5))
    assert limiter.get_allowance(T0 + 2.5).reason is Reason.OPEN


# The free units.


def test_free_units_are_the_headroom_and_the_middle_of_what_the_reading_may_contain_of_ours() -> None:
    limiter = make_limiter(in_flight=10)
    send(limiter, range(10, 14), T0 - 0.001)
    apply(limiter, make_reading(T0, 40))
    assert limiter.estimate_free_units(T0 + 1) == (10 + 14) / 2 + 24


def test_free_units_of_a_pressure_score_apply_if_no_signal_counts_requests() -> None:
    limiter = make_limiter()
    apply(limiter, make_reading(T0, 30, is_request_count=False))
    assert limiter.estimate_free_units(T0 + 1) == 34


def test_smallest_free_units_of_all_counting_signals_apply() -> None:
    limiter = make_limiter(SATURATION, REQUESTS)
    apply(limiter, make_reading(T0, 30), make_reading(T0, 50, REQUESTS))
    assert limiter.estimate_free_units(T0 + 1) == 14
    apply(limiter, make_reading(T0 + 1, 70))
    assert limiter.estimate_free_units(T0 + 2) == 0
    limiter.set_policy(Policy(reserve=0.0, max_in_flight=5), T0 + 2)
    apply(limiter, make_reading(T0 + 3, 30))
    assert limiter.estimate_free_units(T0 + 4) == 5


def test_free_units_are_unknown_with_a_faulty_reading_or_after_its_maximum_age() -> None:
    limiter = make_limiter(SATURATION, REQUESTS)
    apply(limiter, make_reading(T0, 30), make_reading(T0, 30, REQUESTS))
    assert limiter.estimate_free_units(T0 + Policy().max_age_s) == 34
    assert limiter.estimate_free_units(T0 + Policy().max_age_s + 0.1) is None
    apply(limiter, make_reading(T0 + 1, math.nan), make_reading(T0 + 1, 30, REQUESTS))
    assert limiter.estimate_free_units(T0 + 2) is None


# Readings that count calls instead of the units in them.


def make_merging_limiter() -> Limiter:
    """Return a limiter with eight calls of six units each."""
    limiter = Limiter(Policy(), [REQUESTS])
    send_calls(limiter, T0 - 60)
    return limiter


def send_calls(limiter: Limiter, at: float) -> None:
    for key in range(8):
        limiter.record_send(key, at, 6)


def apply_call_readings(limiter: Limiter, seconds: Iterable[int], items_beyond_calls: float = 0.0) -> None:
    for second in seconds:
        apply(limiter, make_reading(T0 + second, 48, REQUESTS, items_beyond_calls=items_beyond_calls))


def test_readings_below_our_units_for_15_s_count_calls() -> None:
    limiter = make_merging_limiter()
    apply_call_readings(limiter, range(20))
    assert limiter.count_units_as_calls(T0 + CALLS_COUNTED_S - 0.1) is None
    assert limiter.count_units_as_calls(T0 + CALLS_COUNTED_S) == (48, 8)
    apply_call_readings(limiter, [20], items_beyond_calls=40.0)  # 8 calls and 40 items beyond them
    assert limiter.count_units_as_calls(T0 + 20) is None
    apply_call_readings(limiter, range(21, 40), items_beyond_calls=40.0)
    assert limiter.count_units_as_calls(T0 + 40) is None


def test_readings_without_our_units_leave_open_whether_they_count_calls() -> None:
    limiter = make_merging_limiter()
    apply_call_readings(limiter, range(20))
    for key in range(8):
        limiter.record_answer(key, T0 + 20)
    apply_call_readings(limiter, [21])
    send_calls(limiter, T0 + 22)
    assert limiter.count_units_as_calls(T0 + 22) == (48, 8)


def test_pressure_score_does_not_show_whether_calls_are_counted() -> None:
    limiter = make_merging_limiter()
    for second in range(20):
        reading = make_reading(T0 + second, 8, REQUESTS, is_request_count=False, items_beyond_calls=0.0)
        apply(limiter, reading)
    assert limiter.count_units_as_calls(T0 + 20) is None


# What the capacity is learned from: the snapshot of each sample.


class RecordedSnapshots(CapacityEstimate):
    """Estimate that learns nothing, and keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.snapshots: list[PoolSnapshot] = []

    def learn_from_snapshot(self, snapshot: PoolSnapshot, *, reserve: float, backoff: float) -> None:
        self.snapshots.append(snapshot)


class SnapshotTracker(LimitTracker):
    """Tracker that records its snapshots."""

    def __init__(self, *signals: Signal) -> None:
        super().__init__(Policy(), signals or (REQUESTS,))
        self.recorded = self.capacity_estimate = RecordedSnapshots()

    def send(self, keys: Iterable[int], at: float) -> None:
        for key in keys:
            self.ledger.record_send(key, at)

    def apply(self, *readings: Reading, refused_at: float = -math.inf) -> PoolSnapshot:
        """Apply one sample and return the newest snapshot."""
        for reading in readings:
            self.add_reading(reading, reading.closed_at)
        now = max(reading.closed_at for reading in readings) + 0.25
        self.apply_due_readings(now, refused_at=refused_at, is_gateway_reachable=True)
        return self.recorded.snapshots[-1]

    def apply_mixed(
        self, at: float, sent: float, *, in_servers: float = 0.0, in_picker: float = 0.0
    ) -> PoolCounts:
        """Apply a sample of a picker whose own counters are of now, while the queues of the model servers are
        up to half a second old. Return the counts of the snapshot."""
        reading = Reading(
            REQUESTS,
            at,
            at,
            sent / SLOTS,
            in_picker / SLOTS,
            SLOTS,
            running=sent - in_servers,
            waiting=in_servers + in_picker,
            has_exact_counts=False,
        )
        counts = self.apply(reading).current_counts
        assert counts is not None
        return counts


def test_batch_requests_that_came_within_half_a_second_do_not_certainly_run() -> None:
    """Ten requests came early and six just now, beside 20 realtime requests. Four wait in model servers."""
    tracker = SnapshotTracker()
    tracker.send(range(10), T0 - 60)
    tracker.send(range(10, 16), T0 + 0.75)
    counts = tracker.apply_mixed(T0 + 1, 36, in_servers=4, in_picker=3)
    assert (counts.running, counts.waiting) == (32, 7)
    assert counts.certainly_running == 10 + 20 - 4


@pytest.mark.parametrize(
    ("apart_s", "before", "now", "certain"),
    [
        (1.0, 20, 30, 20 - 4),
        (REALTIME_RECENT_S, 20, 30, 20 - 4),
        (REALTIME_RECENT_S + 0.25, 20, 30, 30 - 4),
        (1.0, 30, 20, 20 - 4),
        (1.0, 3, 10, 0),
    ],
    ids=["more", "more after 3 s", "more after a longer time", "fewer", "before fewer than wait now"],
)
def test_realtime_requests_certainly_run_if_the_previous_sample_shows_as_many(
    apart_s: float, before: int, now: int, certain: int
) -> None:
    tracker = SnapshotTracker()
    tracker.apply_mixed(T0, before)
    counts = tracker.apply_mixed(T0 + apart_s, now, in_servers=4)
    assert (counts.running, counts.certainly_running) == (now - 4, certain)


@pytest.mark.parametrize(
    ("before", "now", "in_picker", "is_steady"),
    [
        (20, 22, 0, True),
        (20, 23, 0, False),
        (22, 20, 0, True),
        (95, 100, 0, True),
        (94, 100, 0, False),
        (55, 60, 40, True),
        (54, 60, 40, False),
    ],
)
def test_counts_are_steady_if_they_change_by_up_to_two_requests_or_a_twentieth(
    before: int, now: int, in_picker: int, is_steady: bool
) -> None:
    tracker = SnapshotTracker()
    tracker.apply_mixed(T0, before)
    assert tracker.apply_mixed(T0 + 1, now, in_picker=in_picker).is_steady is is_steady


@pytest.mark.parametrize(
    ("new_batch", "new_realtime", "is_steady"), [(2, 0, True), (3, 0, False), (1, 1, True), (1, 2, False)]
)
def test_new_batch_requests_and_new_realtime_requests_make_counts_unsteady_together(
    new_batch: int, new_realtime: int, is_steady: bool
) -> None:
    tracker = SnapshotTracker()
    tracker.send(range(10), T0 - 60)
    tracker.apply_mixed(T0, 20)
    tracker.send(range(10, 10 + new_batch), T0 + 0.75)
    assert tracker.apply_mixed(T0 + 1, 20 + new_batch + new_realtime).is_steady is is_steady


@pytest.mark.parametrize(
    ("in_servers", "in_picker", "expected"),
    [(0.0, 1.0, True), (0.0, 0.5, True), (0.5, 3.0, False), (0.0, 0.0, False), (1.0, 0.0, False)],
)
def test_requests_wait_in_the_picker_if_none_waits_in_model_servers(
    in_servers: float, in_picker: float, expected: bool
) -> None:
    counts = SnapshotTracker().apply_mixed(T0, 20, in_servers=in_servers, in_picker=in_picker)
    assert counts.is_waiting_in_picker is expected


def test_newest_of_several_signals_gives_the_counts() -> None:
    tracker = SnapshotTracker(SATURATION, REQUESTS)
    snapshot = tracker.apply(
        make_reading(T0, 30, running=20, waiting=10),
        make_reading(T0 + 1, 30, REQUESTS, running=29, waiting=1),
    )
    assert (snapshot.sampled_at, snapshot.current_counts) == (T0 + 1, PoolCounts(29, 1, 29))


def test_signal_that_shows_most_realtime_requests_and_smallest_capacity_apply() -> None:
    """Our 20 requests include ten that ended within the longer window of one signal."""
    tracker = SnapshotTracker(SATURATION, REQUESTS)
    tracker.send(range(20), T0 - 60)
    for key in range(10):
        tracker.record_answer(key, T0 + 0.75, None)
    snapshot = tracker.apply(
        make_reading(T0 + 1, 40, window_s=0.5),
        make_reading(T0 + 1, 38, REQUESTS, window_s=0.125, capacity=50),
    )
    assert snapshot.realtime_requests == pytest.approx(38 - 10)
    assert snapshot.present_requests == pytest.approx(38)
    assert snapshot.configured_capacity == 50
    assert snapshot.ended_requests == 10


def test_requests_that_were_sent_are_present_even_if_the_reading_does_not_show_them_yet() -> None:
    tracker = SnapshotTracker()
    tracker.send(range(17), T0 - 0.001)
    snapshot = tracker.apply(make_reading(T0, 3, REQUESTS))
    assert (snapshot.present_requests, snapshot.realtime_requests) == (17, 0)


@pytest.mark.parametrize("counts", [{"running": 30.0, "waiting": 5.0}, {"averages": (30.0, 5.0)}])
def test_counts_beside_a_pressure_score_show_the_realtime_requests(counts: dict[str, object]) -> None:
    tracker = SnapshotTracker()
    tracker.send(range(10), T0 - 60)
    snapshot = tracker.apply(make_reading(T0, 12, REQUESTS, is_request_count=False, **counts))  # type: ignore[arg-type]
    assert snapshot.realtime_requests == 25


@pytest.mark.parametrize(
    ("running", "is_plausible"), [(0.0, True), (1e9, True), (1.01e9, False), (-1.0, False)]
)
def test_implausible_counts_are_left_out(running: float, is_plausible: bool) -> None:
    assert MAX_PLAUSIBLE_REQUESTS == 1e9
    snapshot = SnapshotTracker().apply(make_reading(T0, 12, REQUESTS, running=running))
    assert (snapshot.current_counts is not None) is is_plausible


def test_each_sample_is_learned_from_once() -> None:
    tracker = SnapshotTracker()
    tracker.apply(make_reading(T0, 12, REQUESTS))
    tracker.apply(make_reading(T0, 12, REQUESTS))
    tracker.apply_due_readings(T0 + 1, refused_at=-math.inf, is_gateway_reachable=True)
    assert len(tracker.recorded.snapshots) == 1
    tracker.apply(make_reading(T0 + 1, 12, REQUESTS))
    assert len(tracker.recorded.snapshots) == 2


def test_sample_from_the_time_of_a_refusal_or_with_a_faulty_signal_teaches_nothing() -> None:
    tracker = SnapshotTracker(SATURATION, REQUESTS)
    both = [make_reading(T0, 12), make_reading(T0, 12, REQUESTS)]
    tracker.apply(*both)
    tracker.apply(*(make_reading(T0 + 1, 12, signal) for signal in Signal), refused_at=T0 + 1)
    tracker.apply(make_reading(T0 + 2, math.nan), make_reading(T0 + 2, 12, REQUESTS))
    assert len(tracker.recorded.snapshots) == 1
    tracker.apply(*(make_reading(T0 + 3, 12, signal) for signal in Signal), refused_at=T0 + 1)
    assert len(tracker.recorded.snapshots) == 2


# A capacity that is too small.


def make_crowded_limiter() -> Limiter:
    """Return a limiter whose readings prove that more requests run than the configured capacity."""
    limiter = make_limiter(REQUESTS)
    for seconds in range(0, 30, 5):
        apply(limiter, make_reading(T0 + seconds, 70, REQUESTS, running=70))
    assert limiter.small_capacity.proven_capacity == 70
    return limiter


def test_requests_that_run_above_the_capacity_show_that_it_is_too_small() -> None:
    assert make_crowded_limiter().small_capacity.quiet_s == 25


def test_refusal_ends_the_time_without_waiting_requests() -> None:
    limiter = make_crowded_limiter()
    limiter.record_refusal(T0 + 26, retry_at=T0 + 26, is_out_of_capacity=True, in_flight=1)
    assert limiter.small_capacity.quiet_s == 0


def test_smaller_capacity_that_was_learned_ends_the_proof_of_a_larger_one() -> None:
    limiter = make_crowded_limiter()
    for seconds in range(30, 60, 5):
        apply(limiter, make_reading(T0 + seconds, 60, REQUESTS, running=30, waiting=30))
    assert limiter.capacity_estimate.share is not None
    assert limiter.small_capacity.proven_capacity is None
