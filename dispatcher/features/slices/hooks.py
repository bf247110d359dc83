"""The parts of slices that take part in the kernel."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dispatcher.features.slices.partial_answers import end_with_partial_answer
from dispatcher.features.slices.progress import find_version
from dispatcher.features.slices.slicer import Slicer
from dispatcher.features.slices.status import build_status
from dispatcher.kernel.hooks import Hooks

if TYPE_CHECKING:
    from dispatcher.kernel.context import KernelContext


def build_hooks(context: KernelContext) -> Hooks:
    slicer = Slicer(context)
    return Hooks(
        stages=(slicer,),
        lease_parts=(slicer,),
        on_allowance=(slicer.revoke_slices,),
        find_started_model=(find_version,),
        find_call_tokens=(slicer.find_call_tokens,),
        end_request=(end_with_partial_answer,),
        status=(partial(build_status, context, slicer),),
        reconfigure=(slicer.reconfigure,),
    )
