"""Options of slices that the loop takes from the settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dispatcher.features.slices.eligibility import SliceTerms
from dispatcher.features.slices.progress import MAX_KEPT_BYTES, MAX_STARTED
from dispatcher.features.slices.settings import SlicingSettings
from dispatcher.features.slices.size import SPREAD

if TYPE_CHECKING:
    from dispatcher.settings.model import Settings


@dataclass(frozen=True, slots=True)
class SliceOptions:
    """Options for long generations, which are sent in slices."""

    is_on: bool = False
    terms: SliceTerms = field(default_factory=SliceTerms)
    spread: float = SPREAD
    """Share of the number of tokens by which slices are shorter or longer, so that those that started
    together do not end together."""
    measures_size: bool = False
    """True to choose the number of tokens of a slice by what it costs to continue a generation."""
    judges_cost: bool = True
    """True to send requests whole where the model servers do not keep the beginning in their prefix cache."""
    is_streamed: bool = False
    """True to read slices as streams, so that a slice that breaks off keeps what it has generated."""
    max_kept_bytes: int = MAX_KEPT_BYTES
    """Largest size of the progress of a generation. A longer one goes on in one call."""
    revokes: bool = False
    """True to end running slices early when realtime requests wait."""
    max_started: int = MAX_STARTED
    """Number of requests that wait for their next slice at which no further request is sliced."""
    skips_check: bool = False
    """True to slice without checking the models and the lengths of requests. Only for simulated ones."""


def build_options(settings: Settings) -> tuple[SliceOptions]:
    """Return the options that follow from the settings."""
    slicing = settings.get_section(SlicingSettings)
    options = SliceOptions(
        is_on=slicing.mode != "off",
        terms=slicing.build_terms(),
        measures_size=slicing.tokens is None,
        judges_cost=slicing.mode == "auto",
        is_streamed=slicing.stream,
        revokes=slicing.revoke == "on" or (slicing.revoke == "auto" and slicing.stream),
    )
    return (options,)
