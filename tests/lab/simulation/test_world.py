"""The simulated pool: slots, order, slowdown, refusals, and that nobody gets lost in it."""

from __future__ import annotations

from math import inf, isnan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.lab.simulation.world import Arrival, Job, World
from dispatcher.lab.standin.model import compute_slowdown, compute_work_s


def job(seconds: float = 1.0, *, batch: bool = True) -> Job:
    return Job(seconds, 1, is_batch=batch)


def test_work_grows_with_context_and_generated_tokens() -> None:
    assert compute_work_s(0, 0) == pytest.approx(0.03)
    assert compute_work_s(500, 121) == pytest.approx(0.03 + 0.125 + 1.452)


def test_full_pool_is_half_as_fast_as_an_empty_one() -> None:
    assert compute_slowdown(1, 64) == 1.0
    assert compute_slowdown(64, 64) == 2.0
    assert compute_slowdown(1, 1) == 1.0


def test_request_is_slowed_by_what_runs_when_it_starts_and_no_more() -> None:
    world = World(3)
    first, second = job(), job()
    world.advance_and_admit(first, 0.0)
    world.advance_and_admit(second, 0.0)
    world.advance(10.0)
    assert (first.finished_at, second.finished_at) == (1.0, 1.5)


def test_realtime_that_waits_starts_before_batch_that_came_earlier() -> None:
    world = World(1)
    running, batch, realtime = job(), job(), job(batch=False)
    for arriving, at in ((running, 0.0), (batch, 0.1), (realtime, 0.2)):
        assert world.advance_and_admit(arriving, at) is Arrival.ACCEPTED
    world.advance(5.0)
    assert (realtime.started_at, batch.started_at) == (1.0, 2.0)


def test_full_queue_refuses_whoever_comes() -> None:
    world = World(1, queue_limit=1, realtime=[(0.5, job(batch=False))])
    assert [world.advance_and_admit(job(), 0.1) for _ in range(3)] == [
        Arrival.ACCEPTED,
        Arrival.ACCEPTED,
        Arrival.REFUSED,
    ]
    world.advance(0.6)
    assert world.realtime_refused == 1


def test_outage_cuts_what_runs_and_turns_away_what_comes() -> None:
    gone: list[Job] = []
    world = World(2, outages=[(1.0, 2.0)], on_dropped=gone.append, realtime=[(1.5, job(batch=False))])
    cut = [job(5.0), job(5.0), job(5.0)]
    for one in cut:
        world.advance_and_admit(one, 0.5)
    assert world.advance_and_admit(job(), 1.1) is Arrival.UNREACHABLE
    assert gone == cut
    assert world.in_system == 0
    assert world.advance_and_admit(job(), 2.1) is Arrival.ACCEPTED
    assert world.realtime_unreachable == 1


def test_requests_on_a_leaving_pod_run_to_their_end() -> None:
    told: list[int] = []
    world = World(4, pods=2, pods_at=[(0.5, 1), (3.0, 2)], on_pod_count=told.append)
    for _ in range(5):
        world.advance_and_admit(job(10.0), 0.0)
    world.advance(1.0)
    assert (world.observe_pool().running, world.observe_pool().waiting, world.slots) == (4, 1, 2)
    world.advance(3.5)
    assert world.observe_pool().waiting == 0
    assert told == [1, 2]


def test_capacity_that_shrinks_lets_what_runs_run_on_and_tells_nobody() -> None:
    told: list[int] = []
    world = World(4, slots_at=[(0.5, 3)], on_pod_count=told.append)
    for _ in range(5):
        world.advance_and_admit(job(10.0), 0.0)
    world.advance(1.0)
    assert (world.observe_pool().running, world.observe_pool().waiting, world.slots) == (4, 1, 3)
    assert told == []


def test_in_the_pods_whoever_came_first_starts_first() -> None:
    world = World(1, get_admission_limit=lambda slots, pods: inf)
    running, batch, realtime = job(), job(), job(batch=False)
    for arriving, at in ((running, 0.0), (batch, 0.1), (realtime, 0.2)):
        assert world.advance_and_admit(arriving, at) is Arrival.ACCEPTED
    assert world.observe_pool().waiting_in_pods == 2
    world.advance(5.0)
    assert (batch.started_at, realtime.started_at) == (1.0, 2.0)


def test_picker_lets_in_so_many_and_holds_the_others_back() -> None:
    """The one that was let in goes first, though it is of batch; of the others realtime does."""
    world = World(1, get_admission_limit=lambda slots, pods: slots + 1, queue_limit=2)
    running, let_in, batch, realtime = job(), job(), job(), job(batch=False)
    for arriving, at in ((running, 0.0), (let_in, 0.1), (batch, 0.2), (realtime, 0.3)):
        assert world.advance_and_admit(arriving, at) is Arrival.ACCEPTED
    assert world.advance_and_admit(job(), 0.4) is Arrival.REFUSED
    assert (world.observe_pool().waiting, world.observe_pool().waiting_in_pods) == (3, 1)
    world.advance(5.0)
    assert [each.started_at for each in (let_in, realtime, batch)] == [1.0, 2.0, 3.0]


def test_pods_fill_evenly_and_each_is_slowed_by_its_own() -> None:
    world = World(4, pods=2)
    four = [job() for _ in range(4)]
    for one in four:
        world.advance_and_admit(one, 0.0)
    world.advance(10.0)
    assert [one.finished_at for one in four] == [1.0, 1.0, 2.0, 2.0]


def test_who_waits_in_a_pod_that_leaves_waits_for_another() -> None:
    world = World(2, pods=2, pods_at=[(0.5, 1)], get_admission_limit=lambda slots, pods: inf)
    four = [job() for _ in range(4)]
    for one in four:
        world.advance_and_admit(one, 0.0)
    world.advance(10.0)
    assert [one.started_at for one in four] == [0.0, 0.0, 1.0, 2.0]


def test_new_pod_takes_from_the_queue_at_once() -> None:
    world = World(1, slots_at=[(0.5, 2)])
    world.advance_and_admit(job(9.0), 0.0)
    waiting = job(9.0)
    world.advance_and_admit(waiting, 0.1)
    world.advance(1.0)
    assert waiting.started_at == 0.5


def test_request_whose_client_leaves_makes_room_for_the_next() -> None:
    world = World(1)
    leaving, next_one, third = job(9.0), job(1.0), job(1.0)
    for one in (leaving, next_one, third):
        world.advance_and_admit(one, 0.0)
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
    world.advance(1.0)  # the first ends at 1.0, and two above 8 were there all the time
    assert world.overshoot.request_seconds == pytest.approx(2.0)
    assert world.overshoot.worst == pytest.approx(2.0)


arrivals = st.lists(
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
    arrivals=arrivals,
    slots=st.integers(1, 8),
    queue_limit=st.one_of(st.none(), st.integers(0, 5)),
    outage=st.one_of(st.none(), st.floats(0, 20, allow_nan=False)),
    change=st.one_of(st.none(), st.tuples(st.floats(0, 20, allow_nan=False), st.integers(0, 8))),
    pods=st.integers(1, 3),
    fewer=st.one_of(st.none(), st.tuples(st.floats(0, 20, allow_nan=False), st.integers(0, 3))),
    let_in=st.one_of(st.integers(0, 4), st.just(inf)),
)
def test_every_request_is_in_one_place_and_slots_are_used(
    arrivals: list[tuple[float, float, bool, float | None]],
    slots: int,
    queue_limit: int | None,
    outage: float | None,
    change: tuple[float, int] | None,
    pods: int,
    fewer: tuple[float, int] | None,
    let_in: float,
) -> None:
    finished: list[Job] = []
    gone: list[Job] = []
    world = World(
        slots,
        queue_limit=queue_limit,
        outages=[] if outage is None else [(outage, outage + 2)],
        slots_at=[] if change is None else [change],
        pods=pods,
        pods_at=[] if fewer is None else [fewer],
        get_admission_limit=lambda slots, pods: slots + let_in,
        on_finish=finished.append,
        on_dropped=gone.append,
    )
    accepted: list[Job] = []
    left: list[Job] = []
    steps: list[tuple[float, int, Job, bool]] = []
    for i, (at, seconds, batch, leaves) in enumerate(arrivals):
        one = job(seconds, batch=batch)
        steps.append((at, 2 * i, one, True))
        if leaves is not None:
            steps.append((at + leaves, 2 * i + 1, one, False))
    for at, _, one, arrives in sorted(steps, key=lambda step: step[:2]):
        if arrives:
            if world.advance_and_admit(one, at) is Arrival.ACCEPTED:
                accepted.append(one)
        else:
            was_there = one in accepted and isnan(one.finished_at)
            world.remove_job(one, at)
            if was_there and one.is_gone and one not in gone:
                left.append(one)
        state = world.observe_pool()
        assert len(accepted) == len(finished) + len(gone) + len(left) + state.running + state.waiting
        if state.waiting:
            # Where there are several pods, one may have a queue while another, that is new, has none.
            assert pods > 1 or fewer or state.running >= state.slots, "nobody waits while a slot is free"
        if change is None and fewer is None:
            assert state.running <= slots
    for one in finished:
        assert one.arrived_at <= one.started_at <= one.finished_at
    world.advance(1e6)
    if world.slots:
        assert world.in_system == 0
