"""Patterns of names: which names match, and which patterns overlap."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.common.patterns import MAX_PATHS, RuleFinder, matches_any, matches_pattern, patterns_overlap

patterns = st.text("ab*", max_size=6)
NAMES = ["".join(letters) for length in range(7) for letters in product("ab", repeat=length)]


@given(patterns, st.text("ab", max_size=8))
def test_asterisk_matches_any_characters(pattern: str, name: str) -> None:
    expected = re.fullmatch(pattern.replace("*", ".*"), name) is not None
    assert matches_pattern(pattern, name) is expected
    assert matches_any(["c", pattern], name) is expected


@given(patterns, patterns)
def test_patterns_overlap_if_a_name_matches_both(one: str, other: str) -> None:
    assert patterns_overlap(one, other) is patterns_overlap(other, one)
    common_names = [name for name in NAMES if matches_pattern(one, name) and matches_pattern(other, name)]
    assert patterns_overlap(one, other) is bool(common_names) or len(one) + len(other) > 6


@pytest.mark.parametrize(
    ("one", "other", "overlaps"),
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
def test_overlap_of_example_patterns(one: str, other: str, *, overlaps: bool) -> None:
    assert patterns_overlap(one, other) is overlaps


def test_overlap_of_patterns_with_many_asterisks_is_computed_quickly() -> None:
    assert not patterns_overlap("*a" * 100, "b*" * 100 + "b")


@dataclass(frozen=True)
class Rule:
    paths: tuple[str, ...]


def test_first_rule_for_a_path_is_found_and_the_number_of_remembered_paths_is_bounded() -> None:
    rules = [Rule(("/v1/chat", "/v1/embed*")), Rule(("/v1/*",))]
    finder = RuleFinder(rules)
    for number in range(3 * MAX_PATHS):
        assert finder.find_rule("/v1/embeddings") is rules[0]
        assert finder.find_rule(f"/v1/{number}") is rules[1]
        assert finder.find_rule(f"/v2/{number}") is None
        assert len(finder) <= MAX_PATHS
