"""Calls of requests that wait for their model: arguments of release.lua, return_waiting_for_models.lua and
count_waiting_by_model.lua."""

from __future__ import annotations

from collections.abc import Sequence

from dispatcher.core.requests.lanes import awaited_as
from dispatcher.ports import Recalled, Release
from dispatcher.queue.keys import MAX_TOKEN_BYTES
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.scripts import Argument


def awaits_of(release: Release) -> tuple[Argument, Argument, Argument]:
    """Return the model for which a released request waits, and the id and token by which it can be cancelled
    meanwhile. These are stored with its state, so they are left out if they are too long."""
    if not release.awaits:
        return "", "", ""
    request, token = (text.encode(errors="surrogatepass") for text in release.cancelled_by)
    if max(len(request), len(token)) > MAX_TOKEN_BYTES:
        request = token = b""
    return awaited_as(release.awaits), request, token


async def recall(backend: Backend, models: Sequence[str], most: int) -> Recalled:
    moved, left = (await backend.run("recall", [most, *models])).value
    return Recalled(moved, left)


async def awaited(backend: Backend) -> dict[str, int]:
    found = (await backend.run("awaited", [])).value
    return {found[at].decode(): int(found[at + 1]) for at in range(0, len(found), 2)}
