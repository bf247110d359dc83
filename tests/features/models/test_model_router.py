"""Requests and their models in the loop: which are sent, which wait and return, and which fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from dispatcher.common.grouping import GroupingRule
from dispatcher.features.merging.options import MergeOptions
from dispatcher.features.merging.rules import BatchRule, MergeMode
from dispatcher.features.merging.shapes import SHAPES
from dispatcher.features.models.availability import DENIAL_S, ModelTerms, WhenNotServed
from dispatcher.features.models.counts import ModelCounts
from dispatcher.features.models.model_router import (
    CHECK_INTERVAL_S,
    OTHER_SERVER_RETRY_S,
    UNWATCHED_INTERVAL_S,
    ModelRouter,
)
from dispatcher.features.models.options import ModelOptions
from dispatcher.features.sequences.turns import Turn
from dispatcher.gateway.contract import AttemptResult
from dispatcher.kernel import Options
from dispatcher.kernel.options import index_options
from dispatcher.limit.budget import Policy
from dispatcher.limit.limiter import Limiter
from dispatcher.requests.outcomes.outcome import Delivered, RetryPolicy
from dispatcher.requests.queue_counts import QueueCounts
from dispatcher.requests.request import Request, encode_member
from dispatcher.requests.submission import QueueUnavailableError, Submission
from dispatcher.telemetry.events import Event
from tests.features.models.model_scene import (
    MODEL_NOT_FOUND_BODY,
    build_models_status,
    change_models,
    update_listings,
)
from tests.features.scene import Scene, run_in_scene
from tests.kernel.scene import AnsweringGateway, find_part, read_results
from tests.service.limiter_status import create_context

RETRY = RetryPolicy(base_s=0.1, max_s=1.0, max_attempts=3)
WAIT, FAIL = WhenNotServed.WAIT, WhenNotServed.FAIL
WATCHED_OPTIONS = Options(RETRY, of_features=index_options(ModelOptions(ModelTerms({"night": WAIT}))))


class ModelGateway(AnsweringGateway):
    """Gateway that answers 404 for unknown models, as vLLM does."""

    answer_after_s = 0.1

    def __init__(self, *models: str) -> None:
        super().__init__()
        self.models = set(models)
        self.requested_models: list[str] = []

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: object
    ) -> AttemptResult:
        forwarded = await super().forward(request, token=token, deadline=deadline, may_send=may_send)
        body = json.loads(request.payload)
        self.requested_models.append(body["model"])
        if body["model"] not in self.models:
            return forwarded.copy_with(outcome=Delivered(404, MODEL_NOT_FOUND_BODY % body["model"].encode()))
        if "input" in body:
            data = [{"index": n, "embedding": [0.5]} for n, _ in enumerate(body["input"])]
            return forwarded.copy_with(outcome=Delivered(200, json.dumps({"data": data}).encode()))
        return forwarded


async def submit_requests(
    scene: Scene, model: str, *names: str, within_s: float = 10**6, **body: Any
) -> None:
    deadline = int(asyncio.get_running_loop().time() + within_s)
    await scene.store.submit(
        [
            Submission(
                encode_member(name, json.dumps({"model": model, **body}).encode(), deadline, token="t"),
                float(deadline),
                name,
                "t",
                deadline,
            )
            for name in names
        ]
    )


def test_request_waits_until_its_model_is_served_while_others_are_sent() -> None:
    gateway = ModelGateway("day", "night")

    async def check(scene: Scene) -> None:
        update_listings(scene, a="day")
        await submit_requests(scene, "night", *(f"n{number}" for number in range(30)))
        await submit_requests(scene, "day", "d1", "d2")
        await asyncio.sleep(1)
        assert sorted(gateway.sent) == ["d1", "d2"]
        await asyncio.sleep(CHECK_INTERVAL_S)
        assert find_part(scene.dispatcher, ModelRouter).waiting_counts == {"night": 30}
        assert find_part(scene.dispatcher, ModelRouter).list_held_back() == [
            ("night", 30, "model 'night' is not served")
        ]
        update_listings(scene, a="day night")
        await asyncio.sleep(2)
        assert len(gateway.sent) == 32
        assert {each["status_code"] for each in (await read_results(scene)).values()} == {200}
        assert find_part(scene.dispatcher, ModelRouter).request_counts == {
            "served": 32,
            "waits": 30,
            "unknown": 0,
            "denied": 0,
        }
        logged_states = [fields["state"] for event, fields in scene.events if event is Event.MODEL]
        assert logged_states == ["absent", "ready"]

    run_in_scene(check, gateway, WATCHED_OPTIONS)


def test_deadline_error_names_the_model_that_is_not_served() -> None:
    gateway = ModelGateway("day")

    async def check(scene: Scene) -> None:
        update_listings(scene, a="day", b="day")
        await submit_requests(scene, "night", "n1", within_s=5)
        await asyncio.sleep(8)
        result = (await read_results(scene))["n1"]
        assert result["error_code"] == "DEADLINE_EXCEEDED"
        assert "its model 'night' is served by none of 2 endpoints" in result["error_message"]
        assert gateway.sent == []

    run_in_scene(check, gateway, WATCHED_OPTIONS)


def test_request_for_an_unknown_model_fails_immediately_with_the_known_names() -> None:
    gateway = ModelGateway("day")

    async def check(scene: Scene) -> None:
        update_listings(scene, a="day")
        await submit_requests(scene, "dya", "typo")
        await asyncio.sleep(1)
        result = (await read_results(scene))["typo"]
        assert result["error_code"] == "MODEL_NOT_FOUND"
        assert result["error_message"] == "no model 'dya' is served here: there is 'day'"
        assert gateway.sent == []

    run_in_scene(check, gateway, WATCHED_OPTIONS)


def test_answer_that_denies_a_listed_model_costs_no_attempt() -> None:
    """The model was removed after the last listing of the endpoints."""
    gateway = ModelGateway("day")

    async def check(scene: Scene) -> None:
        update_listings(scene, a="day night")
        await submit_requests(scene, "night", "n1", "n2")
        await asyncio.sleep(1)
        assert sorted(gateway.sent) == ["n1", "n2"], "each is sent once"
        assert await read_results(scene) == {}
        gateway.models.add("night")
        update_listings(scene, a="day night")
        await asyncio.sleep(DENIAL_S - 2)
        assert len(gateway.sent) == 2
        await asyncio.sleep(2)
        update_listings(scene, a="day night")
        await asyncio.sleep(CHECK_INTERVAL_S + 1)
        assert sorted(gateway.sent) == ["n1", "n1", "n2", "n2"]
        assert {each["status_code"] for each in (await read_results(scene)).values()} == {200}
        assert find_part(scene.dispatcher, ModelRouter).request_counts["denied"] == 2

    run_in_scene(check, gateway, WATCHED_OPTIONS)


def test_request_is_retried_soon_if_only_some_servers_have_its_model() -> None:
    gateway = ModelGateway("day")

    async def check(scene: Scene) -> None:
        update_listings(scene, a="day night", b="day")
        await submit_requests(scene, "night", "n1")
        await asyncio.sleep(0.5)
        gateway.models.add("night")
        await asyncio.sleep(OTHER_SERVER_RETRY_S + 0.5)
        assert gateway.sent == ["n1", "n1"]
        assert (await read_results(scene))["n1"]["status_code"] == 200

    run_in_scene(check, gateway, WATCHED_OPTIONS)


def test_answer_of_the_server_is_the_result_for_a_model_that_is_not_expected() -> None:
    gateway = ModelGateway("day")

    async def check(scene: Scene) -> None:
        update_listings(scene, a="day", b=None)
        await submit_requests(scene, "day", "d1")  # The answer verifies the gateway.
        await asyncio.sleep(1)
        await submit_requests(scene, "other", "o1")
        await asyncio.sleep(1)
        assert (await read_results(scene))["o1"]["status_code"] == 404

    run_in_scene(check, gateway, WATCHED_OPTIONS)


def test_merged_call_whose_model_is_denied_releases_all_its_requests() -> None:
    gateway = ModelGateway("day")
    rule = BatchRule(
        ("/v1/embeddings",), SHAPES["embeddings"], MergeMode.ON, GroupingRule(8, (), 0.05, False)
    )
    merging_options = replace(
        WATCHED_OPTIONS,
        default_path="/v1/embeddings",
        of_features={**WATCHED_OPTIONS.of_features, MergeOptions: MergeOptions((rule,))},
    )

    async def check(scene: Scene) -> None:
        update_listings(scene, a="day night")
        await submit_requests(scene, "night", "n1", "n2", "n3", input=["x"])
        await asyncio.sleep(1)
        assert len(gateway.sent) == 1, "one call, which is not split into halves"
        gateway.models.add("night")
        await asyncio.sleep(DENIAL_S)
        update_listings(scene, a="day night")
        await asyncio.sleep(CHECK_INTERVAL_S + 1)
        assert {each["status_code"] for each in (await read_results(scene)).values()} == {200}

    run_in_scene(check, gateway, merging_options)


def test_request_cancelled_while_it_waits_for_its_model_is_completed() -> None:
    gateway = ModelGateway("day")

    async def check(scene: Scene) -> None:
        update_listings(scene, a="day")
        await submit_requests(scene, "night", "n1", "n2")
        await asyncio.sleep(CHECK_INTERVAL_S + 1)
        assert await scene.store.cancel_request("n1", "t")
        await asyncio.sleep(3)
        results = await read_results(scene)
        assert {name: each["error_code"] for name, each in results.items()} == {"n1": "CANCELLED"}
        await asyncio.sleep(CHECK_INTERVAL_S)
        assert find_part(scene.dispatcher, ModelRouter).waiting_counts == {"night": 1}

    run_in_scene(check, gateway, WATCHED_OPTIONS)


def test_next_request_of_a_sequence_keeps_its_turn_while_it_waits_for_its_model() -> None:
    gateway = ModelGateway("day")

    async def check(scene: Scene) -> None:
        update_listings(scene, a="day")
        deadline = 10**6
        members = [
            encode_member(
                f"s{n}",
                json.dumps({"model": "night" if n == 1 else "day"}).encode(),
                deadline,
                token="t",
                extra=Turn("s", n),
            )
            for n in range(3)
        ]
        await scene.store.submit(
            [Submission(each, float(deadline), f"s{n}", "t", deadline) for n, each in enumerate(members)]
        )
        await asyncio.sleep(CHECK_INTERVAL_S + 1)
        assert gateway.sent == ["s0"]
        gateway.models.add("night")
        update_listings(scene, a="day night")
        await asyncio.sleep(2)
        assert gateway.sent == ["s0", "s1", "s2"]

    run_in_scene(check, gateway, WATCHED_OPTIONS)


def test_models_that_requests_wait_for_are_expected_after_a_restart() -> None:
    gateway = ModelGateway("day")

    async def check(scene: Scene) -> None:
        update_listings(scene, a="day old")
        update_listings(scene, a="day")
        await submit_requests(scene, "old", "o1")
        await asyncio.sleep(CHECK_INTERVAL_S + 1)
        scene.dispatcher.reconfigure(Options(RETRY))
        scene.dispatcher.reconfigure(WATCHED_OPTIONS)  # The router forgets its listings, as after a restart.
        await asyncio.sleep(1)
        update_listings(scene, a="day")
        await submit_requests(scene, "old", "o2")
        await asyncio.sleep(CHECK_INTERVAL_S + 1)
        assert find_part(scene.dispatcher, ModelRouter).waiting_counts == {"old": 2}

    run_in_scene(check, gateway, WATCHED_OPTIONS)


def test_waiting_requests_return_when_models_are_no_longer_watched() -> None:
    gateway = ModelGateway("day", "night")

    async def check(scene: Scene) -> None:
        update_listings(scene, a="day")
        await submit_requests(scene, "night", "n1")
        await asyncio.sleep(CHECK_INTERVAL_S + 1)
        scene.dispatcher.reconfigure(Options(RETRY))
        await asyncio.sleep(UNWATCHED_INTERVAL_S)
        assert gateway.sent == ["n1"]
        assert not build_models_status(scene).models
        update_listings(scene, a="")
        await submit_requests(scene, "no such", "n2")
        await asyncio.sleep(1)
        assert (await read_results(scene))["n2"]["status_code"] == 404, "the status of the server"

    run_in_scene(check, gateway, WATCHED_OPTIONS)


def test_request_that_is_looked_up_while_a_reload_begins_to_watch_models_is_sent() -> None:
    gateway = ModelGateway("day")

    async def check(scene: Scene) -> None:
        async def check_cancelled(requests: Sequence[tuple[str, str]]) -> Sequence[bool]:
            scene.dispatcher.reconfigure(WATCHED_OPTIONS)
            return [False] * len(requests)

        scene.queue.check_cancelled = check_cancelled  # type: ignore[method-assign]
        await submit_requests(scene, "day", "d1")
        await asyncio.sleep(1)
        assert gateway.sent == ["d1"]
        assert not [each for each in scene.events if each[0] is Event.INTERNAL_ERROR]

    run_in_scene(check, gateway, Options(RetryPolicy(base_s=10.0)))


def test_new_terms_apply_to_waiting_requests() -> None:
    gateway = ModelGateway("day")

    async def check(scene: Scene) -> None:
        update_listings(scene, a="day")
        await submit_requests(scene, "night", "n1")
        await asyncio.sleep(CHECK_INTERVAL_S + 1)
        scene.dispatcher.reconfigure(change_models(WATCHED_OPTIONS, terms=ModelTerms({"night": FAIL})))
        await asyncio.sleep(2)
        assert (await read_results(scene))["n1"]["error_code"] == "MODEL_NOT_FOUND"

    run_in_scene(check, gateway, WATCHED_OPTIONS)


def test_return_of_waiting_requests_is_retried_after_an_outage() -> None:
    gateway = ModelGateway("day", "night")

    async def check(scene: Scene) -> None:
        update_listings(scene, a="day")
        await submit_requests(scene, "night", "n1")
        await asyncio.sleep(CHECK_INTERVAL_S + 1)
        return_waiting, call_count = scene.queue.return_waiting_for_models, 0

        async def fail_at_first(models: Any) -> Any:
            nonlocal call_count
            call_count += 1
            if call_count < 3:
                raise QueueUnavailableError("away")
            return await return_waiting(models)

        scene.queue.return_waiting_for_models = fail_at_first  # type: ignore[method-assign]
        update_listings(scene, a="night")
        await asyncio.sleep(4 * CHECK_INTERVAL_S)
        assert gateway.sent == ["n1"]
        assert call_count == 3

    run_in_scene(check, gateway, WATCHED_OPTIONS)


def test_states_and_endpoint_problems_are_listed() -> None:
    async def check(scene: Scene) -> None:
        update_listings(scene, a="day", b=None)
        await submit_requests(scene, "night", "n1")
        await asyncio.sleep(CHECK_INTERVAL_S + 1)
        status = build_models_status(scene)
        assert [(model.name, model.state, model.waiting) for model in status.models] == [
            ("night", "unknown", 1),
            ("day", "ready", 0),
        ]
        assert status.model_problems == ["b: it does not answer"]

    run_in_scene(check, ModelGateway("day"), WATCHED_OPTIONS)


@pytest.mark.slow
@pytest.mark.first
def test_requests_that_wait_two_hours_for_their_model_do_not_delay_others() -> None:
    """Requests for another model take no longer beside 500 waiting ones, of which one expires."""

    def run_requests(*, with_adapter: bool) -> tuple[list[float], ModelGateway]:
        gateway, durations_s = ModelGateway("day", "night"), []

        async def check(scene: Scene) -> None:
            clock = asyncio.get_running_loop().time
            started_at, number = clock(), 0
            if with_adapter:
                await submit_requests(scene, "night", *(f"n{each}" for each in range(500)))
                await submit_requests(scene, "night", "late", within_s=3600)
            while clock() < started_at + (7200 if with_adapter else 1200):
                update_listings(scene, a="day")
                for _ in range(3):
                    number += 1
                    submitted_at = clock()
                    await submit_requests(scene, "day", f"d{number}")
                    while f"d{number}" not in gateway.sent:  # noqa: ASYNC110 -- time is virtual
                        await asyncio.sleep(0.01)
                    durations_s.append(clock() - submitted_at)
                await asyncio.sleep(600)
            if not with_adapter:
                return
            results = await read_results(scene)
            (late,) = [each for name, each in results.items() if not name.startswith("d")]
            assert (late["id"], late["error_code"]) == ("late", "DEADLINE_EXCEEDED")
            assert "its model 'night' is not served" in late["error_message"]
            assert not any(name.startswith("n") for name in gateway.sent)
            update_listings(scene, a="day night")
            await asyncio.sleep(30)
            results = await read_results(scene)
            assert sum(each.startswith("n") for each in results) == 500
            assert {each["status_code"] for name, each in results.items() if name.startswith("n")} == {200}

        run_in_scene(check, gateway, WATCHED_OPTIONS)
        return durations_s, gateway

    durations_with_adapter, gateway = run_requests(with_adapter=True)
    durations_without_adapter, _ = run_requests(with_adapter=False)
    assert len(durations_with_adapter) == 36
    assert max(durations_with_adapter) <= max(durations_without_adapter) + 0.02
    assert (
        sum(durations_with_adapter) / len(durations_with_adapter)
        <= sum(durations_without_adapter) / len(durations_without_adapter) * 1.01
    )
    assert len(gateway.sent) == len(durations_with_adapter) + 500


async def test_health_names_requests_that_wait_for_a_model_that_is_not_known_yet() -> None:
    router = ModelRouter(create_context(Limiter(Policy(), [])))
    reason = router.explain_waiting(QueueCounts(5, 0, 0, 0, of_features={ModelCounts: ModelCounts(5)}))
    assert reason is not None
    assert (reason.cause.name, reason.why) == ("models", "5 requests wait for a model")
    assert router.explain_waiting(QueueCounts(5, 0, 0, 0)) is None
