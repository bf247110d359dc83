"""A request whose own answers look like no gateway at all hurts itself, and nobody else."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from dispatcher.core.gateway.intermediary_errors import FREE_CHARGES, REST_PER_SECOND
from dispatcher.core.gateway.outcome import Outcome, RetryPolicy, classify_answer
from dispatcher.core.requests.request import Request
from tests.scenarios.virtual_stage import Stage, scenario

RETRY = RetryPolicy(base_s=0.1, max_s=0.5)


def answers(
    stage: Stage, status: int, body: bytes = b"", *, after_s: float = 0.006, to: Callable[[Request], bool]
) -> None:
    """The gateway's answer to some requests; the pool takes the others."""

    async def fault(request: Request) -> Outcome | None:
        if not to(request):
            return None
        stage.held_open[request.id] = stage.now
        try:
            await asyncio.sleep(after_s)
        finally:
            del stage.held_open[request.id]
        return classify_answer(status, {}, body, 0.0)

    stage.fault = fault


def poison(request: Request) -> bool:
    return request.id.startswith("poison")


async def all_of(stage: Stage, names: list[str], within_s: float) -> None:
    await stage.until(lambda: set(names) <= {each.id for each in stage.results}, within_s)


def tries(stage: Stage, name: str) -> int:
    return sum(each.id == name for each in stage.tries)


KINDS = [
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
@pytest.mark.parametrize(("count", "status", "body", "after_s"), KINDS)
@scenario()
async def test_poison_at_the_head_of_the_queue_stops_nobody(
    stage: Stage, replicas: int, count: int, status: int, body: bytes, after_s: float
) -> None:
    answers(stage, status, body, after_s=after_s, to=poison)
    await stage.submit(count, "poison", deadline_s=1e5)
    await asyncio.sleep(20)
    honest = await stage.submit(20)
    took_s = await stage.until_answered(10, honest)
    print(f"{replicas} replicas, {count} × {status} after {after_s:g} s: 20/20 in {took_s:.2f} s")
    assert stage.statuses()[200] == 20


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("slots", [4, 32])
@scenario()
async def test_honest_requests_behind_fifty_poisons_get_through(
    stage: Stage, replicas: int, slots: int
) -> None:
    """A batch with a wrong model name, of which nothing is answered; nobody knows that of the gateway yet."""
    answers(stage, 404, to=poison)
    await stage.submit(50, "poison", deadline_s=1e5)
    honest = await stage.submit(20)
    took_s = await stage.until_answered(20, honest)
    print(f"{replicas} replicas, {slots} slots: 20/20 behind 50 poisons in {took_s:.2f} s")
    assert stage.statuses()[200] == 20


@pytest.mark.parametrize("status", [401, 404, 503])
@scenario(retry=RETRY)
async def test_poison_among_others_ends_by_itself(stage: Stage, status: int) -> None:
    answers(stage, status, to=poison)
    (name,) = await stage.submit(1, "poison", deadline_s=1e5)
    await stage.submit(1500)
    await stage.until(lambda: status in stage.statuses(), 30)
    assert stage.statuses()[200] < 1500, "there were others all the time"
    assert FREE_CHARGES + 8 < tries(stage, name) <= 2 * (FREE_CHARGES + 8), (
        "not every try is followed by another's answer"
    )
    assert (await stage.store.count_requests()).dead == 1


@scenario(retry=RETRY)
async def test_poison_with_seldom_company_holds_each_up_for_seconds_and_ends(stage: Stage) -> None:
    """One honest request in ten seconds, mostly with nobody beside it."""
    answers(stage, 404, to=poison)
    await stage.submit(1, "poison", deadline_s=1e5)
    for _ in range(40):
        await asyncio.sleep(10)
        honest = await stage.submit(1)
        assert await stage.until(lambda: honest[0] in {each.id for each in stage.results}, 5) <= 4  # noqa: B023
    assert stage.statuses() == {200: 40, 404: 1}


@pytest.mark.parametrize("after_s", [0.006, 15.0], ids=["quick", "slow"])
@scenario(retry=RETRY)
async def test_poison_alone_is_tried_until_its_deadline_and_never_blamed(
    stage: Stage, after_s: float
) -> None:
    """Nobody can tell it from a gateway that is away: no attempt is counted."""
    answers(stage, 504, after_s=after_s, to=poison)
    (name,) = await stage.submit(1, "poison", deadline_s=300)
    await stage.until_answered(330)
    assert stage.statuses() == {"DEADLINE_EXCEEDED": 1}
    assert 5 <= tries(stage, name) <= 350


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
async def test_gateway_that_sends_everybody_away_costs_nobody_an_attempt(
    stage: Stage, status: int, after_s: float, replicas: int
) -> None:
    """One counted attempt would be the last."""
    answers(stage, status, after_s=after_s, to=lambda request: 10 <= stage.now < 70)
    await stage.submit(2500)
    await asyncio.sleep(70 - stage.now)
    back_at = stage.now
    if after_s < 1.0:
        probes = len(stage.sent(15, back_at))
        print(f"{replicas} replicas: {probes} probes in 55 s")
        assert probes <= 300 * replicas
        resumed_s = await stage.until(
            lambda: stage.in_flight >= stage.setting.max_limit - 2, 3.0, "to resume"
        )
        print(f"full {resumed_s:.2f} s after its return")
    await stage.until_answered(200)
    assert stage.statuses() == {200: 2500}


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
async def test_whatever_the_outages_and_the_poisons_the_others_are_answered_soon(
    stage: Stage, replicas: int, seed: int
) -> None:
    """One counted attempt would be the last: no outage costs one. And no honest request waits longer than an
    outage (30 s here), a rest of twice that, and ten seconds."""
    rand = random.Random(seed)
    outages, at = [], 0.0
    for _ in range(3):
        at += rand.uniform(20, 60)
        outages.append((at, at := at + rand.uniform(1, 30)))
    status, after_s = rand.choice([401, 404, 503]), rand.choice([0.003, 0.1])

    def away() -> bool:
        return any(start <= stage.now < end for start, end in outages)

    answers(stage, status, after_s=after_s, to=lambda request: poison(request) or away())
    await stage.submit(rand.choice([1, 3, 10]), "poison", deadline_s=1e5)
    while stage.now < at + 30:
        await asyncio.sleep(rand.uniform(0, 10))
        honest = await stage.submit(rand.randint(1, 50))
        await stage.until(lambda: not away(), 40)
        await all_of(stage, honest, 30 * (1 + REST_PER_SECOND) + 10)
    ends = {each.id: each.status_code for each in stage.results}
    assert {ends[name] for name in stage.submitted if not name.startswith("poison")} == {200}
