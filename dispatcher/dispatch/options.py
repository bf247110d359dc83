"""What the loop takes from the settings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dispatcher.core.gateway.outcome import RetryPolicy
from dispatcher.core.models.availability import ModelTerms
from dispatcher.core.requests.headers import SESSION_TOKEN
from dispatcher.core.sequences.decisions import SequenceTerms
from dispatcher.core.sequences.turns import Carry

if TYPE_CHECKING:
    from dispatcher.core.merging.grouping import BatchRule
    from dispatcher.core.models.versions import FamilyTerms
    from dispatcher.core.models.warmup import WarmupRequest


@dataclass(frozen=True, slots=True)
class SequenceOptions:
    """What holds for all sequences."""

    terms: SequenceTerms = field(default_factory=SequenceTerms)
    header: str = SESSION_TOKEN
    """In an answer, and then in the next request: the server that it is to go to. Empty: none."""
    id_header: str = "x-session-id"
    """The sequence's id, as the gateway gets it. Empty: it does not."""
    carry: Carry = Carry.OFF
    """For a request that does not say."""
    max_carry_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class FamilyOptions:
    """A model with versions, or with a warm-up."""

    terms: FamilyTerms
    warmup: Callable[[], Awaitable[tuple[Sequence[WarmupRequest], str]]] | None = None
    """Tells what is sent to what is cold, and why that may be out of date. None: nothing is sent."""
    required: bool = False
    """What was answered with errors stays cold."""


@dataclass(frozen=True, slots=True)
class VersionOptions:
    families: Sequence[FamilyOptions] = ()
    steered: bool = False
    """The gateway takes the endpoints that a request may go to from a header."""
    straight: bool | None = None
    """Warm-up goes straight to the endpoints; None: where requests cannot be steered."""
    warm_s: float = 300.0
    """What a warm-up may spend waiting for answers."""


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
    path: str = ""
    """Of a request that names none."""
    batching: Sequence[BatchRule] = ()
    """Which requests may travel together."""
    sequences: SequenceOptions = field(default_factory=SequenceOptions)
    models: ModelTerms | None = None
    """What becomes of requests whose model is not served; None: nobody watches that."""
    versions: VersionOptions = field(default_factory=VersionOptions)
    observe: bool = False
    """Decide and show everything, touch nothing."""
