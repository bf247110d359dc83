"""What the loop takes from the settings."""

from __future__ import annotations

from dataclasses import dataclass

from dispatcher.core.outcome import RetryPolicy


@dataclass(frozen=True, slots=True)
class Options:
    """May be replaced while the loop runs."""

    retry: RetryPolicy
    lease_s: float = 30.0
    owner_timeout_s: float = 5.0
    max_payload_bytes: int = 16 << 20
    gateway: str = ""
    """Where requests go; at another address a stranger answers."""
    tenant_from: str = ""
    """The metadata attribute that names a request's tenant."""
    observe: bool = False
    """Decide and show everything, touch nothing."""
