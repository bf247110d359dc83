"""Which versions of a model an operator wants. Pure. Apart: all verbs read settings, few look at versions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Which of the listed versions are wanted: by the first of label, specific, everything and latest that is
    set."""

    latest: int = 1
    """So many, the newest."""
    everything: bool = False
    specific: tuple[str, ...] = ()
    """These, as an operator writes them."""
    label: str = ""
    """The one that has this label."""

    @property
    def most(self) -> int | None:
        """How many can be wanted at once; None: any number."""
        if self.label:
            return 1
        return len(self.specific) or (None if self.everything else self.latest)

    def written(self) -> str | dict[str, Any]:
        """As the settings have it."""
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
