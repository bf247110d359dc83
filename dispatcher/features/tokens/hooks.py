"""The parts of the token budget that take part in the kernel."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dispatcher.features.tokens.status import build_status
from dispatcher.features.tokens.token_budget import TokenBudget
from dispatcher.kernel.hooks import Hooks

if TYPE_CHECKING:
    from dispatcher.kernel.context import KernelContext


def build_hooks(context: KernelContext) -> Hooks:
    budget = TokenBudget(context)
    return Hooks(
        stages=(budget,),
        lease_parts=(budget,),
        rooms=(budget,),
        status=(partial(build_status, budget),),
        reconfigure=(budget.reconfigure,),
    )
