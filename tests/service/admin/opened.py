"""Helpers for tests of the page in a browser."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Page
from tests.service.admin.stage import Stage
from tests.support import wait_until


async def wait_soon(condition: Callable[[], Any], what: str = "") -> None:
    """Wait for a condition, as long as a browser on a busy machine may take."""
    await wait_until(condition, 40, what=what)


@asynccontextmanager
async def open_page(stage: Stage, page: Page, *, ticking: bool = True) -> AsyncIterator[str]:
    async with stage.open(ticking=ticking) as url:
        await page.open(url)
        await wait_soon(lambda: live(page), what="the page to be live")
        await wait_until_drawn(page)
        yield url


async def live(page: Page) -> bool:
    return bool(await page.evaluate("document.body.dataset.link === 'live'"))


async def wait_until_drawn(page: Page) -> None:
    """Wait until the received events are on the screen."""
    await page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


async def shows_text(page: Page, selector: str, text: str) -> bool:
    return text in await page.get_text(selector)


async def assert_no_errors(page: Page) -> None:
    """Assert that the page had no error and that no resource was blocked or missing."""
    assert (page.console, page.network) == ([], [])


def axe_script() -> str:
    """Return the script of axe-core, from its package or from the file that AXE names."""
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


async def list_violations(page: Page) -> list[Any]:
    """Return the serious violations that axe reports."""
    found = await page.evaluate("axe.run().then(found => found.violations)")
    return [
        (one["id"], [(node["target"], node["failureSummary"]) for node in one["nodes"]][:5])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
