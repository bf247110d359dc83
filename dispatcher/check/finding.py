"""Define a finding of `check`, and the probe that returns findings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Literal

Level = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    level: Level
    where: str
    """Setting that the finding is about."""
    what: str
    hint: str = ""
    """Setting or place to look at, or action to take."""
    is_certain: bool = field(default=False, compare=False)
    """True if no time limit was involved. A refused connection, for example, does not depend on how late the
    event loop of this process is."""

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.what}" + (f" (look at: {self.hint})" if self.hint else "")


class SlowFinding(Finding):
    """Finding about a server that accepted the connection and took too long to answer."""


Findings = list[Finding]
Probe = Callable[[], Awaitable[Findings]]


def make_known_probe(*findings: Finding) -> Probe:
    """Return a probe with findings that are known already."""

    async def return_findings() -> Findings:
        return [replace(finding, is_certain=True) for finding in findings]

    return return_findings
