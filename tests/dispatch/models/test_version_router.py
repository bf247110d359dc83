"""Requests for a model with versions, in the loop: to which they go, what they keep, and when they wait."""

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

from dispatcher.core.gateway.outcome import Delivered, RetryPolicy
from dispatcher.core.models.availability import Listing, ModelTerms, WhenNotServed
from dispatcher.core.models.version_policy import VersionPolicy
from dispatcher.core.models.versions import FamilyTerms, PinScope, Transition
from dispatcher.core.requests.request import Request
from dispatcher.core.sequences.turns import Turn
from dispatcher.dispatch import Options
from dispatcher.dispatch.models.version_router import (
    MAX_LOGGED_CHANGES,
    PIN_CACHE_S,
    VersionRouter,
    build_pin_key,
)
from dispatcher.dispatch.options import FamilyOptions, VersionOptions
from dispatcher.ports import AttemptResult, ModelRegistryState, Permit, QueueUnavailableError, Release
from dispatcher.settings import Settings
from dispatcher.telemetry.status import ModelsStatus
from tests.app.status_worlds import status_of
from tests.dispatch.pool import EACH_S, GONE, results, states, submit, told
from tests.dispatch.scene import Answers, Scene, perform, request


def options(*, steered: bool = False, observe: bool = False, **terms: Any) -> Options:
    """`qwen` has versions."""
    family = FamilyTerms("qwen", re.compile(r"qwen-v(?P<version>\d+)"), **terms)
    return Options(
        RetryPolicy(base_s=0.1, max_s=1.0, max_attempts=3),
        model_terms=ModelTerms({"qwen": WhenNotServed.WAIT}),
        versions=VersionOptions((FamilyOptions(family),), can_steer=steered),
        observe=observe,
    )


def told_of(scene: Scene) -> ModelsStatus:
    """What /status says of models."""
    settings = Settings.model_validate({"gateway": {"url": "http://gateway"}})
    at = asyncio.get_running_loop().time()
    view, models = scene.dispatcher.view, scene.dispatcher.model_router
    return status_of(scene.limiter, at, settings, queue=view, models=models).models


async def used(scene: Scene) -> set[str]:
    """What the queue says is under way, at the latest a moment after that."""
    await asyncio.sleep(EACH_S + 1)
    return set((await scene.store.read_model_registry()).models_in_use)


class Servers(Answers):
    """Notes what each was sent as; those that are not `there` are answered 404."""

    takes_s = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.sent_as: dict[str, str] = {}
        self.sent_to: dict[str, str] = {}
        self.bodies: dict[str, bytes] = {}
        self.away: set[str] = set()
        self.slow: dict[str, float] = {}

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: object
    ) -> AttemptResult:
        model = json.loads(request.payload)["model"]
        self.sent_as[request.id], self.sent_to[request.id] = model, request.endpoints
        self.bodies[request.id] = request.payload
        await asyncio.sleep(self.slow.get(request.id, 0.0))
        forwarded = await super().forward(request, token=token, deadline=deadline, may_send=may_send)
        if model in self.away:
            return forwarded.copy_with(outcome=Delivered(404, GONE % model.encode()))
        return forwarded


def test_request_goes_to_the_newest_version_and_only_its_model_is_changed() -> None:
    gateway = Servers()

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v9 qwen-v10 other")
        await submit(
            scene,
            "r1",
            payload=b'{ "model" : "qwen" , "x":[1.0,  "model"], "y":"\\u0061\\u00e9",  "z" :1e400}',
        )
        await submit(scene, "r2", payload=b'{"model":"other"}')
        await asyncio.sleep(1)
        assert (
            gateway.bodies["r1"]
            == b'{ "model" : "qwen-v10" , "x":[1.0,  "model"], "y":"\\u0061\\u00e9",  "z" :1e400}'
        )
        assert gateway.bodies["r2"] == b'{"model":"other"}'
        found = await results(scene)
        assert found["r1"]["model_version"] == "qwen-v10"
        assert "model_version" not in found["r2"]
        assert states(scene, "qwen-v10") == ["cold", "open"]
        assert states(scene, "qwen-v9") == ["retiring"]

    perform(scene_of, gateway, options())


def test_new_version_takes_over_and_the_old_one_is_drained() -> None:
    gateway = Servers()
    gateway.slow = {"r1": 20.0}

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1")
        await submit(scene, "r1", "r2")
        await asyncio.sleep(1)
        told(scene, a="qwen-v1 qwen-v2")
        await submit(scene, "r3")
        await asyncio.sleep(1)
        assert gateway.sent_as == {"r1": "qwen-v1", "r2": "qwen-v1", "r3": "qwen-v2"}
        assert states(scene, "qwen-v1") == ["cold", "open", "draining"]
        await asyncio.sleep(30)
        assert states(scene, "qwen-v1") == ["cold", "open", "draining", "retiring"]
        told(scene, a="qwen-v2")
        assert states(scene, "qwen-v1")[-1] == "gone"
        assert {each["status_code"] for each in (await results(scene)).values()} == {200}

    perform(scene_of, gateway, options())


def test_where_resources_are_kept_the_new_version_waits_for_the_end_of_the_old() -> None:
    gateway = Servers()
    gateway.slow = {"r1": 20.0}

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1")
        await submit(scene, "r1")
        await asyncio.sleep(1)
        told(scene, a="qwen-v1 qwen-v2")
        await submit(scene, "r2")
        await asyncio.sleep(10)
        assert gateway.sent_as == {"r1": "qwen-v1"}
        ((name, count, why),) = scene.dispatcher.model_router.list_held_back()
        assert (name, count) == ("qwen", 1)
        assert "'qwen-v1' is drained first" in why
        await asyncio.sleep(25)
        assert gateway.sent_as == {"r1": "qwen-v1", "r2": "qwen-v2"}

    perform(scene_of, gateway, options(transition=Transition.RESOURCE))


def test_another_owner_that_still_uses_the_old_version_is_waited_for() -> None:
    gateway = Servers()

    async def scene_of(scene: Scene) -> None:
        other = type(scene.queue)(scene.store, "b")
        await other.refresh_warm_markers([], [], ["qwen-v1"])
        await asyncio.sleep(EACH_S + 1)
        told(scene, a="qwen-v1 qwen-v2")
        await submit(scene, "r1")
        await asyncio.sleep(3)
        assert gateway.sent_as == {}
        await other.refresh_warm_markers([], [], [])
        await asyncio.sleep(2 * EACH_S)
        assert gateway.sent_as == {"r1": "qwen-v2"}

    perform(scene_of, gateway, options(transition=Transition.RESOURCE))


OLD_ITSELF, NEW_ITSELF = b'{"model":"qwen-v1"}', b'{"model":"qwen-v2"}'


def test_request_that_names_a_version_itself_is_waited_for_where_resources_are_kept() -> None:
    gateway = Servers()
    gateway.slow = {"o1": 20.0}

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1")
        await submit(scene, "o1", payload=OLD_ITSELF)
        await asyncio.sleep(1)
        assert "qwen-v1" in await used(scene)
        told(scene, a="qwen-v1 qwen-v2")
        await submit(scene, "r1")
        await submit(scene, "n1", payload=NEW_ITSELF)
        await asyncio.sleep(10)
        assert gateway.sent_as == {"o1": "qwen-v1"}
        waits = {name: why for name, _, why in scene.dispatcher.model_router.list_held_back()}
        assert "'qwen-v1' is drained first" in waits["qwen"]
        assert waits["qwen-v2"] == "model 'qwen-v2' waits until 'qwen-v1' is drained"
        assert scene.dispatcher.model_router.describe_model("qwen-v2").endswith(
            "; waits until 'qwen-v1' is drained"
        )
        await asyncio.sleep(25)
        assert gateway.sent_as == {"o1": "qwen-v1", "r1": "qwen-v2", "n1": "qwen-v2"}
        assert await used(scene) == set()

    perform(scene_of, gateway, options(transition=Transition.RESOURCE))


def test_who_names_the_old_version_for_ever_does_not_keep_the_new_one_closed() -> None:
    """Such requests wait until the new one is open, and then go as ever."""
    gateway = Servers()
    gateway.slow = {f"o{number}": 8.0 for number in range(12)}

    async def scene_of(scene: Scene) -> None:
        for number in range(12):
            told(scene, a="qwen-v1" if number < 4 else "qwen-v1 qwen-v2")
            if number == 4:
                await submit(scene, "r1")
            await submit(scene, f"o{number}", payload=OLD_ITSELF)
            await asyncio.sleep(3)
            if number == 4:
                waits = {name: why for name, _, why in scene.dispatcher.model_router.list_held_back()}
                assert waits["qwen-v1"] == "model 'qwen-v1' waits for 'qwen-v2'"
                assert list(gateway.sent_as) == ["o0", "o1", "o2", "o3"]
        await asyncio.sleep(20)
        assert (gateway.sent_as["r1"], states(scene, "qwen-v2")) == ("qwen-v2", ["cold", "open"])
        assert [name for name in gateway.sent_as if name != "r1"] == [f"o{number}" for number in range(12)]
        assert list(gateway.sent_as).index("r1") < list(gateway.sent_as).index("o11")

    perform(scene_of, gateway, options(transition=Transition.RESOURCE))


def test_who_names_a_version_itself_goes_at_once_where_it_stands_in_nobody_s_way() -> None:
    gateway = Servers()
    gateway.slow = {"o1": 5.0}

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1 qwen-v2 qwen-x")
        await submit(scene, "o1", payload=OLD_ITSELF)
        await submit(scene, "n1", payload=NEW_ITSELF)
        await submit(scene, "x1", payload=b'{"model":"qwen-x"}')
        await submit(scene, "r1")
        await asyncio.sleep(1)
        assert gateway.sent_as == {"o1": "qwen-v1", "n1": "qwen-v2", "x1": "qwen-x", "r1": "qwen-v2"}
        assert await used(scene) <= {"qwen-v1", "qwen-v2"}

    for transition in Transition:
        perform(scene_of, gateway, options(transition=transition))


@pytest.mark.parametrize("seed", range(20))
def test_nothing_begins_at_one_version_before_all_has_ended_at_another(seed: int) -> None:
    """Whatever is rolled to and fro, and by which name requests ask, where resources are kept: when a version
    opens nothing runs at the other one; and all are answered."""
    rand = Random(seed)
    running: Counter[str] = Counter()
    wrong: list[str] = []
    opened = 0

    class Watched(Servers):
        async def forward(
            self, request: Request, *, token: str, deadline: float, may_send: object
        ) -> AttemptResult:
            model = json.loads(request.payload)["model"]
            running[model] += 1
            self.slow[request.id] = rand.choice([0.0, 0.5, 4.0])
            try:
                return await super().forward(request, token=token, deadline=deadline, may_send=may_send)
            finally:
                running[model] -= 1

    gateway = Watched()

    async def scene_of(scene: Scene) -> None:
        nonlocal opened
        versions = scene.dispatcher.model_router.versions
        family = versions.get_family("qwen")
        assert family is not None
        look = versions.update_families

        def looked() -> None:
            nonlocal opened
            before = {each.name for each in family.make_snapshots() if family.is_open(each.name)}
            look()
            for name in {each.name for each in family.make_snapshots() if family.is_open(each.name)} - before:
                opened += 1
                if running.total() > running[name]:
                    wrong.append(f"{name} opened before the end of the other")

        versions.update_families = looked  # type: ignore[method-assign]
        for number in range(60):
            if rand.random() < 0.15:
                await scene.store.set_label("qwen", "stable", rand.choice("12"), "ada")
            name = rand.choice([b"qwen", b"qwen", b"qwen-v1", b"qwen-v2"])
            await submit(scene, f"r{number}", payload=b'{"model":"%s"}' % name)
            await asyncio.sleep(rand.choice([0.0, 0.1, 1.0]))
            told(scene, a="qwen-v1 qwen-v2")
        await scene.store.set_label("qwen", "stable", "1", "ada")
        for _ in range(12):
            await asyncio.sleep(EACH_S)
            told(scene, a="qwen-v1 qwen-v2")
        assert len(await results(scene)) == len(gateway.sent_as) == 60, "nobody waits for ever"
        assert opened >= 1
        assert wrong == []

    perform(scene_of, gateway, options(transition=Transition.RESOURCE, policy=VersionPolicy(label="stable")))


def test_job_keeps_its_version_and_a_new_job_gets_the_new_one() -> None:
    gateway = Servers()

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1")
        await submit(scene, "a1", labels={"job": "a"})
        await asyncio.sleep(1)
        told(scene, a="qwen-v1 qwen-v2")
        await submit(scene, "a2", "a3", labels={"job": "a"})
        await submit(scene, "b1", labels={"file": "b"})
        await submit(scene, "c1")
        await asyncio.sleep(1)
        await asyncio.sleep(10 * PIN_CACHE_S)  # nothing is under way, and what is remembered here is stale
        told(scene, a="qwen-v1 qwen-v2")
        await submit(scene, "a4", labels={"job": "a"})
        await asyncio.sleep(1)
        assert gateway.sent_as == {
            **dict.fromkeys(("a1", "a2", "a3", "a4"), "qwen-v1"),
            **dict.fromkeys(("b1", "c1"), "qwen-v2"),
        }
        told(scene, a="qwen-v2")
        await submit(scene, "a5", labels={"job": "a"})
        await asyncio.sleep(1)
        assert gateway.sent_as["a5"] == "qwen-v2"  # its version has gone

    perform(scene_of, gateway, options(pin=PinScope.JOB))


def test_job_of_which_many_are_claimed_is_asked_for_once() -> None:
    gateway = Servers()
    asked: list[int] = []

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1 qwen-v2")
        pin = scene.queue.pin_versions

        async def counted(pins: Sequence[Any]) -> Sequence[str]:
            asked.append(len(pins))
            return await pin(pins)

        scene.queue.pin_versions = counted  # type: ignore[method-assign]
        await submit(scene, "a1", "a2", "a3", labels={"job": "a"})
        await submit(scene, "b1", "b2", labels={"job": "b"})
        await asyncio.sleep(1)
        assert set(gateway.sent_as) == {"a1", "a2", "a3", "b1", "b2"}
        assert sum(asked) == 2

    perform(scene_of, gateway, options(pin=PinScope.JOB))


def test_sequence_keeps_its_version() -> None:
    gateway = Servers()

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1")
        await submit(scene, "s1", sequence=Turn("chat"))
        await asyncio.sleep(1)
        told(scene, a="qwen-v1 qwen-v2")
        await submit(scene, "s2", sequence=Turn("chat"))
        await submit(scene, "t1", sequence=Turn("other"))
        await asyncio.sleep(2)
        assert gateway.sent_as == {"s1": "qwen-v1", "s2": "qwen-v1", "t1": "qwen-v2"}

    perform(scene_of, gateway, options(pin=PinScope.SEQUENCE))


def test_turn_that_waited_goes_to_the_version_of_its_time() -> None:
    gateway = Servers()
    gateway.slow = {"s1": 20.0}

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1")
        await submit(scene, "s1", "s2", sequence=Turn("chat"))
        await asyncio.sleep(5)
        assert gateway.sent_as == {"s1": "qwen-v1"}
        told(scene, a="qwen-v2")
        await asyncio.sleep(30)
        assert gateway.sent_as == {"s1": "qwen-v1", "s2": "qwen-v2"}

    perform(scene_of, gateway, options(pin=PinScope.SEQUENCE))


def test_pin_holds_for_another_owner_too_and_while_the_queue_is_away_nothing_goes() -> None:
    gateway = Servers()

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1 qwen-v2")
        key = build_pin_key(
            options(pin=PinScope.JOB).versions.families[0].terms, request(labels={"job": "a"})
        )
        other = type(scene.queue)(scene.store, "b")
        first = scene.dispatcher.model_router.versions
        assert await other.pin_versions([replace(_asked(first, key), proposed_version="qwen-v1")]) == [
            "qwen-v1"
        ]
        await submit(scene, "a1", labels={"job": "a"})
        await asyncio.sleep(1)
        assert gateway.sent_as == {"a1": "qwen-v1"}
        pin = scene.queue.pin_versions

        async def away(_pins: Sequence[object]) -> Sequence[str]:
            raise QueueUnavailableError("Redis did not answer in time")

        scene.queue.pin_versions = away  # type: ignore[method-assign,assignment]
        await submit(scene, "b1", labels={"job": "b"})
        await asyncio.sleep(3)
        assert "b1" not in gateway.sent_as
        scene.queue.pin_versions = pin  # type: ignore[method-assign]
        await asyncio.sleep(15)
        assert gateway.sent_as["b1"] == "qwen-v2"

    perform(scene_of, gateway, options(pin=PinScope.JOB))


def _asked(versions: VersionRouter, key: str) -> Any:
    family = versions.get_family("qwen")
    assert family is not None
    choice = versions._choose_version("qwen", request(labels={"job": "a"}))
    assert not isinstance(choice, str)
    assert choice.key == key
    return choice


def test_label_of_a_verb_wins_and_rolls_back() -> None:
    gateway = Servers()
    by_label = options(policy=VersionPolicy(label="stable"), labels={"stable": "v2"})

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1 qwen-v2")
        await submit(scene, "r1")
        await asyncio.sleep(1)
        await scene.store.set_label("qwen", "stable", "1", "ada")
        await asyncio.sleep(EACH_S + 1)
        await submit(scene, "r2")
        await asyncio.sleep(1)
        scene.dispatcher.reconfigure(by_label)  # the verb's label stands
        await submit(scene, "r3")
        await asyncio.sleep(1)
        await scene.store.set_label("qwen", "stable", None, "ada")
        await asyncio.sleep(EACH_S + 1)
        await submit(scene, "r4")
        await asyncio.sleep(1)
        assert gateway.sent_as == {"r1": "qwen-v2", "r2": "qwen-v1", "r3": "qwen-v1", "r4": "qwen-v2"}

    perform(scene_of, gateway, by_label)


def test_model_that_an_operator_drains_takes_nothing_until_it_is_given_back() -> None:
    gateway = Servers()

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1 qwen-v2 other")
        await scene.store.drain_version("qwen-v2", "ada")
        await scene.store.drain_version("other", "ada", "a bad quantisation")
        await asyncio.sleep(EACH_S + 1)
        await submit(scene, "r1")
        await submit(scene, "o1", payload=b'{"model":"other"}')
        await asyncio.sleep(EACH_S + 1)
        assert gateway.sent_as == {"r1": "qwen-v1"}
        ((name, count, why),) = scene.dispatcher.model_router.list_held_back()
        assert (name, count) == ("other", 1)
        assert "is drained by ada" in why
        assert "a bad quantisation" in why
        assert await scene.store.undrain_version("other")
        assert await scene.store.undrain_version("qwen-v2")
        await asyncio.sleep(EACH_S + 1)
        await submit(scene, "r2")
        await asyncio.sleep(EACH_S + 1)
        assert gateway.sent_as == {"r1": "qwen-v1", "o1": "other", "r2": "qwen-v2"}

    perform(scene_of, gateway, options())


def test_operator_drains_a_whole_model_by_the_name_that_requests_have() -> None:
    gateway = Servers()

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1 qwen-v2")
        await scene.store.drain_version("qwen", "ada", "the tokenizer is wrong")
        await asyncio.sleep(EACH_S + 1)
        await submit(scene, "r1")
        await asyncio.sleep(EACH_S + 1)
        assert gateway.sent_as == {}
        ((name, count, why),) = scene.dispatcher.model_router.list_held_back()
        assert (name, count) == ("qwen", 1)
        assert re.search("'qwen' is drained by ada since .*: the tokenizer is wrong", why)
        assert scene.dispatcher.model_router.describe_model("qwen").startswith("drained by ada")
        assert await scene.store.undrain_version("qwen")
        await asyncio.sleep(EACH_S + 1)
        assert gateway.sent_as == {"r1": "qwen-v2"}

    perform(scene_of, gateway, options())


def explained(scene: Scene) -> str:
    settings = Settings.model_validate({"gateway": {"url": "http://gateway"}})
    at = asyncio.get_running_loop().time()
    view, models = scene.dispatcher.view, scene.dispatcher.model_router
    return status_of(scene.limiter, at, settings, queue=view, models=models).gate.explanation


def test_explanation_says_what_of_the_versions_holds_work_back() -> None:
    gateway = Servers()
    gateway.slow["r1"] = 60.0

    async def warming(scene: Scene) -> None:
        told(scene, a="qwen-v1")
        await submit(scene, "w1")
        await asyncio.sleep(EACH_S + 1)
        assert "1 request waits: model 'qwen' has no version" in explained(scene)
        assert "'qwen-v1' is being warmed up." in explained(scene)

    async def draining(scene: Scene) -> None:
        told(scene, a="qwen-v1")
        await submit(scene, "r1")
        await asyncio.sleep(1)
        told(scene, a="qwen-v1 qwen-v2")
        await submit(scene, "r2", "r3")
        await asyncio.sleep(EACH_S + 1)
        assert "2 requests wait: model 'qwen' has no version" in explained(scene)
        assert "'qwen-v1' is drained first." in explained(scene)
        await asyncio.sleep(60)
        assert gateway.sent_as["r2"] == "qwen-v2"
        await scene.store.drain_version("qwen-v2", "ada")
        await scene.store.drain_version("qwen-v1", "bob", "it leaks")
        await asyncio.sleep(EACH_S + 1)
        await submit(scene, "r4")
        await asyncio.sleep(EACH_S + 1)
        assert "1 request waits" in explained(scene)
        assert "'qwen-v1' is drained by bob since " in explained(scene)
        assert "UTC: it leaks; 'qwen-v2' is drained by ada since " in explained(scene)

    perform(warming, Servers(), options(has_warm_up=True))
    perform(draining, gateway, options(transition=Transition.RESOURCE))


def test_version_is_told_of_with_its_model_and_apart_where_somebody_waits_for_it() -> None:
    gateway = Servers()

    def names(scene: Scene) -> list[str]:
        return [seen.name for seen, _ in scene.dispatcher.model_router.list_states()]

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1 qwen-v2 other")
        assert names(scene) == ["qwen", "other"]
        told(scene, a="qwen-v2 other")
        await submit(scene, "r1", payload=b'{"model":"qwen-v1"}')
        await asyncio.sleep(EACH_S + 1)
        assert names(scene) == ["qwen-v1", "qwen", "other"]
        told(scene, a="qwen-v1 qwen-v2 other")
        await asyncio.sleep(EACH_S + 1)
        assert names(scene) == ["qwen", "other"]
        assert gateway.sent_as == {"r1": "qwen-v1"}

    perform(scene_of, gateway, options())


def test_status_tells_each_version_and_who_said_what_of_it() -> None:
    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1 qwen-v2 other", b="qwen-v2")
        await scene.store.set_label("qwen", "stable", "1", "ada")
        await scene.store.drain_version("v1", "bob", "it leaks")
        await scene.store.drain_version("other", "bob")
        await asyncio.sleep(EACH_S + 1)
        rows = {each["name"]: each for each in told_of(scene).models}
        qwen, other = rows["qwen"], rows["other"]
        assert (other["policy"], other["labels"], other["versions"]) == (None, {}, [])
        assert other["drained_by"].startswith("by bob since")
        assert other["sentence"].startswith("drained by bob since")
        assert (qwen["policy"], qwen["drained_by"]) == ("all", None)
        assert qwen["labels"].keys() == {"stable", "old"}
        assert qwen["labels"]["old"] == {"version": "1", "by": None}
        assert qwen["labels"]["stable"]["version"] == "1"
        assert qwen["labels"]["stable"]["by"].startswith("by ada since")
        newest, oldest = qwen["versions"]
        assert (newest["name"], newest["state"], newest["serving"], newest["share"]) == (
            "qwen-v2",
            "open",
            2,
            1.0,
        )
        assert (newest["warm"], newest["drained_by"]) == (None, None), "nothing warms it up"
        assert (oldest["name"], oldest["drained"], oldest["labels"]) == ("qwen-v1", True, ["old", "stable"])
        assert oldest["drained_by"].endswith(": it leaks")
        assert told_of(scene).model_registry_problem is None
        versions = scene.dispatcher.model_router.versions
        assert versions.registry is not None
        versions.registry = replace(versions.registry, problem="the key holds a list")
        assert told_of(scene).model_registry_problem == "the key holds a list"

    labels = {"stable": "2", "old": "1"}
    perform(scene_of, Servers(), options(policy=VersionPolicy(everything=True), labels=labels))


def test_model_that_the_settings_drop_while_the_queue_is_asked_ends_nothing() -> None:
    gateway = Servers()

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1")
        await asyncio.sleep(1)
        pin = scene.queue.pin_versions

        async def slow(pins: Sequence[Any]) -> Sequence[str]:
            await asyncio.sleep(1)
            return await pin(pins)

        scene.queue.pin_versions = slow  # type: ignore[method-assign]
        await submit(scene, "r1", labels={"job": "a"})
        await asyncio.sleep(0.5)
        scene.dispatcher.reconfigure(replace(options(), versions=VersionOptions(can_steer=True)))
        await asyncio.sleep(2)
        assert gateway.sent_as == {"r1": "qwen-v1"}

    perform(scene_of, gateway, options(pin=PinScope.JOB, steered=True))


def test_where_no_version_is_served_requests_wait_and_say_so() -> None:
    gateway = Servers()

    async def scene_of(scene: Scene) -> None:
        told(scene, a="other")
        await submit(scene, "r1")
        await asyncio.sleep(EACH_S + 1)
        ((_, _, why),) = scene.dispatcher.model_router.list_held_back()
        assert "no version of 'qwen' is served" in why
        assert "no version of 'qwen' is served" in scene.dispatcher.model_router.describe_model("qwen")
        told(scene, a="other qwen-v1")
        await asyncio.sleep(1)
        assert gateway.sent_as == {"r1": "qwen-v1"}
        ((seen, _), *_) = [
            each for each in scene.dispatcher.model_router.list_states() if each[0].name == "qwen"
        ]
        assert (seen.state, seen.serving_count, seen.endpoint_count) == ("ready", 1, 1)

    perform(scene_of, gateway, options())


def test_where_requests_are_not_to_wait_they_end_while_no_version_is_served() -> None:
    gateway = Servers()
    fails = replace(options(), model_terms=ModelTerms({"qwen": WhenNotServed.FAIL}))

    async def scene_of(scene: Scene) -> None:
        told(scene, a="other")
        await submit(scene, "r1")
        await asyncio.sleep(1)
        assert (await results(scene))["r1"]["error_code"] == "MODEL_NOT_FOUND"

    perform(scene_of, gateway, fails)


def test_version_that_the_server_denies_costs_no_attempt() -> None:
    gateway = Servers()
    gateway.away = {"qwen-v2"}

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1 qwen-v2")
        await submit(scene, "r1")
        await asyncio.sleep(3)
        result = (await results(scene))["r1"]
        assert (result["status_code"], result["model_version"]) == (200, "qwen-v1")
        assert states(scene, "qwen-v2") == ["cold", "open", "draining", "gone"]

    perform(scene_of, gateway, options())


def test_body_whose_model_cannot_be_changed_ends_with_the_reason() -> None:
    gateway = Servers()

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1")
        await submit(scene, "r1", payload=b'{"model":"x","model":"qwen"}')
        await submit(scene, "r2")
        await asyncio.sleep(1)
        found = await results(scene)
        assert found["r1"]["error_code"] == "INVALID_REQUEST"
        assert "`model`" in found["r1"]["error_message"]
        assert gateway.sent_as == {"r2": "qwen-v1"}

    perform(scene_of, gateway, options())


def test_weights_spread_requests_and_a_retry_stays_where_it_was() -> None:
    gateway = Servers()
    names = [f"r{number}" for number in range(400)]

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen-v1 qwen-v2")
        await submit(scene, *names)
        await asyncio.sleep(30)
        canaries = [name for name, model in gateway.sent_as.items() if model == "qwen-v2"]
        assert len(gateway.sent_as) == 400
        assert 20 <= len(canaries) <= 65
        before = dict(gateway.sent_as)
        await submit(scene, *names)
        await asyncio.sleep(30)
        assert gateway.sent_as == before

    everything = VersionPolicy(everything=True)
    perform(scene_of, gateway, options(policy=everything, weights={"v2": 0.1}))


def test_who_only_observes_hears_what_others_share_and_says_nothing() -> None:
    async def scene_of(scene: Scene) -> None:
        other = type(scene.queue)(scene.store, "b")
        said = scene.store.pool.model_registry
        told(scene, a="qwen-v1 qwen-v2")
        await asyncio.sleep(2 * EACH_S)
        assert (said.warm_until, said.lock_until, said.in_use_until) == ({}, {}, {})
        assert states(scene, "qwen-v2") == ["cold"]
        await other.mark_warm("qwen-v2", "a")
        await submit(scene, "r1")
        claimed = await other.claim(1, "n", Permit(9, asyncio.get_running_loop().time(), 0))
        await other.release([Release(lease, missing_model="qwen") for lease in claimed.leases])
        await asyncio.sleep(EACH_S + 1)
        before = dict(said.warm_until)
        (model,) = told_of(scene).models
        assert [(each["state"], each["warm"]) for each in model["versions"]] == [("open", 1), ("retiring", 0)]
        assert model["waiting"] == 1
        await scene.store.drain_version("qwen-v2", "ada", "bad")
        told(scene, b="qwen-v2")
        await asyncio.sleep(EACH_S + 1)
        told(scene, a="qwen-v2")
        await asyncio.sleep(EACH_S + 1)
        (model,) = told_of(scene).models
        (version,) = [each for each in model["versions"] if each["name"] == "qwen-v2"]
        assert (version["warm"], version["drained"]) == (1, True), "that it was gone is for others to say"
        assert (said.warm_until, said.lock_until, said.in_use_until, said.pins) == (before, {}, {}, {})

    perform(scene_of, Servers(), options(observe=True, has_warm_up=True, pin=PinScope.JOB))


def test_without_versions_nothing_is_kept_or_changed() -> None:
    gateway = Servers()
    plain = replace(options(), versions=VersionOptions())

    async def scene_of(scene: Scene) -> None:
        told(scene, a="qwen qwen-v1")
        await submit(scene, "r1", payload=b'{"model":"qwen"}')
        await asyncio.sleep(1)
        assert gateway.bodies == {"r1": b'{"model":"qwen"}'}
        assert not scene.dispatcher.model_router.versions
        scene.dispatcher.reconfigure(options())
        told(scene, a="qwen qwen-v1")
        await submit(scene, "r2")
        await asyncio.sleep(1)
        assert gateway.sent_as["r2"] == "qwen-v1"

    perform(scene_of, gateway, plain)


def many(families: int, versions: int) -> tuple[Options, str]:
    """So many models with so many versions each, and the names that endpoints list."""
    every = [FamilyTerms(f"m{at}", re.compile(rf"m{at}-v(?P<version>\d+)")) for at in range(families)]
    given = replace(
        options(),
        model_terms=ModelTerms({each.name: WhenNotServed.WAIT for each in every}),
        versions=VersionOptions(tuple(FamilyOptions(each) for each in every)),
    )
    return given, " ".join(f"m{at}-v{number}" for at in range(families) for number in range(versions))


def test_look_costs_by_the_versions_there_are_and_not_by_models_times_names() -> None:
    def cost_s(families: int) -> float:
        given, names = many(families, 10)
        costs: list[float] = []

        async def scene_of(scene: Scene) -> None:
            told(scene, a=names)
            for _ in range(7):
                began = process_time()
                scene.dispatcher.model_router.versions.update_families()
                costs.append(process_time() - began)

        perform(scene_of, Servers(), given)
        return min(costs)

    assert cost_s(400) < 40 * cost_s(40)  # 10 times as many; 100 times as many pairs


def test_what_takes_no_part_is_told_of_a_hundred_versions_at_a_time() -> None:
    given, names = many(1, 3000)

    async def scene_of(scene: Scene) -> None:
        told(scene, a=names)
        assert states(scene, "m0-v2999") == ["cold", "open"]
        assert len(scene.events) <= 2 + MAX_LOGGED_CHANGES
        family = scene.dispatcher.model_router.versions.get_family("m0")
        assert family is not None
        assert len(family.make_snapshots()) == 3000
        told(scene, a="m0-v1")
        assert states(scene, "m0-v2999") == ["cold", "open", "draining", "gone"]

    perform(scene_of, Servers(), given)


def test_end_of_a_request_looks_at_versions_only_where_something_may_follow() -> None:
    gateway = Servers()
    looks = 0

    async def scene_of(scene: Scene) -> None:
        versions = scene.dispatcher.model_router.versions
        told(scene, a="qwen-v1")
        await asyncio.sleep(1)
        look = versions.update_families

        def counted() -> None:
            nonlocal looks
            looks += 1
            look()

        versions.update_families = counted  # type: ignore[method-assign]
        for number in range(10):
            await submit(scene, f"r{number}")
            await asyncio.sleep(0.3)
        assert len(gateway.sent_as) == 10
        assert looks <= 2  # of the exchange with other owners

    perform(scene_of, gateway, options())


def test_jobs_and_sequences_are_told_apart_by_few_bytes() -> None:
    terms = FamilyTerms("qwen", pin=PinScope.JOB)
    job = request(labels={"job": "x"})
    assert build_pin_key(terms, job) == build_pin_key(terms, request(labels={"file": "x"}))
    assert build_pin_key(terms, job) != build_pin_key(replace(terms, name="other"), job)
    assert build_pin_key(terms, request(sequence=Turn("x"))) != build_pin_key(terms, job)
    of_two_producers = [
        build_pin_key(terms, request(sequence=Turn("x", owner=owner))) for owner in ("a", "b")
    ]
    assert len(set(of_two_producers)) == 2
    assert build_pin_key(terms, request()) == ""
    assert build_pin_key(replace(terms, pin=PinScope.SEQUENCE), job) == ""
    assert build_pin_key(replace(terms, pin=PinScope.REQUEST), job) == ""
    assert len(build_pin_key(terms, request(labels={"job": "\ud800" * 10_000}))) == 32


def test_marks_begin_with_nothing() -> None:
    assert ModelRegistryState() == ModelRegistryState(frozenset(), frozenset(), {}, {}, "")
    assert Listing("a", 0.0, ("m",)).is_down is False
