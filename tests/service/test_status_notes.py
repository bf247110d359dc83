"""Sentences of /status about problems, and about the assumed capacity."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dispatcher.limit.budget import Reason
from dispatcher.service.status_notes import describe_per_endpoint, list_problems
from dispatcher.telemetry.status import BudgetStatus, SignalsStatus

UNREADABLE = SignalsStatus(signals_problem="timed out", signals_failing_s=3.2)


def list_sentences(
    reason: Reason,
    *,
    config: str | None = None,
    queue: str | None = None,
    gateway: str | None = None,
    cancel_markers: str | None = None,
    sharing: str | None = None,
    signals: SignalsStatus | None = None,
    features: Sequence[str] = (),
) -> list[str]:
    return list_problems(
        reason,
        config=config,
        queue=queue,
        gateway=gateway,
        signals=signals or SignalsStatus(),
        cancel_markers=cancel_markers,
        sharing=sharing,
        features=features,
    )


@pytest.mark.parametrize("reason", list(Reason))
def test_no_problem_gives_no_sentence(reason: Reason) -> None:
    assert list_sentences(reason) == []


def test_problems_are_listed_if_the_gate_is_closed_for_another_reason() -> None:
    sentences = list_sentences(
        Reason.PAUSED, config="line 3", queue="refused", gateway="no connection", signals=UNREADABLE
    )
    assert sentences == [
        "The changed configuration is refused, the one before is in force: line 3",
        "The queue cannot be reached: refused",
        "No request gets through the gateway: no connection",
        "The signals cannot be read for 3 s now: timed out",
    ]


def test_unreadable_cancel_markers_are_listed_while_requests_are_sent() -> None:
    (sentence,) = list_sentences(Reason.OPEN, cancel_markers="timed out")
    assert sentence == "The cancel markers of some requests cannot be read, so these requests wait: timed out"


def test_problem_that_closes_the_gate_is_left_to_the_explanation() -> None:
    assert list_sentences(Reason.QUEUE_UNREACHABLE, queue="refused") == []
    assert list_sentences(Reason.GATEWAY_UNREACHABLE, gateway="refused") == []
    assert list_sentences(Reason.GATEWAY_FAILING, gateway="500 without a body") == []
    assert list_sentences(Reason.UNREADABLE, signals=UNREADABLE) == []


@pytest.mark.parametrize("reason", [reason for reason in Reason if not reason.is_closed])
def test_explanation_of_an_open_gate_says_that_the_signals_fail(reason: Reason) -> None:
    assert list_sentences(reason, signals=UNREADABLE) == []


def test_problems_of_features_come_last() -> None:
    sentences = list_sentences(Reason.OPEN, config="line 3", features=["a problem of a feature"])
    assert sentences[1:] == ["a problem of a feature"]


@pytest.mark.parametrize(
    ("budget", "beginning"),
    [
        (BudgetStatus(), ""),
        (BudgetStatus(per_endpoint=8.0, per_endpoint_source="setting"), ""),
        (BudgetStatus(per_endpoint=8.0, per_endpoint_source="setting", picker_max_concurrency=8), ""),
        (
            BudgetStatus(per_endpoint=8.0, per_endpoint_source="setting", picker_max_concurrency=16),
            "budget.per_endpoint is 8, the endpoint picker counts with 16: one of them is wrong.",
        ),
        (
            BudgetStatus(per_endpoint=8.0, per_endpoint_source="picker"),
            "Each endpoint is assumed to run 8 requests, as the endpoint picker counts.",
        ),
        (
            BudgetStatus(per_endpoint=8.0, per_endpoint_source="suggestion"),
            "The picker's page suggests 8 requests per endpoint; not proven yet.",
        ),
        (
            BudgetStatus(per_endpoint=8.0, per_endpoint_source="server"),
            "Each endpoint is assumed to run 8 requests, as the model servers' metrics say.",
        ),
        (
            BudgetStatus(per_endpoint=8.0, per_endpoint_source="search", max_sys_source="search"),
            "No setting or metric names the capacity: the search started at 8 requests per endpoint",
        ),
        (BudgetStatus(per_endpoint=8.0, per_endpoint_source="search", max_sys_source="learned"), ""),
        (
            BudgetStatus(per_endpoint=8.0, per_endpoint_source="picker", max_sys_source="search"),
            "The search for the capacity started at 8 requests per endpoint (budget.capacity: learn).",
        ),
        (
            BudgetStatus(per_endpoint=8.0, per_endpoint_source="setting", max_sys_source="learned"),
            "The search for the capacity started at 8 requests per endpoint (budget.capacity: learn).",
        ),
        (
            BudgetStatus(
                per_endpoint=8.0,
                per_endpoint_source="setting",
                max_sys_source="learned",
                configured_max_sys=16.0,
            ),
            "",
        ),
    ],
)
def test_note_says_where_the_requests_per_endpoint_come_from(budget: BudgetStatus, beginning: str) -> None:
    note = describe_per_endpoint(budget)
    assert note.startswith(beginning)
    assert bool(note) == bool(beginning)
