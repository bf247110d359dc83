"""Parts of the chart that are generated: the schema of its values, settings for templates, README, versions.

`pool`, `gateway` and `config` of the values are sections of the settings; their schema is generated from the
models. The other values have the types of their defaults in values.yaml, with rules from chart_values.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from chart_values import LABEL, OBJECT_PART_RULES, VALUE_RULES
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dispatcher import __version__
from dispatcher.settings.load import NEEDS_RESTART, key_paths
from dispatcher.settings.model import Settings
from dispatcher.settings.queue import QueueUrl
from dispatcher.settings.values import AUTO, SECRET_NAME, HttpUrl, Label, SecretUrl, UrlPath, ValueNotation

CHART = Path(__file__).parent / "helm" / "batch-dispatcher"

SETTINGS_WITHOUT_VALUE = {"queue.data_dir", "queue.fsync", "admin.host"}
"""Settings without a value: an embedded queue has no producers in a pod, and probes come from outside."""
_PATTERNS: tuple[tuple[Any, str], ...] = (
    (Label, LABEL),
    (UrlPath, "^/([^/]|$)"),
    (HttpUrl, "^$|^https?://"),
    (QueueUrl, r"^$|^rediss?(\+(sentinel|cluster))?://"),
)
_TYPES = {str: "string", SecretUrl: "string", int: "integer", float: "number", bool: "boolean"}
_BOUNDS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum",
           "min_length": "minItems"}  # fmt: skip


# ── sections of the settings ──


def build_section_schema(model: type[BaseModel], path: str = "") -> dict[str, Any]:
    """Return the schema of a section, with the types and bounds of the model and no other keys."""
    properties = {
        name: _build_field_schema(info, f"{path}{name}")
        for name, info in model.model_fields.items()
        if f"{path}{name}" not in SETTINGS_WITHOUT_VALUE
    }
    found: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": properties}
    if path.endswith("[]."):  # Templates report other missing values in a sentence.
        found["required"] = [name for name, info in model.model_fields.items() if info.is_required()]
    return found


def _build_field_schema(info: FieldInfo, path: str) -> dict[str, Any]:
    kind = info.annotation
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return build_section_schema(kind, f"{path}.")
    notation = next((dict(each.schema) for each in info.metadata if isinstance(each, ValueNotation)), None)
    found = _build_type_schema(kind, path) if notation is None else notation
    found |= _find_bounds(info.metadata)
    found |= _find_pattern(info.metadata)
    if AUTO in info.metadata:  # `pattern` applies only to strings, the bounds only to numbers.
        found |= {"type": ["number", "string"], "pattern": f"^{AUTO}$"}
    if path == "admin.port":
        found["minimum"] = 1  # A Service needs the port.
    if info.description:
        found["description"] = info.description
    return found


def _find_bounds(rules: Sequence[Any]) -> dict[str, Any]:
    return {
        keyword: getattr(rule, attribute)
        for rule in rules
        for attribute, keyword in _BOUNDS.items()
        if hasattr(rule, attribute)
    }


def _build_type_schema(kind: Any, path: str = "") -> dict[str, Any]:
    """Return the schema of a type. `path` is the setting that has it."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return build_section_schema(kind, f"{path}[].")
    if kind in _TYPES:
        return {"type": _TYPES[kind]}
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": _build_item_schema(arguments[0], path)}
    if origin is dict:
        names, value = (
            _build_item_schema(arguments[0]).get("enum"),
            {"type": _build_item_schema(arguments[1])["type"]},
        )
        if names is None:
            return {"type": "object", "additionalProperties": value}
        return {"type": "object", "additionalProperties": False, "properties": dict.fromkeys(names, value)}
    found = _build_type_schema(arguments[0])  # Only X | None remains.
    if "enum" in found:
        return {"enum": [*found["enum"], None]}
    return found | {"type": [found["type"], "null"]}


def _build_item_schema(kind: Any, path: str = "") -> dict[str, Any]:
    """Return the schema of an item of a list or map."""
    if not hasattr(kind, "__metadata__"):
        return _build_type_schema(kind, path)
    rules = [rule for each in kind.__metadata__ for rule in getattr(each, "metadata", (each,))]
    return _build_type_schema(kind.__origin__, path) | _find_bounds(rules) | _find_pattern(rules)


def _find_pattern(rules: Sequence[Any]) -> dict[str, str]:
    """Return the pattern of a string, if one of the rules has one."""
    for annotated_type, text in _PATTERNS:
        if annotated_type.__metadata__[-1] in rules:
            return {"pattern": text}
    return {}


def render_settings_facts() -> str:
    """Return files/settings.json: facts about settings that the templates need."""
    defaults = {}
    required_values: dict[str, Any] = {"gateway": None}  # This setting has no default.
    templates = "".join(path.read_text() for path in sorted((CHART / "templates").glob("*.*")))
    used_settings = set(re.findall(r'"batch-dispatcher\.setting" \(list \S+ "([a-z_.]+)"', templates))
    for path in filter(used_settings.__contains__, key_paths(Settings)):
        value: Any = Settings.model_construct(**required_values)
        for name in path.split("."):
            value = getattr(value, name)
        defaults[path] = value
    facts = {"restart": list(NEEDS_RESTART), "secret_name": SECRET_NAME.pattern, "defaults": defaults}
    return json.dumps(facts, indent=1) + "\n"


# ── other values of the chart ──


def render_schema() -> str:
    """Return values.schema.json in draft 7, which every Helm 3 supports."""
    keys = list_described_keys()
    root = _build_value_schema(
        yaml.safe_load((CHART / "values.yaml").read_text()), "", {key.path: key for key in keys}
    )
    models = build_section_schema(Settings)["properties"]
    for name in ("pool", "gateway"):
        chart_properties = root["properties"][name]["properties"]
        root["properties"][name] = {
            **models[name],
            "properties": {**models[name]["properties"], **chart_properties},
        }
    root["properties"]["config"] = {
        "type": "object",
        "additionalProperties": False,
        # Templates reject these two with a sentence that says where they belong.
        "properties": {name: {} if name in ("pool", "gateway") else rule for name, rule in models.items()},
    }
    root["required"] += ["config", "secretFiles"]
    root["properties"]["secretFiles"] = _secret_files()
    root["properties"]["monitoring"]["properties"]["rules"]["properties"]["alerts"] = _alerts()
    root["properties"]["global"] = {
        "type": "object",  # It is shared with other charts, which may have other keys.
        "properties": {"imageRegistry": {"type": "string"}},
    }
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "batch-dispatcher"}
    return json.dumps({**head, **root}, indent=1, ensure_ascii=False) + "\n"


def _build_value_schema(values: Mapping[str, Any], path: str, keys: Mapping[str, Key]) -> dict[str, Any]:
    properties = {}
    for name, value in values.items():
        path_of_value = f"{path}{name}"
        if rule := VALUE_RULES.get(path_of_value) or OBJECT_PART_RULES.get(path_of_value):
            found = dict(rule)
        elif isinstance(value, dict) and path_of_value not in keys:
            found = _build_value_schema(value, f"{path_of_value}.", keys)
        else:
            found = {"type": _find_type(value)}
        if path_of_value in keys:
            found["description"] = keys[path_of_value].about
        properties[name] = found
    # Every value has a default, so a missing one was removed by null. Templates allow this for lists and for
    # maps that they copy into objects.
    required = [
        name
        for name, rule in properties.items()
        if values[name] is not None
        and rule.get("type") != "array"
        and f"{path}{name}" not in OBJECT_PART_RULES
        and {key: rule[key] for key in rule if key != "description"} != {"type": "object"}
    ]
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}


def _find_type(value: Any) -> str:
    for kind, name in (
        (bool, "boolean"),
        (int, "integer"),
        (str, "string"),
        (list, "array"),
        (dict, "object"),
    ):
        if isinstance(value, kind):
            return name
    raise TypeError(f"values.yaml: the default {value!r} does not show the type: add a rule to VALUE_RULES")


def list_file_settings() -> list[str]:
    """Return the settings that name a file."""
    return [path for path in key_paths(Settings) if path.endswith("_file")]


def _secret_files() -> dict[str, Any]:
    source = {
        "type": "object",
        "additionalProperties": False,
        "required": ["key"],
        "properties": {name: {"type": "string", "minLength": 1} for name in ("secret", "configMap", "key")},
    }
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": dict.fromkeys(list_file_settings(), source),
    }


def _alerts() -> dict[str, Any]:
    names = [
        rule["alert"] for rule in yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["alerts"]
    ]
    rule = {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "enabled": {"type": "boolean"},
            "threshold": {"type": ["number", "string"], "pattern": "^[0-9]+(ms|[smhdwy])$"},
            "for": {"type": "string", "pattern": "^([0-9]+(ms|[smhdwy]))+$"},
            "severity": {"type": "string", "minLength": 1},
        },
    }
    return {"type": "object", "additionalProperties": False, "properties": dict.fromkeys(names, rule)}


# ── README.md ──


@dataclass(frozen=True, slots=True)
class Key:
    """A value with its description in values.yaml."""

    path: str
    about: str


def list_described_keys() -> list[Key]:
    """Return every key of values.yaml that has a `# --` comment above it, in order."""
    return list(_parse_described_keys((CHART / "values.yaml").read_text().splitlines()))


def _parse_described_keys(lines: list[str]) -> Iterator[Key]:
    parents: list[tuple[int, str]] = []
    about = ""
    for line in lines:
        if found := re.match(r" *# -- (.+)", line):
            about = found[1]
        elif found := re.match(r"( *)([A-Za-z][A-Za-z0-9]*):", line):
            while parents and parents[-1][0] >= len(found[1]):
                parents.pop()
            parents.append((len(found[1]), found[2]))
            if about:
                yield Key(".".join(name for _, name in parents), about)
            about = ""


_README = """# batch-dispatcher

<!-- Generated by `make generate` from values.yaml and Chart.yaml: edit the comments there. -->

{description}.

```sh
helm install qwen-batch deploy/helm/batch-dispatcher --set pool.name=qwen --set gateway.url=http://gateway \\
    --set image.registry=registry.example/team --set image.digest=sha256:…
helm test qwen-batch
```

The first argument of `helm install` after the name is the chart: this folder, or its package. Install one
release per pool. A namespace may have several releases. The guide is `docs/how-to/install.md` in the
repository of the project. Version {version}; Kubernetes {kube}. A schema, generated from the models with
which the program validates its settings, rejects invalid values before anything is sent to the cluster.

## Values

`pool`, `gateway` and the sections of `config` are settings of the dispatcher. `values.schema.json` describes
them, and so does `docs/reference/configuration.md` in the repository.

`global.imageRegistry` is the registry of all images that have no registry of their own.

| value | default | meaning |
|---|---|---|
"""


def render_readme() -> str:
    """Return README.md of the chart."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    rows = []
    for key in list_described_keys():
        value: Any = values
        for name in key.path.split("."):
            value = value[name]
        default = json.dumps(value, ensure_ascii=False)
        rows.append(f"| `{key.path}` | `{default}` | {key.about.replace('|', chr(92) + '|')} |")
    head = _README.format(
        description=chart["description"], version=chart["version"], kube=chart["kubeVersion"]
    )
    return head + "\n".join(rows) + "\n"


def render_chart_file() -> str:
    """Return Chart.yaml with the version of the package and the images that the chart runs."""
    text = (CHART / "Chart.yaml").read_text()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    images = "".join(
        f"    - name: {name}\n      image: {image['repository']}:{image['tag'] or __version__}\n"
        for name, image in (("dispatcher", values["image"]), ("valkey", values["valkey"]["image"]))
    )
    text = re.sub(r"(images: \|\n)(?: {4}.*\n)*", rf"\1{images}", text)
    return re.sub(r"^((?:appV|v)ersion): [^\s#]+", rf"\1: {__version__}", text, flags=re.MULTILINE)
