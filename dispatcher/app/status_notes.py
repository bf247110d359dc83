"""Sentences of /status that the explanation does not contain: problems, and the assumed capacity."""

from __future__ import annotations

from collections.abc import Sequence

from dispatcher.core.limit.budget import Reason
from dispatcher.telemetry.status import BudgetStatus, MergeTargetStatus, SignalsStatus

MAX_MERGE_TARGETS = 3
"""Maximum number of sentences about models whose requests are not merged any more."""
_SIGNAL_REASONS = (
    Reason.STARTING,
    Reason.UNREADABLE,
    Reason.STALE,
    Reason.NO_ENDPOINTS,
    Reason.IMPLAUSIBLE,
)
"""Reasons whose details say why the state of the pool is unknown."""


def list_problems(
    reason: Reason,
    *,
    config: str | None,
    queue: str | None,
    gateway: str | None,
    signals: SignalsStatus,
    model_registry: str | None,
    merge_targets: Sequence[MergeTargetStatus],
) -> list[str]:
    """Return a sentence for each problem that the explanation of the gate's reason does not mention."""
    failing_s = signals.signals_failing_s
    duration = "" if failing_s is None else f" for {failing_s:.0f} s now"
    # While the gate is open, the explanation says how long the signals fail.
    explains_signals = not reason.is_closed or reason in _SIGNAL_REASONS
    problems = (
        ("The changed configuration is refused, the one before is in force", config),
        ("The queue cannot be reached", None if reason is Reason.QUEUE_UNREACHABLE else queue),
        ("The gateway cannot be reached", None if reason is Reason.GATEWAY_UNREACHABLE else gateway),
        (
            f"The signals cannot be read{duration}",
            None if explains_signals else signals.signals_problem,
        ),
        ("Labels and drains of models in the queue cannot be read and are ignored", model_registry),
    )
    sentences = [f"{what}: {why}" for what, why in problems if why]
    ended = [each for each in merge_targets if each.off_reason]
    sentences += [
        f"Batching has ended for {each.name}: {each.off_reason}" for each in ended[:MAX_MERGE_TARGETS]
    ]
    if len(ended) > MAX_MERGE_TARGETS:
        sentences.append(f"Batching has ended for {len(ended) - MAX_MERGE_TARGETS} more models")
    return sentences


def describe_per_endpoint(budget: BudgetStatus) -> str:
    """Return a sentence about the requests per endpoint that the dispatcher assumes.

    Empty if the setting says it and nothing contradicts it.
    """
    per_endpoint, picker = budget.per_endpoint, budget.picker_max_concurrency
    if per_endpoint is None:
        return ""
    match budget.per_endpoint_source:
        case "setting" if picker is not None and picker != per_endpoint:
            return (
                f"budget.per_endpoint is {per_endpoint:g}, the endpoint picker counts with {picker}: "
                "one of them is wrong."
            )
        case "picker":
            return (
                f"Each endpoint is assumed to run {per_endpoint:g} requests, as the endpoint picker counts."
            )
        case "suggestion":
            # The command `check` prints the same words.
            return f"The picker's page suggests {per_endpoint:g} requests per endpoint; not proven yet."
        case "server":
            return (
                f"Each endpoint is assumed to run {per_endpoint:g} requests, "
                "as the model servers' metrics say."
            )
        case "search" if budget.max_sys_source == "search":
            return (
                f"No setting or metric names the capacity: the search started at {per_endpoint:g} requests "
                "per endpoint, and the estimate grows while requests run and none waits. Set "
                "budget.per_endpoint, or measure it with `batch-dispatcher check --probe`."
            )
        case _:
            return ""
