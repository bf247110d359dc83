"""Settings of slicing: which long generations are sent in several calls."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from dispatcher.features.slices.eligibility import COMPLETIONS_SUFFIX, SliceTerms
from dispatcher.features.slices.size import DEFAULT_SIZE, MAX_OVERHEAD, SIZES
from dispatcher.settings.section import Section
from dispatcher.settings.values import AutoCount, UrlPath, setting_error


class SlicingSettings(Section):
    """Long generations in slices: calls for some tokens each, so that their slots come free soon.

    A producer submits one request and gets one answer (docs/how-to/slices.md).
    """

    mode: Literal["off", "auto", "on"] = Field(
        "auto",
        description="`on`: long generations are sent in slices, on models that were checked to return the "
        "same text in slices. `auto`: the same, unless the model servers do not keep the beginning of a "
        "generation in their prefix cache. `off`: each request is sent in one call.",
    )
    tokens: AutoCount = Field(
        None,
        ge=1,
        le=1_000_000,
        description="Average number of tokens of a slice. Each has up to half of it more or less, so that "
        "slices that started together do not end together. `auto`: the smallest of "
        f"{', '.join(map(str, SIZES))} at which a continued slice spends at most {MAX_OVERHEAD:.0%} of its "
        f"time before its first token, as measured for each model; {DEFAULT_SIZE} until then.",
    )
    min_tokens: int | None = Field(
        None,
        ge=1,
        description="Smallest `max_tokens` of a request that is sliced. If null, twice the tokens "
        "of a slice.",
    )
    stream: bool = Field(
        False,
        description="If true, the dispatcher reads the answers to slices as streams, so that a slice that is "
        "evicted, revoked or cut keeps what it has generated. If false, its tokens are generated again.",
    )
    revoke: Literal["off", "auto", "on"] = Field(
        "auto",
        description="`on`: running slices end early, the youngest first, when a reading shows that realtime "
        "requests wait or use the reserve. `auto`: only with `stream: true`, which keeps what they have "
        "generated. `off`: slices run to their end.",
    )
    paths: Annotated[tuple[UrlPath, ...], Field(strict=False)] = Field(
        ("/v1/completions", "/v1/chat/completions"),
        description="Paths of the requests that may be sliced. They end with `/completions`, or with "
        "`/chat/completions` for chats.",
    )

    @field_validator("paths")
    @classmethod
    def _check_paths(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for path in paths:
            if not path.endswith(COMPLETIONS_SUFFIX):
                raise setting_error(f"{path} does not end with {COMPLETIONS_SUFFIX}")
        return paths

    @field_validator("min_tokens")
    @classmethod
    def _check_min_tokens(cls, min_tokens: int | None, info: ValidationInfo) -> int | None:
        tokens = info.data.get("tokens") or DEFAULT_SIZE
        if min_tokens is not None and min_tokens <= tokens:
            raise setting_error(f"must be above the tokens of a slice, {tokens}: others are one slice")
        return min_tokens

    def build_terms(self) -> SliceTerms:
        """Return the settings that decide which requests are sliced."""
        tokens = self.tokens or DEFAULT_SIZE
        return SliceTerms(
            slice_tokens=tokens,
            min_tokens=self.min_tokens or 2 * tokens,
            paths=self.paths,
        )


class Sections(Section, defer_build=True):
    """The section of slices."""

    slicing: SlicingSettings = SlicingSettings()


PLACE = 3
