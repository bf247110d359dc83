"""Options that the dispatch loop takes from the settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from dispatcher.requests.outcomes.outcome import RetryPolicy

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the loop. They can be replaced while it runs."""

    retry: RetryPolicy
    lease_s: float = 30.0
    owner_timeout_s: float = 5.0
    max_payload_bytes: int = 16 << 20
    gateway_url: str = ""
    """Address of the gateway. A gateway at another address counts as unverified."""
    fairness_attribute: str = ""
    """Metadata attribute whose value the gateway gets as the fairness id of a request."""
    default_path: str = ""
    """Path of requests that name none."""
    observe: bool = False
    """True to decide and show everything, and to change nothing."""
    of_features: Mapping[type, object] = field(default_factory=dict)
    """Options that settings of features determine, by their class. Use `of`."""

    def of(self, kind: type[T]) -> T:
        """Return the options of this class. They have their defaults if nothing sets them."""
        found = self.of_features.get(kind)
        return found if isinstance(found, kind) else kind()


def index_options(*options: object) -> dict[type, object]:
    """Return options of features for `Options.of_features`."""
    return {type(each): each for each in options}
