"""Writes schemas.json: what Kubernetes, in each version that the chart supports, and each CRD admit.

    python -m tests.deploy.make_schemas

Needs Go and a module proxy: the sources are the OpenAPI of k8s.io/kubernetes and the CRDs of the operators,
each in its Go module (all Apache-2.0). Only the kinds that we use; descriptions are left out, unknown fields
refused, equal definitions kept once for all versions.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

OUT = Path(__file__).with_name("schemas.json")
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


def module(name: str) -> Path:
    """The directory of a Go module's source."""
    done = subprocess.run(
        ["go", "mod", "download", "-json", name], capture_output=True, text=True, check=True
    )
    return Path(json.loads(done.stdout)["Dir"])


def strict(schema: Any) -> Any:
    """Without words, and closed: what is not named is refused, unless it is a map or free."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string") or schema.get("format") == "int-or-string":
        return {"type": ["integer", "string"]}
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            kept[key] = {name: strict(each) for name, each in value.items()}
        elif key in {"items", "additionalProperties", "oneOf", "anyOf", "allOf", "not"}:
            kept[key] = strict(value)
        elif key in {"type", "enum", "required", "minimum", "maximum", "pattern", "minLength", "maxLength",
                     "minItems", "maxItems", "minProperties", "maxProperties", "$ref"}:  # fmt: skip
            kept[key] = value
    if "properties" in kept and not schema.get("x-kubernetes-preserve-unknown-fields"):
        kept.setdefault("additionalProperties", False)
    return kept


def of_kubernetes(version: str) -> dict[str, Any]:
    """Every definition that the kinds need, by name; the kinds themselves as `Kind apiVersion`."""
    path = module(f"k8s.io/kubernetes@v{version}") / "api" / "openapi-spec" / "swagger.json"
    known = json.loads(path.read_text())["definitions"]
    by_kind = {
        (f"{of['group']}/{of['version']}".lstrip("/"), of["kind"]): name
        for name, each in known.items()
        for of in each.get("x-kubernetes-group-version-kind", ())
    }
    found: dict[str, Any] = {}
    todo = []
    for api, kinds in KINDS.items():
        for kind in kinds:
            name = by_kind[api, kind]
            found[f"{kind} {api}"] = {"$ref": f"#/definitions/{name}"}
            todo.append(name)
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found[name] = strict(known[name])
        if name.endswith(".Quantity"):
            found[name] = {"type": ["string", "number"]}
        todo += re.findall(r'"#/definitions/([^"]+)"', json.dumps(found[name]))
    return found


def of_crds() -> dict[str, Any]:
    found = {}
    for source, directory, names in CRDS:
        for name in names:
            spec = yaml.safe_load((module(source) / directory / f"{name}.yaml").read_text())["spec"]
            for version in spec["versions"]:
                schema = strict(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {"type": "object"}
                found[f"{spec['names']['kind']} {spec['group']}/{version['name']}"] = schema
    # llm-d's has the same fields; its module cannot be had through the proxy.
    found["InferenceObjective llm-d.ai/v1alpha2"] = found[
        "InferenceObjective inference.networking.x-k8s.io/v1alpha2"
    ]
    return found


def main() -> None:
    merged: dict[str, dict[str, Any]] = {}  # name → the definition, as text → its versions
    for version in KUBERNETES:
        short = version.rpartition(".")[0]
        for name, schema in of_kubernetes(version).items():
            merged.setdefault(name, {}).setdefault(json.dumps(schema, sort_keys=True), []).append(short)
    kept = {
        name: [{"in": versions, "schema": json.loads(text)} for text, versions in each.items()]
        for name, each in sorted(merged.items())
    }
    text = {"kubernetes": list(KUBERNETES), "definitions": kept, "crds": of_crds()}
    lines = json.dumps(text, sort_keys=True, separators=(",", ":"))
    # A line for each definition, so that a new version shows what it changed.
    OUT.write_text(re.sub(r'("[A-Za-z0-9./ -]+":\[\{"in")', r"\n\1", lines) + "\n")


if __name__ == "__main__":
    main()
