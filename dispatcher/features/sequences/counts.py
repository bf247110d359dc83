"""Counts of the sequences of a queue, as count_requests.lua returns them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dispatcher.features.sequences.decisions import OverrideCounts, SequenceCounters, SequenceCounts
from dispatcher.requests.queue_counts import FeatureCounts

_COUNTERS = slice(11, 20)
"""Position of the counters in what all sequences share (SHARED_FIELDS in sequences.lua)."""
_OVERRIDE_COUNTS = 21
"""Position of the counts of overrides in the same record."""


def decode_counts(value: Sequence[Any]) -> FeatureCounts:
    shared, parked, waiting = value
    values = msgspec.msgpack.decode(shared) if shared else []
    active, held, aborted = (int(values[at]) for at in (1, 9, 10)) if values else (0, 0, 0)
    counts = SequenceCounts(active, parked, held, aborted, waiting, _decode_override_counts(values))
    return FeatureCounts((counts, SequenceCounters(*values[_COUNTERS])), closed=waiting)


def _decode_override_counts(shared: Sequence[Any]) -> tuple[OverrideCounts, ...]:
    by_name = shared[_OVERRIDE_COUNTS] if len(shared) > _OVERRIDE_COUNTS else None
    if not by_name:  # an empty table of Lua is an empty array here
        return ()
    return tuple(
        OverrideCounts(name, int(active), int(parked)) for name, (active, parked) in sorted(by_name.items())
    )
