"""Shifts of the stored times of sequences and of the model registry, as if time had passed."""

from __future__ import annotations

from typing import Any

import msgspec

from dispatcher.queue.keys import QueueNames
from dispatcher.queue.lua_files import FEATURE_POOL_KEYS
from tests.features.memory_queue import MemoryStore

_TIMES = (1, 6, 7, 14)
"""Positions of last_active_at, began_at, gap_since and check_at in a record (sequences.lua)."""


def age_sequences_in_redis(raw: Any, names: QueueNames, seconds: float) -> None:
    """Move all times back. `raw` is a blocking client."""
    key, checks = f"{names.queue_prefix}:sequences", f"{names.queue_prefix}:sequences:checks"
    for name, packed in raw.hgetall(key).items():
        if name != b"":
            values = _values(packed)
            for at in _TIMES:
                if values[at] is not False:
                    values[at] -= seconds
            raw.hset(key, name, msgspec.msgpack.encode(values))
    for name in raw.zrange(checks, 0, -1):
        raw.zincrby(checks, -seconds, name)


def _values(packed: bytes) -> list[Any]:
    """Return the values of a record. Ids and reasons are text here, so that they are packed as text again."""
    values: list[Any] = msgspec.msgpack.decode(packed)
    return values


def age_sequences_in_memory(store: MemoryStore, seconds: float) -> None:
    sequences = store.queue.sequences
    sequences.shift_checks(-seconds)
    for one in sequences.records.values():
        one.last_active_at -= seconds
        one.began_at = None if one.began_at is None else one.began_at - seconds
        one.gap_since = None if one.gap_since is None else one.gap_since - seconds


def age_model_registry_in_redis(raw: Any, names: QueueNames, seconds: float) -> None:
    """Move all times back. `raw` is a blocking client."""
    at = dict(zip(FEATURE_POOL_KEYS, names.feature_pool_keys, strict=True))
    for name in ("WARM_MARKERS", "WARM_UP_LOCKS", "MODELS_IN_USE", "PINS_LAST_USED"):
        for member in raw.zrange(at[name], 0, -1):
            raw.zincrby(at[name], -seconds, member)
    for key, value in raw.hgetall(at["PINS"]).items():
        until, version = value.split(b" ", 1)
        raw.hset(at["PINS"], key, b"%.6f %s" % (float(until) - seconds, version))


def age_model_registry_in_memory(store: MemoryStore, seconds: float) -> None:
    registry = store.queue.model_registry
    registry.warm_until = {name: until - seconds for name, until in registry.warm_until.items()}
    registry.lock_until = {name: until - seconds for name, until in registry.lock_until.items()}
    registry.in_use_until = {name: until - seconds for name, until in registry.in_use_until.items()}
    for key, (until, version) in registry.pins.items():
        registry.pins[key] = until - seconds, version
