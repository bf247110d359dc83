"""Counting tokens protects realtime requests where the KV memory is scarce, and changes nothing elsewhere."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

import pytest

from dispatcher.lab.simulation.experiment import PolicyName, run_scenario
from dispatcher.lab.simulation.metrics import Detector
from dispatcher.lab.simulation.scenario import Scenario
from dispatcher.lab.simulation.world import BatchMix, BatchProfile
from dispatcher.lab.standin.made_up_traffic import make_burst_trace, make_step_trace
from dispatcher.lab.standin.trace import BUNDLED, Trace, load_trace

SLOTS, SECONDS = 64, 900.0
LONG = Scenario(
    slots=SLOTS,
    seconds=SECONDS,
    kv_tokens=96_000,
    batch=BatchProfile(tokens=2_000, spread=0.0, context=6_000),
)
SHORT = replace(LONG, seconds=300.0, batch=BatchProfile(tokens=145, spread=0.0, context=500))
MIXED = replace(LONG, batch=replace(LONG.batch, mix=BatchMix(0.5, 500, 145)))
STEPS = [(0.0, 10), (150.0, 30), (300.0, 50), (450.0, 20), (600.0, 40), (750.0, 10)]


@dataclass(frozen=True, slots=True)
class Outcome:
    mean_wait_s: float
    tokens: int


def run(scenario: Scenario, trace: Trace) -> Outcome:
    result = run_scenario(scenario, trace, PolicyName.DISPATCHER)
    return Outcome(statistics.mean(result.waits), result.tokens)


def compare(scenario: Scenario, trace: Trace) -> tuple[Outcome, Outcome]:
    """Return the outcomes without and with counted tokens."""
    return run(scenario, trace), run(replace(scenario, counts_tokens=True), trace)


@pytest.fixture(scope="module")
def recorded() -> Trace:
    return load_trace(BUNDLED, slots=SLOTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "least_gain", "least_tokens"),
    [
        ({"detector": Detector.SERVERS}, 30, 0.97),
        ({}, 30, 0.88),
        ({"replicas": 3, "seed": 1}, 25, 0.88),
    ],
)
def test_realtime_waits_a_small_part_as_long(
    recorded: Trace, changes: dict[str, object], least_gain: float, least_tokens: float
) -> None:
    requests, tokens = compare(replace(LONG, **changes), recorded)  # type: ignore[arg-type]
    assert requests.mean_wait_s > least_gain * tokens.mean_wait_s
    assert tokens.tokens > least_tokens * requests.tokens


@pytest.mark.slow
def test_realtime_waits_a_small_part_as_long_for_a_mix_of_long_and_short_requests(recorded: Trace) -> None:
    requests, tokens = compare(replace(MIXED, detector=Detector.SERVERS), recorded)
    assert requests.mean_wait_s > 10 * tokens.mean_wait_s
    assert tokens.tokens > 0.97 * requests.tokens


@pytest.mark.slow
@pytest.mark.parametrize("batch", [LONG.batch, MIXED.batch])
@pytest.mark.parametrize("detector", [Detector.SERVERS, Detector.UTILIZATION])
def test_realtime_hardly_waits_for_slices(recorded: Trace, detector: Detector, batch: BatchProfile) -> None:
    requests, tokens = compare(replace(LONG, slice_tokens=250, detector=detector, batch=batch), recorded)
    assert tokens.mean_wait_s < 0.1
    assert tokens.tokens > 0.95 * requests.tokens


@pytest.mark.slow
def test_more_is_done_and_nobody_waits_where_realtime_grows_in_steps() -> None:
    requests, tokens = compare(LONG, make_step_trace(STEPS, slots=SLOTS))
    assert tokens.mean_wait_s < 0.1 < requests.mean_wait_s
    assert tokens.tokens > requests.tokens


@pytest.mark.slow
def test_bursts_cost_less() -> None:
    requests, tokens = compare(LONG, make_burst_trace(0))
    assert requests.mean_wait_s > 2.5 * tokens.mean_wait_s


@pytest.mark.slow
def test_short_requests_are_not_affected(recorded: Trace) -> None:
    requests, tokens = compare(SHORT, recorded)
    assert tokens.mean_wait_s <= 1.01 * requests.mean_wait_s
    assert tokens.tokens >= 0.99 * requests.tokens


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "most_wait_s", "least_tokens"), [(0.7, 1.5, 340), (1.4, 0.2, 280)])
def test_wrong_estimates_cost_some_room_or_some_wait(
    recorded: Trace, factor: float, most_wait_s: float, least_tokens: float
) -> None:
    outcome = run(replace(LONG, counts_tokens=True, token_factor=factor), recorded)
    assert outcome.mean_wait_s < most_wait_s
    assert outcome.tokens > least_tokens * SECONDS


def test_dispatchers_that_start_and_die_go_on_counting(recorded: Trace) -> None:
    """A claim that follows its return without end would stop the virtual clock."""
    scenario = replace(
        LONG, counts_tokens=True, seconds=300.0, replicas=3, deaths=(60.0, 61.0, 120.0, 121.0, 122.0, 200.0)
    )
    outcome = run(scenario, recorded)
    assert outcome.mean_wait_s < 3.0
    assert outcome.tokens > 200 * 300
