"""State of model versions that the owners of a pool share through the queue.

The state never moves a request. Entries written by owners expire by themselves; settings of operators stay
until they are removed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ModelRegistryState:
    """Current state of the registry."""

    warm_markers: frozenset[tuple[str, str]] = frozenset()
    """Pairs of model and endpoint at which the model is warm."""
    models_in_use: frozenset[str] = frozenset()
    """Models with requests in flight, by the reports of all owners."""
    labels: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Version for each pair of family and label, as operators set them."""
    drained_models: Mapping[str, str] = field(default_factory=dict)
    """Models that an operator drains, with a phrase that says who, since when and why ("by ada …")."""
    problem: str = ""
    """Sentence that says which entries cannot be read and are ignored. Empty if all can be read."""
    label_origins: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Phrase that says who set each label, and since when ("by ada …")."""
    warm_up_locks: frozenset[tuple[str, str, str]] = frozenset()
    """Triples of model, endpoint and owner that holds the lock to warm the model there."""


@dataclass(frozen=True, slots=True)
class PinRequest:
    """Request for a version by a sequence or a job, which keeps the version that it gets."""

    key: str
    """Key of the sequence or job, unique in the pool."""
    proposed_version: str
    """Version to pin if the key has no version yet."""
    allowed_versions: Sequence[str]
    """Versions that the key may keep if it was pinned to one of them before."""
    keep_s: float
    """Lifetime of the pin since the last request for it."""
