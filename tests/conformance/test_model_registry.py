"""Model registry: each promise of the port, in memory and on a real server."""

from __future__ import annotations

import re
import time

import pytest

from dispatcher.features.models.queue.calls import ModelCalls
from dispatcher.features.models.queue.registry_rules import MAX_LABELS_OR_DRAINS, MAX_PINS
from dispatcher.features.models.registry import ModelRegistryState, PinRequest
from dispatcher.requests.lanes import MAX_MODEL_NAME_BYTES
from dispatcher.requests.submission import CallRefusedError
from tests.conformance.worlds import World, model_admin, models

V1, V2 = ("qwen-v1", "10.0.0.1:8000"), ("qwen-v2", "10.0.0.1:8000")
FAR = ("qwen-v1", "10.0.0.2:8000")


async def read_warm_markers(calls: ModelCalls) -> ModelRegistryState:
    return await calls.refresh_warm_markers((), (), ())


def read_models_in_use(key: str, version: str, *keeps: str, for_s: float = 100.0) -> list[PinRequest]:
    return [PinRequest(key, version, keeps, for_s)]


async def test_model_registry_is_empty_at_first(world: World) -> None:
    assert (
        await read_warm_markers(models(world.owner()))
        == await model_admin(world.queue_admin).read_model_registry()
        == ModelRegistryState()
    )


async def test_version_warmed_by_one_owner_is_warm_for_all(world: World) -> None:
    first, second = models(world.owner("one")), models(world.owner("two"))
    assert await first.take_warm_up_lock(*V1)
    assert (await read_warm_markers(second)).warm_markers == frozenset()
    await first.mark_warm(*V1)
    await second.mark_warm(*FAR)
    for queue in (first, second, first):
        assert (await read_warm_markers(queue)).warm_markers == {V1, FAR}
    assert (await model_admin(world.queue_admin).read_model_registry()).warm_markers == {V1, FAR}


async def test_warm_marker_expires_a_minute_after_its_last_refresh(world: World) -> None:
    first, second = models(world.owner("one")), models(world.owner("two"))
    await first.mark_warm(*V1)
    await first.mark_warm(*V2)
    await world.age_model_registry(50)
    assert (await second.refresh_warm_markers([V1], (), ())).warm_markers == {V1, V2}
    await world.age_model_registry(20)
    assert (await model_admin(world.queue_admin).read_model_registry()).warm_markers == {V1}
    assert (await read_warm_markers(first)).warm_markers == {V1}
    await world.age_model_registry(41)
    assert (
        (await read_warm_markers(first)).warm_markers
        == (await model_admin(world.queue_admin).read_model_registry()).warm_markers
        == frozenset()
    )


async def test_reading_the_registry_refreshes_nothing(world: World) -> None:
    first, looker = models(world.owner("one")), models(world.owner("two"))
    assert await looker.read_model_registry() == ModelRegistryState()
    await first.mark_warm(*V1)
    await first.refresh_warm_markers((), (), ["qwen-v1"])
    await model_admin(world.queue_admin).set_label("qwen", "stable", "1", "ada")
    await model_admin(world.queue_admin).drain_version("qwen-v2", "ada", "bad")
    seen = await looker.read_model_registry()
    assert (
        seen
        == await read_warm_markers(models(world.owner("three")))
        == await model_admin(world.queue_admin).read_model_registry()
    )
    assert (seen.warm_markers, seen.models_in_use) == (frozenset({V1}), frozenset({"qwen-v1"}))
    assert seen.labels == {("qwen", "stable"): "1"}
    await world.age_model_registry(50)
    assert (await looker.read_model_registry()).warm_markers == {V1}
    await world.age_model_registry(11)
    lapsed = await looker.read_model_registry()
    assert not lapsed.warm_markers
    assert not lapsed.models_in_use


async def test_expired_or_removed_marker_is_not_restored_by_a_refresh(world: World) -> None:
    first, second = models(world.owner("one")), models(world.owner("two"))
    assert (await first.refresh_warm_markers([V1], (), ())).warm_markers == frozenset(), "it never existed"
    await first.mark_warm(*V1)
    await first.mark_warm(*V2)
    assert (await second.refresh_warm_markers((), [V1, FAR], ())).warm_markers == {V2}
    assert (await first.refresh_warm_markers([V1, V2], (), ())).warm_markers == {V2}
    await world.age_model_registry(61)
    assert (await first.refresh_warm_markers([V1, V2], (), ())).warm_markers == frozenset()
    await first.mark_warm(*V1)
    assert (await second.refresh_warm_markers([V1], [V1], ())).warm_markers == frozenset(), (
        "who says both has seen it go"
    )


async def test_one_owner_at_a_time_holds_the_warm_up_lock_of_a_version_at_an_endpoint(world: World) -> None:
    first, second = models(world.owner("one")), models(world.owner("two"))
    assert [await first.take_warm_up_lock(*V1), await first.take_warm_up_lock(*V1)] == [
        True,
        True,
    ]
    assert [
        await second.take_warm_up_lock(*V1),
        await second.take_warm_up_lock(*V2),
        await second.take_warm_up_lock(*FAR),
    ] == [
        False,
        True,
        True,
    ]
    assert await models(world.owner("one")).take_warm_up_lock(*V1), (
        "an owner that restarts under this name still holds it"
    )
    await second.release_warm_up_lock(*V1)
    assert not await second.take_warm_up_lock(*V1), "it did not hold the lock"
    await first.release_warm_up_lock(*V1)
    assert await second.take_warm_up_lock(*V1)
    assert (await read_warm_markers(first)).warm_markers == frozenset()


async def test_all_owners_see_the_warm_up_locks(world: World) -> None:
    first, second = models(world.owner("one")), models(world.owner("two"))
    assert await first.take_warm_up_lock(*V1)
    assert await second.take_warm_up_lock(*V2)
    assert await second.take_warm_up_lock(*FAR)
    rights = {(*V1, "one"), (*V2, "two"), (*FAR, "two")}
    for seen in (
        await read_warm_markers(first),
        await second.read_model_registry(),
        await model_admin(world.queue_admin).read_model_registry(),
    ):
        assert set(seen.warm_up_locks) == rights
    await second.release_warm_up_lock(*FAR)
    await first.mark_warm(*V1)
    assert set((await read_warm_markers(first)).warm_up_locks) == {(*V2, "two")}
    await world.age_model_registry(31)
    assert (
        set((await first.read_model_registry()).warm_up_locks)
        == set((await read_warm_markers(second)).warm_up_locks)
        == set()
    )


async def test_warm_up_lock_expires_and_is_released_by_the_warm_marker(world: World) -> None:
    first, second = models(world.owner("one")), models(world.owner("two"))
    assert await first.take_warm_up_lock(*V1)
    await world.age_model_registry(20)
    assert await first.take_warm_up_lock(*V1)
    await world.age_model_registry(20)
    assert not await second.take_warm_up_lock(*V1), "it was renewed"
    await world.age_model_registry(11)
    assert await second.take_warm_up_lock(*V1)
    assert not await first.take_warm_up_lock(*V1)
    await first.mark_warm(*V1)
    assert not await first.take_warm_up_lock(*V1), (
        "an owner that lost the lock does not release that of another"
    )
    await second.mark_warm(*V1)
    assert await first.take_warm_up_lock(*V1)


async def test_models_in_use_last_until_the_owner_reports_others_or_falls_silent(world: World) -> None:
    first, second = models(world.owner("one")), models(world.owner("two"))
    assert (await first.refresh_warm_markers((), (), ["qwen-v1", "qwen-v2"])).models_in_use == {
        "qwen-v1",
        "qwen-v2",
    }
    assert (await second.refresh_warm_markers((), (), ["qwen-v2", "qwen-v3"])).models_in_use == {
        "qwen-v1",
        "qwen-v2",
        "qwen-v3",
    }
    assert (await first.refresh_warm_markers((), (), ["qwen-v1"])).models_in_use == {
        "qwen-v1",
        "qwen-v2",
        "qwen-v3",
    }
    assert (await first.refresh_warm_markers((), (), ())).models_in_use == {"qwen-v2", "qwen-v3"}
    assert (await first.refresh_warm_markers((), (), ["qwen-v4"])).models_in_use == {
        "qwen-v2",
        "qwen-v3",
        "qwen-v4",
    }
    await world.age_model_registry(10)
    assert (await first.refresh_warm_markers((), (), ["qwen-v4"])).models_in_use == {
        "qwen-v2",
        "qwen-v3",
        "qwen-v4",
    }
    await world.age_model_registry(6)
    assert (await model_admin(world.queue_admin).read_model_registry()).models_in_use == {"qwen-v4"}
    assert (await first.refresh_warm_markers((), (), ["qwen-v4"])).models_in_use == {"qwen-v4"}


async def test_owner_whose_name_begins_like_another_name_is_another_owner(world: World) -> None:
    first, second = models(world.owner("one")), models(world.owner('one","'))
    await first.refresh_warm_markers((), (), ["a"])
    assert (await second.refresh_warm_markers((), (), ["b"])).models_in_use == {"a", "b"}
    assert (await first.refresh_warm_markers((), (), ())).models_in_use == {"b"}
    assert await first.take_warm_up_lock("a", 'e","one')
    assert await second.take_warm_up_lock("a", "e")


@pytest.mark.server
async def test_queues_of_a_pool_share_the_model_registry(world: World) -> None:
    other = world.open_other_queue("batch:{qwen}:urgent")
    await models(world.owner("one")).mark_warm(*V1)
    await model_admin(other.queue_admin).drain_version("qwen-v1", "ada")
    assert (await read_warm_markers(models(other.owner("two")))).warm_markers == {V1}
    assert set((await read_warm_markers(models(world.owner("one")))).drained_models) == {"qwen-v1"}


@pytest.mark.parametrize("name", ["", "a\nb", "x" * (MAX_MODEL_NAME_BYTES + 1), "ä" * 129, "\ud800"])
async def test_invalid_names_are_not_recorded(world: World, name: str) -> None:
    queue = models(world.owner())
    for pair in ((name, "10.0.0.1:8000"), ("qwen-v1", name)):
        assert not await queue.take_warm_up_lock(*pair)
        await queue.mark_warm(*pair)
        await queue.release_warm_up_lock(*pair)
        assert await queue.refresh_warm_markers([pair], [pair], [name]) == ModelRegistryState()
    with pytest.raises(CallRefusedError, match="256 bytes"):
        await model_admin(world.queue_admin).drain_version(name, "ada")
    for family, label, version in ((name, "stable", "2"), ("qwen", name, "2"), ("qwen", "stable", name)):
        with pytest.raises(CallRefusedError, match="256 bytes"):
            await model_admin(world.queue_admin).set_label(family, label, version, "ada")
    assert not await model_admin(world.queue_admin).undrain_version(name)


async def test_names_with_quotes_and_escapes_are_kept(world: World) -> None:
    queue, pair = models(world.owner("ow'\"]\\ner")), ('a"]\\,["ü%s', "[::1]:8000")
    assert await queue.take_warm_up_lock(*pair)
    await queue.mark_warm(*pair)
    reply = await queue.refresh_warm_markers([pair], (), [pair[0]])
    assert (set(reply.warm_markers), set(reply.models_in_use), reply.problem) == ({pair}, {pair[0]}, "")
    await model_admin(world.queue_admin).set_label(pair[0], pair[0], pair[0], "ada\nforged")
    await model_admin(world.queue_admin).drain_version(pair[0], "\x1b[31m", "be\ncause")
    reply = await model_admin(world.queue_admin).read_model_registry()
    assert reply.labels == {(pair[0], pair[0]): pair[0]}
    assert reply.label_origins[pair[0], pair[0]].isprintable()
    assert reply.drained_models[pair[0]].isprintable()


async def test_label_has_its_last_version_until_it_is_removed(world: World) -> None:
    desk = model_admin(world.queue_admin)
    assert not await desk.set_label("qwen", "stable", None, "ada")
    assert await desk.set_label("qwen", "stable", "1", "ada")
    assert await desk.set_label("qwen", "stable", "2", "bob")
    assert await desk.set_label("qwen", "stable", "2", "bob")
    assert await desk.set_label("llama", "stable", "1", "ada")
    labels = {("qwen", "stable"): "2", ("llama", "stable"): "1"}
    assert (
        (await read_warm_markers(models(world.owner()))).labels
        == (await desk.read_model_registry()).labels
        == labels
    )
    labelled = (await desk.read_model_registry()).label_origins
    assert labelled == (await read_warm_markers(models(world.owner()))).label_origins
    today = time.strftime("%Y-%m-", time.gmtime())
    assert labelled.keys() == labels.keys()
    assert re.fullmatch(rf"by bob since {today}\d\d \d\d:\d\d:\d\d UTC", labelled["qwen", "stable"])
    await world.age_model_registry(10_000)
    assert await desk.set_label("qwen", "stable", None, "ada")
    assert not await desk.set_label("qwen", "stable", None, "ada")
    assert (await read_warm_markers(models(world.owner()))).labels == {("llama", "stable"): "1"}
    assert await desk.set_label("llama", "stable", None, "ada")
    assert await desk.read_model_registry() == ModelRegistryState()


async def test_drain_shows_who_when_and_why_until_it_is_removed(world: World) -> None:
    desk = model_admin(world.queue_admin)
    assert not await desk.undrain_version("qwen-v1")
    await desk.drain_version("qwen-v1", "ada", "it leaks")
    await desk.drain_version("qwen-v2", "")
    drained = (await read_warm_markers(models(world.owner()))).drained_models
    assert drained == (await desk.read_model_registry()).drained_models
    today = time.strftime("%Y-%m-", time.gmtime())
    assert re.fullmatch(rf"by ada since {today}\d\d \d\d:\d\d:\d\d UTC: it leaks", drained["qwen-v1"])
    assert re.fullmatch(r"by an unknown user since [^:]+:\d\d:\d\d UTC", drained["qwen-v2"])
    await desk.drain_version("qwen-v1", "bob", "it leaks still")
    assert (await desk.read_model_registry()).drained_models["qwen-v1"].startswith("by bob")
    assert await desk.undrain_version("qwen-v1")
    assert await desk.undrain_version("qwen-v2")
    assert not await desk.undrain_version("qwen-v1")
    assert await desk.read_model_registry() == ModelRegistryState()


async def test_number_of_labels_and_drains_is_limited(world: World) -> None:
    desk = model_admin(world.queue_admin)
    for number in range(MAX_LABELS_OR_DRAINS):
        await desk.set_label("qwen", f"l{number}", "1", "ada")
        await desk.drain_version(f"v{number}", "ada")
    with pytest.raises(CallRefusedError, match="1000 labels already"):
        await desk.set_label("qwen", "more", "1", "ada")
    with pytest.raises(CallRefusedError, match="1000 drains already"):
        await desk.drain_version("more", "ada")
    for _ in range(2):
        assert await desk.set_label("qwen", "l7", "2", "ada"), "an existing one may change"
    await desk.drain_version("v7", "bob")
    found = await read_warm_markers(models(world.owner()))
    assert (len(found.labels), len(found.drained_models)) == (MAX_LABELS_OR_DRAINS, MAX_LABELS_OR_DRAINS)
    assert found.labels["qwen", "l7"] == "2"
    await desk.undrain_version("v0")
    await desk.drain_version("more", "ada")
    await desk.set_label("qwen", "l0", None, "ada")
    assert await desk.set_label("qwen", "more", "1", "ada")


async def test_pin_keeps_its_version_while_that_is_allowed(world: World) -> None:
    first, second = models(world.owner("one")), models(world.owner("two"))
    assert await first.pin_versions(read_models_in_use("chat-7", "v1", "v1", "v2")) == ["v1"]
    assert await second.pin_versions(read_models_in_use("chat-7", "v2", "v1", "v2")) == ["v1"]
    assert await second.pin_versions(read_models_in_use("chat-8", "v2", "v1", "v2")) == ["v2"]
    assert await first.pin_versions(read_models_in_use("chat-7", "v2", "v2")) == ["v2"], "v1 is gone"
    assert await second.pin_versions(read_models_in_use("chat-7", "v1", "v1", "v2")) == ["v2"]
    assert await second.pin_versions(read_models_in_use("chat-7", "v3")) == ["v3"], "none is allowed"
    assert await second.pin_versions([]) == []


async def test_any_number_of_pins_is_returned_in_order(world: World) -> None:
    queue = models(world.owner())
    await queue.pin_versions(read_models_in_use("k-5", "old", "old"))
    pins = [PinRequest(f"k-{number}", f"v{number % 7}", ["old"], 100) for number in range(600)]
    expected = ["old" if each.key == "k-5" else each.proposed_version for each in pins]
    assert await queue.pin_versions(pins) == expected
    assert await queue.pin_versions(
        [PinRequest("k-1", "new", ["v1"], 9), PinRequest("k-1", "late", ["v1"], 9)]
    ) == [
        "v1",
        "v1",
    ]


async def test_pin_lasts_from_its_last_use(world: World) -> None:
    queue = models(world.owner())
    await queue.pin_versions(
        [*read_models_in_use("a", "v1", for_s=100), *read_models_in_use("b", "v1", for_s=100)]
    )
    await world.age_model_registry(60)
    await queue.pin_versions(read_models_in_use("a", "v2", "v1", for_s=100))
    await world.age_model_registry(60)
    both = [*read_models_in_use("a", "v2", "v1"), *read_models_in_use("b", "v2", "v1")]
    assert await queue.pin_versions(both) == ["v1", "v2"]
    await queue.pin_versions(read_models_in_use("brief", "v1", for_s=1))
    await queue.pin_versions(read_models_in_use("none", "v1", for_s=-1))
    await world.age_model_registry(2)
    again = [*read_models_in_use("brief", "v2", "v1"), *read_models_in_use("none", "v2", "v1")]
    assert await queue.pin_versions(again) == ["v2", "v2"]


@pytest.mark.parametrize(
    "keys", [("", " "), ("x" * 300 + "a", "x" * 300 + "b"), ("\ud800", "?"), ("a\nb", "a")]
)
async def test_different_keys_have_different_pins(world: World, keys: tuple[str, str]) -> None:
    queue = models(world.owner())
    await queue.pin_versions([*read_models_in_use(keys[0], "v1"), *read_models_in_use(keys[1], "v2")])
    both = [*read_models_in_use(keys[0], "v3", "v1", "v2"), *read_models_in_use(keys[1], "v3", "v1", "v2")]
    assert await queue.pin_versions(both) == ["v1", "v2"]


async def test_least_recently_used_pins_are_dropped_first(world: World) -> None:
    queue = models(world.owner())
    await queue.pin_versions(read_models_in_use("first", "v1"))
    await queue.pin_versions(read_models_in_use("second", "v1", for_s=1000))
    await queue.pin_versions(read_models_in_use("first", "v1"))
    await queue.pin_versions([PinRequest(f"k-{number}", "v1", (), 100) for number in range(MAX_PINS - 2)])
    assert await queue.pin_versions(read_models_in_use("third", "v1")) == ["v1"]
    both = [*read_models_in_use("second", "v2", "v1"), *read_models_in_use("first", "v2", "v1")]
    assert await queue.pin_versions(both) == ["v2", "v1"]


async def test_registry_entries_last_no_longer_after_the_server_clock_stepped_back(world: World) -> None:
    queue, other = models(world.owner("one")), models(world.owner("two"))
    await queue.mark_warm(*V1)
    await queue.take_warm_up_lock(*V2)
    await queue.refresh_warm_markers((), (), ["qwen-v1"])
    await world.age_model_registry(-10_000)
    assert (await read_warm_markers(other)).warm_markers == {V1}
    await world.age_model_registry(61)
    found = await read_warm_markers(other)
    assert (found.warm_markers, found.models_in_use) == (frozenset(), frozenset())
    assert await other.take_warm_up_lock(*V2)
