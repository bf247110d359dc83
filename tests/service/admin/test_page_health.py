"""Health, unknown values and size of the page in a real browser."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from dispatcher.service.admin.stream import MAX_STREAMS
from tests.browser import Page
from tests.service.admin.opened import (
    assert_no_errors,
    live,
    open_page,
    shows_text,
    wait_soon,
    wait_until_drawn,
)
from tests.service.admin.stage import (
    FAILING,
    UNEQUAL,
    Stage,
    dead_request,
    load_settings,
    make_merge_target,
    make_sliced_model,
    record_quarter_of_an_hour,
    status,
)

UNREAD: dict[str, Any] = {"reason": "unreadable", "open": False, "limit": 0} | dict.fromkeys(
    ("f_sys", "f_epp", "max_sys", "max_sys_source", "configured_max_sys", "realtime", "realtime_waiting")
)
"""Fields of a status without readings of the pool."""
NO_COUNTS: dict[str, Any] = dict.fromkeys(("pending", "leased", "delayed", "dead", "at_risk"))
SCREENS_MOST = 4


async def test_health_is_the_first_and_largest_text(page: Page) -> None:
    stage = Stage(status_document=status("full", done_in_s=7380.0))
    async with open_page(stage, page):
        assert await page.get_text("#state") == "Working for 1 min 15 s"
        assert await page.get_text("#sentence") == stage.status_document["health_sentence"]
        assert await page.get_text("#lead") == "Done inabout 2 h 3 min at the present rate"
        assert await page.evaluate("document.title") == "working · qwen"
        stage.status_document |= FAILING
        await wait_soon(lambda: shows_text(page, "#state", "Failing for 1 min 35 s"), what="the failure")
        assert await page.get_text("#sentence") == FAILING["health_sentence"]
        assert await page.evaluate("document.querySelector('#lead code').textContent") == (
            "batch-dispatcher list --state dead"
        )
        assert await shows_text(page, "#lead", "Done inunknown")
        assert await page.get_text("#badge") == "Open: full.", "the gate is open despite failed attempts"
        largest = (
            "[...document.querySelectorAll('main *')].map(each => getComputedStyle(each).fontSize)"
            ".map(parseFloat).reduce((most, size) => Math.max(most, size))"
        )
        state = "parseFloat(getComputedStyle(document.querySelector('#state')).fontSize)"
        assert await page.evaluate(largest) == await page.evaluate(state)
        above = "document.querySelector('#health').getBoundingClientRect().bottom"
        assert await page.evaluate(f"{above} <= document.querySelector('#data').getBoundingClientRect().top")
        await assert_no_errors(page)


async def test_values_of_missing_readings_disappear(page: Page) -> None:
    stage = Stage()
    for known in (True, False, True):
        stage.status_document = status("full") if known else stage.status_document | UNREAD
        for _ in range(60):
            stage.advance_second()
    stage.status_document |= UNREAD
    stage.advance_second()
    async with open_page(stage, page, ticking=False):
        parts = await page.get_text("#parts")
        assert parts.count("unknown") == 5, parts
        assert await page.get_text("#bar") == "unknown"
        assert await page.evaluate("document.querySelectorAll('#bar i').length") == 0
        areas = await page.evaluate(
            "[...document.querySelectorAll('#load path')].map(each =>"
            " each.getAttribute('d').split('M').length - 1)"
        )
        assert set(areas) == {2}, "each area and line has a gap where the pool was unknown"
        stage.advance_second("full")
        await wait_soon(
            lambda: page.evaluate("document.querySelectorAll('#bar i').length === 5"), what="the bar"
        )
        await assert_no_errors(page)


async def test_values_of_missing_counts_disappear(page: Page) -> None:
    stage = Stage(status_document=status(dead=3), dead=[dead_request(n, "why") for n in range(3)])
    async with open_page(stage, page):
        await wait_soon(lambda: shows_text(page, "#dead", "why"), what="the dead requests")
        stage.status_document |= NO_COUNTS
        await wait_soon(lambda: shows_text(page, "#queue", "Pendingunknown"), what="the counts to go")
        assert (await page.get_text("#queue")).count("unknown") >= 5
        assert await page.evaluate("document.querySelector('#dead').parentNode.hidden")
        assert await page.get_text("#dead-note") == "Unknown: the queue is not counted."
        assert await page.get_text("#bar") == "unknown", "requests of other replicas are unknown, too"
        assert await shows_text(page, "#waits-legend", "pending unknown")
        await assert_no_errors(page)


async def test_disconnected_page_marks_all_values_as_old(page: Page) -> None:
    stage = Stage()
    record_quarter_of_an_hour(stage, "full")
    async with open_page(stage, page):
        assert await shows_text(page, "#badge", "Open: full.")
    await wait_soon(lambda: shows_text(page, "#state", "No contact"), what="the page to notice")
    assert (await page.get_text("#sentence")).startswith("No contact with the dispatcher for ")
    assert await shows_text(page, "#sentence", "the last known state is not shown as current.")
    assert await page.get_text("#say") == "No contact with the dispatcher."
    assert await page.evaluate("document.title") == "no contact · qwen"
    assert await page.get_text("#lead") == ""
    gate = "getComputedStyle(document.querySelector('.gate')).display"
    assert await page.evaluate(gate) == "none"
    marked = (
        "[...document.querySelectorAll('#data h2')].every(each =>"
        " getComputedStyle(each, '::after').content.includes(' as of '))"
    )
    assert await page.evaluate(marked), "each card says that its numbers are old"
    first = await page.get_text("#sentence")
    await wait_soon(lambda: says_other(page, first), what="the time without contact to grow")
    async with stage.open(ticking=True):
        await wait_soon(lambda: live(page), what="the page to be back")
        await wait_soon(lambda: shows_text(page, "#state", "Working"), what="the health")
        assert await page.evaluate(gate) != "none"
        assert not await page.evaluate(marked)
    assert page.console == []


async def says_other(page: Page, before: str) -> bool:
    return await page.get_text("#sentence") != before


async def test_page_that_never_connected_shows_the_reason(page: Page) -> None:
    stage = Stage()
    readers = [stage.feed.subscribe() for _ in range(MAX_STREAMS)]
    assert None not in readers
    async with stage.open() as url:
        await page.open(url)
        await wait_soon(
            lambda: shows_text(page, "#sentence", "No contact with the dispatcher for "),
            what="the page to notice",
        )
        assert await shows_text(page, "#sentence", "(503: ")
        assert await page.evaluate("document.querySelector('#data').hidden"), "there is no last known state"
        assert "last known" not in await page.get_text("#sentence")


async def test_only_changes_of_the_health_are_announced(page: Page) -> None:
    stage = Stage(status_document=status("full"))
    async with open_page(stage, page):
        await wait_soon(
            lambda: shows_text(page, "#say", "Working: 14 requests"), what="the first announcement"
        )
        await page.evaluate(
            "void (window.spoken = [], new MutationObserver(() => spoken.push(document.querySelector('#say')"
            ".textContent)).observe(document.querySelector('#say'), {childList: true, characterData: true,"
            " subtree: true}))"
        )
        for reason in ("no-room", "full", "backpressure", "idle"):
            stage.status_document |= {"reason": reason, "open": reason in ("full", "idle"), "pending": 7}
            stage.status_document |= {
                "health_sentence": f"{reason}: 3 requests wait.",
                "health_since_s": 80.0,
            }
            await wait_soon(partial(shows_text, page, "#badge", reason), what=reason)
        stage.status_document |= FAILING | {"health_since_s": 1.0}
        await wait_soon(lambda: shows_text(page, "#state", "Failing for 1 s"), what="a failure of one second")
        assert await page.evaluate("spoken.length") == 0
        stage.status_document |= FAILING
        await wait_soon(lambda: page.evaluate("spoken.length"), what="a failure that holds")
        assert await page.evaluate("spoken") == [f"Failing: {FAILING['health_sentence']}"]


async def test_page_has_no_animations(page: Page) -> None:
    """An animated dot and bar took a fifth of a core in every open browser."""
    motion: dict[str, Any] = {"prefers-reduced-motion": "no-preference"}
    await page.set_viewport(**motion)
    stage = Stage()
    stage.advance_second("full")
    async with open_page(stage, page, ticking=False):
        await page.evaluate("void (window.ran = 0, addEventListener('transitionrun', () => ran++))")
        assert await page.evaluate("document.getAnimations().length") == 0
        stage.advance_second("full", in_flight=3, realtime=9.0)
        await wait_soon(lambda: shows_text(page, "#parts", "Batch3"), what="the bar to change")
        await wait_until_drawn(page)
        assert await page.evaluate("[ran, document.getAnimations().length]") == [0, 0]


async def test_dead_requests_are_grouped_by_their_reason(page: Page) -> None:
    stage = Stage(
        status_document=status(dead=131),
        dead=[dead_request(1, "DELIVERIES_EXHAUSTED: 3 dispatchers died")]
        + [dead_request(n, "RETRIES_EXHAUSTED: 500") for n in range(2, 32)]
        + [dead_request(40 + n, f"<b>reason {n}</b>") for n in range(14)],
    )
    async with open_page(stage, page):
        await wait_soon(lambda: shows_text(page, "#dead", "RETRIES"), what="the dead requests")
        rows = await page.evaluate(
            "[...document.querySelectorAll('#dead tbody tr')].map(row =>"
            " [...row.children].slice(0, 3).map(cell => cell.textContent))"
        )
        assert rows[0] == ["30", "RETRIES_EXHAUSTED: 500", "job-31"]
        assert len(rows) == 10
        assert await page.get_text("#dead-sum") == "131 requests, the newest 45 by reason"
        assert await shows_text(page, "#dead-note", "And 6 more reasons")
        await assert_no_errors(page)


def a_large_pool() -> Stage:
    """Return a pool with a thousand models, fifty unreadable endpoints and many rules."""
    names = [f"team-{n}/a-model-with-a-long-name-{n:04}" for n in range(1000)]
    why = "it is served by none of 50 endpoints, and 50 requests name it; " * 3
    seen = {
        "state": "absent",
        "serving": 0,
        "endpoints": 50,
        "unread_count": 50,
        "waiting": 50,
        "named": True,
    }
    version = {"label": "1", "state": "open", "since_s": 9.0, "serving": 2, "warm": None, "desired": True}
    version |= {"drained": False, "drained_by": None, "share": 0.1, "labels": []}
    models = [
        {"name": name, **seen, "since_s": 90.0, "denied": False, "sentence": why, "labels": {}}
        | {"versions": [{**version, "name": f"{name}-v{n}"} for n in range(20)]}
        for name in names[:50]
    ]
    listed = json.dumps([{"name": name} for name in names])
    config = f"gateway: {{url: 'http://gw'}}\npool: {{name: qwen}}\nmodels: {listed}\n"
    stage = Stage(
        dead=[dead_request(n, f"RETRIES_EXHAUSTED: {why} {n}") for n in range(100)],
        settings=load_settings(config),
    )
    record_quarter_of_an_hour(stage, "no-room")
    stage.status_document |= FAILING | {"models": models, "model_count": 1000, "dead": 100_000}
    stage.status_document |= {"model_problems": [f"10.0.{n}.7:8000: {why}" for n in range(50)]}
    stage.status_document |= {
        "batching": [make_merge_target(name) for name in names[:256]],
        "sliced_models": [make_sliced_model(name, **UNEQUAL) for name in names[:50]],
        "replica_count": 500,
    }
    stage.status_document |= {
        "replicas": [{"owner": f"d-{n}", "leases": 1, "silent_s": 0.1} for n in range(100)]
    }
    stage.status_document |= {
        "problems": [f"The queue cannot be reached: {why}", why * 20],
        "explanation": why * 20,
    }
    return stage


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
async def test_large_pool_fits_on_four_screens(page: Page, width: int, height: int) -> None:
    await page.set_viewport(width=width, height=height)
    async with open_page(a_large_pool(), page):
        await wait_soon(lambda: shows_text(page, "#dead", "RETRIES"), what="the dead requests")
        await wait_soon(lambda: shows_text(page, "#models", "team-19"), what="the models")
        whole = "document.documentElement.scrollHeight"
        assert await page.evaluate(whole) <= SCREENS_MOST * height
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        assert await shows_text(page, "#models-note", "And 980 more models")
        assert await shows_text(page, "#models", "and 15 more versions")
        assert await shows_text(page, "#models-note", "And 47 more endpoints cannot be read.")
        assert await shows_text(page, "#batching-note", "And 236 more on /status.")
        models = await page.evaluate(
            "[...document.querySelectorAll('#settings tr')].find(row => row.textContent.startsWith('models'))"
            ".children[1].textContent"
        )
        assert models.startswith("team-0/a-model-with-a-long-name-0000, team-1/")
        assert models.endswith(" more")
        shown_models, more = models.count("team-"), int(models.split()[-2].replace(",", ""))
        assert shown_models + more == 1000
        await assert_no_errors(page)
