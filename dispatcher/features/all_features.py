"""All features that take part in the kernel, in their order. Nothing else names them together."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dispatcher.features import ORDER, import_modules
from dispatcher.features.models import status as models
from dispatcher.features.models.model_router import ModelRouter
from dispatcher.features.models.warm_up_runner import WarmUpRunner
from dispatcher.kernel.hooks import Hooks, join_hooks

if TYPE_CHECKING:
    from dispatcher.features.models.servers import ModelServers
    from dispatcher.kernel.context import KernelContext


class AllFeatures:
    """The features of one process. `servers` calls model servers directly, for warm-ups."""

    def __init__(self, context: KernelContext, servers: ModelServers | None = None) -> None:
        self.model_router = ModelRouter(context)
        self.warm_ups = WarmUpRunner(context, self.model_router.versions, servers)
        parts = {name: module.build_hooks(context) for name, module in import_modules("hooks").items()}
        parts["models"] = Hooks(
            stages=(self.model_router,),
            lease_parts=(self.model_router,),
            loads=(self.warm_ups,),
            explain_waiting=(self.model_router.explain_waiting,),
            status=(partial(models.build_status, self.model_router, self.warm_ups),),
            tasks=(("model-requests", self.model_router.run_checks), ("warm-up", self.warm_ups.run)),
            reconfigure=(self.model_router.reconfigure, self.warm_ups.reconfigure),
        )
        self.hooks = join_hooks([parts[name] for name in ORDER if name in parts])
