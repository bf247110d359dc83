"""Which lists results may go to."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.core.patterns import matches_any, matches_pattern
from dispatcher.core.requests.result_lists import default_patterns


@given(st.text("ab*", max_size=8), st.text("ab", max_size=12))
def test_an_asterisk_stands_for_any_characters_and_all_else_for_itself(pattern: str, name: str) -> None:
    expected = re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) is not None
    assert matches_pattern(pattern, name) is expected


def test_many_asterisks_take_no_longer() -> None:
    began = time.process_time()
    assert not matches_pattern("*a" * 50 + "*b", "a" * 100_000)
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    ("queue", "results", "name", "allowed"),
    [
        ("batch:{qwen}:requests", "batch:{qwen}:results", "batch-results:1", True),
        ("batch:{qwen}:requests", "batch:{qwen}:results", "batch:{qwen}:results:alice", True),
        ("batch:{qwen}:requests", "batch:{qwen}:results", "tenant:{qwen}:a", True),
        ("batch:{qwen}:requests", "batch:{qwen}:results", "tenant:{other}:a", False),
        ("batch:{qwen}:requests", "batch:{qwen}:results", "batch:{other}:results", False),
        ("batch:{qwen}:requests", "batch:{qwen}:results", "celery", False),
        # llm-d's batch gateway: each of its processors reads a list of its own.
        ("llm-d-async:requests:a", "llm-d-async:results:a", "llm-d-async:results:a:batch-0", True),
        ("llm-d-async:requests:a", "llm-d-async:results:a", "llm-d-async:results:b:batch-0", False),
        ("request-sortedset", "result-list", "x:{request-sortedset}", True),
    ],
)
def test_usual_lists(queue: str, results: str, name: str, allowed: bool) -> None:
    assert matches_any(default_patterns(queue, results), name) is allowed
