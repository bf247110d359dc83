from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.browser import Browser, Page


@pytest.fixture
async def page(browser: Browser) -> AsyncIterator[Page]:
    async with browser.page() as page:
        yield page
