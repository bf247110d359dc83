"""Requests that wait for their model: what a release stores, return_waiting_for_models.lua and
count_waiting_by_model.lua."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dispatcher.queue.keys import QueueNames
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.scripts import split_batches
from dispatcher.queue.redis.steps.common import split_rows
from dispatcher.requests.lanes import shorten_model_name

LANE = "waiting-for-model"
"""Closed lane of the requests whose model is not served."""
MAX_RETURNED_PER_CALL = 200
"""Largest number of requests that wait for their model and that one step returns to the queue."""


@dataclass(frozen=True, slots=True)
class ReturnedRequests:
    """Reply to `ModelCalls.return_waiting_for_models`."""

    returned_count: int
    """Requests that may be claimed now."""
    remaining_count: int
    """Requests that still wait for one of these models: call again."""


@dataclass(frozen=True, slots=True)
class ModelWait:
    """Release of a request that waits until its model is served. A request that is next in its sequence stays
    next."""

    model: str

    @property
    def size_bytes(self) -> int:
        return len(self.model)

    def to_columns(self, names: QueueNames) -> dict[str, str]:
        return {"missing_model": shorten_model_name(self.model)}


async def return_waiting_for_models(backend: Backend, models: Sequence[str]) -> ReturnedRequests:
    moved = left = 0
    # Models whose names are equal after shortening are one model here.
    for batch in split_batches(list(dict.fromkeys(map(shorten_model_name, models))), lambda _: 0):
        reply = await backend.run_script(
            "return_waiting_for_models", {"max_count": MAX_RETURNED_PER_CALL - moved, "names": batch}
        )
        returned, remaining = reply.value
        moved, left = moved + returned, left + remaining
    return ReturnedRequests(moved, left)


async def count_waiting_by_model(backend: Backend) -> dict[str, int]:
    reply = await backend.run_script("count_waiting_by_model")
    return {model.decode(): int(count) for model, count in split_rows(reply.value, 2)}
