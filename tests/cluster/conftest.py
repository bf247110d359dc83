"""An API server for the session, and helm to install releases with."""

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
import yaml

from tests.cluster.control_plane import ADMIN, BUILT, OWN_ADDRESS, ControlPlane, control_plane
from tests.deploy.release import CHART
from tests.support import require_tool


@dataclass(frozen=True)
class Helm:
    """The real one, as the administrator."""

    kubeconfig: Path
    home: Path

    def __call__(self, *arguments: str, values: Mapping[str, Any] | None = None) -> str:
        """Run it and return what it says, warnings of the API server among it; it must succeed."""
        given = ["--values", "-"] if values is not None else []
        done = subprocess.run(
            [require_tool("helm"), *arguments, *given],
            input=json.dumps(values),
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig), "HOME": str(self.home)},
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def install(self, name: str, namespace: str, values: Mapping[str, Any], *options: str) -> str:
        return self("install", name, str(CHART), "--namespace", namespace, *options, values=values)

    def upgrade(self, name: str, namespace: str, values: Mapping[str, Any]) -> str:
        return self("upgrade", name, str(CHART), "--namespace", namespace, values=values)

    def uninstall(self, name: str, namespace: str) -> str:
        return self("uninstall", name, "--namespace", namespace, "--wait", "--timeout", "60s")


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
        for path in sorted((BUILT / "crds").glob("*.yaml")):
            made.define(yaml.safe_load(path.read_text()))
        yield made


@pytest.fixture(scope="session")
def helm(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(plane.kubeconfig("admin", ADMIN), tmp_path_factory.mktemp("helm"))
