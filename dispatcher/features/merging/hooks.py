"""The part of merging that takes part in the kernel."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dispatcher.features.merging.merger import RequestMerger
from dispatcher.features.merging.status import build_status
from dispatcher.kernel.hooks import Hooks

if TYPE_CHECKING:
    from dispatcher.kernel.context import KernelContext


def build_hooks(context: KernelContext) -> Hooks:
    merger = RequestMerger(context)
    return Hooks(
        stages=(merger,),
        lease_parts=(merger,),
        grouping=merger,
        claims_request=(merger.has_rule_for,),
        join_copies=(merger.join_copies,),
        status=(partial(build_status, context, merger),),
        reconfigure=(merger.reconfigure,),
    )
