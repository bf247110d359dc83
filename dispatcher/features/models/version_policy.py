"""Policy that selects the desired versions of a model.

The module is separate because every CLI command reads settings, but few need versions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Rule that selects desired versions among the listed ones. The first of label, specific, everything and
    latest that is set applies."""

    latest: int = 1
    """Number of newest versions that are desired."""
    everything: bool = False
    specific: tuple[str, ...] = ()
    """Versions as an operator names them."""
    label: str = ""
    """Label of the desired version."""

    @property
    def max_count(self) -> int | None:
        """Largest number of versions that can be desired at once. `None` for any number."""
        if self.label:
            return 1
        return len(self.specific) or (None if self.everything else self.latest)

    def to_setting(self) -> str | dict[str, Any]:
        """Return the policy in the format of the settings."""
        if self.label:
            return {"label": self.label}
        if self.specific:
            return {"specific": list(self.specific)}
        if self.everything:
            return "all"
        return "latest" if self.latest == 1 else {"latest": self.latest}

    def __str__(self) -> str:
        setting = self.to_setting()
        return setting if isinstance(setting, str) else json.dumps(setting, ensure_ascii=False)
