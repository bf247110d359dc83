"""Sentences of /status that the explanation does not contain: problems, and the assumed capacity."""

from __future__ import annotations

from collections.abc import Sequence

from dispatcher.limit.budget import GATEWAY_OUTAGES, Reason
from dispatcher.telemetry.status import BudgetStatus, SignalsStatus

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
    cancel_markers: str | None,
    sharing: str | None,
    features: Sequence[str],
) -> list[str]:
    """Return a sentence for each problem that the explanation of the gate's reason does not mention.

    `features` are the sentences of the features.
    """
    failing_s = signals.signals_failing_s
    duration = "" if failing_s is None else f" for {failing_s:.0f} s now"
    # While the gate is open, the explanation says how long the signals fail.
    explains_signals = not reason.is_closed or reason in _SIGNAL_REASONS
    problems = (
        ("The changed configuration is refused, the one before is in force", config),
        ("The queue cannot be reached", None if reason is Reason.QUEUE_UNREACHABLE else queue),
        ("No request gets through the gateway", None if reason in GATEWAY_OUTAGES else gateway),
        (
            f"The signals cannot be read{duration}",
            None if explains_signals else signals.signals_problem,
        ),
        ("The cancel markers of some requests cannot be read, so these requests wait", cancel_markers),
    )
    sentences = [f"{what}: {why}" for what, why in problems if why]
    sentences += [sharing] if sharing else []
    return [*sentences, *features]


def describe_per_endpoint(budget: BudgetStatus) -> str:
    """Return a sentence about the requests per endpoint that the dispatcher assumes.

    Empty if the setting says it and nothing contradicts it.
    """
    per_endpoint, picker = budget.per_endpoint, budget.picker_max_concurrency
    if per_endpoint is None:
        return ""
    match budget.per_endpoint_source:
        case "setting" | "picker" | "server" | "suggestion" if budget.max_sys_source in (
            "search",
            "learned",
        ) and (budget.configured_max_sys is None):
            return (
                f"The search for the capacity started at {per_endpoint:g} requests per endpoint "
                "(budget.capacity: learn)."
            )
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
