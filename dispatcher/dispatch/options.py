"""Options that the dispatch loop takes from the settings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dispatcher.core.gateway.outcome import RetryPolicy
from dispatcher.core.models.availability import ModelTerms
from dispatcher.core.requests.headers import SESSION_TOKEN
from dispatcher.core.sequences.decisions import SequenceTerms
from dispatcher.core.sequences.turns import CarryMode
from dispatcher.core.slices.eligibility import SliceTerms

if TYPE_CHECKING:
    from dispatcher.core.merging.grouping import BatchRule
    from dispatcher.core.models.versions import FamilyTerms
    from dispatcher.core.models.warmup import WarmupRequest
    from dispatcher.core.requests.queue_timeouts import RuleTimeout


@dataclass(frozen=True, slots=True)
class SequenceOptions:
    """Options for all sequences."""

    terms: SequenceTerms = field(default_factory=SequenceTerms)
    token_header: str = SESSION_TOKEN
    """Header of an answer that names the server, and that is sent with the next request. Empty for none."""
    id_header: str = "x-session-id"
    """Header with the id of the sequence, sent to the gateway. Empty for none."""
    carry: CarryMode = CarryMode.OFF
    """Conversation state to keep if the request does not say."""
    max_carry_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class SliceOptions:
    """Options for long generations, which are sent in slices."""

    is_on: bool = False
    terms: SliceTerms = field(default_factory=SliceTerms)
    measures_size: bool = False
    """True to choose the number of tokens of a slice by what it costs to continue a generation."""
    judges_cost: bool = True
    """True to send requests whole where the model servers do not keep the beginning in their prefix cache."""
    is_streamed: bool = False
    """True to read slices as streams, so that a slice that breaks off keeps what it has generated."""
    max_kept_bytes: int = 1 << 20
    """Largest size of what was generated so far. A longer generation goes on in one call."""
    revokes: bool = False
    """True to end running slices early when realtime requests wait."""
    max_started: int = 1000
    """Number of requests that wait for their next slice at which no further request is sliced."""
    skips_check: bool = False
    """True to slice without checking the models. Only for simulated ones."""


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
    merge_rules: Sequence[BatchRule] = ()
    """Rules for requests that may be merged into one call."""
    rule_timeouts: Sequence[RuleTimeout] = ()
    """Timeouts of all batching rules, also of those that do not merge. Empty if no rule has one."""
    sequences: SequenceOptions = field(default_factory=SequenceOptions)
    slicing: SliceOptions = field(default_factory=SliceOptions)
    model_terms: ModelTerms | None = None
    """Rules for requests whose model is not served. `None` if served models are not watched."""
    versions: VersionOptions = field(default_factory=VersionOptions)
    observe: bool = False
    """True to decide and show everything, and to change nothing."""
