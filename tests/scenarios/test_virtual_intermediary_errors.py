"""Requests that cause intermediary errors (like those of an unreachable gateway) affect no other request."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from dispatcher.requests.outcomes.judge import FREE_CHARGES, REST_PER_SECOND
from dispatcher.requests.outcomes.outcome import Outcome, RetryPolicy, classify_answer
from dispatcher.requests.request import Request
from tests.scenarios.virtual_stage import Stage, scenario

RETRY = RetryPolicy(base_s=0.1, max_s=0.5)


def inject_errors(
    stage: Stage,
    status: int,
    body: bytes = b"",
    *,
    after_s: float = 0.006,
    applies_to: Callable[[Request], bool],
) -> None:
    """Let the gateway answer some requests with an error. The pool answers the others."""

    async def fault(request: Request) -> Outcome | None:
        if not applies_to(request):
            return None
        stage.connected_since[request.id] = stage.now
        try:
            await asyncio.sleep(after_s)
        finally:
            del stage.connected_since[request.id]
        return classify_answer(status, {}, body, 0.0)

    stage.fault = fault


def is_poison(request: Request) -> bool:
    return request.id.startswith("poison")


async def wait_for_results(stage: Stage, names: list[str], within_s: float) -> None:
    await stage.wait_until(lambda: set(names) <= {each.id for each in stage.results}, within_s)


def count_attempts(stage: Stage, name: str) -> int:
    return sum(each.id == name for each in stage.attempts)


ERRORS = [
    pytest.param(1, 404, b"", 0.006, id="404"),
    pytest.param(1, 401, b"who", 0.006, id="401"),
    pytest.param(3, 503, b"no healthy upstream", 0.006, id="three-503"),
    pytest.param(3, 500, b"", 0.006, id="three-500"),
    pytest.param(3, 504, b"", 0.006, id="three-504"),
    pytest.param(3, 504, b"upstream request timeout", 15.0, id="three-slow-504"),
    pytest.param(5, 504, b"upstream request timeout", 0.9, id="five-504-of-nearly-a-second"),
    pytest.param(20, 504, b"upstream request timeout", 1.0, id="twenty-504-of-a-second"),
]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("count", "status", "body", "after_s"), ERRORS)
@scenario()
async def test_failing_requests_at_the_head_of_the_queue_affect_no_other_request(
    stage: Stage, replicas: int, count: int, status: int, body: bytes, after_s: float
) -> None:
    inject_errors(stage, status, body, after_s=after_s, applies_to=is_poison)
    await stage.submit(count, "poison", deadline_s=1e5)
    await asyncio.sleep(20)
    ordinary = await stage.submit(20)
    took_s = await stage.wait_until_answered(10, ordinary)
    print(f"{replicas} replicas, {count} × {status} after {after_s:g} s: 20/20 in {took_s:.2f} s")
    assert stage.count_statuses()[200] == 20


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("slots", [4, 32])
@scenario()
async def test_requests_behind_fifty_failing_ones_are_answered(
    stage: Stage, replicas: int, slots: int
) -> None:
    """Example: a batch with a wrong model name.

    No request has been answered yet, so the gateway is unverified.
    """
    inject_errors(stage, 404, applies_to=is_poison)
    await stage.submit(50, "poison", deadline_s=1e5)
    ordinary = await stage.submit(20)
    took_s = await stage.wait_until_answered(20, ordinary)
    print(f"{replicas} replicas, {slots} slots: 20/20 behind 50 failing ones in {took_s:.2f} s")
    assert stage.count_statuses()[200] == 20


@pytest.mark.parametrize("status", [401, 404, 503])
@scenario(retry=RETRY)
async def test_failing_request_among_others_fails_in_the_end(stage: Stage, status: int) -> None:
    inject_errors(stage, status, applies_to=is_poison)
    (name,) = await stage.submit(1, "poison", deadline_s=1e5)
    await stage.submit(1500)
    await stage.wait_until(lambda: status in stage.count_statuses(), 30)
    assert stage.count_statuses()[200] < 1500, "other requests ran all the time"
    assert FREE_CHARGES + 8 < count_attempts(stage, name) <= 2 * (FREE_CHARGES + 8), (
        "not every attempt is followed by the answer of another request"
    )
    assert (await stage.store.count_requests()).dead == 1


@scenario(retry=RETRY)
async def test_failing_request_among_few_others_delays_each_by_seconds_and_fails_in_the_end(
    stage: Stage,
) -> None:
    """An ordinary request comes every ten seconds and mostly runs alone."""
    inject_errors(stage, 404, applies_to=is_poison)
    await stage.submit(1, "poison", deadline_s=1e5)
    for _ in range(40):
        await asyncio.sleep(10)
        ordinary = await stage.submit(1)
        assert await stage.wait_until(lambda: ordinary[0] in {each.id for each in stage.results}, 5) <= 4  # noqa: B023
    assert stage.count_statuses() == {200: 40, 404: 1}


@pytest.mark.parametrize("after_s", [0.006, 15.0], ids=["quick", "slow"])
@scenario(retry=RETRY)
async def test_failing_request_alone_is_retried_until_its_deadline_without_counting(
    stage: Stage, after_s: float
) -> None:
    """The errors look like those of an unreachable gateway, so no attempt is counted."""
    inject_errors(stage, 504, after_s=after_s, applies_to=is_poison)
    (name,) = await stage.submit(1, "poison", deadline_s=300)
    await stage.wait_until_answered(330)
    assert stage.count_statuses() == {"DEADLINE_EXCEEDED": 1}
    assert 5 <= count_attempts(stage, name) <= 350


@pytest.mark.parametrize(
    ("status", "after_s", "replicas"),
    [
        (404, 0.006, 2),
        (504, 15.0, 1),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [(401, 0.006, 1), (401, 0.006, 2), (404, 0.006, 1), (503, 0.006, 1), (503, 0.006, 2)]
        ),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [(504, 1.0, 1), (504, 1.0, 2), (504, 15.0, 2)]
        ),
    ],
)
@scenario(retry=RetryPolicy(base_s=0.1, max_s=0.5, max_attempts=1))
async def test_gateway_that_rejects_all_requests_costs_no_attempts(
    stage: Stage, status: int, after_s: float, replicas: int
) -> None:
    """The first counted attempt would be the last one."""
    inject_errors(stage, status, after_s=after_s, applies_to=lambda request: 10 <= stage.now < 70)
    await stage.submit(2500)
    await asyncio.sleep(70 - stage.now)
    outage_end = stage.now
    if after_s < 1.0:
        probes = len(stage.find_attempts(15, outage_end))
        print(f"{replicas} replicas: {probes} probes in 55 s")
        assert probes <= 300 * replicas
        resumed_s = await stage.wait_until(
            lambda: stage.in_flight >= stage.setting.max_limit - 2, 3.0, "requests to be sent again"
        )
        print(f"full {resumed_s:.2f} s after the outage")
    await stage.wait_until_answered(200)
    assert stage.count_statuses() == {200: 2500}


@pytest.mark.parametrize(
    ("seed", "replicas"),
    [
        (1, 1),
        (5, 2),
        *(
            pytest.param(seed, replicas, marks=pytest.mark.long)
            for seed in range(6)
            for replicas in (1, 2)
            if (seed, replicas) not in {(1, 1), (5, 2)}
        ),
    ],
)
@scenario(retry=RetryPolicy(base_s=0.1, max_s=0.5, max_attempts=1))
async def test_other_requests_are_answered_soon_despite_outages_and_failing_requests(
    stage: Stage, replicas: int, seed: int
) -> None:
    """The first counted attempt would be the last one, so no outage may cost one.

    No ordinary request waits longer than an outage (30 s here), a pause of twice that, and ten seconds.
    """
    random_source = random.Random(seed)
    outages, time_s = [], 0.0
    for _ in range(3):
        time_s += random_source.uniform(20, 60)
        outages.append((time_s, time_s := time_s + random_source.uniform(1, 30)))
    status, after_s = random_source.choice([401, 404, 503]), random_source.choice([0.003, 0.1])

    def is_outage() -> bool:
        return any(start <= stage.now < end for start, end in outages)

    inject_errors(
        stage, status, after_s=after_s, applies_to=lambda request: is_poison(request) or is_outage()
    )
    await stage.submit(random_source.choice([1, 3, 10]), "poison", deadline_s=1e5)
    while stage.now < time_s + 30:
        await asyncio.sleep(random_source.uniform(0, 10))
        ordinary = await stage.submit(random_source.randint(1, 50))
        await stage.wait_until(lambda: not is_outage(), 40)
        await wait_for_results(stage, ordinary, 30 * (1 + REST_PER_SECOND) + 10)
    statuses_by_id = {each.id: each.status_code for each in stage.results}
    assert {statuses_by_id[name] for name in stage.submitted if not name.startswith("poison")} == {200}
