"""What is said of versions of models: each promise of the port, in memory, Redis and Valkey."""

from __future__ import annotations

import re
import time

import pytest

from dispatcher.core.requests.lanes import MAX_MODEL_NAME_BYTES
from dispatcher.ports import CallRefusedError, ModelRegistryState, PinRequest, Queue
from dispatcher.queue.constants import MAX_LABELS_OR_DRAINS, MAX_PINS
from tests.conformance.worlds import World

V1, V2 = ("qwen-v1", "10.0.0.1:8000"), ("qwen-v2", "10.0.0.1:8000")
FAR = ("qwen-v1", "10.0.0.2:8000")


async def told(queue: Queue) -> ModelRegistryState:
    return await queue.refresh_warm_markers((), (), ())


def asked(key: str, version: str, *keeps: str, for_s: float = 100.0) -> list[PinRequest]:
    return [PinRequest(key, version, keeps, for_s)]


async def test_nothing_is_said_of_any_model_at_first(world: World) -> None:
    assert await told(world.owner()) == await world.desk.read_model_registry() == ModelRegistryState()


async def test_what_one_owner_has_warmed_is_warm_for_all(world: World) -> None:
    first, second = world.owner("one"), world.owner("two")
    assert await first.take_warm_up_lock(*V1)
    assert (await told(second)).warm_markers == frozenset()
    await first.mark_warm(*V1)
    await second.mark_warm(*FAR)
    for queue in (first, second, first):
        assert (await told(queue)).warm_markers == {V1, FAR}
    assert (await world.desk.read_model_registry()).warm_markers == {V1, FAR}


async def test_a_mark_lapses_a_minute_after_any_owner_refreshed_it_last(world: World) -> None:
    first, second = world.owner("one"), world.owner("two")
    await first.mark_warm(*V1)
    await first.mark_warm(*V2)
    await world.age_board(50)
    assert (await second.refresh_warm_markers([V1], (), ())).warm_markers == {V1, V2}
    await world.age_board(20)
    assert (await world.desk.read_model_registry()).warm_markers == {V1}
    assert (await told(first)).warm_markers == {V1}
    await world.age_board(41)
    assert (
        (await told(first)).warm_markers
        == (await world.desk.read_model_registry()).warm_markers
        == frozenset()
    )


async def test_who_only_looks_is_told_the_same_and_refreshes_nothing(world: World) -> None:
    first, looker = world.owner("one"), world.owner("two")
    assert await looker.read_model_registry() == ModelRegistryState()
    await first.mark_warm(*V1)
    await first.refresh_warm_markers((), (), ["qwen-v1"])
    await world.desk.set_label("qwen", "stable", "1", "ada")
    await world.desk.drain_version("qwen-v2", "ada", "bad")
    seen = await looker.read_model_registry()
    assert seen == await told(world.owner("three")) == await world.desk.read_model_registry()
    assert (seen.warm_markers, seen.models_in_use) == (frozenset({V1}), frozenset({"qwen-v1"}))
    assert seen.labels == {("qwen", "stable"): "1"}
    await world.age_board(50)
    assert (await looker.read_model_registry()).warm_markers == {V1}
    await world.age_board(11)
    lapsed = await looker.read_model_registry()
    assert not lapsed.warm_markers
    assert not lapsed.models_in_use


async def test_a_mark_that_lapsed_or_was_removed_does_not_come_back_by_being_kept(world: World) -> None:
    first, second = world.owner("one"), world.owner("two")
    assert (await first.refresh_warm_markers([V1], (), ())).warm_markers == frozenset(), "it never was there"
    await first.mark_warm(*V1)
    await first.mark_warm(*V2)
    assert (await second.refresh_warm_markers((), [V1, FAR], ())).warm_markers == {V2}
    assert (await first.refresh_warm_markers([V1, V2], (), ())).warm_markers == {V2}
    await world.age_board(61)
    assert (await first.refresh_warm_markers([V1, V2], (), ())).warm_markers == frozenset()
    await first.mark_warm(*V1)
    assert (await second.refresh_warm_markers([V1], [V1], ())).warm_markers == frozenset(), (
        "who says both has seen it go"
    )


async def test_one_owner_at_a_time_has_the_right_to_warm_a_version_at_an_endpoint(world: World) -> None:
    first, second = world.owner("one"), world.owner("two")
    assert [await first.take_warm_up_lock(*V1), await first.take_warm_up_lock(*V1)] == [True, True]
    assert [
        await second.take_warm_up_lock(*V1),
        await second.take_warm_up_lock(*V2),
        await second.take_warm_up_lock(*FAR),
    ] == [
        False,
        True,
        True,
    ]
    assert await world.owner("one").take_warm_up_lock(*V1), "who starts anew under its name has it still"
    await second.release_warm_up_lock(*V1)
    assert not await second.take_warm_up_lock(*V1), "it was not its to give back"
    await first.release_warm_up_lock(*V1)
    assert await second.take_warm_up_lock(*V1)
    assert (await told(first)).warm_markers == frozenset()


async def test_who_warms_what_is_known_to_all(world: World) -> None:
    first, second = world.owner("one"), world.owner("two")
    assert await first.take_warm_up_lock(*V1)
    assert await second.take_warm_up_lock(*V2)
    assert await second.take_warm_up_lock(*FAR)
    rights = {(*V1, "one"), (*V2, "two"), (*FAR, "two")}
    for seen in (
        await told(first),
        await second.read_model_registry(),
        await world.desk.read_model_registry(),
    ):
        assert set(seen.warm_up_locks) == rights
    await second.release_warm_up_lock(*FAR)
    await first.mark_warm(*V1)
    assert set((await told(first)).warm_up_locks) == {(*V2, "two")}
    await world.age_board(31)
    assert (
        set((await first.read_model_registry()).warm_up_locks)
        == set((await told(second)).warm_up_locks)
        == set()
    )


async def test_the_right_to_warm_lapses_and_is_given_back_by_the_mark(world: World) -> None:
    first, second = world.owner("one"), world.owner("two")
    assert await first.take_warm_up_lock(*V1)
    await world.age_board(20)
    assert await first.take_warm_up_lock(*V1)
    await world.age_board(20)
    assert not await second.take_warm_up_lock(*V1), "it was renewed"
    await world.age_board(11)
    assert await second.take_warm_up_lock(*V1)
    assert not await first.take_warm_up_lock(*V1)
    await first.mark_warm(*V1)
    assert not await first.take_warm_up_lock(*V1), "who lost it gives back nothing of the other's"
    await second.mark_warm(*V1)
    assert await first.take_warm_up_lock(*V1)


async def test_what_an_owner_has_under_way_holds_until_it_says_otherwise_or_is_silent(world: World) -> None:
    first, second = world.owner("one"), world.owner("two")
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
    await world.age_board(10)
    assert (await first.refresh_warm_markers((), (), ["qwen-v4"])).models_in_use == {
        "qwen-v2",
        "qwen-v3",
        "qwen-v4",
    }
    await world.age_board(6)
    assert (await world.desk.read_model_registry()).models_in_use == {"qwen-v4"}
    assert (await first.refresh_warm_markers((), (), ["qwen-v4"])).models_in_use == {"qwen-v4"}


async def test_an_owner_whose_name_begins_like_another_s_is_another(world: World) -> None:
    first, second = world.owner("one"), world.owner('one","')
    await first.refresh_warm_markers((), (), ["a"])
    assert (await second.refresh_warm_markers((), (), ["b"])).models_in_use == {"a", "b"}
    assert (await first.refresh_warm_markers((), (), ())).models_in_use == {"b"}
    assert await first.take_warm_up_lock("a", 'e","one')
    assert await second.take_warm_up_lock("a", "e")


async def test_lines_of_a_pool_share_what_is_said(world: World) -> None:
    other = world.take_snapshot("batch:{qwen}:urgent")
    await world.owner("one").mark_warm(*V1)
    await other.desk.drain_version("qwen-v1", "ada")
    assert (await told(other.owner("two"))).warm_markers == {V1}
    assert set((await told(world.owner("one"))).drained_models) == {"qwen-v1"}


@pytest.mark.parametrize("name", ["", "a\nb", "x" * (MAX_MODEL_NAME_BYTES + 1), "ä" * 129, "\ud800"])
async def test_nothing_is_marked_of_what_can_be_no_name(world: World, name: str) -> None:
    queue = world.owner()
    for pair in ((name, "10.0.0.1:8000"), ("qwen-v1", name)):
        assert not await queue.take_warm_up_lock(*pair)
        await queue.mark_warm(*pair)
        await queue.release_warm_up_lock(*pair)
        assert await queue.refresh_warm_markers([pair], [pair], [name]) == ModelRegistryState()
    with pytest.raises(CallRefusedError, match="256 bytes"):
        await world.desk.drain_version(name, "ada")
    for family, label, version in ((name, "stable", "2"), ("qwen", name, "2"), ("qwen", "stable", name)):
        with pytest.raises(CallRefusedError, match="256 bytes"):
            await world.desk.set_label(family, label, version, "ada")
    assert not await world.desk.undrain_version(name)


async def test_names_may_hold_what_json_and_scripts_write_otherwise(world: World) -> None:
    queue, odd = world.owner("ow'\"]\\ner"), ('a"]\\,["ü%s', "[::1]:8000")
    assert await queue.take_warm_up_lock(*odd)
    await queue.mark_warm(*odd)
    told = await queue.refresh_warm_markers([odd], (), [odd[0]])
    assert (set(told.warm_markers), set(told.models_in_use), told.problem) == ({odd}, {odd[0]}, "")
    await world.desk.set_label(odd[0], odd[0], odd[0], "ada\nforged")
    await world.desk.drain_version(odd[0], "\x1b[31m", "be\ncause")
    told = await world.desk.read_model_registry()
    assert told.labels == {(odd[0], odd[0]): odd[0]}
    assert told.label_origins[odd[0], odd[0]].isprintable()
    assert told.drained_models[odd[0]].isprintable()


async def test_a_label_means_what_was_said_last_until_it_is_taken_back(world: World) -> None:
    desk = world.desk
    assert not await desk.set_label("qwen", "stable", None, "ada")
    assert await desk.set_label("qwen", "stable", "1", "ada")
    assert await desk.set_label("qwen", "stable", "2", "bob")
    assert await desk.set_label("qwen", "stable", "2", "bob")
    assert await desk.set_label("llama", "stable", "1", "ada")
    labels = {("qwen", "stable"): "2", ("llama", "stable"): "1"}
    assert (await told(world.owner())).labels == (await desk.read_model_registry()).labels == labels
    labelled = (await desk.read_model_registry()).label_origins
    assert labelled == (await told(world.owner())).label_origins
    today = time.strftime("%Y-%m-", time.gmtime())
    assert labelled.keys() == labels.keys()
    assert re.fullmatch(rf"by bob since {today}\d\d \d\d:\d\d:\d\d UTC", labelled["qwen", "stable"])
    await world.age_board(10_000)
    assert await desk.set_label("qwen", "stable", None, "ada")
    assert not await desk.set_label("qwen", "stable", None, "ada")
    assert (await told(world.owner())).labels == {("llama", "stable"): "1"}
    assert await desk.set_label("llama", "stable", None, "ada")
    assert await desk.read_model_registry() == ModelRegistryState()


async def test_a_drain_says_who_when_and_why_until_it_is_taken_back(world: World) -> None:
    desk = world.desk
    assert not await desk.undrain_version("qwen-v1")
    await desk.drain_version("qwen-v1", "ada", "it leaks")
    await desk.drain_version("qwen-v2", "")
    drained = (await told(world.owner())).drained_models
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


async def test_no_more_labels_and_drains_are_kept_than_any_pool_has(world: World) -> None:
    desk = world.desk
    for number in range(MAX_LABELS_OR_DRAINS):
        await desk.set_label("qwen", f"l{number}", "1", "ada")
        await desk.drain_version(f"v{number}", "ada")
    with pytest.raises(CallRefusedError, match="1000 labels already"):
        await desk.set_label("qwen", "more", "1", "ada")
    with pytest.raises(CallRefusedError, match="1000 drains already"):
        await desk.drain_version("more", "ada")
    for _ in range(2):
        assert await desk.set_label("qwen", "l7", "2", "ada"), "one that is there may change"
    await desk.drain_version("v7", "bob")
    found = await told(world.owner())
    assert (len(found.labels), len(found.drained_models)) == (MAX_LABELS_OR_DRAINS, MAX_LABELS_OR_DRAINS)
    assert found.labels["qwen", "l7"] == "2"
    await desk.undrain_version("v0")
    await desk.drain_version("more", "ada")
    await desk.set_label("qwen", "l0", None, "ada")
    assert await desk.set_label("qwen", "more", "1", "ada")


async def test_a_pin_keeps_its_version_while_that_may_be_kept(world: World) -> None:
    first, second = world.owner("one"), world.owner("two")
    assert await first.pin_versions(asked("chat-7", "v1", "v1", "v2")) == ["v1"]
    assert await second.pin_versions(asked("chat-7", "v2", "v1", "v2")) == ["v1"]
    assert await second.pin_versions(asked("chat-8", "v2", "v1", "v2")) == ["v2"]
    assert await first.pin_versions(asked("chat-7", "v2", "v2")) == ["v2"], "v1 is gone"
    assert await second.pin_versions(asked("chat-7", "v1", "v1", "v2")) == ["v2"]
    assert await second.pin_versions(asked("chat-7", "v3")) == ["v3"], "none may be kept"
    assert await second.pin_versions([]) == []


async def test_pins_are_asked_for_in_any_number_and_told_in_order(world: World) -> None:
    queue = world.owner()
    await queue.pin_versions(asked("k-5", "old", "old"))
    pins = [PinRequest(f"k-{number}", f"v{number % 7}", ["old"], 100) for number in range(600)]
    expected = ["old" if each.key == "k-5" else each.proposed_version for each in pins]
    assert await queue.pin_versions(pins) == expected
    assert await queue.pin_versions(
        [PinRequest("k-1", "new", ["v1"], 9), PinRequest("k-1", "late", ["v1"], 9)]
    ) == [
        "v1",
        "v1",
    ]


async def test_a_pin_lasts_so_long_from_when_it_was_asked_for_last(world: World) -> None:
    queue = world.owner()
    await queue.pin_versions([*asked("a", "v1", for_s=100), *asked("b", "v1", for_s=100)])
    await world.age_board(60)
    await queue.pin_versions(asked("a", "v2", "v1", for_s=100))
    await world.age_board(60)
    both = [*asked("a", "v2", "v1"), *asked("b", "v2", "v1")]
    assert await queue.pin_versions(both) == ["v1", "v2"]
    await queue.pin_versions(asked("brief", "v1", for_s=1))
    await queue.pin_versions(asked("none", "v1", for_s=-1))
    await world.age_board(2)
    again = [*asked("brief", "v2", "v1"), *asked("none", "v2", "v1")]
    assert await queue.pin_versions(again) == ["v2", "v2"]


@pytest.mark.parametrize(
    "keys", [("", " "), ("x" * 300 + "a", "x" * 300 + "b"), ("\ud800", "?"), ("a\nb", "a")]
)
async def test_any_two_keys_have_pins_of_their_own(world: World, keys: tuple[str, str]) -> None:
    queue = world.owner()
    await queue.pin_versions([*asked(keys[0], "v1"), *asked(keys[1], "v2")])
    both = [*asked(keys[0], "v3", "v1", "v2"), *asked(keys[1], "v3", "v1", "v2")]
    assert await queue.pin_versions(both) == ["v1", "v2"]


async def test_pins_that_were_not_asked_for_the_longest_go_first(world: World) -> None:
    queue = world.owner()
    await queue.pin_versions(asked("first", "v1"))
    await queue.pin_versions(asked("second", "v1", for_s=1000))
    await queue.pin_versions(asked("first", "v1"))
    await queue.pin_versions([PinRequest(f"k-{number}", "v1", (), 100) for number in range(MAX_PINS - 2)])
    assert await queue.pin_versions(asked("third", "v1")) == ["v1"]
    both = [*asked("second", "v2", "v1"), *asked("first", "v2", "v1")]
    assert await queue.pin_versions(both) == ["v2", "v1"]


async def test_what_is_said_lasts_no_longer_though_the_queue_s_clock_steps_back(world: World) -> None:
    queue, other = world.owner("one"), world.owner("two")
    await queue.mark_warm(*V1)
    await queue.take_warm_up_lock(*V2)
    await queue.refresh_warm_markers((), (), ["qwen-v1"])
    await world.age_board(-10_000)
    assert (await told(other)).warm_markers == {V1}
    await world.age_board(61)
    found = await told(other)
    assert (found.warm_markers, found.models_in_use) == (frozenset(), frozenset())
    assert await other.take_warm_up_lock(*V2)
