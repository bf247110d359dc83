"""Check the cluster: the endpoints of the pool and its endpoint picker, as the Kubernetes watch sees them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from dispatcher.check.finding import Finding, Findings, Level
from dispatcher.settings import EppSettings, PoolSettings, Settings
from dispatcher.signals.kubernetes.cluster import ClusterAccess

if TYPE_CHECKING:
    from dispatcher.signals.kubernetes.capacity import Endpoints

ANSWER_S = 3.0
NOWHERE = "no Kubernetes here: neither a service account nor a kubeconfig"

Look = Callable[[], Awaitable[tuple[Findings, tuple[str, ...] | None]]]


def look_around(
    settings: Settings, *, access: ClusterAccess | None = None, timeout_s: float = ANSWER_S
) -> Look:
    """Return a function that looks at the cluster once.

    The function returns the findings and the addresses of the endpoint picker, or `None` if the addresses are
    not known. The client library is imported here, and not by the function, whose time is limited.
    """
    from dispatcher.signals.kubernetes import api
    from dispatcher.signals.kubernetes.capacity import look

    api.prepare()
    pool, epp = settings.pool, settings.signals.epp

    async def looked() -> tuple[Findings, tuple[str, ...] | None]:
        found = await look(pool, epp, access=access, timeout_s=timeout_s)
        return findings(pool, epp, found), found.epp_addresses

    return looked


def findings(pool: PoolSettings, epp: EppSettings, endpoints: Endpoints) -> Findings:
    """Return the findings about the pool and its endpoint picker.

    A missing cluster is no failure: without Kubernetes the settings can name the endpoint picker.
    """
    from dispatcher.signals.kubernetes.capacity import finds_epp

    name = f"kubernetes {pool.namespace}/{pool.name}"
    if not endpoints.watched:
        hint = "signals.epp.urls or signals.prometheus.url: the endpoint picker cannot be found without it"
        return [Finding("ok", name, NOWHERE, hint if finds_epp(epp) else "")]
    told: Findings = []
    if endpoints.ready is not None:
        level: Level = "ok" if endpoints.ready > 0 else "failed"
        told.append(Finding(level, name, f"{endpoints.ready} ready endpoints"))
    if endpoints.epp_addresses is not None:
        level = "ok" if endpoints.epp_addresses else "failed"
        what = f"replicas: {', '.join(endpoints.epp_addresses) or 'none'}"
        told.append(Finding(level, f"{name} endpoint picker", what))
    return told + [Finding("failed", name, problem.what, problem.hint) for problem in endpoints.problems]
