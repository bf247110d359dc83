"""The limiter, event by event: what each does to the limit, and which reason is shown."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import combinations

import pytest

from dispatcher.core.gateway.reachability import ERRORS_IN_A_ROW
from dispatcher.core.gateway.refusals import REMOTE_CLOCK_ERROR_S
from dispatcher.core.limit.allowance import Allowance, explain_allowance
from dispatcher.core.limit.budget import (
    MAX_IN_FLIGHT,
    MAX_PLAUSIBLE_REQUESTS,
    Policy,
    Reading,
    Reason,
    Signal,
)
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.limit.load_ledger import DELTA_S
from dispatcher.core.limit.poll import Poll, ReadFailure
from dispatcher.core.limit.signal_limit import MAX_PENDING_READINGS

SATURATION, REQUESTS = Signal.SATURATION, Signal.REQUESTS
T0 = 1000.0
POLICY = Policy()


class Pool(Limiter):
    """A limiter over a pool of 50, told of it in the fewest words."""

    def __init__(self, policy: Policy = POLICY, signals: Iterable[Signal] = (SATURATION,)) -> None:
        super().__init__(policy, signals)
        self.keys = 0

    def read(
        self,
        at: float,
        load: float = 30,
        max_sys: float = 50,
        signal: Signal = SATURATION,
        *,
        window_s: float = 0.0,
        exact: bool = True,
    ) -> Allowance:
        """A sample taken by `at` that shows `load` requests, and the allowance once it is applied."""
        f_sys = load / max_sys if max_sys else 0.0
        self.add_reading(Reading(signal, at - window_s, at, f_sys, 0.0, max_sys, exact), at)
        return self.get_allowance(at + 2 * DELTA_S)

    def send(self, count: int, at: float) -> range:
        first, self.keys = self.keys, self.keys + count
        for key in range(first, self.keys):
            self.record_send(key, at)
        return range(first, self.keys)

    def lease(self, at: float, others: int = 0, lost: int = 0) -> None:
        self.record_lease_counts(at, other_owners_units=others, just_leased_units=0, lost_units=lost)


def open_pool(policy: Policy = POLICY) -> Pool:
    """A pool with room for 17 of ours, nothing in flight, at T0."""
    pool = Pool(policy)
    assert pool.read(T0).limit == 17
    return pool


# Readings.


def test_limit_is_never_more_than_can_be_in_flight_whatever_the_page_says() -> None:
    pool = Pool(Policy())
    pool.add_reading(Reading(SATURATION, T0, T0, 0.0, 0.0, MAX_PLAUSIBLE_REQUESTS), T0)
    assert pool.get_allowance(T0 + 1).limit == MAX_IN_FLIGHT
    pool.set_shared_limit(2**62, T0 + 2)
    pool.add_reading(Reading(SATURATION, T0 + 2, T0 + 2, 0.0, 0.0, MAX_PLAUSIBLE_REQUESTS), T0 + 2)
    assert pool.get_allowance(T0 + 3).limit == MAX_IN_FLIGHT


def test_example_of_the_design() -> None:
    pool = Pool()
    pool.add_reading(Reading(SATURATION, T0, T0, 0.5, 0.1, 50), T0)
    allowance = pool.get_allowance(T0 + DELTA_S)
    assert (allowance.limit, allowance.reason, allowance.signal) == (17, Reason.OPEN, SATURATION)
    pool.send(17, T0 + 0.1)
    pool.add_reading(Reading(SATURATION, T0 + 1, T0 + 1, 0.84, 0.1, 50), T0 + 1)
    allowance = pool.get_allowance(T0 + 1 + DELTA_S)
    assert allowance.budget is not None
    assert allowance.budget.d == pytest.approx(0.01)
    assert (allowance.budget.headroom, allowance.limit, allowance.reason) == (0, 17, Reason.FULL)


def test_reading_is_applied_once_delta_has_passed() -> None:
    pool = Pool()
    pool.add_reading(Reading(SATURATION, T0 - 1, T0, 0.6, 0, 50), T0)
    early = pool.get_allowance(T0)
    assert (early.reason, early.limit, early.next_check_at) == (Reason.STARTING, 0, T0 + DELTA_S)
    assert pool.get_allowance(T0 + DELTA_S).limit == 17


def test_limit_moves_only_as_far_as_the_reading_proves() -> None:
    """15 came and went within the window: it may have seen any number of them."""
    pool = open_pool()
    keys = pool.send(15, T0 + 1)
    for key in keys:
        pool.record_answer(key, T0 + 2)
    # Between 0 and 15 of ours in it: the limit lies between H and H + 15, and stays where it is.
    assert pool.read(T0 + 3, load=40, window_s=2.5).limit == 17  # H = 7: within [7, 22]
    assert pool.read(T0 + 6, load=44, window_s=0.0).limit == 3  # surely none of ours in it: [3, 3]


def test_older_sample_of_a_signal_is_ignored() -> None:
    pool = open_pool()
    assert pool.read(T0 - 5, load=0).limit == 17
    assert pool.get_allowance(T0 + 1).read_at == T0


def test_sample_of_an_unused_signal_is_ignored() -> None:
    assert open_pool().read(T0 + 1, load=50, signal=REQUESTS).limit == 17


@pytest.mark.parametrize(
    ("opened_at", "closed_at"),
    [(math.nan, T0 + 1), (T0, math.nan), (-math.inf, T0 + 1), (T0, math.inf), (T0 + 1, T0 + 0.5)],
)
def test_window_that_is_no_stretch_of_time_is_ignored(opened_at: float, closed_at: float) -> None:
    """Taken for a reading, it would hold the gate open for ever, or at a bound that nobody knows."""
    pool = open_pool()
    pool.add_reading(Reading(SATURATION, opened_at, closed_at, 0, 0, 50), T0 + 1)
    assert pool.get_allowance(T0 + 2).limit == 17
    assert pool.get_allowance(T0 + POLICY.max_age_s + 0.1).reason is Reason.STALE


def test_sample_said_to_be_of_later_was_taken_by_now() -> None:
    """An adapter's clock that is ahead must not make old samples fresh."""
    pool = Pool()
    pool.add_reading(Reading(SATURATION, T0 + 3600, T0 + 3600, 0.6, 0, 50), T0)
    assert pool.get_allowance(T0 + DELTA_S).limit == 17
    assert pool.get_allowance(T0 + POLICY.max_age_s + 0.1).reason is Reason.STALE


def test_flood_of_samples_keeps_the_newest() -> None:
    pool = open_pool()
    for n in range(2 * MAX_PENDING_READINGS):
        pool.add_reading(
            Reading(SATURATION, T0 + 1 + n / 1e4, T0 + 1 + n / 1e4, (n + 1) / 50, 0, 50), T0 + 1.1
        )
    assert pool.get_allowance(T0 + 1.2).limit == 47 - 2 * MAX_PENDING_READINGS


def test_samples_that_came_before_any_question_are_applied_in_order() -> None:
    pool = Pool()
    for n, load in enumerate((30, 45, 20)):
        pool.add_reading(Reading(SATURATION, T0 + n, T0 + n, load / 50, 0, 50), T0 + n)
    allowance = pool.get_allowance(T0 + 3)
    assert (allowance.limit, allowance.read_at) == (27, T0 + 2)


def test_pool_can_be_read_again_once_a_sample_of_every_signal_is_handed_in_be_it_the_same() -> None:
    """Through Prometheus the next sample is a scrape interval away; the one at hand is still good."""
    pool = Pool(signals=(SATURATION, REQUESTS))
    for signal in Signal:
        pool.read(T0, signal=signal)
    pool.record_read_failure(Reason.UNREADABLE, "timed out", T0 + 1)
    assert pool.get_allowance(T0 + 1).reason is Reason.UNREADABLE
    assert pool.read(T0, signal=SATURATION).reason is Reason.UNREADABLE
    for signal in Signal:
        pool.add_reading(Reading(signal, T0, T0, 0.6, 0, 50), T0 + 1)  # handed in with the failure
    assert pool.get_allowance(T0 + 1.5).reason is Reason.UNREADABLE
    for signal in Signal:
        pool.add_reading(Reading(signal, T0, T0, 0.6, 0, 50), T0 + 2)
    assert pool.get_allowance(T0 + 2).limit == 17


def test_failure_closes_no_sooner_than_told_and_no_later_than_the_reading_is_stale() -> None:
    pool = open_pool()
    limit = pool.get_allowance(T0 + 0.5).limit
    pool.record_read_failure(Reason.UNREADABLE, "timed out", T0 + 1, closes_at=T0 + 2.5)
    standing = pool.get_allowance(T0 + 1)
    assert (standing.limit, standing.next_check_at) == (limit, T0 + 2.5)
    assert pool.get_allowance(T0 + 2.5).reason is Reason.UNREADABLE
    pool.record_read_failure(Reason.UNREADABLE, "timed out", T0 + 3, closes_at=T0 + 1000)
    assert pool.get_allowance(T0 + POLICY.max_age_s + 0.1).reason is Reason.STALE


def test_failure_told_with_an_open_reason_closes_all_the_same() -> None:
    pool = open_pool()
    pool.record_read_failure(Reason.OPEN, "nonsense", T0 + 1)
    assert pool.get_allowance(T0 + 1).reason is Reason.UNREADABLE


def test_stale_says_how_old_and_asks_to_be_checked_in_time() -> None:
    pool = open_pool()
    standing = pool.get_allowance(T0 + 1)
    assert standing.next_check_at == pytest.approx(T0 + POLICY.max_age_s)
    assert pool.get_allowance(T0 + POLICY.max_age_s).limit == 17
    stale = pool.get_allowance(T0 + POLICY.max_age_s + 2)
    assert (stale.limit, stale.reason) == (0, Reason.STALE)
    assert stale.detail == "the newest sample of saturation is 12.0 s old"


# A pool that does not show us.


def test_reading_without_the_requests_we_surely_run_is_not_of_our_pool() -> None:
    pool = open_pool()
    pool.send(17, T0 + 0.1)
    once = pool.read(T0 + 1, load=3)
    assert (once.limit, once.reason) == (17, Reason.FULL)  # it proves no room
    twice = pool.read(T0 + 2, load=3)
    assert (twice.limit, twice.reason) == (0, Reason.IMPLAUSIBLE)
    assert "does not show the requests that we have running" in twice.detail
    assert pool.read(T0 + 3, load=30).reason is Reason.OPEN


def test_disbelieved_reading_proves_no_room_under_a_new_policy_or_capacity_either() -> None:
    pool = open_pool()
    pool.send(17, T0 + 0.1)
    assert pool.read(T0 + 1, load=3).limit == 17
    pool.set_policy(Policy(per_endpoint=50), T0 + 1.1)
    assert pool.get_allowance(T0 + 1.1).limit == 17
    pool.set_capacity_bound(50, T0 + 1.2)
    assert pool.get_allowance(T0 + 1.2).limit == 17


def test_pressure_score_need_not_show_us() -> None:
    pool = open_pool()
    pool.send(17, T0 + 0.1)
    for second in range(1, 5):
        assert not pool.read(T0 + second, load=3, exact=False).reason.is_closed


# Several signals.


def test_smallest_signal_wins_and_is_named() -> None:
    pool = Pool(signals=(SATURATION, REQUESTS))
    assert pool.read(T0, load=10).detail == "no reading yet of requests"
    allowance = pool.read(T0, load=30, signal=REQUESTS)
    assert (allowance.limit, allowance.signal) == (17, REQUESTS)
    assert allowance.budget is not None
    assert allowance.budget.signal is REQUESTS
    allowance = pool.read(T0 + 1, load=40)
    assert (allowance.limit, allowance.signal) == (7, SATURATION)
    assert [(each.signal, each.closed_at) for each in pool.newest_readings] == [
        (SATURATION, T0 + 1),
        (REQUESTS, T0),
    ]


def test_one_stale_signal_of_two_closes() -> None:
    pool = Pool(signals=(SATURATION, REQUESTS))
    pool.read(T0, signal=REQUESTS)
    allowance = [pool.read(T0 + second) for second in range(12)][-1]
    assert allowance.reason is Reason.STALE
    assert "requests" in allowance.detail


def test_new_signal_has_to_be_read_and_a_dropped_one_no_longer_binds() -> None:
    pool = open_pool()
    pool.set_signals([SATURATION])
    assert pool.get_allowance(T0 + 0.1).limit == 17
    pool.set_signals([REQUESTS, SATURATION])
    assert pool.get_allowance(T0 + 0.1).reason is Reason.STARTING
    assert pool.read(T0 + 0.2, load=45, signal=REQUESTS).limit == 2
    pool.set_signals([SATURATION])
    assert pool.get_allowance(T0 + 0.3).limit == 17


def test_no_signal_at_all_is_starting() -> None:
    assert Limiter(POLICY, ()).get_allowance(T0).detail == "no reading yet of any signal"


def test_starting_says_what_went_wrong() -> None:
    pool = Pool()
    pool.record_read_failure(Reason.UNREADABLE, "connection refused", T0)
    assert pool.get_allowance(T0).detail == "no reading yet of saturation: connection refused"


# Capacity and settings.


def test_smaller_capacity_counts_at_once_and_a_larger_one_with_the_next_reading() -> None:
    pool = open_pool()
    pool.set_capacity_bound(40, T0 + 0.1)
    assert pool.get_allowance(T0 + 0.1).limit == 8  # 38 less the 30 of realtime
    pool.set_capacity_bound(45, T0 + 0.2)
    assert pool.get_allowance(T0 + 0.2).limit == 8
    assert pool.read(T0 + 1).limit == 12  # floor(45 × 0.95) = 42
    pool.set_capacity_bound(100, T0 + 1.1)
    assert pool.get_allowance(T0 + 1.1).limit == 12
    assert pool.read(T0 + 2).limit == 17
    pool.set_capacity_bound(None, T0 + 2.1)
    assert pool.get_allowance(T0 + 2.1).limit == 17


def test_no_capacity_closes_at_once() -> None:
    pool = open_pool()
    pool.set_capacity_bound(0, T0 + 0.1)
    assert pool.get_allowance(T0 + 0.1).reason is Reason.NO_ENDPOINTS


def test_capacity_before_any_reading_is_remembered() -> None:
    pool = Pool()
    pool.set_capacity_bound(40, T0 - 1)
    assert pool.read(T0).limit == 8


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
def test_changed_settings_hold_at_once(policy: Policy, limit: int) -> None:
    pool = open_pool()
    pool.set_policy(policy, T0 + 0.1)
    assert pool.get_allowance(T0 + 0.1).limit == limit


def test_shorter_max_age_holds_at_once() -> None:
    pool = open_pool()
    pool.set_policy(Policy(max_age_s=2), T0 + 1)
    assert pool.get_allowance(T0 + 2.5).reason is Reason.STALE


# Leases.


def test_other_replicas_requests_are_added_back_like_our_own() -> None:
    pool = open_pool()
    pool.send(7, T0 + 0.1)
    pool.lease(T0 + 0.1, others=10)
    assert (pool.in_flight, pool.other_owners_units) == (17, 10)
    allowance = pool.read(T0 + 1, load=47)
    assert (allowance.limit, allowance.reason) == (17, Reason.FULL)


def test_lost_lease_lowers_the_limit_until_a_reading_taken_after_it() -> None:
    pool = open_pool()
    pool.lease(T0 + 0.1, others=17, lost=3)  # the first count: those were lost before our time
    assert pool.get_allowance(T0 + 0.1).limit == 17
    pool.lease(T0 + 0.5, others=15, lost=5)
    allowance = pool.get_allowance(T0 + 0.5)
    assert (allowance.limit, allowance.lost_units) == (15, 5)
    pool.lease(T0 + 0.55, others=15, lost=5)
    assert pool.get_allowance(T0 + 0.55) is allowance  # counted again, nothing new
    # Taken before the loss was known: its least counts the two, so they stay subtracted.
    assert pool.read(T0 + 0.6, load=45, window_s=0.3).limit == 15
    assert pool.read(T0 + 2, load=45).limit == 15
    pool.lease(T0 + 2.1, others=15, lost=5)
    assert pool.get_allowance(T0 + 2.1).limit == 17  # 15 of ours in it and 2 of headroom


def test_counter_that_fell_is_a_new_queue() -> None:
    pool = open_pool()
    pool.lease(T0 + 0.1, lost=10)
    pool.lease(T0 + 0.2, lost=12)
    assert pool.get_allowance(T0 + 0.2).limit == 15
    pool.lease(T0 + 0.3, lost=0)
    assert pool.get_allowance(T0 + 0.3).limit == 17


def test_losses_between_two_readings_lower_what_the_next_one_starts_from() -> None:
    pool = open_pool()
    pool.lease(T0 + 0.1, others=17)
    pool.lease(T0 + 0.5, others=12, lost=5)
    for key in pool.send(3, T0 + 0.6):
        pool.record_answer(key, T0 + 0.9)
    # It may have seen 12 to 15 of ours: the limit lies between 11 and 14, and was 12 at last.
    assert pool.read(T0 + 2, load=48, window_s=1.45).limit == 12
    pool.lease(T0 + 3, others=11, lost=6)
    assert pool.get_allowance(T0 + 3).limit == 11


def test_others_that_drained_since_they_were_counted_prove_no_room() -> None:
    """They held 12 when last counted, but 5 when the sample was taken: a count after it tells."""
    pool = open_pool()
    pool.send(5, T0 + 0.1)
    pool.lease(T0 + 0.1, others=12)
    pool.read(T0 + 1, load=57)  # realtime has grown to 40: room for 7
    pool.lease(T0 + 1.1, others=12)
    assert pool.get_allowance(T0 + 1.1).limit == 7
    assert pool.read(T0 + 2, load=50).limit == 7
    pool.lease(T0 + 2.1, others=5)
    assert pool.get_allowance(T0 + 2.1).limit == 7


def test_first_count_after_a_sample_lets_it_prove_room_beyond_our_own() -> None:
    pool = Pool()
    pool.lease(T0 - 1, others=10)
    assert pool.read(T0, load=40).limit == 7
    pool.lease(T0 + 0.1, others=10)
    assert pool.get_allowance(T0 + 0.1).limit == 17


# Overload.


def overload(
    pool: Limiter,
    at: float,
    *,
    retry_at: float = 0.0,
    is_out_of_capacity: bool = False,
    is_remote: bool = False,
    in_flight: int = 10,
) -> None:
    pool.record_refusal(
        at,
        retry_at=retry_at,
        is_out_of_capacity=is_out_of_capacity,
        in_flight=in_flight,
        is_remote=is_remote,
    )


def test_nothing_is_allowed_after_a_refusal_until_a_reading_taken_after_it() -> None:
    pool = open_pool()
    overload(pool, T0 + 1)
    assert pool.get_allowance(T0 + 1).detail == "refused; waiting for a reading taken after that"
    assert pool.read(T0 + 1.5, window_s=0.5).reason is Reason.BACKPRESSURE  # it may have been taken before
    assert pool.read(T0 + 2, window_s=0.5).limit == 17


def test_retry_after_is_waited_for_and_cut_to_the_longest() -> None:
    pool = open_pool(Policy(retry_after_max_s=5))
    overload(pool, T0 + 1, retry_at=T0 + 4)
    waiting = pool.read(T0 + 2)
    assert (waiting.reason, waiting.next_check_at) == (Reason.BACKPRESSURE, T0 + 4)
    assert waiting.detail == "asked to wait another 2.0 s"
    assert pool.get_allowance(T0 + 4).limit == 17
    overload(pool, T0 + 5, retry_at=T0 + 500)
    assert pool.read(T0 + 9.9).reason is Reason.BACKPRESSURE
    assert pool.get_allowance(T0 + 10).limit == 17


def test_newer_refusal_does_not_shorten_the_wait() -> None:
    pool = open_pool()
    overload(pool, T0 + 1, retry_at=T0 + 8)
    overload(pool, T0 + 2, retry_at=T0 + 3)
    assert pool.read(T0 + 4).next_check_at == T0 + 8


def test_refusal_told_late_still_makes_us_wait() -> None:
    pool = open_pool()
    overload(pool, T0 + 2)
    overload(pool, T0 + 1.99, retry_at=T0 + 8)
    assert pool.read(T0 + 3).reason is Reason.BACKPRESSURE
    assert pool.get_allowance(T0 + 8).limit == 17


def test_refusal_heard_from_another_replica_closes_here() -> None:
    pool = open_pool()
    overload(pool, T0 + 1, is_remote=True)
    assert pool.get_allowance(T0 + 1).reason is Reason.BACKPRESSURE


def test_same_refusal_heard_again_with_another_idea_of_its_time_does_not_close_again() -> None:
    pool = open_pool()
    overload(pool, T0 + 1, retry_at=T0 + 1.5, is_remote=True)
    assert pool.read(T0 + 1.6).limit == 17
    for apart_s in (-REMOTE_CLOCK_ERROR_S, 0.0, 0.9 * REMOTE_CLOCK_ERROR_S):
        overload(pool, T0 + 1 + apart_s, retry_at=T0 + 1.5 + apart_s, is_remote=True)
        assert pool.get_allowance(T0 + 1.7).limit == 17
    overload(pool, T0 + 1 + REMOTE_CLOCK_ERROR_S, retry_at=T0 + 1.5 + REMOTE_CLOCK_ERROR_S, is_remote=True)
    assert pool.get_allowance(T0 + 1.51 + REMOTE_CLOCK_ERROR_S).limit == 17


def test_longer_wait_that_another_replica_was_told_holds_here() -> None:
    """The queue tells the newest refusal, ours, with the longest wait of all."""
    pool = open_pool()
    overload(pool, T0 + 2)
    overload(pool, T0 + 2, retry_at=T0 + 8, is_remote=True)
    assert pool.read(T0 + 3).next_check_at == T0 + 8


def fits(pool: Pool, at: float) -> float:
    """The capacity by which it reckons."""
    budget = pool.get_allowance(at).budget
    assert budget is not None
    return budget.max_sys


def sample(pool: Pool, at: float, *, running: float, waiting: float = 0, max_sys: float = 50) -> float:
    """One that tells what runs from what waits in the model servers; the capacity once it is applied."""
    share = (running + waiting) / max_sys
    reading = Reading(REQUESTS, at, at, share, 0.0, max_sys, running=running, waiting=waiting)
    pool.add_reading(reading, at)
    return fits(pool, at + 2 * DELTA_S)


def test_crowd_in_two_readings_says_that_what_runs_is_all_that_fits() -> None:
    pool = Pool(signals=(REQUESTS,))
    assert sample(pool, T0, running=20) == 50
    pool.send(27, T0 + 1)
    assert sample(pool, T0 + 2, running=32, waiting=15) == 50
    assert sample(pool, T0 + 3, running=32, waiting=14) == 32
    allowance = pool.get_allowance(T0 + 4)
    assert allowance.limit == 27 + math.floor(0.95 * 32 - 46)
    assert "of 32 requests, which fitted where 50 are configured" in explain_allowance(allowance, 27)


def test_refusal_for_lack_of_capacity_is_judged_by_the_next_reading() -> None:
    pool = open_pool()
    overload(pool, T0 + 1, is_out_of_capacity=True)
    assert fits(pool, T0 + 1) == 50
    pool.read(T0 + 2)
    assert fits(pool, T0 + 3) == pytest.approx(0.9 * (10 - 1 + 30))


def test_refusal_that_the_next_reading_explains_teaches_nothing() -> None:
    """Realtime filled the whole pool between two readings."""
    pool = Pool(signals=(REQUESTS,))
    sample(pool, T0, running=30)
    overload(pool, T0 + 1, is_out_of_capacity=True)
    assert sample(pool, T0 + 2, running=50, waiting=8) == 50
    overload(pool, T0 + 3, is_out_of_capacity=True)
    assert sample(pool, T0 + 4, running=25) == 50, "what ran a moment ago fits still"


def test_other_refusals_teach_nothing() -> None:
    pool = open_pool()
    overload(pool, T0 + 1, in_flight=2)
    assert pool.read(T0 + 2).limit == 17
    assert fits(pool, T0 + 3) == 50


def test_several_signals_of_one_sample_teach_once() -> None:
    one, two = Pool(signals=(REQUESTS,)), Pool(signals=(SATURATION, REQUESTS))
    for pool, signals in ((one, (REQUESTS,)), (two, (SATURATION, REQUESTS))):
        for at in range(20):
            for signal in signals:
                waiting = {1: 10.0, 2: 11.0}.get(at, 0.0)
                shown = Reading(signal, T0 + at, T0 + at, 0.4, 0, 50, running=20, waiting=waiting)
                pool.add_reading(shown, T0 + at)
            pool.get_allowance(T0 + at + 0.5)
    assert fits(one, T0 + 20) == fits(two, T0 + 20)
    assert 20 < fits(one, T0 + 20) < 50


@pytest.mark.parametrize(("f_sys", "max_sys"), [(math.nan, 50), (0.5, math.nan), (0.5, math.inf), (0.5, 0)])
def test_reading_that_is_not_acted_upon_teaches_nothing(f_sys: float, max_sys: float) -> None:
    pool = open_pool()
    overload(pool, T0 + 1, is_out_of_capacity=True)
    pool.add_reading(Reading(SATURATION, T0 + 3, T0 + 3, f_sys, 0, max_sys, running=9, waiting=9), T0 + 3)
    assert pool.get_allowance(T0 + 4).reason.is_closed
    pool.read(T0 + 5)
    assert fits(pool, T0 + 6) == pytest.approx(0.9 * 39), "the next one judges the refusal"


def test_reading_taken_before_the_refusal_does_not_judge_it() -> None:
    pool = open_pool()
    overload(pool, T0 + 1, is_out_of_capacity=True)
    pool.read(T0 + 1.5, window_s=1)
    assert fits(pool, T0 + 1.6) == 50


def test_learned_capacity_is_a_share_so_endpoints_may_come_and_go() -> None:
    pool = Pool(signals=(REQUESTS,))
    for at in (0, 1, 2):
        sample(pool, T0 + at, running=25, waiting=20 + at)
    assert fits(pool, T0 + 3) == 25
    assert sample(pool, T0 + 4, running=20, max_sys=100) == 50
    pool.set_capacity_bound(40, T0 + 5)
    assert fits(pool, T0 + 5) == 20


@pytest.mark.parametrize("signals", [(SATURATION,), (REQUESTS,), (SATURATION, REQUESTS)])
def test_values_that_are_no_numbers_beside_a_good_load_teach_nothing(signals: tuple[Signal, ...]) -> None:
    for running, waiting in ((math.nan, 5), (math.inf, 5), (20, math.nan), (20, math.inf), (-5, 9), (0, 0)):
        pool = Pool(signals=signals)
        for at in range(5):
            for signal in signals:
                odd = Reading(signal, T0 + at, T0 + at, 0.2, 0, 50, running=running, waiting=waiting)
                pool.add_reading(odd, T0 + at)
            assert fits(pool, T0 + at + 0.5) == 50


# An unreachable gateway.


def test_probes_pause_from_a_tenth_of_a_second_to_a_second() -> None:
    pool = open_pool()
    pool.record_connection_failure(T0 + 1, "refused")
    assert not pool.get_allowance(T0 + 1).probe_limit
    at, pauses = T0 + 1, []
    for _ in range(8):
        due = pool.get_allowance(at).next_check_at
        assert due is not None
        pauses.append(round(due - at, 6))
        assert not pool.get_allowance(due - 0.01).probe_limit
        pool.read(due - 0.005)  # readings keep coming
        allowance = pool.get_allowance(due)
        assert (allowance.limit, allowance.detail) == (0, "refused")
        assert allowance.probe_limit == 17, "under the limit that would hold"
        pool.record_probe(due)
        at = due
        pool.record_connection_failure(at, "refused")
        # Readings a hair old are still waiting; they ask to be checked, the probe does later.
        pool.get_allowance(at + DELTA_S)
        at_next = pool.get_allowance(at + DELTA_S).next_check_at
        assert at_next is not None
        assert at_next > at
    assert pauses == [0.1, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]


def test_without_a_gateway_nothing_that_was_sent_is_missed_in_a_reading() -> None:
    """A probe that takes long to connect, requests that hang: they are not in the pool, and no reading that
    does not show them is wrong, nor does it prove room beside them."""
    pool = open_pool()
    pool.send(10, T0 + 0.5)
    pool.record_connection_failure(T0 + 1, "no connection within 1.5 s")
    told = [pool.read(T0 + second, load=5 if second < 5 else 35) for second in range(2, 8)]
    assert {allowance.reason for allowance in told} == {Reason.GATEWAY_UNREACHABLE}
    assert told[-1].probe_limit

    pool = open_pool()
    pool.send(10, T0 + 0.5)
    pool.record_connection_failure(T0 + 1, "refused")
    pool.read(T0 + 2, load=35)
    pool.record_gateway_answer(T0 + 3, sent_at=T0 + 2.9)
    assert pool.get_allowance(T0 + 3).limit == 17, "not 10 + 12, for it may not have seen one of them"


def test_no_probe_while_refused_or_without_room() -> None:
    pool = open_pool()
    pool.record_connection_failure(T0 + 1, "refused")
    overload(pool, T0 + 1, retry_at=T0 + 3)
    assert not pool.get_allowance(T0 + 2).probe_limit
    assert pool.read(T0 + 3).probe_limit
    assert not pool.read(T0 + 4, load=50).probe_limit


def test_answer_to_a_request_sent_before_the_trouble_proves_nothing() -> None:
    pool = open_pool()
    pool.record_connection_failure(T0 + 1, "refused")
    pool.record_connection_failure(T0 + 2, "DNS")
    assert pool.get_allowance(T0 + 2).detail == "DNS"
    pool.record_gateway_answer(T0 + 3, sent_at=T0 + 0.9)
    assert pool.get_allowance(T0 + 3).reason is Reason.GATEWAY_UNREACHABLE
    pool.record_gateway_answer(T0 + 3, sent_at=T0 + 1.5)
    assert pool.get_allowance(T0 + 3).limit == 17


def test_three_bare_answers_in_a_row_are_an_unreachable_gateway() -> None:
    pool = open_pool()
    for n in range(ERRORS_IN_A_ROW - 1):
        assert not pool.record_intermediary_error(T0 + n / 10, T0 + n / 10 - 0.01, "empty 500")
    assert pool.get_allowance(T0 + 1).limit == 17
    assert pool.record_intermediary_error(T0 + 1, T0 + 1 - 0.01, "empty 500")
    assert pool.get_allowance(T0 + 1).reason is Reason.GATEWAY_UNREACHABLE
    assert pool.record_intermediary_error(T0 + 1.1, T0 + 1.1 - 0.01, "empty 500")


def test_success_between_starts_the_count_again_unless_it_was_sent_before() -> None:
    pool = open_pool()
    pool.record_intermediary_error(T0 + 1, T0 + 1 - 0.01, "empty 500")
    pool.record_intermediary_error(T0 + 2, T0 + 2 - 0.01, "empty 500")
    pool.record_gateway_answer(T0 + 2.1, sent_at=T0 + 1.5)
    assert not pool.record_intermediary_error(T0 + 3, T0 + 3 - 0.01, "empty 500")
    assert not pool.record_intermediary_error(T0 + 4, T0 + 4 - 0.01, "empty 500")
    pool.record_gateway_answer(T0 + 4.1, sent_at=T0 + 2.5)
    assert pool.record_intermediary_error(T0 + 5, T0 + 5 - 0.01, "empty 500")


def test_reopened_gateway_starts_its_count_and_its_pauses_anew() -> None:
    pool = open_pool()
    pool.record_connection_failure(T0, "refused")
    for n in range(5):
        pool.record_probe(T0 + n)
    pool.record_gateway_answer(T0 + 5, sent_at=T0 + 5)
    pool.record_probe(T0 + 5)  # a late word of a probe changes nothing now
    assert pool.get_allowance(T0 + 5).limit == 17
    assert not pool.record_intermediary_error(T0 + 5.5, T0 + 5.5 - 0.01, "empty 500")
    pool.record_connection_failure(T0 + 6, "refused")
    assert pool.get_allowance(T0 + 6).next_check_at == pytest.approx(T0 + 6.1)


# Reasons, in their order.

CLOSED = [reason for reason in Reason if reason.is_closed]


def closed_pool(reasons: Iterable[Reason]) -> tuple[Pool, float]:
    """A pool in which all these reasons hold, and the time to ask at."""
    reasons = set(reasons)
    starting = Reason.STARTING in reasons
    pool = Pool(signals=(SATURATION,) if starting else (SATURATION, REQUESTS))
    loads = {SATURATION: (30.0, 50.0), REQUESTS: (30.0, 50.0)}
    if Reason.NO_ROOM in reasons:
        loads[REQUESTS if Reason.IMPLAUSIBLE in reasons and not starting else SATURATION] = (48.0, 50.0)
    if Reason.IMPLAUSIBLE in reasons:
        loads[SATURATION] = (math.nan, 50.0)
    if Reason.NO_ENDPOINTS in reasons:
        loads[SATURATION if starting else REQUESTS] = (30.0, 0.0)
    overloaded_at = T0 + 0.5 if Reason.BACKPRESSURE in reasons else None
    for signal, (load, max_sys) in loads.items():
        pool.read(T0, load, max_sys, signal)
    if overloaded_at is not None:
        overload(pool, overloaded_at)
    if Reason.GATEWAY_UNREACHABLE in reasons:
        pool.record_connection_failure(T0 + 0.5, "refused")
    if Reason.UNREADABLE in reasons:
        pool.record_read_failure(Reason.UNREADABLE, "timed out", T0 + 0.5)
    if starting:
        pool.set_signals((SATURATION, REQUESTS))
    if Reason.QUEUE_UNREACHABLE in reasons:
        pool.set_queue_problem("connection refused", T0 + 0.5)
    if Reason.PAUSED in reasons:
        pool.set_paused(True, T0 + 0.5)
    if Reason.DRAINING in reasons:
        pool.start_draining(T0 + 0.5)
    return pool, T0 + (POLICY.max_age_s + 1 if Reason.STALE in reasons else 1)


@pytest.mark.parametrize("reason", CLOSED)
def test_each_closed_reason_is_shown_with_a_limit_of_nothing(reason: Reason) -> None:
    pool, now = closed_pool([reason])
    allowance = pool.get_allowance(now)
    assert (allowance.reason, allowance.limit) == (reason, 0)
    assert allowance.detail
    assert explain_allowance(allowance, pool.in_flight).startswith(
        f"Nothing is sent: {reason}, {allowance.detail}"
    )
    assert repr(pool) == f"<Limiter {reason}, limit 0, in flight 0>"


@pytest.mark.parametrize(("earlier", "later"), list(combinations(CLOSED, 2)))
def test_of_two_closed_reasons_the_earlier_is_shown(earlier: Reason, later: Reason) -> None:
    pool, now = closed_pool([earlier, later])
    assert pool.get_allowance(now).reason is earlier


def test_of_all_reasons_at_once_they_are_shown_in_order_as_each_is_lifted() -> None:
    for first in range(len(CLOSED)):
        pool, now = closed_pool(CLOSED[first:])
        assert pool.get_allowance(now).reason is CLOSED[first]


def test_no_room_is_shown_before_saturated() -> None:
    pool = open_pool()
    pool.send(5, T0 + 0.1)
    assert pool.read(T0 + 1, load=60).reason is Reason.NO_ROOM


def test_saturated_is_shown_before_full_until_the_limit_is_reached_again() -> None:
    pool = open_pool()
    keys = pool.send(17, T0 + 0.1)
    grown = pool.read(T0 + 1, load=57)
    assert (grown.limit, grown.reason) == (7, Reason.SATURATED)
    for key in keys[:10]:
        pool.record_answer(key, T0 + 1.5)
    assert pool.get_allowance(T0 + 1.5).reason is Reason.FULL
    pool.record_answer(keys[10], T0 + 1.6)
    assert pool.get_allowance(T0 + 1.6).reason is Reason.OPEN


def test_full_is_shown_before_idle_and_idle_before_open() -> None:
    pool = open_pool()
    keys = pool.send(17, T0 + 0.1)
    pool.set_waiting_count(0, T0 + 0.1)
    assert pool.get_allowance(T0 + 0.2).reason is Reason.FULL
    pool.record_answer(keys[0], T0 + 0.3)
    assert pool.get_allowance(T0 + 0.3).reason is Reason.IDLE
    pool.set_waiting_count(1, T0 + 0.4)
    assert pool.get_allowance(T0 + 0.4).reason is Reason.OPEN
    assert explain_allowance(pool.get_allowance(T0 + 0.4), pool.in_flight).startswith(
        "16 in flight under a limit 17: sending 1 more"
    )


def test_over_the_limit_without_a_full_pool_is_full() -> None:
    """The operator's cap was lowered: nothing says that realtime has grown."""
    pool = open_pool()
    pool.send(17, T0 + 0.1)
    pool.set_policy(Policy(max_in_flight=5), T0 + 0.2)
    assert pool.get_allowance(T0 + 0.2).reason is Reason.FULL


def test_operator_and_queue_reasons_go_as_they_came() -> None:
    pool = open_pool()
    pool.set_paused(True, T0)
    pool.set_paused(True, T0)
    pool.set_queue_problem("away", T0)
    pool.set_queue_problem("away", T0)
    pool.set_paused(False, T0 + 1)
    assert pool.get_allowance(T0 + 1).detail == "away"
    pool.set_queue_problem(None, T0 + 2)
    assert pool.get_allowance(T0 + 2).limit == 17


def test_state_can_be_shown_before_it_was_asked_for() -> None:
    assert repr(Pool()) == "<Limiter undecided, in flight 0>"


def test_what_the_queue_withholds_is_told_as_long_as_there_is_room() -> None:
    pool = open_pool()
    pool.set_waiting_count(1, T0)
    pool.set_withheld_reason("the gateway asked a dispatcher to wait another 9.0 s")
    told = pool.get_allowance(T0 + 1)
    assert told.reason is Reason.OPEN
    assert told.detail == "the gateway asked a dispatcher to wait another 9.0 s"
    pool.set_withheld_reason("")
    assert pool.get_allowance(T0 + 1).detail == ""


def test_what_is_free_is_known_whatever_closes_the_gate_but_not_by_an_old_reading() -> None:
    pool = open_pool(Policy(max_age_s=10.0))
    assert pool.estimate_free_units(T0) == pytest.approx(17.0)
    pool.record_refusal(T0, retry_at=T0 + 9, is_out_of_capacity=False, in_flight=3)
    assert pool.get_allowance(T0 + 1).reason is Reason.BACKPRESSURE
    assert pool.estimate_free_units(T0 + 1) == pytest.approx(17.0)
    assert pool.estimate_free_units(T0 + 11) is None
    both = Pool(signals=(SATURATION, REQUESTS))
    assert both.estimate_free_units(T0) is None
    both.read(T0, load=10, exact=False)
    both.read(T0, load=30, signal=REQUESTS)
    assert both.estimate_free_units(T0) == pytest.approx(17.0), "by what counts requests"


def test_a_gateway_that_is_gone_has_a_problem_and_one_that_stays_connected_has_none() -> None:
    pool = open_pool()
    before = pool.gateway_problem
    assert not pool.check_connections(T0, [])
    pool.record_connection_failure(T0 + 1, "refused")
    assert (before, pool.gateway_problem) == (None, "refused")
    assert pool.gateway_unreachable_since is not None


def test_reading_says_itself_how_long_it_is_good_whatever_the_settings_become() -> None:
    limiter = Limiter(Policy(max_age_s=10), (Signal.REQUESTS,))
    limiter.add_reading(Reading(Signal.REQUESTS, 0, 0, 0.5, 0, 50, max_age_s=60), 0)
    limiter.set_policy(Policy(max_age_s=10, reserve=0.1), 20)
    assert limiter.get_allowance(59.9).limit == 20
    assert limiter.get_allowance(60.1).reason is Reason.STALE


def test_one_poll_tells_all_there_is() -> None:
    limiter = Limiter(Policy(), (Signal.REQUESTS,))
    reading = Reading(Signal.SATURATION, 1, 1, 0.5, 0, 50)
    limiter.apply_poll(Poll(completed_at=1, signals=(Signal.SATURATION,), readings=(reading,)), 1)
    assert limiter.get_allowance(1.1).limit == 22
    unread = (
        ReadFailure(Reason.UNREADABLE, "no answer", "signals.epp"),
        ReadFailure(Reason.NO_ENDPOINTS, "none"),
    )
    limiter.apply_poll(Poll(completed_at=2, signals=(Signal.SATURATION,), failures=unread, closes_at=3), 2)
    assert limiter.get_allowance(2.9).limit == 22
    closed = limiter.get_allowance(3.1)
    assert (closed.reason, closed.detail) == (Reason.UNREADABLE, "no answer (look at: signals.epp)")


def test_reopening_after_a_long_closure_lets_no_more_be_sent_than_was_proven() -> None:
    """An earlier version sent 285 requests at once when the gate reopened and the capacity was not known."""
    limiter = Limiter(Policy(reserve=0.0), (Signal.REQUESTS,))

    def read(at: float, running: int) -> None:
        shown = Reading(
            Signal.REQUESTS, at, at, running / 24, 0.0, 24.0, running=float(running), is_capacity_known=False
        )
        limiter.add_reading(shown, at)

    read(0.0, 0)
    for key in range(24):
        limiter.record_send(key, 1.0)
    read(2.0, 24)
    proven = limiter.get_allowance(3.0).limit
    assert 24 < proven <= 1.25 * 24
    for key in range(24):
        limiter.record_answer(key, 4.0)
    limiter.record_read_failure(Reason.UNREADABLE, "gone", 5.0)
    assert limiter.get_allowance(300.0).limit == 0
    read(301.0, 0)
    assert limiter.get_allowance(302.0).limit <= proven


def mixed(at: float, sent: int, in_servers: int = 0, in_picker: int = 0) -> Reading:
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


def estimate(limiter: Limiter, reading: Reading) -> float:
    """Return the estimated capacity in requests after this reading."""
    limiter.add_reading(reading, reading.closed_at)
    budget = limiter.get_allowance(reading.closed_at + 0.25).budget
    assert budget is not None
    return budget.max_sys


def test_requests_that_were_just_sent_may_wait_unseen_and_prove_no_room() -> None:
    limiter = Limiter(Policy(reserve=0.0), (Signal.REQUESTS,))
    assert estimate(limiter, mixed(0.0, 0)) == 64
    for key in range(64):
        limiter.record_send(key, 0.8)
    assert estimate(limiter, mixed(1.0, 64)) == 64, "they came after the servers' queues were read"
    assert estimate(limiter, mixed(2.0, 64)) > 64


def test_requests_of_others_that_were_not_there_at_the_sample_before_prove_no_room() -> None:
    limiter = Limiter(Policy(reserve=0.0), (Signal.REQUESTS,))
    assert estimate(limiter, mixed(0.0, 20)) == 64
    assert estimate(limiter, mixed(1.0, 90)) == 64
    assert estimate(limiter, mixed(2.0, 90)) > 90


def test_queues_of_the_model_servers_and_of_the_picker_stop_the_growth() -> None:
    for waiting in ({"in_servers": 5}, {"in_picker": 5}):
        limiter = Limiter(Policy(reserve=0.0), (Signal.REQUESTS,))
        estimate(limiter, mixed(0.0, 80))
        before = estimate(limiter, mixed(1.0, 80))
        assert before > 80
        assert estimate(limiter, mixed(2.0, 90, **waiting)) <= before


def test_merged_calls_that_are_counted_once_are_no_sign_of_another_pool() -> None:
    """The picker shows eight calls, which hold 48 items of ours. Nothing else runs."""
    pool = Limiter(POLICY, [REQUESTS])
    for key in range(8):
        pool.record_send(key, T0, 6)
    for at in (T0 + 1, T0 + 2, T0 + 3):
        pool.add_reading(Reading(REQUESTS, at, at, 8 / 64, 0.0, 64, items_beyond_calls=0.0), at)
        allowance = pool.get_allowance(at + 0.5)
        assert not allowance.reason.is_closed
        assert allowance.limit == 60, "eight of the 60 that fit are ours"
