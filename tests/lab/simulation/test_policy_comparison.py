"""Comparison of the limit algorithm with alternative policies, in the simulated world of the design's table.

The world is 900 s of a production chat service on 64 slots, or the first half of them. Virtual time makes the
figures exact and repeatable: the bounds are the promised values, independent of the speed of the machine.
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

READING_AGES = [(1.0, 0.05), (5.0, 1.0), (15.0, 5.0)]
"""Pairs of the scrape interval and the delay until a scrape is known, in seconds."""
HALF_TRACE: dict[str, Any] = {"seconds": 450.0}
WHOLE_TRACE: dict[str, Any] = {"seconds": 900.0}
COUNTING_PICKER: dict[str, Any] = {
    "detector": Detector.CONCURRENCY,
    "signals": Signals.SATURATION,
    "flush_s": 0.0,
}
"""Picker that counts requests and shows the current number. The design's table is based on it."""


def for_each_age(*promised_by_age: Any) -> pytest.MarkDecorator:
    """Return a mark that runs a test for each age with its promised figures; the middle age is long."""
    marks = ((), (pytest.mark.long,), ())
    cases = zip(READING_AGES, promised_by_age, marks, strict=True)
    return pytest.mark.parametrize(
        ("age", "promised"),
        [pytest.param(age, promised, marks=mark) for age, promised, mark in cases],
        ids=[f"{scrape:g}s+{lag:g}s" for scrape, lag in READING_AGES],
    )


@cache
def load_bundled_trace() -> Trace:
    return load_trace(BUNDLED, slots=64)


@cache
def compare_dispatcher(scenario: Scenario) -> Comparison:
    return compare_policies(scenario, load_bundled_trace(), [PolicyName.DISPATCHER])


def run_policies(names: Sequence[PolicyName], **scenario: Any) -> dict[PolicyName, Row]:
    return {
        row.policy: row
        for row in compare_policies(Scenario(**HALF_TRACE | scenario), load_bundled_trace(), names).rows
    }


def run_dispatcher(**scenario: Any) -> Row:
    return compare_dispatcher(Scenario(**HALF_TRACE | scenario)).rows[0]


def extra_overshoot(row: Row) -> float:
    assert row.overshoot_less_all_knowing is not None
    return row.overshoot_less_all_knowing


@pytest.mark.slow
@for_each_age((0.97, 1.5), (0.96, 3.5), (0.90, 6.0))
def test_dispatcher_uses_nearly_all_free_capacity_and_keeps_the_reserve(
    age: tuple[float, float], promised: tuple[float, float]
) -> None:
    utilization, overshoot = promised
    row = run_dispatcher(**WHOLE_TRACE, scrape_s=age[0], lag_s=age[1])
    assert row.utilization is not None
    assert utilization <= row.utilization <= 1.01
    assert extra_overshoot(row) <= overshoot


@pytest.mark.parametrize(
    ("age", "promised"),
    [
        pytest.param(age, promised, marks=() if age == READING_AGES[-1] else pytest.mark.long)
        for age, promised in zip(READING_AGES, (0.94, 0.93, 0.90), strict=True)
    ],
)
def test_dispatcher_uses_most_free_capacity_with_averages_flushed_every_5_seconds(
    age: tuple[float, float], promised: float
) -> None:
    row = run_dispatcher(scrape_s=age[0], lag_s=age[1], detector=Detector.NONE, shows_running=False)
    assert row.utilization is not None
    assert promised <= row.utilization <= 1.01
    assert extra_overshoot(row) <= 6.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("age", "utilization"),
    [pytest.param(READING_AGES[0], 0.97, marks=pytest.mark.long), (READING_AGES[1], 0.96)],
)
def test_late_averages_cost_nothing_if_the_picker_shows_running_requests(
    age: tuple[float, float], utilization: float
) -> None:
    current, late = (
        run_dispatcher(scrape_s=age[0], lag_s=age[1], flush_s=0.0),
        run_dispatcher(scrape_s=age[0], lag_s=age[1]),
    )
    assert late.utilization is not None
    assert utilization <= late.utilization <= 1.01
    assert extra_overshoot(late) <= extra_overshoot(current) + 0.5


def mean_wait_s(**scenario: Any) -> float:
    """Return the mean wait of realtime requests, which do not wait in this trace without batch requests."""
    run = run_scenario(
        Scenario(**{"seconds": 150.0} | scenario),
        made_up_traffic.cut_start(load_bundled_trace(), 500.0),
        PolicyName.DISPATCHER,
    )
    return statistics.fmean(run.waits)


OLD_READINGS: dict[str, Any] = {"detector": Detector.NONE, "scrape_s": 15.0, "lag_s": 5.0}


@pytest.mark.parametrize(
    ("worse", "better"),
    [
        ({"batch": BatchProfile(2000)}, {}),
        ({"batch": BatchProfile(2000)}, {"batch": BatchProfile(2000), "reserve": 0.35}),
        (OLD_READINGS, {**OLD_READINGS, "order": Order.REALTIME_FIRST}),
        ({"detector": Detector.NONE, "pods": 8}, {"detector": Detector.NONE}),
        ({"slots_at": [(10.0, 48)]}, {}),
    ],
    ids=["long requests", "small reserve", "first come, first served", "several pods", "smaller pool"],
)
def test_realtime_wait_shows_harm_by_batch_requests(worse: dict[str, Any], better: dict[str, Any]) -> None:
    assert mean_wait_s(**worse) > 1.25 * mean_wait_s(**better)


def test_two_pickers_with_saturation_only_do_not_lengthen_the_wait() -> None:
    """The saturation of a picker may count only its own requests, so the requests are read, too."""
    half = {"pickers": 2, "detector": Detector.CONCURRENCY, "signals": Signals.SATURATION}
    assert mean_wait_s(**half) <= 1.25 * mean_wait_s(pickers=2)


AVERAGING_PICKERS: dict[str, dict[str, Any]] = {
    "flow control off": {"detector": Detector.NONE},
    "utilization detector": {"detector": Detector.UTILIZATION, "pods": 3},
    "detector not known": {"detector": Detector.CONCURRENCY, "signals": Signals.BOTH, "pods": 3},
}
"""Pickers on 48 slots that flush averages every 5 s, with equal batch requests of 1 to 2 s."""


def share_kept_after_burst(**scenario: Any) -> float:
    """Return the share of its slots that batch work keeps, from one second after a burst in a flush."""
    burst = Trace("burst", [RealtimeRequest(9.7, 0.4, 1)] * 12, 25.0)
    steady = Scenario(
        slots=48, flush_phase_s=0.0, batch=BatchProfile(60, 0), seconds=25, scrape_s=0.5, **scenario
    )
    run = run_scenario(steady, burst, PolicyName.DISPATCHER, sample_interval_s=0.1)
    running = [sample.state.batch_running for sample in run.samples if sample.state.at >= 11]
    return sum(running) / len(running) / int(48 * 0.95)


@pytest.mark.parametrize("picker", AVERAGING_PICKERS)
def test_short_equal_requests_keep_their_slots_after_a_burst(picker: str) -> None:
    """A limit derived from averages alone falls after a burst and stays low.

    The average is up to 5 s old and contains a burst that is over, and only few of the dispatcher's requests
    are certain to have been there for all that time.
    """
    assert share_kept_after_burst(**AVERAGING_PICKERS[picker]) >= 0.97
    assert share_kept_after_burst(**AVERAGING_PICKERS[picker], shows_running=False) < 0.97, (
        "without the running requests, the limit stays low"
    )


DESIGN_TABLE = {
    # policy: (utilization, overshoot) at each age
    PolicyName.LITERAL: ((0.92, 0.1), (0.63, 0.1), (0.27, 0.1)),
    PolicyName.CAP: ((0.68, 0.0), (0.71, 0.2), (0.66, 0.7)),
    PolicyName.MULTIPLIER: ((1.05, 64), (1.02, 113), (0.85, 113)),
    PolicyName.POINT: ((0.99, 0.9), (0.98, 2.4), (0.94, 4.0)),
}


@for_each_age(0, 1, 2)
def test_alternative_policies_match_the_design_table(age: tuple[float, float], promised: int) -> None:
    rows = run_policies(list(DESIGN_TABLE), **WHOLE_TRACE, **COUNTING_PICKER, scrape_s=age[0], lag_s=age[1])
    for name, expected in DESIGN_TABLE.items():
        utilization, overshoot = expected[promised]
        assert rows[name].utilization == pytest.approx(utilization, abs=0.025), name
        assert rows[name].overshoot_mean == pytest.approx(overshoot, abs=0.3, rel=0.12), name


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_dispatcher_is_as_good_with_other_seeds(seed: int) -> None:
    row = run_dispatcher(seed=seed, jitter=0.2)
    assert row.utilization is not None
    assert row.utilization >= 0.97
    assert extra_overshoot(row) <= 1.5


@pytest.mark.slow
def test_larger_reserve_makes_realtime_faster_at_the_cost_of_batch_tokens() -> None:
    full = run_policies([PolicyName.ALL_KNOWING, PolicyName.DISPATCHER, PolicyName.NONE])
    large_reserve = run_dispatcher(reserve=0.3)
    assert full[PolicyName.NONE].latency_p50_ratio == 1.0
    for row in (full[PolicyName.ALL_KNOWING], full[PolicyName.DISPATCHER]):
        assert row.latency_p50_ratio == pytest.approx(1.4, abs=0.05)
    assert large_reserve.latency_p50_ratio is not None
    assert large_reserve.latency_p50_ratio < 1.33
    assert large_reserve.batch_tokens_per_s < full[PolicyName.DISPATCHER].batch_tokens_per_s


@pytest.mark.slow
def test_capacity_of_a_pool_a_third_of_its_configured_size_is_learned() -> None:
    wrong = {"slots": 192, "true_slots": 64, "queue_limit": 8}
    row = run_dispatcher(**wrong)
    assert row.refused > 0, "the world must refuse for this to show anything"
    assert row.refused_per_1000_settled <= 25
    assert row.utilization is not None
    assert row.utilization >= 0.85
    alternatives = run_policies([PolicyName.POINT, PolicyName.CAP], **wrong)
    for other in alternatives.values():
        assert other.refused_per_1000_settled > 10 * row.refused_per_1000_settled
        assert other.realtime_refused > 3 * row.realtime_refused


@pytest.mark.slow
@pytest.mark.parametrize("age", [pytest.param(READING_AGES[0], marks=pytest.mark.long), READING_AGES[1]])
def test_queue_limit_costs_a_correctly_configured_pool_little(age: tuple[float, float]) -> None:
    scrape_s, lag_s = age
    free = run_dispatcher(scrape_s=scrape_s, lag_s=lag_s)
    limited = run_dispatcher(scrape_s=scrape_s, lag_s=lag_s, queue_limit=8)
    assert free.utilization is not None
    assert limited.utilization is not None
    assert limited.utilization >= free.utilization - 0.03


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("age", "utilization"),
    [
        pytest.param(READING_AGES[0], 0.97, marks=pytest.mark.long),
        (READING_AGES[1], 0.9),
        (READING_AGES[2], 0.55),
    ],
)
def test_refusals_in_realtime_bursts_do_not_lower_the_learned_capacity(
    seed: int, age: tuple[float, float], utilization: float
) -> None:
    """The pool has its configured capacity, so a refusal in a burst does not lower the limit later."""
    scenario = Scenario(scrape_s=age[0], lag_s=age[1], queue_limit=8, detector=Detector.CONCURRENCY)
    row = compare_policies(scenario, made_up_traffic.make_burst_trace(seed), [PolicyName.DISPATCHER]).rows[0]
    assert row.realtime_refused > 100, "the world must refuse for this to show anything"
    assert row.utilization is not None
    assert row.utilization >= utilization


@pytest.mark.slow
def test_pool_a_third_of_its_configured_size_refuses_few_realtime_requests() -> None:
    row = run_dispatcher(**WHOLE_TRACE, slots=192, true_slots=64, queue_limit=8)
    assert row.realtime_refused <= 40, "a limit on batch requests alone refuses hundreds"
    assert row.refused_per_1000_settled <= 2.4
    assert row.utilization is not None
    assert 0.97 <= row.utilization <= 1.06


def mean_limit_change(comparison: Comparison) -> float:
    """Return the mean change of the limit from one sample to the next."""
    limits = [sample.limit for sample in comparison.runs[0].samples if sample.limit is not None]
    return sum(abs(later - earlier) for earlier, later in pairwise(limits)) / len(limits)


@pytest.mark.slow
@pytest.mark.parametrize("flush_s", [pytest.param(0.0, marks=pytest.mark.long), 5.0])
def test_default_detector_with_requests_signal_does_not_oscillate(flush_s: float) -> None:
    counting = compare_dispatcher(Scenario(**HALF_TRACE, detector=Detector.CONCURRENCY))
    both = compare_dispatcher(Scenario(**HALF_TRACE, flush_s=flush_s, pods=4))
    row = both.rows[0]
    assert row.utilization is not None
    assert row.utilization >= 0.90
    assert row.overshoot_mean <= 4
    assert mean_limit_change(both) <= 1.5 * mean_limit_change(counting)


@pytest.mark.slow
def test_default_detector_alone_cannot_keep_the_reserve() -> None:
    row = run_dispatcher(detector=Detector.UTILIZATION, signals=Signals.SATURATION, pods=4)
    assert row.overshoot_mean > 10


def test_same_seed_gives_the_same_json() -> None:
    def run(seed: int) -> str:
        comparison = compare_policies(
            Scenario(seed=seed, jitter=0.3, seconds=60), load_bundled_trace(), list(PolicyName)
        )
        return json.dumps(comparison.as_json())

    assert run(7) == run(7)
    assert run(7) != run(8)
