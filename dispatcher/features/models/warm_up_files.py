"""Warm-up files that the settings name. They are read when the settings take effect, and when they change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from dispatcher.features.models.settings import get_models
from dispatcher.features.models.warmup import (
    MAX_FILE_BYTES,
    WarmupFault,
    WarmupRequest,
    WarmupRules,
    parse_warmup,
)
from dispatcher.settings.model import Settings
from dispatcher.settings.small_files import read_regular_file
from dispatcher.settings.watched_files import file_fingerprint
from dispatcher.settings.yaml_source import Problem

WarmupRequests = tuple[WarmupRequest, ...]


class WarmupFiles:
    """Warm-up files of one configuration. Reading them blocks, so do not do it on the event loop."""

    def __init__(self, settings: Settings) -> None:
        gateway = settings.gateway
        self._rules = WarmupRules(gateway.path, gateway.allowed_paths, settings.queue.max_payload_bytes)
        models = get_models(settings)
        self._paths = {model.name: Path(model.warmup) for model in models if model.warmup}
        self._setting_paths = {model.name: f"models[{at}].warmup" for at, model in enumerate(models)}
        self._last_usable: dict[str, tuple[object, WarmupRequests]] = {}
        """Last usable content of each file, with the fingerprint of the file at that time, by model."""

    @classmethod
    def load_usable(cls, settings: Settings) -> Self:
        """Read all files, and return them. Raises OSError with all problems if any cannot be used."""
        files = cls(settings)
        if wrong := files.find_problems():
            raise OSError("; ".join(f"{problem.where}: {problem.what}" for problem in wrong))
        return files

    @property
    def paths(self) -> Mapping[str, Path]:
        """Path of the warm-up file of each model that has one."""
        return self._paths

    def setting_path(self, model: str) -> str:
        """Return the path of the setting that names the file of a model."""
        return self._setting_paths[model]

    def find_problems(self) -> list[Problem]:
        """Return the current problems of all files."""
        return [found for model in self._paths if isinstance(found := self.read_requests(model), Problem)]

    def read_requests(self, model: str) -> WarmupRequests | Problem:
        """Return the requests in the file of a model, or its problem. Reads the file only if it changed."""
        path = self._paths[model]
        fingerprint = file_fingerprint(path)
        known = self._last_usable.get(model)
        if known is not None and fingerprint == known[0]:
            return known[1]
        requests = read_warmup_file(path, self._rules)
        if isinstance(requests, str):  # the last usable content stays known
            return Problem(path.name, self._setting_paths[model], requests)
        self._last_usable[model] = fingerprint, requests
        return requests

    def requests_for(self, model: str) -> tuple[WarmupRequests, str]:
        """Return the warm-up requests of a model, and a sentence if its file cannot be used any more.

        In that case the requests are the last usable content. A model without a file has no requests.
        """
        if model not in self._paths:
            return (), ""
        found = self.read_requests(model)
        if isinstance(found, Problem):
            return self._last_usable.get(model, (None, ()))[1], str(found)
        return found, ""


def read_warmup_file(path: Path, rules: WarmupRules) -> WarmupRequests | str:
    """Return the requests of a file, or a sentence that says why it cannot be used. The sentence repeats
    nothing of the bodies."""
    try:
        text = read_regular_file(path, MAX_FILE_BYTES)
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror or error}"
    entries = parse_warmup(text, rules)
    requests = tuple(each for each in entries if isinstance(each, WarmupRequest))
    if requests:
        return requests
    return f"{path}: " + "; ".join(str(each) for each in entries if isinstance(each, WarmupFault))
