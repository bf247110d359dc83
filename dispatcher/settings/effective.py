"""Configuration in effect in a form for display: secrets are masked, and defaults are marked."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from dispatcher.requests.result_lists import default_patterns
from dispatcher.settings.load import key_paths
from dispatcher.settings.model import Settings
from dispatcher.settings.yaml_source import ENV_PREFIX, resolve_scalar

_PLAIN_SCALAR = re.compile(r"[A-Za-z0-9/.][A-Za-z0-9_./@:*-]*[A-Za-z0-9_./*-]|[A-Za-z0-9/]")


@dataclass(frozen=True, slots=True)
class ShownLine:
    """One line of the YAML."""

    text: str
    origin: str = ""
    """Source of the value: `default`, `environment`, or empty for the file."""
    note: str = ""
    """Effective value, if the value itself does not show it."""
    is_section: bool = False
    """True if the line opens a section."""

    @property
    def is_default(self) -> bool:
        return self.origin == "default"

    def __str__(self) -> str:
        remark = ": ".join(part for part in (self.origin, self.note) if part)
        return f"{self.text}  # {remark}" if remark else self.text


def render_lines(
    settings: Settings, environ: Mapping[str, str] = MappingProxyType({})
) -> Iterator[ShownLine]:
    """Yield all keys of the settings as YAML, which describes the same configuration except for secrets.

    `environ` is the environment from which the settings were read.
    """
    notes = _derived_notes(settings)
    notes_and_names = notes, {name for name in environ if name.startswith(ENV_PREFIX)}
    yield from _section_lines(settings, settings.model_dump(mode="json"), "", notes_and_names)


def select_explicit(shown: Sequence[ShownLine]) -> list[ShownLine]:
    """Return the lines of values that were set explicitly, with the lines of their sections."""
    # Backwards, so that the keys of a section are known before the line that opens it.
    kept: list[ShownLine] = []
    for line in reversed(shown):
        inner = kept and _indent_of(kept[-1]) > _indent_of(line)
        if inner if line.is_section else not line.is_default:
            kept.append(line)
    return kept[::-1]


def _indent_of(line: ShownLine) -> int:
    return len(line.text) - len(line.text.lstrip())


def settings_as_json(settings: Settings) -> dict[str, Any]:
    """Return the settings for JSON: all values with secrets masked, and the paths of the keys with default
    values."""
    return {
        "settings": settings.model_dump(mode="json"),
        "defaults": [path for path in key_paths(Settings) if _is_default(settings, path)],
    }


def describe_changes(old: Settings, new: Settings) -> list[str]:
    """Return a text `key: old → new` for each changed key, with secrets masked."""
    described = []
    for path in key_paths(Settings):
        value_of = attrgetter(path)
        before, after = value_of(old), value_of(new)
        if before != after:
            shown = [_shown_value(settings, path) for settings in (old, new)]
            described.append(f"{path}: {' → '.join(shown) if shown[0] != shown[1] else 'another secret'}")
    return described


def _shown_value(settings: Settings, path: str) -> str:
    value: Any = settings.model_dump(mode="json")
    for part in path.split("."):
        value = value[part]
    return _to_yaml(value)


def _section_lines(
    section: BaseModel,
    shown: dict[str, Any],
    path: str,
    notes_and_variables: tuple[Mapping[str, str], Collection[str]],
) -> Iterator[ShownLine]:
    notes, variables = notes_and_variables
    for name in type(section).model_fields:
        value, here, indent = getattr(section, name), f"{path}{name}", "  " * path.count(".")
        if isinstance(value, BaseModel):
            yield ShownLine(f"{indent}{name}:", is_section=True)
            yield from _section_lines(value, shown[name], f"{here}.", notes_and_variables)
        else:
            origin = "" if name in section.model_fields_set else "default"
            if ENV_PREFIX + here.replace(".", "__").upper() in variables:
                origin = "environment"
            yield ShownLine(f"{indent}{name}: {_to_yaml(shown[name])}", origin, notes.get(here, ""))


def _is_default(settings: Settings, path: str) -> bool:
    section: Any = settings
    *parents, last = path.split(".")
    for parent in parents:
        section = getattr(section, parent)
    return last not in section.model_fields_set


def _to_yaml(value: Any) -> str:
    # A text needs no quotes if it looks harmless, and YAML would not read it as a number or another word.
    if isinstance(value, str) and _PLAIN_SCALAR.fullmatch(value) and resolve_scalar(value) == value:
        return value
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 5 is easier to read than 5.0, and means the same
    return json.dumps(value, ensure_ascii=False)  # JSON is YAML


def _derived_notes(settings: Settings) -> dict[str, str]:
    notes = {}
    signals, budget, queue = settings.signals, settings.budget, settings.queue
    if signals.max_age_s is None:
        ages = [f"{signals.max_age_for(source):g}" for source in ("epp", "prometheus")]
        notes["signals.max_age_s"] = f"{ages[0]} for direct scrape, {ages[1]} through Prometheus"
    if budget.upper is None:
        notes["budget.upper"] = f"{1 - budget.reserve:g}, the room of an idle pool"
    if budget.max_sys is None:
        slots = "per_endpoint" if budget.per_endpoint is None else f"{budget.per_endpoint:g}"
        notes["budget.max_sys"] = f"ready endpoints × {slots}"
    if queue.result_lists is None:
        notes["queue.result_lists"] = " ".join(default_patterns(queue.name, queue.results))
    if not queue.url:
        notes["queue.url"] = "embedded Valkey in queue.data_dir"
    if queue.owner_timeout_s is None:
        notes["queue.owner_timeout_s"] = f"{queue.effective_owner_timeout_s():g}"
    return notes
