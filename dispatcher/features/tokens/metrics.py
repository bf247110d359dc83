"""Series of /metrics about the token budget."""

from __future__ import annotations

from collections.abc import Callable

from dispatcher.features.tokens.status import TokensStatus
from dispatcher.telemetry.series import SeriesList
from dispatcher.telemetry.status import Status

PLACE = 5
SERIES = SeriesList()


def read(field: str) -> Callable[[Status], float | None]:
    """Return a function that reads a field of the section."""
    return lambda status: getattr(status.get_section(TokensStatus), field)


SERIES.add_gauge("kv_capacity_tokens", read("kv_capacity_tokens"), "KV memory of the pool, in tokens")
SERIES.add_gauge("kv_used_tokens", read("kv_used_tokens"), "Tokens of the KV memory that are in use")
SERIES.add_gauge(
    "kv_reserved_tokens",
    read("kv_reserved_tokens"),
    "Tokens that the batch requests of this process in flight may grow to",
)
SERIES.add_gauge(
    "kv_room_tokens", read("kv_room_tokens"), "Tokens of the KV memory that more batch requests may reserve"
)
SERIES.add_counter(
    "token_returns",
    "Requests that returned to the queue because there was no room for their tokens",
    lambda s: s.get_section(TokensStatus).token_returns,
)
SERIES.add_table_gauge(
    "token_estimate_error",
    lambda s: {each.model: each.error for each in s.get_section(TokensStatus).token_estimates},
    "Mean relative error of the estimated tokens of prompts, by model",
    "model",
)
