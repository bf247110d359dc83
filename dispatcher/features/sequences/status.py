"""The section of /status about sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dispatcher.features.sequences.options import SequenceOptions
from dispatcher.telemetry.status import MAX_TABLE_ROWS, FeatureSection, FeatureStatus

if TYPE_CHECKING:
    from dispatcher.features.sequences.decisions import SequenceCounts, SequenceTerms
    from dispatcher.features.sequences.turn_checker import TurnChecker
    from dispatcher.kernel.context import KernelContext
    from dispatcher.requests.queue_counts import QueueCounts

SEQUENCE_COUNTS = ("active", "parked", "held", "aborted", "waiting")
"""Names of the counts in `SequencesStatus.sequences`."""


@dataclass(frozen=True, slots=True)
class SequenceModelStatus:
    """Sequences of all replicas to which one entry of `sequences.models` applies."""

    match: str = ""
    """Pattern of the model names."""
    active: int = 0
    parked: int = 0
    """Number of sequences that wait to begin."""


@dataclass(frozen=True, slots=True)
class SequencesStatus(FeatureSection):
    """State of the sequences."""

    sequences: Mapping[str, int] | None = None
    """Number of sequences of all replicas by status (`active`, `parked`, `held`, `aborted`), and of requests
    that wait for their turn (`waiting`). `None` if they are not known."""
    sequence_models: Sequence[SequenceModelStatus] = ()
    """Number of sequences for each entry of `sequences.models` that applies to some."""
    sequence_turns: Mapping[str, int] = field(default_factory=dict)
    """Decisions about claimed requests of sequences in this process: `granted`, `waits`, `rejected`."""
    sequence_servers: Mapping[str, int] = field(default_factory=dict)
    """Answers in this process to requests with a session token, by the server that answered: the `same`, an
    `other`, or `none` if the answer had no token."""

    def get_count(self, name: str) -> int | None:
        """Return one number of `sequences`, or `None` if it is not known."""
        return None if self.sequences is None else self.sequences.get(name)

    def get_by_match(self, name: str) -> Mapping[str, float]:
        """Return one number (`active` or `parked`) for each pattern of `sequences.models` that applies."""
        return {each.match: float(getattr(each, name)) for each in self.sequence_models[:MAX_TABLE_ROWS]}


SECTION = SequencesStatus


def build_status(
    context: KernelContext, turn_checker: TurnChecker, now: float, queue_counts: QueueCounts | None
) -> FeatureStatus:
    """Build the status of the sequences, as this process knows it."""
    counts = queue_counts.sequences if queue_counts else None
    section = SequencesStatus(
        sequences={name: getattr(counts, name) for name in SEQUENCE_COUNTS} if counts else None,
        sequence_models=[
            SequenceModelStatus(each.match, each.active, each.parked)
            for each in (counts.overrides if counts else ())
        ],
        sequence_turns=dict(turn_checker.turn_counts),
        sequence_servers=dict(turn_checker.server_counts),
    )
    terms = context.options.of(SequenceOptions).terms
    return FeatureStatus(section, sentences=_explain_waiting(counts, terms) if counts else ())


def _explain_waiting(counts: SequenceCounts, terms: SequenceTerms) -> list[str]:
    """Explain which requests sequences hold back, whatever the gate says."""
    parts = []
    if counts.waiting:
        parts.append(
            f"{counts.waiting} {'request waits' if counts.waiting == 1 else 'requests wait'} for a turn"
        )
    if counts.held:
        entry = "sequence is held" if counts.held == 1 else "sequences are held"
        parts.append(f"{counts.held} {entry} until an operator decides (`sequences show --status held`)")
    parts += _explain_parked(counts, terms)
    return [f"Sequences: {', '.join(parts)}."] if parts else []


def _explain_parked(counts: SequenceCounts, terms: SequenceTerms) -> Iterator[str]:
    """Explain which limits keep sequences from beginning. A limit of some models comes first, because their
    sequences would wait for it in any case."""
    count_by_match = {each.match: each for each in counts.overrides}
    remaining_count = counts.parked
    for number, model in enumerate(terms.overrides):
        known = count_by_match.get(model.match)
        if known and known.parked and model.max_active is not None and known.active >= model.max_active:
            remaining_count -= known.parked
            yield (
                f"{known.parked} of model {model.match} have not begun, because "
                f"sequences.models[{number}].max_active ({model.max_active}) are active"
            )
    if remaining_count > 0:
        max_active = terms.max_active
        yield f"{remaining_count} have not begun, because sequences.max_active ({max_active}) are active"
