"""Requests and their models in the loop: who goes, who waits and comes back, who ends, and with what."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from dispatcher.core.gateway.outcome import Delivered, RetryPolicy
from dispatcher.core.merging.grouping import BatchRule, GroupingRule, MergeMode
from dispatcher.core.merging.shapes import SHAPES
from dispatcher.core.models.availability import DENIAL_S, ModelState, ModelTerms, WhenNotServed
from dispatcher.core.requests.request import Request, encode_member
from dispatcher.core.sequences.turns import Turn
from dispatcher.dispatch import Options
from dispatcher.dispatch.models.model_router import (
    CHECK_INTERVAL_S,
    OTHER_SERVER_RETRY_S,
    UNWATCHED_INTERVAL_S,
)
from dispatcher.ports import AttemptResult, QueueUnavailableError, Submission
from dispatcher.telemetry.events import Event
from tests.dispatch.pool import GONE, results, told
from tests.dispatch.scene import Answers, Scene, perform

RETRY = RetryPolicy(base_s=0.1, max_s=1.0, max_attempts=3)
WAIT, FAIL = WhenNotServed.WAIT, WhenNotServed.FAIL
WATCHED = Options(RETRY, model_terms=ModelTerms({"night": WAIT}))


class Models(Answers):
    """Answers 404 as vLLM does for models that it does not have."""

    takes_s = 0.1

    def __init__(self, *models: str) -> None:
        super().__init__()
        self.models = set(models)
        self.named: list[str] = []

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: object
    ) -> AttemptResult:
        forwarded = await super().forward(request, token=token, deadline=deadline, may_send=may_send)
        body = json.loads(request.payload)
        self.named.append(body["model"])
        if body["model"] not in self.models:
            return forwarded.copy_with(outcome=Delivered(404, GONE % body["model"].encode()))
        if "input" in body:
            data = [{"index": n, "embedding": [0.5]} for n, _ in enumerate(body["input"])]
            return forwarded.copy_with(outcome=Delivered(200, json.dumps({"data": data}).encode()))
        return forwarded


async def submit(scene: Scene, model: str, *names: str, within_s: float = 10**6, **body: Any) -> None:
    until = int(asyncio.get_running_loop().time() + within_s)
    await scene.store.submit(
        [
            Submission(
                encode_member(name, json.dumps({"model": model, **body}).encode(), until, token="t"),
                float(until),
                name,
                "t",
                until,
            )
            for name in names
        ]
    )


def test_request_waits_for_its_model_beside_others_and_goes_once_it_is_there() -> None:
    gateway = Models("day", "night")

    async def scene_of(scene: Scene) -> None:
        told(scene, a="day")
        await submit(scene, "night", *(f"n{number}" for number in range(30)))
        await submit(scene, "day", "d1", "d2")
        await asyncio.sleep(1)
        assert sorted(gateway.sent) == ["d1", "d2"]
        await asyncio.sleep(CHECK_INTERVAL_S)
        assert scene.dispatcher.model_router.waiting_counts == {"night": 30}
        assert scene.dispatcher.model_router.list_held_back() == [
            ("night", 30, "model 'night' is not served")
        ]
        told(scene, a="day night")
        await asyncio.sleep(2)
        assert len(gateway.sent) == 32
        assert {each["status_code"] for each in (await results(scene)).values()} == {200}
        assert scene.dispatcher.model_router.request_counts == {
            "served": 32,
            "waits": 30,
            "unknown": 0,
            "denied": 0,
        }
        moves = [fields["state"] for event, fields in scene.events if event is Event.MODEL]
        assert moves == ["absent", "ready"]

    perform(scene_of, gateway, WATCHED)


def test_deadline_passes_with_the_reason() -> None:
    gateway = Models("day")

    async def scene_of(scene: Scene) -> None:
        told(scene, a="day", b="day")
        await submit(scene, "night", "n1", within_s=5)
        await asyncio.sleep(8)
        result = (await results(scene))["n1"]
        assert result["error_code"] == "DEADLINE_EXCEEDED"
        assert "its model 'night' is served by none of 2 endpoints" in result["error_message"]
        assert gateway.sent == []

    perform(scene_of, gateway, WATCHED)


def test_unknown_model_ends_at_once_with_the_names_that_exist() -> None:
    gateway = Models("day")

    async def scene_of(scene: Scene) -> None:
        told(scene, a="day")
        await submit(scene, "dya", "typo")
        await asyncio.sleep(1)
        result = (await results(scene))["typo"]
        assert result["error_code"] == "MODEL_NOT_FOUND"
        assert result["error_message"] == "no model 'dya' is served here: there is 'day'"
        assert gateway.sent == []

    perform(scene_of, gateway, WATCHED)


def test_answer_that_a_listed_model_is_gone_costs_no_attempt() -> None:
    """The rollout was faster than the next look at the endpoints."""
    gateway = Models("day")

    async def scene_of(scene: Scene) -> None:
        told(scene, a="day night")
        await submit(scene, "night", "n1", "n2")
        await asyncio.sleep(1)
        assert sorted(gateway.sent) == ["n1", "n2"], "each once"
        assert await results(scene) == {}
        gateway.models.add("night")
        told(scene, a="day night")
        await asyncio.sleep(DENIAL_S - 2)
        assert len(gateway.sent) == 2
        await asyncio.sleep(2)
        told(scene, a="day night")
        await asyncio.sleep(CHECK_INTERVAL_S + 1)
        assert sorted(gateway.sent) == ["n1", "n1", "n2", "n2"]
        assert {each["status_code"] for each in (await results(scene)).values()} == {200}
        assert scene.dispatcher.model_router.request_counts["denied"] == 2

    perform(scene_of, gateway, WATCHED)


def test_where_some_servers_have_it_a_request_tries_again_soon() -> None:
    gateway = Models("day")

    async def scene_of(scene: Scene) -> None:
        told(scene, a="day night", b="day")
        await submit(scene, "night", "n1")
        await asyncio.sleep(0.5)
        gateway.models.add("night")
        await asyncio.sleep(OTHER_SERVER_RETRY_S + 0.5)
        assert gateway.sent == ["n1", "n1"]
        assert (await results(scene))["n1"]["status_code"] == 200

    perform(scene_of, gateway, WATCHED)


def test_where_nobody_expects_it_the_servers_answer_is_the_answer() -> None:
    gateway = Models("day")

    async def scene_of(scene: Scene) -> None:
        told(scene, a="day", b=None)
        await submit(scene, "day", "d1")  # so that it is known to be a gateway
        await asyncio.sleep(1)
        await submit(scene, "other", "o1")
        await asyncio.sleep(1)
        assert (await results(scene))["o1"]["status_code"] == 404

    perform(scene_of, gateway, WATCHED)


def test_merged_call_whose_model_is_gone_gives_all_riders_back() -> None:
    gateway = Models("day")
    rule = BatchRule(
        ("/v1/embeddings",), SHAPES["embeddings"], MergeMode.ON, GroupingRule(8, (), 0.05, False)
    )
    how = replace(WATCHED, default_path="/v1/embeddings", merge_rules=(rule,))

    async def scene_of(scene: Scene) -> None:
        told(scene, a="day night")
        await submit(scene, "night", "n1", "n2", "n3", input=["x"])
        await asyncio.sleep(1)
        assert len(gateway.sent) == 1, "one call, and no halves of it"
        gateway.models.add("night")
        await asyncio.sleep(DENIAL_S)
        told(scene, a="day night")
        await asyncio.sleep(CHECK_INTERVAL_S + 1)
        assert {each["status_code"] for each in (await results(scene)).values()} == {200}

    perform(scene_of, gateway, how)


def test_what_is_cancelled_while_it_waits_is_answered_without_its_model() -> None:
    gateway = Models("day")

    async def scene_of(scene: Scene) -> None:
        told(scene, a="day")
        await submit(scene, "night", "n1", "n2")
        await asyncio.sleep(CHECK_INTERVAL_S + 1)
        assert await scene.store.cancel_request("n1", "t")
        await asyncio.sleep(3)
        found = await results(scene)
        assert {name: each["error_code"] for name, each in found.items()} == {"n1": "CANCELLED"}
        await asyncio.sleep(CHECK_INTERVAL_S)
        assert scene.dispatcher.model_router.waiting_counts == {"night": 1}

    perform(scene_of, gateway, WATCHED)


def test_head_of_a_sequence_that_waits_for_its_model_keeps_its_turn() -> None:
    gateway = Models("day")

    async def scene_of(scene: Scene) -> None:
        told(scene, a="day")
        until = 10**6
        members = [
            encode_member(
                f"s{n}",
                json.dumps({"model": "night" if n == 1 else "day"}).encode(),
                until,
                token="t",
                sequence=Turn("s", n),
            )
            for n in range(3)
        ]
        await scene.store.submit(
            [Submission(each, float(until), f"s{n}", "t", until) for n, each in enumerate(members)]
        )
        await asyncio.sleep(CHECK_INTERVAL_S + 1)
        assert gateway.sent == ["s0"]
        gateway.models.add("night")
        told(scene, a="day night")
        await asyncio.sleep(2)
        assert gateway.sent == ["s0", "s1", "s2"]

    perform(scene_of, gateway, WATCHED)


def test_models_that_requests_wait_for_are_expected_after_a_restart() -> None:
    gateway = Models("day")

    async def scene_of(scene: Scene) -> None:
        told(scene, a="day old")
        told(scene, a="day")
        await submit(scene, "old", "o1")
        await asyncio.sleep(CHECK_INTERVAL_S + 1)
        again = scene.dispatcher.model_router
        again.reconfigure(Options(RETRY))
        again.reconfigure(WATCHED)  # it has forgotten what it saw
        await asyncio.sleep(1)
        told(scene, a="day")
        await submit(scene, "old", "o2")
        await asyncio.sleep(CHECK_INTERVAL_S + 1)
        assert scene.dispatcher.model_router.waiting_counts == {"old": 2}

    perform(scene_of, gateway, WATCHED)


def test_what_waits_comes_back_when_models_are_no_longer_watched() -> None:
    gateway = Models("day", "night")

    async def scene_of(scene: Scene) -> None:
        told(scene, a="day")
        await submit(scene, "night", "n1")
        await asyncio.sleep(CHECK_INTERVAL_S + 1)
        scene.dispatcher.reconfigure(Options(RETRY))
        await asyncio.sleep(UNWATCHED_INTERVAL_S)
        assert gateway.sent == ["n1"]
        assert scene.dispatcher.model_router.list_states() == []
        told(scene, a="")
        await submit(scene, "no such", "n2")
        await asyncio.sleep(1)
        assert (await results(scene))["n2"]["status_code"] == 404, "as the server says"

    perform(scene_of, gateway, WATCHED)


def test_new_terms_hold_for_what_waits() -> None:
    gateway = Models("day")

    async def scene_of(scene: Scene) -> None:
        told(scene, a="day")
        await submit(scene, "night", "n1")
        await asyncio.sleep(CHECK_INTERVAL_S + 1)
        scene.dispatcher.reconfigure(replace(WATCHED, model_terms=ModelTerms({"night": FAIL})))
        await asyncio.sleep(2)
        assert (await results(scene))["n1"]["error_code"] == "MODEL_NOT_FOUND"

    perform(scene_of, gateway, WATCHED)


def test_queue_away_while_recalling_is_asked_again() -> None:
    gateway = Models("day", "night")

    async def scene_of(scene: Scene) -> None:
        told(scene, a="day")
        await submit(scene, "night", "n1")
        await asyncio.sleep(CHECK_INTERVAL_S + 1)
        recall, times = scene.queue.return_waiting_for_models, 0

        async def away(models: Any) -> Any:
            nonlocal times
            times += 1
            if times < 3:
                raise QueueUnavailableError("away")
            return await recall(models)

        scene.queue.return_waiting_for_models = away  # type: ignore[method-assign]
        told(scene, a="night")
        await asyncio.sleep(4 * CHECK_INTERVAL_S)
        assert gateway.sent == ["n1"]
        assert times == 3

    perform(scene_of, gateway, WATCHED)


def test_what_is_seen_is_shown() -> None:
    async def scene_of(scene: Scene) -> None:
        told(scene, a="day", b=None)
        await submit(scene, "night", "n1")
        await asyncio.sleep(CHECK_INTERVAL_S + 1)
        models = scene.dispatcher.model_router
        assert [(seen.name, seen.state, count) for seen, count in models.list_states()] == [
            ("night", ModelState.UNKNOWN, 1),
            ("day", ModelState.READY, 0),
        ]
        assert models.endpoint_problems == {"b": "it does not answer"}

    perform(scene_of, Models("day"), WATCHED)


@pytest.mark.first
def test_adapter_is_loaded_after_two_hours_and_nobody_else_was_slower_for_it() -> None:
    """Requests for others take as long beside 500 that wait as without; one of the 500 has less time."""

    def hours(*, with_adapter: bool) -> tuple[list[float], Models]:
        gateway, took = Models("day", "night"), []

        async def scene_of(scene: Scene) -> None:
            clock = asyncio.get_running_loop().time
            began, number = clock(), 0
            if with_adapter:
                await submit(scene, "night", *(f"n{each}" for each in range(500)))
                await submit(scene, "night", "late", within_s=3600)
            while clock() < began + (7200 if with_adapter else 1200):
                told(scene, a="day")
                for _ in range(3):
                    number += 1
                    asked = clock()
                    await submit(scene, "day", f"d{number}")
                    while f"d{number}" not in gateway.sent:  # noqa: ASYNC110 -- time is virtual
                        await asyncio.sleep(0.01)
                    took.append(clock() - asked)
                await asyncio.sleep(600)
            if not with_adapter:
                return
            found = await results(scene)
            (late,) = [each for name, each in found.items() if not name.startswith("d")]
            assert (late["id"], late["error_code"]) == ("late", "DEADLINE_EXCEEDED")
            assert "its model 'night' is not served" in late["error_message"]
            assert not any(name.startswith("n") for name in gateway.sent)
            told(scene, a="day night")
            await asyncio.sleep(30)
            found = await results(scene)
            assert sum(each.startswith("n") for each in found) == 500
            assert {each["status_code"] for name, each in found.items() if name.startswith("n")} == {200}

        perform(scene_of, gateway, WATCHED)
        return took, gateway

    beside, gateway = hours(with_adapter=True)
    alone, _ = hours(with_adapter=False)
    assert len(beside) == 36
    assert max(beside) <= max(alone) + 0.02
    assert sum(beside) / len(beside) <= sum(alone) / len(alone) * 1.01
    assert len(gateway.sent) == len(beside) + 500
