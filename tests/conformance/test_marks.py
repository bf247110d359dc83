"""What is said of versions of models: each promise of the port, in memory, Redis and Valkey."""

from __future__ import annotations

import re
import time

import pytest

from dispatcher.core.requests.lanes import MODEL_BYTES
from dispatcher.ports import CallRefusedError, ModelMarks, PinAsked, Queue
from dispatcher.queue.constants import DECIDED_MOST, PINS_MOST
from tests.conformance.worlds import World

V1, V2 = ("qwen-v1", "10.0.0.1:8000"), ("qwen-v2", "10.0.0.1:8000")
FAR = ("qwen-v1", "10.0.0.2:8000")


async def told(queue: Queue) -> ModelMarks:
    return await queue.marks((), (), ())


def asked(key: str, version: str, *keeps: str, for_s: float = 100.0) -> list[PinAsked]:
    return [PinAsked(key, version, keeps, for_s)]


async def test_nothing_is_said_of_any_model_at_first(world: World) -> None:
    assert await told(world.owner()) == await world.desk.model_marks() == ModelMarks()


async def test_what_one_owner_has_warmed_is_warm_for_all(world: World) -> None:
    first, second = world.owner("one"), world.owner("two")
    assert await first.warming(*V1)
    assert (await told(second)).warm == frozenset()
    await first.warmed(*V1)
    await second.warmed(*FAR)
    for queue in (first, second, first):
        assert (await told(queue)).warm == {V1, FAR}
    assert (await world.desk.model_marks()).warm == {V1, FAR}


async def test_a_mark_lapses_a_minute_after_any_owner_refreshed_it_last(world: World) -> None:
    first, second = world.owner("one"), world.owner("two")
    await first.warmed(*V1)
    await first.warmed(*V2)
    await world.age_board(50)
    assert (await second.marks([V1], (), ())).warm == {V1, V2}
    await world.age_board(20)
    assert (await world.desk.model_marks()).warm == {V1}
    assert (await told(first)).warm == {V1}
    await world.age_board(41)
    assert (await told(first)).warm == (await world.desk.model_marks()).warm == frozenset()


async def test_who_only_looks_is_told_the_same_and_refreshes_nothing(world: World) -> None:
    first, looker = world.owner("one"), world.owner("two")
    assert await looker.model_marks() == ModelMarks()
    await first.warmed(*V1)
    await first.marks((), (), ["qwen-v1"])
    await world.desk.label("qwen", "stable", "1", "ada")
    await world.desk.drain("qwen-v2", "ada", "bad")
    seen = await looker.model_marks()
    assert seen == await told(world.owner("three")) == await world.desk.model_marks()
    assert (seen.warm, seen.used) == (frozenset({V1}), frozenset({"qwen-v1"}))
    assert seen.labels == {("qwen", "stable"): "1"}
    await world.age_board(50)
    assert (await looker.model_marks()).warm == {V1}
    await world.age_board(11)
    lapsed = await looker.model_marks()
    assert not lapsed.warm
    assert not lapsed.used


async def test_a_mark_that_lapsed_or_was_removed_does_not_come_back_by_being_kept(world: World) -> None:
    first, second = world.owner("one"), world.owner("two")
    assert (await first.marks([V1], (), ())).warm == frozenset(), "it never was there"
    await first.warmed(*V1)
    await first.warmed(*V2)
    assert (await second.marks((), [V1, FAR], ())).warm == {V2}
    assert (await first.marks([V1, V2], (), ())).warm == {V2}
    await world.age_board(61)
    assert (await first.marks([V1, V2], (), ())).warm == frozenset()
    await first.warmed(*V1)
    assert (await second.marks([V1], [V1], ())).warm == frozenset(), "who says both has seen it go"


async def test_one_owner_at_a_time_has_the_right_to_warm_a_version_at_an_endpoint(world: World) -> None:
    first, second = world.owner("one"), world.owner("two")
    assert [await first.warming(*V1), await first.warming(*V1)] == [True, True]
    assert [await second.warming(*V1), await second.warming(*V2), await second.warming(*FAR)] == [
        False,
        True,
        True,
    ]
    assert await world.owner("one").warming(*V1), "who starts anew under its name has it still"
    await second.unwarmed(*V1)
    assert not await second.warming(*V1), "it was not its to give back"
    await first.unwarmed(*V1)
    assert await second.warming(*V1)
    assert (await told(first)).warm == frozenset()


async def test_who_warms_what_is_known_to_all(world: World) -> None:
    first, second = world.owner("one"), world.owner("two")
    assert await first.warming(*V1)
    assert await second.warming(*V2)
    assert await second.warming(*FAR)
    rights = {(*V1, "one"), (*V2, "two"), (*FAR, "two")}
    for seen in (await told(first), await second.model_marks(), await world.desk.model_marks()):
        assert set(seen.warming) == rights
    await second.unwarmed(*FAR)
    await first.warmed(*V1)
    assert set((await told(first)).warming) == {(*V2, "two")}
    await world.age_board(31)
    assert set((await first.model_marks()).warming) == set((await told(second)).warming) == set()


async def test_the_right_to_warm_lapses_and_is_given_back_by_the_mark(world: World) -> None:
    first, second = world.owner("one"), world.owner("two")
    assert await first.warming(*V1)
    await world.age_board(20)
    assert await first.warming(*V1)
    await world.age_board(20)
    assert not await second.warming(*V1), "it was renewed"
    await world.age_board(11)
    assert await second.warming(*V1)
    assert not await first.warming(*V1)
    await first.warmed(*V1)
    assert not await first.warming(*V1), "who lost it gives back nothing of the other's"
    await second.warmed(*V1)
    assert await first.warming(*V1)


async def test_what_an_owner_has_under_way_holds_until_it_says_otherwise_or_is_silent(world: World) -> None:
    first, second = world.owner("one"), world.owner("two")
    assert (await first.marks((), (), ["qwen-v1", "qwen-v2"])).used == {"qwen-v1", "qwen-v2"}
    assert (await second.marks((), (), ["qwen-v2", "qwen-v3"])).used == {"qwen-v1", "qwen-v2", "qwen-v3"}
    assert (await first.marks((), (), ["qwen-v1"])).used == {"qwen-v1", "qwen-v2", "qwen-v3"}
    assert (await first.marks((), (), ())).used == {"qwen-v2", "qwen-v3"}
    assert (await first.marks((), (), ["qwen-v4"])).used == {"qwen-v2", "qwen-v3", "qwen-v4"}
    await world.age_board(10)
    assert (await first.marks((), (), ["qwen-v4"])).used == {"qwen-v2", "qwen-v3", "qwen-v4"}
    await world.age_board(6)
    assert (await world.desk.model_marks()).used == {"qwen-v4"}
    assert (await first.marks((), (), ["qwen-v4"])).used == {"qwen-v4"}


async def test_an_owner_whose_name_begins_like_another_s_is_another(world: World) -> None:
    first, second = world.owner("one"), world.owner('one","')
    await first.marks((), (), ["a"])
    assert (await second.marks((), (), ["b"])).used == {"a", "b"}
    assert (await first.marks((), (), ())).used == {"b"}
    assert await first.warming("a", 'e","one')
    assert await second.warming("a", "e")


async def test_lines_of_a_pool_share_what_is_said(world: World) -> None:
    other = world.line("batch:{qwen}:urgent")
    await world.owner("one").warmed(*V1)
    await other.desk.drain("qwen-v1", "ada")
    assert (await told(other.owner("two"))).warm == {V1}
    assert set((await told(world.owner("one"))).drained) == {"qwen-v1"}


@pytest.mark.parametrize("name", ["", "a\nb", "x" * (MODEL_BYTES + 1), "ä" * 129, "\ud800"])
async def test_nothing_is_marked_of_what_can_be_no_name(world: World, name: str) -> None:
    queue = world.owner()
    for pair in ((name, "10.0.0.1:8000"), ("qwen-v1", name)):
        assert not await queue.warming(*pair)
        await queue.warmed(*pair)
        await queue.unwarmed(*pair)
        assert await queue.marks([pair], [pair], [name]) == ModelMarks()
    with pytest.raises(CallRefusedError, match="256 bytes"):
        await world.desk.drain(name, "ada")
    for family, label, version in ((name, "stable", "2"), ("qwen", name, "2"), ("qwen", "stable", name)):
        with pytest.raises(CallRefusedError, match="256 bytes"):
            await world.desk.label(family, label, version, "ada")
    assert not await world.desk.undrain(name)


async def test_names_may_hold_what_json_and_scripts_write_otherwise(world: World) -> None:
    queue, odd = world.owner("ow'\"]\\ner"), ('a"]\\,["ü%s', "[::1]:8000")
    assert await queue.warming(*odd)
    await queue.warmed(*odd)
    told = await queue.marks([odd], (), [odd[0]])
    assert (set(told.warm), set(told.used), told.problem) == ({odd}, {odd[0]}, "")
    await world.desk.label(odd[0], odd[0], odd[0], "ada\nforged")
    await world.desk.drain(odd[0], "\x1b[31m", "be\ncause")
    told = await world.desk.model_marks()
    assert told.labels == {(odd[0], odd[0]): odd[0]}
    assert told.labelled[odd[0], odd[0]].isprintable()
    assert told.drained[odd[0]].isprintable()


async def test_a_label_means_what_was_said_last_until_it_is_taken_back(world: World) -> None:
    desk = world.desk
    assert not await desk.label("qwen", "stable", None, "ada")
    assert await desk.label("qwen", "stable", "1", "ada")
    assert await desk.label("qwen", "stable", "2", "bob")
    assert await desk.label("qwen", "stable", "2", "bob")
    assert await desk.label("llama", "stable", "1", "ada")
    labels = {("qwen", "stable"): "2", ("llama", "stable"): "1"}
    assert (await told(world.owner())).labels == (await desk.model_marks()).labels == labels
    labelled = (await desk.model_marks()).labelled
    assert labelled == (await told(world.owner())).labelled
    today = time.strftime("%Y-%m-", time.gmtime())
    assert labelled.keys() == labels.keys()
    assert re.fullmatch(rf"by bob since {today}\d\d \d\d:\d\d:\d\d UTC", labelled["qwen", "stable"])
    await world.age_board(10_000)
    assert await desk.label("qwen", "stable", None, "ada")
    assert not await desk.label("qwen", "stable", None, "ada")
    assert (await told(world.owner())).labels == {("llama", "stable"): "1"}
    assert await desk.label("llama", "stable", None, "ada")
    assert await desk.model_marks() == ModelMarks()


async def test_a_drain_says_who_when_and_why_until_it_is_taken_back(world: World) -> None:
    desk = world.desk
    assert not await desk.undrain("qwen-v1")
    await desk.drain("qwen-v1", "ada", "it leaks")
    await desk.drain("qwen-v2", "")
    drained = (await told(world.owner())).drained
    assert drained == (await desk.model_marks()).drained
    today = time.strftime("%Y-%m-", time.gmtime())
    assert re.fullmatch(rf"by ada since {today}\d\d \d\d:\d\d:\d\d UTC: it leaks", drained["qwen-v1"])
    assert re.fullmatch(r"by somebody since [^:]+:\d\d:\d\d UTC", drained["qwen-v2"])
    await desk.drain("qwen-v1", "bob", "it leaks still")
    assert (await desk.model_marks()).drained["qwen-v1"].startswith("by bob")
    assert await desk.undrain("qwen-v1")
    assert await desk.undrain("qwen-v2")
    assert not await desk.undrain("qwen-v1")
    assert await desk.model_marks() == ModelMarks()


async def test_no_more_labels_and_drains_are_kept_than_any_pool_has(world: World) -> None:
    desk = world.desk
    for number in range(DECIDED_MOST):
        await desk.label("qwen", f"l{number}", "1", "ada")
        await desk.drain(f"v{number}", "ada")
    with pytest.raises(CallRefusedError, match="1000 labels already"):
        await desk.label("qwen", "more", "1", "ada")
    with pytest.raises(CallRefusedError, match="1000 drains already"):
        await desk.drain("more", "ada")
    for _ in range(2):
        assert await desk.label("qwen", "l7", "2", "ada"), "one that is there may change"
    await desk.drain("v7", "bob")
    found = await told(world.owner())
    assert (len(found.labels), len(found.drained)) == (DECIDED_MOST, DECIDED_MOST)
    assert found.labels["qwen", "l7"] == "2"
    await desk.undrain("v0")
    await desk.drain("more", "ada")
    await desk.label("qwen", "l0", None, "ada")
    assert await desk.label("qwen", "more", "1", "ada")


async def test_a_pin_keeps_its_version_while_that_may_be_kept(world: World) -> None:
    first, second = world.owner("one"), world.owner("two")
    assert await first.pin(asked("chat-7", "v1", "v1", "v2")) == ["v1"]
    assert await second.pin(asked("chat-7", "v2", "v1", "v2")) == ["v1"]
    assert await second.pin(asked("chat-8", "v2", "v1", "v2")) == ["v2"]
    assert await first.pin(asked("chat-7", "v2", "v2")) == ["v2"], "v1 is gone"
    assert await second.pin(asked("chat-7", "v1", "v1", "v2")) == ["v2"]
    assert await second.pin(asked("chat-7", "v3")) == ["v3"], "none may be kept"
    assert await second.pin([]) == []


async def test_pins_are_asked_for_in_any_number_and_told_in_order(world: World) -> None:
    queue = world.owner()
    await queue.pin(asked("k-5", "old", "old"))
    pins = [PinAsked(f"k-{number}", f"v{number % 7}", ["old"], 100) for number in range(600)]
    expected = ["old" if each.key == "k-5" else each.version for each in pins]
    assert await queue.pin(pins) == expected
    assert await queue.pin([PinAsked("k-1", "new", ["v1"], 9), PinAsked("k-1", "late", ["v1"], 9)]) == [
        "v1",
        "v1",
    ]


async def test_a_pin_lasts_so_long_from_when_it_was_asked_for_last(world: World) -> None:
    queue = world.owner()
    await queue.pin([*asked("a", "v1", for_s=100), *asked("b", "v1", for_s=100)])
    await world.age_board(60)
    await queue.pin(asked("a", "v2", "v1", for_s=100))
    await world.age_board(60)
    both = [*asked("a", "v2", "v1"), *asked("b", "v2", "v1")]
    assert await queue.pin(both) == ["v1", "v2"]
    await queue.pin(asked("brief", "v1", for_s=1))
    await queue.pin(asked("none", "v1", for_s=-1))
    await world.age_board(2)
    again = [*asked("brief", "v2", "v1"), *asked("none", "v2", "v1")]
    assert await queue.pin(again) == ["v2", "v2"]


@pytest.mark.parametrize(
    "keys", [("", " "), ("x" * 300 + "a", "x" * 300 + "b"), ("\ud800", "?"), ("a\nb", "a")]
)
async def test_any_two_keys_have_pins_of_their_own(world: World, keys: tuple[str, str]) -> None:
    queue = world.owner()
    await queue.pin([*asked(keys[0], "v1"), *asked(keys[1], "v2")])
    both = [*asked(keys[0], "v3", "v1", "v2"), *asked(keys[1], "v3", "v1", "v2")]
    assert await queue.pin(both) == ["v1", "v2"]


async def test_pins_that_were_not_asked_for_the_longest_go_first(world: World) -> None:
    queue = world.owner()
    await queue.pin(asked("first", "v1"))
    await queue.pin(asked("second", "v1", for_s=1000))
    await queue.pin(asked("first", "v1"))
    await queue.pin([PinAsked(f"k-{number}", "v1", (), 100) for number in range(PINS_MOST - 2)])
    assert await queue.pin(asked("third", "v1")) == ["v1"]
    both = [*asked("second", "v2", "v1"), *asked("first", "v2", "v1")]
    assert await queue.pin(both) == ["v2", "v1"]


async def test_what_is_said_lasts_no_longer_though_the_queue_s_clock_steps_back(world: World) -> None:
    queue, other = world.owner("one"), world.owner("two")
    await queue.warmed(*V1)
    await queue.warming(*V2)
    await queue.marks((), (), ["qwen-v1"])
    await world.age_board(-10_000)
    assert (await told(other)).warm == {V1}
    await world.age_board(61)
    found = await told(other)
    assert (found.warm, found.used) == (frozenset(), frozenset())
    assert await other.warming(*V2)
