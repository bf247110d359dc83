"""Kinds of calls of models to the queue."""

from __future__ import annotations

from dispatcher.kernel.queue_steps import Step, StepKind


class ModelStep(Step):
    """Each kind of call of models. Requests can be claimed, sent and settled without them."""

    COUNT_BY_MODEL = "count by model", StepKind.OPTIONAL
    RETURN_WAITING = "return waiting", StepKind.OPTIONAL
    READ_REGISTRY = "read registry", StepKind.OPTIONAL
    TAKE_LOCK = "take lock", StepKind.OPTIONAL
    RELEASE_LOCK = "release lock", StepKind.OPTIONAL
    MARK_WARM = "mark warm", StepKind.OPTIONAL
    PIN_VERSIONS = "pin versions", StepKind.OPTIONAL
