"""The Kustomize resources, made of the chart.

    python -m tests.deploy.kustomization        writes them

Chart and Kustomize are one set of objects. What only Helm needs goes: namespaces (Kustomize sets them), the
chart's labels, hooks, the hash of what restarts (who changes that, restarts). What a kustomization.yaml
says is kept by hand; that a build equals the chart is a test.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tests.deploy.release import Release, render
from tests.paths import ROOT

KUSTOMIZE = ROOT / "deploy" / "kustomize"
NAME = "batch-dispatcher"
NAMESPACE = "default"
_HEAD = "# Made of the chart: python -m tests.deploy.kustomization\n"
_ALL = {"select": 'pool=~".+"', "job": ".*batch-dispatcher.*"}

BASE: Mapping[str, Any] = {
    "pool": {"name": "my-pool"},
    "gateway": {"url": "http://inference-gateway"},
    "redis": {"existingSecret": {"name": "batch-dispatcher-queue", "key": "url"}},
    "test": {"enabled": False},
    "rbac": {"modelRewrites": True},  # config.yaml is the user's: nobody knows here whether it names models
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
"""Component → what it is in the chart's values, over BASE."""
UPON: Mapping[str, str] = {"keda-password": "keda"}
"""Component → the one that it adds to."""


def release(component: str = "", namespace: str = NAMESPACE) -> Release:
    """What the chart makes of the same."""
    return render({**BASE, **COMPONENTS.get(component, {})}, NAME, namespace)


def files() -> Iterator[tuple[str, str]]:
    """Each generated file, by its path below deploy/kustomize."""
    base = release()
    yield "base/config.yaml", _HEAD + base.config_text()
    yield "base/objects.yaml", _HEAD + "---\n".join(_objects(base, {"ConfigMap"}))
    for component in COMPONENTS:
        made = release(component)
        below = release(UPON[component]) if component in UPON else base
        ours = {f"{each['kind']} {each['metadata']['name']}" for each in below.objects}
        if component == "sidecar":
            yield "components/sidecar/config.yaml", _HEAD + made.config_text()
            yield "components/sidecar/patch.yaml", _HEAD + _bare(made.patch())
            yield "components/sidecar/objects.yaml", _HEAD + "---\n".join(_objects(made, {"ConfigMap"}))
        else:
            yield f"components/{component}/objects.yaml", _HEAD + "---\n".join(_objects(made, set(), ours))


def _objects(made: Release, without_kinds: set[str], without: set[str] = frozenset()) -> Iterator[str]:  # type: ignore[assignment]
    """The text of each object, without what only Helm needs."""
    for text in re.split(r"^---\n(?:# Source: .*\n)?", made.text, flags=re.MULTILINE):
        kind = re.search(r"^kind: (\S+)", text, re.MULTILINE)
        name = re.search(r"^  name: [\"']?(.+?)[\"']?$", text, re.MULTILINE)
        if kind is None or name is None or kind[1] in without_kinds or f"{kind[1]} {name[1]}" in without:
            continue
        yield _bare(text)


def _bare(text: str) -> str:
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
    for path, text in files():
        (KUSTOMIZE / path).write_text(text)


if __name__ == "__main__":
    main()
