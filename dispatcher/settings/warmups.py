"""Warm-up files that the settings name. They are read when the settings take effect, and when they change."""

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
    """Warm-up files of one configuration. Reading them blocks, so do not do it on the event loop."""

    def __init__(self, settings: Settings) -> None:
        gateway = settings.gateway
        self._rules = WarmupRules(gateway.path, gateway.allowed_paths, settings.queue.max_payload_bytes)
        self._paths = {model.name: Path(model.warmup) for model in settings.models if model.warmup}
        self._places = {model.name: f"models[{at}].warmup" for at, model in enumerate(settings.models)}
        self._known: dict[str, tuple[object, Requests]] = {}
        """Last usable content of each file, with the fingerprint of the file at that time, by model."""

    @classmethod
    def usable(cls, settings: Settings) -> Self:
        """Read all files, and return them. Raises OSError with all problems if any cannot be used."""
        files = cls(settings)
        if wrong := files.problems():
            raise OSError("; ".join(f"{problem.where}: {problem.what}" for problem in wrong))
        return files

    @property
    def paths(self) -> Mapping[str, Path]:
        """Path of the warm-up file of each model that has one."""
        return self._paths

    def where(self, model: str) -> str:
        """Return the path of the setting that names the file of a model."""
        return self._places[model]

    def problems(self) -> list[Problem]:
        """Return the current problems of all files."""
        return [found for model in self._paths if isinstance(found := self.read(model), Problem)]

    def read(self, model: str) -> Requests | Problem:
        """Return the requests in the file of a model, or its problem. Reads the file only if it changed."""
        path = self._paths[model]
        seen = looks(path)
        known = self._known.get(model)
        if known is not None and seen == known[0]:
            return known[1]
        found = read_file(path, self._rules)
        if isinstance(found, str):  # the last usable content stays known
            return Problem(path.name, self._places[model], found)
        self._known[model] = seen, found
        return found

    def requests(self, model: str) -> tuple[Requests, str]:
        """Return the warm-up requests of a model, and a sentence if its file cannot be used any more.

        In that case the requests are the last usable content. A model without a file has no requests.
        """
        if model not in self._paths:
            return (), ""
        found = self.read(model)
        if isinstance(found, Problem):
            return self._known.get(model, (None, ()))[1], str(found)
        return found, ""


def read_file(path: Path, rules: WarmupRules) -> Requests | str:
    """Return the requests of a file, or a sentence that says why it cannot be used. The sentence repeats
    nothing of the bodies."""
    try:
        text = read_regular(path, FILE_BYTES_MOST)
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror or error}"
    found = read_warmup(text, rules)
    requests = tuple(each for each in found if isinstance(each, WarmupRequest))
    if requests:
        return requests
    return f"{path}: " + "; ".join(str(each) for each in found if isinstance(each, WarmupFault))
