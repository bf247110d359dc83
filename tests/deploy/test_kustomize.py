"""Kustomize builds are the chart's objects, component by component; overlays are valid and load."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from dispatcher import __version__
from tests.deploy.cases import PICKER
from tests.deploy.conformity import KUBERNETES, faults
from tests.deploy.kustomization import COMPONENTS, KUSTOMIZE, NAME, UPON, files
from tests.deploy.kustomization import release as of_chart
from tests.deploy.release import Release
from tests.paths import DOCS
from tests.support import require_tool

NAMESPACE = "llm"
OF_HELM = {"helm.sh/chart", "app.kubernetes.io/version", "app.kubernetes.io/managed-by"}


def build(directory: Path) -> Release:
    done = subprocess.run(
        [require_tool("kustomize"), "build", directory],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return Release(done.stdout)


def assembled(directory: Path, *components: str, **more: Any) -> Release:
    """The base with components, as an overlay in a directory of ours would have it."""
    here = os.path.relpath(KUSTOMIZE, directory.resolve())
    text = {
        "namespace": NAMESPACE,
        "resources": [f"{here}/base"],
        "components": [f"{here}/components/{each}" for each in components],
        **more,
    }
    (directory / "kustomization.yaml").write_text(json.dumps(text))
    return build(directory)


@cache
def overlay(name: str) -> Release:
    return build(KUSTOMIZE / "overlays" / name)


def test_files_are_what_the_chart_makes_of_them() -> None:
    stale = [path for path, text in files() if (KUSTOMIZE / path).read_text() != text]
    assert stale == [], "`python -m tests.deploy.kustomization` writes them"


@pytest.mark.parametrize("component", ["", *(name for name in COMPONENTS if name != "sidecar")])
def test_build_is_the_chart_s(component: str, tmp_path: Path) -> None:
    built = assembled(tmp_path, *filter(None, [UPON.get(component), component]))
    chart = of_chart(component, NAMESPACE)
    assert same(built) == same(chart)
    ours, theirs = built.settings(), chart.settings()
    of_chart_alone = {"pool", "queue"} | ({"gateway"} if component == "objective" else set())
    assert ours.model_copy(update={name: getattr(theirs, name) for name in of_chart_alone}) == theirs
    assert ours.queue.url.reveal() == theirs.queue.url.reveal().replace(f".{NAMESPACE}.svc", "")
    assert ours.pool.name == theirs.pool.name


def test_chart_with_its_default_values_is_the_base_with_valkey() -> None:
    assert of_chart("valkey").all("StatefulSet")
    assert not of_chart().all("StatefulSet")


def same(release: Release) -> dict[str, Any]:
    """Each object by its name, without what only Helm or only Kustomize has."""
    found = {}
    for each in release.objects:
        spec = json.loads(json.dumps(each).replace(f"{NAMESPACE}:{NAME}:metrics", f"{NAME}-metrics"))
        for labels in labels_of(spec):
            for name in OF_HELM & set(labels):
                del labels[name]
        spec["metadata"].get("annotations", {}).pop("helm.sh/resource-policy", None)
        if not spec["metadata"].get("annotations", {"": ""}):
            del spec["metadata"]["annotations"]
        annotations = spec.get("spec", {}).get("template", {}).get("metadata", {}).get("annotations", {})
        annotations.pop("checksum/restart", None)
        if spec["kind"] == "Deployment":
            for container in spec["spec"]["template"]["spec"]["containers"]:
                container.pop("env", None)  # compared as what the program makes of it
        if "config.yaml" in spec.get("data", {}):
            spec["data"] = {"config.yaml": "compared as settings"}
        if spec["kind"].startswith("ClusterRole"):
            spec["metadata"].pop("namespace", None)
        found[f"{spec['kind']} {spec['metadata']['name']}"] = spec
    return found


def labels_of(spec: Any) -> Iterator[dict[str, Any]]:
    if isinstance(spec, Mapping):
        for name, value in spec.items():
            if name in {"labels", "matchLabels"} and isinstance(value, dict):
                yield value
            else:
                yield from labels_of(value)
    elif isinstance(spec, list):
        for each in spec:
            yield from labels_of(each)


def test_every_build_is_valid_for_the_oldest_and_the_newest_kubernetes(tmp_path: Path, schemas: Path) -> None:
    texts = [overlay(each).text for each in ("dev", "production")]
    every = (name for name in COMPONENTS if name != "sidecar")
    texts.append(assembled(tmp_path, *every).text)
    text = "\n---\n".join(texts)
    assert [
        fault for version in (KUBERNETES[0], KUBERNETES[-1]) for fault in faults(text, version, schemas)
    ] == []


@pytest.mark.parametrize("name", ["dev", "production"])
def test_overlay_loads_in_the_program(name: str) -> None:
    release = overlay(name)
    settings = release.settings()
    namespaces = {
        each["metadata"].get("namespace") for each in release.objects if "Cluster" not in each["kind"]
    }
    assert namespaces == {settings.pool.namespace}, "the Role is where the pool is"
    pools = {each for rule in release.one("Role")["rules"] for each in rule.get("resourceNames", ())}
    assert pools == {settings.pool.name}
    assert release.pod["terminationGracePeriodSeconds"] > settings.shutdown.drain_s


def test_overlays_are_what_they_say() -> None:
    assert overlay("dev").container["args"][-1] == "--observe"
    assert overlay("dev").settings().queue.url.reveal() == "redis://batch-dispatcher-valkey:6379"
    production = overlay("production")
    assert production.deployment["spec"]["replicas"] == 2
    assert production.container["image"] == f"registry.example/batch-dispatcher:{__version__}"
    assert {"NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "PrometheusRule"} < set(production.kinds)
    objective, settings = production.one("InferenceObjective"), production.settings()
    assert objective["metadata"]["name"] == settings.gateway.objective
    assert objective["metadata"]["namespace"] == settings.pool.namespace
    assert objective["spec"]["poolRef"]["name"] == settings.pool.name
    assert objective["spec"]["priority"] < 0


def test_second_pool_of_a_namespace_has_names_and_pods_of_its_own(tmp_path: Path) -> None:
    pair = {"app.kubernetes.io/instance": "qwen"}
    fields = [{"kind": "PodMonitor", "path": "spec/selector/matchLabels", "create": True}]
    everything = [name for name in COMPONENTS if name != "sidecar"]
    labels = [{"pairs": pair, "includeSelectors": True, "fields": fields}]
    release = assembled(tmp_path, *everything, nameSuffix="-qwen", labels=labels)
    assert {each["metadata"]["name"].endswith("-qwen") for each in release.objects} == {True}
    assert release.settings().queue.url.reveal() == "redis://batch-dispatcher-valkey-qwen:6379"
    assert release.pod["serviceAccountName"] == "batch-dispatcher-qwen"
    scaled = release.one("ScaledObject")["spec"]
    assert scaled["scaleTargetRef"]["name"] == "batch-dispatcher-qwen"
    named = {each["authenticationRef"]["name"] for each in scaled["triggers"]}
    assert named == {release.one("TriggerAuthentication")["metadata"]["name"]}
    for each in release.objects:
        for selector in filter(None, (each.get("spec", {}).get(key) for key in ("selector", "podSelector"))):
            assert selector.get("matchLabels", selector).items() >= pair.items(), each["kind"]


def test_kustomization_of_the_guide_builds(tmp_path: Path) -> None:
    page = (DOCS / "how-to" / "install.md").read_text()
    (text,) = re.findall(r"<!-- kustomization -->\n```yaml\n(.*?)```", page, re.DOTALL)
    real = os.path.relpath(KUSTOMIZE, tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(text.replace("../..", real))
    (tmp_path / "config.yaml").write_text(
        "{pool: {name: qwen, namespace: batch}, gateway: {url: http://gateway}}"
    )
    release = build(tmp_path)
    assert release.one("Role")["rules"][0]["resourceNames"] == ["qwen"]
    assert release.one("PodMonitor")["metadata"]["name"] == "batch-dispatcher-qwen"


def test_sidecar_component_is_the_chart_s_sidecar(tmp_path: Path, schemas: Path) -> None:
    picker = yaml.safe_load(PICKER)
    picker["metadata"]["labels"] = picker["spec"]["template"]["metadata"]["labels"] = {
        "app": "picker",
        "batch-dispatcher/sidecar": "true",
    }
    (tmp_path / "picker.yaml").write_text(json.dumps(picker))
    component = os.path.relpath(KUSTOMIZE / "components" / "sidecar", tmp_path.resolve())
    text = {"namespace": NAMESPACE, "resources": ["picker.yaml"], "components": [component]}
    (tmp_path / "kustomization.yaml").write_text(json.dumps(text))
    built, chart = build(tmp_path), of_chart("sidecar", NAMESPACE)
    assert faults(built.text, KUBERNETES[-1], schemas) == []
    mine, theirs = same(built), same(chart)
    (ours,) = (each for each in built.pod["containers"] if each["name"] == "dispatcher")
    assert ours == chart.container
    assert set(mine) - set(theirs) == {"Deployment picker"}
    assert set(theirs) - set(mine) == {f"ConfigMap {NAME}-sidecar"}
    # The subjects' namespace is for whoever names the service account to patch.
    for name in set(mine) & set(theirs) - {f"ClusterRoleBinding {NAME}-metrics", f"RoleBinding {NAME}"}:
        assert mine[name] == theirs[name]
