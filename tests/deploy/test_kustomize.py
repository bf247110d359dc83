"""Kustomize builds contain the same objects as the chart, and the program accepts the overlays."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.cases import PICKER
from tests.deploy.kustomization import (
    COMPONENT_BASES,
    COMPONENTS,
    KUSTOMIZE,
    NAME,
    build,
    build_production_overlay_without_llmd,
    generate_files,
    render_component,
)
from tests.deploy.release import Release
from tests.deploy.schema_check import KUBERNETES, find_schema_errors
from tests.paths import DOCS

NAMESPACE = "llm"
HELM_LABELS = {"helm.sh/chart", "app.kubernetes.io/version", "app.kubernetes.io/managed-by"}


def build_with_components(directory: Path, *components: str, **fields: Any) -> Release:
    """Build the base with components through an overlay in this directory."""
    relative_path = os.path.relpath(KUSTOMIZE, directory.resolve())
    text = {
        "namespace": NAMESPACE,
        "resources": [f"{relative_path}/base"],
        "components": [f"{relative_path}/components/{each}" for each in components],
        **fields,
    }
    (directory / "kustomization.yaml").write_text(json.dumps(text))
    return build(directory)


@cache
def build_overlay(name: str) -> Release:
    return build(KUSTOMIZE / "overlays" / name)


def test_generated_files_are_up_to_date() -> None:
    stale = [path for path, text in generate_files() if (KUSTOMIZE / path).read_text() != text]
    assert stale == [], "run `python -m tests.deploy.kustomization`"


@pytest.mark.parametrize("component", ["", *(name for name in COMPONENTS if name != "sidecar")])
def test_build_of_a_component_equals_the_chart(component: str, tmp_path: Path) -> None:
    built = build_with_components(tmp_path, *filter(None, [COMPONENT_BASES.get(component), component]))
    chart = render_component(component, NAMESPACE)
    assert comparable_objects(built) == comparable_objects(chart)
    built_settings, chart_settings = built.settings(), chart.settings()
    fields_from_chart = {"pool", "queue"} | ({"gateway"} if component == "objective" else set())
    assert (
        built_settings.model_copy(update={name: getattr(chart_settings, name) for name in fields_from_chart})
        == chart_settings
    )
    assert built_settings.queue.url.reveal() == chart_settings.queue.url.reveal().replace(
        f".{NAMESPACE}.svc", ""
    )
    assert built_settings.pool.name == chart_settings.pool.name


def test_valkey_is_a_component_and_not_in_the_base() -> None:
    assert render_component("valkey").find_all("StatefulSet")
    assert not render_component().find_all("StatefulSet")


def comparable_objects(release: Release) -> dict[str, Any]:
    """Return each object by kind and name, without parts that only Helm or only Kustomize has."""
    found = {}
    for each in release.objects:
        spec = json.loads(json.dumps(each).replace(f"{NAMESPACE}:{NAME}:metrics", f"{NAME}-metrics"))
        for labels in find_labels(spec):
            for name in HELM_LABELS & set(labels):
                del labels[name]
        spec["metadata"].get("annotations", {}).pop("helm.sh/resource-policy", None)
        if not spec["metadata"].get("annotations", {"": ""}):
            del spec["metadata"]["annotations"]
        annotations = spec.get("spec", {}).get("template", {}).get("metadata", {}).get("annotations", {})
        annotations.pop("checksum/restart", None)
        if spec["kind"] == "Deployment":
            for container in spec["spec"]["template"]["spec"]["containers"]:
                container.pop("env", None)  # The settings are compared instead.
        if "config.yaml" in spec.get("data", {}):
            spec["data"] = {"config.yaml": "compared as settings"}
        if spec["kind"].startswith("ClusterRole"):
            spec["metadata"].pop("namespace", None)
        found[f"{spec['kind']} {spec['metadata']['name']}"] = spec
    return found


def find_labels(spec: Any) -> Iterator[dict[str, Any]]:
    if isinstance(spec, Mapping):
        for name, value in spec.items():
            if name in {"labels", "matchLabels"} and isinstance(value, dict):
                yield value
            else:
                yield from find_labels(value)
    elif isinstance(spec, list):
        for each in spec:
            yield from find_labels(each)


def test_every_build_is_valid_for_the_oldest_and_newest_kubernetes(tmp_path: Path, schemas: Path) -> None:
    texts = [build_overlay(each).text for each in ("dev", "production")]
    every = (name for name in COMPONENTS if name != "sidecar")
    texts.append(build_with_components(tmp_path, *every).text)
    text = "\n---\n".join(texts)
    assert [
        fault
        for version in (KUBERNETES[0], KUBERNETES[-1])
        for fault in find_schema_errors(text, version, schemas)
    ] == []


@pytest.mark.parametrize("name", ["dev", "production"])
def test_program_accepts_the_settings_of_an_overlay(name: str) -> None:
    release = build_overlay(name)
    settings = release.settings()
    namespaces = {
        each["metadata"].get("namespace") for each in release.objects if "Cluster" not in each["kind"]
    }
    assert namespaces == {settings.pool.namespace}, "the Role is in the namespace of the pool"
    pools = {each for rule in release.find_one("Role")["rules"] for each in rule.get("resourceNames", ())}
    assert pools == {settings.pool.name}
    assert release.pod["terminationGracePeriodSeconds"] > settings.shutdown.drain_s


def test_overlays_have_their_described_settings() -> None:
    assert build_overlay("dev").container["args"][-1] == "--observe"
    assert build_overlay("dev").settings().queue.url.reveal() == "redis://batch-dispatcher-valkey:6379"
    production = build_overlay("production")
    assert production.deployment["spec"]["replicas"] == 2
    assert production.container["image"] == "registry.example/batch-dispatcher:0.3.0-1234567890ab"
    assert {"NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "PrometheusRule"} < set(production.kinds)
    objective, settings = production.find_one("InferenceObjective"), production.settings()
    assert objective["metadata"]["name"] == settings.gateway.objective
    assert objective["metadata"]["namespace"] == settings.pool.namespace
    assert objective["spec"]["poolRef"]["name"] == settings.pool.name
    assert objective["spec"]["priority"] < 0


def test_production_overlay_can_name_the_objective_of_the_inference_extension(tmp_path: Path) -> None:
    objective = build_production_overlay_without_llmd(tmp_path).find_one("InferenceObjective")
    assert objective["apiVersion"] == "inference.networking.x-k8s.io/v1alpha2"


def test_second_pool_in_a_namespace_has_its_own_names_and_pods(tmp_path: Path) -> None:
    pair = {"app.kubernetes.io/instance": "qwen"}
    fields = [{"kind": "PodMonitor", "path": "spec/selector/matchLabels", "create": True}]
    everything = [name for name in COMPONENTS if name != "sidecar"]
    labels = [{"pairs": pair, "includeSelectors": True, "fields": fields}]
    release = build_with_components(tmp_path, *everything, nameSuffix="-qwen", labels=labels)
    assert {each["metadata"]["name"].endswith("-qwen") for each in release.objects} == {True}
    assert release.settings().queue.url.reveal() == "redis://batch-dispatcher-valkey-qwen:6379"
    assert release.pod["serviceAccountName"] == "batch-dispatcher-qwen"
    scaled = release.find_one("ScaledObject")["spec"]
    assert scaled["scaleTargetRef"]["name"] == "batch-dispatcher-qwen"
    named = {each["authenticationRef"]["name"] for each in scaled["triggers"]}
    assert named == {release.find_one("TriggerAuthentication")["metadata"]["name"]}
    for each in release.objects:
        for selector in filter(None, (each.get("spec", {}).get(key) for key in ("selector", "podSelector"))):
            assert selector.get("matchLabels", selector).items() >= pair.items(), each["kind"]


def test_kustomization_of_the_guide_can_be_built(tmp_path: Path) -> None:
    page = (DOCS / "how-to" / "install.md").read_text()
    (text,) = re.findall(r"<!-- kustomization -->\n```yaml\n(.*?)```", page, re.DOTALL)
    real = os.path.relpath(KUSTOMIZE, tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(text.replace("../..", real))
    (tmp_path / "config.yaml").write_text(
        "{pool: {name: qwen, namespace: batch}, gateway: {url: http://gateway}}"
    )
    release = build(tmp_path)
    assert release.find_one("Role")["rules"][0]["resourceNames"] == ["qwen"]
    assert release.find_one("PodMonitor")["metadata"]["name"] == "batch-dispatcher-qwen"


def test_sidecar_component_equals_the_sidecar_of_the_chart(tmp_path: Path, schemas: Path) -> None:
    picker = yaml.safe_load(PICKER)
    picker["metadata"]["labels"] = picker["spec"]["template"]["metadata"]["labels"] = {
        "app": "picker",
        "batch-dispatcher/sidecar": "true",
    }
    (tmp_path / "picker.yaml").write_text(json.dumps(picker))
    component = os.path.relpath(KUSTOMIZE / "components" / "sidecar", tmp_path.resolve())
    text = {"namespace": NAMESPACE, "resources": ["picker.yaml"], "components": [component]}
    (tmp_path / "kustomization.yaml").write_text(json.dumps(text))
    built, chart = build(tmp_path), render_component("sidecar", NAMESPACE)
    assert find_schema_errors(built.text, KUBERNETES[-1], schemas) == []
    built_objects, chart_objects = comparable_objects(built), comparable_objects(chart)
    (dispatcher,) = (each for each in built.pod["containers"] if each["name"] == "dispatcher")
    assert dispatcher == chart.container
    assert set(built_objects) - set(chart_objects) == {"Deployment picker"}
    assert set(chart_objects) - set(built_objects) == {f"ConfigMap {NAME}-sidecar"}
    # Users set the namespace of the subjects with the service account.
    for name in set(built_objects) & set(chart_objects) - {
        f"ClusterRoleBinding {NAME}-metrics",
        f"RoleBinding {NAME}",
    }:
        assert built_objects[name] == chart_objects[name]
