"""Which lists a producer may have its result put into: patterns of `patterns.py`. Pure."""

from __future__ import annotations

from dispatcher.core.requests.cluster_slot import tag_of

OURS = "batch-results:*"
"""The lists of our own client, one for each."""


def usual(queue: str, results: str) -> tuple[str, ...]:
    """What is allowed where the operator says nothing: the lists of our client; those that begin with the
    default list's name (each processor of llm-d's batch gateway has one); names with the queue's hash tag."""
    return OURS, f"{results}:*", f"*{{{tag_of(queue)}}}*"
