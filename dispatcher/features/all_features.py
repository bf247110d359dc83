"""All features that take part in the kernel, in their order. Nothing else names them together."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dispatcher.features import import_modules
from dispatcher.features.merging import status as merging
from dispatcher.features.merging.merger import RequestMerger
from dispatcher.features.models import status as models
from dispatcher.features.models.model_router import ModelRouter
from dispatcher.features.models.warm_up_runner import WarmUpRunner
from dispatcher.features.sequences import status as sequences
from dispatcher.features.sequences.completions import end_turn
from dispatcher.features.sequences.turn_checker import TurnChecker
from dispatcher.features.sequences.upkeep import SequenceUpkeep
from dispatcher.kernel.hooks import Hooks, join_hooks

if TYPE_CHECKING:
    from dispatcher.features.models.servers import ModelServers
    from dispatcher.kernel.context import KernelContext


class AllFeatures:
    """The features of one process. `servers` calls model servers directly, for warm-ups."""

    def __init__(self, context: KernelContext, servers: ModelServers | None = None) -> None:
        self.merger = RequestMerger(context)
        self.turn_checker = TurnChecker(context)
        self.model_router = ModelRouter(context)
        self.warm_ups = WarmUpRunner(context, self.model_router.versions, servers)
        upkeep = SequenceUpkeep(context)
        first = Hooks(
            rewrite_request=(upkeep.name_override,),
            first_stages=(self.turn_checker,),
            stages=(self.model_router,),
            lease_parts=(self.merger, self.turn_checker, self.model_router),
            grouping=self.merger,
            loads=(self.warm_ups,),
            on_counts=(upkeep.log_events,),
            after_sweep=(upkeep.after_sweep,),
            end_request=(end_turn,),
            claims_request=(self.merger.has_rule_for,),
            explain_waiting=(self.model_router.explain_waiting, upkeep.explain_waiting),
            status=(
                partial(sequences.build_status, context, self.turn_checker),
                partial(models.build_status, self.model_router, self.warm_ups),
            ),
            tasks=(("model-requests", self.model_router.run_checks), ("warm-up", self.warm_ups.run)),
            reconfigure=(self.merger.reconfigure, self.model_router.reconfigure, self.warm_ups.reconfigure),
        )
        found = [module.build_hooks(context) for module in import_modules("hooks").values()]
        # Requests are merged as they are sent, after all other features have changed them.
        last = Hooks(stages=(self.merger,), status=(partial(merging.build_status, context, self.merger),))
        self.hooks = join_hooks([first, *found, last])
