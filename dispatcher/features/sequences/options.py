"""Options of sequences that the loop takes from the settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dispatcher.features.sequences.decisions import SequenceTerms
from dispatcher.features.sequences.settings import SequenceSettings
from dispatcher.features.sequences.turns import CarryMode
from dispatcher.requests.affinity import AffinityOptions

if TYPE_CHECKING:
    from dispatcher.settings.model import Settings


@dataclass(frozen=True, slots=True)
class SequenceOptions:
    """Options for all sequences."""

    terms: SequenceTerms = field(default_factory=SequenceTerms)
    carry: CarryMode = CarryMode.OFF
    """Conversation state to keep if the request does not say."""
    max_carry_bytes: int = 1 << 20


def build_options(settings: Settings) -> tuple[object, ...]:
    """Return the options that follow from the settings."""
    sequences = settings.get_section(SequenceSettings)
    return (
        SequenceOptions(sequences.build_terms(), CarryMode(sequences.carry), sequences.max_carry_bytes),
        AffinityOptions(sequences.header, sequences.session_id_header),
    )
