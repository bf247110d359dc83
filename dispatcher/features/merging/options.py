"""Options of merging that the loop takes from the settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dispatcher.features.merging.settings import BatchingSettings
from dispatcher.requests.queue_timeouts import TimeoutOptions

if TYPE_CHECKING:
    from dispatcher.features.merging.rules import BatchRule
    from dispatcher.settings.model import Settings


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """Options for requests that may be merged into one call."""

    rules: Sequence[BatchRule] = ()
    """The first rule with a pattern for the path of a request applies."""


def build_options(settings: Settings) -> tuple[object, ...]:
    """Return the options that follow from the settings."""
    batching = settings.get_section(BatchingSettings)
    return MergeOptions(batching.active_rules()), TimeoutOptions(batching.build_timeouts())
