"""The section of the status about merged calls, and what verbs print of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dispatcher.features.merging.merger import RequestMerger
from dispatcher.features.merging.status import (
    MAX_PROBLEMS,
    BatchingStatus,
    MergeTargetStatus,
    build_status,
    build_target_status,
)
from dispatcher.limit.budget import Policy, Reading, Signal
from dispatcher.limit.limiter import Limiter
from tests.features.merging.batch_members import PATH, RULE, build_target
from tests.service.limiter_status import create_context

ENDED = "the answer to a merged call differs from the answers to single calls: item 0: cosine 0.4210"


def explain_merging(*, beyond_calls: float, seconds: int) -> str:
    """Return the sentences for a pool of 64 whose readings show 20 realtime requests and 8 batch calls of 6
    items."""
    limiter = Limiter(Policy(per_endpoint=64), [Signal.REQUESTS])
    for number in range(8):
        limiter.record_send(number, 0.0, 6)
    load = 20 + 8 + min(40.0, beyond_calls)
    for at in range(1, seconds):
        limiter.add_reading(
            Reading(Signal.REQUESTS, at, at, load / 64, 0.0, max_sys=64, items_beyond_calls=beyond_calls),
            at + 0.1,
        )
        limiter.get_allowance(at + 0.5)
    context = create_context(limiter)
    return " ".join(build_status(context, RequestMerger(context), seconds - 0.5, None).sentences)


@pytest.mark.parametrize(
    ("beyond_calls", "seconds", "is_expected"), [(0.0, 30, True), (0.0, 10, False), (40.0, 30, False)]
)
def test_warning_if_metrics_count_calls_and_the_limit_counts_items(
    beyond_calls: float, seconds: int, *, is_expected: bool
) -> None:
    """The warning appears after some seconds, when the items beyond the calls of the picker are known."""
    explanation = explain_merging(beyond_calls=beyond_calls, seconds=seconds)
    sentence = "The metrics count calls: 48 units of this process are 8 there. Set `unit: call`"
    assert (sentence in explanation) is is_expected


def test_status_of_a_target() -> None:
    target = build_target(replace(RULE, max_items=3))
    assert build_target_status(target) == MergeTargetStatus(
        path=PATH,
        model="m",
        shape="embeddings",
        mode="on",
        size=3,
        server_max_items=3,
        gain=None,
        checked_calls=0,
        off_reason=None,
        sentence="up to 3 items a call; the server takes 3; its first answers are being compared",
    )
    target.size.tuner.gain = 2.34567
    target.size.turn_off("it mixes them up")
    status = build_target_status(target)
    assert (status.size, status.gain, status.off_reason) == (1, 2.346, "it mixes them up")


def test_timeouts_of_rules_are_counted() -> None:
    context = create_context(Limiter(Policy(), []))
    context.timeout_counts["delay"] = 2
    section = build_status(context, RequestMerger(context), 1.0, None).section
    assert isinstance(section, BatchingStatus)
    assert section.batching_timeouts == {"reject": 0, "delay": 2}


def test_merging_of_each_model_is_shown_in_one_line() -> None:
    targets = [
        MergeTargetStatus(PATH, "bge-m3", sentence="up to 16 items a call"),
        MergeTargetStatus(PATH, "e5", sentence=f"each request is sent alone: {ENDED}", off_reason=ENDED),
        MergeTargetStatus("/v1/models/a:predict", sentence="whether it pays"),
        *(MergeTargetStatus(PATH, f"m-{n}", sentence="s") for n in range(20)),
    ]
    lines = BatchingStatus(targets).format_lines()
    assert lines[:2] == [
        "Batching of bge-m3 at /v1/embeddings: up to 16 items a call.",
        "Batching of /v1/models/a:predict: whether it pays.",
    ]
    assert lines[8:] == ["Batching of 14 more: see --json."]


def test_merging_that_was_switched_off_is_a_problem_of_a_few_models() -> None:
    ended = [MergeTargetStatus(PATH, f"m-{n}", off_reason="it mixes answers") for n in range(9)]
    problems = BatchingStatus([MergeTargetStatus("/v1/rerank"), *ended]).list_problems()
    assert problems[0] == "Batching has ended for m-0 at /v1/embeddings: it mixes answers"
    assert problems[MAX_PROBLEMS:] == ["Batching has ended for 6 more models"]
    only_path = BatchingStatus([MergeTargetStatus("/v1/rerank", off_reason="it mixes answers")])
    assert only_path.list_problems() == ["Batching has ended for /v1/rerank: it mixes answers"]
    assert BatchingStatus([MergeTargetStatus(PATH)]).list_problems() == []
