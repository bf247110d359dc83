"""The parts of models that take part in the kernel."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dispatcher.features.models.model_router import ModelRouter
from dispatcher.features.models.options import ModelOptions
from dispatcher.features.models.status import build_status
from dispatcher.features.models.warm_up_runner import WarmUpRunner
from dispatcher.kernel.hooks import Hooks, join_hooks
from dispatcher.signals.kubernetes.cluster import find_cluster_access

if TYPE_CHECKING:
    from dispatcher.kernel.context import KernelContext
    from dispatcher.settings.model import Settings


def build_hooks(context: KernelContext) -> Hooks:
    router = ModelRouter(context)
    warm_ups = WarmUpRunner(context, router.versions)
    hooks = Hooks(
        stages=(router,),
        lease_parts=(router,),
        loads=(warm_ups,),
        explain_waiting=(router.explain_waiting,),
        status=(partial(build_status, router, warm_ups),),
        tasks=(("model-requests", router.run_checks), ("warm-up", warm_ups.run)),
        reconfigure=(router.reconfigure, warm_ups.reconfigure),
    )
    settings = context.options.of(ModelOptions).settings
    if settings is None:
        return hooks
    return join_hooks([hooks, _watch_servers(context, settings, router, warm_ups)])


def _watch_servers(
    context: KernelContext, settings: Settings, router: ModelRouter, warm_ups: WarmUpRunner
) -> Hooks:
    """Ask the model servers which models they serve, and let warm-ups call them directly."""
    # Imported here because the client libraries are slow to import, and simulations do not need them.
    from dispatcher.features.models.watch import ModelWatch
    from dispatcher.gateway.direct import DirectServers

    def reconfigure() -> None:
        new_settings = context.options.of(ModelOptions).settings
        if new_settings is not None:
            watch.reconfigure(new_settings, find_cluster_access(new_settings))

    watch = ModelWatch(settings, router.update_listings, access=find_cluster_access(settings))
    warm_ups.servers = DirectServers(watch.find_server, lambda: watch.max_answer_bytes)
    return Hooks(
        on_endpoints=(watch.update_endpoints,),
        tasks=(("models", watch.run),),
        reconfigure=(reconfigure,),
    )
