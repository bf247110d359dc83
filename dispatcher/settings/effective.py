"""The configuration in effect, as it may be shown: secrets masked, defaults marked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from dispatcher.core.lists import usual
from dispatcher.settings.load import key_paths
from dispatcher.settings.model import Settings
from dispatcher.settings.source import resolve

_PLAIN = re.compile(r"[A-Za-z0-9/.][A-Za-z0-9_./@:*-]*[A-Za-z0-9_./*-]|[A-Za-z0-9/]")


@dataclass(frozen=True, slots=True)
class ShownLine:
    """One line of the YAML."""

    text: str
    default: bool = False
    """Neither the file nor the environment gave this value."""
    note: str = ""
    """What the value comes down to, where it does not say it itself."""

    def __str__(self) -> str:
        remark = ": ".join(part for part in ("default" if self.default else "", self.note) if part)
        return f"{self.text}  # {remark}" if remark else self.text


def lines(settings: Settings) -> Iterator[ShownLine]:
    """The settings as YAML, every key of them: read back, it is the same configuration but for secrets."""
    yield from _section(settings, settings.model_dump(mode="json"), 0, _notes(settings))


def as_json(settings: Settings) -> dict[str, Any]:
    """`settings`: every key with its value, secrets masked. `defaults`: the paths of those nobody gave."""
    return {
        "settings": settings.model_dump(mode="json"),
        "defaults": [path for path in key_paths(Settings) if _is_default(settings, path)],
    }


def _section(
    section: BaseModel, shown: dict[str, Any], depth: int, notes: dict[str, str]
) -> Iterator[ShownLine]:
    for name in type(section).model_fields:
        value, indent = getattr(section, name), "  " * depth
        if isinstance(value, BaseModel):
            yield ShownLine(f"{indent}{name}:")
            inner = {
                path.partition(".")[2]: note for path, note in notes.items() if path.startswith(f"{name}.")
            }
            yield from _section(value, shown[name], depth + 1, inner)
        else:
            default = name not in section.model_fields_set
            yield ShownLine(f"{indent}{name}: {_yaml(shown[name])}", default, notes.get(name, ""))


def _is_default(settings: Settings, path: str) -> bool:
    section: Any = settings
    *parents, last = path.split(".")
    for parent in parents:
        section = getattr(section, parent)
    return last not in section.model_fields_set


def _yaml(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and resolve(value) == value:
        return value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, ensure_ascii=False)  # JSON is YAML


def _notes(settings: Settings) -> dict[str, str]:
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
        notes["queue.result_lists"] = " ".join(usual(queue.name, queue.results))
    if not queue.url:
        notes["queue.url"] = "embedded Valkey in queue.data_dir"
    if queue.owner_timeout_s is None:
        notes["queue.owner_timeout_s"] = f"{queue.timeout_s():g}"
    return notes
