"""Names, images, pods and monitors of a release meet the requirements of clusters and their operators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.cases import BASIC, CASES
from tests.deploy.release import OPERATOR, Release, helm, render, render_case
from tests.deploy.schema_check import KUBERNETES, find_schema_errors

MAX_RELEASE_NAME = 53
"""Maximum length of a release name in Helm."""
MAX_LABEL = 63
REVISION_SUFFIX = 11
"""Length of the suffix that the StatefulSet controller adds to its name in a label of its pods."""
ALL_OBJECTS: dict[str, Any] = {
    **CASES["network-policy"],
    **CASES["pod-monitor"],
    "checkHook": {"enabled": True},
    "keda": {"enabled": True},
    "inferenceObjective": {"create": True},
}


def render_with_arguments(*arguments: str, values: dict[str, Any]) -> Release:
    """Render with the given arguments, and without the kinds of the Prometheus operator."""
    done = helm("template", "night", "--namespace", "llm", *arguments, values={**BASIC, **values})
    assert done.returncode == 0, done.stderr
    return Release(done.stdout)


# Names


@pytest.mark.parametrize("override", [False, True])
@pytest.mark.parametrize("length", [1, 20, 28, 29, 45, 46, MAX_RELEASE_NAME])
def test_release_name_of_any_length_fits_every_label(length: int, override: bool, schemas: Path) -> None:
    name = "n" * length
    values = {**ALL_OBJECTS, "fullnameOverride": name} if override else ALL_OBJECTS
    release = render(values, "night" if override else name)
    full_name = name if override else f"{name}-batch-dispatcher"
    prefix = release.find_one("Deployment")["metadata"]["name"]
    assert (prefix == full_name) == (len(full_name) <= 45)
    assert len(prefix) <= 45
    revision = len(release.find_one("StatefulSet")["metadata"]["name"]) + REVISION_SUFFIX
    assert revision <= MAX_LABEL
    for each in release.objects:
        max_length = 253 if each["kind"] in {"ConfigMap", "Role", "ClusterRole"} else MAX_LABEL
        assert len(each["metadata"]["name"]) <= max_length
        assert all(len(value) <= MAX_LABEL for value in each["metadata"]["labels"].values())
    assert find_schema_errors(release.text, KUBERNETES[-1], schemas) == []


def test_long_release_names_with_the_same_start_have_no_object_in_common() -> None:
    one, two = (render(ALL_OBJECTS, "n" * (MAX_RELEASE_NAME - 1) + end) for end in "ab")
    names = [{(each["kind"], each["metadata"]["name"]) for each in release.objects} for release in (one, two)]
    assert names[0] & names[1] == set()


def test_release_name_that_is_invalid_for_a_service_is_rejected() -> None:
    """Helm accepts both names, but Kubernetes would reject the Service during the installation."""
    for name in ("1night", "night.shift"):
        done = helm("template", name, values=BASIC)
        assert done.returncode == 1
        assert f'would be called "{name}-batch-dispatcher", which Kubernetes rejects' in done.stderr
        assert helm("template", name, values={**BASIC, "fullnameOverride": "night"}).returncode == 0


# Images and pods


def test_registry_is_prefixed_to_the_image_name() -> None:
    release = render_case("pod-options")
    assert release.container["image"].startswith("registry.example:5000/ml/batch-dispatcher:")
    (server,) = release.find_one("StatefulSet")["spec"]["template"]["spec"]["containers"]
    assert server["image"] == "registry.example:5000/valkey/valkey:8.1"
    pinned = {"registry": "registry.example", "repository": "a/b", "digest": "sha256:" + "1" * 64}
    assert render({"image": pinned}).container["image"] == "registry.example/a/b@sha256:" + "1" * 64


def test_pod_options_are_set_in_the_pods() -> None:
    release = render_case("pod-options")
    assert [each["name"] for each in release.pod["initContainers"]] == ["first"]
    ours = {owner: pod["spec"] for owner, pod in release.pods() if not owner.startswith("StatefulSet")}
    assert len(ours) == 2
    for pod in ours.values():
        assert pod["runtimeClassName"] == "gvisor"
        assert pod["dnsPolicy"] == "None"
        assert pod["dnsConfig"]["nameservers"] == ["192.0.2.1"]
        (container,) = pod["containers"]
        assert container["envFrom"][0] == {"secretRef": {"name": "proxy"}}
        limits = {"hugepages-2Mi": "4Mi", "example.com/device": 1, "ephemeral-storage": "1Gi"}
        assert container["resources"]["limits"] == limits
    assert release.container["readinessProbe"]["successThreshold"] == 2


def test_pod_with_host_network_still_resolves_services(schemas: Path) -> None:
    release = render({"hostNetwork": True})
    assert (release.pod["hostNetwork"], release.pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert find_schema_errors(release.text, KUBERNETES[-1], schemas) == []
    assert render({"hostNetwork": True, "dnsPolicy": "Default"}).pod["dnsPolicy"] == "Default"
    assert not {"hostNetwork", "dnsPolicy", "dnsConfig", "initContainers"} & set(render({}).pod)


def test_pod_label_overrides_common_label() -> None:
    release = render({"commonLabels": {"team": "all"}, "podLabels": {"team": "pods"}})
    assert release.text.count("team: pods") == 1
    labels = release.deployment["spec"]["template"]["metadata"]["labels"]
    assert (labels["team"], release.deployment["metadata"]["labels"]["team"]) == ("pods", "all")


def test_every_container_limits_its_ephemeral_storage() -> None:
    for owner, pod in render({**ALL_OBJECTS}).pods():
        for container in pod["spec"]["containers"]:
            for kind in ("requests", "limits"):
                assert "ephemeral-storage" in container["resources"][kind], owner


def test_chart_sets_no_user_ids_on_openshift() -> None:
    openshift = ("--api-versions", "security.openshift.io/v1")
    release = render_with_arguments(*openshift, values={"checkHook": {"enabled": True}})
    contexts = {owner: pod["spec"]["securityContext"] for owner, pod in release.pods()}
    assert len(contexts) == 4
    for owner, context in contexts.items():
        assert context == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}, owner
    own = render_with_arguments(*openshift, values={"podSecurityContext": {"runAsUser": 7}}).pod[
        "securityContext"
    ]
    assert (own.get("runAsUser"), own.get("fsGroup")) == (7, None)
    sidecar = render_with_arguments(*openshift, values=dict(CASES["sidecar"])).container["securityContext"]
    assert "runAsUser" not in sidecar
    assert render_with_arguments(values={}).pod["securityContext"]["runAsUser"] == 65532


# Monitors


def test_monitors_are_left_out_if_the_cluster_does_not_serve_them() -> None:
    enabled_monitors: dict[str, Any] = {"podMonitor": {"enabled": True}, "rules": {"enabled": True}}
    without = render_with_arguments(values={"monitoring": enabled_monitors})
    assert not {"PodMonitor", "PrometheusRule"} & set(without.kinds)
    served = render_with_arguments(*OPERATOR, values={"monitoring": enabled_monitors})
    forced = render_with_arguments(values={"monitoring": {**enabled_monitors, "force": True}})
    assert served.kinds == forced.kinds == sorted([*without.kinds, "PodMonitor", "PrometheusRule"])


def test_alert_links_to_the_runbook_if_its_url_is_configured() -> None:
    for url, name, link_start in (
        ("https://wiki/runbook.md", "runbook_url", "https://wiki/runbook.md#batchdispatcher"),
        ("", "runbook", "docs/how-to/runbook.md#batchdispatcher"),
    ):
        release = render({"monitoring": {"runbookUrl": url, "rules": {"enabled": True}}})
        groups = release.find_one("PrometheusRule")["spec"]["groups"]
        alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
        assert len(alerts) > 20
        for alert in alerts:
            links = {key: text for key, text in alert["annotations"].items() if key.startswith("runbook")}
            assert list(links) == [name]
            assert links[name].startswith(link_start)


# A sidecar


def test_uninstalling_a_sidecar_keeps_config_maps_mounted_by_the_picker() -> None:
    release = render_case("sidecar")
    kept = {
        each["metadata"]["name"]
        for each in release.objects
        if each["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"
    }
    mounted = {each["configMap"]["name"] for each in release.pod["volumes"] if "configMap" in each}
    assert mounted == {"night-batch-dispatcher"}
    assert kept == mounted | {"night-batch-dispatcher-sidecar"}
    for name in set(CASES) - {"sidecar"}:
        assert "helm.sh/resource-policy" not in render_case(name).text, name


def test_removal_patch_removes_the_containers_and_volumes_of_the_sidecar() -> None:
    volumes = {"extraVolumes": [{"name": "more", "emptyDir": {}}]}
    release = render({**CASES["sidecar"], **volumes})
    removed = yaml.safe_load(release.find_one("ConfigMap", "-sidecar")["data"]["remove.yaml"])["spec"][
        "template"
    ]["spec"]
    for part in ("containers", "volumes"):
        assert {each["name"] for each in removed[part]} == {each["name"] for each in release.pod[part]}, (
            json.dumps(removed)
        )
        assert all(each["$patch"] == "delete" for each in removed[part])
