"""Checks of the keys that a test leaves in Redis: documented keys, result lists, and keys that expire."""

from __future__ import annotations

from typing import Any

from dispatcher.queue.keys import QueueNames


async def assert_only_known_keys(client: Any, names: QueueNames, *lists: str) -> None:
    """Fail on a key that is neither a key of the queue, nor one of these result lists, nor expiring."""
    by_operators = [key for key in names.feature_pool_keys if key.endswith((":labels", ":drains"))]
    known = {
        key.encode()
        for key in (*names.script_keys, *by_operators, *names.text_keys, names.result_list, *lists)
    }
    found = [key async for key in client.scan_iter(count=1000)]
    unknown_keys = [key for key in found if key not in known and await client.pttl(key) == -1]
    assert not unknown_keys, (
        f"keys that docs/reference/queue-contract.md does not list and that never expire: {unknown_keys}"
    )


async def assert_drained(client: Any, names: QueueNames, *lists: str) -> None:
    """Fail if anything of a request is left: every set must be empty, and only control data may stay."""
    await assert_only_known_keys(client, names, *lists)
    lasting = {f"{names.queue_prefix}:control", f"{names.queue_prefix}:heartbeats", names.paused_key}
    left = [key for key in names.script_keys if key not in lasting and await client.exists(key)]
    assert not left, f"left over: {left}"
