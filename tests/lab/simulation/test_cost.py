"""Cost of a simulated request in function calls, which unlike seconds are the same on every machine."""

from __future__ import annotations

import cProfile
import pstats

from dispatcher.features import import_modules
from dispatcher.lab.simulation.experiment import PolicyName, run_scenario
from dispatcher.lab.simulation.scenario import TIME_STEP_S, Scenario
from dispatcher.lab.standin import made_up_traffic
from dispatcher.lab.standin.trace import BUNDLED, load_trace

MAX_CALLS = 645
"""Maximum without time steps. Three hours at 400 slots are 400,000 batch and as many realtime requests."""

MAX_CALLS_WITH_TIME_STEPS = 407
"""Maximum with time steps, where several requests share an iteration of the loop."""

MAX_CALLS_WITH_JOBS = 213
"""Maximum with several requests per job, which is the default for three hours at 400 slots."""


def count_calls_per_request(step_s: float, requests_per_job: int = 1) -> float:
    traffic = made_up_traffic.overlay_copies(load_trace(BUNDLED, slots=400), 8)
    import_modules("hooks")  # what is imported once is no cost of a request
    profile = cProfile.Profile()
    with profile:
        run = run_scenario(
            Scenario(slots=400, seconds=60.0, time_step_s=step_s, requests_per_job=requests_per_job),
            traffic,
            PolicyName.DISPATCHER,
        )
    calls = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    assert run.sent > 2_000
    return float(calls / run.sent)


def test_batch_request_stays_within_its_number_of_calls() -> None:
    calls_each = count_calls_per_request(0.0)
    assert calls_each <= MAX_CALLS


def test_batch_request_with_time_steps_takes_fewer_calls() -> None:
    calls_each = count_calls_per_request(TIME_STEP_S)
    assert calls_each <= MAX_CALLS_WITH_TIME_STEPS


def test_batch_request_in_a_job_takes_its_share_of_the_calls() -> None:
    calls_each = count_calls_per_request(TIME_STEP_S, Scenario(slots=400).default_requests_per_job)
    assert calls_each <= MAX_CALLS_WITH_JOBS
