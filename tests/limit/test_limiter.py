"""Limiter: the effect of each event on the limit, and the reason that is shown."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import combinations

import pytest

from dispatcher.limit.allowance import Allowance, explain_allowance
from dispatcher.limit.budget import (
    MAX_IN_FLIGHT,
    MAX_PLAUSIBLE_REQUESTS,
    Policy,
    Reading,
    Reason,
    Signal,
)
from dispatcher.limit.limiter import Limiter
from dispatcher.limit.load_ledger import DELTA_S
from dispatcher.limit.poll import Poll, ReadFailure
from dispatcher.limit.signal_limit import MAX_PENDING_READINGS
from dispatcher.requests.outcomes.reachability import ERRORS_IN_A_ROW
from dispatcher.requests.outcomes.refusals import REMOTE_CLOCK_ERROR_S

SATURATION, REQUESTS = Signal.SATURATION, Signal.REQUESTS
T0 = 1000.0
POLICY = Policy()


class PoolLimiter(Limiter):
    """Limiter for a pool of 50 requests, with short methods to report events."""

    def __init__(self, policy: Policy = POLICY, signals: Iterable[Signal] = (SATURATION,)) -> None:
        super().__init__(policy, signals)
        self.key_count = 0

    def apply_reading(
        self,
        at: float,
        load: float = 30,
        max_sys: float = 50,
        signal: Signal = SATURATION,
        *,
        window_s: float = 0.0,
        is_request_count: bool = True,
    ) -> Allowance:
        """Add a sample that was taken by `at` and shows `load` requests. Return the allowance after it."""
        f_sys = load / max_sys if max_sys else 0.0
        self.add_reading(Reading(signal, at - window_s, at, f_sys, 0.0, max_sys, is_request_count), at)
        return self.get_allowance(at + 2 * DELTA_S)

    def send_requests(self, count: int, at: float) -> range:
        first, self.key_count = self.key_count, self.key_count + count
        for key in range(first, self.key_count):
            self.record_send(key, at)
        return range(first, self.key_count)

    def record_leases(self, at: float, other_units: int = 0, lost_units: int = 0) -> None:
        self.record_lease_counts(
            at, other_owners_units=other_units, just_leased_units=0, lost_units=lost_units
        )


def make_open_limiter(policy: Policy = POLICY) -> PoolLimiter:
    """Return a limiter that allows 17 requests at T0, with nothing in flight."""
    limiter = PoolLimiter(policy)
    assert limiter.apply_reading(T0).limit == 17
    return limiter


# Readings.


def test_limit_never_exceeds_the_maximum_in_flight_whatever_a_reading_contains() -> None:
    limiter = PoolLimiter(Policy())
    limiter.add_reading(Reading(SATURATION, T0, T0, 0.0, 0.0, MAX_PLAUSIBLE_REQUESTS), T0)
    assert limiter.get_allowance(T0 + 1).limit == MAX_IN_FLIGHT
    limiter.set_shared_limit(2**62, T0 + 2)
    limiter.add_reading(Reading(SATURATION, T0 + 2, T0 + 2, 0.0, 0.0, MAX_PLAUSIBLE_REQUESTS), T0 + 2)
    assert limiter.get_allowance(T0 + 3).limit == MAX_IN_FLIGHT


def test_limit_of_the_worked_example() -> None:
    limiter = PoolLimiter()
    limiter.add_reading(Reading(SATURATION, T0, T0, 0.5, 0.1, 50), T0)
    allowance = limiter.get_allowance(T0 + DELTA_S)
    assert (allowance.limit, allowance.reason, allowance.signal) == (17, Reason.OPEN, SATURATION)
    limiter.send_requests(17, T0 + 0.1)
    limiter.add_reading(Reading(SATURATION, T0 + 1, T0 + 1, 0.84, 0.1, 50), T0 + 1)
    allowance = limiter.get_allowance(T0 + 1 + DELTA_S)
    assert allowance.budget is not None
    assert allowance.budget.d == pytest.approx(0.01)
    assert (allowance.budget.headroom, allowance.limit, allowance.reason) == (0, 17, Reason.FULL)


def test_reading_is_applied_after_the_transit_time() -> None:
    limiter = PoolLimiter()
    limiter.add_reading(Reading(SATURATION, T0 - 1, T0, 0.6, 0, 50), T0)
    early = limiter.get_allowance(T0)
    assert (early.reason, early.limit, early.next_check_at) == (Reason.STARTING, 0, T0 + DELTA_S)
    assert limiter.get_allowance(T0 + DELTA_S).limit == 17


def test_limit_moves_only_as_far_as_the_reading_proves() -> None:
    """15 requests began and ended within the window, so the reading may contain any number of them."""
    limiter = make_open_limiter()
    keys = limiter.send_requests(15, T0 + 1)
    for key in keys:
        limiter.record_answer(key, T0 + 2)
    # The reading contains 0 to 15 of ours. The limit is between H and H + 15, and stays as it is.
    assert (
        limiter.apply_reading(T0 + 3, load=40, window_s=2.5).limit == 17
    )  # H = 7, so the limit is in [7, 22]
    assert limiter.apply_reading(T0 + 6, load=44, window_s=0.0).limit == 3  # it contains none of ours: [3, 3]


def test_older_sample_of_a_signal_is_ignored() -> None:
    limiter = make_open_limiter()
    assert limiter.apply_reading(T0 - 5, load=0).limit == 17
    assert limiter.get_allowance(T0 + 1).read_at == T0


def test_sample_of_an_unused_signal_is_ignored() -> None:
    assert make_open_limiter().apply_reading(T0 + 1, load=50, signal=REQUESTS).limit == 17


@pytest.mark.parametrize(
    ("opened_at", "closed_at"),
    [(math.nan, T0 + 1), (T0, math.nan), (-math.inf, T0 + 1), (T0, math.inf), (T0 + 1, T0 + 0.5)],
)
def test_reading_with_an_invalid_time_window_is_ignored(opened_at: float, closed_at: float) -> None:
    """If it were applied, the gate might stay open for ever, or with an unknown limit."""
    limiter = make_open_limiter()
    limiter.add_reading(Reading(SATURATION, opened_at, closed_at, 0, 0, 50), T0 + 1)
    assert limiter.get_allowance(T0 + 2).limit == 17
    assert limiter.get_allowance(T0 + POLICY.max_age_s + 0.1).reason is Reason.STALE


def test_sample_with_a_future_time_counts_as_taken_now() -> None:
    """A clock of an adapter that is ahead must not make old samples fresh."""
    limiter = PoolLimiter()
    limiter.add_reading(Reading(SATURATION, T0 + 3600, T0 + 3600, 0.6, 0, 50), T0)
    assert limiter.get_allowance(T0 + DELTA_S).limit == 17
    assert limiter.get_allowance(T0 + POLICY.max_age_s + 0.1).reason is Reason.STALE


def test_newest_of_very_many_samples_is_applied() -> None:
    limiter = make_open_limiter()
    for n in range(2 * MAX_PENDING_READINGS):
        limiter.add_reading(
            Reading(SATURATION, T0 + 1 + n / 1e4, T0 + 1 + n / 1e4, (n + 1) / 50, 0, 50), T0 + 1.1
        )
    assert limiter.get_allowance(T0 + 1.2).limit == 47 - 2 * MAX_PENDING_READINGS


def test_samples_that_arrived_before_the_first_query_are_applied_in_order() -> None:
    limiter = PoolLimiter()
    for n, load in enumerate((30, 45, 20)):
        limiter.add_reading(Reading(SATURATION, T0 + n, T0 + n, load / 50, 0, 50), T0 + n)
    allowance = limiter.get_allowance(T0 + 3)
    assert (allowance.limit, allowance.read_at) == (27, T0 + 2)


def test_gate_reopens_once_a_sample_of_every_signal_arrives_again_even_if_unchanged() -> None:
    """With Prometheus, the next sample comes a scrape interval later. The previous one is still valid."""
    limiter = PoolLimiter(signals=(SATURATION, REQUESTS))
    for signal in Signal:
        limiter.apply_reading(T0, signal=signal)
    limiter.record_read_failure(Reason.UNREADABLE, "timed out", T0 + 1)
    assert limiter.get_allowance(T0 + 1).reason is Reason.UNREADABLE
    assert limiter.apply_reading(T0, signal=SATURATION).reason is Reason.UNREADABLE
    for signal in Signal:
        limiter.add_reading(Reading(signal, T0, T0, 0.6, 0, 50), T0 + 1)  # from the same time as the failure
    assert limiter.get_allowance(T0 + 1.5).reason is Reason.UNREADABLE
    for signal in Signal:
        limiter.add_reading(Reading(signal, T0, T0, 0.6, 0, 50), T0 + 2)
    assert limiter.get_allowance(T0 + 2).limit == 17


def test_read_failure_closes_the_gate_at_the_given_time_or_when_the_reading_is_stale() -> None:
    limiter = make_open_limiter()
    limit = limiter.get_allowance(T0 + 0.5).limit
    limiter.record_read_failure(Reason.UNREADABLE, "timed out", T0 + 1, closes_at=T0 + 2.5)
    allowance = limiter.get_allowance(T0 + 1)
    assert (allowance.limit, allowance.next_check_at) == (limit, T0 + 2.5)
    assert limiter.get_allowance(T0 + 2.5).reason is Reason.UNREADABLE
    limiter.record_read_failure(Reason.UNREADABLE, "timed out", T0 + 3, closes_at=T0 + 1000)
    assert limiter.get_allowance(T0 + POLICY.max_age_s + 0.1).reason is Reason.STALE


def test_read_failure_with_an_open_reason_closes_the_gate_nevertheless() -> None:
    limiter = make_open_limiter()
    limiter.record_read_failure(Reason.OPEN, "nonsense", T0 + 1)
    assert limiter.get_allowance(T0 + 1).reason is Reason.UNREADABLE


def test_stale_reading_is_explained_with_its_age_and_checked_in_time() -> None:
    limiter = make_open_limiter()
    allowance = limiter.get_allowance(T0 + 1)
    assert allowance.next_check_at == pytest.approx(T0 + POLICY.max_age_s)
    assert limiter.get_allowance(T0 + POLICY.max_age_s).limit == 17
    stale = limiter.get_allowance(T0 + POLICY.max_age_s + 2)
    assert (stale.limit, stale.reason) == (0, Reason.STALE)
    assert stale.detail == "the newest sample of saturation is 12.0 s old"


# Readings that do not show our requests.


def test_reading_without_our_running_requests_is_implausible_the_second_time() -> None:
    limiter = make_open_limiter()
    limiter.send_requests(17, T0 + 0.1)
    first = limiter.apply_reading(T0 + 1, load=3)
    assert (first.limit, first.reason) == (17, Reason.FULL)  # the first such reading proves no room
    second = limiter.apply_reading(T0 + 2, load=3)
    assert (second.limit, second.reason) == (0, Reason.IMPLAUSIBLE)
    assert "does not show the requests that we have running" in second.detail
    assert limiter.apply_reading(T0 + 3, load=30).reason is Reason.OPEN


def test_implausible_reading_proves_no_room_after_a_change_of_policy_or_capacity_either() -> None:
    limiter = make_open_limiter()
    limiter.send_requests(17, T0 + 0.1)
    assert limiter.apply_reading(T0 + 1, load=3).limit == 17
    limiter.set_policy(Policy(per_endpoint=50), T0 + 1.1)
    assert limiter.get_allowance(T0 + 1.1).limit == 17
    limiter.set_capacity_bound(50, T0 + 1.2)
    assert limiter.get_allowance(T0 + 1.2).limit == 17


def test_pressure_score_is_plausible_without_our_requests() -> None:
    limiter = make_open_limiter()
    limiter.send_requests(17, T0 + 0.1)
    for second in range(1, 5):
        assert not limiter.apply_reading(T0 + second, load=3, is_request_count=False).reason.is_closed


# Several signals.


def test_signal_with_the_smallest_limit_applies_and_is_named() -> None:
    limiter = PoolLimiter(signals=(SATURATION, REQUESTS))
    assert limiter.apply_reading(T0, load=10).detail == "no reading yet of requests"
    allowance = limiter.apply_reading(T0, load=30, signal=REQUESTS)
    assert (allowance.limit, allowance.signal) == (17, REQUESTS)
    assert allowance.budget is not None
    assert allowance.budget.signal is REQUESTS
    allowance = limiter.apply_reading(T0 + 1, load=40)
    assert (allowance.limit, allowance.signal) == (7, SATURATION)
    assert [(each.signal, each.closed_at) for each in limiter.newest_readings] == [
        (SATURATION, T0 + 1),
        (REQUESTS, T0),
    ]


def test_gate_closes_if_one_of_two_signals_is_stale() -> None:
    limiter = PoolLimiter(signals=(SATURATION, REQUESTS))
    limiter.apply_reading(T0, signal=REQUESTS)
    allowance = [limiter.apply_reading(T0 + second) for second in range(12)][-1]
    assert allowance.reason is Reason.STALE
    assert "requests" in allowance.detail


def test_new_signal_must_be_read_first_and_a_removed_one_no_longer_limits() -> None:
    limiter = make_open_limiter()
    limiter.set_signals([SATURATION])
    assert limiter.get_allowance(T0 + 0.1).limit == 17
    limiter.set_signals([REQUESTS, SATURATION])
    assert limiter.get_allowance(T0 + 0.1).reason is Reason.STARTING
    assert limiter.apply_reading(T0 + 0.2, load=45, signal=REQUESTS).limit == 2
    limiter.set_signals([SATURATION])
    assert limiter.get_allowance(T0 + 0.3).limit == 17


def test_reason_without_any_signal_is_starting() -> None:
    assert Limiter(POLICY, ()).get_allowance(T0).detail == "no reading yet of any signal"


def test_reason_starting_names_the_read_failure() -> None:
    limiter = PoolLimiter()
    limiter.record_read_failure(Reason.UNREADABLE, "connection refused", T0)
    assert limiter.get_allowance(T0).detail == "no reading yet of saturation: connection refused"


# Capacity and settings.


def test_smaller_capacity_applies_at_once_and_a_larger_one_with_the_next_reading() -> None:
    limiter = make_open_limiter()
    limiter.set_capacity_bound(40, T0 + 0.1)
    assert limiter.get_allowance(T0 + 0.1).limit == 8  # 38 less 30 realtime requests
    limiter.set_capacity_bound(45, T0 + 0.2)
    assert limiter.get_allowance(T0 + 0.2).limit == 8
    assert limiter.apply_reading(T0 + 1).limit == 12  # floor(45 × 0.95) = 42
    limiter.set_capacity_bound(100, T0 + 1.1)
    assert limiter.get_allowance(T0 + 1.1).limit == 12
    assert limiter.apply_reading(T0 + 2).limit == 17
    limiter.set_capacity_bound(None, T0 + 2.1)
    assert limiter.get_allowance(T0 + 2.1).limit == 17


def test_capacity_of_zero_closes_the_gate_at_once() -> None:
    limiter = make_open_limiter()
    limiter.set_capacity_bound(0, T0 + 0.1)
    assert limiter.get_allowance(T0 + 0.1).reason is Reason.NO_ENDPOINTS


def test_capacity_before_any_reading_is_remembered() -> None:
    limiter = PoolLimiter()
    limiter.set_capacity_bound(40, T0 - 1)
    assert limiter.apply_reading(T0).limit == 8


@pytest.mark.parametrize(
    ("policy", "limit"),
    [
        (Policy(reserve=0.2), 10),
        (Policy(reserve=0.0), 20),
        (Policy(max_in_flight=5), 5),
        (Policy(max_sys=40), 8),
        (Policy(max_in_flight=0), 0),
    ],
)
def test_changed_settings_apply_at_once(policy: Policy, limit: int) -> None:
    limiter = make_open_limiter()
    limiter.set_policy(policy, T0 + 0.1)
    assert limiter.get_allowance(T0 + 0.1).limit == limit


def test_shorter_max_age_applies_at_once() -> None:
    limiter = make_open_limiter()
    limiter.set_policy(Policy(max_age_s=2), T0 + 1)
    assert limiter.get_allowance(T0 + 2.5).reason is Reason.STALE


# Leases.


def test_requests_of_other_replicas_are_added_back_like_our_own() -> None:
    limiter = make_open_limiter()
    limiter.send_requests(7, T0 + 0.1)
    limiter.record_leases(T0 + 0.1, other_units=10)
    assert (limiter.in_flight, limiter.other_owners_units) == (17, 10)
    allowance = limiter.apply_reading(T0 + 1, load=47)
    assert (allowance.limit, allowance.reason) == (17, Reason.FULL)


def test_lost_lease_lowers_the_limit_until_a_reading_taken_after_it() -> None:
    limiter = make_open_limiter()
    limiter.record_leases(
        T0 + 0.1, other_units=17, lost_units=3
    )  # the first count: these leases were lost before this process started
    assert limiter.get_allowance(T0 + 0.1).limit == 17
    limiter.record_leases(T0 + 0.5, other_units=15, lost_units=5)
    allowance = limiter.get_allowance(T0 + 0.5)
    assert (allowance.limit, allowance.lost_units) == (15, 5)
    limiter.record_leases(T0 + 0.55, other_units=15, lost_units=5)
    assert limiter.get_allowance(T0 + 0.55) is allowance  # the same count again changes nothing
    # The sample is from before the loss was known, so it may contain the two lost requests.
    assert limiter.apply_reading(T0 + 0.6, load=45, window_s=0.3).limit == 15
    assert limiter.apply_reading(T0 + 2, load=45).limit == 15
    limiter.record_leases(T0 + 2.1, other_units=15, lost_units=5)
    assert limiter.get_allowance(T0 + 2.1).limit == 17  # it contains 15 of ours and proves a headroom of 2


def test_smaller_loss_counter_means_a_new_queue() -> None:
    limiter = make_open_limiter()
    limiter.record_leases(T0 + 0.1, lost_units=10)
    limiter.record_leases(T0 + 0.2, lost_units=12)
    assert limiter.get_allowance(T0 + 0.2).limit == 15
    limiter.record_leases(T0 + 0.3, lost_units=0)
    assert limiter.get_allowance(T0 + 0.3).limit == 17


def test_losses_between_two_readings_lower_the_limit_that_the_next_one_moves() -> None:
    limiter = make_open_limiter()
    limiter.record_leases(T0 + 0.1, other_units=17)
    limiter.record_leases(T0 + 0.5, other_units=12, lost_units=5)
    for key in limiter.send_requests(3, T0 + 0.6):
        limiter.record_answer(key, T0 + 0.9)
    # The reading contains 12 to 15 of ours, so the limit is between 11 and 14. It was 12 before.
    assert limiter.apply_reading(T0 + 2, load=48, window_s=1.45).limit == 12
    limiter.record_leases(T0 + 3, other_units=11, lost_units=6)
    assert limiter.get_allowance(T0 + 3).limit == 11


def test_requests_of_others_that_ended_since_their_count_prove_no_room() -> None:
    """Others held 12 leases at the last count, but 5 when the sample was taken, as a later count shows."""
    limiter = make_open_limiter()
    limiter.send_requests(5, T0 + 0.1)
    limiter.record_leases(T0 + 0.1, other_units=12)
    limiter.apply_reading(T0 + 1, load=57)  # realtime requests grew to 40, which leaves room for 7
    limiter.record_leases(T0 + 1.1, other_units=12)
    assert limiter.get_allowance(T0 + 1.1).limit == 7
    assert limiter.apply_reading(T0 + 2, load=50).limit == 7
    limiter.record_leases(T0 + 2.1, other_units=5)
    assert limiter.get_allowance(T0 + 2.1).limit == 7


def test_first_lease_count_after_a_sample_lets_the_sample_prove_more_room() -> None:
    limiter = PoolLimiter()
    limiter.record_leases(T0 - 1, other_units=10)
    assert limiter.apply_reading(T0, load=40).limit == 7
    limiter.record_leases(T0 + 0.1, other_units=10)
    assert limiter.get_allowance(T0 + 0.1).limit == 17


# Overload.


def record_overload(
    limiter: Limiter,
    at: float,
    *,
    retry_at: float = 0.0,
    is_out_of_capacity: bool = False,
    is_remote: bool = False,
    in_flight: int = 10,
) -> None:
    limiter.record_refusal(
        at,
        retry_at=retry_at,
        is_out_of_capacity=is_out_of_capacity,
        in_flight=in_flight,
        is_remote=is_remote,
    )


def test_nothing_is_allowed_after_a_refusal_until_a_reading_taken_after_it() -> None:
    limiter = make_open_limiter()
    record_overload(limiter, T0 + 1)
    assert limiter.get_allowance(T0 + 1).detail == "refused; waiting for a reading taken after that"
    assert (
        limiter.apply_reading(T0 + 1.5, window_s=0.5).reason is Reason.BACKPRESSURE
    )  # the reading may be from before the refusal
    assert limiter.apply_reading(T0 + 2, window_s=0.5).limit == 17


def test_retry_after_is_waited_for_up_to_the_configured_maximum() -> None:
    limiter = make_open_limiter(Policy(retry_after_max_s=5))
    record_overload(limiter, T0 + 1, retry_at=T0 + 4)
    waiting = limiter.apply_reading(T0 + 2)
    assert (waiting.reason, waiting.next_check_at) == (Reason.BACKPRESSURE, T0 + 4)
    assert waiting.detail == "asked to wait another 2.0 s"
    assert limiter.get_allowance(T0 + 4).limit == 17
    record_overload(limiter, T0 + 5, retry_at=T0 + 500)
    assert limiter.apply_reading(T0 + 9.9).reason is Reason.BACKPRESSURE
    assert limiter.get_allowance(T0 + 10).limit == 17


def test_newer_refusal_does_not_shorten_the_wait() -> None:
    limiter = make_open_limiter()
    record_overload(limiter, T0 + 1, retry_at=T0 + 8)
    record_overload(limiter, T0 + 2, retry_at=T0 + 3)
    assert limiter.apply_reading(T0 + 4).next_check_at == T0 + 8


def test_refusal_that_is_reported_late_is_waited_for() -> None:
    limiter = make_open_limiter()
    record_overload(limiter, T0 + 2)
    record_overload(limiter, T0 + 1.99, retry_at=T0 + 8)
    assert limiter.apply_reading(T0 + 3).reason is Reason.BACKPRESSURE
    assert limiter.get_allowance(T0 + 8).limit == 17


def test_refusal_of_another_replica_closes_the_gate() -> None:
    limiter = make_open_limiter()
    record_overload(limiter, T0 + 1, is_remote=True)
    assert limiter.get_allowance(T0 + 1).reason is Reason.BACKPRESSURE


def test_same_refusal_reported_again_with_a_slightly_different_time_does_not_close_the_gate_again() -> None:
    limiter = make_open_limiter()
    record_overload(limiter, T0 + 1, retry_at=T0 + 1.5, is_remote=True)
    assert limiter.apply_reading(T0 + 1.6).limit == 17
    for apart_s in (-REMOTE_CLOCK_ERROR_S, 0.0, 0.9 * REMOTE_CLOCK_ERROR_S):
        record_overload(limiter, T0 + 1 + apart_s, retry_at=T0 + 1.5 + apart_s, is_remote=True)
        assert limiter.get_allowance(T0 + 1.7).limit == 17
    record_overload(
        limiter, T0 + 1 + REMOTE_CLOCK_ERROR_S, retry_at=T0 + 1.5 + REMOTE_CLOCK_ERROR_S, is_remote=True
    )
    assert limiter.get_allowance(T0 + 1.51 + REMOTE_CLOCK_ERROR_S).limit == 17


def test_longer_wait_of_another_replica_applies() -> None:
    """The queue returns the newest refusal, which is ours, with the longest wait of all refusals."""
    limiter = make_open_limiter()
    record_overload(limiter, T0 + 2)
    record_overload(limiter, T0 + 2, retry_at=T0 + 8, is_remote=True)
    assert limiter.apply_reading(T0 + 3).next_check_at == T0 + 8


def get_capacity(limiter: PoolLimiter, at: float) -> float:
    """Return the capacity that the limiter assumes."""
    budget = limiter.get_allowance(at).budget
    assert budget is not None
    return budget.max_sys


def apply_request_reading(
    limiter: PoolLimiter, at: float, *, running: float, waiting: float = 0, max_sys: float = 50
) -> float:
    """Add a sample with separate counts of running and waiting requests. Return the capacity after it."""
    share = (running + waiting) / max_sys
    reading = Reading(REQUESTS, at, at, share, 0.0, max_sys, running=running, waiting=waiting)
    limiter.add_reading(reading, at)
    return get_capacity(limiter, at + 2 * DELTA_S)


def test_waiting_requests_in_two_readings_show_the_capacity() -> None:
    limiter = PoolLimiter(signals=(REQUESTS,))
    assert apply_request_reading(limiter, T0, running=20) == 50
    limiter.send_requests(27, T0 + 1)
    assert apply_request_reading(limiter, T0 + 2, running=32, waiting=15) == 50
    assert apply_request_reading(limiter, T0 + 3, running=32, waiting=14) == 32
    allowance = limiter.get_allowance(T0 + 4)
    assert allowance.limit == 27 + math.floor(0.95 * 32 - 46)
    assert "of 32 requests, which fitted where 50 are configured" in explain_allowance(allowance, 27)


def test_refusal_for_lack_of_capacity_lowers_the_capacity_at_the_next_reading() -> None:
    limiter = make_open_limiter()
    record_overload(limiter, T0 + 1, is_out_of_capacity=True)
    assert get_capacity(limiter, T0 + 1) == 50
    limiter.apply_reading(T0 + 2)
    assert get_capacity(limiter, T0 + 3) == pytest.approx(0.9 * (10 - 1 + 30))


def test_refusal_that_the_next_reading_explains_does_not_change_the_capacity() -> None:
    """Realtime requests filled the whole pool between two readings."""
    limiter = PoolLimiter(signals=(REQUESTS,))
    apply_request_reading(limiter, T0, running=30)
    record_overload(limiter, T0 + 1, is_out_of_capacity=True)
    assert apply_request_reading(limiter, T0 + 2, running=50, waiting=8) == 50
    record_overload(limiter, T0 + 3, is_out_of_capacity=True)
    assert apply_request_reading(limiter, T0 + 4, running=25) == 50, (
        "the pool still has room for as many requests as ran a moment ago"
    )


def test_other_refusals_do_not_change_the_capacity() -> None:
    limiter = make_open_limiter()
    record_overload(limiter, T0 + 1, in_flight=2)
    assert limiter.apply_reading(T0 + 2).limit == 17
    assert get_capacity(limiter, T0 + 3) == 50


def test_several_signals_of_one_sample_change_the_capacity_once() -> None:
    one, two = PoolLimiter(signals=(REQUESTS,)), PoolLimiter(signals=(SATURATION, REQUESTS))
    for limiter, signals in ((one, (REQUESTS,)), (two, (SATURATION, REQUESTS))):
        for at in range(20):
            for signal in signals:
                waiting = {1: 10.0, 2: 11.0}.get(at, 0.0)
                reading = Reading(signal, T0 + at, T0 + at, 0.4, 0, 50, running=20, waiting=waiting)
                limiter.add_reading(reading, T0 + at)
            limiter.get_allowance(T0 + at + 0.5)
    assert get_capacity(one, T0 + 20) == get_capacity(two, T0 + 20)
    assert 20 < get_capacity(one, T0 + 20) < 50


@pytest.mark.parametrize(("f_sys", "max_sys"), [(math.nan, 50), (0.5, math.nan), (0.5, math.inf), (0.5, 0)])
def test_implausible_reading_does_not_change_the_capacity(f_sys: float, max_sys: float) -> None:
    limiter = make_open_limiter()
    record_overload(limiter, T0 + 1, is_out_of_capacity=True)
    limiter.add_reading(Reading(SATURATION, T0 + 3, T0 + 3, f_sys, 0, max_sys, running=9, waiting=9), T0 + 3)
    assert limiter.get_allowance(T0 + 4).reason.is_closed
    limiter.apply_reading(T0 + 5)
    assert get_capacity(limiter, T0 + 6) == pytest.approx(0.9 * 39), (
        "the refusal is judged by the next plausible reading"
    )


def test_reading_from_before_a_refusal_does_not_change_the_capacity() -> None:
    limiter = make_open_limiter()
    record_overload(limiter, T0 + 1, is_out_of_capacity=True)
    limiter.apply_reading(T0 + 1.5, window_s=1)
    assert get_capacity(limiter, T0 + 1.6) == 50


def test_learned_capacity_scales_with_the_endpoints() -> None:
    limiter = PoolLimiter(signals=(REQUESTS,))
    for at in (0, 1, 2):
        apply_request_reading(limiter, T0 + at, running=25, waiting=20 + at)
    assert get_capacity(limiter, T0 + 3) == 25
    assert apply_request_reading(limiter, T0 + 4, running=20, max_sys=100) == 50
    limiter.set_capacity_bound(40, T0 + 5)
    assert get_capacity(limiter, T0 + 5) == 20


@pytest.mark.parametrize("signals", [(SATURATION,), (REQUESTS,), (SATURATION, REQUESTS)])
def test_invalid_counts_beside_a_valid_load_do_not_change_the_capacity(signals: tuple[Signal, ...]) -> None:
    for running, waiting in ((math.nan, 5), (math.inf, 5), (20, math.nan), (20, math.inf), (-5, 9), (0, 0)):
        limiter = PoolLimiter(signals=signals)
        for at in range(5):
            for signal in signals:
                reading = Reading(signal, T0 + at, T0 + at, 0.2, 0, 50, running=running, waiting=waiting)
                limiter.add_reading(reading, T0 + at)
            assert get_capacity(limiter, T0 + at + 0.5) == 50


# An unreachable gateway.


def test_pauses_between_probes_grow_from_a_tenth_of_a_second_to_a_second() -> None:
    limiter = make_open_limiter()
    limiter.record_connection_failure(T0 + 1, "refused")
    assert not limiter.get_allowance(T0 + 1).probe_limit
    at, pauses = T0 + 1, []
    for _ in range(8):
        due = limiter.get_allowance(at).next_check_at
        assert due is not None
        pauses.append(round(due - at, 6))
        assert not limiter.get_allowance(due - 0.01).probe_limit
        limiter.apply_reading(due - 0.005)  # readings continue to arrive
        allowance = limiter.get_allowance(due)
        assert (allowance.limit, allowance.detail) == (0, "refused")
        assert allowance.probe_limit == 17, "the probe is allowed under the limit that would apply otherwise"
        limiter.record_probe(due)
        at = due
        limiter.record_connection_failure(at, "refused")
        # The newest readings are checked again earlier than the next probe.
        limiter.get_allowance(at + DELTA_S)
        next_check_at = limiter.get_allowance(at + DELTA_S).next_check_at
        assert next_check_at is not None
        assert next_check_at > at
    assert pauses == [0.1, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]


def test_readings_need_not_show_sent_requests_while_the_gateway_is_unreachable() -> None:
    """Requests that do not get through are not in the pool. A reading without them is plausible, and proves
    no additional room."""
    limiter = make_open_limiter()
    limiter.send_requests(10, T0 + 0.5)
    limiter.record_connection_failure(T0 + 1, "no connection within 1.5 s")
    allowances = [limiter.apply_reading(T0 + second, load=5 if second < 5 else 35) for second in range(2, 8)]
    assert {allowance.reason for allowance in allowances} == {Reason.GATEWAY_UNREACHABLE}
    assert allowances[-1].probe_limit

    limiter = make_open_limiter()
    limiter.send_requests(10, T0 + 0.5)
    limiter.record_connection_failure(T0 + 1, "refused")
    limiter.apply_reading(T0 + 2, load=35)
    limiter.record_gateway_answer(T0 + 3, sent_at=T0 + 2.9)
    assert limiter.get_allowance(T0 + 3).limit == 17, (
        "the limit is not 10 + 12, as the reading may contain none of the 10"
    )


def test_no_probe_is_sent_while_refused_or_without_room() -> None:
    limiter = make_open_limiter()
    limiter.record_connection_failure(T0 + 1, "refused")
    record_overload(limiter, T0 + 1, retry_at=T0 + 3)
    assert not limiter.get_allowance(T0 + 2).probe_limit
    assert limiter.apply_reading(T0 + 3).probe_limit
    assert limiter.apply_reading(T0 + 4, load=50).probe_limit == 0


def test_answer_to_a_request_sent_before_the_failure_does_not_reopen_the_gate() -> None:
    limiter = make_open_limiter()
    limiter.record_connection_failure(T0 + 1, "refused")
    limiter.record_connection_failure(T0 + 2, "DNS")
    assert limiter.get_allowance(T0 + 2).detail == "DNS"
    limiter.record_gateway_answer(T0 + 3, sent_at=T0 + 0.9)
    assert limiter.get_allowance(T0 + 3).reason is Reason.GATEWAY_UNREACHABLE
    limiter.record_gateway_answer(T0 + 3, sent_at=T0 + 1.5)
    assert limiter.get_allowance(T0 + 3).limit == 17


def test_gateway_is_failing_after_three_intermediary_errors_in_a_row_and_not_unreachable() -> None:
    limiter = make_open_limiter()
    for n in range(ERRORS_IN_A_ROW - 1):
        assert not limiter.record_intermediary_error(T0 + n / 10, T0 + n / 10 - 0.01, "empty 500")
    assert limiter.get_allowance(T0 + 1).limit == 17
    assert limiter.record_intermediary_error(T0 + 1, T0 + 1 - 0.01, "empty 500")
    assert limiter.get_allowance(T0 + 1).reason is Reason.GATEWAY_FAILING
    assert limiter.record_intermediary_error(T0 + 1.1, T0 + 1.1 - 0.01, "empty 500")


def test_answer_resets_the_count_of_errors_unless_it_was_sent_before_them() -> None:
    limiter = make_open_limiter()
    limiter.record_intermediary_error(T0 + 1, T0 + 1 - 0.01, "empty 500")
    limiter.record_intermediary_error(T0 + 2, T0 + 2 - 0.01, "empty 500")
    limiter.record_gateway_answer(T0 + 2.1, sent_at=T0 + 1.5)
    assert not limiter.record_intermediary_error(T0 + 3, T0 + 3 - 0.01, "empty 500")
    assert not limiter.record_intermediary_error(T0 + 4, T0 + 4 - 0.01, "empty 500")
    limiter.record_gateway_answer(T0 + 4.1, sent_at=T0 + 2.5)
    assert limiter.record_intermediary_error(T0 + 5, T0 + 5 - 0.01, "empty 500")


def test_reachable_gateway_resets_the_count_of_errors_and_the_pauses() -> None:
    limiter = make_open_limiter()
    limiter.record_connection_failure(T0, "refused")
    for n in range(5):
        limiter.record_probe(T0 + n)
    limiter.record_gateway_answer(T0 + 5, sent_at=T0 + 5)
    limiter.record_probe(T0 + 5)  # a late report of a probe changes nothing
    assert limiter.get_allowance(T0 + 5).limit == 17
    assert not limiter.record_intermediary_error(T0 + 5.5, T0 + 5.5 - 0.01, "empty 500")
    limiter.record_connection_failure(T0 + 6, "refused")
    assert limiter.get_allowance(T0 + 6).next_check_at == pytest.approx(T0 + 6.1)


# Reasons and their order.

CLOSED = [reason for reason in Reason if reason.is_closed]


def make_closed_limiter(reasons: Iterable[Reason]) -> tuple[PoolLimiter, float]:
    """Return a limiter for which all these reasons apply, and the time for the query."""
    reasons = set(reasons)
    starting = Reason.STARTING in reasons
    limiter = PoolLimiter(signals=(SATURATION,) if starting else (SATURATION, REQUESTS))
    loads = {SATURATION: (30.0, 50.0), REQUESTS: (30.0, 50.0)}
    if Reason.NO_ROOM in reasons:
        loads[REQUESTS if Reason.IMPLAUSIBLE in reasons and not starting else SATURATION] = (48.0, 50.0)
    if Reason.IMPLAUSIBLE in reasons:
        loads[SATURATION] = (math.nan, 50.0)
    if Reason.NO_ENDPOINTS in reasons:
        loads[SATURATION if starting else REQUESTS] = (30.0, 0.0)
    overloaded_at = T0 + 0.5 if Reason.BACKPRESSURE in reasons else None
    for signal, (load, max_sys) in loads.items():
        limiter.apply_reading(T0, load, max_sys, signal)
    if overloaded_at is not None:
        record_overload(limiter, overloaded_at)
    if Reason.GATEWAY_FAILING in reasons:
        for _ in range(ERRORS_IN_A_ROW):
            limiter.record_intermediary_error(T0 + 0.5, T0 + 0.49, "empty 500")
    if Reason.GATEWAY_UNREACHABLE in reasons:
        limiter.record_connection_failure(T0 + 0.5, "refused")
    if Reason.UNREADABLE in reasons:
        limiter.record_read_failure(Reason.UNREADABLE, "timed out", T0 + 0.5)
    if starting:
        limiter.set_signals((SATURATION, REQUESTS))
    if Reason.QUEUE_UNREACHABLE in reasons:
        limiter.set_queue_problem("connection refused", T0 + 0.5)
    if Reason.PAUSED in reasons:
        limiter.set_paused(True, T0 + 0.5)
    if Reason.DRAINING in reasons:
        limiter.start_draining(T0 + 0.5)
    return limiter, T0 + (POLICY.max_age_s + 1 if Reason.STALE in reasons else 1)


@pytest.mark.parametrize("reason", CLOSED)
def test_each_closed_reason_is_shown_with_a_limit_of_zero(reason: Reason) -> None:
    limiter, now = make_closed_limiter([reason])
    allowance = limiter.get_allowance(now)
    assert (allowance.reason, allowance.limit) == (reason, 0)
    assert allowance.detail
    assert explain_allowance(allowance, limiter.in_flight).startswith(
        f"Nothing is sent: {reason}, {allowance.detail}"
    )
    assert repr(limiter) == f"<Limiter {reason}, limit 0, in flight 0>"


@pytest.mark.parametrize(("earlier", "later"), list(combinations(CLOSED, 2)))
def test_earlier_one_of_two_closed_reasons_is_shown(earlier: Reason, later: Reason) -> None:
    limiter, now = make_closed_limiter([earlier, later])
    assert limiter.get_allowance(now).reason is earlier


def test_closed_reasons_are_shown_in_order_as_each_is_removed() -> None:
    for first in range(len(CLOSED)):
        limiter, now = make_closed_limiter(CLOSED[first:])
        assert limiter.get_allowance(now).reason is CLOSED[first]


def test_no_room_is_shown_before_saturated() -> None:
    limiter = make_open_limiter()
    limiter.send_requests(5, T0 + 0.1)
    assert limiter.apply_reading(T0 + 1, load=60).reason is Reason.NO_ROOM


def test_saturated_is_shown_before_full_until_the_limit_is_reached_again() -> None:
    limiter = make_open_limiter()
    keys = limiter.send_requests(17, T0 + 0.1)
    allowance = limiter.apply_reading(T0 + 1, load=57)
    assert (allowance.limit, allowance.reason) == (7, Reason.SATURATED)
    for key in keys[:10]:
        limiter.record_answer(key, T0 + 1.5)
    assert limiter.get_allowance(T0 + 1.5).reason is Reason.FULL
    limiter.record_answer(keys[10], T0 + 1.6)
    assert limiter.get_allowance(T0 + 1.6).reason is Reason.OPEN


def test_full_is_shown_before_idle_and_idle_before_open() -> None:
    limiter = make_open_limiter()
    keys = limiter.send_requests(17, T0 + 0.1)
    limiter.set_waiting_count(0, T0 + 0.1)
    assert limiter.get_allowance(T0 + 0.2).reason is Reason.FULL
    limiter.record_answer(keys[0], T0 + 0.3)
    assert limiter.get_allowance(T0 + 0.3).reason is Reason.IDLE
    limiter.set_waiting_count(1, T0 + 0.4)
    assert limiter.get_allowance(T0 + 0.4).reason is Reason.OPEN
    assert explain_allowance(limiter.get_allowance(T0 + 0.4), limiter.in_flight).startswith(
        "16 in flight under a limit 17: sending 1 more"
    )


def test_reason_is_full_if_the_limit_was_lowered_below_the_requests_in_flight() -> None:
    """The configured maximum was lowered, so the pool is not saturated."""
    limiter = make_open_limiter()
    limiter.send_requests(17, T0 + 0.1)
    limiter.set_policy(Policy(max_in_flight=5), T0 + 0.2)
    assert limiter.get_allowance(T0 + 0.2).reason is Reason.FULL


def test_pause_and_queue_problem_end_after_repeated_reports() -> None:
    limiter = make_open_limiter()
    limiter.set_paused(True, T0)
    limiter.set_paused(True, T0)
    limiter.set_queue_problem("away", T0)
    limiter.set_queue_problem("away", T0)
    limiter.set_paused(False, T0 + 1)
    assert limiter.get_allowance(T0 + 1).detail == "away"
    limiter.set_queue_problem(None, T0 + 2)
    assert limiter.get_allowance(T0 + 2).limit == 17


def test_limiter_can_be_printed_before_the_first_query() -> None:
    assert repr(PoolLimiter()) == "<Limiter undecided, in flight 0>"


def test_withheld_reason_is_shown_while_there_is_room() -> None:
    limiter = make_open_limiter()
    limiter.set_waiting_count(1, T0)
    limiter.set_withheld_reason("the gateway asked a dispatcher to wait another 9.0 s")
    allowance = limiter.get_allowance(T0 + 1)
    assert allowance.reason is Reason.OPEN
    assert allowance.detail == "the gateway asked a dispatcher to wait another 9.0 s"
    limiter.set_withheld_reason("")
    assert limiter.get_allowance(T0 + 1).detail == ""


def test_free_units_are_known_while_the_gate_is_closed_unless_the_reading_is_stale() -> None:
    limiter = make_open_limiter(Policy(max_age_s=10.0))
    assert limiter.estimate_free_units(T0) == pytest.approx(17.0)
    limiter.record_refusal(T0, retry_at=T0 + 9, is_out_of_capacity=False, in_flight=3)
    assert limiter.get_allowance(T0 + 1).reason is Reason.BACKPRESSURE
    assert limiter.estimate_free_units(T0 + 1) == pytest.approx(17.0)
    assert limiter.estimate_free_units(T0 + 11) is None
    two_signals = PoolLimiter(signals=(SATURATION, REQUESTS))
    assert two_signals.estimate_free_units(T0) is None
    two_signals.apply_reading(T0, load=10, is_request_count=False)
    two_signals.apply_reading(T0, load=30, signal=REQUESTS)
    assert two_signals.estimate_free_units(T0) == pytest.approx(17.0), (
        "the signal that counts requests decides"
    )


def test_gateway_problem_is_set_only_after_a_connection_failure() -> None:
    limiter = make_open_limiter()
    before = limiter.gateway_problem
    assert not limiter.check_connections(T0, [])
    limiter.record_connection_failure(T0 + 1, "refused")
    assert (before, limiter.gateway_problem) == (None, "refused")
    assert limiter.gateway_unreachable_since is not None


def test_max_age_of_a_reading_overrides_that_of_the_settings() -> None:
    limiter = Limiter(Policy(max_age_s=10), (Signal.REQUESTS,))
    limiter.add_reading(Reading(Signal.REQUESTS, 0, 0, 0.5, 0, 50, max_age_s=60), 0)
    limiter.set_policy(Policy(max_age_s=10, reserve=0.1), 20)
    assert limiter.get_allowance(59.9).limit == 20
    assert limiter.get_allowance(60.1).reason is Reason.STALE


def test_poll_sets_signals_readings_and_failures() -> None:
    limiter = Limiter(Policy(), (Signal.REQUESTS,))
    reading = Reading(Signal.SATURATION, 1, 1, 0.5, 0, 50)
    limiter.apply_poll(Poll(completed_at=1, signals=(Signal.SATURATION,), readings=(reading,)), 1)
    assert limiter.get_allowance(1.1).limit == 22
    failures = (
        ReadFailure(Reason.UNREADABLE, "no answer", "signals.epp"),
        ReadFailure(Reason.NO_ENDPOINTS, "none"),
    )
    limiter.apply_poll(Poll(completed_at=2, signals=(Signal.SATURATION,), failures=failures, closes_at=3), 2)
    assert limiter.get_allowance(2.9).limit == 22
    closed = limiter.get_allowance(3.1)
    assert (closed.reason, closed.detail) == (Reason.UNREADABLE, "no answer (look at: signals.epp)")


def test_limit_after_a_long_closure_does_not_exceed_the_proven_one() -> None:
    """An earlier version sent 285 requests at once when the gate reopened and the capacity was not known."""
    limiter = Limiter(Policy(reserve=0.0), (Signal.REQUESTS,))

    def apply_reading(at: float, running: int) -> None:
        reading = Reading(
            Signal.REQUESTS, at, at, running / 24, 0.0, 24.0, running=float(running), is_capacity_known=False
        )
        limiter.add_reading(reading, at)

    apply_reading(0.0, 0)
    for key in range(24):
        limiter.record_send(key, 1.0)
    apply_reading(2.0, 24)
    proven = limiter.get_allowance(3.0).limit
    assert 24 < proven <= 1.25 * 24
    for key in range(24):
        limiter.record_answer(key, 4.0)
    limiter.record_read_failure(Reason.UNREADABLE, "gone", 5.0)
    assert limiter.get_allowance(300.0).limit == 0
    apply_reading(301.0, 0)
    assert limiter.get_allowance(302.0).limit <= proven


def make_mixed_reading(at: float, sent: int, in_servers: int = 0, in_picker: int = 0) -> Reading:
    """Return a reading of 8 endpoints of unknown capacity: the picker's own counters are of now, and the
    queues of the model servers are up to half a second old."""
    return Reading(
        Signal.REQUESTS,
        at,
        at,
        sent / 64,
        in_picker / 64,
        64.0,
        running=float(sent - in_servers),
        waiting=float(in_servers + in_picker),
        has_exact_counts=False,
        is_capacity_known=False,
    )


def estimate_capacity(limiter: Limiter, reading: Reading) -> float:
    """Return the estimated capacity in requests after this reading."""
    limiter.add_reading(reading, reading.closed_at)
    budget = limiter.get_allowance(reading.closed_at + 0.25).budget
    assert budget is not None
    return budget.max_sys


def test_requests_that_were_just_sent_prove_no_room() -> None:
    limiter = Limiter(Policy(reserve=0.0), (Signal.REQUESTS,))
    assert estimate_capacity(limiter, make_mixed_reading(0.0, 0)) == 64
    for key in range(64):
        limiter.record_send(key, 0.8)
    assert estimate_capacity(limiter, make_mixed_reading(1.0, 64)) == 64, (
        "the queues of the servers were read before these requests arrived"
    )
    assert estimate_capacity(limiter, make_mixed_reading(2.0, 64)) > 64


def test_new_requests_of_others_since_the_previous_sample_prove_no_room() -> None:
    limiter = Limiter(Policy(reserve=0.0), (Signal.REQUESTS,))
    assert estimate_capacity(limiter, make_mixed_reading(0.0, 20)) == 64
    assert estimate_capacity(limiter, make_mixed_reading(1.0, 90)) == 64
    assert estimate_capacity(limiter, make_mixed_reading(2.0, 90)) > 90


def test_queues_of_model_servers_or_picker_stop_the_growth_of_the_capacity() -> None:
    for waiting in ({"in_servers": 5}, {"in_picker": 5}):
        limiter = Limiter(Policy(reserve=0.0), (Signal.REQUESTS,))
        estimate_capacity(limiter, make_mixed_reading(0.0, 80))
        before = estimate_capacity(limiter, make_mixed_reading(1.0, 80))
        assert before > 80
        assert estimate_capacity(limiter, make_mixed_reading(2.0, 90, **waiting)) <= before


def test_reading_that_counts_merged_calls_once_is_plausible() -> None:
    """The picker shows eight calls, which hold 48 items of ours. Nothing else runs."""
    limiter = Limiter(POLICY, [REQUESTS])
    for key in range(8):
        limiter.record_send(key, T0, 6)
    for at in (T0 + 1, T0 + 2, T0 + 3):
        limiter.add_reading(Reading(REQUESTS, at, at, 8 / 64, 0.0, 64, items_beyond_calls=0.0), at)
        allowance = limiter.get_allowance(at + 0.5)
        assert not allowance.reason.is_closed
        assert allowance.limit == 60, "eight of the 60 requests that have room are ours"
