"""Result lists that producers may name, as patterns of `patterns.py`."""

from __future__ import annotations

from dispatcher.core.requests.cluster_slot import tag_of

OURS = "batch-results:*"
"""The lists of the Python client, one per client."""


def usual(queue: str, results: str) -> tuple[str, ...]:
    """Return the patterns that are allowed unless the operator sets others: the lists of the Python client,
    names that begin with the name of the default list (each processor of llm-d's batch gateway has one), and
    names with the queue's hash tag."""
    return OURS, f"{results}:*", f"*{{{tag_of(queue)}}}*"
