"""Calls of the model registry: what they send to the queue."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from dispatcher.features.models.queue.registry import refresh_registry
from dispatcher.queue.redis.backend import Backend


@pytest.mark.parametrize(("owner", "prefix"), [("", b""), ("a", b'["a",')])
async def test_only_an_owner_writes(owner: str, prefix: bytes) -> None:
    sent: dict[str, Any] = {}

    async def run_script(name: str, arguments: dict[str, Any], *, size_bytes: int) -> SimpleNamespace:
        sent.update(arguments)
        return SimpleNamespace(value=[[], [], [], [], [], []])

    backend = cast("Backend", SimpleNamespace(run_script=run_script))
    assert (await refresh_registry(backend, owner)).problem == ""
    assert sent["owner_prefix"] == prefix, "with an empty prefix the script only reads"
