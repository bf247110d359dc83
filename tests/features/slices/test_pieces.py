"""Token ids of an answer, which are kept as the server has written them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.features.slices.pieces import count_token_ids, join_token_ids, read_token_ids

IDS = st.lists(st.integers(0, 2**31), max_size=5)


@given(IDS, st.sampled_from([0, 1, 2]))
def test_list_of_numbers_is_kept_without_its_white_space(ids: list[int], indent: int) -> None:
    raw = msgspec.json.format(msgspec.json.encode(ids), indent=indent)
    kept = read_token_ids(msgspec.Raw(raw))
    assert msgspec.json.decode(b"[%b]" % kept) == ids
    assert count_token_ids(kept) == len(ids)


@given(IDS, IDS)
def test_joined_lists_are_one_list(first: list[int], second: list[int]) -> None:
    kept = (read_token_ids(msgspec.Raw(msgspec.json.encode(ids))) for ids in (first, second))
    assert msgspec.json.decode(b"[%b]" % join_token_ids(*kept)) == first + second


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"5",
        b"{}",
        b'"1,2"',
        b"[null]",
        b'["1"]',
        b"[[1]]",
        b"[1.5]",
        b"[-1]",
        b"[1e3]",
        b"[4294967296]",
    ],
)
def test_anything_but_a_list_of_numbers_has_no_ids(raw: bytes) -> None:
    assert read_token_ids(msgspec.Raw(raw)) == b""
