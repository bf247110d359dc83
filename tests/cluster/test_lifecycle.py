"""Objects that a removed release leaves, and upgrades rejected before a change, on a real control plane."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
import yaml

from tests.cluster.conftest import Helm
from tests.cluster.control_plane import ControlPlane, Object
from tests.cluster.kubelet import Kubelet
from tests.deploy.release import CHART
from tests.support import wait_until_sync

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

NAME = "night-batch-dispatcher"
BASE_VALUES: dict[str, Any] = {
    "pool": {"name": "qwen"},
    "gateway": {"url": "http://gateway"},
    "image": {"registry": "registry.example", "tag": "1"},
}
MORE_OBJECTS: dict[str, Any] = {**BASE_VALUES, "replicas": 2, "networkPolicy": {"enabled": True}}
INVALID_OBJECT: dict[str, Any] = {
    "extraObjects": [{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "zz"}, "spec": {}}]
}
"""An object that only the API server rejects: a Service needs ports. Helm creates policies before it."""
RESTRICTED_CONTEXT: Object = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def make_picker_deployment() -> Object:
    """Return the Deployment of an endpoint picker, whose pods the stand-in for the kubelet handles."""
    labels = {"app.kubernetes.io/name": "picker"}
    container = {"name": "epp", "image": "picker", "securityContext": RESTRICTED_CONTEXT}
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
    namespace = plane.create_namespace("sidecar")
    deployments = f"/apis/apps/v1/namespaces/{namespace}/deployments"
    maps = f"/api/v1/namespaces/{namespace}/configmaps"
    before = plane.apply(deployments, make_picker_deployment())["spec"]["template"]
    values = {
        **BASE_VALUES,
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
        change = yaml.safe_load(plane.request("GET", f"{maps}/{NAME}-sidecar")["data"][key])
        kind = {"Content-Type": "application/strategic-merge-patch+json"}
        answer = plane.admin.patch(f"{deployments}/picker", content=json.dumps(change), headers=kind)
        assert answer.is_success, answer.text
        return dict(answer.json()["spec"]["template"])

    helm.install("night", namespace, values)
    patched = patch("patch.yaml")["spec"]
    assert {each["name"] for each in patched["containers"]} == {"dispatcher", "epp"}
    output = helm.uninstall("night", namespace)
    assert "kept due to the resource policy" in output
    for volume in patched["volumes"]:
        if "configMap" in volume:
            assert plane.get(f"{maps}/{volume['configMap']['name']}"), (
                "otherwise the next pod would never start"
            )
    after = patch("remove.yaml")
    assert after["spec"].pop("terminationGracePeriodSeconds") == 135
    before["spec"].pop("terminationGracePeriodSeconds")
    assert after["spec"] == before["spec"]
    assert after["metadata"].get("annotations", {}) == {}
    helm.install("night", namespace, values)  # The same release adopts the kept objects.


def test_releases_with_names_of_maximum_length_do_not_conflict(plane: ControlPlane, helm: Helm) -> None:
    namespace = plane.create_namespace("long")
    for suffix in "ab":
        name = "n" * 52 + suffix
        helm.install(name, namespace, BASE_VALUES)
        for component in ("dispatcher", "valkey"):
            labels = f"app.kubernetes.io/component={component},app.kubernetes.io/instance={name}"
            assert len(plane.list_objects(f"/api/v1/namespaces/{namespace}/pods", labelSelector=labels)) == 1


def test_volume_change_that_is_impossible_is_rejected_before_any_change(
    plane: ControlPlane, helm: Helm
) -> None:
    namespace = plane.create_namespace("resized")
    stateful_set = f"/apis/apps/v1/namespaces/{namespace}/statefulsets/{NAME}-valkey"
    policies = f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
    helm.install("night", namespace, BASE_VALUES)
    for volume, message in (
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
        changed = {**MORE_OBJECTS, "valkey": {"persistence": volume}}
        done = helm.run_unchecked("upgrade", "night", str(CHART), "--namespace", namespace, values=changed)
        assert done.returncode == 1
        assert message in done.stderr
        assert f"kubectl -n {namespace} delete statefulset {NAME}-valkey --cascade=orphan" in done.stderr
        assert plane.list_objects(policies) == []
    helm.upgrade("night", namespace, {**BASE_VALUES, "valkey": {"persistence": {"size": "2048Mi"}}})

    # The documented way, which keeps the pod and its volume.
    plane.request("DELETE", stateful_set, {"propagationPolicy": "Orphan"})
    wait_until_sync(lambda: plane.get(stateful_set) is None, 30, what="the StatefulSet is gone", every_s=0.1)
    helm.upgrade("night", namespace, {**BASE_VALUES, "valkey": {"persistence": {"size": "4Gi"}}})
    (claim,) = plane.request("GET", stateful_set)["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "4Gi"


@pytest.mark.parametrize("atomic", [True, False])
def test_failed_upgrades_leave_no_objects_if_each_is_rolled_back(
    plane: ControlPlane, helm: Helm, atomic: bool
) -> None:
    """The guide recommends `--atomic`: without it Helm forgets objects of an earlier failed upgrade."""
    namespace = plane.create_namespace("failed")
    before = plane.list_all_objects().keys()
    helm.install("night", namespace, BASE_VALUES)
    for values in ({**MORE_OBJECTS, **INVALID_OBJECT}, {**BASE_VALUES, **INVALID_OBJECT}):
        flags = ["--atomic", "--timeout", "120s"] if atomic else []
        done = helm.run_unchecked(
            "upgrade", "night", str(CHART), "--namespace", namespace, *flags, values=values
        )
        assert done.returncode == 1, done.stdout
        assert "spec.ports: Required value" in done.stderr
    helm.rollback("night", namespace, 1)
    helm.uninstall("night", namespace)
    volume = {f"/api/v1/persistentvolumeclaims {namespace}/data-{NAME}-valkey-0"}
    policies = "/apis/networking.k8s.io/v1/networkpolicies"
    forgotten = {f"{policies} {namespace}/{NAME}", f"{policies} {namespace}/{NAME}-valkey"}
    forgotten.add(f"/apis/policy/v1/poddisruptionbudgets {namespace}/{NAME}")
    expected = volume if atomic else volume | forgotten

    def find_remaining() -> set[str]:
        return set(plane.list_all_objects().keys() - before)

    with suppress(pytest.fail.Exception):
        wait_until_sync(lambda: find_remaining() == expected, 60, every_s=0.5)
    assert find_remaining() == expected


def test_failed_check_leaves_no_objects(plane: ControlPlane, helm: Helm, node: Kubelet) -> None:
    """An uninstall deletes no hooks, so each failed hook must be deleted when it fails."""
    namespace = plane.create_namespace("unchecked")
    before = plane.list_all_objects().keys()
    components_run: list[str] = []

    def fail(pod: Object) -> int:
        components_run.append(pod["metadata"]["labels"]["app.kubernetes.io/component"])
        return 1

    node.run_to_completion = fail
    values = {**BASE_VALUES, "checkHook": {"enabled": True}, "valkey": {"persistence": {"keep": False}}}
    options = ("--namespace", namespace, "--timeout", "20s")  # The Job itself would retry for minutes.
    done = helm.run_unchecked("install", "night", str(CHART), *options, values=values)
    assert done.returncode == 1
    assert "failed post-install" in done.stderr
    assert set(components_run) == {"check"}
    helm.uninstall("night", namespace)

    def find_remaining() -> set[str]:
        return set(plane.list_all_objects().keys() - before)

    with suppress(pytest.fail.Exception):
        wait_until_sync(lambda: not find_remaining(), 60, every_s=0.5)
    assert find_remaining() == set()


def test_release_without_the_prometheus_operator_reports_omitted_monitors(
    plane: ControlPlane, helm: Helm
) -> None:
    monitoring = {"podMonitor": {"enabled": True}, "rules": {"enabled": True}}
    output = helm.install(
        "night", plane.create_namespace("unwatched"), {**BASE_VALUES, "monitoring": monitoring}
    )
    assert "Left out: PodMonitor, PrometheusRule." in output
