"""The parts of sequences that take part in the kernel."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dispatcher.features.sequences.status import build_status
from dispatcher.features.sequences.turn_checker import TurnChecker
from dispatcher.features.sequences.upkeep import SequenceUpkeep
from dispatcher.kernel.hooks import Hooks

if TYPE_CHECKING:
    from dispatcher.kernel.context import KernelContext


def build_hooks(context: KernelContext) -> Hooks:
    turn_checker, upkeep = TurnChecker(context), SequenceUpkeep(context)
    return Hooks(
        rewrite_request=(upkeep.name_override,),
        first_stages=(turn_checker,),
        lease_parts=(turn_checker,),
        on_counts=(upkeep.log_events,),
        after_sweep=(upkeep.after_sweep,),
        explain_waiting=(upkeep.explain_waiting,),
        status=(partial(build_status, context, turn_checker),),
        reconfigure=(upkeep.reconfigure,),
    )
