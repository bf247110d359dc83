"""The life of single requests: deadlines, retries, poison, cancelling, pausing, draining, a queue away."""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.core.gateway.outcome import Failed, Outcome, Overloaded, RetryPolicy
from dispatcher.core.limit.budget import Policy, Reason
from dispatcher.core.requests.request import Request
from dispatcher.lab.simulation.dispatcher_policy import Replica
from dispatcher.telemetry.events import Event
from tests.scenarios.virtual_stage import TOKEN, Metrics, Stage, Try, perform, scenario


@scenario()
async def test_deadlines_are_swept_while_the_gate_is_closed(stage: Stage) -> None:
    stage.metrics = Metrics.GONE
    late = await stage.submit(50, deadline_s=5)
    await stage.submit(50, deadline_s=1000)
    await asyncio.sleep(4)
    assert not stage.results
    await stage.until(lambda: stage.answered == 50, 3.0)
    assert {result.id for result in stage.results} == set(late)
    assert stage.statuses() == {"DEADLINE_EXCEEDED": 50}
    assert not stage.tries


@scenario(work_s=10.0)
async def test_deadline_is_the_try_s_time_limit_too(stage: Stage) -> None:
    (late,) = await stage.submit(1, deadline_s=8)
    await stage.until_answered(9.5)
    assert stage.statuses() == {"DEADLINE_EXCEEDED": 1}
    assert [t.id for t in stage.tries] == [late]
    assert stage.in_flight == 0, "its connection was closed"


@scenario(retry=RetryPolicy(base_s=2.0, max_s=10.0, max_attempts=50))
async def test_a_request_that_expires_between_tries_says_what_the_last_one_came_to(stage: Stage) -> None:
    async def fault(request: Request) -> Outcome | None:
        await asyncio.sleep(0.01)
        return Failed(f"the gateway answered 50{len(stage.tries)}", status=500, body=b"it broke")

    stage.fault = fault
    await stage.submit(1, deadline_s=8)
    await stage.until_answered(12)
    (result,) = stage.results
    assert result.error_code == "DEADLINE_EXCEEDED"
    last = f"the gateway answered 50{len(stage.tries)}: it broke"
    tries = f"{len(stage.tries)} attempts"
    assert result.error_message == f"deadline exceeded after {tries}; the last attempt: {last}"


@scenario(retry=RetryPolicy(base_s=2.0, max_s=10.0, max_attempts=5))
async def test_failed_tries_back_off_and_end_dead(stage: Stage) -> None:
    async def fault(request: Request) -> Outcome | None:
        await asyncio.sleep(0.01)
        return Failed("the gateway answered 500", status=500, body=b"it broke")

    stage.fault = fault
    (name,) = await stage.submit(1)
    await stage.until_answered(40)
    at = [t.began_at for t in stage.tries]
    assert len(at) == 5
    for nth, (earlier, later) in enumerate(pairwise(at)):
        # Full jitter, and the sweep that finds it due comes at the latest a second later.
        assert later - earlier <= min(10.0, 2.0 * 2**nth) + 1.1
    (result,) = stage.results
    assert (result.id, result.error_code, result.status_code) == (name, "RETRIES_EXHAUSTED", 500)
    assert "it broke" in result.payload
    (dead,) = await stage.store.list_dead(10)
    assert dead.failed_attempts == 5, "the fifth ended it, and counts"


@scenario()
async def test_request_that_fails_now_and_then_is_answered_once(stage: Stage) -> None:
    seen: Counter[str] = Counter()

    async def fault(request: Request) -> Outcome | None:
        seen[request.id] += 1
        if seen[request.id] > int(request.id[-1]) % 4:
            return None
        await asyncio.sleep(0.01)
        return Failed("the answer was cut short")

    stage.fault = fault
    names = await stage.submit(200)
    await stage.until_answered(60)
    assert stage.statuses() == {200: 200}
    assert all(seen[name] == int(name[-1]) % 4 + 1 for name in names)


@scenario(replicas=2, lease_s=3.0)
async def test_request_that_kills_its_owners_is_isolated_and_put_aside(stage: Stage) -> None:
    async def fault(request: Request) -> Outcome | None:
        if request.id.startswith("poison"):
            owner = next(t.replica for t in reversed(stage.tries) if t.id == request.id)
            asyncio.get_running_loop().call_later(0.05, die, owner)
            await asyncio.sleep(1.0)
        return None

    def die(index: int) -> None:
        stage.kill(index)
        asyncio.get_running_loop().call_later(0.5, stage.start, index)

    stage.fault = fault
    (poison,) = await stage.submit(1, "poison", deadline_s=5000)
    await stage.submit(300, deadline_s=9000)
    took_s = await stage.until_answered(600)
    deliveries = sum(t.id == poison for t in stage.tries)
    print(f"{deliveries} deliveries of the poison, all done after {took_s:.0f} s")
    assert stage.statuses() == {200: 300, "DELIVERIES_EXHAUSTED": 1}, "no bystander is blamed"
    (dead,) = await stage.store.list_dead(10)
    assert b"poison" in dead.member
    assert deliveries == 2 + 1 + stage.setting.retry.max_deliveries


@scenario(replicas=2, work_s=20.0)
async def test_replica_that_was_taken_for_dead_cuts_what_it_lost_at_once(stage: Stage) -> None:
    """Not with its next renewal, 10 s later; and it goes on with the rest."""
    await stage.submit(80)
    await asyncio.sleep(3)
    stalled, other = sorted(stage.alive, key=lambda replica: -replica.dispatcher.running_count)
    running = stalled.dispatcher.running_count
    assert running
    stage.store.pool.heartbeats[stalled.queue.owner] = 0.0
    assert (await other.queue.sweep()).reclaimed_count == running
    took_s = await stage.until(lambda: not [t for t in running_of(stage, stalled) if t.began_at < 3], 5)
    assert took_s <= 1.0
    assert sum(event is Event.LEASE_LOST for event, _ in stage.events) == running
    await stage.until_answered(500)
    assert stage.statuses() == {200: 80}
    assert stage.peak <= stage.setting.max_limit + 1


def running_of(stage: Stage, replica: Replica) -> list[Try]:
    index = stage.replicas.index(replica)
    return [t for t in stage.tries if t.replica == index and t.ended_at != t.ended_at]


@pytest.mark.parametrize("drain_s", [0.0, 0.3, 100.0])
@scenario(replicas=2)
async def test_drain_sends_nothing_more_and_leaves_no_lease(stage: Stage, drain_s: float) -> None:
    await stage.submit(500)
    await asyncio.sleep(5.3)
    leaving, staying = stage.alive
    # Both must have work for this to show anything.
    busy = leaving if leaving.dispatcher.running_count else staying
    index = stage.replicas.index(busy)
    running, at = busy.dispatcher.running_count, stage.now
    assert running
    busy.dispatcher.drain(drain_s)
    await busy.task
    assert stage.now - at <= min(drain_s, 2.0) + 0.1
    assert not [t for t in stage.sent(at) if t.replica == index]
    ended = [t for t in stage.tries if t.replica == index and not t.ended_at < at]
    assert len(ended) == running
    answered = sum(t.outcome is not None for t in ended)
    assert answered == running if drain_s >= 2.0 else answered < running
    assert busy.queue.owner not in {held.owner for held in stage.store.pool.leases.values()}
    stage.replicas[index] = None
    await stage.until_answered(60)
    assert stage.statuses() == {200: 500}
    deliveries = Counter(t.id for t in stage.tries)
    assert sum(deliveries.values()) == 500 + running - answered


@scenario(work_s=5.0)
async def test_cancelled_before_it_is_sent_and_in_flight(stage: Stage) -> None:
    names = await stage.submit(60)
    await asyncio.sleep(2)
    running = [t.id for t in stage.tries]
    waiting = [name for name in names if name not in running]
    assert running
    assert waiting
    assert await stage.store.cancel_request(running[0], TOKEN)
    assert await stage.store.cancel_request(waiting[0], TOKEN)
    await asyncio.sleep(1.2)
    cut = next(t for t in stage.tries if t.id == running[0])
    assert cut.outcome is None
    assert cut.ended_at <= stage.now, "its connection was closed"
    await stage.until_answered(60)
    assert stage.statuses() == {200: 58, "CANCELLED": 2}
    assert {r.id for r in stage.results if r.error_code} == {running[0], waiting[0]}
    assert waiting[0] not in {t.id for t in stage.tries}


@pytest.mark.parametrize("replicas", [1, 3])
@scenario(scrape_s=5.0)
async def test_pause_stops_all_and_resume_wakes_them(stage: Stage, replicas: int) -> None:
    await stage.submit(500)
    await asyncio.sleep(4.2)
    await stage.store.pause("ops", "upgrade")
    paused_at = stage.now
    await asyncio.sleep(6)
    assert not stage.sent(paused_at + 0.001)
    assert stage.reasons() == {Reason.PAUSED}
    await stage.store.resume()
    await stage.until(lambda: stage.sent(paused_at + 5), 0.5, "to go on at once, not with the next reading")
    await stage.until_answered(60)
    assert stage.statuses() == {200: 500}


@scenario(observe=True)
async def test_observer_claims_nothing_and_shows_what_it_would_do(stage: Stage) -> None:
    await stage.submit(100)
    await asyncio.sleep(30)
    assert not stage.tries
    assert (await stage.store.count_requests()).pending == 100
    allowance = stage.alive[0].dispatcher.get_allowance()
    assert (allowance.limit, allowance.reason) == (stage.setting.max_limit, Reason.OPEN)


@pytest.mark.parametrize("replicas", [1, 3])
@scenario(work_s=2.0)
async def test_results_of_requests_in_flight_arrive_once_after_the_queue_was_away(
    stage: Stage, replicas: int
) -> None:
    await stage.submit(400)
    await asyncio.sleep(6.3)
    done, running = len(stage.results), stage.in_flight
    assert running
    stage.store.outage_message, away_at = "connection refused", stage.now
    await asyncio.sleep(20)
    assert not stage.sent(away_at + 0.001), "nothing new is sent"
    assert stage.reasons() == {Reason.QUEUE_UNREACHABLE}
    assert len(stage.results) == done
    stage.store.outage_message = None
    await stage.until(lambda: stage.answered >= done + running, 1.5, "what was kept to be handed in")
    await stage.until_answered(80)
    assert stage.statuses() == {200: 400}
    assert Counter(t.id for t in stage.tries).most_common(1)[0][1] == 1, "nothing ran twice"


@scenario()
async def test_changed_settings_hold_in_flight_and_cost_nothing(stage: Stage) -> None:
    await stage.submit(2000)
    await asyncio.sleep(5)
    assert stage.in_flight >= 28
    replica = stage.alive[0]
    replica.limiter.set_policy(Policy(reserve=0.5, per_endpoint=32), stage.now)
    replica.dispatcher.wake_up()
    await asyncio.sleep(3)
    stage.restart_peak()
    assert stage.in_flight <= 16
    replica.limiter.set_policy(Policy(reserve=0.05, per_endpoint=32, max_in_flight=20), stage.now)
    replica.dispatcher.wake_up()
    await asyncio.sleep(4)
    assert 19 <= stage.in_flight <= 20
    assert stage.peak <= 20
    assert set(stage.statuses()) == {200}
    assert max(Counter(t.id for t in stage.tries).values()) == 1


mishaps = st.lists(
    st.tuples(
        st.sampled_from(["kill", "start", "queue", "metrics", "pause", "refuse", "fail", "submit", "none"]),
        st.floats(0.01, 6.0),
    ),
    min_size=2,
    max_size=12,
)


@settings(max_examples=30)
@given(mishaps=mishaps, replicas=st.integers(1, 3), scrape_s=st.sampled_from([0.5, 1.0, 4.0]))
def test_whatever_happens_in_whatever_order_each_request_has_one_result(
    mishaps: list[tuple[str, float]], replicas: int, scrape_s: float
) -> None:
    async def scene(stage: Stage) -> None:
        faulty: set[str] = set()

        async def fault(request: Request) -> Outcome | None:
            await asyncio.sleep(0.001)
            if "refuse" in faulty and int(request.id[-2:]) % 3 == 0:
                return Overloaded(429, "", is_out_of_capacity=True)
            if "fail" in faulty and int(request.id[-2:]) % 5 == 0:
                return Failed("the answer was cut short")
            return None

        stage.fault = fault
        await stage.submit(60)
        for nth, (mishap, for_s) in enumerate(mishaps):
            alive = [i for i, replica in enumerate(stage.replicas) if replica is not None]
            dead = [i for i, replica in enumerate(stage.replicas) if replica is None]
            match mishap:
                case "kill" if alive:
                    stage.kill(alive[nth % len(alive)])
                case "start" if dead:
                    stage.start(dead[nth % len(dead)])
                case "queue":
                    stage.store.outage_message = "connection refused"
                case "metrics":
                    stage.metrics = Metrics.GONE
                case "pause":
                    await stage.store.pause("ops", "")
                case "refuse" | "fail":
                    faulty.add(mishap)
                case "submit":
                    await stage.submit(30)
                case _:
                    pass
            await asyncio.sleep(for_s)
            assert stage.peak <= stage.setting.max_limit + 1
            stage.store.outage_message, stage.metrics = None, Metrics.FINE
            await stage.store.resume()
            faulty.clear()
        for i, replica in enumerate(stage.replicas):
            if replica is None:
                stage.start(i)
        await stage.until_answered(600)
        assert set(stage.statuses()) == {200}
        assert stage.peak <= stage.setting.max_limit + 1

    perform(scene, replicas=replicas, scrape_s=scrape_s, lease_s=6.0)


@pytest.mark.parametrize("stops_at", [0.1, 0.3, 0.6, 0.8, 1.1, 1.4])
@scenario(call_s=0.5)
async def test_dispatcher_that_stops_leaves_no_lease_of_a_claim_under_way(
    stage: Stage, stops_at: float
) -> None:
    await stage.submit(200)
    await asyncio.sleep(stops_at)
    await stage.close()
