"""Warm-up files that the settings name. They are read when the settings take effect, and when they change."""

from __future__ import annotations

from pathlib import Path

from dispatcher.features.models.settings import get_models
from dispatcher.features.models.warmup import MAX_FILE_BYTES, WarmupRequest, WarmupRules, parse_warmup
from dispatcher.settings.model import Settings
from dispatcher.settings.small_files import read_regular_file
from dispatcher.settings.watched_files import file_fingerprint
from dispatcher.settings.yaml_source import Problem

WarmupRequests = tuple[WarmupRequest, ...]


class WarmupFile:
    """Warm-up file of one model. `setting` is the path of the setting that names it."""

    def __init__(self, path: Path, setting: str, rules: WarmupRules) -> None:
        self.path, self.setting = path, setting
        self._rules = rules
        self._fingerprint: object = None
        """State of the file when it was last usable."""
        self._last_usable: WarmupRequests = ()

    def read(self) -> WarmupRequests | Problem:
        """Return the requests in the file, or its problem, which repeats nothing of the bodies. The file is
        read only if it changed. This blocks, so do not do it on the event loop."""
        fingerprint = file_fingerprint(self.path)
        if self._last_usable and fingerprint == self._fingerprint:
            return self._last_usable
        try:
            parsed = parse_warmup(read_regular_file(self.path, MAX_FILE_BYTES), self._rules)
        except OSError as error:
            parsed = [f"cannot be read: {error.strerror or error}"]
        if isinstance(parsed, list):
            return Problem(self.path.name, self.setting, f"{self.path}: {'; '.join(parsed)}")
        self._fingerprint, self._last_usable = fingerprint, parsed
        return parsed

    def load(self) -> tuple[WarmupRequests, str]:
        """Return the last usable content of the file, and a sentence if the file cannot be used any more."""
        found = self.read()
        return (self._last_usable, str(found)) if isinstance(found, Problem) else (found, "")


def find_warmup_files(settings: Settings) -> dict[str, WarmupFile]:
    """Return the warm-up file of each model that has one."""
    gateway = settings.gateway
    rules = WarmupRules(gateway.path, gateway.allowed_paths, settings.queue.max_payload_bytes)
    return {
        model.name: WarmupFile(Path(model.warmup), f"models[{at}].warmup", rules)
        for at, model in enumerate(get_models(settings))
        if model.warmup
    }


def load_warmup_files(settings: Settings) -> dict[str, WarmupFile]:
    """Read all warm-up files, and return them. Raises OSError with all problems if any cannot be used."""
    files = find_warmup_files(settings)
    problems = [found for file in files.values() if isinstance(found := file.read(), Problem)]
    if problems:
        raise OSError("; ".join(f"{problem.where}: {problem.what}" for problem in problems))
    return files
