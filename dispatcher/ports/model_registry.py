"""State of model versions that the owners of a pool share through the queue.

The state never moves a request. Entries written by owners expire by themselves; settings of operators stay
until they are removed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


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


class ModelRegistry(Protocol):
    """The part of `Queue` that model versions need.

    Each method is one atomic step that is safe to repeat, and raises only QueueUnavailableError. If a key of
    another program is in the way, no model is warm, labelled or drained, no lock is given, each pin is the
    proposed version, and `ModelRegistryState.problem` says so.
    """

    async def refresh_warm_markers(
        self,
        keep: Collection[tuple[str, str]],
        remove: Collection[tuple[str, str]],
        models_in_use: Collection[str],
    ) -> ModelRegistryState:
        """Refresh the warm markers in `keep`, delete those in `remove`, report the models that this owner has
        in flight, and return the state.

        A marker expires 60 s after the last refresh by any owner. `keep` does not restore a marker that was
        removed or has expired. The report of `models_in_use` holds for 15 s, or until the next report of this
        owner.
        """
        ...

    async def read_model_registry(self) -> ModelRegistryState:
        """Return the state as `refresh_warm_markers` does, without writing."""
        ...

    async def take_warm_up_lock(self, model: str, endpoint: str) -> bool:
        """Take the lock to warm the model at the endpoint, or renew it. Return False if another owner has it.

        The lock expires after 30 s.
        """
        ...

    async def mark_warm(self, model: str, endpoint: str) -> None:
        """Mark the model as warm at the endpoint, and release the lock."""
        ...

    async def release_warm_up_lock(self, model: str, endpoint: str) -> None:
        """Release the lock without marking the model as warm."""
        ...

    async def pin_versions(self, pins: Sequence[PinRequest]) -> Sequence[str]:
        """Return a version for each pin: the pinned one if it is among `allowed_versions`, else
        `proposed_version`, which is pinned from then on.

        At most 100,000 pins are kept; the least recently requested are dropped first.
        """
        ...
