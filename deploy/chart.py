"""What of the chart is made from the program: schema, facts for templates, README, versions.

`pool`, `gateway` and `config` of the values are the settings' own sections, so their schema is made of the
models. The chart's own values take their types from values.yaml, and what a default cannot say from
chart_values.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from chart_values import LABEL, OWN, PARTS
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dispatcher import __version__
from dispatcher.settings import SecretUrl, Settings
from dispatcher.settings.load import NEEDS_RESTART, key_paths
from dispatcher.settings.queue import QueueUrl
from dispatcher.settings.values import AUTO, SECRET_NAME, HttpUrl, Label, UrlPath, ValueNotation

CHART = Path(__file__).parent / "helm" / "batch-dispatcher"

NOT_HERE = {"queue.data_dir", "queue.fsync", "admin.host"}
"""An embedded queue in a pod would have no producers, and probes come from outside it."""
_PATTERNS: tuple[tuple[Any, str], ...] = (
    (Label, LABEL),
    (UrlPath, "^/([^/]|$)"),
    (HttpUrl, "^$|^https?://"),
    (QueueUrl, r"^$|^rediss?(\+(sentinel|cluster))?://"),
)
_TYPES = {str: "string", SecretUrl: "string", int: "integer", float: "number", bool: "boolean"}
_BOUNDS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum",
           "min_length": "minItems"}  # fmt: skip


# ── the settings' part ──


def section(model: type[BaseModel], path: str = "") -> dict[str, Any]:
    """The schema of a section: every key typed and bounded as the model has it, no other key."""
    properties = {
        name: _field(info, f"{path}{name}")
        for name, info in model.model_fields.items()
        if f"{path}{name}" not in NOT_HERE
    }
    found: dict[str, Any] = {"type": "object", "additionalProperties": False, "properties": properties}
    if path.endswith("[]."):  # what else must be there is asked for by a sentence
        found["required"] = [name for name, info in model.model_fields.items() if info.is_required()]
    return found


def _field(info: FieldInfo, path: str) -> dict[str, Any]:
    kind = info.annotation
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return section(kind, f"{path}.")
    spelled = next((dict(each.schema) for each in info.metadata if isinstance(each, ValueNotation)), None)
    found = _kind(kind, path) if spelled is None else spelled
    found |= _bounds(info.metadata)
    found |= _pattern(info.metadata)
    if AUTO in info.metadata:  # `pattern` speaks of texts only, the bounds of numbers only
        found |= {"type": ["number", "string"], "pattern": f"^{AUTO}$"}
    if path == "admin.port":
        found["minimum"] = 1  # a Service needs to know it
    if info.description:
        found["description"] = info.description
    return found


def _bounds(rules: Sequence[Any]) -> dict[str, Any]:
    return {
        word: getattr(rule, sign) for rule in rules for sign, word in _BOUNDS.items() if hasattr(rule, sign)
    }


def _kind(kind: Any, path: str = "") -> dict[str, Any]:
    """`path`: where it stands, for the sections of a list."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return section(kind, f"{path}[].")
    if kind in _TYPES:
        return {"type": _TYPES[kind]}
    origin, of = get_origin(kind), get_args(kind)
    if origin is Literal:
        return {"enum": list(of)}
    if origin is tuple:
        return {"type": "array", "items": _item(of[0], path)}
    if origin is dict:
        names, value = _item(of[0]).get("enum"), {"type": _item(of[1])["type"]}
        if names is None:
            return {"type": "object", "additionalProperties": value}
        return {"type": "object", "additionalProperties": False, "properties": dict.fromkeys(names, value)}
    found = _kind(of[0])  # X | None is all that is left
    if "enum" in found:
        return {"enum": [*found["enum"], None]}
    return found | {"type": [found["type"], "null"]}


def _item(kind: Any, path: str = "") -> dict[str, Any]:
    """Of a list or a map: what each is."""
    if not hasattr(kind, "__metadata__"):
        return _kind(kind, path)
    rules = [rule for each in kind.__metadata__ for rule in getattr(each, "metadata", (each,))]
    return _kind(kind.__origin__, path) | _bounds(rules) | _pattern(rules)


def _pattern(rules: Sequence[Any]) -> dict[str, str]:
    """What a text must look like, if one of the rules says it."""
    for of, text in _PATTERNS:
        if of.__metadata__[-1] in rules:
            return {"pattern": text}
    return {}


def settings_facts() -> str:
    """files/settings.json: what templates have to know of the settings."""
    defaults = {}
    gatewayless: dict[str, Any] = {"gateway": None}  # it has no default
    templates = "".join(path.read_text() for path in sorted((CHART / "templates").glob("*.*")))
    asked = set(re.findall(r'"batch-dispatcher\.setting" \(list \S+ "([a-z_.]+)"', templates))
    for path in filter(asked.__contains__, key_paths(Settings)):
        value: Any = Settings.model_construct(**gatewayless)
        for name in path.split("."):
            value = getattr(value, name)
        defaults[path] = value
    facts = {"restart": list(NEEDS_RESTART), "secret_name": SECRET_NAME.pattern, "defaults": defaults}
    return json.dumps(facts, indent=1) + "\n"


# ── the chart's own part ──


def schema() -> str:
    """values.schema.json: draft 7, which every Helm 3 reads."""
    keys = described()
    root = _own(yaml.safe_load((CHART / "values.yaml").read_text()), "", {key.path: key for key in keys})
    models = section(Settings)["properties"]
    for name in ("pool", "gateway"):
        of_chart = root["properties"][name]["properties"]
        root["properties"][name] = {
            **models[name],
            "properties": {**models[name]["properties"], **of_chart},
        }
    root["properties"]["config"] = {
        "type": "object",
        "additionalProperties": False,
        # These two are refused by a sentence that says where they belong.
        "properties": {name: {} if name in ("pool", "gateway") else rule for name, rule in models.items()},
    }
    root["required"] += ["config", "secretFiles"]
    root["properties"]["secretFiles"] = _secret_files()
    root["properties"]["monitoring"]["properties"]["rules"]["properties"]["alerts"] = _alerts()
    root["properties"]["global"] = {"type": "object"}
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "batch-dispatcher"}
    return json.dumps({**head, **root}, indent=1, ensure_ascii=False) + "\n"


def _own(values: Mapping[str, Any], path: str, keys: Mapping[str, Key]) -> dict[str, Any]:
    properties = {}
    for name, value in values.items():
        here = f"{path}{name}"
        if rule := OWN.get(here) or PARTS.get(here):
            found = dict(rule)
        elif isinstance(value, dict) and here not in keys:
            found = _own(value, f"{here}.", keys)
        else:
            found = {"type": _type(value)}
        if here in keys:
            found["description"] = keys[here].about
        properties[name] = found
    # Every value has a default, so a missing one was removed by null. The templates allow that for lists and
    # for the maps that they hand on.
    there = [
        name
        for name, rule in properties.items()
        if values[name] is not None
        and rule.get("type") != "array"
        and f"{path}{name}" not in PARTS
        and {key: rule[key] for key in rule if key != "description"} != {"type": "object"}
    ]
    return {"type": "object", "additionalProperties": False, "required": there, "properties": properties}


def _type(value: Any) -> str:
    for kind, name in (
        (bool, "boolean"),
        (int, "integer"),
        (str, "string"),
        (list, "array"),
        (dict, "object"),
    ):
        if isinstance(value, kind):
            return name
    raise TypeError(f"values.yaml: the type of {value!r} is not told by its default: name it in OWN")


def files_of_settings() -> list[str]:
    """The settings that name a file."""
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
        "properties": dict.fromkeys(files_of_settings(), source),
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
    """A value as values.yaml describes it."""

    path: str
    about: str


def described() -> list[Key]:
    """Every key of values.yaml that a `# --` comment stands above, in its order."""
    return list(_described((CHART / "values.yaml").read_text().splitlines()))


def _described(lines: list[str]) -> Iterator[Key]:
    open_: list[tuple[int, str]] = []
    about = ""
    for line in lines:
        if found := re.match(r" *# -- (.+)", line):
            about = found[1]
        elif found := re.match(r"( *)([A-Za-z][A-Za-z0-9]*):", line):
            while open_ and open_[-1][0] >= len(found[1]):
                open_.pop()
            open_.append((len(found[1]), found[2]))
            if about:
                yield Key(".".join(name for _, name in open_), about)
            about = ""


_README = """# batch-dispatcher

<!-- Generated by `make docs` from values.yaml and Chart.yaml: edit the comments there. -->

{description}.

```sh
helm install qwen-batch deploy/helm/batch-dispatcher --set pool.name=qwen --set gateway.url=http://gateway \\
    --set image.registry=registry.example/team
helm test qwen-batch --logs
```

One release per pool; any number of them in a namespace. See
[the install guide](../../../docs/how-to/install.md). Version {version}; Kubernetes {kube}. Wrong values are
refused before anything is sent to the cluster, by a schema that is made of the same models as the program's
own validation.

## Values

`pool`, `gateway` and the sections of `config` are the dispatcher's settings, key by key as in
[docs/reference/configuration.md](../../../docs/reference/configuration.md).

| value | default | meaning |
|---|---|---|
"""


def readme() -> str:
    """README.md of the chart."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    rows = []
    for key in described():
        value: Any = values
        for name in key.path.split("."):
            value = value[name]
        default = json.dumps(value, ensure_ascii=False)
        rows.append(f"| `{key.path}` | `{default}` | {key.about.replace('|', chr(92) + '|')} |")
    head = _README.format(
        description=chart["description"], version=chart["version"], kube=chart["kubeVersion"]
    )
    return head + "\n".join(rows) + "\n"


def chart_file() -> str:
    """Chart.yaml with the package's version, for the two are released together, and the images it runs."""
    text = (CHART / "Chart.yaml").read_text()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    images = "".join(
        f"    - name: {name}\n      image: {image['repository']}:{image['tag'] or __version__}\n"
        for name, image in (("dispatcher", values["image"]), ("valkey", values["valkey"]["image"]))
    )
    text = re.sub(r"(images: \|\n)(?: {4}.*\n)*", rf"\1{images}", text)
    return re.sub(r"^((?:appV|v)ersion): [^\s#]+", rf"\1: {__version__}", text, flags=re.MULTILINE)
