"""Options of merging that the loop takes from the settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dispatcher.features.merging.rules import BatchRule


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """Options for requests that may be merged into one call."""

    rules: Sequence[BatchRule] = ()
    """The first rule with a pattern for the path of a request applies."""
