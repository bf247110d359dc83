"""Settings of batching: which requests may be merged into one call."""

from __future__ import annotations

from math import inf
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from dispatcher.common.grouping import GroupingRule
from dispatcher.features.merging.rules import BatchRule, MergeMode
from dispatcher.features.merging.shapes import SHAPES, find_shape
from dispatcher.requests.queue_timeouts import RuleTimeout, TimeoutAction
from dispatcher.settings.section import Section
from dispatcher.settings.values import AutoNumber, UrlPath, setting_error

ShapeName = Literal["embeddings", "tensorflow", "kserve", "rerank", "tei_rerank", "score", "embed", "predict"]

DEFAULT_DELAY_S = 0.02
OPENAI_MAX_ITEMS = 2048
OPENAI_MAX_TOKENS = 300_000
"""Limits of one call to OpenAI's own embeddings API, with OPENAI_MAX_ITEMS."""


class BatchRuleSettings(Section):
    """Rule for requests to some paths, and how they are merged."""

    paths: Annotated[tuple[UrlPath, ...], Field(strict=False)] = Field(
        min_length=1, description="Paths of the requests that are merged; `*` matches any characters."
    )
    shape: ShapeName | None = Field(
        None,
        description="Which list of the body is merged, and how the answer is split "
        "(docs/how-to/merging.md). If null, the usual shape for the first path.",
    )
    max_size: int = Field(32, ge=1, le=4096, description="Largest number of items in a merged call.")
    preferred_sizes: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)] = Field(
        (),
        description="Numbers of items that suit the server. A call is sent as soon as it can have one of "
        "them, and has the largest of them that it can have.",
    )
    max_delay_s: AutoNumber = Field(
        DEFAULT_DELAY_S,
        ge=0,
        le=5,
        description="Longest time for which a request waits for others to merge with, in seconds. `auto` is "
        "for slow servers that process one call at a time: 0.02, and in mode `auto` 0.6 of the measured call "
        "time, at most 5.",
    )
    unit: Literal["item", "call"] = Field(
        "item",
        description="What counts as one unit of the limit: each `item`, or a whole `call`, for an endpoint "
        "picker that counts calls.",
    )
    max_items: int | None = Field(
        None,
        ge=1,
        description="Longest list that the server accepts. A longer list is sent in several calls, and has "
        "one answer. If null, the length is learned when the server rejects a list.",
    )
    max_tokens_per_call: int | None = Field(
        None,
        ge=1,
        description="Largest number of tokens in a call that the server accepts. Tokens are estimated from "
        "the text. If null, the number is learned when the server rejects a call.",
    )

    default_timeout_s: float | None = Field(
        None,
        gt=0,
        le=31_536_000,
        description="Longest time that a request may wait in the queue, in seconds since its submission. It "
        "applies when the request is claimed, beside the deadline of the request, in every `mode`. A request "
        "without `created` has no such limit, nor has one that was started in slices. If null, only "
        "deadlines apply.",
    )
    timeout_action: Literal["reject", "delay"] = Field(
        "reject",
        description="What happens to a request that has waited for longer than default_timeout_s. `reject`: "
        "it fails with DEADLINE_EXCEEDED. `delay`: it moves behind all requests with a better priority than "
        "9, once, and is sent when its turn comes. `delay` does not apply to requests of sequences.",
    )
    sequences: bool = Field(
        False,
        description="If true, requests of different sequences are merged, at most one of each sequence. The "
        "server must keep the state of each sequence apart, by what the items or `parameters` say. The "
        "answers of such calls are not checked, because an item that is sent twice would change the state.",
    )

    @field_validator("preferred_sizes")
    @classmethod
    def _check_preferred_sizes(cls, sizes: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        most = info.data.get("max_size")
        if most is not None and sizes and max(sizes) > most:
            raise setting_error(f"{max(sizes)} is above max_size, {most}, and would never be met")
        return sizes

    @field_validator("shape")
    @classmethod
    def _check_shape_known(cls, shape: ShapeName | None, info: ValidationInfo) -> ShapeName | None:
        paths = info.data.get("paths")
        if shape is None and paths and find_shape(paths[0]) is None:
            raise setting_error(f"must be given: no shape is usual at {paths[0]}")
        return shape

    @field_validator("timeout_action")
    @classmethod
    def _check_action_has_timeout(cls, action: str, info: ValidationInfo) -> str:
        if action == "delay" and "default_timeout_s" in info.data and info.data["default_timeout_s"] is None:
            raise setting_error("delay needs default_timeout_s")
        return action

    def build_rule(self, mode: MergeMode) -> BatchRule:
        """Return the rule as the dispatcher loop uses it."""
        shape = SHAPES[self.shape] if self.shape else find_shape(self.paths[0])
        assert shape is not None  # noqa: S101 -- refused above
        return BatchRule(
            paths=self.paths,
            shape=shape,
            mode=mode,
            grouping=GroupingRule(
                max_size=self.max_size,
                preferred_sizes=self.preferred_sizes,
                max_delay_s=DEFAULT_DELAY_S if self.max_delay_s is None else self.max_delay_s,
                max_weight=self.max_tokens_per_call or inf,
            ),
            unit_per_call=self.unit == "call",
            max_items=self.max_items,
            merge_sequences=self.sequences,
            can_stretch_delay=self.max_delay_s is None,
        )


class BatchingSettings(Section):
    """Merging of many small requests into one call to the model server.

    Producers still submit single requests, and each gets its own answer (docs/how-to/merging.md).
    """

    mode: Literal["off", "auto", "on"] = Field(
        "auto",
        description="`auto`: requests are merged by the rules below, as far as measurements show a gain. "
        "`on`: they are merged without measuring. `off`: each request is sent in its own call, however long "
        "its list is.",
    )
    rules: Annotated[tuple[BatchRuleSettings, ...], Field(strict=False)] = Field(
        (
            BatchRuleSettings(
                paths=("/v1/embeddings",),
                shape="embeddings",
                max_items=OPENAI_MAX_ITEMS,
                max_tokens_per_call=OPENAI_MAX_TOKENS,
            ),
        ),
        description="Rules for merging. The first rule with a pattern for the path of a request applies. A "
        "request without a rule is sent alone.",
    )

    def active_rules(self) -> tuple[BatchRule, ...]:
        """Return the rules, or nothing if merging is off."""
        return (
            () if self.mode == "off" else tuple(rule.build_rule(MergeMode(self.mode)) for rule in self.rules)
        )

    def build_timeouts(self) -> tuple[RuleTimeout, ...]:
        """Return the timeouts of all rules, in their order. Empty if no rule has one."""
        timeouts = [
            RuleTimeout(
                setting=f"batching.rules[{number}].default_timeout_s",
                paths=rule.paths,
                timeout_s=rule.default_timeout_s,
                action=TimeoutAction(rule.timeout_action),
            )
            for number, rule in enumerate(self.rules)
        ]
        return tuple(timeouts) if any(each.timeout_s is not None for each in timeouts) else ()


class Sections(Section, defer_build=True):
    """The section of merging."""

    batching: BatchingSettings = BatchingSettings()


PLACE = 1
