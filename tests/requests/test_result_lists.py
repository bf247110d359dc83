"""Result lists that producers may name."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.common.patterns import matches_any, matches_pattern
from dispatcher.requests.result_lists import default_patterns


@given(st.text("ab*", max_size=8), st.text("ab", max_size=12))
def test_asterisk_matches_any_characters_and_other_characters_match_themselves(
    pattern: str, name: str
) -> None:
    expected = re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) is not None
    assert matches_pattern(pattern, name) is expected


def test_pattern_with_many_asterisks_is_matched_quickly() -> None:
    started_at = time.process_time()
    assert not matches_pattern("*a" * 50 + "*b", "a" * 100_000)
    assert time.process_time() - started_at < 1.0


@pytest.mark.parametrize(
    ("queue", "results", "name", "allowed"),
    [
        ("batch:{qwen}:requests", "batch:{qwen}:results", "batch-results:1", True),
        ("batch:{qwen}:requests", "batch:{qwen}:results", "batch:{qwen}:results:alice", True),
        ("batch:{qwen}:requests", "batch:{qwen}:results", "tenant:{qwen}:a", True),
        ("batch:{qwen}:requests", "batch:{qwen}:results", "tenant:{other}:a", False),
        ("batch:{qwen}:requests", "batch:{qwen}:results", "batch:{other}:results", False),
        ("batch:{qwen}:requests", "batch:{qwen}:results", "celery", False),
        # Each processor of llm-d's batch gateway reads a list of its own.
        ("llm-d-async:requests:a", "llm-d-async:results:a", "llm-d-async:results:a:batch-0", True),
        ("llm-d-async:requests:a", "llm-d-async:results:a", "llm-d-async:results:b:batch-0", False),
        ("request-sortedset", "result-list", "x:{request-sortedset}", True),
    ],
)
def test_default_patterns_allow_the_usual_result_lists(
    queue: str, results: str, name: str, allowed: bool
) -> None:
    assert matches_any(default_patterns(queue, results), name) is allowed
