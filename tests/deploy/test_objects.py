"""Names, images, pods and monitors of a release, as a cluster or its operators ask for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.cases import BASIC, CASES
from tests.deploy.conformity import KUBERNETES, faults
from tests.deploy.release import OPERATOR, Release, case, helm, render

LONGEST_RELEASE = 53
"""Characters of a release's name that Helm accepts."""
LABEL = 63
REVISION_HASH = 11
"""Characters that the StatefulSet controller puts behind its name, with a dash, in a label of its pods."""
EVERYTHING: dict[str, Any] = {
    **CASES["fenced"],
    **CASES["pods-scraped"],
    "checkHook": {"enabled": True},
    "keda": {"enabled": True},
    "inferenceObjective": {"create": True},
}


def template(*arguments: str, values: dict[str, Any]) -> Release:
    """Render with arguments of the test's own, and without the kinds of the Prometheus operator."""
    done = helm("template", "night", "--namespace", "llm", *arguments, values={**BASIC, **values})
    assert done.returncode == 0, done.stderr
    return Release(done.stdout)


# Names


@pytest.mark.parametrize("override", [False, True])
@pytest.mark.parametrize("length", [1, 20, 28, 29, 45, 46, LONGEST_RELEASE])
def test_name_of_any_length_fits_into_every_label(length: int, override: bool, schemas: Path) -> None:
    name = "n" * length
    values = {**EVERYTHING, "fullnameOverride": name} if override else EVERYTHING
    release = render(values, "night" if override else name)
    whole = name if override else f"{name}-batch-dispatcher"
    prefix = release.one("Deployment")["metadata"]["name"]
    assert (prefix == whole) == (len(whole) <= 45)
    assert len(prefix) <= 45
    revision = len(release.one("StatefulSet")["metadata"]["name"]) + REVISION_HASH
    assert revision <= LABEL
    for each in release.objects:
        longest = 253 if each["kind"] in {"ConfigMap", "Role", "ClusterRole"} else LABEL
        assert len(each["metadata"]["name"]) <= longest
        assert all(len(value) <= LABEL for value in each["metadata"]["labels"].values())
    assert faults(release.text, KUBERNETES[-1], schemas) == []


def test_two_long_names_that_begin_alike_have_no_object_in_common() -> None:
    one, two = (render(EVERYTHING, "n" * (LONGEST_RELEASE - 1) + end) for end in "ab")
    names = [{(each["kind"], each["metadata"]["name"]) for each in release.objects} for release in (one, two)]
    assert names[0] & names[1] == set()


def test_name_that_a_service_cannot_have_is_refused() -> None:
    """Helm accepts these two; Kubernetes would refuse the Service in the middle of the installation."""
    for name in ("1night", "night.shift"):
        done = helm("template", name, values=BASIC)
        assert done.returncode == 1
        assert f'would be called "{name}-batch-dispatcher", which Kubernetes refuses' in done.stderr
        assert helm("template", name, values={**BASIC, "fullnameOverride": "night"}).returncode == 0


# Images and pods


def test_registry_stands_before_the_name_of_the_image() -> None:
    release = case("pods-of-your-own-making")
    assert release.container["image"].startswith("registry.example:5000/ml/batch-dispatcher:")
    (server,) = release.one("StatefulSet")["spec"]["template"]["spec"]["containers"]
    assert server["image"] == "registry.example:5000/valkey/valkey:8.1"
    pinned = {"registry": "registry.example", "repository": "a/b", "digest": "sha256:" + "1" * 64}
    assert render({"image": pinned}).container["image"] == "registry.example/a/b@sha256:" + "1" * 64


def test_values_for_pods_reach_the_pods() -> None:
    release = case("pods-of-your-own-making")
    assert [each["name"] for each in release.pod["initContainers"]] == ["first"]
    ours = {where: pod["spec"] for where, pod in release.pods() if not where.startswith("StatefulSet")}
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


def test_pod_in_the_network_of_its_node_still_finds_services(schemas: Path) -> None:
    release = render({"hostNetwork": True})
    assert (release.pod["hostNetwork"], release.pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert faults(release.text, KUBERNETES[-1], schemas) == []
    assert render({"hostNetwork": True, "dnsPolicy": "Default"}).pod["dnsPolicy"] == "Default"
    assert not {"hostNetwork", "dnsPolicy", "dnsConfig", "initContainers"} & set(render({}).pod)


def test_label_of_pods_wins_over_that_of_all_objects() -> None:
    release = render({"commonLabels": {"team": "all"}, "podLabels": {"team": "pods"}})
    assert release.text.count("team: pods") == 1
    labels = release.deployment["spec"]["template"]["metadata"]["labels"]
    assert (labels["team"], release.deployment["metadata"]["labels"]["team"]) == ("pods", "all")


def test_every_container_says_how_much_ephemeral_storage_it_may_use() -> None:
    for where, pod in render({**EVERYTHING}).pods():
        for container in pod["spec"]["containers"]:
            for kind in ("requests", "limits"):
                assert "ephemeral-storage" in container["resources"][kind], where


def test_platform_that_chooses_ids_gets_none_of_the_chart_s() -> None:
    openshift = ("--api-versions", "security.openshift.io/v1")
    release = template(*openshift, values={"checkHook": {"enabled": True}})
    contexts = {where: pod["spec"]["securityContext"] for where, pod in release.pods()}
    assert len(contexts) == 4
    for where, context in contexts.items():
        assert context == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}, where
    own = template(*openshift, values={"podSecurityContext": {"runAsUser": 7}}).pod["securityContext"]
    assert (own.get("runAsUser"), own.get("fsGroup")) == (7, None)
    sidecar = template(*openshift, values=dict(CASES["sidecar"])).container["securityContext"]
    assert "runAsUser" not in sidecar
    assert template(values={}).pod["securityContext"]["runAsUser"] == 65532


# Monitors


def test_monitors_are_left_out_where_the_cluster_does_not_serve_them() -> None:
    watched: dict[str, Any] = {"podMonitor": {"enabled": True}, "rules": {"enabled": True}}
    without = template(values={"monitoring": watched})
    assert not {"PodMonitor", "PrometheusRule"} & set(without.kinds)
    served = template(*OPERATOR, values={"monitoring": watched})
    forced = template(values={"monitoring": {**watched, "force": True}})
    assert served.kinds == forced.kinds == sorted([*without.kinds, "PodMonitor", "PrometheusRule"])


def test_alert_has_a_link_to_the_runbook_where_its_url_is_known() -> None:
    for url, name, begins in (
        ("https://wiki/runbook.md", "runbook_url", "https://wiki/runbook.md#batchdispatcher"),
        ("", "runbook", "docs/how-to/runbook.md#batchdispatcher"),
    ):
        release = render({"monitoring": {"runbookUrl": url, "rules": {"enabled": True}}})
        groups = release.one("PrometheusRule")["spec"]["groups"]
        alerts = [rule for group in groups for rule in group["rules"] if "alert" in rule]
        assert len(alerts) > 20
        for alert in alerts:
            links = {key: text for key, text in alert["annotations"].items() if key.startswith("runbook")}
            assert list(links) == [name]
            assert links[name].startswith(begins)


# A sidecar


def test_uninstalling_a_sidecar_keeps_what_the_picker_s_pods_mount() -> None:
    release = case("sidecar")
    kept = {
        each["metadata"]["name"]
        for each in release.objects
        if each["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == "keep"
    }
    mounted = {each["configMap"]["name"] for each in release.pod["volumes"] if "configMap" in each}
    assert mounted == {"night-batch-dispatcher"}
    assert kept == mounted | {"night-batch-dispatcher-sidecar"}
    for name in set(CASES) - {"sidecar"}:
        assert "helm.sh/resource-policy" not in case(name).text, name


def test_patch_that_removes_the_sidecar_removes_every_volume_that_it_brought() -> None:
    volumes = {"extraVolumes": [{"name": "more", "emptyDir": {}}]}
    release = render({**CASES["sidecar"], **volumes})
    removed = yaml.safe_load(release.one("ConfigMap", "-sidecar")["data"]["remove.yaml"])["spec"]["template"][
        "spec"
    ]
    for part in ("containers", "volumes"):
        assert {each["name"] for each in removed[part]} == {each["name"] for each in release.pod[part]}, (
            json.dumps(removed)
        )
        assert all(each["$patch"] == "delete" for each in removed[part])
