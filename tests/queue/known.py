"""What may be in Redis after any test of the queue: the listed keys, result lists, and what expires."""

from __future__ import annotations

from typing import Any

from dispatcher.queue.keys import QueueNames


async def assert_only_known_keys(client: Any, names: QueueNames, *lists: str) -> None:
    """Fail on a key that is neither the queue's own, nor a result list named here, nor expiring."""
    by_operators = [key for key in names.model_registry_keys if key.endswith((":labels", ":drains"))]
    known = {
        key.encode()
        for key in (*names.script_keys, *by_operators, names.result_list, names.sequence_secret_key, *lists)
    }
    found = [key async for key in client.scan_iter(count=1000)]
    stray = [key for key in found if key not in known and await client.pttl(key) == -1]
    assert not stray, (
        f"keys that docs/reference/queue-contract.md does not list and that never expire: {stray}"
    )


async def assert_drained(client: Any, names: QueueNames, *lists: str) -> None:
    """Nothing of any request is left: every set is empty, and nothing but control data stays."""
    await assert_only_known_keys(client, names, *lists)
    lasting = {f"{names.queue_prefix}:control", f"{names.queue_prefix}:heartbeats", names.paused_key}
    left = [key for key in names.script_keys if key not in lasting and await client.exists(key)]
    assert not left, f"left over: {left}"
