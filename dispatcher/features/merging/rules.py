"""Rules of the settings: which requests may be merged, and how."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dispatcher.common.grouping import GroupingRule
    from dispatcher.features.merging.shapes import Shape


class MergeMode(enum.StrEnum):
    OFF = "off"
    AUTO = "auto"
    ON = "on"


@dataclass(frozen=True, slots=True)
class BatchRule:
    """Rule that says which requests may be merged, and how many."""

    paths: tuple[str, ...]
    """Path patterns. The first rule with a pattern that matches a path applies."""
    shape: Shape
    mode: MergeMode
    grouping: GroupingRule
    unit_per_call: bool = False
    """True if a call counts one unit, however many items it has. Otherwise each item counts one."""
    can_stretch_delay: bool = False
    """True if requests wait longer than `grouping` says if calls are slow."""
    max_items: int | None = None
    """Number of items above which a list is sent in several calls. `None` if the server's answers are to
    teach it."""
    merge_sequences: bool = False
    """True if requests of different sequences may be merged. Their answers are not checked, because a server
    that keeps state must not get an item twice."""
