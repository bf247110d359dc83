"""Simulations with time steps and several requests per job agree with those without."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import inf

import pytest

from dispatcher.lab.simulation.experiment import PolicyName, Run, run_scenario
from dispatcher.lab.simulation.report import percentile
from dispatcher.lab.simulation.scenario import TIME_STEP_S, Scenario
from dispatcher.lab.simulation.world import Arrival, BatchProfile, Job, World
from dispatcher.lab.standin import made_up_traffic
from dispatcher.lab.standin.model import compute_slowdown
from dispatcher.lab.standin.trace import BUNDLED, load_trace
from dispatcher.limit.utilization import WorkState


@dataclass(frozen=True)
class SimulatedPool:
    """Pool whose realtime traffic is several copies of the bundled trace."""

    slots: int
    copies: int
    seconds: float
    """Simulated time."""
    pods: int = 1


@cache
def run_policy(name: PolicyName, pool: SimulatedPool, step_s: float, requests_per_job: int = 1) -> Run:
    traffic = made_up_traffic.overlay_copies(load_trace(BUNDLED, slots=pool.slots), pool.copies)
    scenario = Scenario(
        slots=pool.slots,
        seconds=pool.seconds,
        time_step_s=step_s,
        requests_per_job=requests_per_job,
        pods=pool.pods,
    )
    return run_scenario(scenario, traffic, name)


def relative_tokens(pool: SimulatedPool, step_s: float, requests_per_job: int = 1) -> float:
    """Return the tokens of the dispatcher relative to the all-knowing policy without time steps."""
    dispatcher = run_policy(PolicyName.DISPATCHER, pool, step_s, requests_per_job)
    best = run_policy(PolicyName.ALL_KNOWING, pool, 0.0)
    return dispatcher.tokens / best.tokens


def get_latency(finished_run: Run, quantile: float) -> float:
    found = percentile(finished_run.latencies, quantile)
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "pool",
    [
        SimulatedPool(64, 1, 450.0),
        pytest.param(SimulatedPool(64, 1, 900.0), marks=pytest.mark.long),
        pytest.param(SimulatedPool(400, 8, 900.0), marks=pytest.mark.long),
    ],
    ids=lambda pool: f"{pool.slots}-{pool.copies}-{pool.seconds:g}s-{pool.pods}",
)
def test_time_steps_do_not_change_the_results(pool: SimulatedPool) -> None:
    exact, stepped = (run_policy(PolicyName.DISPATCHER, pool, step_s) for step_s in (0.0, TIME_STEP_S))
    assert stepped.sent != exact.sent, "the time step must have an effect"
    assert relative_tokens(pool, TIME_STEP_S) == pytest.approx(relative_tokens(pool, 0.0), abs=0.01)
    for quantile in (0.5, 0.99):
        assert get_latency(stepped, quantile) == pytest.approx(get_latency(exact, quantile), rel=0.02)
    arrivals_per_step = exact.sent / pool.seconds * TIME_STEP_S
    assert stepped.overshoot_worst <= exact.overshoot_worst + arrivals_per_step
    assert stepped.overshoot_mean <= exact.overshoot_mean + arrivals_per_step


@pytest.mark.slow
@pytest.mark.parametrize(
    "pool",
    [
        SimulatedPool(400, 8, 450.0),
        pytest.param(SimulatedPool(400, 8, 900.0), marks=pytest.mark.long),
        pytest.param(SimulatedPool(800, 12, 900.0, pods=4), marks=pytest.mark.long),
    ],
    ids=lambda pool: f"{pool.slots}-{pool.copies}-{pool.seconds:g}s-{pool.pods}",
)
def test_requests_per_job_do_not_change_the_results(pool: SimulatedPool) -> None:
    requests_per_job = Scenario(slots=pool.slots, pods=pool.pods).default_requests_per_job
    assert requests_per_job > 1, "jobs must have several requests"
    fine, coarse = (
        run_policy(PolicyName.DISPATCHER, pool, TIME_STEP_S, each) for each in (1, requests_per_job)
    )
    assert coarse.answered % requests_per_job == 0
    mean_in_flight = fine.meters[0].used_unit_s[WorkState.WAITING] / pool.seconds
    assert relative_tokens(pool, TIME_STEP_S) - relative_tokens(
        pool, TIME_STEP_S, requests_per_job
    ) == pytest.approx(0.0, abs=max(0.01, requests_per_job / mean_in_flight))
    for quantile in (0.5, 0.99):
        assert get_latency(coarse, quantile) == pytest.approx(get_latency(fine, quantile), rel=0.02)
    assert abs(coarse.overshoot_worst - fine.overshoot_worst) <= 2 * requests_per_job
    assert coarse.overshoot_mean <= fine.overshoot_mean + requests_per_job


def test_time_steps_change_nothing_without_batch_requests() -> None:
    exact, stepped = (
        run_policy(PolicyName.NONE, SimulatedPool(64, 1, 900.0), step_s, requests_per_job)
        for step_s, requests_per_job in ((0.0, 1), (TIME_STEP_S, 4))
    )
    assert (stepped.latencies, stepped.waits) == (exact.latencies, exact.waits)


def test_batch_requests_end_in_the_middle_of_a_step_and_realtime_at_its_own_time() -> None:
    ended: dict[Job, float] = {}
    world = World(100, time_step_s=0.5, on_finish=lambda job: ended.update({job: job.finished_at}))
    jobs = [Job(work, 1, is_batch=True) for work in (0.01, 0.2, 1.3, 1.6, 1.9, 2.1)]
    realtime = Job(1.3, 1, is_batch=False)
    for job in (realtime, *jobs):
        assert world.advance_and_admit(job, 0.0) is Arrival.ACCEPTED
    world.advance(10.0)
    assert [ended[job] for job in jobs] == pytest.approx([0.25, 0.25, 1.25, 1.75, 1.75, 2.25])
    assert ended[realtime] == pytest.approx(1.3)


def test_request_that_replaces_one_ended_in_the_same_step_is_as_slow() -> None:
    """Otherwise a pool would be faster if more of its requests end together."""
    world = World(10, time_step_s=0.5)
    for running in range(1, 11):
        world.advance_and_admit(Job(1.7 / compute_slowdown(running, 10), 1, is_batch=True), 0.0)
    ends: list[float] = []
    world.on_start = lambda job, ends_at: ends.append(ends_at)
    world.advance(1.8)
    assert world.observe_pool().running == 0
    world.advance_and_admit(Job(4.0, 1, is_batch=True), 1.8)
    world.advance_and_admit(Job(4.0, 1, is_batch=True), 2.3)
    assert ends == pytest.approx([1.8 + 4.0 * 2, 2.3 + 4.0 * compute_slowdown(2, 10)], abs=0.25)


def test_job_counts_as_all_its_requests_in_every_state() -> None:
    states: list[tuple[int, int, int]] = []

    def record_state() -> None:
        state = world.observe_pool()
        states.append((state.batch_running, state.batch_waiting, world.in_system))

    world = World(10, outages=[(8.0, 9.0)])
    jobs = [Job(1.0, 7, is_batch=True, request_count=4) for _ in range(4)]
    for job in jobs:
        assert world.advance_and_admit(job, 0.0) is Arrival.ACCEPTED
        record_state()
    assert states == [(4, 0, 4), (8, 0, 8), (12, 0, 12), (12, 4, 16)], (
        "the third job starts although it has only two slots"
    )
    states.clear()
    world.remove_job(jobs[3], 0.1)
    record_state()
    world.remove_job(jobs[0], 0.1)
    record_state()
    world.advance(5.0)
    record_state()
    assert states == [(12, 0, 12), (8, 0, 8), (0, 0, 0)]
    for job in (Job(9.0, 7, is_batch=True, request_count=4) for _ in range(5)):
        world.advance_and_admit(job, 6.0)
    world.advance(8.5)
    assert world.in_system == world.observe_pool().running == world.observe_pool().waiting == 0


def test_removed_pod_passes_on_whole_jobs() -> None:
    world = World(8, pods=2, pods_at=[(1.0, 1)], get_admission_limit=lambda slots, pods: inf)
    for _ in range(6):
        world.advance_and_admit(Job(10.0, 1, is_batch=True, request_count=4), 0.0)
    before = world.observe_pool()
    world.advance(1.0)
    after = world.observe_pool()
    assert (before.batch_running, before.batch_waiting) == (8, 16)
    assert (after.batch_running, after.batch_waiting, after.waiting_in_pods) == (8, 16, 16)
    world.advance(100.0)
    assert world.in_system == 0


def test_default_requests_per_job_are_few_compared_to_a_pod() -> None:
    assert [Scenario(slots=slots).default_requests_per_job for slots in (1, 64, 199, 200, 400, 4000)] == [
        1,
        1,
        1,
        2,
        4,
        40,
    ]
    assert Scenario(slots=4000, pods=40).default_requests_per_job == 1
    assert Scenario(slots=4000, true_slots=300).default_requests_per_job == 3


def test_effective_time_step_divides_the_scrape_interval_and_the_request() -> None:
    assert Scenario().effective_time_step_s == 0.0
    assert Scenario(time_step_s=0.2).effective_time_step_s == pytest.approx(0.2)
    assert Scenario(time_step_s=0.15).effective_time_step_s == pytest.approx(1 / 7)
    assert Scenario(time_step_s=0.2, scrape_s=0.5).effective_time_step_s == pytest.approx(0.5 / 3)
    assert Scenario(time_step_s=5.0, scrape_s=0.1).effective_time_step_s == pytest.approx(0.1)
    assert Scenario(time_step_s=0.2, batch=BatchProfile(seconds=0.4)).effective_time_step_s == pytest.approx(
        0.05
    )
