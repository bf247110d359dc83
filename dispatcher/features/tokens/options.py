"""Options of the token budget that the loop takes from the settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dispatcher.features.tokens.settings import TokensSettings

if TYPE_CHECKING:
    from dispatcher.settings.model import Settings


@dataclass(frozen=True, slots=True)
class TokenOptions:
    """Options of the token budget."""

    is_on: bool = False
    per_endpoint: int | None = None
    """KV memory of an endpoint in tokens. `None` if the readings show it."""
    reserve: float = 0.05
    """Share of the memory that batch requests never take: that of the limit on requests."""
    find_prompt: Callable[[bytes], float] | None = None
    """Return the tokens of the prompt of a body, instead of an estimate. Only for simulated requests."""
    assumed_factor: float = 1.0
    """Factor of every estimate. Only for simulated requests."""


def build_options(settings: Settings) -> tuple[TokenOptions]:
    """Return the options that follow from the settings."""
    tokens = settings.get_section(TokensSettings)
    return (
        TokenOptions(
            is_on=tokens.mode != "off",
            per_endpoint=tokens.per_endpoint,
            reserve=settings.budget.reserve,
        ),
    )
