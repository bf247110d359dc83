"""The live feed: kept history, frames for readers, and slow readers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from dispatcher.requests.submission import QueueUnavailableError
from dispatcher.service.admin.stream import (
    MAX_DEAD_GROUPS,
    MAX_EVENT_BYTES,
    MAX_EVENTS,
    MAX_FRAMES_BEHIND,
    MAX_SAMPLES,
    MAX_STREAMS,
    SAMPLE_COLUMNS,
    EventStream,
    extract_measures,
    group_dead,
)
from dispatcher.telemetry.events import Event, divert_events
from tests.cost_comparison import compare_costs, measure_cpu_s
from tests.service.admin.stage import NOW, Stage, dead_request, load_settings, status
from tests.support import wait_until

Messages = list[tuple[str, str, Any]]


async def taken(stream: EventStream) -> Messages:
    """Return the frames for the reader as kind, id and data."""
    frames = await stream.take_frames(0.0)
    assert frames is not None, "the stream is over"
    return messages(frames)


def messages(frames: bytes) -> Messages:
    found = []
    for block in frames.decode().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        if "event" in lines:
            found.append((lines["event"], lines.get("id", ""), json.loads(lines["data"])))
    return found


def joined(stage: Stage, last_id: str = "") -> EventStream:
    stream = stage.feed.subscribe(last_id)
    assert stream is not None
    return stream


async def history(stage: Stage, last_id: str = "") -> tuple[str, Any]:
    stream = joined(stage, last_id)
    stage.feed.unsubscribe(stream)
    return next((id_, data) for kind, id_, data in await taken(stream) if kind == "history")


async def test_new_reader_gets_the_complete_state() -> None:
    stage = Stage(dead=[dead_request(7, "why")])
    stage.advance_second()
    stage.feed.record_event(Event.CONFIG_RELOADED, {"generation": 2})
    found = await taken(joined(stage))
    assert [kind for kind, _, _ in found] == ["history", "status", "settings", "dead"]
    told = {kind: data for kind, _, data in found}
    assert told["history"]["complete"]
    assert told["history"]["samples"]["at"] == [NOW + 1]
    assert set(told["history"]["samples"]) == {"at", *SAMPLE_COLUMNS}
    [event] = told["history"]["events"]
    assert (event["event"], event["level"], event["fields"]) == ("config-reloaded", "info", {"generation": 2})
    assert told["status"] == stage.status_document
    assert told["settings"]["settings"]["budget"]["reserve"] == 0.05
    assert "budget.reserve" not in told["settings"]["defaults"]
    assert "budget.max_sys" in told["settings"]["defaults"]


async def test_reader_gets_samples_each_second_and_events_at_once() -> None:
    stage = Stage()
    stream = joined(stage)
    await taken(stream)
    stage.advance_second("no-room")
    stage.feed.record_event(Event.GATE, {"reason": "no-room", "limit": 0})
    found = await taken(stream)
    assert [kind for kind, _, _ in found] == ["sample", "status", "event"]
    assert found[0][2]["reason"] == found[1][2]["reason"] == found[2][2]["fields"]["reason"] == "no-room"
    assert found[0][1] != found[2][1]


async def test_settings_are_sent_without_secrets() -> None:
    stage = Stage()
    assert "hunter2" not in json.dumps(await taken(joined(stage)))


async def test_reconnected_reader_gets_only_what_it_missed() -> None:
    stage = Stage()
    stage.advance_second()
    stage.feed.record_event(Event.QUEUE_REACHABLE, {})
    last_id, _ = await history(stage)
    stage.advance_second("stale")
    stage.feed.record_event(Event.GATE, {"reason": "stale"})
    id_, missed = await history(stage, last_id)
    assert not missed["complete"]
    assert missed["samples"]["reason"] == ["stale"]
    assert [event["event"] for event in missed["events"]] == ["gate"]
    assert id_ != last_id
    _, nothing = await history(stage, id_)
    assert (nothing["complete"], nothing["samples"]["at"], nothing["events"]) == (False, [], [])


async def test_reader_with_an_unknown_id_gets_the_complete_history() -> None:
    before, stage = Stage(now=NOW - 60), Stage()
    before.advance_second()
    stage.advance_second()
    stage.advance_second()
    old_id, _ = await history(before)
    own_id, _ = await history(stage)
    process = own_id.partition("-")[0]
    for last_id in (
        old_id,
        "",
        "-",
        "rubbish",
        f"{process}-",
        f"{process}-9999",
        f"{process}--1",
        f"{process}-²",
    ):
        _, found = await history(stage, last_id)
        assert (found["complete"], len(found["samples"]["at"])) == (True, 2), last_id


async def test_kept_history_is_bounded() -> None:
    stage = Stage()
    for _ in range(MAX_SAMPLES + 50):
        stage.advance_second()
    for number in range(MAX_EVENTS + 50):
        stage.feed.record_event(Event.LEASES_RECLAIMED, {"leases": number})
    _, found = await history(stage)
    assert len(found["samples"]["at"]) == MAX_SAMPLES
    assert found["samples"]["at"][-1] == NOW + MAX_SAMPLES + 50
    assert [event["fields"]["leases"] for event in found["events"]][-1] == MAX_EVENTS + 49
    assert len(found["events"]) == MAX_EVENTS
    assert len(json.dumps(found)) < 250_000


async def test_slow_reader_is_dropped_and_the_others_are_not() -> None:
    stage = Stage()
    slow, quick = joined(stage), joined(stage)
    for _ in range(MAX_FRAMES_BEHIND):
        stage.advance_second()
        assert not quick.is_dropped
        await taken(quick)
    assert slow.is_dropped
    assert await slow.take_frames(0.0) is None, "it gets nothing more until it reconnects"


async def test_number_of_readers_is_bounded_and_a_closed_one_makes_room() -> None:
    stage = Stage()
    streams = [joined(stage) for _ in range(MAX_STREAMS)]
    assert stage.feed.subscribe() is None
    stage.feed.unsubscribe(streams[0])
    assert stage.feed.subscribe() is not None
    assert len(stage.feed._streams) == MAX_STREAMS


async def test_closing_delivers_pending_frames_and_ends_the_readers() -> None:
    stage = Stage()
    stream = joined(stage)
    stage.feed.close()
    assert messages(await stream.take_frames(0.0) or b"") != []
    assert await stream.take_frames(0.0) is None


async def test_missing_frames_do_not_end_a_stream() -> None:
    stage = Stage()
    stream = joined(stage)
    await taken(stream)
    assert await stream.take_frames(0.0) == b""


async def test_settings_are_sent_again_after_a_reload() -> None:
    stage = Stage()
    stream = joined(stage)
    await taken(stream)
    stage.advance_second()
    assert "settings" not in [kind for kind, _, _ in await taken(stream)]
    stage.settings = load_settings("gateway: {url: 'http://gateway'}\nbudget: {reserve: 0.2}\n")
    stage.advance_second(config_generation=2)
    told = [data for kind, _, data in await taken(stream) if kind == "settings"]
    assert [each["settings"]["budget"]["reserve"] for each in told] == [0.2]


async def test_reader_that_connects_after_a_reload_does_not_suppress_it_for_others() -> None:
    stage = Stage()
    stage.advance_second()
    first = joined(stage)
    await taken(first)
    stage.status_document["config_generation"] = 2
    joined(stage)
    stage.advance_second()
    assert "settings" in [kind for kind, _, _ in await taken(first)]


async def test_dead_requests_are_read_for_readers_and_again_when_their_number_changes() -> None:
    stage = Stage(status_document=status(dead=1), dead=[dead_request(7, "8 tries failed")])
    async with stage.open(ticking=True):
        for _ in range(3):
            stage.advance_second()
        assert stage.asked_for_dead == 0, "there is no reader"
        stream = joined(stage)
        seen: list[Any] = []

        async def has_sent_dead(count: int) -> bool:
            seen.extend(data for kind, _, data in await taken(stream) if kind == "dead")
            return bool(seen) and seen[-1] is not None and seen[-1]["read_count"] == count

        await wait_until(lambda: has_sent_dead(1))
        assert seen[0] is None, "they are not read yet"
        [group] = seen[-1]["groups"]
        one = group["newest"]
        assert (one["entry"], one["id"], one["reason"]) == (7, "job-7", "8 tries failed")
        assert one["commands"] == ["show", "requeue", "purge"]
        assert "secret" not in json.dumps(seen), "no payload"
        stage.dead.append(dead_request(9, "not JSON", readable=False))
        stage.advance_second(dead=2)
        await wait_until(lambda: has_sent_dead(2))
        newest = [group["newest"] for group in seen[-1]["groups"]]
        assert [one["entry"] for one in newest] == [9, 7]
        assert (newest[0]["id"], newest[0]["commands"]) == (None, ["show", "purge"])
        assert stage.asked_for_dead == 2


def test_groups_of_dead_requests_are_sorted_by_frequency() -> None:
    newest = [dead_request(n, "RETRIES_EXHAUSTED: 500" if n % 3 else f"reason {n}") for n in range(60, 0, -1)]
    grouped = group_dead(newest)
    assert (grouped["read_count"], grouped["reasons"], len(grouped["groups"])) == (60, 21, MAX_DEAD_GROUPS)
    first = grouped["groups"][0]
    assert (first["count"], first["newest"]["entry"]) == (40, 59)
    assert [group["newest"]["entry"] for group in grouped["groups"][1:3]] == [60, 57], "the newest of equals"
    assert group_dead([]) == {"read_count": 0, "reasons": 0, "groups": []}


async def test_unreachable_queue_affects_only_the_list_of_dead_requests() -> None:
    away = True

    async def newest(most: int) -> Any:
        if away:
            raise QueueUnavailableError("away")
        return [dead_request(7, "why")]

    stage = Stage(status_document=status(dead=1))
    stage.feed._dead = newest
    async with stage.open(ticking=True):
        stream = joined(stage)
        kinds: list[str] = []

        async def heard(kind: str, times: int) -> bool:
            kinds.extend(each for each, _, data in await taken(stream) if each != "dead" or data)
            return kinds.count(kind) >= times

        await wait_until(lambda: heard("sample", 2))
        assert "dead" not in kinds
        away = False
        await wait_until(lambda: heard("dead", 1))


async def test_event_that_is_no_json_or_too_long_is_truncated() -> None:
    stage = Stage()
    nested: list[Any] = []
    for _ in range(sys.getrecursionlimit() * 2):
        nested = [nested]
    for fields in (
        {"why": "\udcff broken", "of": 3},
        {"why": "x" * 100_000, "more": ["y" * 100_000] * 100},
        {f"field-{number}": "z" * 300 for number in range(1000)},
        {"why": object(), 3: float("nan")},
        {"nested": nested},
    ):
        stage.feed.record_event(Event.INTERNAL_ERROR, fields)  # type: ignore[arg-type]
    _, found = await history(stage)
    assert len(found["events"]) == 5
    assert all(len(json.dumps(event["fields"])) < 2 * MAX_EVENT_BYTES for event in found["events"])


async def test_internal_error_is_logged_once_and_the_feed_continues() -> None:
    broken = True
    stage = Stage(status_document=status(dead=1), dead=[dead_request(7, "why")])
    whole, newest = stage.feed._status, stage.feed._dead

    def sometimes() -> Any:
        if broken:
            raise RuntimeError("a defect")
        return whole()

    async def sometimes_dead(most: int) -> Any:
        if broken:
            raise RuntimeError("a defect")
        return await newest(most)

    heard: list[str] = []
    stream = joined(stage)
    stage.feed._status, stage.feed._dead = sometimes, sometimes_dead
    with divert_events(lambda event, fields: heard.append(f"{event.event_name}: {fields['where']}")):
        beats = asyncio.create_task(stage.feed.run())
    try:
        await wait_until(lambda: len(heard) == 2)
        broken = False
        await wait_until(lambda: len(stage.feed._samples) > 0)

        async def has_sent_dead() -> bool:
            return any(kind == "dead" and data for kind, _, data in await taken(stream))

        await wait_until(has_sent_dead)
    finally:
        beats.cancel()
    assert sorted(heard) == [
        "internal-error: the dead for the live page",
        "internal-error: the live page's feed",
    ]


def test_measures_of_unknown_values_are_none() -> None:
    unknown = dict.fromkeys(SAMPLE_COLUMNS)
    assert extract_measures({"reason": "starting"}) == unknown | {"reason": "starting"}
    odd = status(
        max_sys=float("inf"),
        pending=True,
        limit="3",
        realtime=float("nan"),
        configured_max_sys=float("nan"),
        explanation="odd",
    )
    told = extract_measures(odd)
    assert [told[name] for name in ("max_sys", "realtime", "pending", "limit", "configured_max_sys")] == [
        None
    ] * 5
    assert extract_measures(status(in_flight=14))["batch"] == 14
    assert extract_measures(status(in_flight=14, leased=None))["batch"] is None, (
        "other owners may have requests in flight"
    )


async def test_results_are_sent_as_rates_by_code() -> None:
    stage = Stage(results={"2xx": 100.0, "GATE_ERROR": 0.0})
    stage.advance_second()
    stage.results = {"2xx": 112.5, "GATE_ERROR": 0.0}
    stage.advance_second()
    stage.now += 4
    stage.results = {"2xx": 112.5, "GATE_ERROR": 10.0}
    stage.advance_second()
    _, found = await history(stage)
    assert found["results"] == {"2xx": [0, 12.5, 0], "GATE_ERROR": [0, 0, 2]}
    assert found["totals"] == {"2xx": 112.5, "GATE_ERROR": 10.0}


async def test_message_is_encoded_once_for_all_readers() -> None:
    def ten_seconds(readers: int) -> Callable[[], Awaitable[float]]:
        stage = Stage()
        stage.status_document["readings"] = [{"raw": {f"series-{number}": 1.5 for number in range(300)}}]
        streams = [joined(stage) for _ in range(readers)]

        def ten() -> None:
            for _ in range(10):
                stage.advance_second()

        async def cost() -> float:
            for stream in streams:
                await stream.take_frames(0.0)
            return measure_cpu_s(ten)()

        return cost

    found = await compare_costs(ten_seconds(20), ten_seconds(1))
    assert found.ratio < 2, found


async def test_invalid_id_of_any_length_gets_the_complete_history() -> None:
    stage = Stage()
    stage.advance_second()
    process = (await history(stage))[0].partition("-")[0]
    for number in ("", "-1", "2", "9" * 5000):
        assert (await history(stage, f"{process}-{number}"))[1]["complete"], number[:9]
