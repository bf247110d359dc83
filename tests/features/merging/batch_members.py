"""Batch members: requests for embeddings under a merge rule."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dispatcher.common.grouping import GroupingRule
from dispatcher.features.merging import shapes
from dispatcher.features.merging.call_size import CallSize
from dispatcher.features.merging.merged_calls import BatchMember, MergeTarget
from dispatcher.features.merging.rules import BatchRule, MergeMode
from dispatcher.features.merging.shapes import SHAPES, Part
from dispatcher.kernel.in_flight import InFlightLease
from dispatcher.queue.contract import Lease
from dispatcher.requests.request import Request

PATH = "/v1/embeddings"
RULE = BatchRule((PATH,), SHAPES["embeddings"], MergeMode.ON, GroupingRule(4, max_delay_s=1.0))


def build_target(rule: BatchRule = RULE, model: str = "m") -> MergeTarget:
    grouping = rule.grouping
    size = CallSize(
        rule.mode, grouping.max_size, grouping.preferred_sizes, rule.max_items, grouping.max_weight
    )
    return MergeTarget(PATH, model, rule, size)


def build_member(
    entry_id: int,
    target: MergeTarget,
    texts: str | Sequence[str] = "a text",
    *,
    key: str = "same key",
    is_sent_alone: bool = False,
    token: str = "",
) -> BatchMember:
    """Return the member that the request with this entry id becomes, as it waits in a group."""
    payload = msgspec.json.encode({"model": target.model, "input": texts})
    part = shapes.parse_part(target.rule.shape, payload)
    assert isinstance(part, Part)
    request = Request(f"r-{entry_id}", 10**9, payload, token=token or f"secret-{entry_id}")
    entry = InFlightLease(Lease(entry_id, f"t-{entry_id}", b"", 0.0, 1, 0, 0, 0))
    entry.request, entry.is_in_batch_group = request, True
    return BatchMember(entry, request, part, target, key, is_sent_alone)
