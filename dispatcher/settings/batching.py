"""The settings of batching: which requests may travel together."""

from __future__ import annotations

from math import inf
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from dispatcher.core.merging.grouping import CHECK_EVERY, BatchRule, Forming, Mode
from dispatcher.core.merging.shapes import SHAPES, shape_at
from dispatcher.settings.section import Section
from dispatcher.settings.values import AutoNumber, UrlPath, refuse

ShapeName = Literal["embeddings", "tensorflow", "kserve", "rerank", "tei_rerank", "score", "embed", "predict"]

DELAY_S = 0.02
OPENAI_ITEMS = 2048
OPENAI_TOKENS = 300_000
"""What OpenAI's own embeddings take in a call."""


class BatchRuleSettings(Section):
    """Requests to some paths, and how they travel together."""

    paths: Annotated[tuple[UrlPath, ...], Field(strict=False)] = Field(
        min_length=1, description="Paths of these requests; `*` stands for any characters."
    )
    shape: ShapeName | None = Field(
        None,
        description="Which list of the body is merged, and how the answer is split (docs/batching.md). null: "
        "the usual one of the first path.",
    )
    max_size: int = Field(32, ge=1, le=4096, description="Items of a merged call, at the most.")
    preferred_sizes: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)] = Field(
        (), description="Sizes that the server likes: a call goes as soon as one is met, the largest of them."
    )
    max_delay_s: AutoNumber = Field(
        DELAY_S,
        ge=0,
        le=5,
        description="Seconds that a request waits for company, at the most. `auto`, for slow servers that "
        "take one call at a time: 0.02, and in mode `auto` 0.6 of what a call takes (5 at most).",
    )
    idle_flush: bool = Field(True, description="Wait for nobody where the queue is known to be empty.")
    unit: Literal["item", "call"] = Field(
        "item",
        description="What counts one unit of the limit: each `item`, or a whole `call`, where the endpoint "
        "picker counts calls.",
    )
    max_items: int | None = Field(
        None,
        ge=1,
        description="The longest list that the server takes: a longer one is sent in several calls, and "
        "answered once. null: learned when the server refuses one.",
    )
    max_tokens_per_call: int | None = Field(
        None, ge=1, description="The same of tokens, which are estimated from the text. null: learned."
    )

    check_every: int = Field(
        CHECK_EVERY,
        ge=1,
        le=1_000_000,
        description="Of so many merged calls one has an item asked alone as well, and nobody gets an answer "
        "of it before the two are compared; the first three of each model are compared whole. Fewer find a "
        "server that begins to mix up answers sooner, and cost that many more single calls.",
    )

    @field_validator("preferred_sizes")
    @classmethod
    def _can_be_met(cls, sizes: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        most = info.data.get("max_size")
        if most is not None and sizes and max(sizes) > most:
            raise refuse(f"{max(sizes)} is above max_size, {most}, and would never be met")
        return sizes

    @field_validator("shape")
    @classmethod
    def _known_by_its_path(cls, shape: ShapeName | None, info: ValidationInfo) -> ShapeName | None:
        paths = info.data.get("paths")
        if shape is None and paths and shape_at(paths[0]) is None:
            raise refuse(f"must be given: no shape is usual at {paths[0]}")
        return shape

    def rule(self, mode: Mode) -> BatchRule:
        """What the loop goes by."""
        shape = SHAPES[self.shape] if self.shape else shape_at(self.paths[0])
        assert shape is not None  # noqa: S101 -- refused above
        return BatchRule(
            paths=self.paths,
            shape=shape,
            mode=mode,
            forming=Forming(
                max_size=self.max_size,
                preferred_sizes=self.preferred_sizes,
                max_delay_s=DELAY_S if self.max_delay_s is None else self.max_delay_s,
                idle_flush=self.idle_flush,
                max_weight=self.max_tokens_per_call or inf,
            ),
            unit_per_call=self.unit == "call",
            max_items=self.max_items,
            check_every=self.check_every,
            stretches=self.max_delay_s is None,
        )


class BatchingSettings(Section):
    """Requests that travel together: many small ones in one call to the model server.

    Each submitter sends single requests and gets its own answer as ever (docs/batching.md).
    """

    mode: Literal["off", "auto", "on"] = Field(
        "auto",
        description="`auto`: by the rules below, as far as it is measured to pay. `on`: without asking "
        "whether it pays. `off`: each request is a call of its own, however long its list is.",
    )
    rules: Annotated[tuple[BatchRuleSettings, ...], Field(strict=False)] = Field(
        (
            BatchRuleSettings(
                paths=("/v1/embeddings",),
                shape="embeddings",
                max_items=OPENAI_ITEMS,
                max_tokens_per_call=OPENAI_TOKENS,
            ),
        ),
        description="The first rule with a pattern for a request's path counts; without one it goes alone.",
    )

    def in_force(self) -> tuple[BatchRule, ...]:
        """None where each request is a call of its own."""
        return () if self.mode == "off" else tuple(rule.rule(Mode(self.mode)) for rule in self.rules)
