"""Calls of models to the queue: those of a dispatcher, and those of operators.

Each method is one atomic step that is safe to repeat, and raises only QueueUnavailableError. If a key of
another program is in the way, no model is warm, labelled or drained, no lock is given, each pin is the
proposed version, and `ModelRegistryState.problem` says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatcher.features.models.queue import registry, waiting

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dispatcher.features.models.queue.waiting import ReturnedRequests
    from dispatcher.features.models.registry import ModelRegistryState, PinRequest
    from dispatcher.queue.redis.backend import Backend
    from dispatcher.queue.redis.owner import RedisQueue
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin


class _ReadingCalls:
    """Calls that only read."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def count_waiting_by_model(self) -> Mapping[str, int]:
        """Return the number of requests that wait for each model (named by `lanes.shorten_model_name`).
        Covers at most 1,000 models, and others with each call."""
        return await waiting.count_waiting_by_model(self._backend)

    async def read_model_registry(self) -> ModelRegistryState:
        """Return the state of model versions."""
        return await registry.refresh_registry(self._backend)


class ModelCalls(_ReadingCalls):
    """Calls of one dispatcher. Obtained by `Queue.open_calls`."""

    def __init__(self, queue: RedisQueue) -> None:
        super().__init__(queue.backend)
        self._owner = queue.owner

    async def return_waiting_for_models(self, models: Sequence[str]) -> ReturnedRequests:
        """Return requests that wait for one of these models to their old place in the queue.

        Call it for models that are served now or that no rule makes requests wait for any more. Each call
        moves some hundreds, best score first. Several owners may call it at once. After a lost reply,
        `returned_count` counts only what the repetition moved.
        """
        return await waiting.return_waiting_for_models(self._backend, models)

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
        return await registry.refresh_registry(self._backend, self._owner, keep, remove, models_in_use)

    async def take_warm_up_lock(self, model: str, endpoint: str) -> bool:
        """Take the lock to warm the model at the endpoint, or renew it. Return False if another owner has it.

        The lock expires after 30 s.
        """
        return await registry.update_warm_up_lock(self._backend, "take", self._owner, model, endpoint)

    async def mark_warm(self, model: str, endpoint: str) -> None:
        """Mark the model as warm at the endpoint, and release the lock."""
        await registry.update_warm_up_lock(self._backend, "warm", self._owner, model, endpoint)

    async def release_warm_up_lock(self, model: str, endpoint: str) -> None:
        """Release the lock without marking the model as warm."""
        await registry.update_warm_up_lock(self._backend, "back", self._owner, model, endpoint)

    async def pin_versions(self, pins: Sequence[PinRequest]) -> Sequence[str]:
        """Return a version for each pin: the pinned one if it is among `allowed_versions`, else
        `proposed_version`, which is pinned from then on.

        At most 100,000 pins are kept; the least recently requested are dropped first.
        """
        return await registry.pin_versions(self._backend, pins)


class ModelAdminCalls(_ReadingCalls):
    """Calls of producers and operators. Obtained by `QueueAdmin.open_calls`."""

    def __init__(self, admin: RedisQueueAdmin) -> None:
        super().__init__(admin.backend)

    async def set_label(self, family: str, label: str, version: str | None, who: str) -> bool:
        """Make the label mean this version of the family, whatever the settings say; with `None`, remove the
        label.

        Return False if there was no label to remove. Raises CallRefusedError for a name of more than 256
        bytes, and if there are 1,000 labels already.
        """
        return await registry.set_label(self._backend, family, label, version, who)

    async def drain_version(self, model: str, who: str, why: str = "") -> None:
        """Stop new requests for this version; running requests continue. Limits as for `set_label`."""
        await registry.drain_version(self._backend, model, who, why)

    async def undrain_version(self, model: str) -> bool:
        """Allow new requests for this version again. Return False if it was not drained."""
        return await registry.undrain_version(self._backend, model)
