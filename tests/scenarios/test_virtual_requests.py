"""Single requests: deadlines, retries, dead letters, cancellation, pause, drain, and outages of the queue."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.lab.simulation.dispatcher_policy import Replica
from dispatcher.limit.budget import Policy, Reason
from dispatcher.requests.outcomes.outcome import Failed, Outcome, Overloaded, RetryPolicy
from dispatcher.requests.request import Request
from dispatcher.telemetry.events import Event
from tests.scenarios.virtual_stage import TOKEN, Attempt, MetricsState, Stage, run_scenario, scenario


@scenario()
async def test_expired_requests_are_settled_while_the_gate_is_closed(stage: Stage) -> None:
    stage.metrics = MetricsState.GONE
    late_ids = await stage.submit(50, deadline_s=5)
    await stage.submit(50, deadline_s=1000)
    await asyncio.sleep(4)
    assert not stage.results
    await stage.wait_until(lambda: stage.answered_count == 50, 3.0)
    assert {result.id for result in stage.results} == set(late_ids)
    assert stage.count_statuses() == {"DEADLINE_EXCEEDED": 50}
    assert not stage.attempts


@scenario(work_s=10.0)
async def test_deadline_limits_the_duration_of_an_attempt(stage: Stage) -> None:
    (late_id,) = await stage.submit(1, deadline_s=8)
    await stage.wait_until_answered(9.5)
    assert stage.count_statuses() == {"DEADLINE_EXCEEDED": 1}
    assert [attempt.id for attempt in stage.attempts] == [late_id]
    assert stage.in_flight == 0, "its connection is closed"


@scenario(retry=RetryPolicy(base_s=2.0, max_s=10.0, max_attempts=50))
async def test_request_that_expires_between_attempts_reports_the_last_failure(stage: Stage) -> None:
    async def fault(request: Request) -> Outcome | None:
        await asyncio.sleep(0.01)
        return Failed(f"the gateway answered 50{len(stage.attempts)}", status=500, body=b"it broke")

    stage.fault = fault
    await stage.submit(1, deadline_s=8)
    await stage.wait_until_answered(12)
    (result,) = stage.results
    assert result.error_code == "DEADLINE_EXCEEDED"
    last_attempt = f"the gateway answered 50{len(stage.attempts)}: it broke"
    attempt_count = f"{len(stage.attempts)} attempts"
    assert (
        result.error_message == f"deadline exceeded after {attempt_count}; the last attempt: {last_attempt}"
    )


@scenario(retry=RetryPolicy(base_s=2.0, max_s=10.0, max_attempts=5))
async def test_failed_attempts_back_off_and_the_request_is_dead_lettered(stage: Stage) -> None:
    async def fault(request: Request) -> Outcome | None:
        await asyncio.sleep(0.01)
        return Failed("the gateway answered 500", status=500, body=b"it broke")

    stage.fault = fault
    (name,) = await stage.submit(1)
    await stage.wait_until_answered(40)
    start_times = [attempt.began_at for attempt in stage.attempts]
    assert len(start_times) == 5
    for number, (earlier, later) in enumerate(pairwise(start_times)):
        # Full jitter, and the sweep that returns the request to the queue comes at most a second later.
        assert later - earlier <= min(10.0, 2.0 * 2**number) + 1.1
    (result,) = stage.results
    assert (result.id, result.error_code, result.status_code) == (name, "RETRIES_EXHAUSTED", 500)
    assert "it broke" in result.payload
    ((dead, _),) = stage.store.queue.dead.values()
    assert dead.failed_attempts == 5, "the last failed attempt is counted, too"


@scenario()
async def test_request_that_fails_at_first_is_answered_once(stage: Stage) -> None:
    attempt_counts: Counter[str] = Counter()

    async def fault(request: Request) -> Outcome | None:
        attempt_counts[request.id] += 1
        if attempt_counts[request.id] > int(request.id[-1]) % 4:
            return None
        await asyncio.sleep(0.01)
        return Failed("the answer was cut short")

    stage.fault = fault
    names = await stage.submit(200)
    await stage.wait_until_answered(60)
    assert stage.count_statuses() == {200: 200}
    assert all(attempt_counts[name] == int(name[-1]) % 4 + 1 for name in names)


@scenario(replicas=2, lease_s=3.0)
async def test_request_that_kills_its_owners_is_isolated_and_dead_lettered(stage: Stage) -> None:
    async def fault(request: Request) -> Outcome | None:
        if request.id.startswith("poison"):
            owner = next(attempt.replica for attempt in reversed(stage.attempts) if attempt.id == request.id)
            asyncio.get_running_loop().call_later(0.05, kill_and_restart, owner)
            await asyncio.sleep(1.0)
        return None

    def kill_and_restart(index: int) -> None:
        stage.kill(index)
        asyncio.get_running_loop().call_later(0.5, stage.start, index)

    stage.fault = fault
    (poison,) = await stage.submit(1, "poison", deadline_s=5000)
    await stage.submit(300, deadline_s=9000)
    took_s = await stage.wait_until_answered(600)
    deliveries = sum(attempt.id == poison for attempt in stage.attempts)
    print(f"{deliveries} deliveries of the poison, all done after {took_s:.0f} s")
    assert stage.count_statuses() == {200: 300, "DELIVERIES_EXHAUSTED": 1}, "no other request is affected"
    ((dead, _),) = stage.store.queue.dead.values()
    assert b"poison" in dead.member
    assert deliveries == 2 + 1 + stage.setting.retry.max_deliveries


@scenario(replicas=2, work_s=20.0)
async def test_replica_presumed_dead_aborts_its_lost_requests_at_once(stage: Stage) -> None:
    """It does not wait for its next renewal, 10 s later, and continues with its other requests."""
    await stage.submit(80)
    await asyncio.sleep(3)
    presumed_dead, other = sorted(stage.alive, key=lambda replica: -replica.dispatcher.running_count)
    running_count = presumed_dead.dispatcher.running_count
    assert running_count
    stage.store.pool.heartbeats[presumed_dead.queue.owner] = 0.0
    assert (await other.queue.sweep()).reclaimed_count == running_count
    took_s = await stage.wait_until(
        lambda: (
            not [attempt for attempt in find_running_attempts(stage, presumed_dead) if attempt.began_at < 3]
        ),
        5,
    )
    assert took_s <= 1.0
    assert sum(event is Event.LEASE_LOST for event, _ in stage.events) == running_count
    await stage.wait_until_answered(500)
    assert stage.count_statuses() == {200: 80}
    assert stage.peak <= stage.setting.max_limit + 1


def find_running_attempts(stage: Stage, replica: Replica) -> list[Attempt]:
    index = stage.replicas.index(replica)
    return [
        attempt
        for attempt in stage.attempts
        if attempt.replica == index and attempt.ended_at != attempt.ended_at
    ]


@pytest.mark.parametrize("drain_s", [0.0, 0.3, 100.0])
@scenario(replicas=2)
async def test_drain_sends_no_more_requests_and_leaves_no_lease(stage: Stage, drain_s: float) -> None:
    await stage.submit(500)
    await asyncio.sleep(5.3)
    first, second = stage.alive
    # The replica that drains must have running requests.
    busy_replica = first if first.dispatcher.running_count else second
    index = stage.replicas.index(busy_replica)
    running_count, drained_at = busy_replica.dispatcher.running_count, stage.now
    assert running_count
    busy_replica.dispatcher.drain(drain_s)
    await busy_replica.task
    assert stage.now - drained_at <= min(drain_s, 2.0) + 0.1
    assert not [attempt for attempt in stage.find_attempts(drained_at) if attempt.replica == index]
    finished_attempts = [
        attempt
        for attempt in stage.attempts
        if attempt.replica == index and not attempt.ended_at < drained_at
    ]
    assert len(finished_attempts) == running_count
    answered = sum(attempt.outcome is not None for attempt in finished_attempts)
    assert answered == running_count if drain_s >= 2.0 else answered < running_count
    assert busy_replica.queue.owner not in {lease.owner for lease in stage.store.pool.leases.values()}
    stage.replicas[index] = None
    await stage.wait_until_answered(60)
    assert stage.count_statuses() == {200: 500}
    deliveries = Counter(attempt.id for attempt in stage.attempts)
    assert sum(deliveries.values()) == 500 + running_count - answered


@scenario(work_s=5.0)
async def test_waiting_and_running_requests_can_be_cancelled(stage: Stage) -> None:
    names = await stage.submit(60)
    await asyncio.sleep(2)
    running = [attempt.id for attempt in stage.attempts]
    waiting = [name for name in names if name not in running]
    assert running
    assert waiting
    assert await stage.store.cancel_request(running[0], TOKEN)
    assert await stage.store.cancel_request(waiting[0], TOKEN)
    await asyncio.sleep(1.2)
    aborted = next(attempt for attempt in stage.attempts if attempt.id == running[0])
    assert aborted.outcome is None
    assert aborted.ended_at <= stage.now, "its connection is closed"
    await stage.wait_until_answered(60)
    assert stage.count_statuses() == {200: 58, "CANCELLED": 2}
    assert {result.id for result in stage.results if result.error_code} == {running[0], waiting[0]}
    assert waiting[0] not in {attempt.id for attempt in stage.attempts}


@pytest.mark.parametrize("replicas", [1, 3])
@scenario(scrape_s=5.0)
async def test_pause_stops_all_replicas_and_resume_wakes_them(stage: Stage, replicas: int) -> None:
    await stage.submit(500)
    await asyncio.sleep(4.2)
    await stage.store.pause("ops", "upgrade")
    paused_at = stage.now
    await asyncio.sleep(6)
    assert not stage.find_attempts(paused_at + 0.001)
    assert stage.reasons() == {Reason.PAUSED}
    await stage.store.resume()
    await stage.wait_until(
        lambda: stage.find_attempts(paused_at + 5),
        0.5,
        "requests to be sent at once, not with the next reading",
    )
    await stage.wait_until_answered(60)
    assert stage.count_statuses() == {200: 500}


@scenario(observe=True)
async def test_observer_claims_nothing_and_shows_its_limit(stage: Stage) -> None:
    await stage.submit(100)
    await asyncio.sleep(30)
    assert not stage.attempts
    assert (await stage.store.count_requests()).pending == 100
    allowance = stage.alive[0].dispatcher.get_allowance()
    assert (allowance.limit, allowance.reason) == (stage.setting.max_limit, Reason.OPEN)


@pytest.mark.parametrize("replicas", [1, 3])
@scenario(work_s=2.0)
async def test_results_of_running_requests_arrive_once_after_an_outage_of_the_queue(
    stage: Stage, replicas: int
) -> None:
    await stage.submit(400)
    await asyncio.sleep(6.3)
    answered_before, running_count = len(stage.results), stage.in_flight
    assert running_count
    stage.store.outage_message, outage_from = "connection refused", stage.now
    await asyncio.sleep(20)
    assert not stage.find_attempts(outage_from + 0.001), "nothing new is sent"
    assert stage.reasons() == {Reason.QUEUE_UNREACHABLE}
    assert len(stage.results) == answered_before
    stage.store.outage_message = None
    await stage.wait_until(
        lambda: stage.answered_count >= answered_before + running_count,
        1.5,
        "the kept completions to be flushed",
    )
    await stage.wait_until_answered(80)
    assert stage.count_statuses() == {200: 400}
    assert Counter(attempt.id for attempt in stage.attempts).most_common(1)[0][1] == 1, "nothing ran twice"


@scenario()
async def test_changed_settings_apply_while_requests_run_and_lose_none(stage: Stage) -> None:
    await stage.submit(2000)
    await asyncio.sleep(5)
    assert stage.in_flight >= 28
    replica = stage.alive[0]
    replica.limiter.set_policy(Policy(reserve=0.5, per_endpoint=32), stage.now)
    replica.dispatcher.wake_up()
    await asyncio.sleep(3)
    stage.reset_peak()
    assert stage.in_flight <= 16
    replica.limiter.set_policy(Policy(reserve=0.05, per_endpoint=32, max_in_flight=20), stage.now)
    replica.dispatcher.wake_up()
    await asyncio.sleep(4)
    assert 19 <= stage.in_flight <= 20
    assert stage.peak <= 20
    assert set(stage.count_statuses()) == {200}
    assert max(Counter(attempt.id for attempt in stage.attempts).values()) == 1


events = st.lists(
    st.tuples(
        st.sampled_from(["kill", "start", "queue", "metrics", "pause", "refuse", "fail", "submit", "none"]),
        st.floats(0.01, 6.0),
    ),
    min_size=2,
    max_size=12,
)


@settings(max_examples=30)
@given(events=events, replicas=st.integers(1, 3), scrape_s=st.sampled_from([0.5, 1.0, 4.0]))
def test_each_request_has_one_result_after_any_order_of_faults(
    events: list[tuple[str, float]], replicas: int, scrape_s: float
) -> None:
    async def body(stage: Stage) -> None:
        active_faults: set[str] = set()

        async def fault(request: Request) -> Outcome | None:
            await asyncio.sleep(0.001)
            if "refuse" in active_faults and int(request.id[-2:]) % 3 == 0:
                return Overloaded(429, "", is_out_of_capacity=True)
            if "fail" in active_faults and int(request.id[-2:]) % 5 == 0:
                return Failed("the answer was cut short")
            return None

        stage.fault = fault
        await stage.submit(60)
        for number, (event, duration_s) in enumerate(events):
            alive = [i for i, replica in enumerate(stage.replicas) if replica is not None]
            dead = [i for i, replica in enumerate(stage.replicas) if replica is None]
            match event:
                case "kill" if alive:
                    stage.kill(alive[number % len(alive)])
                case "start" if dead:
                    stage.start(dead[number % len(dead)])
                case "queue":
                    stage.store.outage_message = "connection refused"
                case "metrics":
                    stage.metrics = MetricsState.GONE
                case "pause":
                    await stage.store.pause("ops", "")
                case "refuse" | "fail":
                    active_faults.add(event)
                case "submit":
                    await stage.submit(30)
                case _:
                    pass
            await asyncio.sleep(duration_s)
            assert stage.peak <= stage.setting.max_limit + 1
            stage.store.outage_message, stage.metrics = None, MetricsState.OK
            await stage.store.resume()
            active_faults.clear()
        for i, replica in enumerate(stage.replicas):
            if replica is None:
                stage.start(i)
        await stage.wait_until_answered(600)
        assert set(stage.count_statuses()) == {200}
        assert stage.peak <= stage.setting.max_limit + 1

    run_scenario(body, replicas=replicas, scrape_s=scrape_s, lease_s=6.0)


@pytest.mark.parametrize("stop_at", [0.1, 0.3, 0.6, 0.8, 1.1, 1.4])
@scenario(call_s=0.5)
async def test_dispatcher_that_stops_during_a_claim_leaves_no_lease(stage: Stage, stop_at: float) -> None:
    await stage.submit(200)
    await asyncio.sleep(stop_at)
    await stage.close()
