"""Where the way into a Kubernetes cluster is looked for. Imports nothing that takes time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """The pod's service account, else a kubeconfig. False: there is neither."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    service_account: Path = SERVICE_ACCOUNT

    @property
    def in_cluster(self) -> bool:
        return bool(self.environ.get("KUBERNETES_SERVICE_HOST")) and (self.service_account / "token").exists()

    @property
    def kubeconfig(self) -> str:
        """A path, or several with colons between; empty: none is there."""
        named = self.environ.get("KUBECONFIG", "")
        if named:
            return named
        usual = Path(self.environ.get("HOME", "/nonexistent")) / ".kube" / "config"
        return str(usual) if usual.exists() else ""

    @property
    def kubeconfigs(self) -> tuple[Path, ...]:
        return tuple(Path(name) for name in self.kubeconfig.split(os.pathsep) if name)

    @property
    def missing(self) -> bool:
        """Whether KUBECONFIG is what counts, and nothing that it names is there."""
        return not self.in_cluster and not any(path.exists() for path in self.kubeconfigs)

    def __bool__(self) -> bool:
        return self.in_cluster or bool(self.kubeconfig)

    def __str__(self) -> str:
        return "the pod's service account" if self.in_cluster else f"kubeconfig {self.kubeconfig}"


NO_CLUSTER = ClusterAccess({}, Path())
"""For whoever needs none."""
