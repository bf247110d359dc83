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
    def most(self) -> int | None:
        """Largest number of versions that can be desired at once. `None` for any number."""
        if self.label:
            return 1
        return len(self.specific) or (None if self.everything else self.latest)

    def written(self) -> str | dict[str, Any]:
        """Return the policy in the format of the settings."""
        if self.label:
            return {"label": self.label}
        if self.specific:
            return {"specific": list(self.specific)}
        if self.everything:
            return "all"
        return "latest" if self.latest == 1 else {"latest": self.latest}

    def __str__(self) -> str:
        written = self.written()
        return written if isinstance(written, str) else json.dumps(written, ensure_ascii=False)
