"""Time that passes for sequences, or for versions of models, by hand: what is kept is of so much earlier."""

from __future__ import annotations

from typing import Any

import msgspec

from dispatcher.lab.memory_queue import MemoryStore
from dispatcher.queue.keys import MODEL_REGISTRY_KEYS, QueueNames

_TIMES = (1, 6, 7, 14)
"""Where touched, born, gap and look stand in what sequences.lua packs."""


def age_redis(raw: Any, names: QueueNames, seconds: float) -> None:
    """`raw`: a blocking client."""
    key, looks = f"{names.queue_prefix}:sequences", f"{names.queue_prefix}:sequences:checks"
    for name, packed in raw.hgetall(key).items():
        if name != b"":
            values = _values(packed)
            for at in _TIMES:
                if values[at] is not False:
                    values[at] -= seconds
            raw.hset(key, name, msgspec.msgpack.encode(values))
    for name in raw.zrange(looks, 0, -1):
        raw.zincrby(looks, -seconds, name)


def _values(packed: bytes) -> list[Any]:
    """Strings as bytes, whatever is in them, would not be strings again: ids and sentences here are text."""
    values: list[Any] = msgspec.msgpack.decode(packed)
    return values


def age_memory(store: MemoryStore, seconds: float) -> None:
    sequences = store.queue.sequences
    sequences.shift_checks(-seconds)
    for one in sequences.records.values():
        one.last_active_at -= seconds
        one.began_at = None if one.began_at is None else one.began_at - seconds
        one.gap_since = None if one.gap_since is None else one.gap_since - seconds


def age_board_redis(raw: Any, names: QueueNames, seconds: float) -> None:
    """`raw`: a blocking client."""
    at = dict(zip(MODEL_REGISTRY_KEYS, names.model_registry_keys, strict=True))
    for name in ("WARM_MARKERS", "WARM_UP_LOCKS", "MODELS_IN_USE", "PINS_LAST_USED"):
        for member in raw.zrange(at[name], 0, -1):
            raw.zincrby(at[name], -seconds, member)
    for key, value in raw.hgetall(at["PINS"]).items():
        until, version = value.split(b" ", 1)
        raw.hset(at["PINS"], key, b"%.6f %s" % (float(until) - seconds, version))


def age_board_memory(store: MemoryStore, seconds: float) -> None:
    board = store.pool.model_registry
    board.warm_until = {name: until - seconds for name, until in board.warm_until.items()}
    board.lock_until = {name: until - seconds for name, until in board.lock_until.items()}
    board.in_use_until = {name: until - seconds for name, until in board.in_use_until.items()}
    for key, (until, version) in board.pins.items():
        board.pins[key] = until - seconds, version
