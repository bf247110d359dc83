"""Kinds of calls of sequences to the queue."""

from __future__ import annotations

from dispatcher.kernel.queue_steps import Step, StepKind


class SequenceStep(Step):
    """Each kind of call of sequences."""

    CLAIM_TURNS = "claim turns", StepKind.CLAIMING
    FIND_REMAINING = "find remaining", StepKind.OPTIONAL
