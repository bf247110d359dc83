"""Model registry of a pool in memory: refresh_warm_markers.lua, warm_up_lock.lua, pin_versions.lua and
label_or_drain.lua."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from typing import TypeVar

from dispatcher.ports import ModelMarks, PinAsked
from dispatcher.queue.constants import (
    AHEAD_S,
    DECIDED_MOST,
    PIN_MOST_S,
    PINS_MOST,
    USED_S,
    WARM_S,
    WARMING_S,
)
from dispatcher.queue.model_registry import decided_by, fits, fitting, too_many

Name = TypeVar("Name", bound=Hashable)


class Board:
    """Registry whose steps get the time of the pool's clock. Each entry has the time until which it holds."""

    def __init__(self) -> None:
        self.warm: dict[tuple[str, str], float] = {}
        self.warming: dict[tuple[str, str, str], float] = {}
        """Key: model, endpoint, owner."""
        self.used: dict[tuple[str, str], float] = {}
        """Key: owner, model."""
        self.labels: dict[tuple[str, str], str] = {}
        self.labelled: dict[tuple[str, str], str] = {}
        self.drained: dict[str, str] = {}
        self.pins: OrderedDict[str, tuple[float, str]] = OrderedDict()
        """Time until which each pin is kept, and its version. The pin that was not asked for the longest
        comes first."""

    def look(self, now: float) -> ModelMarks:
        """Return what holds now, without changing anything."""
        return ModelMarks(
            frozenset(pair for pair, until in self.warm.items() if until > now),
            frozenset(model for (_, model), until in self.used.items() if until > now),
            dict(self.labels),
            labelled=dict(self.labelled),
            drained=dict(self.drained),
            warming=frozenset(right for right, until in self.warming.items() if until > now),
        )

    def marks(
        self,
        now: float,
        owner: str,
        keep: Collection[tuple[str, str]],
        cold: Collection[tuple[str, str]],
        using: Collection[str],
    ) -> ModelMarks:
        _lapse(self.warm, now, WARM_S)
        _lapse(self.warming, now, WARMING_S)
        _lapse(self.used, now, USED_S)
        for pair in self.warm.keys() & set(keep):
            self.warm[pair] = now + WARM_S
        for pair in cold:
            self.warm.pop(pair, None)
        # The owner sends all models that it uses, so its previous ones are replaced.
        for mine in [said for said in self.used if said[0] == owner]:
            del self.used[mine]
        self.used |= {(owner, model): now + USED_S for model in using if fits(model)}
        return self.look(now)

    def take(self, now: float, owner: str, model: str, endpoint: str) -> bool:
        """Take or renew the warm-up lock. Return False if another owner has it."""
        _lapse(self.warming, now, WARMING_S)
        if not fits(model, endpoint) or any(
            held[:2] == (model, endpoint) and held[2] != owner for held in self.warming
        ):
            return False
        self.warming[model, endpoint, owner] = now + WARMING_S
        return True

    def give_back(self, now: float, owner: str, model: str, endpoint: str, *, warm: bool) -> None:
        self.warming.pop((model, endpoint, owner), None)
        for pair in fitting([(model, endpoint)]) if warm else ():
            self.warm[pair] = now + WARM_S

    def pin(self, now: float, pins: Sequence[PinAsked], most: int = PINS_MOST) -> list[str]:
        given = []
        for each in pins:
            # The pop moves the pin to the end of the order by last use.
            until, version = self.pins.pop(each.key, (now, ""))
            if until <= now or version not in each.keeps:
                version = each.version
            self.pins[each.key] = now + max(0.0, min(each.for_s, PIN_MOST_S)), version
            given.append(version)
        while self.pins and (len(self.pins) > most or next(iter(self.pins.values()))[0] <= now):
            self.pins.popitem(last=False)
        return given

    def label(self, at: float, family: str, label: str, version: str | None, who: str) -> bool:
        """Set or remove a label. `at` is in Unix seconds."""
        if version is None:
            self.labelled.pop((family, label), None)
            return self.labels.pop((family, label), None) is not None
        if (family, label) not in self.labels and len(self.labels) >= DECIDED_MOST:
            raise too_many("labels")
        self.labels[family, label], self.labelled[family, label] = version, decided_by(who, "", at)
        return True

    def drain(self, at: float, model: str, who: str, why: str) -> None:
        """Drain a version. `at` is in Unix seconds."""
        if model not in self.drained and len(self.drained) >= DECIDED_MOST:
            raise too_many("drains")
        self.drained[model] = decided_by(who, why, at)

    def undrain(self, model: str) -> bool:
        return self.drained.pop(model, None) is not None


def _lapse(held: dict[Name, float], now: float, for_s: float) -> None:
    """Remove what has expired, and let nothing hold for longer than from now on, because the clock may have
    stepped back."""
    for name, until in list(held.items()):
        if until <= now:
            del held[name]
        elif until > now + for_s + AHEAD_S:
            held[name] = now + for_s
