"""Batch requests in slices in the simulated world: their cost, what is counted, and what they bring."""

from __future__ import annotations

import random
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from dispatcher.lab.simulation import sliced_requests
from dispatcher.lab.simulation.experiment import PolicyName, Run, run_scenario
from dispatcher.lab.simulation.report import build_row
from dispatcher.lab.simulation.scenario import Scenario
from dispatcher.lab.simulation.world import BatchMix, BatchProfile
from dispatcher.lab.standin import made_up_traffic
from dispatcher.lab.standin.model import compute_work_s
from dispatcher.requests.request import Request
from tests.lab.simulation.slices_comparison import (
    HOLDBACKS,
    PAGE,
    PROCESSES,
    SUMMARY,
    SUMMARY_PAGE,
    TABLE,
    TRAFFIC,
    WAYS,
    Figures,
    compare_ways,
    render_summary,
    run_way,
)

IDLE = made_up_traffic.make_idle_trace(0)
EQUAL = BatchProfile(1000.0, 0.0)
SLICED: dict[str, Any] = {"slots": 8, "batch": EQUAL, "slice_tokens": 250, "seconds": 120.0, "reserve": 0.0}
"""Equal requests of 1,000 tokens on a small pool, in slices."""


def run_idle(policy: PolicyName = PolicyName.DISPATCHER, **scenario: Any) -> Run:
    return run_scenario(Scenario(**SLICED | scenario), IDLE, policy)


# ── costs ────────────────────────────────────────────────────────────────────────────────────────────────


def test_only_the_first_slice_processes_the_context() -> None:
    scenario = Scenario(slice_overhead_s=0.04)
    first, second = scenario.make_call(500, 600, 0, 250), scenario.make_call(500, 600, 250, 250)
    assert first.work_s == compute_work_s(500, 250)
    assert second.work_s == pytest.approx(0.04 + 250 * 0.012)


def test_last_slice_generates_what_is_left() -> None:
    scenario = Scenario()
    slices = [scenario.make_call(500, 600, generated, 250) for generated in (0, 250, 500)]
    assert [(each.earlier_tokens, each.tokens, each.is_last) for each in slices] == [
        (0, 250, False),
        (250, 250, False),
        (500, 100, True),
    ]


def test_prompt_of_a_slice_says_what_was_generated_before() -> None:
    scenario = Scenario()
    first = b'{"prompt":"500:600","max_tokens":250}'
    assert sliced_requests.parse_payload(first) == (500, 600, 0, 250)
    later = b'{"prompt":"500:600%b","max_tokens":100}' % (b"." * 500)
    assert scenario.make_call(*sliced_requests.parse_payload(later)).is_last


@pytest.mark.parametrize(("until", "tokens"), [(0.0, 0), (1.0, 0), (1.2, 0), (2.29, 50), (99.0, 100)])
def test_stream_has_the_tokens_that_were_generated_until_then(until: float, tokens: int) -> None:
    """The slice takes 0.47 s to its first token and 1.2 s for the others."""
    job = Scenario(slice_overhead_s=0.47).make_call(500, 600, 500, 100)
    job.started_at, job.ends_at = 1.0, 1.0 + 1.67 * 1.2  # 1.2 times as slow as in an empty pool
    if until > job.ends_at:
        job.finished_at = job.ends_at
    (*events,) = sliced_requests.build_events(Request("r-1", 1, b""), job, until)
    assert sum(int(re.findall(rb'"completion_tokens":(\d+)', event)[0]) for event in events) == tokens


def test_slice_that_has_not_started_has_no_events() -> None:
    job = Scenario().make_call(500, 600, 0, 100)
    assert not sliced_requests.build_events(Request("r-1", 1, b""), job, 5.0)


def test_requests_of_a_mix_have_their_own_contexts_whole_and_in_slices() -> None:
    batch = BatchProfile(400.0, 0.0, context=6_000, mix=BatchMix(0.25, 500, 300))
    draws = random.Random(1)
    sizes = [batch.draw_size(draws) for _ in range(1_000)]
    assert set(sizes) == {(6_000, 400), (500, 300)}
    assert 200 < sizes.count((500, 300)) < 300
    assert batch.mean_s == compute_work_s(500, 300)
    whole, sliced = (run_idle(batch=batch, slice_tokens=tokens, seconds=300.0) for tokens in (None, 250))
    mean_s = 0.75 * compute_work_s(6_000, 400) + 0.25 * compute_work_s(500, 300)
    for run in (whole, sliced):
        # All slots are taken, so each request takes twice as long as in an empty pool.
        assert run.tokens / 300.0 == pytest.approx(8 * 375 / (2 * mean_s), rel=0.1)


@pytest.mark.parametrize("policy", [PolicyName.DISPATCHER, PolicyName.ALL_KNOWING])
def test_contexts_of_a_mix_take_time_under_each_policy(policy: PolicyName) -> None:
    long = BatchProfile(400.0, 0.0, context=6_000, mix=BatchMix(1.0, 500, 400))
    short = BatchProfile(400.0, 0.0)
    for tokens in (None, 250):
        mixed, equal = (
            run_idle(policy, batch=batch, slice_tokens=tokens, seconds=30.0) for batch in (long, short)
        )
        assert mixed.tokens == equal.tokens


# ── what is counted ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", [PolicyName.DISPATCHER, PolicyName.ALL_KNOWING, PolicyName.POINT])
def test_requests_in_slices_are_answered_once_with_all_their_tokens(policy: PolicyName) -> None:
    run = run_idle(policy, seconds=600.0)
    assert run.answered > 100
    assert run.tokens == 1000 * run.answered
    # The last slice is short.
    assert 4 < run.sent / run.answered < 5


@pytest.mark.parametrize("policy", [PolicyName.DISPATCHER, PolicyName.ALL_KNOWING])
def test_slices_of_started_requests_go_first(policy: PolicyName) -> None:
    """Otherwise many requests would begin, and few end."""
    run = run_idle(policy, seconds=60.0)
    whole = run_idle(policy, seconds=60.0, slice_tokens=None)
    assert run.answered >= whole.answered - 8


def test_whole_is_the_dispatcher_without_slices() -> None:
    whole, dispatcher = run_idle(PolicyName.WHOLE, revokes_slices=True), run_idle(slice_tokens=None)
    assert whole == replace(dispatcher, policy=PolicyName.WHOLE, meters=whole.meters)


def test_requests_shorter_than_a_slice_are_sent_whole() -> None:
    sliced = run_idle(batch=BatchProfile(100.0, 0.0))
    assert (sliced.sent - sliced.answered) <= 8
    assert sliced.tokens == 100 * sliced.answered


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"time_step_s": 0.2}, {"time_step_s": 0.2, "requests_per_job": 2}])
def test_time_steps_and_jobs_change_the_throughput_of_slices_little(changes: dict[str, Any]) -> None:
    exact, coarse = run_idle(slots=40, seconds=300.0), run_idle(slots=40, seconds=300.0, **changes)
    assert coarse.tokens == pytest.approx(exact.tokens, rel=0.03)


def test_other_policies_send_each_slice_by_itself() -> None:
    assert run_idle(PolicyName.POINT, requests_per_job=2).tokens == run_idle(PolicyName.POINT).tokens


# ── eviction and revocation ──────────────────────────────────────────────────────────────────────────────


def run_steps(**scenario: Any) -> Run:
    """Run with realtime requests that take most of the pool in turns."""
    trace = made_up_traffic.make_step_trace([(at, at // 30 % 2 * 6) for at in range(0, 300, 30)], slots=8)
    return run_scenario(Scenario(**SLICED | {"seconds": 300.0} | scenario), trace, PolicyName.DISPATCHER)


def test_evicted_request_loses_its_slice_at_most() -> None:
    whole, sliced = run_steps(evicts=True, slice_tokens=None), run_steps(evicts=True)
    assert whole.evicted > 10
    assert sliced.evicted > 10
    # 1.10 to 1.15, as the delays after evictions are drawn.
    assert sliced.tokens > 1.05 * whole.tokens
    assert sum(sliced.waits) < 0.1 * sum(run_steps().waits)


@pytest.mark.parametrize("policy", [PolicyName.ALL_KNOWING, PolicyName.POINT])
def test_other_policies_send_evicted_requests_again(policy: PolicyName) -> None:
    trace = made_up_traffic.make_step_trace([(0, 0), (10, 6)], slots=8)
    run = run_scenario(
        Scenario(**SLICED | {"evicts": True, "slice_tokens": None, "seconds": 90.0}), trace, policy
    )
    assert run.evicted >= 5
    assert run.tokens == 1000 * run.answered


def test_revoked_slices_keep_their_tokens_and_make_room_at_once() -> None:
    running, revoked = run_steps(), run_steps(revokes_slices=True)
    assert sum(revoked.waits) < 0.3 * sum(running.waits)
    assert revoked.tokens > 0.95 * running.tokens
    assert revoked.tokens == 1000 * revoked.answered


@pytest.mark.parametrize("slots", [80, 128, 256])
def test_revocation_does_not_hide_that_the_configured_capacity_is_too_large(slots: int) -> None:
    trace = made_up_traffic.make_step_trace([(at, 20 + at // 5 % 2 * 6) for at in range(0, 120, 5)], slots=64)
    scenario = Scenario(
        slots=slots,
        true_slots=64,
        batch=BatchProfile(2000.0),
        slice_tokens=250,
        revokes_slices=True,
        seconds=120.0,
    )
    run = run_scenario(scenario, trace, PolicyName.DISPATCHER, sample_interval_s=1.0)
    capacities = [sample.capacity for sample in run.samples[60:]]
    assert capacities == [pytest.approx(64, rel=0.1)] * len(capacities)


# ── what slices bring ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_slices_shorten_waits_more_than_a_reserve_that_costs_as_many_tokens() -> None:
    idle = run_way("chat", PolicyName.NONE)
    whole, sliced, revoked, holdback = (
        build_row(run_way("chat", **fields), None, idle)
        for fields in (WAYS["whole"][1], WAYS["slices"][1], WAYS["revoked slices"][1], {"reserve": 0.3})
    )
    assert whole.wait_mean_less_none_s is not None
    assert sliced.wait_mean_less_none_s is not None
    assert revoked.wait_mean_less_none_s is not None
    assert whole.wait_mean_less_none_s > 20 * sliced.wait_mean_less_none_s
    assert sliced.wait_mean_less_none_s > 2 * revoked.wait_mean_less_none_s
    for row in (sliced, revoked):
        assert row.batch_tokens_per_s > 0.87 * whole.batch_tokens_per_s
    assert holdback.wait_p99_less_none_s is not None
    assert sliced.wait_p99_less_none_s is not None
    assert holdback.wait_p99_less_none_s >= sliced.wait_p99_less_none_s
    assert sliced.batch_tokens_per_s > 1.15 * holdback.batch_tokens_per_s


def read_page() -> dict[tuple[str, str], Figures]:
    """Return the figures of the table on the page."""
    (table,) = TABLE.findall(PAGE.read_text())
    figures = {}
    for row in table.splitlines()[2:]:
        traffic, way, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        # Without the ratios, which may be missing.
        reserve, tokens, wait, p99 = (float(re.sub(r"[, s]", "", cells[i])) for i in (0, 1, 3, 5))
        figures[traffic, way] = {"reserve": reserve, "tokens_per_s": tokens, "wait_s": wait, "p99_s": p99}
    return figures


def check_bounds(traffic: str, ways: dict[str, Figures]) -> None:
    """Check what slices bring at least."""
    whole, slices, revoked = ways["whole"], ways["slices"], ways["revoked slices"]
    # In bursts, no slot comes free soon enough by itself.
    for way in (revoked,) if traffic == "bursts" else (slices, revoked):
        assert whole["wait_s"] >= 15 * way["wait_s"]
        assert whole["p99_s"] >= 7 * way["p99_s"]
    assert slices["tokens_per_s"] >= 0.89 * whole["tokens_per_s"]
    assert revoked["tokens_per_s"] >= 0.87 * whole["tokens_per_s"]
    for holdback, other in HOLDBACKS.items():
        assert ways[holdback]["p99_s"] <= ways[other]["p99_s"] + 0.005
        assert ways[other]["tokens_per_s"] >= 1.2 * ways[holdback]["tokens_per_s"]
    evicted, both = ways["evicted"], ways["revoked and evicted slices"]
    for way in (slices, revoked, ways["evicted slices"], both):
        assert way["tokens_per_s"] >= 1.1 * evicted["tokens_per_s"]
    # In the simulation, an eviction makes room within no time.
    assert both["wait_s"] <= evicted["wait_s"] + 0.001
    assert both["p99_s"] <= evicted["p99_s"] + 0.001


@pytest.mark.parametrize("traffic", TRAFFIC)
def test_figures_on_the_page_keep_the_bounds(traffic: str) -> None:
    check_bounds(traffic, {way: figures for (name, way), figures in read_page().items() if name == traffic})


def test_summary_shows_figures_of_the_table() -> None:
    ways = {way: figures for (traffic, way), figures in read_page().items() if traffic == "chat"}
    assert SUMMARY.findall(SUMMARY_PAGE.read_text()) == [render_summary(ways)]


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("traffic", TRAFFIC)
def test_page_shows_the_figures_of_runs(traffic: str) -> None:
    with ProcessPoolExecutor(PROCESSES) as pool:
        ways = compare_ways(traffic, pool)
    check_bounds(traffic, ways)
    for way, figures in ways.items():
        shown = read_page()[traffic, way]
        assert figures == pytest.approx(shown, rel=0.1, abs=0.1), (
            f"{way}: run python -m tests.lab.simulation.slices_comparison"
        )
