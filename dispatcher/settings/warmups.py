"""The warm-up files that the settings name: read when these come into force, and when one changes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from dispatcher.core.models.warmup import (
    FILE_BYTES_MOST,
    WarmupFault,
    WarmupRequest,
    WarmupRules,
    read_warmup,
)
from dispatcher.settings.model import Settings
from dispatcher.settings.small_files import read_regular
from dispatcher.settings.watched_files import looks
from dispatcher.settings.yaml_source import Problem

Requests = tuple[WarmupRequest, ...]


class WarmupFiles:
    """Those of one configuration. Reading takes a moment: not in the loop."""

    def __init__(self, settings: Settings) -> None:
        gateway = settings.gateway
        self._rules = WarmupRules(gateway.path, gateway.allowed_paths, settings.queue.max_payload_bytes)
        self._paths = {model.name: Path(model.warmup) for model in settings.models if model.warmup}
        self._places = {model.name: f"models[{at}].warmup" for at, model in enumerate(settings.models)}
        self._known: dict[str, tuple[object, Requests]] = {}
        """What each file held that could be used last, and what it looked like then."""

    @classmethod
    def usable(cls, settings: Settings) -> Self:
        """Each was read and can be used; raises OSError with all that is wrong with them."""
        files = cls(settings)
        if wrong := files.problems():
            raise OSError("; ".join(f"{problem.where}: {problem.what}" for problem in wrong))
        return files

    @property
    def paths(self) -> Mapping[str, Path]:
        """Of models that have one."""
        return self._paths

    def where(self, model: str) -> str:
        """The setting."""
        return self._places[model]

    def problems(self) -> list[Problem]:
        """What is wrong with each of them now."""
        return [found for model in self._paths if isinstance(found := self.read(model), Problem)]

    def read(self, model: str) -> Requests | Problem:
        """What its file holds now, which is read again only where it has changed."""
        path = self._paths[model]
        seen = looks(path)
        known = self._known.get(model)
        if known is not None and seen == known[0]:
            return known[1]
        found = read_file(path, self._rules)
        if isinstance(found, str):
            return Problem(path.name, self._places[model], found)
        self._known[model] = seen, found
        return found

    def requests(self, model: str) -> tuple[Requests, str]:
        """What to warm up with, and one sentence where the file cannot be used any more: then it is what the
        file held when it could. Empty for a model without one."""
        if model not in self._paths:
            return (), ""
        found = self.read(model)
        if isinstance(found, Problem):
            return self._known.get(model, (None, ()))[1], str(found)
        return found, ""


def read_file(path: Path, rules: WarmupRules) -> Requests | str:
    """The requests of a file, or why it cannot be used: one sentence, which repeats nothing of the bodies."""
    try:
        text = read_regular(path, FILE_BYTES_MOST)
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror or error}"
    found = read_warmup(text, rules)
    requests = tuple(each for each in found if isinstance(each, WarmupRequest))
    if requests:
        return requests
    return f"{path}: " + "; ".join(str(each) for each in found if isinstance(each, WarmupFault))
