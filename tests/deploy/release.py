"""A release as `helm template` renders it, and access to its objects."""

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

from dispatcher.settings.load import parse_settings
from dispatcher.settings.model import Settings
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
"""Content of the Secrets that the cases name, by the end of the name of the environment variable."""
GO_ENVIRONMENT = {**os.environ, "GOGC": "off"}
"""Environment of short Go programs: without garbage collection they take a tenth less time."""
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Release:
    text: str

    @cached_property
    def objects(self) -> list[dict[str, Any]]:
        return [each for each in yaml.load_all(self.text, Loader=_Loader) if each]

    def find_all(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in self.objects if each["kind"] == kind]

    def find_one(self, kind: str, name_suffix: str = "") -> dict[str, Any]:
        (found,) = (each for each in self.find_all(kind) if each["metadata"]["name"].endswith(name_suffix))
        return found

    @property
    def kinds(self) -> list[str]:
        return sorted(each["kind"] for each in self.objects)

    @property
    def deployment(self) -> dict[str, Any]:
        """Deployment of the dispatcher, or the patch that adds it to the picker's Deployment."""
        found = self.find_all("Deployment")
        return found[0] if found else yaml.load(self.patch(), _Loader)

    def patch(self) -> str:
        return str(self.find_one("ConfigMap", "-sidecar")["data"]["patch.yaml"])

    @property
    def pod(self) -> dict[str, Any]:
        """Pod spec of the dispatcher."""
        return dict(self.deployment["spec"]["template"]["spec"])

    @property
    def container(self) -> dict[str, Any]:
        (found,) = (each for each in self.pod["containers"] if each["name"] == "dispatcher")
        return dict(found)

    def pods(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield every pod (metadata and spec) of the release with the kind and name of its object."""
        for each in self.objects:
            owner = f"{each['kind']} {each['metadata']['name']}"
            if each["kind"] == "Pod":
                yield owner, each
            elif each["kind"] in {"Deployment", "StatefulSet", "Job"}:
                yield owner, each["spec"]["template"]

    def config_text(self) -> str:
        name = next(each for each in self.pod["volumes"] if each["name"] == "dispatcher-config")["configMap"][
            "name"
        ]
        (found,) = (each for each in self.find_all("ConfigMap") if each["metadata"]["name"] == name)
        return str(found["data"]["config.yaml"])

    def settings(self) -> Settings:
        """Return the settings of the dispatcher in the pod, parsed from its file and environment."""
        settings = parse_settings(self.config_text(), read_environment(self.container))
        assert isinstance(settings, Settings), settings
        return settings


def read_environment(container: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of a container with the values of its Secrets."""
    variables: dict[str, str] = {}
    for each in container.get("env", ()):
        if "value" in each:
            variables[each["name"]] = re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], each["value"])
        else:
            variables[each["name"]] = next(
                text for suffix, text in SECRETS.items() if each["name"].endswith(suffix)
            )
    return variables


def helm(*arguments: str, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """Run helm on the chart, with values from standard input."""
    return subprocess.run(
        [require_tool("helm"), *arguments, str(CHART), "--kube-version", KUBERNETES, "--values", "-"],
        input=json.dumps(values or {}),
        env=GO_ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def render(values: Mapping[str, Any], name: str = "night", namespace: str = NAMESPACE) -> Release:
    """Render the chart with these values added to BASIC."""
    return _render(json.dumps({**BASIC, **values}), name, namespace)


def render_case(name: str) -> Release:
    return render(CASES[name])


@cache
def _render(values: str, name: str, namespace: str) -> Release:
    done = helm("template", name, "--namespace", namespace, *OPERATOR, values=json.loads(values))
    assert done.returncode == 0, done.stderr
    return Release(done.stdout)
