"""A release as `helm template` renders it: its objects, and what of the cluster they would be."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import yaml

from dispatcher.settings import Settings
from dispatcher.settings.load import parse_settings
from tests.deploy.cases import BASIC, CASES
from tests.paths import ROOT
from tests.support import require_tool

CHART = ROOT / "deploy" / "helm" / "batch-dispatcher"
KUBERNETES = "1.34.0"
NAMESPACE = "llm"
OPERATOR = [
    argument
    for kind in ("PodMonitor", "ServiceMonitor", "PrometheusRule")
    for argument in ("--api-versions", f"monitoring.coreos.com/v1/{kind}")
]
"""Option that tells `helm template` that the cluster serves the kinds of the Prometheus operator."""
SECRETS = {"__URL": "redis://:secret@redis", "__HEADERS": '{"X-Api-Key": "secret"}', "": "password"}
"""What the Secrets of value sets hold, by the end of the variable's name."""
BRIEF = {**os.environ, "GOGC": "off"}
"""For Go programs that end at once: a tenth of their time is the collector's."""
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Release:
    text: str

    @cached_property
    def objects(self) -> list[dict[str, Any]]:
        return [each for each in yaml.load_all(self.text, Loader=_Loader) if each]

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in self.objects if each["kind"] == kind]

    def one(self, kind: str, name_ends: str = "") -> dict[str, Any]:
        (found,) = (each for each in self.all(kind) if each["metadata"]["name"].endswith(name_ends))
        return found

    @property
    def kinds(self) -> list[str]:
        return sorted(each["kind"] for each in self.objects)

    @property
    def deployment(self) -> dict[str, Any]:
        """The dispatcher's, or the patch that makes it a container of the picker's."""
        found = self.all("Deployment")
        return found[0] if found else yaml.load(self.patch(), _Loader)

    def patch(self) -> str:
        return str(self.one("ConfigMap", "-sidecar")["data"]["patch.yaml"])

    @property
    def pod(self) -> dict[str, Any]:
        """The dispatcher's pod."""
        return dict(self.deployment["spec"]["template"]["spec"])

    @property
    def container(self) -> dict[str, Any]:
        (found,) = (each for each in self.pod["containers"] if each["name"] == "dispatcher")
        return dict(found)

    def pods(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every pod (metadata and spec) that comes of the release, by the object that makes it."""
        for each in self.objects:
            where = f"{each['kind']} {each['metadata']['name']}"
            if each["kind"] == "Pod":
                yield where, each
            elif each["kind"] in {"Deployment", "StatefulSet", "Job"}:
                yield where, each["spec"]["template"]

    def config_text(self) -> str:
        name = next(each for each in self.pod["volumes"] if each["name"] == "dispatcher-config")["configMap"][
            "name"
        ]
        (found,) = (each for each in self.all("ConfigMap") if each["metadata"]["name"] == name)
        return str(found["data"]["config.yaml"])

    def settings(self) -> Settings:
        """What the dispatcher in the pod would run with: file and environment, read by the program itself."""
        found = parse_settings(self.config_text(), environment(self.container))
        assert isinstance(found, Settings), found
        return found


def environment(container: Mapping[str, Any]) -> dict[str, str]:
    """A container's environment, with the Secrets that it names filled in."""
    known: dict[str, str] = {}
    for each in container.get("env", ()):
        if "value" in each:
            known[each["name"]] = re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], each["value"])
        else:
            known[each["name"]] = next(text for end, text in SECRETS.items() if each["name"].endswith(end))
    return known


def helm(*arguments: str, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """Run helm on the chart, with values from standard input."""
    return subprocess.run(
        [require_tool("helm"), *arguments, str(CHART), "--kube-version", KUBERNETES, "--values", "-"],
        input=json.dumps(values or {}),
        env=BRIEF,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def render(values: Mapping[str, Any], name: str = "night", namespace: str = NAMESPACE) -> Release:
    """The release of these values over BASIC."""
    return _render(json.dumps({**BASIC, **values}), name, namespace)


def case(name: str) -> Release:
    return render(CASES[name])


@cache
def _render(values: str, name: str, namespace: str) -> Release:
    done = helm("template", name, "--namespace", namespace, *OPERATOR, values=json.loads(values))
    assert done.returncode == 0, done.stderr
    return Release(done.stdout)
