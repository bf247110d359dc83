"""Model registry of a pool in memory: refresh_warm_markers.lua, warm_up_lock.lua, pin_versions.lua and
label_or_drain.lua."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from typing import TypeVar

from dispatcher.features.models.queue.registry_rules import (
    MAX_LABELS_OR_DRAINS,
    MAX_PIN_S,
    MAX_PINS,
    MODEL_IN_USE_S,
    WARM_MARKER_S,
    WARM_UP_LOCK_S,
    are_valid_names,
    describe_decision,
    make_limit_error,
)
from dispatcher.features.models.registry import ModelRegistryState, PinRequest
from dispatcher.queue.constants import CLOCK_STEP_S

Name = TypeVar("Name", bound=Hashable)


class MemoryModelRegistry:
    """Registry whose steps get the time of the pool's clock. Each entry has the time until which it holds."""

    def __init__(self) -> None:
        self.warm_until: dict[tuple[str, str], float] = {}
        self.lock_until: dict[tuple[str, str, str], float] = {}
        """Key: model, endpoint, owner."""
        self.in_use_until: dict[tuple[str, str], float] = {}
        """Key: owner, model."""
        self.labels: dict[tuple[str, str], str] = {}
        self.label_origins: dict[tuple[str, str], str] = {}
        self.drained_models: dict[str, str] = {}
        self.pins: OrderedDict[str, tuple[float, str]] = OrderedDict()
        """Time until which each pin is kept, and its version. The pin that was not asked for the longest
        comes first."""

    def read_state(self, now: float) -> ModelRegistryState:
        """Return what holds now, without changing anything."""
        return ModelRegistryState(
            frozenset(pair for pair, until in self.warm_until.items() if until > now),
            frozenset(model for (_, model), until in self.in_use_until.items() if until > now),
            dict(self.labels),
            label_origins=dict(self.label_origins),
            drained_models=dict(self.drained_models),
            warm_up_locks=frozenset(right for right, until in self.lock_until.items() if until > now),
        )

    def refresh_warm_markers(
        self,
        now: float,
        owner: str,
        keep: Collection[tuple[str, str]],
        remove: Collection[tuple[str, str]],
        models_in_use: Collection[str],
    ) -> ModelRegistryState:
        _drop_expired(self.warm_until, now, WARM_MARKER_S)
        _drop_expired(self.lock_until, now, WARM_UP_LOCK_S)
        _drop_expired(self.in_use_until, now, MODEL_IN_USE_S)
        for pair in self.warm_until.keys() & set(keep):
            self.warm_until[pair] = now + WARM_MARKER_S
        for pair in remove:
            self.warm_until.pop(pair, None)
        # The owner sends all models that it uses, so its previous ones are replaced.
        for mine in [said for said in self.in_use_until if said[0] == owner]:
            del self.in_use_until[mine]
        self.in_use_until |= {
            (owner, model): now + MODEL_IN_USE_S for model in models_in_use if are_valid_names(model)
        }
        return self.read_state(now)

    def take_warm_up_lock(self, now: float, owner: str, model: str, endpoint: str) -> bool:
        """Take or renew the warm-up lock. Return False if another owner has it."""
        _drop_expired(self.lock_until, now, WARM_UP_LOCK_S)
        if not are_valid_names(model, endpoint) or any(
            lock[:2] == (model, endpoint) and lock[2] != owner for lock in self.lock_until
        ):
            return False
        self.lock_until[model, endpoint, owner] = now + WARM_UP_LOCK_S
        return True

    def release_warm_up_lock(
        self, now: float, owner: str, model: str, endpoint: str, *, is_warm: bool
    ) -> None:
        self.lock_until.pop((model, endpoint, owner), None)
        if is_warm and are_valid_names(model, endpoint):
            self.warm_until[model, endpoint] = now + WARM_MARKER_S

    def pin_versions(self, now: float, pins: Sequence[PinRequest]) -> list[str]:
        given = []
        for each in pins:
            # The pop moves the pin to the end of the order by last use.
            until, version = self.pins.pop(each.key, (now, ""))
            if until <= now or version not in each.allowed_versions:
                version = each.proposed_version
            self.pins[each.key] = now + max(0.0, min(each.keep_s, MAX_PIN_S)), version
            given.append(version)
        while self.pins and (len(self.pins) > MAX_PINS or next(iter(self.pins.values()))[0] <= now):
            self.pins.popitem(last=False)
        return given

    def set_label(self, at: float, family: str, label: str, version: str | None, who: str) -> bool:
        """Set or remove a label. `at` is in Unix seconds."""
        if version is None:
            self.label_origins.pop((family, label), None)
            return self.labels.pop((family, label), None) is not None
        if (family, label) not in self.labels and len(self.labels) >= MAX_LABELS_OR_DRAINS:
            raise make_limit_error("labels")
        self.labels[family, label], self.label_origins[family, label] = (
            version,
            describe_decision(who, "", at),
        )
        return True

    def drain_version(self, at: float, model: str, who: str, why: str) -> None:
        """Drain a version. `at` is in Unix seconds."""
        if model not in self.drained_models and len(self.drained_models) >= MAX_LABELS_OR_DRAINS:
            raise make_limit_error("drains")
        self.drained_models[model] = describe_decision(who, why, at)

    def undrain_version(self, model: str) -> bool:
        return self.drained_models.pop(model, None) is not None


def _drop_expired(until_by_name: dict[Name, float], now: float, for_s: float) -> None:
    """Remove what has expired, and let nothing hold for longer than from now on, because the clock may have
    stepped back."""
    for name, until in list(until_by_name.items()):
        if until <= now:
            del until_by_name[name]
        elif until > now + for_s + CLOCK_STEP_S:
            until_by_name[name] = now + for_s
