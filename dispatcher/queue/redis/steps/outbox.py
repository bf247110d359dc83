"""Move results between the slots of a Cluster: read_outbox.lua reads them in the slot of the queue, and
push_results.lua pushes them in the slot of their list."""

from __future__ import annotations

from collections.abc import Sequence

from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.scripts import MAX_SCRIPT_BYTES


async def read_outbox(backend: Backend, after: str, max_count: int) -> Sequence[bytes]:
    """Return the next elements of the outbox: at most a megabyte, or one element if it is larger."""
    reply = await backend.run_script(
        "read_outbox",
        {"after": after, "max_count": max_count, "max_bytes": MAX_SCRIPT_BYTES},
        keys={"OUTBOX": backend.names.outbox_key},
    )
    elements: Sequence[bytes] = reply.value
    return elements


async def push_results(
    backend: Backend,
    name: bytes,
    marker: bytes,
    results: Sequence[tuple[bytes, bytes]],
    *,
    ttl_s: int,
    marker_ttl_s: int,
) -> bool:
    """Push results by their numbers, in rising order. Return False if the list or the marker has another
    type."""
    reply = await backend.run_script(
        "push_results",
        {
            "ttl_s": ttl_s,
            "last_pushed_ttl_s": marker_ttl_s,
            "results": [{"number": number, "result": result} for number, result in results],
        },
        keys={"LIST": name, "LAST_PUSHED": marker},
        size_bytes=sum(len(number) + len(result) for number, result in results),
    )
    return bool(reply.value)
