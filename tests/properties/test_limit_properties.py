"""Laws of the budget and the limit, one test each. docs/contributing/laws.md lists them."""

from __future__ import annotations

import math
import re
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from dispatcher.limit.allowance import explain_allowance
from dispatcher.limit.budget import (
    GATEWAY_OUTAGES,
    Budget,
    Policy,
    Reading,
    Reason,
    Signal,
    compute_budget,
    round_down,
)
from dispatcher.limit.limiter import Limiter
from dispatcher.limit.load_ledger import DELTA_S
from tests.paths import DOCS, ROOT
from tests.properties.adversarial_pool import APPLY_DELAY_S, AdversarialPool

LAWS = DOCS / "contributing" / "laws.md"
LOADS = st.floats(0, 2)
RESERVES = st.floats(0, 0.9)
CAPACITIES = st.integers(1, 300)
MAX_UNITS = st.sampled_from([1, 8])
"""Largest weight of a request, in units of the limit."""


def test_every_law_in_the_docs_is_tested() -> None:
    names_in_docs = set(re.findall(r"`(test_\w+|TestAnyEventOrder)`", LAWS.read_text(encoding="utf-8")))
    defined_names = {
        name
        for module in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(
            r"^(?:(?:async )?def )?(test_\w+|TestAnyEventOrder)\b", module.read_text("utf-8"), re.MULTILINE
        )
    }
    assert names_in_docs <= defined_names
    law_names = {name for name in globals() if name.startswith("test_law_") or name == "TestAnyEventOrder"}
    assert law_names <= names_in_docs


# The budget.


def make_budget(f_sys: float, f_epp: float, max_sys: float, reserve: float) -> Budget:
    return compute_budget(Reading(Signal.SATURATION, 0, 0, f_sys, f_epp, max_sys), Policy(reserve=reserve))


def test_law_worked_example() -> None:
    limiter = Limiter(Policy(), (Signal.SATURATION,))
    limiter.add_reading(Reading(Signal.SATURATION, 0, 0, 0.5, 0.1, 50), 0)
    first = limiter.get_allowance(1)
    assert first.budget is not None
    assert (round(first.budget.d, 12), first.limit) == (0.35, 17)
    for key in range(17):
        limiter.record_send(key, 1)
    limiter.add_reading(Reading(Signal.SATURATION, 2, 2, 0.84, 0.1, 50), 2)
    second = limiter.get_allowance(3)
    assert second.budget is not None
    assert (round(second.budget.d, 12), second.budget.headroom, second.limit) == (0.01, 0, 17)


@given(LOADS, LOADS, CAPACITIES, RESERVES, st.floats(0, 0.5))
def test_law_larger_load_or_reserve_never_increases_the_budget(
    f_sys: float, f_epp: float, max_sys: int, reserve: float, more: float
) -> None:
    before = make_budget(f_sys, f_epp, max_sys, reserve)
    for after in (
        make_budget(f_sys + more, f_epp, max_sys, reserve),
        make_budget(f_sys, f_epp + more, max_sys, reserve),
        make_budget(f_sys, f_epp, max_sys, min(1.0, reserve + more)),
    ):
        assert after.d <= before.d
        assert after.headroom <= before.headroom


@given(CAPACITIES, st.integers(0, 600), st.integers(0, 300), st.integers(0, 100))
def test_law_rounding_never_changes_the_headroom(
    max_sys: int, running: int, queued: int, reserve_percent: int
) -> None:
    """The reference is floor(max_sys × (100 − reserve) / 100 − load), computed with integers."""
    result = make_budget(running / max_sys, queued / max_sys, max_sys, reserve_percent / 100)
    assert result.headroom == (max_sys * (100 - reserve_percent)) // 100 - running - queued
    assert (
        Policy(reserve=reserve_percent / 100).compute_max_limit(max_sys)
        == max_sys * (100 - reserve_percent) // 100
    )


# The limit, in a pool that chooses what each reading shows.

ANY_STEP = st.one_of(
    st.tuples(st.just("wait"), st.floats(0.001, 3)),
    st.tuples(st.just("finish"), st.integers(1, 20)),
    st.tuples(st.just("realtime"), st.integers(0, 60)),
    st.tuples(st.just("sample"), st.floats(0, 6), st.floats(0, 0.5), st.sampled_from([0.0, 0.01, 1.0, 5.0])),
)
STEPS = st.lists(ANY_STEP, max_size=30)


STEPS_WITH_FAULTS = st.lists(
    st.one_of(
        ANY_STEP,
        st.tuples(st.just("read-failed"), st.floats(0, 3)),
        st.tuples(st.just("refused"), st.floats(0, 2)),
        st.tuples(st.just("waiting"), st.integers(0, 20)),
        st.tuples(st.just("clock"), st.sampled_from([0.0, 0.0, -600.0, -1.0, 1.0, 600.0])),
    ),
    max_size=40,
)


@st.composite
def pools(draw: st.DrawFn, *, fills_at_once: bool | None = None, picker_count: int = 1) -> AdversarialPool:
    return AdversarialPool(
        Random(draw(st.integers(0, 2**32))),
        max_sys=draw(st.integers(1, 60)),
        realtime=draw(st.integers(0, 60)),
        fills_at_once=draw(st.booleans()) if fills_at_once is None else fills_at_once,
        transit_s=draw(st.sampled_from([DELTA_S, 0.005, 0.05, 0.2])),
        picker_count=draw(st.integers(1, picker_count)),
        max_units=draw(MAX_UNITS),
    )


def run_steps(
    pool: AdversarialPool, steps: list[tuple[object, ...]], *, changes_realtime: bool = True
) -> None:
    for step in steps:
        match step:
            case ("wait", float(seconds)):
                pool.advance(seconds)
            case ("finish", int(count)):
                pool.finish_requests(count)
            case ("realtime", int(realtime)):
                if changes_realtime:
                    pool.realtime = realtime
            case ("sample", float(earlier_s), float(later_s), float(lag_s)):
                pool.take_sample(earlier_s, later_s, lag_s)
            case ("read-failed", float(closes_in_s)):
                pool.fail_read(closes_in_s)
            case ("refused", float(retry_after_s)):
                pool.refuse_request(retry_after_s)
            case ("waiting", int(count)):
                pool.waiting_count = count
            case ("clock", float(step_s)):
                pool.echo_shared_limit(step_s)
        pool.advance(pool.rng.random() * 0.05)


@given(pools(), STEPS)
def test_law_pool_never_contains_more_than_a_reading_proved(
    pool: AdversarialPool, steps: list[tuple[object, ...]]
) -> None:
    """The limit rises only to lo + H, and exceeds the newest reading by at most hi − the requests in it.

    Therefore batch and realtime requests stay within max_sys × (1 − B) plus the realtime requests since the
    last rise.
    """
    run_steps(pool, [("sample", 0.0, 0.0, 0.0), ("wait", 1.0), *steps, ("wait", 10.0)])
    assert pool.limits[-1] <= round_down(pool.usable_capacity)


@given(pools(picker_count=3), STEPS_WITH_FAULTS)
def test_law_faults_of_the_signals_never_prove_more_room(
    pool: AdversarialPool, steps: list[tuple[object, ...]]
) -> None:
    """There are several pickers, failed reads, refusals, a learned capacity, and a clock that is stepped."""
    run_steps(pool, [("sample", 0.0, 0.0, 0.0), ("wait", 1.0), *steps, ("wait", 10.0)])
    assert pool.limits[-1] <= round_down(pool.usable_capacity)


@given(pools(fills_at_once=True), STEPS)
def test_law_first_reading_sets_the_final_limit_of_a_constant_load(
    pool: AdversarialPool, steps: list[tuple[object, ...]]
) -> None:
    """From an empty start, requests begin and end within any time windows, and readings have any age."""
    pool.advance(pool.take_sample(0.1, 0.0, 0.0))
    pool.limits.clear()
    run_steps(pool, steps, changes_realtime=False)
    assert set(pool.limits) <= {pool.ideal_limit}


@given(
    pools(fills_at_once=True), STEPS, st.integers(0, 60), st.lists(st.floats(0, 5), min_size=2, max_size=6)
)
def test_law_final_limit_of_a_constant_load_is_reached_in_two_readings(
    pool: AdversarialPool, steps: list[tuple[object, ...]], realtime: int, lags: list[float]
) -> None:
    """After any history with a constant load, for readings whose windows open after the limit was filled."""
    run_steps(pool, [("sample", 0.0, 0.0, 0.0), *steps, ("wait", 10.0)])
    pool.realtime = realtime
    for n, lag_s in enumerate(lags):
        surplus = pool.in_flight - pool.limits[-1]
        while surplus > 0:  # completions above the limit are not replaced
            pool.finish_requests(surplus)
            pool.advance(0.1)
            surplus = pool.in_flight - pool.limits[-1]
        pool.advance(2 * pool.apply_delay_s)
        pool.limits.clear()
        pool.advance(
            pool.take_sample(pool.rng.random() * pool.apply_delay_s / 2, 0.3, lag_s) + pool.apply_delay_s
        )
        if n >= 2:
            assert set(pool.limits) == {pool.ideal_limit}
        elif n == 1:
            assert pool.limits[-1] == pool.ideal_limit


@given(pools(fills_at_once=True), STEPS, STEPS, st.integers(0, 60))
def test_law_limit_approaches_its_final_value_from_one_side(
    pool: AdversarialPool,
    earlier_steps: list[tuple[object, ...]],
    steps: list[tuple[object, ...]],
    realtime: int,
) -> None:
    """After any history, while requests complete: from above it only falls, and from below it only rises."""
    run_steps(pool, [("sample", 0.0, 0.0, 0.0), *earlier_steps, ("wait", 10.0)])
    pool.realtime = realtime
    pool.limits.clear()
    run_steps(pool, [("wait", 0.1), *steps], changes_realtime=False)
    limits = pool.limits
    assert limits in (sorted(limits), sorted(limits, reverse=True))
    assert all(limit >= pool.ideal_limit for limit in limits) or all(
        limit <= pool.ideal_limit for limit in limits
    )


@given(pools(fills_at_once=True), STEPS, st.lists(st.floats(0, 2), min_size=1, max_size=5))
def test_law_next_request_of_several_units_is_sent_once_its_room_is_free(
    pool: AdversarialPool, steps: list[tuple[object, ...]], pauses: list[float]
) -> None:
    """While the number of realtime requests is constant, the limit does not fall as the pool empties for the
    next request, whatever readings show meanwhile. The request waits only for those in flight."""
    run_steps(
        pool, [("sample", 0.0, 0.0, 0.0), ("wait", 1.0), *steps, ("wait", 10.0)], changes_realtime=False
    )
    pool.advance(pool.take_sample() + pool.apply_delay_s)
    waiting_units, sent_before = pool.next_units, len(pool.sent_requests)
    if not 0 < waiting_units <= pool.limits[-1]:
        return  # no request waits, or it is heavier than the limit and skipped
    for number in range(len(pool.sent_requests) + 1):
        if len(pool.sent_requests) > sent_before:
            break
        assert pool.in_flight > 0, "the pool is empty, and the request was not sent"
        pool.finish_requests(1)
        pool.advance(pool.take_sample() if number % 3 == 0 else pauses[number % len(pauses)])
        pool.advance(2 * pool.apply_delay_s)
    assert pool.sent_requests[sent_before].units == waiting_units


@given(st.integers(2, 100), st.integers(0, 100), st.integers(2, 30), st.floats(0.5, 2))
def test_law_readings_without_our_requests_never_let_the_limit_run_away(
    max_sys: int, load: int, readings: int, interval_s: float
) -> None:
    """With requests of 60 s, the gate closes at the second reading that shows fewer requests than we have."""
    limiter = Limiter(Policy(), (Signal.REQUESTS,))
    now, key, unseen_count = 10.0, 0, 0
    for _ in range(readings):
        running = limiter.in_flight
        limiter.add_reading(Reading(Signal.REQUESTS, now, now, load / max_sys, 0, max_sys), now)
        before = limiter.get_allowance(now).limit
        allowance = limiter.get_allowance(now + APPLY_DELAY_S)
        unseen_count = unseen_count + 1 if running > load else 0
        assert allowance.limit <= round_down(max_sys * 0.95)
        if unseen_count:
            assert allowance.limit <= before
        if unseen_count >= 2:
            assert allowance.reason is Reason.IMPLAUSIBLE
        while limiter.in_flight < allowance.limit:
            limiter.record_send(key, now + APPLY_DELAY_S)
            key += 1
        now += interval_s


@given(
    st.integers(0, 2**32),
    st.integers(10, 80),
    st.integers(0, 40),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0.2, 4)), min_size=1, max_size=8),
    MAX_UNITS,
)
def test_law_owners_that_die_never_raise_the_peak(
    seed: int, max_sys: int, realtime: int, deaths: list[tuple[float, float]], max_units: int
) -> None:
    """When an owner dies, its requests leave the gateway. Their leases are lost 5 s later."""
    rng = Random(seed)
    policy = Policy(max_age_s=1e6)
    usable_capacity = max_sys * 0.95
    limiter = Limiter(policy, (Signal.SATURATION,))
    own_units = other_units = lost_units = key = 0
    dead_units: list[tuple[float, int]] = []
    now = 10.0

    def record_counts(at: float) -> None:
        limiter.record_lease_counts(
            at,
            other_owners_units=other_units + sum(n for _, n in dead_units),
            just_leased_units=0,
            lost_units=lost_units,
        )

    def claim_requests(at: float) -> None:
        """Claim as the queue does: limit − (lost now − lost when the permit was made) − live leases."""
        nonlocal own_units, other_units, key
        permit = limiter.get_allowance(at)
        free = (
            permit.limit
            - (lost_units - permit.lost_units)
            - own_units
            - other_units
            - sum(n for _, n in dead_units)
        )
        while free > 0:
            units = rng.randint(1, min(max_units, free))
            free -= units
            if rng.random() < 0.5:
                limiter.record_send(key, at, units)
                own_units, key = own_units + units, key + 1
            else:
                other_units += units
        assert own_units + other_units + realtime <= max(usable_capacity, realtime) + 1e-6

    record_counts(now)
    pending_deaths = sorted((10.0 + i * 3 + after_s, share) for i, (share, after_s) in enumerate(deaths))
    step_number = 0
    while pending_deaths or dead_units or step_number % 4:
        now, step_number = now + 0.5 + 0.1 * rng.random(), step_number + 1
        while pending_deaths and pending_deaths[0][0] <= now:
            gone_units = round(pending_deaths.pop(0)[1] * other_units)
            other_units -= gone_units
            dead_units.append((now + 5, gone_units))
        expired = sum(n for at, n in dead_units if at <= now)
        dead_units, lost_units = [(at, n) for at, n in dead_units if at > now], lost_units + expired
        claim_requests(now)  # with the counts from before, like a replica that has no newer ones yet
        if rng.random() < 0.7:
            record_counts(now)
        load = (realtime + own_units + other_units) / max_sys
        limiter.add_reading(Reading(Signal.SATURATION, now - 0.1, now, load, 0, max_sys), now)
        claim_requests(now + APPLY_DELAY_S)
        if rng.random() < 0.7:
            record_counts(now + 2 * APPLY_DELAY_S)
        claim_requests(now + 2 * APPLY_DELAY_S)


@given(
    st.integers(0, 2**32),
    st.integers(1, 40),
    st.integers(0, 40),
    st.booleans(),
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["stall", "die", "wake", "finish"]), st.floats(0, 1)),
            st.tuples(st.just("realtime"), st.floats(0, 1)),
            st.tuples(st.just("wait"), st.floats(0, 4)),
        ),
        max_size=25,
    ),
    MAX_UNITS,
)
def test_law_stalled_owners_never_raise_batch_requests_above_max_in_flight(
    seed: int,
    max_in_flight: int,
    realtime: int,
    is_request_count: bool,
    steps: list[tuple[str, float]],
    max_units: int,
) -> None:
    """Some owners stall while their requests run on, are presumed dead, and abort them when they wake.

    Other owners die at once. No owner stalls for longer than the orphan timeout.
    """
    rng = Random(seed)
    policy = Policy(max_in_flight=max_in_flight, orphan_timeout_s=30.0, max_age_s=1e6)
    limiter = Limiter(policy, (Signal.REQUESTS,))
    own_units = other_units = lost_units = orphaned_units = key = 0
    stalled_units = 0  # leased by a silent owner
    still_running: list[tuple[float, int]] = []  # time of the reclaim, and units that still run
    now = 10.0

    def record_counts() -> None:
        limiter.record_lease_counts(
            now,
            other_owners_units=other_units + stalled_units,
            just_leased_units=0,
            lost_units=lost_units,
            orphaned_units=orphaned_units,
        )

    def count_batch_units() -> int:
        return own_units + other_units + stalled_units + sum(n for _, n in still_running)

    def claim_requests() -> None:
        """Claim as the queue does, for this owner or for others at random."""
        nonlocal own_units, other_units, key
        permit = limiter.get_allowance(now)
        free = permit.limit - (lost_units - permit.lost_units) - own_units - other_units - stalled_units
        while free > 0:
            units = rng.randint(1, min(max_units, free))
            free -= units
            if rng.random() < 0.5:
                limiter.record_send(key, now, units)
                own_units, key = own_units + units, key + 1
            else:
                other_units += units
        assert count_batch_units() <= max_in_flight

    def reclaim_units(units: int, *, proven: bool) -> None:
        nonlocal lost_units, orphaned_units
        lost_units += units
        orphaned_units += 0 if proven else units

    record_counts()
    for step, share in [("wait", 0.1), *steps, ("wait", 1.0), ("wait", 1.0)]:
        gone_units = round(share * other_units)
        match step:
            case "stall":
                other_units, stalled_units = other_units - gone_units, stalled_units + gone_units
            case "die":
                other_units -= gone_units
                reclaim_units(gone_units, proven=rng.random() < 0.5)
            case "wake":
                still_running.clear()
            case "finish":
                other_units -= gone_units
                still_running = [(at, rng.randint(0, n)) for at, n in still_running]
            case "realtime":
                realtime = round(share * 40)
        now += share if step == "wait" else 0.2
        if rng.random() < 0.5 and stalled_units:
            still_running.append((now, stalled_units))
            reclaim_units(stalled_units, proven=False)
            stalled_units = 0
        still_running = [(at, n) for at, n in still_running if now <= at + 29]
        claim_requests()
        if rng.random() < 0.7:
            record_counts()
        claim_requests()
        now += 0.1
        load = (realtime + count_batch_units()) / 200
        limiter.add_reading(Reading(Signal.REQUESTS, now - 0.05, now, load, 0, 200, is_request_count), now)
        now += APPLY_DELAY_S
        claim_requests()
        if rng.random() < 0.7:
            now += 0.01
            record_counts()
        claim_requests()


@given(
    st.floats(0, 5),
    st.floats(-10, 200),
    st.lists(st.tuples(st.floats(0.01, 3), st.floats(0, 6)), min_size=1, max_size=12),
    st.booleans(),
)
def test_law_nothing_is_sent_after_a_refusal_until_a_later_reading_and_its_retry_after(
    after_s: float, retry_after_s: float, readings: list[tuple[float, float]], is_remote: bool
) -> None:
    policy = Policy(max_age_s=1e6, retry_after_max_s=20)
    limiter = Limiter(policy, (Signal.SATURATION,))
    limiter.add_reading(Reading(Signal.SATURATION, 10, 10, 0.5, 0, 50), 10)
    assert limiter.get_allowance(11).limit == 22
    at = now = 11 + after_s
    limiter.record_refusal(
        at, retry_at=at + retry_after_s, is_out_of_capacity=False, in_flight=0, is_remote=is_remote
    )
    wait_until, has_later_reading = at + min(retry_after_s, 20), False
    for pause_s, window_s in readings:
        now += pause_s
        limiter.add_reading(Reading(Signal.SATURATION, now - window_s, now, 0.5, 0, 50), now)
        has_later_reading = now - window_s > at
        now += APPLY_DELAY_S
        expected = 22 if has_later_reading and now >= wait_until else 0
        assert limiter.get_allowance(now).limit == expected


# All events, in any order and at any time.

KEYS = st.integers(0, 5)
TIMES = st.floats(-100, 100)
ANY_FLOAT = st.one_of(
    st.sampled_from([0.0, 0.5, 1.0, 50.0, math.nan, math.inf, -math.inf, 1e308]), st.floats()
)
POLICIES = st.builds(
    Policy,
    reserve=st.floats(0, 0.99),
    max_sys=st.none() | st.floats(1, 200),
    max_in_flight=st.none() | st.integers(0, 100),
    overload_backoff=st.floats(0.1, 0.9),
    max_age_s=st.floats(1, 60),
    retry_after_max_s=st.floats(0, 60),
)


class EventMachine(RuleBasedStateMachine):
    """Limiter that gets all events out of order, repeatedly, and with values that are not numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.limiter = Limiter(Policy(), tuple(Signal))
        self.policy = Policy()
        self.newest = self.latest_reading_at = -math.inf

    @rule(
        signal=st.sampled_from(Signal),
        opened_at=TIMES | ANY_FLOAT,
        closed_at=TIMES | ANY_FLOAT,
        f_sys=ANY_FLOAT,
        f_epp=ANY_FLOAT,
        max_sys=ANY_FLOAT,
        is_request_count=st.booleans(),
        now=TIMES,
        running=st.none() | ANY_FLOAT,
        waiting=ANY_FLOAT,
        has_exact_counts=st.booleans(),
        averages=st.none() | st.tuples(ANY_FLOAT, ANY_FLOAT),
        is_capacity_known=st.booleans(),
    )
    def add_any_reading(
        self,
        signal: Signal,
        opened_at: float,
        closed_at: float,
        f_sys: float,
        f_epp: float,
        max_sys: float,
        is_request_count: bool,
        now: float,
        running: float | None,
        waiting: float,
        has_exact_counts: bool,
        averages: tuple[float, float] | None,
        is_capacity_known: bool,
    ) -> None:
        reading = Reading(
            signal,
            opened_at,
            closed_at,
            f_sys,
            f_epp,
            max_sys,
            is_request_count,
            running=running,
            waiting=waiting,
            has_exact_counts=has_exact_counts,
            averages=averages,
            is_capacity_known=is_capacity_known,
        )
        self.limiter.add_reading(reading, now)
        self.latest_reading_at = max(self.latest_reading_at, now)

    @rule(load=st.floats(0, 1.2), max_sys=st.floats(1, 200), window_s=st.floats(0, 6), now=TIMES)
    def add_plausible_readings(self, load: float, max_sys: float, window_s: float, now: float) -> None:
        for signal in Signal:
            self.limiter.add_reading(Reading(signal, now - window_s, now, load, 0, max_sys), now)
        self.latest_reading_at = max(self.latest_reading_at, now)
        self.limiter.get_allowance(now + DELTA_S)

    @rule(reason=st.sampled_from(Reason), now=TIMES, closes_at=TIMES | ANY_FLOAT)
    def fail_read(self, reason: Reason, now: float, closes_at: float) -> None:
        self.limiter.record_read_failure(reason, "why", now, closes_at=closes_at)

    @rule(signals=st.sets(st.sampled_from(Signal)))
    def set_signals(self, signals: set[Signal]) -> None:
        self.limiter.set_signals(signals)

    @rule(capacity=st.none() | ANY_FLOAT, now=TIMES)
    def set_capacity(self, capacity: float | None, now: float) -> None:
        self.limiter.set_capacity_bound(capacity, now)

    @rule(policy=POLICIES, now=TIMES)
    def set_policy(self, policy: Policy, now: float) -> None:
        self.policy = policy
        self.limiter.set_policy(policy, now)

    @rule(key=KEYS, now=TIMES, units=st.integers(1, 8))
    def record_send(self, key: int, now: float, units: int) -> None:
        self.limiter.record_send(key, now, units)

    @rule(key=KEYS, answered_at=TIMES, now=TIMES, opened_s=st.none() | ANY_FLOAT)
    def record_answer(self, key: int, answered_at: float, now: float, opened_s: float | None) -> None:
        before = self.limiter.get_allowance(now)
        self.limiter.record_answer(key, answered_at, opened_s)
        assert self.limiter.get_allowance(now).limit == before.limit, "a completion moved the limit"

    @rule(
        now=TIMES,
        other_units=st.integers(-3, 50),
        just_leased_units=st.integers(-3, 50),
        lost_units=st.integers(0, 60),
        orphaned_units=st.integers(0, 60),
    )
    def record_lease_counts(
        self, now: float, other_units: int, just_leased_units: int, lost_units: int, orphaned_units: int
    ) -> None:
        self.limiter.record_lease_counts(
            now,
            other_owners_units=other_units,
            just_leased_units=just_leased_units,
            lost_units=lost_units,
            orphaned_units=orphaned_units,
        )

    @rule(count=st.integers(0, 3), now=TIMES)
    def set_waiting_count(self, count: int, now: float) -> None:
        self.limiter.set_waiting_count(count, now)

    @rule(
        now=TIMES,
        until=ANY_FLOAT,
        capacity=st.booleans(),
        in_flight=st.integers(-1, 99),
        is_remote=st.booleans(),
    )
    def record_refusal(
        self, now: float, until: float, capacity: bool, in_flight: int, is_remote: bool
    ) -> None:
        self.limiter.record_refusal(
            now, retry_at=until, is_out_of_capacity=capacity, in_flight=in_flight, is_remote=is_remote
        )
        opened_times = [reading.opened_at for reading in self.limiter.newest_readings]
        if (
            opened_times
            and max(opened_times) <= now
            and not self.limiter.get_allowance(now).reason.rank < Reason.BACKPRESSURE.rank
        ):
            # A reading that was not applied yet may be later than the refusal. Otherwise the gate is closed.
            allowance = self.limiter.get_allowance(now)
            assert allowance.limit == 0 or allowance.read_at > now or is_remote

    @rule(now=TIMES, sent_at=TIMES, connected_at=st.lists(TIMES, max_size=3))
    def record_intermediary_error(self, now: float, sent_at: float, connected_at: list[float]) -> None:
        if self.limiter.record_intermediary_error(now, sent_at, "empty 500", connected_at):
            assert self.limiter.get_allowance(now).limit == 0

    @rule(now=TIMES)
    def record_connection_failure(self, now: float) -> None:
        self.limiter.record_connection_failure(now, "refused")
        assert self.limiter.get_allowance(now).limit == 0

    @rule(now=TIMES)
    def record_probe(self, now: float) -> None:
        self.limiter.record_probe(now)

    @rule(now=TIMES, sent_at=TIMES)
    def record_gateway_answer(self, now: float, sent_at: float) -> None:
        self.limiter.record_gateway_answer(now, sent_at)

    @rule(paused=st.booleans(), now=TIMES)
    def set_paused(self, paused: bool, now: float) -> None:
        self.limiter.set_paused(paused, now)

    @rule(problem=st.none() | st.just("away"), now=TIMES)
    def set_queue_problem(self, problem: str | None, now: float) -> None:
        self.limiter.set_queue_problem(problem, now)

    @rule(now=TIMES)
    def start_draining(self, now: float) -> None:
        self.limiter.start_draining(now)

    @rule(now=TIMES)
    def check_allowance(self, now: float) -> None:
        allowance = self.limiter.get_allowance(now)
        assert allowance.limit >= 0
        assert (allowance.limit == 0) == allowance.reason.is_closed
        assert not allowance.probe_limit or allowance.reason in GATEWAY_OUTAGES
        assert explain_allowance(allowance, self.limiter.in_flight).endswith(".")
        if not allowance.reason.is_closed:
            capacities = [reading.max_sys for reading in self.limiter.newest_readings]
            assert allowance.limit <= min(self.policy.compute_max_limit(max_sys) for max_sys in capacities)

    def teardown(self) -> None:
        """Check that nothing is allowed later than max_age after the last reading, once readings stop.

        The limiter is queried only at the times that it returns, as in the dispatch loop.
        """
        if math.isfinite(self.latest_reading_at):
            closes_by = self.latest_reading_at + self.policy.max_age_s + 1e-5
            now = self.latest_reading_at
            for _ in range(100):
                next_check_at = self.limiter.get_allowance(now).next_check_at
                if next_check_at is None or next_check_at > closes_by:
                    break
                assert next_check_at > now or self.limiter.get_allowance(now).limit == 0
                now = max(now, next_check_at)
            else:
                pytest.fail("the limiter asks for checks without end")
            assert self.limiter.get_allowance(now).limit == 0


TestAnyEventOrder = EventMachine.TestCase
TestAnyEventOrder.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
