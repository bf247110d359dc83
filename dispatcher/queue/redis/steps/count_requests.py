"""Count the requests by location: count_requests.lua. Features decode what their part of it has counted."""

from __future__ import annotations

from dispatcher.features import import_modules
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.steps.common import decode_by_feature
from dispatcher.requests.queue_counts import QueueCounts

_FEATURES = import_modules("counts")


async def count_requests(backend: Backend) -> QueueCounts:
    reply = await backend.run_script("count_requests")
    now, pending, leased, delayed, dead, units, by_feature = reply.value
    backend.observe_clock(reply, now)
    counted = decode_by_feature(by_feature)
    return QueueCounts(pending, leased, delayed, dead, units).add_features(
        _FEATURES[name].decode_counts(value) for name, value in counted.items() if name in _FEATURES
    )
