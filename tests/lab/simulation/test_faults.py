"""Faults in the simulated world: the gate closes without readings and opens again when they return."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from dispatcher.lab.simulation.experiment import PolicyName, Run, TimelineSample, run_scenario
from dispatcher.lab.simulation.metrics import Detector, Exporter, Signals
from dispatcher.lab.simulation.scenario import Scenario
from dispatcher.lab.simulation.world import PoolState
from dispatcher.lab.standin.trace import BUNDLED, Trace, load_trace
from dispatcher.limit.budget import Policy, Reading, Reason, Signal
from dispatcher.signals.readings import PollReadings


@cache
def load_bundled_trace() -> Trace:
    return load_trace(BUNDLED, slots=64)


def run_with_faults(name: PolicyName = PolicyName.DISPATCHER, **scenario: Any) -> Run:
    return run_scenario(
        Scenario(**{"seconds": 300, **scenario}), load_bundled_trace(), name, sample_interval_s=0.25
    )


def select_samples(run: Run, start: float, end: float) -> Sequence[TimelineSample]:
    return [sample for sample in run.samples if start <= sample.state.at <= end]


def mean_load(samples: Sequence[TimelineSample]) -> float:
    return sum(m.state.running + m.state.waiting for m in samples) / len(samples)


def test_metrics_gap_closes_the_gate_and_its_end_opens_it() -> None:
    run = run_with_faults(gaps=[(100, 160)])
    assert {m.closed_reason for m in select_samples(run, 101.5, 159.5)} == {Reason.UNREADABLE}
    assert {m.closed_reason for m in select_samples(run, 162, 300)} == {None}
    assert all(m.state.batch_running == 0 for m in select_samples(run, 125, 159.5)), (
        "no new requests were sent"
    )
    assert mean_load(select_samples(run, 170, 300)) > 50


def test_gateway_outage_costs_few_requests_and_ends_within_seconds() -> None:
    run = run_with_faults(outages=[(100, 160)])
    assert {m.closed_reason for m in select_samples(run, 101, 159.5)} == {Reason.GATEWAY_UNREACHABLE}
    assert mean_load(select_samples(run, 170, 300)) > 50
    # The 64 requests in flight at the start of the outage, then 60 probes one second apart, and a few more.
    assert run.cut <= 64
    assert run.unreachable <= 64 + 66
    first_open = next(m.state.at for m in run.samples if m.state.at > 160 and m.closed_reason is None)
    assert first_open <= 163


def test_smaller_pool_lowers_the_limit_at_once_and_larger_pool_raises_it_soon() -> None:
    run = run_with_faults(pods=4, pods_at=[(100, 2), (200, 4)])
    assert max(m.limit or 0 for m in select_samples(run, 100.5, 199.5)) <= int(32 * 0.95)
    later = select_samples(run, 210, 300)
    assert mean_load(later) > 50
    assert {m.state.slots for m in later} == {64}


def test_capacity_that_is_configured_too_small_is_found_if_it_is_to_be_learned() -> None:
    learning, right = (
        run_with_faults(seconds=150, slots=slots, true_slots=64, learns_capacity=slots == 32)
        for slots in (32, 64)
    )
    assert mean_load(select_samples(learning, 60, 150)) > 0.97 * mean_load(select_samples(right, 60, 150))


def test_pool_without_pods_closes_the_gate_and_recovers() -> None:
    run = run_with_faults(pods=2, pods_at=[(100, 0), (130, 2)])
    assert {m.closed_reason for m in select_samples(run, 101.5, 129.5)} == {Reason.NO_ENDPOINTS}
    assert mean_load(select_samples(run, 160, 300)) > 50


@pytest.mark.slow
@pytest.mark.parametrize(("scrape_s", "lag_s"), [pytest.param(1.0, 0.05, marks=pytest.mark.long), (5.0, 1.0)])
def test_killed_replicas_do_not_raise_the_overshoot(scrape_s: float, lag_s: float) -> None:
    calm = run_with_faults(replicas=3, scrape_s=scrape_s, lag_s=lag_s)
    with_deaths = run_with_faults(
        replicas=3, scrape_s=scrape_s, lag_s=lag_s, deaths=[60, 61, 62, 120, 150, 180, 181, 240]
    )
    assert with_deaths.overshoot_worst <= calm.overshoot_worst + 3
    assert with_deaths.tokens > 0.8 * calm.tokens


@pytest.mark.slow
def test_replicas_share_one_limit() -> None:
    one, three = run_with_faults(), run_with_faults(replicas=3)
    assert three.overshoot_mean <= one.overshoot_mean + 0.75
    assert three.tokens == pytest.approx(one.tokens, rel=0.03)


def test_stale_metrics_close_the_gate() -> None:
    run = run_with_faults(scrape_s=40.0, max_age_s=10.0)
    assert {m.closed_reason for m in select_samples(run, 51, 79)} == {Reason.STALE}


def test_all_knowing_policy_fills_an_idle_pool_up_to_the_reserve() -> None:
    idle = Trace("idle", [], 50.0)
    run = run_scenario(Scenario(seconds=50), idle, PolicyName.ALL_KNOWING, sample_interval_s=0.25)
    assert {m.state.running for m in run.samples[1:]} <= {58, 59, 60}
    assert run.overshoot_worst == 0


def make_exporter(**changes: Any) -> Exporter:
    return Exporter(
        **{"signals": Signals.SATURATION, "policy": Policy(per_endpoint=16), "picker_per_pod": 16, **changes}
    )


def make_state(running: int, waiting: int, *, waiting_in_pods: int = 0, at: float = 10.0) -> PoolState:
    return PoolState(
        at,
        64,
        running,
        0,
        0,
        waiting,
        waiting_in_pods=waiting_in_pods,
        pods=4,
        last_read_waiting_in_pods=waiting_in_pods,
    )


def get_only_reading(poll_readings: PollReadings) -> Reading:
    (reading,) = poll_readings.readings
    return reading


def test_concurrency_detector_shows_a_request_count() -> None:
    exporter = make_exporter()
    for number, running in enumerate((8, 16, 24, 40, 48, 56)):
        exporter.scrape_pages(make_state(running, 0, at=2.0 * number))
    reading = get_only_reading(exporter.scrape_pages(make_state(32, 8)))
    assert (reading.f_sys, reading.f_epp, reading.max_sys, reading.is_request_count) == (0.5, 0.125, 64, True)


def test_utilization_detector_reads_near_zero_with_every_slot_taken() -> None:
    detector = make_exporter(detector=Detector.UTILIZATION)
    full = get_only_reading(detector.scrape_pages(make_state(64, 0)))
    assert full.f_sys == pytest.approx(0.125)
    assert not full.is_request_count
    waiting = get_only_reading(detector.scrape_pages(make_state(64, 20, waiting_in_pods=20)))
    assert (waiting.f_sys, waiting.f_epp) == (1.0, 0.0)
    assert get_only_reading(
        detector.scrape_pages(make_state(64, 26, waiting_in_pods=20))
    ).f_epp == pytest.approx(6 / 64), "the EPP queues the rest"


def test_averages_have_the_time_window_of_the_last_flush() -> None:
    averages = make_exporter(
        signals=Signals.REQUESTS, detector=Detector.NONE, flush_s=5.0, shows_running=False
    )
    averages.flush_averages(make_state(16, 4, at=5.0))
    reading = get_only_reading(averages.scrape_pages(make_state(60, 0, at=9.0)))
    assert (reading.opened_at, reading.closed_at) == (4.0, 9.0)
    assert reading.f_sys == pytest.approx(20 / 64)


def test_running_requests_of_the_picker_are_current_despite_old_averages() -> None:
    averages = make_exporter(signals=Signals.REQUESTS, detector=Detector.NONE, flush_s=5.0)
    averages.flush_averages(make_state(16, 4, at=5.0))
    reading = get_only_reading(averages.scrape_pages(make_state(60, 0, at=9.0)))
    assert (reading.opened_at, reading.closed_at) == (9.0, 9.0)
    assert reading.f_sys == pytest.approx(60 / 64)


def test_reading_scales_by_the_configured_capacity_even_if_wrong() -> None:
    wrong = make_exporter(policy=Policy(per_endpoint=48))
    for number, running in enumerate((8, 16, 24, 40, 48, 56)):
        wrong.scrape_pages(make_state(running, 0, at=2.0 * number))
    reading = get_only_reading(wrong.scrape_pages(make_state(64, 8)))
    assert reading.max_sys == 192
    assert reading.f_sys == pytest.approx(64 / 192)
    assert reading.f_epp == pytest.approx(8 / 192)


def test_auto_signals_follow_the_learned_meaning_of_saturation() -> None:
    """Both signals are read until the saturation is proven to be a count; without flow control only one."""
    auto = make_exporter(signals=Signals.AUTO)
    assert auto.scrape_pages(make_state(8, 0, at=0.0)).signals == (Signal.SATURATION, Signal.REQUESTS)
    for number, running in enumerate((8, 16, 24, 40, 48, 56)):
        auto.scrape_pages(make_state(running, 0, at=2.0 * number))
    assert auto.scrape_pages(make_state(32, 0, at=12.0)).signals == (Signal.SATURATION,)
    assert make_exporter(signals=Signals.AUTO, detector=Detector.NONE).scrape_pages(
        make_state(8, 0)
    ).signals == (Signal.REQUESTS,)


def test_all_waiting_requests_are_in_the_pods_without_flow_control() -> None:
    """This includes pods that start realtime first, where the simulated world has separate queues."""
    reading = get_only_reading(
        make_exporter(signals=Signals.AUTO, detector=Detector.NONE).scrape_pages(make_state(64, 16))
    )
    assert (reading.f_sys, reading.f_epp) == (80 / 64, 0)


def test_picker_replicas_share_the_requests() -> None:
    shared = make_exporter(signals=Signals.BOTH, pickers=2)
    first, second = (shared.build_view(make_state(33, 5, waiting_in_pods=2), number) for number in range(2))
    assert (first.in_flight, second.in_flight) == (18, 17)
    assert (first.queued, second.queued) == (2, 1)
    assert first.ready == second.ready == 4, "each picker knows the whole pool"
