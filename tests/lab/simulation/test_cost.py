"""What a simulated request costs, in calls: unlike seconds they are the same on every machine."""

from __future__ import annotations

import cProfile
import pstats

from dispatcher.lab.simulation.experiment import PolicyName, run_scenario
from dispatcher.lab.simulation.scenario import TIME_STEP_S, Scenario
from dispatcher.lab.standin import made_up_traffic
from dispatcher.lab.standin.trace import BUNDLED, load_trace

CALLS_MOST = 646
"""Three hours at 400 slots are 400,000 batch requests and as many of realtime."""

STEPPED_MOST = 425
"""The same in steps, in which turns are shared."""

GRAINED_MOST = 209
"""The same in grains, as three hours at 400 slots are played."""


def calls_per_request(step_s: float, grain: int = 1) -> float:
    traffic = made_up_traffic.overlay_copies(load_trace(BUNDLED, slots=400), 8)
    profile = cProfile.Profile()
    with profile:
        run = run_scenario(
            Scenario(slots=400, seconds=60.0, time_step_s=step_s, requests_per_job=grain),
            traffic,
            PolicyName.DISPATCHER,
        )
    calls = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    assert run.sent > 2_000
    return float(calls / run.sent)


def test_batch_request_and_what_happens_meanwhile_take_no_more_calls_than_they_did() -> None:
    found = calls_per_request(0.0)
    assert found <= CALLS_MOST


def test_batch_request_in_steps_takes_fewer_calls() -> None:
    found = calls_per_request(TIME_STEP_S)
    assert found <= STEPPED_MOST


def test_batch_request_in_a_grain_takes_its_share_of_the_calls() -> None:
    found = calls_per_request(TIME_STEP_S, Scenario(slots=400).default_requests_per_job)
    assert found <= GRAINED_MOST
