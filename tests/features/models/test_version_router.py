"""Requests for a model with versions, in the loop: the version they get, pins, and when they wait."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from time import process_time
from typing import Any

import pytest

from dispatcher.features.models.availability import Listing, ModelTerms, WhenNotServed
from dispatcher.features.models.model_router import ModelRouter
from dispatcher.features.models.options import ModelOptions
from dispatcher.features.models.queue.waiting import ModelWait
from dispatcher.features.models.registry import ModelRegistryState
from dispatcher.features.models.status import LabelStatus
from dispatcher.features.models.version_policy import VersionPolicy
from dispatcher.features.models.version_router import (
    MAX_LOGGED_CHANGES,
    PIN_CACHE_S,
    VersionRouter,
    build_pin_key,
)
from dispatcher.features.models.version_template import VersionTemplate
from dispatcher.features.models.versions import FamilyTerms, PinScope, Transition
from dispatcher.features.sequences.turns import Turn
from dispatcher.gateway.contract import AttemptResult
from dispatcher.kernel import Options
from dispatcher.kernel.options import index_options
from dispatcher.queue.contract import Permit, Release
from dispatcher.requests.outcomes.outcome import Delivered, RetryPolicy
from dispatcher.requests.request import Request
from dispatcher.requests.submission import QueueUnavailableError
from dispatcher.settings.model import Settings
from tests.features.models.model_scene import (
    EXCHANGE_INTERVAL_S,
    MODEL_NOT_FOUND_BODY,
    build_models_status,
    change_models,
    get_model,
    list_version_states,
    submit_requests,
    update_listings,
)
from tests.features.scene import Scene, run_in_scene
from tests.kernel.scene import AnsweringGateway, find_part, read_results, request
from tests.service.limiter_status import build_context_status


def options(*, can_steer: bool = False, observe: bool = False, **terms: Any) -> Options:
    """Return options with the family `qwen`."""
    family = FamilyTerms("qwen", VersionTemplate("qwen-v"), **terms)
    return Options(
        RetryPolicy(base_s=0.1, max_s=1.0, max_attempts=3),
        observe=observe,
        of_features=index_options(
            ModelOptions(ModelTerms({"qwen": WhenNotServed.WAIT}), (family,), can_steer=can_steer)
        ),
    )


async def read_models_in_use(scene: Scene) -> set[str]:
    """Return the models with requests in flight, after the next exchange of the registry."""
    await asyncio.sleep(EXCHANGE_INTERVAL_S + 1)
    return set((await scene.store.read_model_registry()).models_in_use)


class VersionGateway(AnsweringGateway):
    """Gateway that records the version and endpoints of each request, and denies some models with 404."""

    answer_after_s = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.sent_as: dict[str, str] = {}
        self.sent_to: dict[str, str] = {}
        self.bodies: dict[str, bytes] = {}
        self.denied_models: set[str] = set()
        self.delay_s: dict[str, float] = {}

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: object
    ) -> AttemptResult:
        model = json.loads(request.payload)["model"]
        self.sent_as[request.id], self.sent_to[request.id] = model, request.endpoints
        self.bodies[request.id] = request.payload
        await asyncio.sleep(self.delay_s.get(request.id, 0.0))
        forwarded = await super().forward(request, token=token, deadline=deadline, may_send=may_send)
        if model in self.denied_models:
            return forwarded.copy_with(outcome=Delivered(404, MODEL_NOT_FOUND_BODY % model.encode()))
        return forwarded


def test_request_is_sent_to_the_newest_version_and_only_its_model_is_changed() -> None:
    gateway = VersionGateway()

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v9 qwen-v10 other")
        await submit_requests(
            scene,
            "r1",
            payload=b'{ "model" : "qwen" , "x":[1.0,  "model"], "y":"\\u0061\\u00e9",  "z" :1e400}',
        )
        await submit_requests(scene, "r2", payload=b'{"model":"other"}')
        await asyncio.sleep(1)
        assert (
            gateway.bodies["r1"]
            == b'{ "model" : "qwen-v10" , "x":[1.0,  "model"], "y":"\\u0061\\u00e9",  "z" :1e400}'
        )
        assert gateway.bodies["r2"] == b'{"model":"other"}'
        results = await read_results(scene)
        assert results["r1"]["model_version"] == "qwen-v10"
        assert "model_version" not in results["r2"]
        assert list_version_states(scene, "qwen-v10") == ["cold", "open"]
        assert list_version_states(scene, "qwen-v9") == ["retiring"]

    run_in_scene(check, gateway, options())


def test_new_version_gets_new_requests_and_the_old_one_is_drained() -> None:
    gateway = VersionGateway()
    gateway.delay_s = {"r1": 20.0}

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await submit_requests(scene, "r1", "r2")
        await asyncio.sleep(1)
        update_listings(scene, a="qwen-v1 qwen-v2")
        await submit_requests(scene, "r3")
        await asyncio.sleep(1)
        assert gateway.sent_as == {"r1": "qwen-v1", "r2": "qwen-v1", "r3": "qwen-v2"}
        assert list_version_states(scene, "qwen-v1") == ["cold", "open", "draining"]
        await asyncio.sleep(30)
        assert list_version_states(scene, "qwen-v1") == ["cold", "open", "draining", "retiring"]
        update_listings(scene, a="qwen-v2")
        assert list_version_states(scene, "qwen-v1")[-1] == "gone"
        assert {each["status_code"] for each in (await read_results(scene)).values()} == {200}

    run_in_scene(check, gateway, options())


def test_with_resource_transition_the_new_version_opens_after_the_old_one_is_idle() -> None:
    gateway = VersionGateway()
    gateway.delay_s = {"r1": 20.0}

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await submit_requests(scene, "r1")
        await asyncio.sleep(1)
        update_listings(scene, a="qwen-v1 qwen-v2")
        await submit_requests(scene, "r2")
        await asyncio.sleep(10)
        assert gateway.sent_as == {"r1": "qwen-v1"}
        ((name, count, why),) = find_part(scene.dispatcher, ModelRouter).list_held_back()
        assert (name, count) == ("qwen", 1)
        assert "'qwen-v1' is drained first" in why
        await asyncio.sleep(25)
        assert gateway.sent_as == {"r1": "qwen-v1", "r2": "qwen-v2"}

    run_in_scene(check, gateway, options(transition=Transition.RESOURCE))


def test_new_version_waits_for_requests_of_other_owners_at_the_old_one() -> None:
    gateway = VersionGateway()

    async def check(scene: Scene) -> None:
        other = type(scene.queue)(scene.store, "b")
        await other.refresh_warm_markers([], [], ["qwen-v1"])
        await asyncio.sleep(EXCHANGE_INTERVAL_S + 1)
        update_listings(scene, a="qwen-v1 qwen-v2")
        await submit_requests(scene, "r1")
        await asyncio.sleep(3)
        assert gateway.sent_as == {}
        await other.refresh_warm_markers([], [], [])
        await asyncio.sleep(2 * EXCHANGE_INTERVAL_S)
        assert gateway.sent_as == {"r1": "qwen-v2"}

    run_in_scene(check, gateway, options(transition=Transition.RESOURCE))


NAMES_OLD_VERSION, NAMES_NEW_VERSION = b'{"model":"qwen-v1"}', b'{"model":"qwen-v2"}'


def test_with_resource_transition_requests_that_name_a_version_count_as_well() -> None:
    gateway = VersionGateway()
    gateway.delay_s = {"o1": 20.0}

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await submit_requests(scene, "o1", payload=NAMES_OLD_VERSION)
        await asyncio.sleep(1)
        assert "qwen-v1" in await read_models_in_use(scene)
        update_listings(scene, a="qwen-v1 qwen-v2")
        await submit_requests(scene, "r1")
        await submit_requests(scene, "n1", payload=NAMES_NEW_VERSION)
        await asyncio.sleep(10)
        assert gateway.sent_as == {"o1": "qwen-v1"}
        reasons = {name: why for name, _, why in find_part(scene.dispatcher, ModelRouter).list_held_back()}
        assert "'qwen-v1' is drained first" in reasons["qwen"]
        assert reasons["qwen-v2"] == "model 'qwen-v2' waits until 'qwen-v1' is drained"
        assert get_model(scene, "qwen-v2").sentence.endswith("; waits until 'qwen-v1' is drained")
        await asyncio.sleep(25)
        assert gateway.sent_as == {"o1": "qwen-v1", "r1": "qwen-v2", "n1": "qwen-v2"}
        assert await read_models_in_use(scene) == set()

    run_in_scene(check, gateway, options(transition=Transition.RESOURCE))


def test_requests_that_name_the_old_version_do_not_keep_the_new_one_closed() -> None:
    """Such requests wait until the new version is open, and are sent then."""
    gateway = VersionGateway()
    gateway.delay_s = {f"o{number}": 8.0 for number in range(12)}

    async def check(scene: Scene) -> None:
        for number in range(12):
            update_listings(scene, a="qwen-v1" if number < 4 else "qwen-v1 qwen-v2")
            if number == 4:
                await submit_requests(scene, "r1")
            await submit_requests(scene, f"o{number}", payload=NAMES_OLD_VERSION)
            await asyncio.sleep(3)
            if number == 4:
                reasons = {
                    name: why for name, _, why in find_part(scene.dispatcher, ModelRouter).list_held_back()
                }
                assert reasons["qwen-v1"] == "model 'qwen-v1' waits for 'qwen-v2'"
                assert list(gateway.sent_as) == ["o0", "o1", "o2", "o3"]
        await asyncio.sleep(20)
        assert (gateway.sent_as["r1"], list_version_states(scene, "qwen-v2")) == ("qwen-v2", ["cold", "open"])
        assert [name for name in gateway.sent_as if name != "r1"] == [f"o{number}" for number in range(12)]
        assert list(gateway.sent_as).index("r1") < list(gateway.sent_as).index("o11")

    run_in_scene(check, gateway, options(transition=Transition.RESOURCE))


def test_request_that_names_a_version_is_sent_immediately_if_no_transition_waits() -> None:
    gateway = VersionGateway()
    gateway.delay_s = {"o1": 5.0}

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1 qwen-v2 qwen-x")
        await submit_requests(scene, "o1", payload=NAMES_OLD_VERSION)
        await submit_requests(scene, "n1", payload=NAMES_NEW_VERSION)
        await submit_requests(scene, "x1", payload=b'{"model":"qwen-x"}')
        await submit_requests(scene, "r1")
        await asyncio.sleep(1)
        assert gateway.sent_as == {"o1": "qwen-v1", "n1": "qwen-v2", "x1": "qwen-x", "r1": "qwen-v2"}
        assert await read_models_in_use(scene) <= {"qwen-v1", "qwen-v2"}

    for transition in Transition:
        run_in_scene(check, gateway, options(transition=transition))


@pytest.mark.parametrize("seed", range(20))
def test_with_resource_transition_no_version_opens_while_another_has_requests(seed: int) -> None:
    """The label moves between two versions at random, and requests use all names. All are answered."""
    rand = Random(seed)
    running: Counter[str] = Counter()
    violations: list[str] = []
    opened_count = 0

    class WatchedGateway(VersionGateway):
        async def forward(
            self, request: Request, *, token: str, deadline: float, may_send: object
        ) -> AttemptResult:
            model = json.loads(request.payload)["model"]
            running[model] += 1
            self.delay_s[request.id] = rand.choice([0.0, 0.5, 4.0])
            try:
                return await super().forward(request, token=token, deadline=deadline, may_send=may_send)
            finally:
                running[model] -= 1

    gateway = WatchedGateway()

    async def check(scene: Scene) -> None:
        nonlocal opened_count
        versions = find_part(scene.dispatcher, ModelRouter).versions
        family = versions.get_family("qwen")
        assert family is not None
        update_families = versions.update_families

        def check_update() -> None:
            nonlocal opened_count
            before = {each.name for each in family.make_snapshots() if family.is_open(each.name)}
            update_families()
            for name in {each.name for each in family.make_snapshots() if family.is_open(each.name)} - before:
                opened_count += 1
                if running.total() > running[name]:
                    violations.append(f"{name} opened while the other version had requests")

        versions.update_families = check_update  # type: ignore[method-assign]
        for number in range(60):
            if rand.random() < 0.15:
                await scene.store.set_label("qwen", "stable", rand.choice("12"), "ada")
            name = rand.choice([b"qwen", b"qwen", b"qwen-v1", b"qwen-v2"])
            await submit_requests(scene, f"r{number}", payload=b'{"model":"%s"}' % name)
            await asyncio.sleep(rand.choice([0.0, 0.1, 1.0]))
            update_listings(scene, a="qwen-v1 qwen-v2")
        await scene.store.set_label("qwen", "stable", "1", "ada")
        for _ in range(12):
            await asyncio.sleep(EXCHANGE_INTERVAL_S)
            update_listings(scene, a="qwen-v1 qwen-v2")
        assert len(await read_results(scene)) == len(gateway.sent_as) == 60, "no request waits forever"
        assert opened_count >= 1
        assert violations == []

    run_in_scene(
        check, gateway, options(transition=Transition.RESOURCE, policy=VersionPolicy(label="stable"))
    )


def test_job_keeps_its_version_and_a_new_job_gets_the_new_one() -> None:
    gateway = VersionGateway()

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await submit_requests(scene, "a1", labels={"job": "a"})
        await asyncio.sleep(1)
        update_listings(scene, a="qwen-v1 qwen-v2")
        await submit_requests(scene, "a2", "a3", labels={"job": "a"})
        await submit_requests(scene, "b1", labels={"file": "b"})
        await submit_requests(scene, "c1")
        await asyncio.sleep(1)
        await asyncio.sleep(10 * PIN_CACHE_S)  # The cached pins expire.
        update_listings(scene, a="qwen-v1 qwen-v2")
        await submit_requests(scene, "a4", labels={"job": "a"})
        await asyncio.sleep(1)
        assert gateway.sent_as == {
            **dict.fromkeys(("a1", "a2", "a3", "a4"), "qwen-v1"),
            **dict.fromkeys(("b1", "c1"), "qwen-v2"),
        }
        update_listings(scene, a="qwen-v2")
        await submit_requests(scene, "a5", labels={"job": "a"})
        await asyncio.sleep(1)
        assert gateway.sent_as["a5"] == "qwen-v2"  # Its version is no longer served.

    run_in_scene(check, gateway, options(pin=PinScope.JOB))


def test_version_of_a_job_is_looked_up_once_per_claim() -> None:
    gateway = VersionGateway()
    pin_counts: list[int] = []

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1 qwen-v2")
        pin_versions = scene.queue.pin_versions

        async def count_pins(pins: Sequence[Any]) -> Sequence[str]:
            pin_counts.append(len(pins))
            return await pin_versions(pins)

        scene.queue.pin_versions = count_pins  # type: ignore[method-assign]
        await submit_requests(scene, "a1", "a2", "a3", labels={"job": "a"})
        await submit_requests(scene, "b1", "b2", labels={"job": "b"})
        await asyncio.sleep(1)
        assert set(gateway.sent_as) == {"a1", "a2", "a3", "b1", "b2"}
        assert sum(pin_counts) == 2

    run_in_scene(check, gateway, options(pin=PinScope.JOB))


def test_sequence_keeps_its_version() -> None:
    gateway = VersionGateway()

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await submit_requests(scene, "s1", extra=Turn("chat"))
        await asyncio.sleep(1)
        update_listings(scene, a="qwen-v1 qwen-v2")
        await submit_requests(scene, "s2", extra=Turn("chat"))
        await submit_requests(scene, "t1", extra=Turn("other"))
        await asyncio.sleep(2)
        assert gateway.sent_as == {"s1": "qwen-v1", "s2": "qwen-v1", "t1": "qwen-v2"}

    run_in_scene(check, gateway, options(pin=PinScope.SEQUENCE))


def test_waiting_turn_is_sent_to_the_version_that_is_open_when_it_runs() -> None:
    gateway = VersionGateway()
    gateway.delay_s = {"s1": 20.0}

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await submit_requests(scene, "s1", "s2", extra=Turn("chat"))
        await asyncio.sleep(5)
        assert gateway.sent_as == {"s1": "qwen-v1"}
        update_listings(scene, a="qwen-v2")
        await asyncio.sleep(30)
        assert gateway.sent_as == {"s1": "qwen-v1", "s2": "qwen-v2"}

    run_in_scene(check, gateway, options(pin=PinScope.SEQUENCE))


def test_pin_applies_to_all_owners_and_requests_wait_while_pins_cannot_be_read() -> None:
    gateway = VersionGateway()

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1 qwen-v2")
        key = build_pin_key(
            options(pin=PinScope.JOB).of(ModelOptions).families[0], request(labels={"job": "a"})
        )
        other = type(scene.queue)(scene.store, "b")
        router = find_part(scene.dispatcher, ModelRouter).versions
        assert await other.pin_versions([replace(_choose_pin(router, key), proposed_version="qwen-v1")]) == [
            "qwen-v1"
        ]
        await submit_requests(scene, "a1", labels={"job": "a"})
        await asyncio.sleep(1)
        assert gateway.sent_as == {"a1": "qwen-v1"}
        pin_versions = scene.queue.pin_versions

        async def raise_unavailable(_pins: Sequence[object]) -> Sequence[str]:
            raise QueueUnavailableError("Redis did not answer in time")

        scene.queue.pin_versions = raise_unavailable  # type: ignore[method-assign,assignment]
        await submit_requests(scene, "b1", labels={"job": "b"})
        await asyncio.sleep(3)
        assert "b1" not in gateway.sent_as
        scene.queue.pin_versions = pin_versions  # type: ignore[method-assign]
        await asyncio.sleep(15)
        assert gateway.sent_as["b1"] == "qwen-v2"

    run_in_scene(check, gateway, options(pin=PinScope.JOB))


def _choose_pin(versions: VersionRouter, key: str) -> Any:
    family = versions.get_family("qwen")
    assert family is not None
    choice = versions.choose_version("qwen", request(labels={"job": "a"}), "")
    assert not isinstance(choice, str)
    assert choice.key == key
    return choice


def test_label_set_by_an_operator_overrides_the_settings() -> None:
    gateway = VersionGateway()
    label_options = options(policy=VersionPolicy(label="stable"), labels={"stable": "v2"})

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1 qwen-v2")
        await submit_requests(scene, "r1")
        await asyncio.sleep(1)
        await scene.store.set_label("qwen", "stable", "1", "ada")
        await asyncio.sleep(EXCHANGE_INTERVAL_S + 1)
        await submit_requests(scene, "r2")
        await asyncio.sleep(1)
        scene.dispatcher.reconfigure(label_options)  # The label of the operator still applies.
        await submit_requests(scene, "r3")
        await asyncio.sleep(1)
        await scene.store.set_label("qwen", "stable", None, "ada")
        await asyncio.sleep(EXCHANGE_INTERVAL_S + 1)
        await submit_requests(scene, "r4")
        await asyncio.sleep(1)
        assert gateway.sent_as == {"r1": "qwen-v2", "r2": "qwen-v1", "r3": "qwen-v1", "r4": "qwen-v2"}

    run_in_scene(check, gateway, label_options)


def test_drained_model_gets_no_requests_until_it_is_undrained() -> None:
    gateway = VersionGateway()

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1 qwen-v2 other")
        await scene.store.drain_version("qwen-v2", "ada")
        await scene.store.drain_version("other", "ada", "a bad quantisation")
        await asyncio.sleep(EXCHANGE_INTERVAL_S + 1)
        await submit_requests(scene, "r1")
        await submit_requests(scene, "o1", payload=b'{"model":"other"}')
        await asyncio.sleep(EXCHANGE_INTERVAL_S + 1)
        assert gateway.sent_as == {"r1": "qwen-v1"}
        ((name, count, why),) = find_part(scene.dispatcher, ModelRouter).list_held_back()
        assert (name, count) == ("other", 1)
        assert "is drained by ada" in why
        assert "a bad quantisation" in why
        assert await scene.store.undrain_version("other")
        assert await scene.store.undrain_version("qwen-v2")
        await asyncio.sleep(EXCHANGE_INTERVAL_S + 1)
        await submit_requests(scene, "r2")
        await asyncio.sleep(EXCHANGE_INTERVAL_S + 1)
        assert gateway.sent_as == {"r1": "qwen-v1", "o1": "other", "r2": "qwen-v2"}

    run_in_scene(check, gateway, options())


def test_model_family_can_be_drained_by_its_name() -> None:
    gateway = VersionGateway()

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1 qwen-v2")
        await scene.store.drain_version("qwen", "ada", "the tokenizer is wrong")
        await asyncio.sleep(EXCHANGE_INTERVAL_S + 1)
        await submit_requests(scene, "r1")
        await asyncio.sleep(EXCHANGE_INTERVAL_S + 1)
        assert gateway.sent_as == {}
        ((name, count, why),) = find_part(scene.dispatcher, ModelRouter).list_held_back()
        assert (name, count) == ("qwen", 1)
        assert re.search("'qwen' is drained by ada since .*: the tokenizer is wrong", why)
        assert get_model(scene, "qwen").sentence.startswith("drained by ada")
        assert await scene.store.undrain_version("qwen")
        await asyncio.sleep(EXCHANGE_INTERVAL_S + 1)
        assert gateway.sent_as == {"r1": "qwen-v2"}

    run_in_scene(check, gateway, options())


def get_explanation(scene: Scene) -> str:
    settings = Settings.model_validate({"gateway": {"url": "http://gateway"}})
    at = asyncio.get_running_loop().time()
    return build_context_status(scene.dispatcher.context, at, settings).gate.explanation


def test_explanation_names_the_version_that_holds_requests_back() -> None:
    gateway = VersionGateway()
    gateway.delay_s["r1"] = 60.0

    async def check_warming(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await submit_requests(scene, "w1")
        await asyncio.sleep(EXCHANGE_INTERVAL_S + 1)
        assert "1 request waits: model 'qwen' has no version" in get_explanation(scene)
        assert "'qwen-v1' is being warmed up." in get_explanation(scene)

    async def check_draining(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await submit_requests(scene, "r1")
        await asyncio.sleep(1)
        update_listings(scene, a="qwen-v1 qwen-v2")
        await submit_requests(scene, "r2", "r3")
        await asyncio.sleep(EXCHANGE_INTERVAL_S + 1)
        assert "2 requests wait: model 'qwen' has no version" in get_explanation(scene)
        assert "'qwen-v1' is drained first." in get_explanation(scene)
        await asyncio.sleep(60)
        assert gateway.sent_as["r2"] == "qwen-v2"
        await scene.store.drain_version("qwen-v2", "ada")
        await scene.store.drain_version("qwen-v1", "bob", "it leaks")
        await asyncio.sleep(EXCHANGE_INTERVAL_S + 1)
        await submit_requests(scene, "r4")
        await asyncio.sleep(EXCHANGE_INTERVAL_S + 1)
        assert "1 request waits" in get_explanation(scene)
        assert "'qwen-v1' is drained by bob since " in get_explanation(scene)
        assert "UTC: it leaks; 'qwen-v2' is drained by ada since " in get_explanation(scene)

    run_in_scene(check_warming, VersionGateway(), options(has_warm_up=True))
    run_in_scene(check_draining, gateway, options(transition=Transition.RESOURCE))


def test_version_is_listed_separately_only_if_a_request_waits_for_it() -> None:
    gateway = VersionGateway()

    def names(scene: Scene) -> list[str]:
        return [model.name for model in build_models_status(scene).models]

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1 qwen-v2 other")
        assert names(scene) == ["qwen", "other"]
        update_listings(scene, a="qwen-v2 other")
        await submit_requests(scene, "r1", payload=b'{"model":"qwen-v1"}')
        await asyncio.sleep(EXCHANGE_INTERVAL_S + 1)
        assert names(scene) == ["qwen-v1", "qwen", "other"]
        update_listings(scene, a="qwen-v1 qwen-v2 other")
        await asyncio.sleep(EXCHANGE_INTERVAL_S + 1)
        assert names(scene) == ["qwen", "other"]
        assert gateway.sent_as == {"r1": "qwen-v1"}

    run_in_scene(check, gateway, options())


def test_status_shows_each_version_with_its_labels_and_drains() -> None:
    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1 qwen-v2 other", b="qwen-v2")
        await scene.store.set_label("qwen", "stable", "1", "ada")
        await scene.store.drain_version("v1", "bob", "it leaks")
        await scene.store.drain_version("other", "bob")
        await asyncio.sleep(EXCHANGE_INTERVAL_S + 1)
        rows = {each.name: each for each in build_models_status(scene).models}
        qwen, other = rows["qwen"], rows["other"]
        assert (other.policy, other.labels, other.versions) == (None, {}, ())
        assert str(other.drained_by).startswith("by bob since")
        assert other.sentence.startswith("drained by bob since")
        assert (qwen.policy, qwen.drained_by) == ("all", None)
        assert qwen.labels.keys() == {"stable", "old"}
        assert qwen.labels["old"] == LabelStatus("1")
        assert qwen.labels["stable"].version == "1"
        assert str(qwen.labels["stable"].by).startswith("by ada since")
        newest, oldest = qwen.versions
        assert (newest.name, newest.state, newest.serving, newest.share) == (
            "qwen-v2",
            "open",
            2,
            1.0,
        )
        assert (newest.warm, newest.drained_by) == (None, None), "the family has no warm-up"
        assert (oldest.name, oldest.drained, oldest.labels) == ("qwen-v1", True, ["old", "stable"])
        assert str(oldest.drained_by).endswith(": it leaks")
        assert build_models_status(scene).model_registry_problem is None
        versions = find_part(scene.dispatcher, ModelRouter).versions
        assert versions.registry is not None
        versions.registry = replace(versions.registry, problem="the key holds a list")
        assert build_models_status(scene).model_registry_problem == "the key holds a list"

    labels = {"stable": "2", "old": "1"}
    run_in_scene(check, VersionGateway(), options(policy=VersionPolicy(everything=True), labels=labels))


def test_removing_a_family_from_the_settings_during_a_lookup_stops_no_request() -> None:
    gateway = VersionGateway()

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await asyncio.sleep(1)
        pin_versions = scene.queue.pin_versions

        async def pin_slowly(pins: Sequence[Any]) -> Sequence[str]:
            await asyncio.sleep(1)
            return await pin_versions(pins)

        scene.queue.pin_versions = pin_slowly  # type: ignore[method-assign]
        await submit_requests(scene, "r1", labels={"job": "a"})
        await asyncio.sleep(0.5)
        scene.dispatcher.reconfigure(change_models(options(), families=(), can_steer=True))
        await asyncio.sleep(2)
        assert gateway.sent_as == {"r1": "qwen-v1"}

    run_in_scene(check, gateway, options(pin=PinScope.JOB, can_steer=True))


def test_requests_wait_while_no_version_is_served() -> None:
    gateway = VersionGateway()

    async def check(scene: Scene) -> None:
        update_listings(scene, a="other")
        await submit_requests(scene, "r1")
        await asyncio.sleep(EXCHANGE_INTERVAL_S + 1)
        ((_, _, why),) = find_part(scene.dispatcher, ModelRouter).list_held_back()
        assert "no version of 'qwen' is served" in why
        assert "no version of 'qwen' is served" in get_model(scene, "qwen").sentence
        update_listings(scene, a="other qwen-v1")
        await asyncio.sleep(1)
        assert gateway.sent_as == {"r1": "qwen-v1"}
        model = get_model(scene, "qwen")
        assert (model.state, model.serving, model.endpoints) == ("ready", 1, 1)

    run_in_scene(check, gateway, options())


def test_requests_fail_while_no_version_is_served_if_they_must_not_wait() -> None:
    gateway = VersionGateway()
    failing_options = change_models(options(), terms=ModelTerms({"qwen": WhenNotServed.FAIL}))

    async def check(scene: Scene) -> None:
        update_listings(scene, a="other")
        await submit_requests(scene, "r1")
        await asyncio.sleep(1)
        assert (await read_results(scene))["r1"]["error_code"] == "MODEL_NOT_FOUND"

    run_in_scene(check, gateway, failing_options)


def test_version_denied_by_the_server_costs_no_attempt() -> None:
    gateway = VersionGateway()
    gateway.denied_models = {"qwen-v2"}

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1 qwen-v2")
        await submit_requests(scene, "r1")
        await asyncio.sleep(3)
        result = (await read_results(scene))["r1"]
        assert (result["status_code"], result["model_version"]) == (200, "qwen-v1")
        assert list_version_states(scene, "qwen-v2") == ["cold", "open", "draining", "gone"]

    run_in_scene(check, gateway, options())


def test_request_whose_model_cannot_be_replaced_is_rejected() -> None:
    gateway = VersionGateway()

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1")
        await submit_requests(scene, "r1", payload=b'{"model":"x","model":"qwen"}')
        await submit_requests(scene, "r2")
        await asyncio.sleep(1)
        results = await read_results(scene)
        assert results["r1"]["error_code"] == "INVALID_REQUEST"
        assert "`model`" in results["r1"]["error_message"]
        assert gateway.sent_as == {"r2": "qwen-v1"}

    run_in_scene(check, gateway, options())


def test_weights_divide_requests_and_the_same_id_gets_the_same_version() -> None:
    gateway = VersionGateway()
    names = [f"r{number}" for number in range(400)]

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen-v1 qwen-v2")
        await submit_requests(scene, *names)
        await asyncio.sleep(30)
        canaries = [name for name, model in gateway.sent_as.items() if model == "qwen-v2"]
        assert len(gateway.sent_as) == 400
        assert 20 <= len(canaries) <= 65
        before = dict(gateway.sent_as)
        await submit_requests(scene, *names)
        await asyncio.sleep(30)
        assert gateway.sent_as == before

    policy = VersionPolicy(everything=True)
    run_in_scene(check, gateway, options(policy=policy, weights={"v2": 0.1}))


def test_observer_reads_the_model_registry_and_writes_nothing() -> None:
    async def check(scene: Scene) -> None:
        other = type(scene.queue)(scene.store, "b")
        registry = scene.store.queue.model_registry
        update_listings(scene, a="qwen-v1 qwen-v2")
        await asyncio.sleep(2 * EXCHANGE_INTERVAL_S)
        assert (registry.warm_until, registry.lock_until, registry.in_use_until) == ({}, {}, {})
        assert list_version_states(scene, "qwen-v2") == ["cold"]
        await other.mark_warm("qwen-v2", "a")
        await submit_requests(scene, "r1")
        claimed = await other.claim(1, "n", Permit(9, asyncio.get_running_loop().time(), 0))
        await other.release([Release(lease, extra=ModelWait("qwen")) for lease in claimed.leases])
        await asyncio.sleep(EXCHANGE_INTERVAL_S + 1)
        before = dict(registry.warm_until)
        (model,) = build_models_status(scene).models
        assert [(each.state, each.warm) for each in model.versions] == [("open", 1), ("retiring", 0)]
        assert model.waiting == 1
        await scene.store.drain_version("qwen-v2", "ada", "bad")
        update_listings(scene, b="qwen-v2")
        await asyncio.sleep(EXCHANGE_INTERVAL_S + 1)
        update_listings(scene, a="qwen-v2")
        await asyncio.sleep(EXCHANGE_INTERVAL_S + 1)
        (model,) = build_models_status(scene).models
        (version,) = [each for each in model.versions if each.name == "qwen-v2"]
        assert (version.warm, version.drained) == (1, True), (
            "other dispatchers report that the version was gone"
        )
        assert (registry.warm_until, registry.lock_until, registry.in_use_until, registry.pins) == (
            before,
            {},
            {},
            {},
        )

    run_in_scene(check, VersionGateway(), options(observe=True, has_warm_up=True, pin=PinScope.JOB))


def test_without_families_requests_are_not_changed() -> None:
    gateway = VersionGateway()
    options_without_versions = change_models(options(), families=())

    async def check(scene: Scene) -> None:
        update_listings(scene, a="qwen qwen-v1")
        await submit_requests(scene, "r1", payload=b'{"model":"qwen"}')
        await asyncio.sleep(1)
        assert gateway.bodies == {"r1": b'{"model":"qwen"}'}
        assert not find_part(scene.dispatcher, ModelRouter).versions
        scene.dispatcher.reconfigure(options())
        update_listings(scene, a="qwen qwen-v1")
        await submit_requests(scene, "r2")
        await asyncio.sleep(1)
        assert gateway.sent_as["r2"] == "qwen-v1"

    run_in_scene(check, gateway, options_without_versions)


def build_many_families(family_count: int, version_count: int) -> tuple[Options, str]:
    """Return options for families with several versions each, and the names that endpoints list."""
    families = [FamilyTerms(f"m{at}", VersionTemplate(f"m{at}-v")) for at in range(family_count)]
    many_options = change_models(
        options(),
        terms=ModelTerms({each.name: WhenNotServed.WAIT for each in families}),
        families=families,
    )
    return many_options, " ".join(
        f"m{at}-v{number}" for at in range(family_count) for number in range(version_count)
    )


def test_update_time_grows_with_versions_and_not_with_families_times_names() -> None:
    def measure_update_s(family_count: int) -> float:
        many_options, names = build_many_families(family_count, 10)
        durations_s: list[float] = []

        async def check(scene: Scene) -> None:
            update_listings(scene, a=names)
            for _ in range(7):
                started_at = process_time()
                find_part(scene.dispatcher, ModelRouter).versions.update_families()
                durations_s.append(process_time() - started_at)

        run_in_scene(check, VersionGateway(), many_options)
        return min(durations_s)

    assert measure_update_s(400) < 40 * measure_update_s(40)  # 10 times the versions


def test_changes_of_many_versions_are_logged_up_to_a_maximum() -> None:
    many_options, names = build_many_families(1, 3000)

    async def check(scene: Scene) -> None:
        update_listings(scene, a=names)
        assert list_version_states(scene, "m0-v2999") == ["cold", "open"]
        assert len(scene.events) <= 2 + MAX_LOGGED_CHANGES
        family = find_part(scene.dispatcher, ModelRouter).versions.get_family("m0")
        assert family is not None
        assert len(family.make_snapshots()) == 3000
        update_listings(scene, a="m0-v1")
        assert list_version_states(scene, "m0-v2999") == ["cold", "open", "draining", "gone"]

    run_in_scene(check, VersionGateway(), many_options)


def test_completion_of_a_request_updates_families_only_if_needed() -> None:
    gateway = VersionGateway()
    update_count = 0

    async def check(scene: Scene) -> None:
        versions = find_part(scene.dispatcher, ModelRouter).versions
        update_listings(scene, a="qwen-v1")
        await asyncio.sleep(1)
        update_families = versions.update_families

        def count_update() -> None:
            nonlocal update_count
            update_count += 1
            update_families()

        versions.update_families = count_update  # type: ignore[method-assign]
        for number in range(10):
            await submit_requests(scene, f"r{number}")
            await asyncio.sleep(0.3)
        assert len(gateway.sent_as) == 10
        assert update_count <= 2  # The exchange of the registry updates them.

    run_in_scene(check, gateway, options())


def test_pin_keys_of_jobs_and_sequences_are_short_and_distinct() -> None:
    terms = FamilyTerms("qwen", pin=PinScope.JOB)
    job = request(labels={"job": "x"})
    assert build_pin_key(terms, job) == build_pin_key(terms, request(labels={"file": "x"}))
    assert build_pin_key(terms, job) != build_pin_key(replace(terms, name="other"), job)
    assert build_pin_key(terms, request(extra=Turn("x"))) != build_pin_key(terms, job)
    sequence_keys = [build_pin_key(terms, request(extra=Turn("x", owner=owner))) for owner in ("a", "b")]
    assert len(set(sequence_keys)) == 2
    assert build_pin_key(terms, request()) == ""
    assert build_pin_key(replace(terms, pin=PinScope.SEQUENCE), job) == ""
    assert build_pin_key(replace(terms, pin=PinScope.REQUEST), job) == ""
    assert len(build_pin_key(terms, request(labels={"job": "\ud800" * 10_000}))) == 32


def test_default_registry_state_is_empty_and_listing_is_not_down() -> None:
    assert ModelRegistryState() == ModelRegistryState(frozenset(), frozenset(), {}, {}, "")
    assert Listing("a", 0.0, ("m",)).is_down is False
