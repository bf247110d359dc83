"""The section of the status about sequences, and the sentences that explain which requests they hold back."""

from __future__ import annotations

from typing import Any

from dispatcher.features.sequences.decisions import (
    OverrideCounts,
    SequenceCounts,
    SequenceOverride,
    SequenceTerms,
)
from dispatcher.features.sequences.options import SequenceOptions
from dispatcher.features.sequences.status import SequencesStatus, build_status
from dispatcher.features.sequences.turn_checker import TurnChecker
from dispatcher.features.sequences.upkeep import SequenceUpkeep
from dispatcher.kernel import Options
from dispatcher.kernel.options import index_options
from dispatcher.limit.budget import Policy
from dispatcher.limit.limiter import Limiter
from dispatcher.requests.outcomes.outcome import RetryPolicy
from dispatcher.requests.queue_counts import QueueCounts
from dispatcher.telemetry.status import FeatureStatus
from tests.service.limiter_status import create_context

OVERRIDES = (SequenceOverride("big-*", max_active=1), SequenceOverride("patient", max_idle_s=9))


def build_sequences_status(counts: SequenceCounts | None) -> FeatureStatus:
    terms = SequenceTerms(max_active=2, overrides=OVERRIDES)
    context = create_context(
        Limiter(Policy(), []),
        options=Options(RetryPolicy(), of_features=index_options(SequenceOptions(terms))),
    )
    queue_counts = None if counts is None else QueueCounts(9, 0, 0, 0, sequences=counts)
    return build_status(context, TurnChecker(context), 1.0, queue_counts)


def explain_sequences(**counted: Any) -> str:
    """Return the explanation of sequences for these counts."""
    return " ".join(build_sequences_status(SequenceCounts(**counted)).sentences)


def test_requests_held_back_by_sequences_are_explained() -> None:
    assert explain_sequences(active=2, aborted=3) == "", "no request is held back"
    assert explain_sequences(active=1, waiting=1) == "Sequences: 1 request waits for a turn."
    held = "1 sequence is held until an operator decides (`sequences show --status held`)"
    assert explain_sequences(active=1, held=1) == f"Sequences: {held}."
    assert explain_sequences(active=2, held=1, parked=4, waiting=7) == (
        f"Sequences: 7 requests wait for a turn, {held}, 4 have not begun, because sequences.max_active "
        "(2) are active."
    )


def test_parked_sequences_are_explained_by_the_limit_that_they_wait_for() -> None:
    big = OverrideCounts("big-*", active=1, parked=3)
    limited = "3 of model big-* have not begun, because sequences.models[0].max_active (1) are active"
    assert explain_sequences(active=1, parked=3, overrides=(big,)) == f"Sequences: {limited}."
    patient = OverrideCounts("patient", active=1, parked=1)
    general = "2 have not begun, because sequences.max_active (2) are active"
    assert (
        explain_sequences(active=2, parked=5, overrides=(big, patient)) == f"Sequences: {limited}, {general}."
    )


def test_sequences_of_overrides_are_in_the_status() -> None:
    counts = SequenceCounts(active=2, parked=3, overrides=(OverrideCounts("big-*", 1, 3),))
    section = build_sequences_status(counts).section
    assert isinstance(section, SequencesStatus)
    assert section.sequences == {"active": 2, "parked": 3, "held": 0, "aborted": 0, "waiting": 0}
    assert (section.get_by_match("active"), section.get_by_match("parked")) == (
        {"big-*": 1.0},
        {"big-*": 3.0},
    )


def test_unknown_counts_are_not_explained() -> None:
    status = build_sequences_status(None)
    assert isinstance(status.section, SequencesStatus)
    assert (status.section.get_count("waiting"), status.section.sequences) == (None, None)
    assert not status.sentences


def test_health_names_requests_that_wait_for_a_turn() -> None:
    upkeep = SequenceUpkeep(create_context(Limiter(Policy(), [])))
    reason = upkeep.explain_waiting(QueueCounts(1, 0, 0, 0, sequences=SequenceCounts(waiting=1)))
    assert reason is not None
    assert (reason.cause.name, reason.why) == ("sequences", "1 request waits for a turn in a sequence")
    assert upkeep.explain_waiting(QueueCounts(1, 0, 0, 0)) is None
