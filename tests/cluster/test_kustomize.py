"""The production overlay of Kustomize on a real control plane."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.control_plane import ControlPlane
from tests.deploy.kustomization import NAME, build_production_overlay_without_llmd
from tests.support import wait_until_sync

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_production_overlay_runs_where_only_the_inference_extension_serves_objectives(
    plane: ControlPlane, tmp_path: Path
) -> None:
    namespace = plane.create_namespace("production")
    release = build_production_overlay_without_llmd(tmp_path, namespace=namespace)
    for manifest in release.objects:
        if manifest["apiVersion"] != "monitoring.coreos.com/v1":  # The operator is not installed here.
            plane.create(manifest)
    deployment = f"/apis/apps/v1/namespaces/{namespace}/deployments/{NAME}"
    wait_until_sync(
        lambda: plane.request("GET", deployment)["status"].get("readyReplicas") == 2,
        60,
        what="both replicas are ready",
        every_s=0.2,
    )
