"""Fixtures of a control plane, a stand-in for its nodes, and helm."""

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

from tests.cluster.control_plane import ADMIN, OWN_ADDRESS, ControlPlane, run_control_plane
from tests.cluster.kubelet import Kubelet, run_kubelet
from tests.deploy.release import CHART
from tests.support import require_tool


@dataclass(frozen=True)
class Helm:
    """Runs the real helm as the administrator."""

    kubeconfig: Path
    home: Path

    def __call__(self, *arguments: str, values: Mapping[str, Any] | None = None) -> str:
        """Run helm, which must succeed, and return its output with the warnings of the API server."""
        done = self.run_unchecked(*arguments, values=values)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def run_unchecked(
        self, *arguments: str, values: Mapping[str, Any] | None = None
    ) -> subprocess.CompletedProcess[str]:
        value_options = ["--values", "-"] if values is not None else []
        return subprocess.run(
            [require_tool("helm"), *arguments, *value_options],
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
                f"this machine does not have {OWN_ADDRESS}: `make cluster-test` creates a network that has it"
            )
    with run_control_plane(tmp_path_factory.mktemp("plane")) as started:
        yield started


@pytest.fixture(scope="session")
def session_kubelet(plane: ControlPlane) -> Iterator[Kubelet]:
    with run_kubelet(plane) as started:
        yield started


@pytest.fixture(autouse=True)
def node(session_kubelet: Kubelet) -> Iterator[Kubelet]:
    """Return the stand-in for the kubelet, and restore its defaults after the test."""
    defaults = (session_kubelet.makes_pods_ready, session_kubelet.run_to_completion)
    yield session_kubelet
    session_kubelet.makes_pods_ready, session_kubelet.run_to_completion = defaults


@pytest.fixture(scope="session")
def helm(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(plane.write_kubeconfig("admin", ADMIN), tmp_path_factory.mktemp("helm"))
