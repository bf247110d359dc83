"""The simulated pool: slots, order, slowdown, refusals, and that no request gets lost."""

from __future__ import annotations

from math import inf, isnan
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.lab.simulation.world import Arrival, Job, World
from dispatcher.lab.standin.model import compute_slowdown, compute_work_s


def make_job(seconds: float = 1.0, *, batch: bool = True) -> Job:
    return Job(seconds, 1, is_batch=batch)


def test_work_grows_with_context_and_generated_tokens() -> None:
    assert compute_work_s(0, 0) == pytest.approx(0.03)
    assert compute_work_s(500, 121) == pytest.approx(0.03 + 0.125 + 1.452)


def test_full_pool_is_half_as_fast_as_an_empty_one() -> None:
    assert compute_slowdown(1, 64) == 1.0
    assert compute_slowdown(64, 64) == 2.0
    assert compute_slowdown(1, 1) == 1.0


def test_slowdown_of_a_request_depends_on_running_requests_at_its_start() -> None:
    world = World(3)
    first, second = make_job(), make_job()
    world.advance_and_admit(first, 0.0)
    world.advance_and_admit(second, 0.0)
    world.advance(10.0)
    assert (first.finished_at, second.finished_at) == (1.0, 1.5)


def test_waiting_realtime_starts_before_earlier_batch() -> None:
    world = World(1)
    running, batch, realtime = make_job(), make_job(), make_job(batch=False)
    for arriving, at in ((running, 0.0), (batch, 0.1), (realtime, 0.2)):
        assert world.advance_and_admit(arriving, at) is Arrival.ACCEPTED
    world.advance(5.0)
    assert (realtime.started_at, batch.started_at) == (1.0, 2.0)


def test_full_queue_refuses_every_request() -> None:
    world = World(1, queue_limit=1, realtime=[(0.5, make_job(batch=False))])
    assert [world.advance_and_admit(make_job(), 0.1) for _ in range(3)] == [
        Arrival.ACCEPTED,
        Arrival.ACCEPTED,
        Arrival.REFUSED,
    ]
    world.advance(0.6)
    assert world.realtime_refused == 1


def test_outage_drops_running_requests_and_rejects_new_ones() -> None:
    dropped: list[Job] = []
    world = World(2, outages=[(1.0, 2.0)], on_dropped=dropped.append, realtime=[(1.5, make_job(batch=False))])
    running_jobs = [make_job(5.0), make_job(5.0), make_job(5.0)]
    for job in running_jobs:
        world.advance_and_admit(job, 0.5)
    assert world.advance_and_admit(make_job(), 1.1) is Arrival.UNREACHABLE
    assert dropped == running_jobs
    assert world.in_system == 0
    assert world.advance_and_admit(make_job(), 2.1) is Arrival.ACCEPTED
    assert world.realtime_unreachable == 1


def test_requests_on_a_removed_pod_run_to_their_end() -> None:
    pod_counts: list[int] = []
    world = World(4, pods=2, pods_at=[(0.5, 1), (3.0, 2)], on_pod_count=pod_counts.append)
    for _ in range(5):
        world.advance_and_admit(make_job(10.0), 0.0)
    world.advance(1.0)
    assert (world.observe_pool().running, world.observe_pool().waiting, world.slots) == (4, 1, 2)
    world.advance(3.5)
    assert world.observe_pool().waiting == 0
    assert pod_counts == [1, 2]


def test_smaller_capacity_lets_running_requests_finish_and_is_not_reported() -> None:
    pod_counts: list[int] = []
    world = World(4, slots_at=[(0.5, 3)], on_pod_count=pod_counts.append)
    for _ in range(5):
        world.advance_and_admit(make_job(10.0), 0.0)
    world.advance(1.0)
    assert (world.observe_pool().running, world.observe_pool().waiting, world.slots) == (4, 1, 3)
    assert pod_counts == []


def test_requests_waiting_in_the_pods_start_in_order_of_arrival() -> None:
    world = World(1, get_admission_limit=lambda slots, pods: inf)
    running, batch, realtime = make_job(), make_job(), make_job(batch=False)
    for arriving, at in ((running, 0.0), (batch, 0.1), (realtime, 0.2)):
        assert world.advance_and_admit(arriving, at) is Arrival.ACCEPTED
    assert world.observe_pool().waiting_in_pods == 2
    world.advance(5.0)
    assert (batch.started_at, realtime.started_at) == (1.0, 2.0)


def test_picker_admits_up_to_its_limit_and_queues_the_others() -> None:
    """An admitted batch request starts first; among the waiting ones realtime does."""
    world = World(1, get_admission_limit=lambda slots, pods: slots + 1, queue_limit=2)
    running, admitted, batch, realtime = make_job(), make_job(), make_job(), make_job(batch=False)
    for arriving, at in ((running, 0.0), (admitted, 0.1), (batch, 0.2), (realtime, 0.3)):
        assert world.advance_and_admit(arriving, at) is Arrival.ACCEPTED
    assert world.advance_and_admit(make_job(), 0.4) is Arrival.REFUSED
    assert (world.observe_pool().waiting, world.observe_pool().waiting_in_pods) == (3, 1)
    world.advance(5.0)
    assert [job.started_at for job in (admitted, realtime, batch)] == [1.0, 2.0, 3.0]


def test_pods_fill_evenly_and_slow_only_their_own_requests() -> None:
    world = World(4, pods=2)
    jobs = [make_job() for _ in range(4)]
    for job in jobs:
        world.advance_and_admit(job, 0.0)
    world.advance(10.0)
    assert [job.finished_at for job in jobs] == [1.0, 1.0, 2.0, 2.0]


def test_request_waiting_in_a_removed_pod_waits_in_another() -> None:
    world = World(2, pods=2, pods_at=[(0.5, 1)], get_admission_limit=lambda slots, pods: inf)
    jobs = [make_job() for _ in range(4)]
    for job in jobs:
        world.advance_and_admit(job, 0.0)
    world.advance(10.0)
    assert [job.started_at for job in jobs] == [0.0, 0.0, 1.0, 2.0]


def test_new_slot_takes_a_waiting_request_at_once() -> None:
    world = World(1, slots_at=[(0.5, 2)])
    world.advance_and_admit(make_job(9.0), 0.0)
    waiting = make_job(9.0)
    world.advance_and_admit(waiting, 0.1)
    world.advance(1.0)
    assert waiting.started_at == 0.5


def test_removed_request_frees_its_slot_for_the_next() -> None:
    world = World(1)
    leaving, next_one, third = make_job(9.0), make_job(1.0), make_job(1.0)
    for job in (leaving, next_one, third):
        world.advance_and_admit(job, 0.0)
    world.remove_job(third, 1.0)
    world.remove_job(leaving, 2.0)
    world.remove_job(leaving, 2.5)
    world.advance(20.0)
    assert (next_one.started_at, next_one.finished_at) == (2.0, 3.0)
    assert isnan(third.started_at)
    assert world.in_system == 0


def test_overshoot_is_integrated_over_time() -> None:
    world = World(10, reserve=0.2)
    for _ in range(10):
        world.advance_and_admit(Job(1.0, 1, is_batch=True), 0.0)
    world.advance(1.0)  # The first request ends at 1.0, and until then two requests exceed the limit of 8.
    assert world.overshoot.request_seconds == pytest.approx(2.0)
    assert world.overshoot.worst == pytest.approx(2.0)


ARRIVALS = st.lists(
    st.tuples(
        st.floats(0, 20, allow_nan=False),
        st.floats(0.01, 5, allow_nan=False),
        st.booleans(),
        st.one_of(st.none(), st.floats(0, 5, allow_nan=False)),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(
    arrivals=ARRIVALS,
    slots=st.integers(1, 8),
    queue_limit=st.one_of(st.none(), st.integers(0, 5)),
    outage=st.one_of(st.none(), st.floats(0, 20, allow_nan=False)),
    slots_change=st.one_of(st.none(), st.tuples(st.floats(0, 20, allow_nan=False), st.integers(0, 8))),
    pods=st.integers(1, 3),
    pods_change=st.one_of(st.none(), st.tuples(st.floats(0, 20, allow_nan=False), st.integers(0, 3))),
    extra_admissions=st.one_of(st.integers(0, 4), st.just(inf)),
    evicts=st.booleans(),
    kv_tokens=st.one_of(st.none(), st.integers(1, 600)),
)
def test_every_request_is_in_exactly_one_state_and_free_slots_are_used(
    arrivals: list[tuple[float, float, bool, float | None]],
    slots: int,
    queue_limit: int | None,
    outage: float | None,
    slots_change: tuple[float, int] | None,
    pods: int,
    pods_change: tuple[float, int] | None,
    extra_admissions: float,
    evicts: bool,
    kv_tokens: int | None,
) -> None:
    finished: list[Job] = []
    dropped: list[Job] = []
    evicted: list[Job] = []
    world = World(
        slots,
        queue_limit=queue_limit,
        outages=[] if outage is None else [(outage, outage + 2)],
        slots_at=[] if slots_change is None else [slots_change],
        pods=pods,
        pods_at=[] if pods_change is None else [pods_change],
        get_admission_limit=lambda slots, pods: slots + extra_admissions,
        evicts=evicts,
        kv_tokens=kv_tokens,
        on_finish=finished.append,
        on_dropped=dropped.append,
        on_evicted=evicted.append,
    )
    accepted: list[Job] = []
    left: list[Job] = []
    steps: list[tuple[float, int, Job, bool]] = []
    for i, (at, seconds, batch, leaves_after_s) in enumerate(arrivals):
        job = make_job(seconds, batch=batch)
        job.context_tokens, job.tokens = i % 7 * 20, i % 5 * 30
        steps.append((at, 2 * i, job, True))
        if leaves_after_s is not None:
            steps.append((at + leaves_after_s, 2 * i + 1, job, False))
    for at, _, job, arrives in sorted(steps, key=lambda step: step[:2]):
        if arrives:
            if world.advance_and_admit(job, at) is Arrival.ACCEPTED:
                accepted.append(job)
        else:
            was_in_pool = job in accepted and isnan(job.finished_at)
            world.remove_job(job, at)
            if was_in_pool and job.is_gone and job not in dropped and job not in evicted:
                left.append(job)
        state = world.observe_pool()
        ended = len(finished) + len(dropped) + len(evicted) + len(left)
        assert len(accepted) == ended + state.running + state.waiting
        if kv_tokens is None and state.waiting:
            # With several pods one may have a queue while a new one has none.
            assert pods > 1 or pods_change or state.running >= state.slots, (
                "no request may wait while a slot is free"
            )
        if slots_change is None and pods_change is None:
            assert state.running <= slots
        # A request that does not fit even alone may use more.
        if kv_tokens is not None and pods == 1 and pods_change is None and state.running > 1:
            assert state.kv_usage is not None
            assert state.kv_usage <= 1 + 1e-9
    for job in finished:
        assert job.arrived_at <= job.started_at <= job.finished_at
    assert all(job.is_batch and not isnan(job.started_at) for job in evicted)
    world.advance(1e6)
    if world.slots:
        assert world.in_system == 0


def run_with_eviction(
    realtime: list[tuple[float, Job]], batch: list[tuple[float, Job]], **options: Any
) -> tuple[World, list[Job]]:
    """Run an evicting world until 20 s. Return it with the evicted jobs."""
    evicted: list[Job] = []
    world = World(realtime=realtime, evicts=True, on_evicted=evicted.append, **options)
    for at, job in batch:
        world.advance_and_admit(job, at)
    world.advance(20.0)
    return world, evicted


def test_realtime_without_free_slot_evicts_the_newest_batch_request() -> None:
    first, second, realtime = make_job(5.0), make_job(5.0), make_job(batch=False)
    world, evicted = run_with_eviction([(1.0, realtime)], [(0.0, first), (0.5, second)], slots=2)
    assert evicted == [second]
    assert (second.finished_at, second.is_gone) == (1.0, True)
    assert (realtime.started_at, realtime.is_gone) == (1.0, False)
    assert first.finished_at == 5.0
    assert (world.in_system, world.observe_pool().running) == (0, 0)


def test_realtime_takes_the_slot_of_an_evicted_request_before_waiting_batch_requests() -> None:
    running, waiting, realtime = make_job(5.0), make_job(5.0), make_job(batch=False)
    _, evicted = run_with_eviction(
        [(1.0, realtime)],
        [(0.0, running), (0.5, waiting)],
        slots=1,
        get_admission_limit=lambda slots, pods: inf,
    )
    assert evicted == [running]
    assert realtime.started_at == 1.0
    assert waiting.started_at == realtime.finished_at


def test_realtime_that_the_picker_holds_back_evicts_in_some_pod() -> None:
    running = [make_job(5.0) for _ in range(3)]
    realtime = make_job(batch=False)
    _, evicted = run_with_eviction([(1.0, realtime)], [(0.0, job) for job in running], slots=3, pods=3)
    assert len(evicted) == 1
    assert realtime.started_at == 1.0


def test_realtime_waits_where_only_realtime_runs() -> None:
    jobs = [make_job(batch=False) for _ in range(3)]
    _, evicted = run_with_eviction([(0.0, job) for job in jobs], [], slots=2)
    assert not evicted
    assert jobs[2].started_at == jobs[0].finished_at


def test_nothing_is_evicted_for_batch_requests_or_while_a_slot_is_free() -> None:
    batch = [make_job(5.0) for _ in range(3)]
    _, evicted = run_with_eviction([(12.0, make_job(batch=False))], [(0.0, job) for job in batch], slots=2)
    assert not evicted
    assert all(job.finished_at == job.ends_at for job in batch)


def test_nothing_is_evicted_from_a_pod_that_has_fewer_slots_than_running_requests() -> None:
    batch = [make_job(5.0) for _ in range(3)]
    _, evicted = run_with_eviction(
        [(2.0, make_job(batch=False))], [(0.0, job) for job in batch], slots=3, slots_at=[(1.0, 2)]
    )
    assert not evicted


def test_requests_of_an_outage_are_not_evicted_later() -> None:
    batch = make_job(5.0)
    world, evicted = run_with_eviction(
        [(2.5, make_job(batch=False)), (2.6, make_job(batch=False))],
        [(0.0, batch)],
        slots=1,
        outages=[(1.0, 2.0)],
    )
    assert not evicted
    assert world.in_system == 0


# ── KV memory ────────────────────────────────────────────────────────────────────────────────────────────


def make_kv_job(context: int, tokens: int) -> Job:
    return Job(compute_work_s(context, tokens), tokens, is_batch=True, context_tokens=context)


def test_request_waits_for_kv_memory_although_a_slot_is_free() -> None:
    world = World(8, kv_tokens=1_000)
    first, second, third = make_kv_job(500, 100), make_kv_job(500, 100), make_kv_job(10, 1)
    for job in (first, second, third):
        world.advance_and_admit(job, 0.0)
    state = world.observe_pool()
    # The third one would fit, but the second one came before it.
    assert (state.batch_running, state.batch_waiting, state.kv_usage) == (1, 2, 0.5)
    world.advance(20.0)
    assert second.started_at == third.started_at == first.finished_at
    assert world.preempted == 0


@pytest.mark.parametrize(("context", "starts"), [(490, True), (491, False)])
def test_start_of_a_request_leaves_one_percent_of_the_kv_memory_free(context: int, *, starts: bool) -> None:
    world = World(8, kv_tokens=1_000)
    world.advance_and_admit(make_kv_job(500, 100), 0.0)
    world.advance_and_admit(make_kv_job(context, 100), 0.0)
    assert world.observe_pool().batch_running == 1 + starts


def test_newest_request_is_preempted_when_the_kv_memory_is_full_and_computed_again() -> None:
    world = World(8, kv_tokens=1_000)
    first, second = make_kv_job(400, 300), make_kv_job(400, 300)
    world.advance_and_admit(first, 0.0)
    world.advance_and_admit(second, 0.0)
    world.advance(first.work_s * 0.5)
    assert world.preempted == 1
    assert (world.observe_pool().batch_running, world.observe_pool().batch_waiting) == (1, 1)
    generated = second.recomputed_tokens
    assert 90 <= generated <= 110  # 200 tokens were free for both
    world.advance(30.0)
    assert world.preempted == 1
    assert first.finished_at == pytest.approx(first.work_s)
    assert second.started_at == first.finished_at
    assert second.finished_at - second.started_at == pytest.approx(
        compute_work_s(400 + generated, 300 - generated)
    )
    assert 0 < second.ran_s < first.work_s


def test_request_larger_than_the_kv_memory_runs_alone() -> None:
    world = World(8, kv_tokens=1_000)
    large, small = make_kv_job(2_000, 10), make_kv_job(10, 10)
    world.advance_and_admit(large, 0.0)
    world.advance_and_admit(small, 0.0)
    world.advance(10.0)
    assert small.started_at == large.finished_at
    assert world.preempted == 0


def test_slice_holds_the_tokens_of_the_slices_before_it() -> None:
    world = World(8, kv_tokens=1_000)
    job = make_kv_job(300, 100)
    job.earlier_tokens = 200
    world.advance_and_admit(job, 0.0)
    assert world.observe_pool().kv_usage == pytest.approx(0.5)
    world.advance(job.work_s / 2)
    assert world.observe_pool().kv_usage == pytest.approx(0.55)


def test_request_preempted_in_a_removed_pod_goes_on_in_another() -> None:
    world = World(8, pods=2, kv_tokens=2_000, pods_at=[(0.1, 1)])
    jobs = [make_kv_job(300, 400) for _ in range(4)]
    for job in jobs:
        world.advance_and_admit(job, 0.0)
    world.advance(60.0)
    assert world.preempted >= 2
    assert not any(isnan(job.finished_at) for job in jobs)
