"""Which models a pool serves, by what its endpoints say. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Listing:
    """What one endpoint said of the models that it serves, or why it said nothing."""

    endpoint: str
    """For people: host and port; `gateway` where the gateway was asked for all of them."""
    asked_at: float
    """Loop time before it was asked: what it says is of then or later."""
    models: tuple[str, ...] | None
    """The ids that requests may name; None: it could not be read."""
    loading: tuple[str, ...] = ()
    """Those among others that it has begun to load and does not serve yet, where it tells."""
    problem: str = ""
    """One sentence: why it could not be read."""
