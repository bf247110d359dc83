"""The page in a real browser."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dispatcher.limit.health import Health
from dispatcher.telemetry.events import Event
from tests.browser import Page
from tests.service.admin.opened import (
    assert_no_errors,
    axe_script,
    list_violations,
    live,
    open_page,
    shows_text,
    wait_soon,
    wait_until_drawn,
)
from tests.service.admin.stage import (
    ENDED,
    UNEQUAL,
    Stage,
    dead_request,
    load_settings,
    make_merge_target,
    make_sliced_model,
    record_quarter_of_an_hour,
    status,
    write_token,
)

LOOKS = [
    (1280, False),
    (390, True),
    pytest.param(1280, True, marks=pytest.mark.long),
    pytest.param(390, False, marks=pytest.mark.long),
]
"""Each width and each theme; all combinations in long runs only."""


async def test_open_page_follows_a_closing_gate_without_reload(page: Page) -> None:
    stage = Stage(status_document=status("open", pending=7))
    async with open_page(stage, page):
        await page.evaluate("window.before = true")
        assert await page.get_text("#badge") == "Open: open."
        stage.status_document = status("no-room", pending=8)
        await wait_soon(lambda: shows_text(page, "#badge", "Closed: no-room."), what="the new reason")
        assert await page.get_text("#explanation") == stage.status_document["explanation"]
        assert await page.evaluate("window.before")
    await asyncio.sleep(0)
    assert page.console == []


async def test_new_page_shows_the_history(page: Page) -> None:
    stage = Stage(dead=[dead_request(7, "RETRIES_EXHAUSTED: 8 tries failed")])
    record_quarter_of_an_hour(stage, "full")
    async with open_page(stage, page, ticking=False):
        left, right = await page.evaluate(
            "(() => { const box = document.querySelector('#load path').getBBox();"
            " return [box.x, box.x + box.width]; })()"
        )
        width = await page.evaluate("document.querySelector('#load').clientWidth")
        assert left < 50
        assert right > width - 5
        assert await shows_text(page, "#reasons", "stale 45 s")
        assert await shows_text(page, "#reasons", "backpressure 12 s")
        label = await page.evaluate("document.querySelector('#load').getAttribute('aria-label')")
        assert "no-room" in label
        assert "capacity between 28.8 and 48" in label, "a refusal is part of the history"
        await page.evaluate("document.querySelector('#table-details summary').click()")
        await wait_soon(
            lambda: page.evaluate("document.querySelectorAll('#minutes tbody tr').length >= 15"),
            what="the table",
        )
        await assert_no_errors(page)


async def test_bar_shows_the_numbers_of_the_status(page: Page) -> None:
    stage = Stage()
    stage.advance_second(
        "full", f_sys=0.5, f_epp=0.125, max_sys=40.0, in_flight=8, reserve=0.05, configured_max_sys=80.0
    )
    async with open_page(stage, page, ticking=False):
        parts = await page.evaluate(
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
        widths = await page.evaluate(
            "[...document.querySelectorAll('#bar i')].map(one => parseFloat(one.style.width))"
        )
        assert widths == pytest.approx([15, 6.25, 10, 16.25, 2.5])
        assert await page.evaluate(
            "parseFloat(document.querySelector('#bar b').style.left)"
        ) == pytest.approx(50)


async def test_missing_values_are_shown_as_unknown(page: Page) -> None:
    names = ("version", "pool", "queue", "owner", "observe", "open", "running", "config_generation")
    health = ("health", "health_cause", "health_sentence")
    bare = {name: status()[name] for name in (*names, *health)}
    told = {**bare, "reason": "starting", "explanation": "Nothing is sent: starting."}
    async with open_page(Stage(status_document=told, results={}), page):
        for name in ("#queue", "#impact", "#outcomes", "#parts"):
            assert await shows_text(page, name, "unknown"), name
        assert "NaN" not in await page.get_text("body")
        assert "undefined" not in await page.get_text("main")
        await assert_no_errors(page)


async def test_merging_has_a_card_if_requests_are_merged(page: Page) -> None:
    stage = Stage(status_document=status("open"))
    async with open_page(stage, page):
        assert await page.evaluate("document.querySelector('#batching-card').hidden")
        batching = [
            make_merge_target(),
            make_merge_target("", server_max_items=8),
            make_merge_target("e5", **ENDED),
            make_merge_target("<b>odd</b>", gain=None),
        ]
        counts = {"split": 2000, "halved": 3, "unsplittable": 1, "failed": 0}
        stage.status_document |= {
            "batching": batching,
            "batching_calls": counts,
            "batching_requests": 31007,
            "batching_waiting": 5,
        }
        await wait_soon(lambda: shows_text(page, "#batching", "bge-m3"), what="the card")
        assert not await page.evaluate("document.querySelector('#batching-card').hidden")
        assert (
            await page.get_text("#batching-sum")
            == "31,007 requests in 2,004 merged calls, 5 wait to be merged"
        )
        rows = await page.evaluate(
            "[...document.querySelectorAll('#batching tbody tr')].map(row =>"
            " [...row.children].map(cell => cell.textContent))"
        )
        assert rows[0] == ["/v1/embeddings", "e5", "1", "unknown", "unknown", "3", ENDED["sentence"]]
        assert [row[1] for row in rows] == ["e5", "bge-m3", "none", "<b>odd</b>"], (
            "models without merging come first"
        )
        assert rows[2][3] == "8"
        assert rows[1][4] == "6.18 ×"
        stage.status_document |= {"batching": [make_merge_target(f"m-{n}", **ENDED) for n in range(60)]}
        await wait_soon(lambda: shows_text(page, "#batching", "m-19"), what="many of them")
        assert await shows_text(page, "#batching-note", "And 40 more on /status.")
        await assert_no_errors(page)


async def test_slices_have_a_card_with_verdict_texts_and_remedy(page: Page) -> None:
    stage = Stage(status_document=status("open"))
    async with open_page(stage, page):
        assert await page.evaluate("document.querySelector('#slices-card').hidden")
        models = [make_sliced_model("phi", **UNEQUAL), make_sliced_model(has_template_options=True)]
        stage.status_document |= {
            "slicing_mode": "auto",
            "slices": {"continued": 1200, "finished": 34},
            "call_s": 31.2,
            "sliced_models": models,
            "reserve_problem": "calls take 31 s",
        }
        await wait_soon(lambda: shows_text(page, "#slices", "phi"), what="the card")
        assert not await page.evaluate("document.querySelector('#slices-card').hidden")
        assert await page.get_text("#slices-sum") == "1,234 slices answered, calls take 31 s"
        assert await page.get_text("#slices-note") == "calls take 31 s."
        rows = await page.evaluate(
            "[...document.querySelectorAll('#slices tbody tr')].map(row =>"
            " [...row.children].map(cell => cell.textContent))"
        )
        path = "/v1/chat/completions"
        texts = [UNEQUAL[name] for name in ("why", "whole_text", "sliced_text", "remedy")]
        assert rows == [
            [path, "phi", "unequal", "whole", *texts],
            [path, "qwen, with chat_template_kwargs", "equal", "by text", "", "", "", ""],
        ]
        stage.status_document |= {"slicing_mode": "off", "sliced_models": []}
        await wait_soon(lambda: shows_text(page, "#slices-sum", "off, calls take 31 s"), what="the setting")
        assert await page.get_text("#slices-note") == "calls take 31 s."
        await assert_no_errors(page)


async def queue_facts(page: Page) -> dict[str, tuple[str, str]]:
    """Return value and marking of each fact about the queue, by name."""
    found: dict[str, tuple[str, str]] = await page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#queue dt')].map(name => [name.textContent,"
        " [name.nextElementSibling.textContent, name.nextElementSibling.className]]))"
    )
    return {name: (value, mark) for name, (value, mark) in found.items()}


def seen(name: str, state: str, **more: Any) -> dict[str, Any]:
    """Return a model as in /status."""
    told = {"serving": 2, "endpoints": 4, "unread_count": 0, "waiting": 0, "since_s": 90.0, "named": True}
    return {"name": name, "state": state, **told, "denied": False, "sentence": "it is served", **more}


async def test_models_have_a_card_if_they_are_watched(page: Page) -> None:
    stage = Stage(status_document=status("open"))
    async with open_page(stage, page):
        assert await page.evaluate("document.querySelector('#models-card').hidden")
        night = "it is served by none of 4 endpoints"
        stage.status_document |= {
            "models": [
                seen("<b>night</b>", "absent", serving=0, waiting=12345, sentence=night),
                seen("qwen", "ready"),
            ],
            "model_problems": ["10.0.0.7:8000: it does not answer"],
        }
        await wait_soon(lambda: shows_text(page, "#models", "qwen"), what="the card")
        assert not await page.evaluate("document.querySelector('#models-card').hidden")
        assert await page.get_text("#models-sum") == "2 known, 12,345 requests wait for their model"
        rows = await page.evaluate(
            "[...document.querySelectorAll('#models tbody tr')].map(row =>"
            " [...row.children].map(cell => cell.textContent))"
        )
        assert rows[0] == ["<b>night</b>", "absent", "0 of 4", "12,345", "1 min 30 s", night]
        assert rows[1][:4] == ["qwen", "ready", "2 of 4", "0"]
        assert await shows_text(page, "#models-note", "10.0.0.7:8000: it does not answer.")
        await assert_no_errors(page)


def version(name: str, state: str, **more: Any) -> dict[str, Any]:
    """Return a version as in /status."""
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


async def test_versions_are_listed_below_their_model(page: Page) -> None:
    stage = Stage(status_document=status("open", models=ROLLOUT))
    async with open_page(stage, page):
        rows = await page.evaluate(
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
        await assert_no_errors(page)


async def test_problems_and_the_note_on_the_capacity_are_listed_below_the_gate(page: Page) -> None:
    stage = Stage(status_document=status("open", problems=["The queue cannot be reached: <b>refused</b>"]))
    async with open_page(stage, page):
        await wait_soon(
            lambda: shows_text(page, "#notices", "The queue cannot be reached: <b>refused</b>"), what="it"
        )
        stage.status_document |= {
            "problems": [],
            "capacity_note": "Each endpoint is assumed to run 8 requests.",
        }
        await wait_soon(
            lambda: shows_text(page, "#notices", "Each endpoint is assumed to run 8"), what="the note"
        )
        stage.status_document |= {"problems": [f"problem {number}" for number in range(9)]}
        await wait_soon(lambda: shows_text(page, "#notices", "And 6 more on /status."), what="a short list")
        stage.status_document |= {"problems": [], "capacity_note": ""}
        await wait_soon(
            lambda: page.evaluate("document.querySelector('#notices').hidden"), what="the list to be hidden"
        )
        await assert_no_errors(page)


@pytest.mark.parametrize(("width", "dark"), LOOKS)
async def test_versions_fit_the_page_and_are_accessible(page: Page, width: int, dark: bool) -> None:
    axe = axe_script()
    await page.set_viewport(width=width, dark=dark)
    async with open_page(Stage(status_document=status("open", models=ROLLOUT)), page):
        await page.evaluate(axe)
        assert await list_violations(page) == []
        wide = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        assert await page.evaluate(wide), "a wide table scrolls within its card"


async def test_sequences_are_shown_with_the_queue_if_there_are_any(page: Page) -> None:
    none = dict.fromkeys(("active", "parked", "held", "aborted", "waiting"), 0)
    stage = Stage(status_document=status("open", sequences=none))
    async with open_page(stage, page):
        assert not {"Sequences", "Wait for their turn"} & (await queue_facts(page)).keys()
        stage.status_document["sequences"] = none | {"active": 1200, "aborted": 3, "waiting": 4567}
        await wait_soon(lambda: shows_text(page, "#queue", "Sequences"), what="the facts")
        found = await queue_facts(page)
        assert found["Sequences"] == ("1,200 alive, 3 aborted", "")
        assert found["Wait for their turn"] == ("4,567", "")
        stage.status_document["sequences"] = none | {"active": 2, "parked": 5, "held": 1, "waiting": 0}
        await wait_soon(lambda: shows_text(page, "#queue", "held"), what="one to be held")
        found = await queue_facts(page)
        assert found["Sequences"] == ("2 alive, 5 not begun, 1 held", "wrong"), "an operator has to decide"
        assert found["Wait for their turn"] == ("0", "")
        stage.status_document["sequences"] = none | {"waiting": 1}
        await wait_soon(
            lambda: shows_text(page, "#queue", "none"), what="waiting requests without an active sequence"
        )
        assert (await queue_facts(page))["Sequences"] == ("none", "")
        stage.status_document["sequences"] = None
        await wait_soon(lambda: not_there(page), what="the facts to disappear when nothing is known")
        await assert_no_errors(page)


async def not_there(page: Page) -> bool:
    return "Sequences" not in await queue_facts(page)


async def test_events_of_sequences_are_shown_in_the_event_list_and_the_explanation(page: Page) -> None:
    keeps = "Sequences: 1 sequence is held until an operator decides (`sequences show --status held`)."
    stage = Stage()
    stage.status_document["explanation"] += f" {keeps}"
    stage.feed.record_event(Event.SEQUENCES_HELD, {"held": 1, "newest": "<b>chat</b>"})
    async with open_page(stage, page):
        await wait_soon(lambda: shows_text(page, "#events", "sequences-held"), what="the event")
        assert await shows_text(page, "#events", "held 1, newest <b>chat</b>")
        assert await page.get_text("#explanation") == stage.status_document["explanation"]
        await assert_no_errors(page)


async def test_page_reconnects_to_the_same_process_and_misses_nothing(page: Page) -> None:
    stage = Stage()
    stage.advance_second()
    async with open_page(stage, page, ticking=False):
        assert await page.evaluate("samples.length") == 1
    await wait_soon(lambda: shows_text(page, "#link", "disconnected since"), what="the page to notice")
    assert await shows_text(page, "#link", "trying again")
    assert await page.evaluate("getComputedStyle(document.querySelector('#data')).filter") == "grayscale(0.8)"
    stage.advance_second("stale")
    stage.feed.record_event(Event.GATE, {"reason": "stale"})
    async with stage.open():
        await wait_soon(lambda: live(page), what="the page to be back")
        await wait_until_drawn(page)
        assert await page.evaluate("samples.map(one => one.reason)") == ["open", "stale"]
        assert await shows_text(page, "#badge", "stale")
        assert await shows_text(page, "#events", "gate")
    assert page.console == []


async def test_page_starts_over_with_a_restarted_process(page: Page) -> None:
    before = Stage()
    before.advance_second()
    async with open_page(before, page, ticking=False):
        pass
    after = Stage(now=before.now + 60, port=before.port, status_document=status("starting"))
    after.advance_second()
    async with after.open():
        anew = "samples.map(one => one.reason).join() === 'starting'"
        await wait_soon(lambda: page.evaluate(anew), what="only the history of the new process")
        assert await live(page)
    assert page.console == []


async def test_page_asks_for_the_token_once_and_keeps_it_in_memory_only(page: Page, tmp_path: Path) -> None:
    stage = Stage(token_file=write_token(tmp_path, "s3cret"))
    async with stage.open(ticking=True) as url:
        await page.open(url)
        asked = "document.querySelector('#ask')?.hidden === false && document.activeElement.id === 'token'"
        await wait_soon(lambda: page.evaluate(asked), what="the question, with the focus in it")
        assert await page.get_text("#pool") == "", "no data is shown before the token"
        await page.insert_text("wrong")
        await page.press_key("Enter", "\r")
        await wait_soon(lambda: shows_text(page, "#ask-wrong", "does not accept"), what="the refusal")
        await page.insert_text("with space")
        await page.press_key("Enter", "\r")
        await wait_soon(lambda: shows_text(page, "#ask-wrong", "visible ASCII"), what="the refusal")
        await page.evaluate("document.querySelector('#token').value = ''")
        await page.insert_text("s3cret")
        await page.press_key("Enter", "\r")
        await wait_soon(lambda: live(page), what="the page to be live")
        kept = "[localStorage.length, sessionStorage.length, document.cookie, location.href]"
        assert await page.evaluate(kept) == [0, 0, "", f"{url}/"]
        assert await page.evaluate("document.querySelector('#token').value") == ""
        await page.call("Page.reload")
        await wait_soon(lambda: page.evaluate(asked), what="the question again")
    assert page.console == []


async def test_hostile_text_is_shown_as_text(page: Page) -> None:
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>\x1b]0;x\x07"
    dead = dead_request(7, evil)
    stage = Stage(
        status_document=status(
            evil,
            explanation=evil,
            health_sentence=evil,
            health_hint=f"`{evil}`",
            dead=1,
            pool=evil,
            problems=[evil],
            capacity_note=evil,
            owner=evil,
        ),
        results={evil: 1.0, "__proto__": 2.0},
        dead=[dead],
        settings=load_settings(
            f"gateway: {{url: 'http://gw'}}\nqueue: {{data_dir: {json.dumps(evil[:52])}}}\n"
        ),
    )
    stage.feed.record_event(Event.INTERNAL_ERROR, {"error": evil, evil: evil, "__proto__": evil})
    async with open_page(stage, page):
        await wait_soon(lambda: shows_text(page, "#dead", "<img"), what="the dead")
        assert await shows_text(page, "#sentence", "<script>")
        assert await page.evaluate("document.querySelectorAll('main img, main script').length") == 0
        await assert_no_errors(page)


async def test_page_loads_nothing_from_other_origins(page: Page) -> None:
    stage = Stage()
    record_quarter_of_an_hour(stage, "full")
    async with open_page(stage, page) as url:
        stage.advance_second("no-room")
        await wait_until_drawn(page)
        asked = await page.evaluate("performance.getEntriesByType('resource').map(one => one.name)")
        assert asked
        assert all(one.startswith(url) for one in asked)
        await assert_no_errors(page)
        await page.evaluate(
            "void document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/'}))"
        )
        await wait_soon(lambda: page.console, what="the policy to forbid that: it is in force")


async def test_page_is_usable_by_keyboard_with_a_visible_focus(page: Page) -> None:
    stage = Stage(dead=[dead_request(7, "why")], status_document=status(dead=1))
    record_quarter_of_an_hour(stage, "full")
    async with open_page(stage, page):
        walked = []
        for _ in range(12):
            await page.press_key("Tab")
            walked.append(
                await page.evaluate(
                    "(() => { const one = document.activeElement, look = getComputedStyle(one);"
                    " return [one.className || one.id || one.tagName, look.outlineStyle, one.id]; })()"
                )
            )
        assert walked[0][0] == "skip"
        assert {outline for _, outline, _ in walked[:7]} == {"solid"}
        await page.evaluate("document.querySelector('#settings-card summary').focus()")
        await page.press_key("Enter", "\r")
        await page.press_key("Tab")
        assert await page.evaluate("document.activeElement.id") == "all-settings"
        rows = "document.querySelectorAll('#settings tbody tr').length"
        few = await page.evaluate(rows)
        await page.evaluate("document.querySelector('#all-settings').focus()")
        await page.press_key(" ", " ")
        await wait_soon(lambda: page.evaluate(f"{rows} > {few} * 3"), what="all the settings")


async def test_page_on_a_phone_scrolls_vertically_only(page: Page) -> None:
    stage = Stage(
        dead=[dead_request(7, "RETRIES_EXHAUSTED: " + "very " * 50 + "x" * 200)],
        status_document=status(dead=1),
    )
    record_quarter_of_an_hour(stage, "no-room")
    await page.set_viewport(width=390, height=844)
    async with open_page(stage, page):
        await wait_soon(lambda: shows_text(page, "#dead", "RETRIES"), what="the dead")
        assert await page.evaluate("document.documentElement.scrollWidth") == 390
        await assert_no_errors(page)


@pytest.mark.slow
@pytest.mark.timeout(480)  # a minute on a busy machine
@pytest.mark.parametrize(("width", "dark"), LOOKS)
async def test_axe_reports_no_serious_violation(page: Page, tmp_path: Path, width: int, dark: bool) -> None:
    axe = axe_script()
    stage = Stage(
        token_file=write_token(tmp_path, "s3cret"),
        dead=[dead_request(7, "why"), dead_request(9, "not JSON", readable=False)],
    )
    record_quarter_of_an_hour(stage, "no-room")
    stage.status_document |= {"problems": ["The queue cannot be reached: refused"]}
    stage.status_document["batching"] = [make_merge_target(), make_merge_target("e5", **ENDED)]
    stage.status_document["sliced_models"] = [make_sliced_model("phi", **UNEQUAL), make_sliced_model()]
    await page.set_viewport(width=width, dark=dark)
    async with stage.open(ticking=True) as url:
        await page.open(url)
        await page.evaluate(axe)
        await wait_soon(lambda: page.evaluate("!document.querySelector('#ask').hidden"), what="the question")
        assert await list_violations(page) == [], "the question for the token"
        await page.insert_text("s3cret")
        await page.press_key("Enter", "\r")
        await wait_soon(lambda: shows_text(page, "#dead", "job-7"), what="the page")
        await page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        await page.evaluate("document.querySelector('#all-settings').click()")
        await wait_until_drawn(page)
        assert await list_violations(page) == [], "closed"
        stage.status_document = status("open")
        await wait_soon(lambda: shows_text(page, "#badge", "Open"), what="the gate to open")
        assert await list_violations(page) == [], "open"
        stage.status_document = status("backpressure", f_sys=1.0, f_epp=0.2, reading_age_s=0.1)
        await wait_soon(
            lambda: page.evaluate("document.querySelectorAll('#bar b').length === 1"), what="the mark"
        )
        assert await list_violations(page) == [], "with a mark"
        for health in Health:
            stage.status_document |= {"health": str(health), "max_sys": None, "realtime": None}
            word = str(health).capitalize()
            await wait_soon(partial(shows_text, page, "#state", word), what=word)
            assert await list_violations(page) == [], f"{health}, and the pool is unknown"
    await wait_soon(lambda: shows_text(page, "#link", "disconnected"), what="the page to notice")
    assert await list_violations(page) == [], "disconnected"
