"""Write schemas.json: the schemas of each supported Kubernetes version and of the CRDs that the chart uses.

    python -m tests.deploy.make_schemas

Needs Go and a module proxy: the sources are the OpenAPI of k8s.io/kubernetes and the CRDs of the operators,
each in its Go module (all Apache-2.0). The file contains only the kinds of the chart, without descriptions.
Unknown fields are rejected, and definitions that several versions share are stored once.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

SCHEMAS_FILE = Path(__file__).with_name("schemas.json")
KUBERNETES = ("1.31.14", "1.32.13", "1.33.13", "1.34.4", "1.35.4", "1.36.3")
KINDS = {
    "v1": ("ConfigMap", "Pod", "Secret", "Service", "ServiceAccount"),
    "apps/v1": ("Deployment", "StatefulSet"),
    "batch/v1": ("Job",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "policy/v1": ("PodDisruptionBudget",),
    "rbac.authorization.k8s.io/v1": ("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"),
}
CRDS = (
    ("github.com/prometheus-operator/prometheus-operator@v0.85.0", "example/prometheus-operator-crd",
     ("monitoring.coreos.com_podmonitors", "monitoring.coreos.com_prometheusrules",
      "monitoring.coreos.com_servicemonitors")),
    ("github.com/kedacore/keda/v2@v2.16.1", "config/crd/bases",
     ("keda.sh_scaledobjects", "keda.sh_triggerauthentications")),
    ("sigs.k8s.io/gateway-api-inference-extension@v1.3.0", "config/crd/bases",
     ("inference.networking.x-k8s.io_inferenceobjectives",)),
)  # fmt: skip


def download_module(name: str) -> Path:
    """Download a Go module and return its directory."""
    done = subprocess.run(
        ["go", "mod", "download", "-json", name], capture_output=True, text=True, check=True
    )
    return Path(json.loads(done.stdout)["Dir"])


def make_strict(schema: Any) -> Any:
    """Return the schema without descriptions, with unknown fields rejected unless any are allowed."""
    if isinstance(schema, list):
        return [make_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string") or schema.get("format") == "int-or-string":
        return {"type": ["integer", "string"]}
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            result[key] = {name: make_strict(each) for name, each in value.items()}
        elif key in {"items", "additionalProperties", "oneOf", "anyOf", "allOf", "not"}:
            result[key] = make_strict(value)
        elif key in {"type", "enum", "required", "minimum", "maximum", "pattern", "minLength", "maxLength",
                     "minItems", "maxItems", "minProperties", "maxProperties", "$ref"}:  # fmt: skip
            result[key] = value
    if "properties" in result and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    return result


def read_kubernetes_definitions(version: str) -> dict[str, Any]:
    """Return every definition that the kinds need by name, and the kinds as `Kind apiVersion`."""
    path = download_module(f"k8s.io/kubernetes@v{version}") / "api" / "openapi-spec" / "swagger.json"
    definitions = json.loads(path.read_text())["definitions"]
    by_kind = {
        (
            f"{group_version_kind['group']}/{group_version_kind['version']}".lstrip("/"),
            group_version_kind["kind"],
        ): name
        for name, each in definitions.items()
        for group_version_kind in each.get("x-kubernetes-group-version-kind", ())
    }
    found: dict[str, Any] = {}
    pending_names = []
    for api, kinds in KINDS.items():
        for kind in kinds:
            name = by_kind[api, kind]
            found[f"{kind} {api}"] = {"$ref": f"#/definitions/{name}"}
            pending_names.append(name)
    while pending_names:
        name = pending_names.pop()
        if name in found:
            continue
        found[name] = make_strict(definitions[name])
        if name.endswith(".Quantity"):
            found[name] = {"type": ["string", "number"]}
        pending_names += re.findall(r'"#/definitions/([^"]+)"', json.dumps(found[name]))
    return found


def read_crd_schemas() -> dict[str, Any]:
    found = {}
    for source, directory, names in CRDS:
        for name in names:
            spec = yaml.safe_load((download_module(source) / directory / f"{name}.yaml").read_text())["spec"]
            for version in spec["versions"]:
                schema = make_strict(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {"type": "object"}
                found[f"{spec['names']['kind']} {spec['group']}/{version['name']}"] = schema
    # The CRD of llm-d has the same fields, but its module is not on the module proxy.
    found["InferenceObjective llm-d.ai/v1alpha2"] = found[
        "InferenceObjective inference.networking.x-k8s.io/v1alpha2"
    ]
    return found


def main() -> None:
    merged: dict[str, dict[str, Any]] = {}  # Versions by name and by the definition as JSON.
    for version in KUBERNETES:
        short = version.rpartition(".")[0]
        for name, schema in read_kubernetes_definitions(version).items():
            merged.setdefault(name, {}).setdefault(json.dumps(schema, sort_keys=True), []).append(short)
    definitions = {
        name: [{"in": versions, "schema": json.loads(document)} for document, versions in each.items()]
        for name, each in sorted(merged.items())
    }
    document = {"kubernetes": list(KUBERNETES), "definitions": definitions, "crds": read_crd_schemas()}
    lines = json.dumps(document, sort_keys=True, separators=(",", ":"))
    # One line per definition keeps the diff of a new version small.
    SCHEMAS_FILE.write_text(re.sub(r'("[A-Za-z0-9./ -]+":\[\{"in")', r"\n\1", lines) + "\n")


if __name__ == "__main__":
    main()
