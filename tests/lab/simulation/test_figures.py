"""What the control law is worth, against the alternatives, in the world of the design's table.

900 s of a production chat service on 64 slots, or the first half of them. Virtual time: the figures are exact
and repeat, so the bounds are the promises themselves, and nothing here is a measurement of this machine.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from dispatcher.lab.simulation.experiment import PolicyName, run_scenario
from dispatcher.lab.simulation.metrics import Detector, Signals
from dispatcher.lab.simulation.report import Comparison, Row, compare_policies
from dispatcher.lab.simulation.scenario import Order, Scenario
from dispatcher.lab.simulation.world import BatchProfile
from dispatcher.lab.standin import made_up_traffic
from dispatcher.lab.standin.trace import BUNDLED, RealtimeRequest, Trace, load_trace

AGES = [(1.0, 0.05), (5.0, 1.0), (15.0, 5.0)]
"""(seconds between scrapes, seconds until one is known)."""
HALF: dict[str, Any] = {"seconds": 450.0}
WHOLE: dict[str, Any] = {"seconds": 900.0}
EXACT: dict[str, Any] = {"detector": Detector.CONCURRENCY, "signals": Signals.SATURATION, "flush_s": 0.0}
"""A picker that counts, and shows it as it is: the design's table is of it."""


def by_age(*promises: Any) -> pytest.MarkDecorator:
    """A test for each age with what is promised there; the middle of the scale in the long form alone."""
    marks = ((), (pytest.mark.long,), ())
    cases = zip(AGES, promises, marks, strict=True)
    return pytest.mark.parametrize(
        ("age", "promised"),
        [pytest.param(age, promised, marks=long) for age, promised, long in cases],
        ids=[f"{scrape:g}s+{lag:g}s" for scrape, lag in AGES],
    )


@cache
def trace() -> Trace:
    return load_trace(BUNDLED, slots=64)


@cache
def law_in(setting: Scenario) -> Comparison:
    return compare_policies(setting, trace(), [PolicyName.DISPATCHER])


def rows(names: Sequence[PolicyName], **setting: Any) -> dict[PolicyName, Row]:
    return {row.policy: row for row in compare_policies(Scenario(**HALF | setting), trace(), names).rows}


def law(**setting: Any) -> Row:
    return law_in(Scenario(**HALF | setting)).rows[0]


def above_all_knowing(row: Row) -> float:
    assert row.overshoot_less_all_knowing is not None
    return row.overshoot_less_all_knowing


@by_age((0.97, 1.5), (0.96, 3.5), (0.90, 6.0))
def test_law_harvests_nearly_everything_and_keeps_the_reserve(
    age: tuple[float, float], promised: tuple[float, float]
) -> None:
    harvest, over = promised
    row = law(**WHOLE, scrape_s=age[0], lag_s=age[1])
    assert row.utilization is not None
    assert harvest <= row.utilization <= 1.01
    assert above_all_knowing(row) <= over


@pytest.mark.parametrize(
    ("age", "promised"),
    [
        pytest.param(age, promised, marks=() if age == AGES[-1] else pytest.mark.long)
        for age, promised in zip(AGES, (0.94, 0.93, 0.90), strict=True)
    ],
)
def test_law_harvests_from_averages_that_are_flushed_every_5_seconds(
    age: tuple[float, float], promised: float
) -> None:
    row = law(scrape_s=age[0], lag_s=age[1], detector=Detector.NONE, shows_running=False)
    assert row.utilization is not None
    assert promised <= row.utilization <= 1.01
    assert above_all_knowing(row) <= 6.0


@pytest.mark.parametrize(
    ("age", "harvest"), [pytest.param(AGES[0], 0.97, marks=pytest.mark.long), (AGES[1], 0.96)]
)
def test_late_averages_cost_nothing_where_the_picker_shows_what_it_sent(
    age: tuple[float, float], harvest: float
) -> None:
    fresh, late = law(scrape_s=age[0], lag_s=age[1], flush_s=0.0), law(scrape_s=age[0], lag_s=age[1])
    assert late.utilization is not None
    assert harvest <= late.utilization <= 1.01
    assert above_all_knowing(late) <= above_all_knowing(fresh) + 0.5


def wait(**setting: Any) -> float:
    """Of realtime, mean; without batch work nobody waits in this trace."""
    run = run_scenario(
        Scenario(**{"seconds": 150.0} | setting),
        made_up_traffic.cut_start(trace(), 500.0),
        PolicyName.DISPATCHER,
    )
    return statistics.fmean(run.waits)


OLD: dict[str, Any] = {"detector": Detector.NONE, "scrape_s": 15.0, "lag_s": 5.0}


@pytest.mark.parametrize(
    ("worse", "better"),
    [
        ({"batch": BatchProfile(2000)}, {}),
        ({"batch": BatchProfile(2000)}, {"batch": BatchProfile(2000), "reserve": 0.35}),
        (OLD, {**OLD, "order": Order.REALTIME_FIRST}),
        ({"detector": Detector.NONE, "pods": 8}, {"detector": Detector.NONE}),
        ({"slots_at": [(10.0, 48)]}, {}),
    ],
    ids=["long requests", "little reserve", "first come", "pods apart", "shrunk"],
)
def test_what_harms_realtime_shows_in_its_wait(worse: dict[str, Any], better: dict[str, Any]) -> None:
    assert wait(**worse) > 1.25 * wait(**better)


def test_two_pickers_are_not_half_the_truth_each() -> None:
    """Where each saturation may be a count of what that one sent, requests are counted beside them."""
    half = {"pickers": 2, "detector": Detector.CONCURRENCY, "signals": Signals.SATURATION}
    assert wait(**half) <= 1.25 * wait(pickers=2)


WAVES: dict[str, dict[str, Any]] = {
    "flow control off": {"detector": Detector.NONE},
    "utilization detector": {"detector": Detector.UTILIZATION, "pods": 3},
    "detector not known": {"detector": Detector.CONCURRENCY, "signals": Signals.BOTH, "pods": 3},
}
"""48 slots, averages flushed every 5 s, and nothing but batch requests of the same size, 1 to 2 s each."""


def kept_after_a_burst(**setting: Any) -> float:
    """The share of its slots that batch work keeps, from a second after a burst that a flush saw."""
    burst = Trace("burst", [RealtimeRequest(9.7, 0.4, 1)] * 12, 25.0)
    steady = Scenario(
        slots=48, flush_phase_s=0.0, batch=BatchProfile(60, 0), seconds=25, scrape_s=0.5, **setting
    )
    run = run_scenario(steady, burst, PolicyName.DISPATCHER, sample_interval_s=0.1)
    held = [moment.state.batch_running for moment in run.samples if moment.state.at >= 11]
    return sum(held) / len(held) / int(48 * 0.95)


@pytest.mark.parametrize("picker", WAVES)
def test_short_equal_requests_keep_their_slots(picker: str) -> None:
    """An average of up to 5 s ago has a burst that is over, and beside it few of ours were surely there for
    all that time: the limit fell and stayed there."""
    assert kept_after_a_burst(**WAVES[picker]) >= 0.97
    assert kept_after_a_burst(**WAVES[picker], shows_running=False) < 0.97, "the world shows the difference"


DESIGN_TABLE = {
    # policy: (harvest, over) at each age
    PolicyName.LITERAL: ((0.92, 0.1), (0.63, 0.1), (0.27, 0.1)),
    PolicyName.CAP: ((0.68, 0.0), (0.71, 0.2), (0.66, 0.7)),
    PolicyName.MULTIPLIER: ((1.05, 64), (1.02, 113), (0.85, 113)),
    PolicyName.POINT: ((0.99, 0.9), (0.98, 2.4), (0.94, 4.0)),
}


@by_age(0, 1, 2)
def test_alternatives_land_near_the_table_of_the_design(age: tuple[float, float], promised: int) -> None:
    found = rows(list(DESIGN_TABLE), **WHOLE, **EXACT, scrape_s=age[0], lag_s=age[1])
    for name, expected in DESIGN_TABLE.items():
        harvest, over = expected[promised]
        assert found[name].utilization == pytest.approx(harvest, abs=0.025), name
        assert found[name].overshoot_mean == pytest.approx(over, abs=0.3, rel=0.12), name


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_law_is_as_good_with_other_batch_requests(seed: int) -> None:
    row = law(seed=seed, jitter=0.2)
    assert row.utilization is not None
    assert row.utilization >= 0.97
    assert above_all_knowing(row) <= 1.5


def test_full_pool_makes_realtime_slower_and_the_reserve_is_the_price() -> None:
    full = rows([PolicyName.ALL_KNOWING, PolicyName.DISPATCHER, PolicyName.NONE])
    thrifty = law(reserve=0.3)
    assert full[PolicyName.NONE].latency_p50_ratio == 1.0
    for row in (full[PolicyName.ALL_KNOWING], full[PolicyName.DISPATCHER]):
        assert row.latency_p50_ratio == pytest.approx(1.4, abs=0.05)
    assert thrifty.latency_p50_ratio is not None
    assert thrifty.latency_p50_ratio < 1.33
    assert thrifty.batch_tokens_per_s < full[PolicyName.DISPATCHER].batch_tokens_per_s


def test_pool_of_a_third_of_its_configuration_is_learned() -> None:
    wrong = {"slots": 192, "true_slots": 64, "queue_limit": 8}
    row = law(**wrong)
    assert row.refused > 0, "the world must refuse for this to show anything"
    assert row.refused_per_1000_settled <= 25
    assert row.utilization is not None
    assert row.utilization >= 0.85
    alternatives = rows([PolicyName.POINT, PolicyName.CAP], **wrong)
    for other in alternatives.values():
        assert other.refused_per_1000_settled > 10 * row.refused_per_1000_settled
        assert other.realtime_refused > 3 * row.realtime_refused


@pytest.mark.parametrize("age", [pytest.param(AGES[0], marks=pytest.mark.long), AGES[1]])
def test_refusals_cost_a_rightly_sized_pool_little(age: tuple[float, float]) -> None:
    scrape_s, lag_s = age
    free = law(scrape_s=scrape_s, lag_s=lag_s)
    limited = law(scrape_s=scrape_s, lag_s=lag_s, queue_limit=8)
    assert free.utilization is not None
    assert limited.utilization is not None
    assert limited.utilization >= free.utilization - 0.03


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("age", "harvest"), [pytest.param(AGES[0], 0.97, marks=pytest.mark.long), (AGES[1], 0.9), (AGES[2], 0.55)]
)
def test_bursts_of_realtime_that_overflow_the_queue_teach_nothing(
    seed: int, age: tuple[float, float], harvest: float
) -> None:
    """The pool has what it is configured for: a refusal in a burst is no reason to hold back after it."""
    setting = Scenario(scrape_s=age[0], lag_s=age[1], queue_limit=8, detector=Detector.CONCURRENCY)
    row = compare_policies(setting, made_up_traffic.make_burst_trace(seed), [PolicyName.DISPATCHER]).rows[0]
    assert row.realtime_refused > 100, "the world must refuse for this to show anything"
    assert row.utilization is not None
    assert row.utilization >= harvest


def test_pool_of_a_third_of_its_configuration_refuses_hardly_more_realtime_than_it_must() -> None:
    row = law(**WHOLE, slots=192, true_slots=64, queue_limit=8)
    assert row.realtime_refused <= 40, "hundreds with a ceiling on ours alone"
    assert row.refused_per_1000_settled <= 2.4
    assert row.utilization is not None
    assert 0.97 <= row.utilization <= 1.06


def swings(comparison: Comparison) -> float:
    """The mean change of the limit from one moment to the next."""
    limits = [m.limit for m in comparison.runs[0].samples if m.limit is not None]
    return sum(abs(b - a) for a, b in pairwise(limits)) / len(limits)


@pytest.mark.parametrize("flush_s", [pytest.param(0.0, marks=pytest.mark.long), 5.0])
def test_default_detector_with_requests_beside_it_is_no_bang_bang(flush_s: float) -> None:
    exact = law_in(Scenario(**HALF, detector=Detector.CONCURRENCY))
    both = law_in(Scenario(**HALF, flush_s=flush_s, pods=4))
    row = both.rows[0]
    assert row.utilization is not None
    assert row.utilization >= 0.90
    assert row.overshoot_mean <= 4
    assert swings(both) <= 1.5 * swings(exact)


def test_default_detector_alone_cannot_keep_the_reserve() -> None:
    row = law(detector=Detector.UTILIZATION, signals=Signals.SATURATION, pods=4)
    assert row.overshoot_mean > 10


def test_same_seed_gives_the_same_bytes() -> None:
    def run(seed: int) -> str:
        comparison = compare_policies(Scenario(seed=seed, jitter=0.3, seconds=60), trace(), list(PolicyName))
        return json.dumps(comparison.as_json())

    assert run(7) == run(7)
    assert run(7) != run(8)
