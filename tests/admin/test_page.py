"""The page in a real browser."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dispatcher.core.health import Health
from dispatcher.telemetry.events import Event
from tests.admin.opened import axe_script, drawn, live, quiet, says, serious, shown, soon
from tests.admin.stage import (
    ENDED,
    Stage,
    configured,
    dead_request,
    merged,
    quarter_of_an_hour,
    status,
    write_token,
)
from tests.browser import Page

LOOKS = [
    (1280, False),
    (390, True),
    pytest.param(1280, True, marks=pytest.mark.long),
    pytest.param(390, False, marks=pytest.mark.long),
]
"""Each width and each theme; all of both in the long form."""


async def test_open_page_follows_a_closing_gate_without_reload(page: Page) -> None:
    stage = Stage(told=status("open", pending=7))
    async with shown(stage, page):
        await page.ask("window.before = true")
        assert await page.text("#badge") == "Open: open."
        stage.told = status("no-room", pending=8)
        await soon(lambda: says(page, "#badge", "Closed: no-room."), what="the new reason")
        assert await page.text("#explanation") == stage.told["explanation"]
        assert await page.ask("window.before")
    await asyncio.sleep(0)
    assert page.console == []


async def test_history_is_there_when_the_page_opens(page: Page) -> None:
    stage = Stage(dead=[dead_request(7, "RETRIES_EXHAUSTED: 8 tries failed")])
    quarter_of_an_hour(stage, "full")
    async with shown(stage, page, ticking=False):
        left, right = await page.ask(
            "(() => { const box = document.querySelector('#load path').getBBox();"
            " return [box.x, box.x + box.width]; })()"
        )
        width = await page.ask("document.querySelector('#load').clientWidth")
        assert left < 50
        assert right > width - 5
        assert await says(page, "#reasons", "stale 45 s")
        assert await says(page, "#reasons", "backpressure 12 s")
        label = await page.ask("document.querySelector('#load').getAttribute('aria-label')")
        assert "no-room" in label
        assert "capacity between 28.8 and 48" in label, "a refusal was taken for it"
        await page.ask("document.querySelector('#table-details summary').click()")
        await soon(
            lambda: page.ask("document.querySelectorAll('#minutes tbody tr').length >= 15"), what="the table"
        )
        await quiet(page)


async def test_bar_has_the_numbers_of_the_status(page: Page) -> None:
    stage = Stage()
    stage.second(
        "full", f_sys=0.5, f_epp=0.125, max_sys=40.0, in_flight=8, reserve=0.05, configured_max_sys=80.0
    )
    async with shown(stage, page, ticking=False):
        parts = await page.ask(
            "Object.fromEntries([...document.querySelectorAll('#parts > div')].map(one =>"
            " [one.querySelector('dt').textContent, one.querySelector('dd').firstChild.textContent]))"
        )
        assert parts == {
            "Realtime": "12",
            "Waiting in the picker": "5",
            "Batch": "8",
            "Free": "13",
            "Reserve": "2",
            "Batch limit": "21",
            "Configured capacity": "80",
        }
        widths = await page.ask(
            "[...document.querySelectorAll('#bar i')].map(one => parseFloat(one.style.width))"
        )
        assert widths == pytest.approx([15, 6.25, 10, 16.25, 2.5])
        assert await page.ask("parseFloat(document.querySelector('#bar b').style.left)") == pytest.approx(50)


async def test_what_is_not_known_is_called_unknown(page: Page) -> None:
    names = ("version", "pool", "queue", "owner", "observe", "open", "running", "config_generation")
    health = ("health", "health_cause", "health_sentence")
    bare = {name: status()[name] for name in (*names, *health)}
    told = {**bare, "reason": "starting", "explanation": "Nothing is sent: starting."}
    async with shown(Stage(told=told, results={}), page):
        for name in ("#queue", "#price", "#outcomes", "#parts"):
            assert await says(page, name, "unknown"), name
        assert "NaN" not in await page.text("body")
        assert "undefined" not in await page.text("main")
        await quiet(page)


async def test_what_is_merged_has_a_card_where_there_is_something_of_the_kind(page: Page) -> None:
    stage = Stage(told=status("open"))
    async with shown(stage, page):
        assert await page.ask("document.querySelector('#batching-card').hidden")
        batching = [
            merged(),
            merged("", server_max_items=8),
            merged("e5", **ENDED),
            merged("<b>odd</b>", gain=None),
        ]
        counts = {"split": 2000, "halved": 3, "unsplittable": 1, "failed": 0}
        stage.told |= {
            "batching": batching,
            "batching_calls": counts,
            "batching_requests": 31007,
            "batching_waiting": 5,
        }
        await soon(lambda: says(page, "#batching", "bge-m3"), what="the card")
        assert not await page.ask("document.querySelector('#batching-card').hidden")
        assert (
            await page.text("#batching-sum") == "31,007 requests in 2,004 merged calls, 5 wait to be merged"
        )
        rows = await page.ask(
            "[...document.querySelectorAll('#batching tbody tr')].map(row =>"
            " [...row.children].map(cell => cell.textContent))"
        )
        assert rows[0] == ["/v1/embeddings", "e5", "1", "unknown", "unknown", "3", ENDED["sentence"]]
        assert [row[1] for row in rows] == ["e5", "bge-m3", "none", "<b>odd</b>"], (
            "what has ended comes first"
        )
        assert rows[2][3] == "8"
        assert rows[1][4] == "6.18 ×"
        notice = f"Batching has ended for e5 at /v1/embeddings: {ENDED['off_reason']}"
        assert await says(page, "#notices", notice)
        stage.told |= {"batching": [merged(f"m-{n}", **ENDED) for n in range(60)]}
        await soon(lambda: says(page, "#batching", "m-19"), what="many of them")
        assert await says(page, "#batching-note", "And 40 more on /status.")
        assert await says(page, "#notices", "Batching has ended for 57 more models")
        await quiet(page)


async def queue_facts(page: Page) -> dict[str, tuple[str, str]]:
    """What is told of the queue: by its name, the value and how it is marked."""
    found: dict[str, tuple[str, str]] = await page.ask(
        "Object.fromEntries([...document.querySelectorAll('#queue dt')].map(name => [name.textContent,"
        " [name.nextElementSibling.textContent, name.nextElementSibling.className]]))"
    )
    return {name: (value, mark) for name, (value, mark) in found.items()}


def seen(name: str, state: str, **more: Any) -> dict[str, Any]:
    """A model as /status tells of it."""
    told = {"serving": 2, "endpoints": 4, "unread_count": 0, "waiting": 0, "since_s": 90.0, "named": True}
    return {"name": name, "state": state, **told, "denied": False, "sentence": "it is served", **more}


async def test_models_have_a_card_where_they_are_watched(page: Page) -> None:
    stage = Stage(told=status("open"))
    async with shown(stage, page):
        assert await page.ask("document.querySelector('#models-card').hidden")
        night = "it is served by none of 4 endpoints"
        stage.told |= {
            "models": [
                seen("<b>night</b>", "absent", serving=0, waiting=12345, sentence=night),
                seen("qwen", "ready"),
            ],
            "model_problems": ["10.0.0.7:8000: it does not answer"],
        }
        await soon(lambda: says(page, "#models", "qwen"), what="the card")
        assert not await page.ask("document.querySelector('#models-card').hidden")
        assert await page.text("#models-sum") == "2 known, 12,345 requests wait for their model"
        rows = await page.ask(
            "[...document.querySelectorAll('#models tbody tr')].map(row =>"
            " [...row.children].map(cell => cell.textContent))"
        )
        assert rows[0] == ["<b>night</b>", "absent", "0 of 4", "12,345", "1 min 30 s", night]
        assert rows[1][:4] == ["qwen", "ready", "2 of 4", "0"]
        assert await says(page, "#models-note", "10.0.0.7:8000: it does not answer.")
        await quiet(page)


def version(name: str, state: str, **more: Any) -> dict[str, Any]:
    """A version as /status tells of it."""
    told = {"label": name[-1], "serving": 2, "warm": None, "since_s": 90.0, "share": 0.0, "labels": []}
    return {
        "name": name,
        "state": state,
        **told,
        "desired": True,
        "drained": False,
        "drained_by": None,
        **more,
    }


ROLLOUT = [
    seen(
        "qwen",
        "ready",
        sentence="'qwen-v2' is open; 'qwen-v3' is being warmed up",
        versions=[
            version("qwen-v3", "cold", warm=1),
            version("qwen-v2", "open", warm=2, share=0.95, labels=["old", "stable"]),
            version("qwen-<b>v1</b>", "retiring", drained=True, drained_by="by ada since noon: it leaks"),
            version("qwen-v0", "gone", serving=0),
        ],
        labels={
            "stable": {"version": "2", "by": "by <b>ada</b> since noon"},
            "old": {"version": "2", "by": None},
        },
    ),
    seen("other", "ready"),
]


async def test_versions_stand_below_their_model(page: Page) -> None:
    stage = Stage(told=status("open", models=ROLLOUT))
    async with shown(stage, page):
        rows = await page.ask(
            "[...document.querySelectorAll('#models tbody tr')].map(row =>"
            " [...row.children].map(cell => cell.textContent))"
        )
        assert [row[0] for row in rows] == [
            "qwen",
            "version qwen-v3",
            "version qwen-v2",
            "version qwen-<b>v1</b>",
            "other",
        ]
        assert rows[1][1:] == ["cold", "2", "", "1 min 30 s", "warm at 1 of 2"]
        assert (
            rows[2][5]
            == "95 % of the requests; warm at 2 of 2; labelled old, stable (by <b>ada</b> since noon)"
        )
        assert rows[3][5] == "drained by ada since noon: it leaks"
        stage.told |= {"model_registry_problem": "a list"}
        problem = "Labels and drains of models in the queue cannot be read and are ignored: a list"
        await soon(lambda: says(page, "#notices", problem), what="the notice")
        await quiet(page)


@pytest.mark.parametrize(("width", "dark"), LOOKS)
async def test_versions_fit_and_can_be_read_by_everybody(page: Page, width: int, dark: bool) -> None:
    axe = axe_script()
    await page.look(width=width, dark=dark)
    async with shown(Stage(told=status("open", models=ROLLOUT)), page):
        await page.ask(axe)
        assert await serious(page) == []
        wide = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        assert await page.ask(wide), "a wide table scrolls in its card"


async def test_sequences_are_among_the_facts_of_the_queue_where_there_are_some(page: Page) -> None:
    none = dict.fromkeys(("active", "parked", "held", "aborted", "waiting"), 0)
    stage = Stage(told=status("open", sequences=none))
    async with shown(stage, page):
        assert not {"Sequences", "Wait for their turn"} & (await queue_facts(page)).keys()
        stage.told["sequences"] = none | {"active": 1200, "aborted": 3, "waiting": 4567}
        await soon(lambda: says(page, "#queue", "Sequences"), what="the facts")
        found = await queue_facts(page)
        assert found["Sequences"] == ("1,200 alive, 3 aborted", "")
        assert found["Wait for their turn"] == ("4,567", "")
        stage.told["sequences"] = none | {"active": 2, "parked": 5, "held": 1, "waiting": 0}
        await soon(lambda: says(page, "#queue", "held"), what="one to be held")
        found = await queue_facts(page)
        assert found["Sequences"] == ("2 alive, 5 not begun, 1 held", "wrong"), "somebody has to decide"
        assert found["Wait for their turn"] == ("0", "")
        stage.told["sequences"] = none | {"waiting": 1}
        await soon(lambda: says(page, "#queue", "none"), what="one that waits, of none that is alive")
        assert (await queue_facts(page))["Sequences"] == ("none", "")
        stage.told["sequences"] = None
        await soon(lambda: not_there(page), what="the facts to go when nothing is known")
        await quiet(page)


async def not_there(page: Page) -> bool:
    return "Sequences" not in await queue_facts(page)


async def test_what_happens_to_sequences_is_among_the_events_and_in_the_explanation(page: Page) -> None:
    keeps = "Sequences: 1 sequence is held until an operator decides (`sequences list --status held`)."
    stage = Stage()
    stage.told["explanation"] += f" {keeps}"
    stage.feed.record_event(Event.SEQUENCES_HELD, {"held": 1, "newest": "<b>chat</b>"})
    async with shown(stage, page):
        await soon(lambda: says(page, "#events", "sequences-held"), what="the event")
        assert await says(page, "#events", "held 1, newest <b>chat</b>")
        assert await page.text("#explanation") == stage.told["explanation"]
        await quiet(page)


async def test_page_reconnects_to_the_same_process_and_misses_nothing(page: Page) -> None:
    stage = Stage()
    stage.second()
    async with shown(stage, page, ticking=False):
        assert await page.ask("samples.length") == 1
    await soon(lambda: says(page, "#link", "disconnected since"), what="the page to notice")
    assert await says(page, "#link", "trying again")
    assert await page.ask("getComputedStyle(document.querySelector('#data')).filter") == "grayscale(0.8)"
    stage.second("stale")
    stage.feed.record_event(Event.GATE, {"reason": "stale"})
    async with stage.open():
        await soon(lambda: live(page), what="the page to be back")
        await drawn(page)
        assert await page.ask("samples.map(one => one.reason)") == ["open", "stale"]
        assert await says(page, "#badge", "stale")
        assert await says(page, "#events", "gate")
    assert page.console == []


async def test_page_begins_anew_with_a_restarted_process(page: Page) -> None:
    before = Stage()
    before.second()
    async with shown(before, page, ticking=False):
        pass
    after = Stage(now=before.now + 60, port=before.port, told=status("starting"))
    after.second()
    async with after.open():
        anew = "samples.map(one => one.reason).join() === 'starting'"
        await soon(lambda: page.ask(anew), what="the new process's history, and no other")
        assert await live(page)
    assert page.console == []


async def test_page_asks_for_the_token_once_and_keeps_it_in_memory_only(page: Page, tmp_path: Path) -> None:
    stage = Stage(token_file=write_token(tmp_path, "s3cret"))
    async with stage.open(ticking=True) as url:
        await page.open(url)
        asked = "document.querySelector('#ask')?.hidden === false && document.activeElement.id === 'token'"
        await soon(lambda: page.ask(asked), what="the question, with the focus in it")
        assert await page.text("#pool") == "", "no data before it"
        await page.type("wrong")
        await page.press("Enter", "\r")
        await soon(lambda: says(page, "#ask-wrong", "does not accept"), what="the refusal")
        await page.type("with space")
        await page.press("Enter", "\r")
        await soon(lambda: says(page, "#ask-wrong", "visible ASCII"), what="the refusal")
        await page.ask("document.querySelector('#token').value = ''")
        await page.type("s3cret")
        await page.press("Enter", "\r")
        await soon(lambda: live(page), what="the page to be live")
        kept = "[localStorage.length, sessionStorage.length, document.cookie, location.href]"
        assert await page.ask(kept) == [0, 0, "", f"{url}/"]
        assert await page.ask("document.querySelector('#token').value") == ""
        await page.call("Page.reload")
        await soon(lambda: page.ask(asked), what="the question again")
    assert page.console == []


async def test_hostile_text_stays_text(page: Page) -> None:
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>\x1b]0;x\x07"
    dead = dead_request(7, evil)
    stage = Stage(
        told=status(
            evil,
            explanation=evil,
            health_sentence=evil,
            health_hint=f"`{evil}`",
            dead=1,
            pool=evil,
            config_problem=evil,
            watch_problems=[evil],
            owner=evil,
        ),
        results={evil: 1.0, "__proto__": 2.0},
        dead=[dead],
        settings=configured(f"gateway: {{url: 'http://gw'}}\nqueue: {{data_dir: {json.dumps(evil[:52])}}}\n"),
    )
    stage.feed.record_event(Event.INTERNAL_ERROR, {"error": evil, evil: evil, "__proto__": evil})
    async with shown(stage, page):
        await soon(lambda: says(page, "#dead", "<img"), what="the dead")
        assert await says(page, "#sentence", "<script>")
        assert await page.ask("document.querySelectorAll('main img, main script').length") == 0
        await quiet(page)


async def test_nothing_is_loaded_from_elsewhere_and_nothing_is_forbidden(page: Page) -> None:
    stage = Stage()
    quarter_of_an_hour(stage, "full")
    async with shown(stage, page) as url:
        stage.second("no-room")
        await drawn(page)
        asked = await page.ask("performance.getEntriesByType('resource').map(one => one.name)")
        assert asked
        assert all(one.startswith(url) for one in asked)
        await quiet(page)
        await page.ask("void document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/'}))")
        await soon(lambda: page.console, what="the policy to forbid that: it is in force")


async def test_page_can_be_walked_by_keyboard_and_shows_where_one_is(page: Page) -> None:
    stage = Stage(dead=[dead_request(7, "why")], told=status(dead=1))
    quarter_of_an_hour(stage, "full")
    async with shown(stage, page):
        walked = []
        for _ in range(12):
            await page.press("Tab")
            walked.append(
                await page.ask(
                    "(() => { const one = document.activeElement, look = getComputedStyle(one);"
                    " return [one.className || one.id || one.tagName, look.outlineStyle, one.id]; })()"
                )
            )
        assert walked[0][0] == "skip"
        assert {outline for _, outline, _ in walked[:7]} == {"solid"}
        await page.ask("document.querySelector('#settings-card summary').focus()")
        await page.press("Enter", "\r")
        await page.press("Tab")
        assert await page.ask("document.activeElement.id") == "all-settings"
        rows = "document.querySelectorAll('#settings tbody tr').length"
        few = await page.ask(rows)
        await page.ask("document.querySelector('#all-settings').focus()")
        await page.press(" ", " ")
        await soon(lambda: page.ask(f"{rows} > {few} * 3"), what="all the settings")


async def test_phone_scrolls_one_way_only(page: Page) -> None:
    stage = Stage(
        dead=[dead_request(7, "RETRIES_EXHAUSTED: " + "very " * 50 + "x" * 200)], told=status(dead=1)
    )
    quarter_of_an_hour(stage, "no-room")
    await page.look(width=390, height=844)
    async with shown(stage, page):
        await soon(lambda: says(page, "#dead", "RETRIES"), what="the dead")
        assert await page.ask("document.documentElement.scrollWidth") == 390
        await quiet(page)


@pytest.mark.parametrize(("width", "dark"), LOOKS)
async def test_axe_finds_nothing_serious(page: Page, tmp_path: Path, width: int, dark: bool) -> None:
    axe = axe_script()
    stage = Stage(
        token_file=write_token(tmp_path, "s3cret"),
        dead=[dead_request(7, "why"), dead_request(9, "not JSON", readable=False)],
    )
    quarter_of_an_hour(stage, "no-room")
    stage.told |= {"config_problem": "config.yaml: budget.reserv: unknown key", "watch_problems": ["401"]}
    stage.told["batching"] = [merged(), merged("e5", **ENDED)]
    await page.look(width=width, dark=dark)
    async with stage.open(ticking=True) as url:
        await page.open(url)
        await page.ask(axe)
        await soon(lambda: page.ask("!document.querySelector('#ask').hidden"), what="the question")
        assert await serious(page) == [], "the question for the token"
        await page.type("s3cret")
        await page.press("Enter", "\r")
        await soon(lambda: says(page, "#dead", "job-7"), what="the page")
        await page.ask("document.querySelectorAll('details').forEach(each => each.open = true)")
        await page.ask("document.querySelector('#all-settings').click()")
        await drawn(page)
        assert await serious(page) == [], "closed"
        stage.told = status("open")
        await soon(lambda: says(page, "#badge", "Open"), what="the gate to open")
        assert await serious(page) == [], "open"
        stage.told = status("backpressure", f_sys=1.0, f_epp=0.2, reading_age_s=0.1)
        await soon(lambda: page.ask("document.querySelectorAll('#bar b').length === 1"), what="the mark")
        assert await serious(page) == [], "with a mark"
        for health in Health:
            stage.told |= {"health": str(health), "max_sys": None, "realtime": None}
            word = str(health).capitalize()
            await soon(partial(says, page, "#state", word), what=word)
            assert await serious(page) == [], f"{health}, and the pool is unknown"
    await soon(lambda: says(page, "#link", "disconnected"), what="the page to notice")
    assert await serious(page) == [], "disconnected"
