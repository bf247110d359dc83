"""Find the credentials for a Kubernetes cluster. This module imports nothing that is slow to import."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dispatcher.settings.model import Settings

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """Credentials for a cluster: the pod's service account, else a kubeconfig. False if there is neither."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    service_account: Path = SERVICE_ACCOUNT

    @property
    def is_in_cluster(self) -> bool:
        return bool(self.environ.get("KUBERNETES_SERVICE_HOST")) and (self.service_account / "token").exists()

    @property
    def kubeconfig(self) -> str:
        """Path of the kubeconfig, or several paths separated by colons. Empty if there is none."""
        named = self.environ.get("KUBECONFIG", "")
        if named:
            return named
        usual = Path(self.environ.get("HOME", "/nonexistent")) / ".kube" / "config"
        return str(usual) if usual.exists() else ""

    @property
    def kubeconfigs(self) -> tuple[Path, ...]:
        return tuple(Path(name) for name in self.kubeconfig.split(os.pathsep) if name)

    @property
    def is_kubeconfig_missing(self) -> bool:
        """True if KUBECONFIG is used and none of the files that it names exists."""
        return not self.is_in_cluster and not any(path.exists() for path in self.kubeconfigs)

    def __bool__(self) -> bool:
        return self.is_in_cluster or bool(self.kubeconfig)

    @property
    def connection_hint(self) -> str:
        """Parts to look at if no API server answers."""
        if self.is_in_cluster:
            return "the API server, and the network policies and firewalls between it and this pod"
        return f"the address of the API server in {self}, and whether it runs"

    def __str__(self) -> str:
        return "the pod's service account" if self.is_in_cluster else f"kubeconfig {self.kubeconfig}"


NO_CLUSTER = ClusterAccess({}, Path())
"""Access without any cluster."""


def find_cluster_access(settings: Settings) -> ClusterAccess:
    """Return the access to the cluster of the pool, if the pool is watched."""
    return ClusterAccess() if settings.signals.watches_pool else NO_CLUSTER
