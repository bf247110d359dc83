"""Gateway adapters for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from dispatcher.gateway.http_gateway import HttpGateway
from tests.gateway.scripted_server import options


@pytest.fixture
async def gateway_to() -> AsyncIterator[Callable[..., HttpGateway]]:
    """Return a function that makes adapters. They are closed at the end of the test."""
    made: list[HttpGateway] = []

    def make(url: str, **more: Any) -> HttpGateway:
        reserved_headers = ("X-Session-Token", "x-session-id")
        made.append(HttpGateway(options(url, **more), reserved_headers=reserved_headers))
        return made[-1]

    yield make
    for gateway in made:
        await gateway.aclose()
