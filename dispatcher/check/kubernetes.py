"""Check the cluster: the endpoints of the pool and its endpoint picker, as the Kubernetes watch sees them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from dispatcher.check.finding import Finding, Findings, Level
from dispatcher.settings.model import PoolSettings, Settings
from dispatcher.settings.signals import EppSettings
from dispatcher.signals.kubernetes.cluster import ClusterAccess

if TYPE_CHECKING:
    from dispatcher.signals.kubernetes.capacity import Endpoints

TIMEOUT_S = 3.0
NO_KUBERNETES = "no Kubernetes here: neither a service account nor a kubeconfig"

ClusterLookup = Callable[[], Awaitable[tuple[Findings, tuple[str, ...] | None]]]


def build_lookup(
    settings: Settings, *, access: ClusterAccess | None = None, timeout_s: float = TIMEOUT_S
) -> ClusterLookup:
    """Return a function that looks at the cluster once.

    The function returns the findings and the addresses of the endpoint picker, or `None` if the addresses are
    not known. The client library is imported here, and not by the function, whose time is limited.
    """
    from dispatcher.signals.kubernetes import api
    from dispatcher.signals.kubernetes.capacity import read_endpoints_once

    api.import_client()
    pool, epp = settings.pool, settings.signals.epp

    async def look_up_cluster() -> tuple[Findings, tuple[str, ...] | None]:
        found = await read_endpoints_once(pool, epp, access=access, timeout_s=timeout_s)
        return report_endpoints(pool, epp, found), found.epp_addresses

    return look_up_cluster


def report_endpoints(pool: PoolSettings, epp: EppSettings, endpoints: Endpoints) -> Findings:
    """Return the findings about the pool and its endpoint picker.

    A missing cluster is no failure: without Kubernetes the settings can name the endpoint picker.
    """
    from dispatcher.signals.kubernetes.capacity import finds_epp

    name = f"kubernetes {pool.namespace}/{pool.name}"
    if not endpoints.has_cluster:
        hint = "signals.epp.urls or signals.prometheus.url: the endpoint picker cannot be found without it"
        return [Finding("ok", name, NO_KUBERNETES, hint if finds_epp(epp) else "")]
    reported: Findings = []
    if endpoints.ready is not None:
        level: Level = "ok" if endpoints.ready > 0 else "failed"
        reported.append(Finding(level, name, f"{endpoints.ready} ready endpoints"))
    if endpoints.epp_addresses is not None:
        level = "ok" if endpoints.epp_addresses else "failed"
        what = f"replicas: {', '.join(endpoints.epp_addresses) or 'none'}"
        reported.append(Finding(level, f"{name} endpoint picker", what))
    return reported + [Finding("failed", name, problem.what, problem.hint) for problem in endpoints.problems]
