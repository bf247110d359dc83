"""A control plane for the session, with a stand-in for its nodes, and helm to install releases with."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.control_plane import ADMIN, OWN_ADDRESS, ControlPlane, control_plane
from tests.cluster.kubelet import Kubelet, kubelet
from tests.deploy.release import CHART
from tests.support import require_tool


@dataclass(frozen=True)
class Helm:
    """The real one, as the administrator."""

    kubeconfig: Path
    home: Path

    def __call__(self, *arguments: str, values: Mapping[str, Any] | None = None) -> str:
        """Run it and return what it says, warnings of the API server among it; it must succeed."""
        done = self.tried(*arguments, values=values)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def tried(
        self, *arguments: str, values: Mapping[str, Any] | None = None
    ) -> subprocess.CompletedProcess[str]:
        given = ["--values", "-"] if values is not None else []
        return subprocess.run(
            [require_tool("helm"), *arguments, *given],
            input=json.dumps(values),
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig), "HOME": str(self.home)},
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )

    def install(self, name: str, namespace: str, values: Mapping[str, Any]) -> str:
        return self("install", name, str(CHART), "--namespace", namespace, *_WAIT, values=values)

    def upgrade(self, name: str, namespace: str, values: Mapping[str, Any]) -> str:
        return self("upgrade", name, str(CHART), "--namespace", namespace, *_WAIT, values=values)

    def rollback(self, name: str, namespace: str, revision: int) -> str:
        return self("rollback", name, str(revision), "--namespace", namespace, *_WAIT)

    def uninstall(self, name: str, namespace: str) -> str:
        return self("uninstall", name, "--namespace", namespace, *_WAIT)


_WAIT = ("--wait", "--timeout", "180s")


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with socket.socket() as probe:
        try:
            probe.bind((OWN_ADDRESS, 0))
        except OSError:
            pytest.fail(
                f"{OWN_ADDRESS} is not this machine's: `make cluster-test` makes a network that has it"
            )
    with control_plane(tmp_path_factory.mktemp("plane")) as made:
        yield made


@pytest.fixture(scope="session")
def _kubelet(plane: ControlPlane) -> Iterator[Kubelet]:
    with kubelet(plane) as made:
        yield made


@pytest.fixture(autouse=True)
def node(_kubelet: Kubelet) -> Iterator[Kubelet]:
    """Each test finds it as it is by itself."""
    usual = (_kubelet.readies, _kubelet.work)
    yield _kubelet
    _kubelet.readies, _kubelet.work = usual


@pytest.fixture(scope="session")
def helm(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(plane.kubeconfig("admin", ADMIN), tmp_path_factory.mktemp("helm"))
