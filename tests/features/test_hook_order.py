"""The order in which the kernel asks its features."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from typing import Any

from dispatcher.kernel.context import KernelContext
from dispatcher.kernel.hooks import Hooks, LeasePart, join_hooks
from dispatcher.kernel.loop import build_feature_hooks
from dispatcher.kernel.options import Options
from dispatcher.kernel.queue_access import QueueAccess
from dispatcher.lab.memory_queue import MemoryQueue
from dispatcher.requests.lease_validity import LeaseValidity
from dispatcher.requests.outcomes.outcome import RetryPolicy
from tests.kernel.scene import open_limiter
from tests.memory_queue import MemoryStore


def test_joined_hooks_have_every_kind_of_each_feature_in_order() -> None:
    kinds = [each.name for each in fields(Hooks) if each.init and each.name != "grouping"]
    grouping: Any = object()
    parts: list[dict[str, Any]] = [{kind: (LeasePart(),) for kind in kinds} for _ in range(2)]
    one, two = (Hooks(**part) for part in parts)
    joined = join_hooks([one, Hooks(grouping=grouping), two])
    assert joined.grouping is grouping
    assert {kind: getattr(joined, kind) for kind in kinds} == {
        kind: getattr(one, kind) + getattr(two, kind) for kind in kinds
    }


async def test_stages_and_parts_of_features_are_asked_in_this_order() -> None:
    """A request waits for its turn before it is sent to a version. What is sliced depends on the version,
    what a call needs of the KV memory on the slice, and requests are merged last."""
    clock, limiter = asyncio.get_running_loop().time, open_limiter()
    queue = MemoryQueue(MemoryStore(clock=clock, unix_origin=0.0, lease_s=30.0), "a")
    access = QueueAccess(queue, limiter, LeaseValidity(30.0, 5.0), clock)
    nothing: Any = None
    hooks = build_feature_hooks(KernelContext(access, limiter, nothing, nothing, Options(RetryPolicy())))
    assert [type(each).__name__ for each in hooks.first_stages] == ["TurnChecker"]
    assert [type(each).__name__ for each in hooks.stages] == [
        "ModelRouter",
        "Slicer",
        "TokenBudget",
        "RequestMerger",
    ]
    parts = ["TurnChecker", "ModelRouter", "Slicer", "TokenBudget", "RequestMerger"]
    assert [type(each).__name__ for each in hooks.lease_parts] == parts
