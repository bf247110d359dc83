"""Calls of requests that wait for their model: arguments of release.lua, return_waiting_for_models.lua and
count_waiting_by_model.lua."""

from __future__ import annotations

from collections.abc import Sequence

from dispatcher.core.requests.lanes import shorten_model_name
from dispatcher.ports import Release, ReturnedRequests
from dispatcher.queue.keys import MAX_TOKEN_BYTES
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.scripts import Argument


def encode_model_wait(release: Release) -> tuple[Argument, Argument, Argument]:
    """Return the model for which a released request waits, and the id and token by which it can be cancelled
    meanwhile. These are stored with its state, so they are left out if they are too long."""
    if not release.missing_model:
        return "", "", ""
    request, token = (text.encode(errors="surrogatepass") for text in release.cancel_key)
    if max(len(request), len(token)) > MAX_TOKEN_BYTES:
        request = token = b""
    return shorten_model_name(release.missing_model), request, token


async def return_waiting_for_models(
    backend: Backend, models: Sequence[str], max_count: int
) -> ReturnedRequests:
    moved, left = (await backend.run_script("return_waiting_for_models", [max_count, *models])).value
    return ReturnedRequests(moved, left)


async def count_waiting_by_model(backend: Backend) -> dict[str, int]:
    found = (await backend.run_script("count_waiting_by_model", [])).value
    return {found[at].decode(): int(found[at + 1]) for at in range(0, len(found), 2)}
