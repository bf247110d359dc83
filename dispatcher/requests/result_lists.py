"""Result lists that producers may name, as patterns of `patterns.py`."""

from __future__ import annotations

from dispatcher.requests.cluster_slot import extract_hash_tag

CLIENT_LISTS = "batch-results:*"
"""The lists of the Python client, one per client."""


def default_patterns(queue: str, results: str) -> tuple[str, ...]:
    """Return the patterns that are allowed unless the operator sets others: the lists of the Python client,
    names that begin with the name of the default list (each processor of llm-d's batch gateway has one), and
    names with the queue's hash tag."""
    return CLIENT_LISTS, f"{results}:*", f"*{{{extract_hash_tag(queue)}}}*"
