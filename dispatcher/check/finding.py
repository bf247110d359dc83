"""One thing that was tried, and what came of it; and the probe that finds it out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Literal

Level = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was tried, and what came of it."""

    level: Level
    where: str
    """The setting it is about."""
    what: str
    hint: str = ""
    """What to look at, or to do."""
    certain: bool = field(default=False, compare=False)
    """No clock had a say in it: a connection that was refused is so, however late our own loop is."""

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.what}" + (f" (look at: {self.hint})" if self.hint else "")


class Slow(Finding):
    """A peer that accepted the connection and took too long to answer: it is there."""


Findings = list[Finding]
Probe = Callable[[], Awaitable[Findings]]


def known(*findings: Finding) -> Probe:
    """The probe of what needs no asking."""

    async def told() -> Findings:
        return [replace(finding, certain=True) for finding in findings]

    return told
