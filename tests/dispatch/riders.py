"""Items of batches, as a rule makes them of requests for embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dispatcher.core.merging import shapes
from dispatcher.core.merging.call_size import CallSize
from dispatcher.core.merging.grouping import BatchRule, Forming, Mode
from dispatcher.core.merging.shapes import SHAPES, Part
from dispatcher.core.requests.request import Request
from dispatcher.dispatch.in_flight import HeldLease
from dispatcher.dispatch.merging.merged_calls import BatchItem, ServedModel
from dispatcher.ports import Lease

PATH = "/v1/embeddings"
RULE = BatchRule((PATH,), SHAPES["embeddings"], Mode.ON, Forming(4, max_delay_s=1.0))


def served_by(rule: BatchRule = RULE, model: str = "m") -> ServedModel:
    forming = rule.forming
    size = CallSize(rule.mode, forming.max_size, forming.preferred_sizes, rule.max_items, forming.max_weight)
    return ServedModel(PATH, model, rule, size)


def rider(
    entry: int,
    served: ServedModel,
    texts: str | Sequence[str] = "a text",
    *,
    key: str = "alike",
    alone: bool = False,
    token: str = "",
) -> BatchItem:
    """The request that is so many in the queue."""
    payload = msgspec.json.encode({"model": served.model, "input": texts})
    part = shapes.read(served.rule.shape, payload)
    assert isinstance(part, Part)
    request = Request(f"r-{entry}", 10**9, payload, token=token or f"secret-{entry}")
    held = HeldLease(Lease(entry, f"t-{entry}", b"", 0.0, 1, 0, 0, 0))
    held.request, held.waits = request, True
    return BatchItem(held, request, part, served, key, alone)
