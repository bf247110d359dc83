"""Kustomize resources, generated from the chart.

    python -m tests.deploy.kustomization        writes the files

Chart and Kustomize contain the same objects. Parts that only Helm needs are removed: namespaces (Kustomize
sets them), the labels of the chart, hooks, and the hash of settings that need a restart (users of Kustomize
restart pods). The kustomization.yaml files are written by hand; a test compares their build with the chart.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from dispatcher import __version__
from tests.deploy.cases import BASIC
from tests.deploy.release import Release, render
from tests.paths import ROOT
from tests.support import require_tool

KUSTOMIZE = ROOT / "deploy" / "kustomize"
NAME = "batch-dispatcher"
NAMESPACE = "default"
_HEAD = "# Generated from the chart: python -m tests.deploy.kustomization\n"
_ALL = {"select": 'pool=~".+"', "job": ".*batch-dispatcher.*"}

BASE: Mapping[str, Any] = {
    "pool": {"name": "my-pool"},
    "gateway": {"url": "http://inference-gateway"},
    "redis": {"existingSecret": {"name": "batch-dispatcher-queue", "key": "url"}},
    "image": {**BASIC["image"], "tag": __version__},
    "test": {"enabled": False},
    "rbac": {"modelRewrites": True},  # The user's config.yaml may name models.
}
COMPONENTS: Mapping[str, Mapping[str, Any]] = {
    "valkey": {"redis": {"existingSecret": {"name": ""}}},
    "monitoring": {"monitoring": {"podMonitor": {"enabled": True}, "rules": {"enabled": True, **_ALL}}},
    "network-policy": {"networkPolicy": {"enabled": True}},
    "keda": {
        "keda": {"enabled": True, "redis": {"address": "redis:6379"}},
        "podDisruptionBudget": {"enabled": False},
    },
    "keda-password": {
        "keda": {
            "enabled": True,
            "redis": {"address": "redis:6379", "existingSecret": {"name": "batch-dispatcher-queue"}},
        },
        "podDisruptionBudget": {"enabled": False},
    },
    "objective": {"inferenceObjective": {"create": True, "name": "batch"}},
    "sidecar": {
        "sidecar": {
            "enabled": True,
            "deployment": "picker",
            "serviceAccount": "picker",
            "podLabels": {"batch-dispatcher/sidecar": "true"},
        }
    },
}
"""Chart values of each component, added to BASE."""
COMPONENT_BASES: Mapping[str, str] = {"keda-password": "keda"}
"""Component that a component builds on."""


def render_component(component: str = "", namespace: str = NAMESPACE) -> Release:
    """Render the chart with the values of a component, without the registry of the image, which the
    kustomization.yaml of a user names."""
    release = render({**BASE, **COMPONENTS.get(component, {})}, NAME, namespace)
    return Release(release.text.replace(f"{BASIC['image']['registry']}/{NAME}", NAME))


def build(directory: Path) -> Release:
    """Run `kustomize build`."""
    done = subprocess.run(
        [require_tool("kustomize"), "build", directory],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return Release(done.stdout)


def build_production_overlay_without_llmd(directory: Path, **fields: Any) -> Release:
    """Build the production overlay with the patch that it describes for clusters without llm-d.

    The overlay that adds the patch and these fields is written into `directory`.
    """
    overlay = KUSTOMIZE / "overlays" / "production"
    text = (overlay / "kustomization.yaml").read_text()
    (patch,) = re.findall(r"^    #   - (\{op: replace, path: /apiVersion, .*\})$", text, re.MULTILINE)
    kustomization = {
        "resources": [os.path.relpath(overlay, directory.resolve())],
        "patches": [{"target": {"kind": "InferenceObjective"}, "patch": f"- {patch}"}],
        **fields,
    }
    (directory / "kustomization.yaml").write_text(json.dumps(kustomization))
    return build(directory)


def generate_files() -> Iterator[tuple[str, str]]:
    """Yield the path below deploy/kustomize and the text of each generated file."""
    base = render_component()
    yield "base/config.yaml", _HEAD + base.config_text()
    yield "base/objects.yaml", _HEAD + "---\n".join(_objects(base, {"ConfigMap"}))
    for component in COMPONENTS:
        release = render_component(component)
        base_release = render_component(COMPONENT_BASES[component]) if component in COMPONENT_BASES else base
        base_objects = {f"{each['kind']} {each['metadata']['name']}" for each in base_release.objects}
        if component == "sidecar":
            yield "components/sidecar/config.yaml", _HEAD + release.config_text()
            yield "components/sidecar/patch.yaml", _HEAD + _remove_helm_parts(release.patch())
            yield "components/sidecar/objects.yaml", _HEAD + "---\n".join(_objects(release, {"ConfigMap"}))
        else:
            yield (
                f"components/{component}/objects.yaml",
                _HEAD + "---\n".join(_objects(release, set(), base_objects)),
            )


def _objects(
    release: Release, excluded_kinds: Set[str], excluded_objects: Set[str] = frozenset()
) -> Iterator[str]:
    """Yield the text of each object, without parts that only Helm needs."""
    for text in re.split(r"^---\n(?:# Source: .*\n)?", release.text, flags=re.MULTILINE):
        kind = re.search(r"^kind: (\S+)", text, re.MULTILINE)
        name = re.search(r"^  name: [\"']?(.+?)[\"']?$", text, re.MULTILINE)
        if (
            kind is None
            or name is None
            or kind[1] in excluded_kinds
            or f"{kind[1]} {name[1]}" in excluded_objects
        ):
            continue
        yield _remove_helm_parts(text)


def _remove_helm_parts(text: str) -> str:
    text = re.sub(
        r"^ *(?:helm\.sh/chart|app\.kubernetes\.io/(?:version|managed-by)|checksum/restart): .*\n",
        "",
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(r"^  namespace: \"default\"\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^ *annotations:\n *batch-dispatcher/restart: .*\n", "", text, flags=re.MULTILINE)
    text = text.replace(f"{NAMESPACE}:{NAME}:metrics", f"{NAME}-metrics")
    return text.strip("\n") + "\n"


def main() -> None:
    for path, text in generate_files():
        (KUSTOMIZE / path).write_text(text)


if __name__ == "__main__":
    main()
