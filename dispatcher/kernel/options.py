"""Options that the dispatch loop takes from the settings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from dispatcher.features.models.availability import ModelTerms
from dispatcher.requests.outcomes.outcome import RetryPolicy

if TYPE_CHECKING:
    from dispatcher.features.models.versions import FamilyTerms
    from dispatcher.features.models.warmup import WarmupRequest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FamilyOptions:
    """A model with versions, or with a warm-up."""

    terms: FamilyTerms
    load_warmup: Callable[[], Awaitable[tuple[Sequence[WarmupRequest], str]]] | None = None
    """Return the warm-up requests, and why they may be out of date. `None` if the model has no warm-up."""
    is_warmup_required: bool = False
    """True if a version that answered its warm-up with errors stays cold."""


@dataclass(frozen=True, slots=True)
class VersionOptions:
    """Options for all models with versions."""

    families: Sequence[FamilyOptions] = ()
    can_steer: bool = False
    """True if requests can be confined to endpoints, by a header that the gateway reads."""
    warm_directly: bool | None = None
    """True to send warm-ups directly to the endpoints. `None` to do so if requests cannot be steered."""
    warmup_timeout_s: float = 300.0
    """Maximum time that a warm-up spends waiting for answers."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the loop. They can be replaced while it runs."""

    retry: RetryPolicy
    lease_s: float = 30.0
    owner_timeout_s: float = 5.0
    max_payload_bytes: int = 16 << 20
    gateway_url: str = ""
    """Address of the gateway. A gateway at another address counts as unverified."""
    tenant_attribute: str = ""
    """Metadata attribute that names the tenant of a request."""
    default_path: str = ""
    """Path of requests that name none."""
    model_terms: ModelTerms | None = None
    """Rules for requests whose model is not served. `None` if served models are not watched."""
    versions: VersionOptions = field(default_factory=VersionOptions)
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
