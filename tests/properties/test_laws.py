"""The laws of the budget and the limit, one test each. docs/explanation/concepts.md has them in words."""

from __future__ import annotations

import math
import re
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from dispatcher.core.limit.allowance import explain_allowance
from dispatcher.core.limit.budget import Budget, Policy, Reading, Reason, Signal, compute_budget, round_down
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.limit.load_ledger import DELTA_S
from tests.paths import DOCS, ROOT
from tests.properties.worlds import AFTER_S, World

CONCEPTS = DOCS / "explanation" / "concepts.md"
SHARES = st.floats(0, 2)
RESERVES = st.floats(0, 0.9)
CAPACITIES = st.integers(1, 300)
HEAVIEST = st.sampled_from([1, 8])
"""Requests weigh from 1 to this, in units of the limit."""


def test_every_law_in_the_docs_is_tested() -> None:
    named = set(re.findall(r"`(test_\w+|TestNoEventOrder)`", CONCEPTS.read_text(encoding="utf-8")))
    tests = ROOT / "tests"
    places = ("core", "dispatch", "properties", "queue", "scenarios")
    others = [module for place in places for module in tests.glob(f"{place}/**/test_*.py")]
    written = {
        name
        for module in (Path(__file__), *others)
        for name in re.findall(
            r"^(?:(?:async )?def )?(test_\w+|TestNoEventOrder)\b", module.read_text("utf-8"), re.MULTILINE
        )
    }
    assert named <= written
    here = {name for name in globals() if name.startswith("test_law_") or name == "TestNoEventOrder"}
    assert here <= named


# The budget.


def budget(f_sys: float, f_epp: float, max_sys: float, reserve: float) -> Budget:
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


@given(SHARES, SHARES, CAPACITIES, RESERVES, st.floats(0, 0.5))
def test_law_more_load_or_reserve_never_leaves_more(
    f_sys: float, f_epp: float, max_sys: int, reserve: float, more: float
) -> None:
    before = budget(f_sys, f_epp, max_sys, reserve)
    for after in (
        budget(f_sys + more, f_epp, max_sys, reserve),
        budget(f_sys, f_epp + more, max_sys, reserve),
        budget(f_sys, f_epp, max_sys, min(1.0, reserve + more)),
    ):
        assert after.d <= before.d
        assert after.headroom <= before.headroom


@given(CAPACITIES, st.integers(0, 600), st.integers(0, 300), st.integers(0, 100))
def test_law_float_edges_cost_and_win_no_slot(
    max_sys: int, running: int, queued: int, reserve_percent: int
) -> None:
    """Against integers: floor(max_sys × (100 − reserve) / 100 − load), without a float."""
    found = budget(running / max_sys, queued / max_sys, max_sys, reserve_percent / 100)
    assert found.headroom == (max_sys * (100 - reserve_percent)) // 100 - running - queued
    assert (
        Policy(reserve=reserve_percent / 100).compute_max_limit(max_sys)
        == max_sys * (100 - reserve_percent) // 100
    )


# The limit, in a world that picks what each reading saw.

STEP = st.one_of(
    st.tuples(st.just("wait"), st.floats(0.001, 3)),
    st.tuples(st.just("finish"), st.integers(1, 20)),
    st.tuples(st.just("realtime"), st.integers(0, 60)),
    st.tuples(st.just("sample"), st.floats(0, 6), st.floats(0, 0.5), st.sampled_from([0.0, 0.01, 1.0, 5.0])),
)
STEPS = st.lists(STEP, max_size=30)


TROUBLE = st.lists(
    st.one_of(
        STEP,
        st.tuples(st.just("lost"), st.floats(0, 3)),
        st.tuples(st.just("refused"), st.floats(0, 2)),
        st.tuples(st.just("crowd"), st.integers(0, 20)),
        st.tuples(st.just("clock"), st.sampled_from([0.0, 0.0, -600.0, -1.0, 1.0, 600.0])),
    ),
    max_size=40,
)


@st.composite
def worlds(draw: st.DrawFn, *, greedy: bool | None = None, pickers: int = 1) -> World:
    return World(
        Random(draw(st.integers(0, 2**32))),
        max_sys=draw(st.integers(1, 60)),
        realtime=draw(st.integers(0, 60)),
        greedy=draw(st.booleans()) if greedy is None else greedy,
        travel_s=draw(st.sampled_from([DELTA_S, 0.005, 0.05, 0.2])),
        pickers=draw(st.integers(1, pickers)),
        heaviest=draw(HEAVIEST),
    )


def live(world: World, steps: list[tuple[object, ...]], *, changing: bool = True) -> None:
    for step in steps:
        match step:
            case ("wait", float(seconds)):
                world.wait(seconds)
            case ("finish", int(most)):
                world.finish(most)
            case ("realtime", int(realtime)):
                if changing:
                    world.realtime = realtime
            case ("sample", float(earlier_s), float(later_s), float(lag_s)):
                world.sample(earlier_s, later_s, lag_s)
            case ("lost", float(closes_in_s)):
                world.lose_a_scrape(closes_in_s)
            case ("refused", float(retry_after_s)):
                world.refuse(retry_after_s)
            case ("crowd", int(several)):
                world.crowd = several
            case ("clock", float(step_s)):
                world.echo(step_s)
        world.wait(world.dice.random() * 0.05)


@given(worlds(), STEPS)
def test_law_system_never_holds_more_than_was_proven(world: World, steps: list[tuple[object, ...]]) -> None:
    """(1) It rises only to lo + H, (2) is never above the newest reading by more than hi − what that saw, so
    (3) ours and realtime stay within max_sys × (1 − B) + what realtime brought since the last rise."""
    live(world, [("sample", 0.0, 0.0, 0.0), ("wait", 1.0), *steps, ("wait", 10.0)])
    assert world.limits[-1] <= round_down(world.compute_room)


@given(worlds(pickers=3), TROUBLE)
def test_law_trouble_with_the_signals_proves_no_more(world: World, steps: list[tuple[object, ...]]) -> None:
    """Several pickers, lost scrapes, refusals, a capacity that is learned, a queue whose clock is stepped."""
    live(world, [("sample", 0.0, 0.0, 0.0), ("wait", 1.0), *steps, ("wait", 10.0)])
    assert world.limits[-1] <= round_down(world.compute_room)


@given(worlds(greedy=True), STEPS)
def test_law_constant_world_is_met_by_the_first_reading_and_kept(
    world: World, steps: list[tuple[object, ...]]
) -> None:
    """From an empty start, whatever comes and goes within whatever windows, however old the readings."""
    world.wait(world.sample(0.1, 0.0, 0.0))
    world.limits.clear()
    live(world, steps, changing=False)
    assert set(world.limits) <= {world.fair}


@given(worlds(greedy=True), STEPS, st.integers(0, 60), st.lists(st.floats(0, 5), min_size=2, max_size=6))
def test_law_constant_world_is_met_in_two_readings_from_any_limit(
    world: World, steps: list[tuple[object, ...]], realtime: int, lags: list[float]
) -> None:
    """After any past, once realtime stands still: readings whose windows open after the limit was filled."""
    live(world, [("sample", 0.0, 0.0, 0.0), *steps, ("wait", 10.0)])
    world.realtime = realtime
    for n, lag_s in enumerate(lags):
        surplus = world.in_flight - world.limits[-1]
        while surplus > 0:  # completions above the limit are not replaced
            world.finish(surplus)
            world.wait(0.1)
            surplus = world.in_flight - world.limits[-1]
        world.wait(2 * world.after_s)
        world.limits.clear()
        world.wait(world.sample(world.dice.random() * world.after_s / 2, 0.3, lag_s) + world.after_s)
        if n >= 2:
            assert set(world.limits) == {world.fair}
        elif n == 1:
            assert world.limits[-1] == world.fair


@given(worlds(greedy=True), STEPS, STEPS, st.integers(0, 60))
def test_law_limit_nears_its_place_from_one_side_and_never_swings(
    world: World, past: list[tuple[object, ...]], steps: list[tuple[object, ...]], realtime: int
) -> None:
    """After any past, among completions: from above it only falls, from below only rises, none passes."""
    live(world, [("sample", 0.0, 0.0, 0.0), *past, ("wait", 10.0)])
    world.realtime = realtime
    world.limits.clear()
    live(world, [("wait", 0.1), *steps], changing=False)
    limits = world.limits
    assert limits in (sorted(limits), sorted(limits, reverse=True))
    assert all(limit >= world.fair for limit in limits) or all(limit <= world.fair for limit in limits)


@given(worlds(greedy=True), STEPS, st.lists(st.floats(0, 2), min_size=1, max_size=5))
def test_law_heavy_request_at_the_head_goes_when_what_is_in_its_way_has_ended(
    world: World, steps: list[tuple[object, ...]], pauses: list[float]
) -> None:
    """As long as realtime stands still the limit does not fall while the pool empties for it, whatever the
    readings of that time see: it waits for as much as was in flight, and for nothing else."""
    live(world, [("sample", 0.0, 0.0, 0.0), ("wait", 1.0), *steps, ("wait", 10.0)], changing=False)
    world.wait(world.sample() + world.after_s)
    waits, sent = world.head, len(world.log)
    if not 0 < waits <= world.limits[-1]:
        return  # nothing waits, or it is heavier than the limit: passed over
    for number in range(len(world.log) + 1):
        if len(world.log) > sent:
            break
        assert world.in_flight > 0, "the pool is empty, and it was not sent"
        world.finish(1)
        world.wait(world.sample() if number % 3 == 0 else pauses[number % len(pauses)])
        world.wait(2 * world.after_s)
    assert world.log[sent].units == waits


@given(st.integers(2, 100), st.integers(0, 100), st.integers(2, 30), st.floats(0.5, 2))
def test_law_series_without_our_load_never_let_the_limit_run_away(
    max_sys: int, load: int, readings: int, interval_s: float
) -> None:
    """Of 60 s requests: the cap holds, and two readings after ours outgrew what they show the gate closes."""
    limiter = Limiter(Policy(), (Signal.REQUESTS,))
    now, key, unseen = 10.0, 0, 0
    for _ in range(readings):
        running = limiter.in_flight
        limiter.add_reading(Reading(Signal.REQUESTS, now, now, load / max_sys, 0, max_sys), now)
        before = limiter.get_allowance(now).limit
        allowance = limiter.get_allowance(now + AFTER_S)
        unseen = unseen + 1 if running > load else 0
        assert allowance.limit <= round_down(max_sys * 0.95)
        if unseen:
            assert allowance.limit <= before
        if unseen >= 2:
            assert allowance.reason is Reason.IMPLAUSIBLE
        while limiter.in_flight < allowance.limit:
            limiter.record_send(key, now + AFTER_S)
            key += 1
        now += interval_s


@given(
    st.integers(0, 2**32),
    st.integers(10, 80),
    st.integers(0, 40),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0.2, 4)), min_size=1, max_size=8),
    HEAVIEST,
)
def test_law_owners_dying_at_any_share_never_lift_the_peak(
    seed: int, max_sys: int, realtime: int, deaths: list[tuple[float, float]], heaviest: int
) -> None:
    """Others' requests leave the gateway when their owner dies, their leases 5 s later, and are lost then."""
    dice = Random(seed)
    policy = Policy(max_age_s=1e6)
    room = max_sys * 0.95
    limiter = Limiter(policy, (Signal.SATURATION,))
    own = others = lost = key = 0
    dead: list[tuple[float, int]] = []
    now = 10.0

    def count(at: float) -> None:
        limiter.record_lease_counts(
            at, other_owners_units=others + sum(n for _, n in dead), just_leased_units=0, lost_units=lost
        )

    def claim(at: float) -> None:
        """By the queue's own arithmetic: limit − (lost now − lost as the permit knew), over live leases."""
        nonlocal own, others, key
        permit = limiter.get_allowance(at)
        free = permit.limit - (lost - permit.lost_units) - own - others - sum(n for _, n in dead)
        while free > 0:
            units = dice.randint(1, min(heaviest, free))
            free -= units
            if dice.random() < 0.5:
                limiter.record_send(key, at, units)
                own, key = own + units, key + 1
            else:
                others += units
        assert own + others + realtime <= max(room, realtime) + 1e-6

    count(now)
    pending = sorted((10.0 + i * 3 + after_s, share) for i, (share, after_s) in enumerate(deaths))
    tick = 0
    while pending or dead or tick % 4:
        now, tick = now + 0.5 + 0.1 * dice.random(), tick + 1
        while pending and pending[0][0] <= now:
            gone = round(pending.pop(0)[1] * others)
            others -= gone
            dead.append((now + 5, gone))
        expired = sum(n for at, n in dead if at <= now)
        dead, lost = [(at, n) for at, n in dead if at > now], lost + expired
        claim(now)  # by what was known before the count, as a replica that has heard nothing yet
        if dice.random() < 0.7:
            count(now)
        load = (realtime + own + others) / max_sys
        limiter.add_reading(Reading(Signal.SATURATION, now - 0.1, now, load, 0, max_sys), now)
        claim(now + AFTER_S)
        if dice.random() < 0.7:
            count(now + 2 * AFTER_S)
        claim(now + 2 * AFTER_S)


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
    HEAVIEST,
)
def test_law_stalled_owners_never_lift_us_over_our_own_cap(
    seed: int, cap: int, realtime: int, exact: bool, steps: list[tuple[str, float]], heaviest: int
) -> None:
    """Owners stall with their requests running on, are taken for dead, wake and cut them; others die at once.

    None stays stalled for longer than its requests run, and those no longer than stray_s.
    """
    dice = Random(seed)
    policy = Policy(max_in_flight=cap, orphan_timeout_s=30.0, max_age_s=1e6)
    limiter = Limiter(policy, (Signal.REQUESTS,))
    own = others = lost = stray = key = 0
    stalled = 0  # leased, its owner silent
    adrift: list[tuple[float, int]] = []  # taken back at, still running
    now = 10.0

    def count() -> None:
        limiter.record_lease_counts(
            now,
            other_owners_units=others + stalled,
            just_leased_units=0,
            lost_units=lost,
            orphaned_units=stray,
        )

    def ours() -> int:
        return own + others + stalled + sum(n for _, n in adrift)

    def claim() -> None:
        """By the queue's own arithmetic, and by whoever is quicker."""
        nonlocal own, others, key
        permit = limiter.get_allowance(now)
        free = permit.limit - (lost - permit.lost_units) - own - others - stalled
        while free > 0:
            units = dice.randint(1, min(heaviest, free))
            free -= units
            if dice.random() < 0.5:
                limiter.record_send(key, now, units)
                own, key = own + units, key + 1
            else:
                others += units
        assert ours() <= cap

    def take_back(several: int, *, proven: bool) -> None:
        nonlocal lost, stray
        lost += several
        stray += 0 if proven else several

    count()
    for step, share in [("wait", 0.1), *steps, ("wait", 1.0), ("wait", 1.0)]:
        gone = round(share * others)
        match step:
            case "stall":
                others, stalled = others - gone, stalled + gone
            case "die":
                others -= gone
                take_back(gone, proven=dice.random() < 0.5)
            case "wake":
                adrift.clear()
            case "finish":
                others -= gone
                adrift = [(at, dice.randint(0, n)) for at, n in adrift]
            case "realtime":
                realtime = round(share * 40)
        now += share if step == "wait" else 0.2
        if dice.random() < 0.5 and stalled:
            adrift.append((now, stalled))
            take_back(stalled, proven=False)
            stalled = 0
        adrift = [(at, n) for at, n in adrift if now <= at + 29]
        claim()
        if dice.random() < 0.7:
            count()
        claim()
        now += 0.1
        load = (realtime + ours()) / 200
        limiter.add_reading(Reading(Signal.REQUESTS, now - 0.05, now, load, 0, 200, exact), now)
        now += AFTER_S
        claim()
        if dice.random() < 0.7:
            now += 0.01
            count()
        claim()


@given(
    st.floats(0, 5),
    st.floats(-10, 200),
    st.lists(st.tuples(st.floats(0.01, 3), st.floats(0, 6)), min_size=1, max_size=12),
    st.booleans(),
)
def test_law_after_a_refusal_nothing_until_a_later_reading_and_its_retry_after(
    after_s: float, retry_after_s: float, readings: list[tuple[float, float]], heard: bool
) -> None:
    policy = Policy(max_age_s=1e6, retry_after_max_s=20)
    limiter = Limiter(policy, (Signal.SATURATION,))
    limiter.add_reading(Reading(Signal.SATURATION, 10, 10, 0.5, 0, 50), 10)
    assert limiter.get_allowance(11).limit == 22
    at = now = 11 + after_s
    limiter.record_refusal(
        at, retry_at=at + retry_after_s, is_out_of_capacity=False, in_flight=0, is_remote=heard
    )
    wait_until, read_after = at + min(retry_after_s, 20), False
    for pause_s, window_s in readings:
        now += pause_s
        limiter.add_reading(Reading(Signal.SATURATION, now - window_s, now, 0.5, 0, 50), now)
        read_after = now - window_s > at
        now += AFTER_S
        expected = 22 if read_after and now >= wait_until else 0
        assert limiter.get_allowance(now).limit == expected


# Every event, in any order and at any time.

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


class EveryEvent(RuleBasedStateMachine):
    """Events as they come: out of order, twice, with values that are no numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.limiter = Limiter(Policy(), tuple(Signal))
        self.policy = Policy()
        self.newest = self.latest = -math.inf

    @rule(
        signal=st.sampled_from(Signal),
        opened_at=TIMES | ANY_FLOAT,
        closed_at=TIMES | ANY_FLOAT,
        f_sys=ANY_FLOAT,
        f_epp=ANY_FLOAT,
        max_sys=ANY_FLOAT,
        exact=st.booleans(),
        now=TIMES,
        running=st.none() | ANY_FLOAT,
        waiting=ANY_FLOAT,
        exact_counts=st.booleans(),
        averages=st.none() | st.tuples(ANY_FLOAT, ANY_FLOAT),
        known=st.booleans(),
    )
    def any_reading(
        self,
        signal: Signal,
        opened_at: float,
        closed_at: float,
        f_sys: float,
        f_epp: float,
        max_sys: float,
        exact: bool,
        now: float,
        running: float | None,
        waiting: float,
        exact_counts: bool,
        averages: tuple[float, float] | None,
        known: bool,
    ) -> None:
        reading = Reading(
            signal,
            opened_at,
            closed_at,
            f_sys,
            f_epp,
            max_sys,
            exact,
            running=running,
            waiting=waiting,
            has_exact_counts=exact_counts,
            averages=averages,
            is_capacity_known=known,
        )
        self.limiter.add_reading(reading, now)
        self.latest = max(self.latest, now)

    @rule(load=st.floats(0, 1.2), max_sys=st.floats(1, 200), window_s=st.floats(0, 6), now=TIMES)
    def good_readings(self, load: float, max_sys: float, window_s: float, now: float) -> None:
        for signal in Signal:
            self.limiter.add_reading(Reading(signal, now - window_s, now, load, 0, max_sys), now)
        self.latest = max(self.latest, now)
        self.limiter.get_allowance(now + DELTA_S)

    @rule(reason=st.sampled_from(Reason), now=TIMES, closes_at=TIMES | ANY_FLOAT)
    def failed(self, reason: Reason, now: float, closes_at: float) -> None:
        self.limiter.record_read_failure(reason, "why", now, closes_at=closes_at)

    @rule(signals=st.sets(st.sampled_from(Signal)))
    def uses(self, signals: set[Signal]) -> None:
        self.limiter.set_signals(signals)

    @rule(capacity=st.none() | ANY_FLOAT, now=TIMES)
    def capacity(self, capacity: float | None, now: float) -> None:
        self.limiter.set_capacity_bound(capacity, now)

    @rule(policy=POLICIES, now=TIMES)
    def settings(self, policy: Policy, now: float) -> None:
        self.policy = policy
        self.limiter.set_policy(policy, now)

    @rule(key=KEYS, now=TIMES, units=st.integers(1, 8))
    def sent(self, key: int, now: float, units: int) -> None:
        self.limiter.record_send(key, now, units)

    @rule(key=KEYS, told=TIMES, now=TIMES, opened_s=st.none() | ANY_FLOAT)
    def answered(self, key: int, told: float, now: float, opened_s: float | None) -> None:
        before = self.limiter.get_allowance(now)
        self.limiter.record_answer(key, told, opened_s)
        assert self.limiter.get_allowance(now).limit == before.limit, "a completion moved the limit"

    @rule(
        now=TIMES,
        others=st.integers(-3, 50),
        young=st.integers(-3, 50),
        lost=st.integers(0, 60),
        stray=st.integers(0, 60),
    )
    def leases(self, now: float, others: int, young: int, lost: int, stray: int) -> None:
        self.limiter.record_lease_counts(
            now, other_owners_units=others, just_leased_units=young, lost_units=lost, orphaned_units=stray
        )

    @rule(count=st.integers(0, 3), now=TIMES)
    def waiting(self, count: int, now: float) -> None:
        self.limiter.set_waiting_count(count, now)

    @rule(
        now=TIMES, until=ANY_FLOAT, capacity=st.booleans(), in_flight=st.integers(-1, 99), heard=st.booleans()
    )
    def overloaded(self, now: float, until: float, capacity: bool, in_flight: int, heard: bool) -> None:
        self.limiter.record_refusal(
            now, retry_at=until, is_out_of_capacity=capacity, in_flight=in_flight, is_remote=heard
        )
        read = [reading.opened_at for reading in self.limiter.newest_readings]
        if (
            read
            and max(read) <= now
            and not self.limiter.get_allowance(now).reason.rank < Reason.BACKPRESSURE.rank
        ):
            # A reading that still waited for δ may have been taken after it; else the gate is closed.
            allowance = self.limiter.get_allowance(now)
            assert allowance.limit == 0 or allowance.read_at > now or heard

    @rule(now=TIMES, sent_at=TIMES, connected=st.lists(TIMES, max_size=3))
    def bare_answer(self, now: float, sent_at: float, connected: list[float]) -> None:
        if self.limiter.record_intermediary_error(now, sent_at, "empty 500", connected):
            assert self.limiter.get_allowance(now).limit == 0

    @rule(now=TIMES)
    def unreachable(self, now: float) -> None:
        self.limiter.record_connection_failure(now, "refused")
        assert self.limiter.get_allowance(now).limit == 0

    @rule(now=TIMES)
    def probed(self, now: float) -> None:
        self.limiter.record_probe(now)

    @rule(now=TIMES, sent_at=TIMES)
    def reached(self, now: float, sent_at: float) -> None:
        self.limiter.record_gateway_answer(now, sent_at)

    @rule(paused=st.booleans(), now=TIMES)
    def pause(self, paused: bool, now: float) -> None:
        self.limiter.set_paused(paused, now)

    @rule(problem=st.none() | st.just("away"), now=TIMES)
    def queue(self, problem: str | None, now: float) -> None:
        self.limiter.set_queue_problem(problem, now)

    @rule(now=TIMES)
    def drain_version(self, now: float) -> None:
        self.limiter.start_draining(now)

    @rule(now=TIMES)
    def asked(self, now: float) -> None:
        allowance = self.limiter.get_allowance(now)
        assert allowance.limit >= 0
        assert (allowance.limit == 0) == allowance.reason.is_closed
        assert not allowance.probe_limit or allowance.reason is Reason.GATEWAY_UNREACHABLE
        assert explain_allowance(allowance, self.limiter.in_flight).endswith(".")
        if not allowance.reason.is_closed:
            capacities = [reading.max_sys for reading in self.limiter.newest_readings]
            assert allowance.limit <= min(self.policy.compute_max_limit(max_sys) for max_sys in capacities)

    def teardown(self) -> None:
        """Readings stop: nothing is allowed later than max_age after the last one was handed in, though the
        limiter is asked only when it wants to be, as the loop does."""
        if math.isfinite(self.latest):
            close_at = self.latest + self.policy.max_age_s + 1e-5
            now = self.latest
            for _ in range(100):
                due = self.limiter.get_allowance(now).next_check_at
                if due is None or due > close_at:
                    break
                assert due > now or self.limiter.get_allowance(now).limit == 0
                now = max(now, due)
            else:
                pytest.fail("asking again makes no headway")
            assert self.limiter.get_allowance(now).limit == 0


TestNoEventOrder = EveryEvent.TestCase
TestNoEventOrder.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
