"""Live counts of the picker protect realtime requests better than averages, and batch work loses nothing."""

from __future__ import annotations

from dataclasses import replace

from dispatcher.lab.simulation.experiment import PolicyName, Run, run_scenario
from dispatcher.lab.simulation.metrics import Detector
from dispatcher.lab.simulation.scenario import Scenario
from dispatcher.lab.standin.trace import BUNDLED, load_trace

SLOTS = 64
PICKER = Scenario(slots=SLOTS, seconds=200.0, detector=Detector.NONE, shows_running=False)


def find_p99(run: Run) -> float:
    return sorted(run.waits)[round(0.99 * (len(run.waits) - 1))]


def test_live_counts_halve_the_overshoot_and_the_waits_of_averages() -> None:
    trace = load_trace(BUNDLED, slots=SLOTS)
    averages = run_scenario(PICKER, trace, PolicyName.DISPATCHER)
    live = run_scenario(replace(PICKER, shows_in_flight=True), trace, PolicyName.DISPATCHER)
    assert live.overshoot_mean < 0.5 * averages.overshoot_mean
    assert find_p99(live) < 0.5 * find_p99(averages)
    assert live.tokens > averages.tokens
