"""What goes wrong in the simulated world, and that the law behaves: closed when blind, back when it sees."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from dispatcher.core.limit.budget import Policy, Reading, Reason, Signal
from dispatcher.lab.simulation.experiment import PolicyName, Run, TimelineSample
from dispatcher.lab.simulation.experiment import run_scenario as live
from dispatcher.lab.simulation.metrics import Detector, Exporter, Signals
from dispatcher.lab.simulation.scenario import Scenario
from dispatcher.lab.simulation.world import PoolState
from dispatcher.lab.standin.trace import BUNDLED, Trace, load_trace
from dispatcher.signals.readings import PollReadings


@cache
def trace() -> Trace:
    return load_trace(BUNDLED, slots=64)


def play(name: PolicyName = PolicyName.DISPATCHER, **setting: Any) -> Run:
    return live(Scenario(**{"seconds": 300, **setting}), trace(), name, sample_interval_s=0.25)


def between(run: Run, start: float, end: float) -> Sequence[TimelineSample]:
    return [moment for moment in run.samples if start <= moment.state.at <= end]


def mean_load(moments: Sequence[TimelineSample]) -> float:
    return sum(m.state.running + m.state.waiting for m in moments) / len(moments)


def test_metrics_gap_closes_the_gate_and_its_end_opens_it() -> None:
    run = play(gaps=[(100, 160)])
    assert {m.closed_reason for m in between(run, 101.5, 159.5)} == {Reason.UNREADABLE}
    assert {m.closed_reason for m in between(run, 162, 300)} == {None}
    assert all(m.state.batch_running == 0 for m in between(run, 125, 159.5)), "nothing new was sent"
    assert mean_load(between(run, 170, 300)) > 50


def test_gateway_outage_costs_few_requests_and_ends_within_seconds() -> None:
    run = play(outages=[(100, 160)])
    assert {m.closed_reason for m in between(run, 101, 159.5)} == {Reason.GATEWAY_UNREACHABLE}
    assert mean_load(between(run, 170, 300)) > 50
    # All that was out when it began, and then probes, a second apart: 64 and 60 and a few at the start.
    assert run.cut <= 64
    assert run.unreachable <= 64 + 66
    first_open = next(m.state.at for m in run.samples if m.state.at > 160 and m.closed_reason is None)
    assert first_open <= 163


def test_smaller_pool_counts_at_once_and_a_larger_one_soon() -> None:
    run = play(pods=4, pods_at=[(100, 2), (200, 4)])
    assert max(m.limit or 0 for m in between(run, 100.5, 199.5)) <= int(32 * 0.95)
    later = between(run, 210, 300)
    assert mean_load(later) > 50
    assert {m.state.slots for m in later} == {64}


def test_pool_without_pods_is_closed_and_recovers() -> None:
    run = play(pods=2, pods_at=[(100, 0), (130, 2)])
    assert {m.closed_reason for m in between(run, 101.5, 129.5)} == {Reason.NO_ENDPOINTS}
    assert mean_load(between(run, 160, 300)) > 50


@pytest.mark.parametrize(("scrape_s", "lag_s"), [pytest.param(1.0, 0.05, marks=pytest.mark.long), (5.0, 1.0)])
def test_dying_replicas_do_not_lift_the_peak(scrape_s: float, lag_s: float) -> None:
    calm = play(replicas=3, scrape_s=scrape_s, lag_s=lag_s)
    deadly = play(replicas=3, scrape_s=scrape_s, lag_s=lag_s, deaths=[60, 61, 62, 120, 150, 180, 181, 240])
    assert deadly.overshoot_worst <= calm.overshoot_worst + 3
    assert deadly.tokens > 0.8 * calm.tokens


def test_replicas_share_one_limit() -> None:
    one, three = play(), play(replicas=3)
    assert three.overshoot_mean <= one.overshoot_mean + 0.75
    assert three.tokens == pytest.approx(one.tokens, rel=0.03)


def test_stale_metrics_close_the_gate() -> None:
    run = play(scrape_s=40.0, max_age_s=10.0)
    assert {m.closed_reason for m in between(run, 51, 79)} == {Reason.STALE}


def test_all_knowing_fills_an_idle_pool_to_the_reserve_and_no_further() -> None:
    idle = Trace("nobody", [], 50.0)
    run = live(Scenario(seconds=50), idle, PolicyName.ALL_KNOWING, sample_interval_s=0.25)
    assert {m.state.running for m in run.samples[1:]} <= {58, 59, 60}
    assert run.overshoot_worst == 0


def exporter(**changes: Any) -> Exporter:
    return Exporter(
        **{"signals": Signals.SATURATION, "policy": Policy(per_endpoint=16), "picker_per_pod": 16, **changes}
    )


def state(running: int, waiting: int, *, inside: int = 0, at: float = 10.0) -> PoolState:
    return PoolState(
        at, 64, running, 0, 0, waiting, waiting_in_pods=inside, pods=4, last_read_waiting_in_pods=inside
    )


def only(found: PollReadings) -> Reading:
    (reading,) = found.readings
    return reading


def test_concurrency_detector_counts() -> None:
    counting = exporter()
    for number, running in enumerate((8, 16, 24, 40, 48, 56)):
        counting.scrape_pages(state(running, 0, at=2.0 * number))
    reading = only(counting.scrape_pages(state(32, 8)))
    assert (reading.f_sys, reading.f_epp, reading.max_sys, reading.is_request_count) == (0.5, 0.125, 64, True)


def test_utilization_detector_reads_near_zero_with_every_slot_taken() -> None:
    detector = exporter(detector=Detector.UTILIZATION)
    full = only(detector.scrape_pages(state(64, 0)))
    assert full.f_sys == pytest.approx(0.125)
    assert not full.is_request_count
    waiting = only(detector.scrape_pages(state(64, 20, inside=20)))
    assert (waiting.f_sys, waiting.f_epp) == (1.0, 0.0)
    assert only(detector.scrape_pages(state(64, 26, inside=20))).f_epp == pytest.approx(6 / 64), (
        "the EPP holds back the rest"
    )


def test_flushed_averages_are_of_the_last_flush_and_say_their_window() -> None:
    averages = exporter(signals=Signals.REQUESTS, detector=Detector.NONE, flush_s=5.0, shows_running=False)
    averages.flush_averages(state(16, 4, at=5.0))
    reading = only(averages.scrape_pages(state(60, 0, at=9.0)))
    assert (reading.opened_at, reading.closed_at) == (4.0, 9.0)
    assert reading.f_sys == pytest.approx(20 / 64)


def test_what_the_picker_counts_itself_is_of_now_whatever_the_averages_say() -> None:
    averages = exporter(signals=Signals.REQUESTS, detector=Detector.NONE, flush_s=5.0)
    averages.flush_averages(state(16, 4, at=5.0))
    reading = only(averages.scrape_pages(state(60, 0, at=9.0)))
    assert (reading.opened_at, reading.closed_at) == (9.0, 9.0)
    assert reading.f_sys == pytest.approx(60 / 64)


def test_wrong_configuration_shows_in_the_capacity() -> None:
    wrong = exporter(policy=Policy(per_endpoint=48))
    for number, running in enumerate((8, 16, 24, 40, 48, 56)):
        wrong.scrape_pages(state(running, 0, at=2.0 * number))
    reading = only(wrong.scrape_pages(state(64, 8)))
    assert reading.max_sys == 192
    assert reading.f_sys == pytest.approx(64 / 192)
    assert reading.f_epp == pytest.approx(8 / 192)


def test_auto_follows_what_the_pages_teach() -> None:
    """Both signals until the saturation is proven to be a count; without flow control there is but one."""
    auto = exporter(signals=Signals.AUTO)
    assert auto.scrape_pages(state(8, 0, at=0.0)).signals == (Signal.SATURATION, Signal.REQUESTS)
    for number, running in enumerate((8, 16, 24, 40, 48, 56)):
        auto.scrape_pages(state(running, 0, at=2.0 * number))
    assert auto.scrape_pages(state(32, 0, at=12.0)).signals == (Signal.SATURATION,)
    assert exporter(signals=Signals.AUTO, detector=Detector.NONE).scrape_pages(state(8, 0)).signals == (
        Signal.REQUESTS,
    )


def test_without_flow_control_whoever_waits_does_so_in_the_pods() -> None:
    """Also where the pods let realtime go first, so that in the world they wait apart."""
    reading = only(exporter(signals=Signals.AUTO, detector=Detector.NONE).scrape_pages(state(64, 16)))
    assert (reading.f_sys, reading.f_epp) == (80 / 64, 0)


def test_replicas_of_the_picker_share_the_requests() -> None:
    shared = exporter(signals=Signals.BOTH, pickers=2)
    first, second = (shared.build_view(state(33, 5, inside=2), number) for number in range(2))
    assert (first.in_flight, second.in_flight) == (18, 17)
    assert (first.queued, second.queued) == (2, 1)
    assert first.ready == second.ready == 4, "each knows the whole pool"
