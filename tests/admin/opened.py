"""The page opened in a browser, and what may be asked of it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.admin.stage import Stage
from tests.browser import Page
from tests.support import wait_until


async def soon(condition: Callable[[], Any], what: str = "") -> None:
    """Within as long as a browser on a busy machine may take."""
    await wait_until(condition, 40, what=what)


@asynccontextmanager
async def shown(stage: Stage, page: Page, *, ticking: bool = True) -> AsyncIterator[str]:
    async with stage.open(ticking=ticking) as url:
        await page.open(url)
        await soon(lambda: live(page), what="the page to be live")
        await drawn(page)
        yield url


async def live(page: Page) -> bool:
    return bool(await page.ask("document.body.dataset.link === 'live'"))


async def drawn(page: Page) -> None:
    """Wait until the events that have come are on the screen."""
    await page.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


async def says(page: Page, selector: str, text: str) -> bool:
    return text in await page.text(selector)


async def quiet(page: Page) -> None:
    """Assert that nothing broke, was forbidden or was missing."""
    assert (page.console, page.network) == ([], [])


def axe_script() -> str:
    """axe-core's script: of the wheel, or the file that AXE names."""
    named = os.environ.get("AXE")
    if named:
        return Path(named).read_text()
    found = importlib.util.find_spec("axe_core_python")
    if found is None or found.origin is None:
        reason = "axe-core-python is not installed"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason}, and CI=true promises that it is")
        pytest.skip(reason)
    return (Path(found.origin).parent / "axe.min.js").read_text()


async def serious(page: Page) -> list[Any]:
    """Return the objections of axe."""
    found = await page.ask("axe.run().then(found => found.violations)")
    return [
        (one["id"], [(node["target"], node["failureSummary"]) for node in one["nodes"]][:5])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
