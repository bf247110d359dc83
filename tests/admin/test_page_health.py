"""The health on the page in a real browser: what comes first, what is unknown, what fits on a screen."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from dispatcher.admin.stream import MAX_STREAMS
from tests.admin.opened import drawn, live, quiet, says, shown, soon
from tests.admin.stage import FAILING, Stage, configured, dead_request, merged, quarter_of_an_hour, status
from tests.browser import Page

UNREAD: dict[str, Any] = {"reason": "unreadable", "open": False, "limit": 0} | dict.fromkeys(
    ("f_sys", "f_epp", "max_sys", "max_sys_source", "configured_max_sys", "realtime", "realtime_waiting")
)
"""Fields of a status without readings of the pool."""
NO_COUNTS: dict[str, Any] = dict.fromkeys(("pending", "leased", "delayed", "dead", "at_risk"))
SCREENS_MOST = 4


async def test_health_comes_first_and_is_the_largest_text(page: Page) -> None:
    stage = Stage(told=status("full", done_in_s=7380.0))
    async with shown(stage, page):
        assert await page.text("#state") == "Working for 1 min 15 s"
        assert await page.text("#sentence") == stage.told["health_sentence"]
        assert await page.text("#lead") == "Done inabout 2 h 3 min at the present rate"
        assert await page.ask("document.title") == "working · qwen"
        stage.told |= FAILING
        await soon(lambda: says(page, "#state", "Failing for 1 min 35 s"), what="the failure")
        assert await page.text("#sentence") == FAILING["health_sentence"]
        assert await page.ask("document.querySelector('#lead code').textContent") == (
            "batch-dispatcher dead list"
        )
        assert await says(page, "#lead", "Done inunknown")
        assert await page.text("#badge") == "Open: full.", "the gate knows nothing of failed tries"
        largest = (
            "[...document.querySelectorAll('main *')].map(each => getComputedStyle(each).fontSize)"
            ".map(parseFloat).reduce((most, size) => Math.max(most, size))"
        )
        state = "parseFloat(getComputedStyle(document.querySelector('#state')).fontSize)"
        assert await page.ask(largest) == await page.ask(state)
        above = "document.querySelector('#health').getBoundingClientRect().bottom"
        assert await page.ask(f"{above} <= document.querySelector('#data').getBoundingClientRect().top")
        await quiet(page)


async def test_nothing_remains_of_readings_that_are_gone(page: Page) -> None:
    stage = Stage()
    for known in (True, False, True):
        stage.told = status("full") if known else stage.told | UNREAD
        for _ in range(60):
            stage.second()
    stage.told |= UNREAD
    stage.second()
    async with shown(stage, page, ticking=False):
        parts = await page.text("#parts")
        assert parts.count("unknown") == 5, parts
        assert await page.text("#bar") == "unknown"
        assert await page.ask("document.querySelectorAll('#bar i').length") == 0
        areas = await page.ask(
            "[...document.querySelectorAll('#load path')].map(each =>"
            " each.getAttribute('d').split('M').length - 1)"
        )
        assert set(areas) == {2}, "each area and line has a gap where the pool was unknown"
        stage.second("full")
        await soon(lambda: page.ask("document.querySelectorAll('#bar i').length === 5"), what="the bar")
        await quiet(page)


async def test_nothing_remains_of_counts_that_are_gone(page: Page) -> None:
    stage = Stage(told=status(dead=3), dead=[dead_request(n, "why") for n in range(3)])
    async with shown(stage, page):
        await soon(lambda: says(page, "#dead", "why"), what="the dead requests")
        stage.told |= NO_COUNTS
        await soon(lambda: says(page, "#queue", "Pendingunknown"), what="the counts to go")
        assert (await page.text("#queue")).count("unknown") >= 5
        assert await page.ask("document.querySelector('#dead').parentNode.hidden")
        assert await page.text("#dead-note") == "Unknown: the queue is not counted."
        assert await page.text("#bar") == "unknown", "what other replicas have in flight is unknown too"
        assert await says(page, "#waits-legend", "pending unknown")
        await quiet(page)


async def test_page_without_contact_shows_nothing_as_current(page: Page) -> None:
    stage = Stage()
    quarter_of_an_hour(stage, "full")
    async with shown(stage, page):
        assert await says(page, "#badge", "Open: full.")
    await soon(lambda: says(page, "#state", "No contact"), what="the page to notice")
    assert (await page.text("#sentence")).startswith("No contact with the dispatcher for ")
    assert await says(page, "#sentence", "the last known state is not shown as current.")
    assert await page.text("#say") == "No contact with the dispatcher."
    assert await page.ask("document.title") == "no contact · qwen"
    assert await page.text("#lead") == ""
    gate = "getComputedStyle(document.querySelector('.gate')).display"
    assert await page.ask(gate) == "none"
    marked = (
        "[...document.querySelectorAll('#data h2')].every(each =>"
        " getComputedStyle(each, '::after').content.includes(' as of '))"
    )
    assert await page.ask(marked), "each card says that its numbers are of before"
    first = await page.text("#sentence")
    await soon(lambda: says_other(page, first), what="the time without contact to grow")
    async with stage.open(ticking=True):
        await soon(lambda: live(page), what="the page to be back")
        await soon(lambda: says(page, "#state", "Working"), what="the health")
        assert await page.ask(gate) != "none"
        assert not await page.ask(marked)
    assert page.console == []


async def says_other(page: Page, before: str) -> bool:
    return await page.text("#sentence") != before


async def test_page_that_never_had_contact_says_why(page: Page) -> None:
    stage = Stage()
    readers = [stage.feed.subscribe() for _ in range(MAX_STREAMS)]
    assert None not in readers
    async with stage.open() as url:
        await page.open(url)
        await soon(
            lambda: says(page, "#sentence", "No contact with the dispatcher for "), what="the page to notice"
        )
        assert await says(page, "#sentence", "(503: ")
        assert await page.ask("document.querySelector('#data').hidden"), "there is no last known state"
        assert "last known" not in await page.text("#sentence")


async def test_only_a_change_of_the_health_is_announced(page: Page) -> None:
    stage = Stage(told=status("full"))
    async with shown(stage, page):
        await soon(lambda: says(page, "#say", "Working: 14 requests"), what="the first announcement")
        await page.ask(
            "void (window.spoken = [], new MutationObserver(() => spoken.push(document.querySelector('#say')"
            ".textContent)).observe(document.querySelector('#say'), {childList: true, characterData: true,"
            " subtree: true}))"
        )
        for reason in ("no-room", "full", "backpressure", "idle"):
            stage.told |= {"reason": reason, "open": reason in ("full", "idle"), "pending": 7}
            stage.told |= {"health_sentence": f"{reason}: 3 requests wait.", "health_since_s": 80.0}
            await soon(partial(says, page, "#badge", reason), what=reason)
        stage.told |= FAILING | {"health_since_s": 1.0}
        await soon(lambda: says(page, "#state", "Failing for 1 s"), what="a failure of one second")
        assert await page.ask("spoken.length") == 0
        stage.told |= FAILING
        await soon(lambda: page.ask("spoken.length"), what="a failure that holds")
        assert await page.ask("spoken") == [f"Failing: {FAILING['health_sentence']}"]


async def test_nothing_on_the_page_moves_by_itself(page: Page) -> None:
    """An animated dot and a gliding bar took a fifth of a core of everybody who looked."""
    motion: dict[str, Any] = {"prefers-reduced-motion": "no-preference"}
    await page.look(**motion)
    stage = Stage()
    stage.second("full")
    async with shown(stage, page, ticking=False):
        await page.ask("void (window.ran = 0, addEventListener('transitionrun', () => ran++))")
        assert await page.ask("document.getAnimations().length") == 0
        stage.second("full", in_flight=3, realtime=9.0)
        await soon(lambda: says(page, "#parts", "Batch3"), what="the bar to change")
        await drawn(page)
        assert await page.ask("[ran, document.getAnimations().length]") == [0, 0]


async def test_dead_requests_are_grouped_by_their_reason(page: Page) -> None:
    stage = Stage(
        told=status(dead=131),
        dead=[dead_request(1, "DELIVERIES_EXHAUSTED: 3 dispatchers died")]
        + [dead_request(n, "RETRIES_EXHAUSTED: 500") for n in range(2, 32)]
        + [dead_request(40 + n, f"<b>reason {n}</b>") for n in range(14)],
    )
    async with shown(stage, page):
        await soon(lambda: says(page, "#dead", "RETRIES"), what="the dead requests")
        rows = await page.ask(
            "[...document.querySelectorAll('#dead tbody tr')].map(row =>"
            " [...row.children].slice(0, 3).map(cell => cell.textContent))"
        )
        assert rows[0] == ["30", "RETRIES_EXHAUSTED: 500", "job-31"]
        assert len(rows) == 10
        assert await page.text("#dead-sum") == "131 requests, the newest 45 by reason"
        assert await says(page, "#dead-note", "And 6 more reasons")
        await quiet(page)


def a_large_pool() -> Stage:
    """A thousand models of which many do not run, fifty endpoints that cannot be read, many rules."""
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
        settings=configured(config),
    )
    quarter_of_an_hour(stage, "no-room")
    stage.told |= FAILING | {"models": models, "model_count": 1000, "dead": 100_000}
    stage.told |= {"model_problems": [f"10.0.{n}.7:8000: {why}" for n in range(50)]}
    stage.told |= {"batching": [merged(name) for name in names[:256]], "replica_count": 500}
    stage.told |= {"replicas": [{"owner": f"d-{n}", "leases": 1, "silent_s": 0.1} for n in range(100)]}
    stage.told |= {"config_problem": why, "queue_problem": why, "gateway_problem": why}
    stage.told |= {"signals_problem": why * 20, "explanation": why * 20, "model_registry_problem": why}
    return stage


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
async def test_a_large_pool_fits_on_four_screens(page: Page, width: int, height: int) -> None:
    await page.look(width=width, height=height)
    async with shown(a_large_pool(), page):
        await soon(lambda: says(page, "#dead", "RETRIES"), what="the dead requests")
        await soon(lambda: says(page, "#models", "team-19"), what="the models")
        whole = "document.documentElement.scrollHeight"
        assert await page.ask(whole) <= SCREENS_MOST * height
        assert await page.ask("document.documentElement.scrollWidth") <= width
        assert await says(page, "#models-note", "And 980 more models")
        assert await says(page, "#models", "and 15 more versions")
        assert await says(page, "#models-note", "And 47 more endpoints cannot be read.")
        assert await says(page, "#batching-note", "And 236 more on /status.")
        models = await page.ask(
            "[...document.querySelectorAll('#settings tr')].find(row => row.textContent.startsWith('models'))"
            ".children[1].textContent"
        )
        assert models.startswith("team-0/a-model-with-a-long-name-0000, team-1/")
        assert models.endswith(" more")
        shown_models, more = models.count("team-"), int(models.split()[-2].replace(",", ""))
        assert shown_models + more == 1000
        await quiet(page)
