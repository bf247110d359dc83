"""Patterns of names: what fits, and which of them have names in common."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.patterns import matches_any, matches_pattern, patterns_overlap

patterns = st.text("ab*", max_size=6)
NAMES = ["".join(letters) for length in range(7) for letters in product("ab", repeat=length)]


@given(patterns, st.text("ab", max_size=8))
def test_an_asterisk_stands_for_any_characters(pattern: str, name: str) -> None:
    expected = re.fullmatch(pattern.replace("*", ".*"), name) is not None
    assert matches_pattern(pattern, name) is expected
    assert matches_any(["c", pattern], name) is expected


@given(patterns, patterns)
def test_patterns_meet_where_a_name_fits_both(one: str, other: str) -> None:
    assert patterns_overlap(one, other) is patterns_overlap(other, one)
    common = [name for name in NAMES if matches_pattern(one, name) and matches_pattern(other, name)]
    assert patterns_overlap(one, other) is bool(common) or len(one) + len(other) > 6


@pytest.mark.parametrize(
    ("one", "other", "do"),
    [
        ("/v1/*", "/v1/embeddings", True),
        ("/v1/*", "/*/embeddings", True),
        ("/v1/*", "/v2/*", False),
        ("/v1/completions", "/v1/embeddings", False),
        ("*a", "b*", True),
        ("*a", "*b", False),
        ("", "*", True),
        ("", "", True),
        ("a", "", False),
    ],
)
def test_which_patterns_meet(one: str, other: str, *, do: bool) -> None:
    assert patterns_overlap(one, other) is do


def test_many_asterisks_take_no_time() -> None:
    assert not patterns_overlap("*a" * 100, "b*" * 100 + "b")
