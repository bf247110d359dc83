"""Options of sequences that the loop takes from the settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from dispatcher.features.sequences.decisions import SequenceTerms
from dispatcher.features.sequences.turns import CarryMode


@dataclass(frozen=True, slots=True)
class SequenceOptions:
    """Options for all sequences."""

    terms: SequenceTerms = field(default_factory=SequenceTerms)
    carry: CarryMode = CarryMode.OFF
    """Conversation state to keep if the request does not say."""
    max_carry_bytes: int = 1 << 20
