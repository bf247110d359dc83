"""Count the requests by location: count_requests.lua."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dispatcher.features.sequences.decisions import OverrideCounts, SequenceCounters, SequenceCounts
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.steps.common import decode_by_feature
from dispatcher.requests.queue_counts import QueueCounts

_COUNTERS = slice(11, 20)
"""Position of the sequence counters in what all sequences share (SHARED_FIELDS in sequences.lua)."""
_OVERRIDE_COUNTS = 21
"""Position of the counts of overrides in the same record."""


async def count_requests(backend: Backend) -> QueueCounts:
    reply = await backend.run_script("count_requests")
    now, pending, leased, delayed, dead, units, by_feature = reply.value
    by_name = decode_by_feature(by_feature)
    shared, parked, waiting = by_name.get("sequences", (b"", 0, 0))
    backend.observe_clock(reply, now)
    values = msgspec.msgpack.decode(shared) if shared else []
    active, held, aborted = (int(values[at]) for at in (1, 9, 10)) if values else (0, 0, 0)
    counts = SequenceCounts(active, parked, held, aborted, waiting, _decode_override_counts(values))
    counters = SequenceCounters(*values[_COUNTERS])
    waiting_for_model, started = by_name.get("models", 0), by_name.get("slices", 0)
    return QueueCounts(pending, leased, delayed, dead, units, counts, counters, waiting_for_model, started)


def _decode_override_counts(shared: Sequence[Any]) -> tuple[OverrideCounts, ...]:
    """Return the counts of overrides from what all sequences share."""
    by_name = shared[_OVERRIDE_COUNTS] if len(shared) > _OVERRIDE_COUNTS else None
    if not by_name:  # an empty table of Lua is an empty array here
        return ()
    return tuple(
        OverrideCounts(name, int(active), int(parked)) for name, (active, parked) in sorted(by_name.items())
    )
