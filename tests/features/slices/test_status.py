"""The section of the status about slices, and what verbs print of it."""

from __future__ import annotations

from typing import Any

import pytest

from dispatcher.features.slices.counts import SliceCounts
from dispatcher.features.slices.eligibility import WholeReason
from dispatcher.features.slices.equality import Continuation, Difference
from dispatcher.features.slices.options import SliceOptions
from dispatcher.features.slices.slicer import Slicer
from dispatcher.features.slices.status import SlicedModelStatus, SlicingStatus, build_status
from dispatcher.features.slices.support import ModelSupport, SupportTable
from dispatcher.kernel import Options
from dispatcher.limit.budget import Policy
from dispatcher.requests.outcomes.outcome import RetryPolicy
from dispatcher.requests.queue_counts import QueueCounts
from dispatcher.telemetry.status import FeatureStatus
from tests.service.limiter_status import SlowLimiter, create_context


def build_slicing(support: ModelSupport | None = None, *, is_on: bool = True) -> FeatureStatus:
    """Return the status. `support` is what is known of slices of the model m."""
    options = Options(RetryPolicy(), of_features={SliceOptions: SliceOptions(is_on=is_on)})
    limiter = SlowLimiter(Policy(), [])
    limiter.call_duration_s = 4.0
    context = create_context(limiter, options=options)
    slicer = Slicer(context)
    if support is not None:
        slicer.support = SupportTable(_models={("/v1/chat/completions", "m", b""): support})
    return build_status(
        context, slicer, 5.0, QueueCounts(9, 0, 0, 0, of_features={SliceCounts: SliceCounts(3)})
    )


def find_model(support: ModelSupport) -> SlicedModelStatus:
    section = build_slicing(support).section
    assert isinstance(section, SlicingStatus)
    (model,) = section.sliced_models
    return model


def test_section_has_the_mode_the_requests_and_the_duration_of_calls() -> None:
    section = build_slicing().section
    assert isinstance(section, SlicingStatus)
    assert (section.slicing_mode, section.started, section.call_s) == ("auto", 3, 4.0)


UNEQUAL = ModelSupport(
    reason=WholeReason.UNEQUAL,
    why="the same generation in slices had another text",
    difference=Difference("one two", "one three"),
)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"is_on": False}, "slicing.mode is off"),
        ({"support": UNEQUAL}, "requests for m at /v1/chat/completions are not sent in slices: unequal"),
    ],
)
def test_status_says_why_long_requests_are_not_sliced(arguments: dict[str, Any], expected: str) -> None:
    assert build_slicing(**arguments).long_call_reason == expected


def test_verdict_about_slices_is_shown_with_both_texts_and_the_remedy() -> None:
    model = find_model(UNEQUAL)
    assert (model.verdict, model.whole_text, model.sliced_text) == ("unequal", "one two", "one three")
    assert "token ids" in model.remedy
    assert model.sentence == (
        "none, unequal: the same generation in slices had another text "
        f'(whole: "one two", in slices: "one three"). Remedy: {model.remedy}'
    )


@pytest.mark.parametrize(
    ("support", "verdict", "remedy"),
    [
        (ModelSupport(reason=None, continuation=Continuation.TEXT), "equal", ""),
        (ModelSupport(), "unchecked", ""),
        (ModelSupport(why="the server answered 404"), "undecided", ""),
        (ModelSupport(reason=WholeReason.UNEQUAL, is_new_message=True), "unequal", "continue_final_message"),
        (ModelSupport(reason=WholeReason.REASONING), "unequal", "reasoning"),
        (ModelSupport(reason=WholeReason.BODY), "unequal", "continue_final_message"),
        (ModelSupport(reason=WholeReason.NOT_WORTH_IT), "equal", "prefix cache"),
    ],
)
def test_remedy_fits_the_verdict(support: ModelSupport, verdict: str, remedy: str) -> None:
    model = find_model(support)
    assert model.verdict == verdict
    assert remedy in model.remedy
    assert bool(remedy) == bool(model.remedy)


def build_unequal_model() -> SlicedModelStatus:
    return SlicedModelStatus(
        "/v1/chat/completions",
        "phi",
        verdict="unequal",
        whole_reason="unequal",
        why="the same generation had another text",
        whole_text="one two",
        sliced_text="one three",
        remedy="use another server",
    )


def test_explain_says_why_requests_of_a_model_are_not_sliced() -> None:
    equal = SlicedModelStatus("/v1/completions", "qwen", verdict="equal", continued_by="text")
    models = [build_unequal_model(), equal]
    sentences = SlicingStatus(sliced_models=models).explain()
    assert sentences == [f"Slices of {models[0].name}: {models[0].sentence}."]


def test_slices_of_each_model_are_shown_in_one_line() -> None:
    chat = "/v1/chat/completions"
    models = [
        SlicedModelStatus(
            "/v1/completions",
            "qwen",
            verdict="equal",
            continued_by="token ids",
            slice_tokens=128,
            cached_share=0.934,
        ),
        SlicedModelStatus(chat, "qwen", has_template_options=True, verdict="equal", continued_by="text"),
        build_unequal_model(),
        SlicedModelStatus(chat, "", verdict="unchecked", whole_reason="unchecked"),
        *(SlicedModelStatus(chat, f"m-{n}", verdict="equal", continued_by="text") for n in range(20)),
    ]
    lines = SlicingStatus(sliced_models=models).format_lines()
    cached = "93% of the prompts from the prefix cache"
    assert lines[:4] == [
        f"Slices of qwen at /v1/completions: equal, continued by token ids, 128 tokens each, {cached}.",
        f"Slices of qwen at {chat} with chat_template_kwargs: equal, continued by text.",
        (
            f"Slices of phi at {chat}: none, unequal: the same generation had another text "
            '(whole: "one two", in slices: "one three"). Remedy: use another server.'
        ),
        f"Slices of no model at {chat}: none, unchecked.",
    ]
    assert lines[8:] == ["Slices of 16 more: see --json."]
