"""Sentences of /status about problems, and about the assumed capacity."""

from __future__ import annotations

import pytest

from dispatcher.app.status_notes import MAX_MERGE_TARGETS, describe_per_endpoint, list_problems
from dispatcher.core.limit.budget import Reason
from dispatcher.telemetry.status import BudgetStatus, MergeTargetStatus, SignalsStatus

UNREADABLE = SignalsStatus(signals_problem="timed out", signals_failing_s=3.2)


def list_sentences(
    reason: Reason,
    *,
    config: str | None = None,
    queue: str | None = None,
    gateway: str | None = None,
    signals: SignalsStatus | None = None,
    merge_targets: list[MergeTargetStatus] | None = None,
) -> list[str]:
    return list_problems(
        reason,
        config=config,
        queue=queue,
        gateway=gateway,
        signals=signals or SignalsStatus(),
        model_registry=None,
        merge_targets=merge_targets or [],
    )


@pytest.mark.parametrize("reason", list(Reason))
def test_no_problem_gives_no_sentence(reason: Reason) -> None:
    assert list_sentences(reason, merge_targets=[MergeTargetStatus("/v1/embeddings")]) == []


def test_problems_are_listed_if_the_gate_is_closed_for_another_reason() -> None:
    sentences = list_sentences(
        Reason.PAUSED, config="line 3", queue="refused", gateway="no connection", signals=UNREADABLE
    )
    assert sentences == [
        "The changed configuration is refused, the one before is in force: line 3",
        "The queue cannot be reached: refused",
        "The gateway cannot be reached: no connection",
        "The signals cannot be read for 3 s now: timed out",
    ]


def test_problem_that_closes_the_gate_is_left_to_the_explanation() -> None:
    assert list_sentences(Reason.QUEUE_UNREACHABLE, queue="refused") == []
    assert list_sentences(Reason.GATEWAY_UNREACHABLE, gateway="refused") == []
    assert list_sentences(Reason.UNREADABLE, signals=UNREADABLE) == []


@pytest.mark.parametrize("reason", [reason for reason in Reason if not reason.is_closed])
def test_explanation_of_an_open_gate_says_that_the_signals_fail(reason: Reason) -> None:
    assert list_sentences(reason, signals=UNREADABLE) == []


def test_merging_that_was_switched_off_is_listed_for_a_few_models() -> None:
    ended = [MergeTargetStatus("/v1/embeddings", f"m-{n}", off_reason="it mixes answers") for n in range(9)]
    sentences = list_sentences(Reason.OPEN, merge_targets=[MergeTargetStatus("/v1/rerank"), *ended])
    assert sentences[0] == "Batching has ended for m-0 at /v1/embeddings: it mixes answers"
    assert sentences[MAX_MERGE_TARGETS:] == ["Batching has ended for 6 more models"]
    only_path = [MergeTargetStatus("/v1/rerank", off_reason="it mixes answers")]
    assert list_sentences(Reason.OPEN, merge_targets=only_path) == [
        "Batching has ended for /v1/rerank: it mixes answers"
    ]


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
    ],
)
def test_note_says_where_the_requests_per_endpoint_come_from(budget: BudgetStatus, beginning: str) -> None:
    note = describe_per_endpoint(budget)
    assert note.startswith(beginning)
    assert bool(note) == bool(beginning)
