"""Calls of requests that wait for their model: return_waiting_for_models.lua and count_waiting_by_model.lua,
and the arguments of release.lua that are about them."""

from __future__ import annotations

from collections.abc import Sequence

from dispatcher.core.requests.lanes import shorten_model_name
from dispatcher.ports import Release, ReturnedRequests
from dispatcher.queue.keys import MAX_TOKEN_BYTES
from dispatcher.queue.redis import replies
from dispatcher.queue.redis.backend import Backend


def describe_model_wait(release: Release) -> tuple[str, bytes, bytes]:
    """Return the model for which a released request waits, and the id and token by which it can be cancelled
    meanwhile. These are stored with its state, so they are left out if they are too long."""
    if not release.missing_model:
        return "", b"", b""
    request_id, token = (text.encode(errors="surrogatepass") for text in release.cancel_key)
    if max(len(request_id), len(token)) > MAX_TOKEN_BYTES:
        request_id = token = b""
    return shorten_model_name(release.missing_model), request_id, token


async def return_waiting_for_models(
    backend: Backend, models: Sequence[str], max_count: int
) -> ReturnedRequests:
    reply = await backend.run_script("return_waiting_for_models", {"max_count": max_count, "models": models})
    return ReturnedRequests(*reply.value)


async def count_waiting_by_model(backend: Backend) -> dict[str, int]:
    return replies.decode_waiting_by_model(await backend.run_script("count_waiting_by_model"))
