"""Items of batches, as a rule makes them of requests for embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dispatcher.core.merging import shapes
from dispatcher.core.merging.call_size import CallSize
from dispatcher.core.merging.grouping import BatchRule, GroupingRule, MergeMode
from dispatcher.core.merging.shapes import SHAPES, Part
from dispatcher.core.requests.request import Request
from dispatcher.dispatch.in_flight import InFlightLease
from dispatcher.dispatch.merging.merged_calls import BatchMember, MergeTarget
from dispatcher.ports import Lease

PATH = "/v1/embeddings"
RULE = BatchRule((PATH,), SHAPES["embeddings"], MergeMode.ON, GroupingRule(4, max_delay_s=1.0))


def served_by(rule: BatchRule = RULE, model: str = "m") -> MergeTarget:
    forming = rule.grouping
    size = CallSize(rule.mode, forming.max_size, forming.preferred_sizes, rule.max_items, forming.max_weight)
    return MergeTarget(PATH, model, rule, size)


def rider(
    entry: int,
    served: MergeTarget,
    texts: str | Sequence[str] = "a text",
    *,
    key: str = "alike",
    alone: bool = False,
    token: str = "",
) -> BatchMember:
    """The request that is so many in the queue."""
    payload = msgspec.json.encode({"model": served.model, "input": texts})
    part = shapes.parse_part(served.rule.shape, payload)
    assert isinstance(part, Part)
    request = Request(f"r-{entry}", 10**9, payload, token=token or f"secret-{entry}")
    held = InFlightLease(Lease(entry, f"t-{entry}", b"", 0.0, 1, 0, 0, 0))
    held.request, held.is_in_batch_group = request, True
    return BatchMember(held, request, part, served, key, alone)
