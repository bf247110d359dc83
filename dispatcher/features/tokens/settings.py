"""Settings of the token budget."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dispatcher.settings.section import Section


class TokensSettings(Section):
    """The token budget: batch requests are sent only if the KV memory of the pool has room for their tokens.

    It applies beside the limit on requests, for pools with long prompts or answers (docs/how-to/tokens.md).
    """

    mode: Literal["off", "auto"] = Field(
        "auto",
        description="`auto`: tokens are counted where the signals show the use of the KV memory and its "
        "size is known. `off`: only requests are counted.",
    )
    per_endpoint: int | None = Field(
        None,
        ge=1,
        le=1_000_000_000,
        description="KV memory of an endpoint in tokens, as the model server logs it at its start "
        "(vLLM: `GPU KV cache size`, SGLang: `max_total_num_tokens`). If null, it is read from the pages of "
        "the model servers, which only `signals.source: vllm` reads.",
    )


class Sections(Section, defer_build=True):
    """The section of the token budget."""

    tokens: TokensSettings = TokensSettings()


PLACE = 5
