"""Dispatchers of one queue notice that they send to different pools."""

from __future__ import annotations

import pytest

from dispatcher.queue.pool_identity import (
    MAX_SHOWN_CHARS,
    PoolIdentity,
    decode_identities,
    describe_different_pools,
    encode_identity,
    find_different_pools,
)

EAST = PoolIdentity("inferencepool", "uid-1", "llm/qwen")
WEST = PoolIdentity("inferencepool", "uid-2", "llm/qwen")
OUTSIDE = PoolIdentity("gateway", "http://gateway", "qwen")


@pytest.mark.parametrize("pools", [[], [EAST], [EAST, EAST], [EAST, OUTSIDE]])
def test_pools_that_may_be_one_pool_are_no_problem(pools: list[PoolIdentity]) -> None:
    """A dispatcher outside of the cluster knows no UID, so it cannot be compared with those inside."""
    assert find_different_pools(pools) == []
    assert describe_different_pools(pools) == ""


def test_pools_with_equal_names_in_two_clusters_differ() -> None:
    what = describe_different_pools([EAST, WEST, OUTSIDE, EAST])
    assert what.endswith(": llm/qwen (inferencepool uid-1), llm/qwen (inferencepool uid-2)")


def test_other_data_than_identities_is_ignored() -> None:
    shared = [b"", b"\xff", b"{}", b'["inferencepool",7,"llm/qwen"]', encode_identity(EAST), b"[]"]
    assert decode_identities(shared) == [EAST]


def test_identity_is_shown_in_one_short_line() -> None:
    shown = str(PoolIdentity("gateway", "http://gateway\n\x1b[2J", "q" * 1000))
    assert shown.isprintable()
    assert len(shown) == MAX_SHOWN_CHARS
