"""Traces of a removed release, and refusals before the cluster changes, on a real control plane."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
import yaml

from tests.cluster.conftest import Helm
from tests.cluster.control_plane import ControlPlane, Object
from tests.deploy.release import CHART
from tests.support import wait_until_sync

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

NAME = "night-batch-dispatcher"
GIVEN: dict[str, Any] = {"pool": {"name": "qwen"}, "gateway": {"url": "http://gateway"}}
MORE: dict[str, Any] = {**GIVEN, "replicas": 2, "networkPolicy": {"enabled": True}}
BROKEN: dict[str, Any] = {
    "extraObjects": [{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "zz"}, "spec": {}}]
}
"""Only the API server knows that a Service needs ports; Helm makes the policies before it."""
LOCKED: Object = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def picker() -> Object:
    """The Deployment of an endpoint picker, whose pods the stand-in for the kubelet tends."""
    labels = {"app.kubernetes.io/name": "picker"}
    container = {"name": "epp", "image": "picker", "securityContext": LOCKED}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "picker"},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"terminationGracePeriodSeconds": 130, "containers": [container]},
            },
        },
    }


def test_uninstalled_sidecar_leaves_a_picker_that_can_start(plane: ControlPlane, helm: Helm) -> None:
    namespace = plane.namespace("sidecar")
    deployments = f"/apis/apps/v1/namespaces/{namespace}/deployments"
    maps = f"/api/v1/namespaces/{namespace}/configmaps"
    before = plane.apply(deployments, picker())["spec"]["template"]
    given = {
        **GIVEN,
        "redis": {"existingSecret": {"name": "queue"}},
        "test": {"enabled": False},
        "sidecar": {
            "enabled": True,
            "deployment": "picker",
            "serviceAccount": "default",
            "podLabels": {"app.kubernetes.io/name": "picker"},
        },
    }

    def patch(key: str) -> Object:
        change = yaml.safe_load(plane.ask("GET", f"{maps}/{NAME}-sidecar")["data"][key])
        kind = {"Content-Type": "application/strategic-merge-patch+json"}
        answer = plane.admin.patch(f"{deployments}/picker", content=json.dumps(change), headers=kind)
        assert answer.is_success, answer.text
        return dict(answer.json()["spec"]["template"])

    helm.install("night", namespace, given)
    joined = patch("patch.yaml")["spec"]
    assert {each["name"] for each in joined["containers"]} == {"dispatcher", "epp"}
    said = helm.uninstall("night", namespace)
    assert "kept due to the resource policy" in said
    for volume in joined["volumes"]:
        if "configMap" in volume:
            assert plane.get(f"{maps}/{volume['configMap']['name']}"), (
                "the next pod would wait for it for ever"
            )
    after = patch("remove.yaml")
    assert after["spec"].pop("terminationGracePeriodSeconds") == 135
    before["spec"].pop("terminationGracePeriodSeconds")
    assert after["spec"] == before["spec"]
    assert after["metadata"].get("annotations", {}) == {}
    helm.install("night", namespace, given)  # what was kept is taken over by the same release


def test_releases_with_the_longest_names_run_side_by_side(plane: ControlPlane, helm: Helm) -> None:
    namespace = plane.namespace("long")
    for end in "ab":
        name = "n" * 52 + end
        helm.install(name, namespace, GIVEN)
        for component in ("dispatcher", "valkey"):
            labels = f"app.kubernetes.io/component={component},app.kubernetes.io/instance={name}"
            assert len(plane.items(f"/api/v1/namespaces/{namespace}/pods", labelSelector=labels)) == 1


def test_volume_that_cannot_change_is_refused_before_anything_is_changed(
    plane: ControlPlane, helm: Helm
) -> None:
    namespace = plane.namespace("resized")
    server = f"/apis/apps/v1/namespaces/{namespace}/statefulsets/{NAME}-valkey"
    policies = f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
    helm.install("night", namespace, GIVEN)
    for volume, why in (
        ({"size": "4Gi"}, "valkey.persistence.size: is 4Gi, and this release was installed with 2Gi, which"),
        (
            {"storageClass": "fast"},
            'valkey.persistence.storageClass: is "fast", and this release was installed',
        ),
        (
            {"enabled": False},
            "valkey.persistence.enabled: is false, and this release was installed with true",
        ),
    ):
        changed = {**MORE, "valkey": {"persistence": volume}}
        done = helm.tried("upgrade", "night", str(CHART), "--namespace", namespace, values=changed)
        assert done.returncode == 1
        assert why in done.stderr
        assert f"kubectl -n {namespace} delete statefulset {NAME}-valkey --cascade=orphan" in done.stderr
        assert plane.items(policies) == []
    helm.upgrade("night", namespace, {**GIVEN, "valkey": {"persistence": {"size": "2048Mi"}}})

    # The way that the sentence names: the pod and its volume stay.
    plane.ask("DELETE", server, {"propagationPolicy": "Orphan"})
    wait_until_sync(lambda: plane.get(server) is None, 30, what="the StatefulSet is gone", every_s=0.1)
    helm.upgrade("night", namespace, {**GIVEN, "valkey": {"persistence": {"size": "4Gi"}}})
    (claim,) = plane.ask("GET", server)["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "4Gi"


@pytest.mark.parametrize("atomic", [True, False])
def test_failed_upgrades_leave_nothing_where_each_is_rolled_back_at_once(
    plane: ControlPlane, helm: Helm, atomic: bool
) -> None:
    """Without that Helm forgets what the first of two failed upgrades made: the guide recommends the flag."""
    namespace = plane.namespace("failed")
    before = plane.everything().keys()
    helm.install("night", namespace, GIVEN)
    for values in ({**MORE, **BROKEN}, {**GIVEN, **BROKEN}):
        flags = ["--atomic", "--timeout", "120s"] if atomic else []
        done = helm.tried("upgrade", "night", str(CHART), "--namespace", namespace, *flags, values=values)
        assert done.returncode == 1, done.stdout
        assert "spec.ports: Required value" in done.stderr
    helm.rollback("night", namespace, 1)
    helm.uninstall("night", namespace)
    volume = {f"/api/v1/persistentvolumeclaims {namespace}/data-{NAME}-valkey-0"}
    policies = "/apis/networking.k8s.io/v1/networkpolicies"
    forgotten = {f"{policies} {namespace}/{NAME}", f"{policies} {namespace}/{NAME}-valkey"}
    forgotten.add(f"/apis/policy/v1/poddisruptionbudgets {namespace}/{NAME}")
    expected = volume if atomic else volume | forgotten

    def left() -> set[str]:
        return set(plane.everything().keys() - before)

    with suppress(pytest.fail.Exception):
        wait_until_sync(lambda: left() == expected, 60, every_s=0.5)
    assert left() == expected


def test_release_without_the_prometheus_operator_says_what_it_leaves_out(
    plane: ControlPlane, helm: Helm
) -> None:
    monitoring = {"podMonitor": {"enabled": True}, "rules": {"enabled": True}}
    said = helm.install("night", plane.namespace("unwatched"), {**GIVEN, "monitoring": monitoring})
    assert "Left out: PodMonitor, PrometheusRule." in said
