"""The section of /status about the token budget, and what verbs print of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dispatcher.common.printable import truncate_text
from dispatcher.telemetry.status import MAX_TABLE_ROWS, FeatureSection, FeatureStatus

if TYPE_CHECKING:
    from dispatcher.features.tokens.token_budget import TokenBudget
    from dispatcher.requests.queue_counts import QueueCounts

MAX_NAME_CHARS = 100
"""Maximum number of characters that a sentence has of the name of a model."""


@dataclass(frozen=True, slots=True)
class TokenEstimateStatus:
    """Estimates of the prompts for one model."""

    model: str = ""
    error: float = 0.0
    """Mean relative error of the estimates of recent requests."""


@dataclass(frozen=True, slots=True)
class TokensStatus(FeatureSection):
    """State of the token budget in this process."""

    kv_capacity_tokens: float | None = None
    """KV memory of the pool in tokens. `None` if tokens are not counted."""
    kv_used_tokens: float | None = None
    """Tokens in use by all requests, by the newest reading."""
    kv_batch_tokens: float | None = None
    """Part of the tokens in use that certainly belongs to batch requests."""
    kv_reserved_tokens: float | None = None
    """Tokens that the requests of this process in flight may grow to."""
    kv_room_tokens: float | None = None
    """Tokens that more batch requests may reserve now."""
    kv_needed_tokens: float | None = None
    """Tokens of the request that waits for room. `None` if none does."""
    token_returns: int = 0
    """Number of times that a request returned to the queue because there was no room for its tokens."""
    token_estimates: Sequence[TokenEstimateStatus] = ()

    def format_lines(self) -> Sequence[str]:
        """Return a line about the memory."""
        if self.kv_capacity_tokens is None:
            return ()
        line = (
            f"KV memory: {self.kv_used_tokens or 0:,.0f} of {self.kv_capacity_tokens:,.0f} tokens in use, "
            f"room for {max(0.0, self.kv_room_tokens or 0.0):,.0f} more of batch requests."
        )
        return (line,)

    def explain(self) -> Sequence[str]:
        """Return a sentence for the models whose estimates are wrong by more than a fifth."""
        wrong = [each for each in self.token_estimates if each.error > 0.2]
        if not wrong:
            return ()
        worst = max(wrong, key=lambda each: each.error)
        name = truncate_text(worst.model or "requests without a model", MAX_NAME_CHARS)
        return (f"The estimated tokens of prompts for {name} are wrong by {worst.error:.0%} on average.",)


SECTION = TokensStatus


def build_status(budget: TokenBudget, now: float, counts: QueueCounts | None) -> FeatureStatus:
    """Build the status of the token budget of this process."""
    memory, has_work = budget.memory, counts is None or counts.pending > 0
    errors = [*budget.estimator.list_errors().items()][-MAX_TABLE_ROWS:]
    estimates = tuple(TokenEstimateStatus(model, round(error, 3)) for model, error in errors)
    if not budget.apply_reading():
        return FeatureStatus(TokensStatus(token_returns=budget.returned_count, token_estimates=estimates))
    section = TokensStatus(
        kv_capacity_tokens=round(memory.capacity),
        kv_used_tokens=round(memory.used),
        kv_batch_tokens=round(min(memory.held, memory.used)),
        kv_reserved_tokens=round(memory.reserved),
        kv_room_tokens=round(budget.compute_room()),
        kv_needed_tokens=round(budget.needed) if budget.needed is not None and has_work else None,
        token_returns=budget.returned_count,
        token_estimates=estimates,
    )
    return FeatureStatus(section, problems=(budget.problem,) if budget.is_reading_lost else ())
