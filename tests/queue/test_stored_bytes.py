"""The bytes of everything that a queue stores are those of the versions before (stored_bytes.txt)."""

from __future__ import annotations

import difflib

from tests.queue.servers import Server
from tests.queue.stored_bytes import GOLDEN, NAMES, recorded

ENTRY_LENGTH = 16
"""Number of values of the array that is stored for an entry (queue/lua/common.lua)."""


async def test_queue_stores_the_same_bytes_as_before(any_server: Server) -> None:
    """Each difference is one that a dispatcher of the version before must be able to read."""
    async with recorded(any_server) as recorder:
        lines = difflib.unified_diff(
            GOLDEN.read_text().splitlines(), recorder.text.splitlines(), "before", "now", n=0, lineterm=""
        )
        assert "\n".join(lines) == ""


async def test_stored_bytes_cover_each_index_of_an_entry_and_each_key(any_server: Server) -> None:
    async with recorded(any_server) as recorder:
        longest = max(recorder.entries, key=len)
        assert len(longest) == ENTRY_LENGTH
        for at in range(ENTRY_LENGTH):
            values = {repr(entry[at]) for entry in recorder.entries if at < len(entry)}
            assert len(values) > 1, f"index {at + 1} has the same value in all entries"
        stored = {line.split()[1] for line in recorder.text.splitlines() if line.startswith("+")}
        keys = {*NAMES.script_keys, *NAMES.feature_pool_keys}
        assert keys - stored == {NAMES.outbox_key}, "the outbox is used on a Cluster only"
