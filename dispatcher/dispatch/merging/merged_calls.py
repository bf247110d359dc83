"""Values of merging: targets, batch members, calls, and what follows from an answer."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

from dispatcher.core.gateway.outcome import Delivered, Failed
from dispatcher.core.merging import shapes
from dispatcher.core.merging.call_size import CallSize
from dispatcher.core.merging.call_size_epochs import CallTime
from dispatcher.core.merging.grouping import BatchRule, Mode
from dispatcher.core.patterns import any_fits
from dispatcher.core.printable import shortened
from dispatcher.core.requests.request import Request

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from dispatcher.core.merging.grouping import Waiting
    from dispatcher.core.merging.shapes import Part
    from dispatcher.dispatch.in_flight import HeldLease, Try
    from dispatcher.ports import Forwarded


MODELS_MOST = 256
"""Maximum number of targets that are remembered."""
PATHS_MOST = 256
MODEL_CHARS = 100
"""Length to which a longer model name is cut."""
PROGRESS_MOST = 64
"""Maximum number of split lists whose answers are kept while they wait for another attempt."""
PROGRESS_BYTES = 64 << 20


@dataclass(slots=True, eq=False)
class ServedModel:
    """One model behind one path. Requests to it may be merged."""

    path: str
    model: str
    rule: BatchRule
    size: CallSize
    under_way: int = 0
    """Units of its calls in flight."""

    @property
    def delay_s(self) -> float:
        """Maximum time that a request waits for others."""
        rule_s = self.rule.forming.max_delay_s
        return self.size.delay_s(rule_s) if self.rule.stretches else rule_s

    def limits(self) -> dict[str, Any]:
        """Return what the server is known to accept, for the log."""
        size = self.size
        about = {"path": self.path, "model": self.model}
        return {**about, "most": size.takes, "most_tokens": None if size.tokens == inf else size.tokens}

    def told(self) -> dict[str, Any]:
        """Return what is merged and what is known, for /status."""
        size, gain = self.size, self.size.gain
        return {
            "path": self.path,
            "model": self.model,
            "shape": self.rule.shape.name,
            "mode": str(size.mode),
            "size": size.settled,
            "takes": size.takes,
            "gain": None if gain is None else round(gain, 3),
            "checked": size.checked,
            "why_off": size.why_off or None,
            "sentence": size.sentence,
        }


@dataclass(slots=True, eq=False)
class BatchItem:
    """One request that a merge rule applies to."""

    held: HeldLease
    request: Request
    part: Part
    served: ServedModel
    key: Hashable
    """Members with equal keys may be merged."""
    alone: bool = False
    """True if it is sent alone, because it may be the one that makes merged calls fail."""
    waiting: Waiting | None = None
    """Member as the grouping rule sees it, while it waits in a group."""

    @property
    def token(self) -> str:
        """Token of the lease."""
        return self.held.lease.token

    @property
    def units(self) -> int | float:
        """Units of the request alone. A list that is sent in pieces counts its largest piece. If a call
        counts one unit, this is the share of it in a full call."""
        if self.served.rule.unit_per_call:
            return min(1, self.part.size / self.served.size.settled)
        takes = self.served.size.takes
        return self.part.size if takes is None else min(self.part.size, takes)


@dataclass(slots=True, eq=False)
class Proof:
    """Parity check: a merged call that was answered, while single calls show whether its answer is right."""

    items: list[BatchItem]
    answers: dict[str, Forwarded]
    """Result of each member if the answer is right, by the token of the lease."""
    checks: int
    """Number of single calls still to be answered."""
    singles: dict[str, Forwarded] = field(default_factory=dict)
    """Results of the single calls, by the token of the lease."""
    differs: str = ""


@dataclass(slots=True, eq=False)
class CutList:
    """A list that is too long for the server, sent in several calls one after the other."""

    parts: list[Part]
    bodies: list[bytes] = field(default_factory=list)
    """Answers to the first of the parts."""


class ServedModels:
    """Targets by path and model, and the rules for paths."""

    def __init__(self, rules: Sequence[BatchRule]) -> None:
        self._rules = rules
        self._by_path: dict[str, BatchRule | None] = {}
        """Rule of each path that was asked for."""
        self._models: OrderedDict[tuple[str, str], ServedModel] = OrderedDict()

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(list(self._models.values()))

    def rule(self, path: str) -> BatchRule | None:
        """Return the first rule that applies to a path."""
        try:
            return self._by_path[path]
        except KeyError:
            pass
        if len(self._by_path) >= PATHS_MOST:
            # Paths come from producers, so their number must be bounded.
            self._by_path.clear()
        found = next((rule for rule in self._rules if any_fits(rule.paths, path)), None)
        self._by_path[path] = found
        return found

    def of(self, path: str, model: str, rule: BatchRule) -> ServedModel:
        """Return the target of path and model. If there are too many, the least recently used one is
        forgotten."""
        name = path, shortened(model, MODEL_CHARS)
        served = self._models.get(name)
        if served is None:
            forming = rule.forming
            preferred, tokens = forming.preferred_sizes, forming.max_weight
            size = CallSize(rule.mode, forming.max_size, preferred, rule.max_items, tokens, rule.check_every)
            served = self._models[name] = ServedModel(*name, rule, size)
            if len(self._models) > MODELS_MOST:
                self._models.popitem(last=False)
        else:
            self._models.move_to_end(name)
        return served


class PiecesDone:
    """Answers to pieces of lists that wait for another attempt. They are kept in this process only, and not
    for ever."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, tuple[str, CutList]] = OrderedDict()
        """Split lists by the entry id of the request, with the token of the request."""

    def keep(self, item: BatchItem, pieces: CutList) -> None:
        if not pieces.bodies:
            return
        self._kept[item.held.lease.entry] = item.request.token, pieces
        while len(self._kept) > PROGRESS_MOST or self._bytes() > PROGRESS_BYTES:
            self._kept.popitem(last=False)

    def take(self, item: BatchItem) -> CutList | None:
        """Remove and return the split list of a member."""
        token, pieces = self._kept.pop(item.held.lease.entry, ("", None))
        return pieces if token == item.request.token else None

    def _bytes(self) -> int:
        return sum(len(body) for _, pieces in self._kept.values() for body in pieces.bodies)


@dataclass(slots=True, eq=False)
class Bundle:
    """One attempt as `RequestMerger` sees it: a merged call, a single call, a piece of a list, or a parity
    check."""

    items: list[BatchItem]
    most: int
    """Largest call that was allowed when this one was created."""
    again: bool
    """True if it follows from another attempt of these leases."""
    proof: Proof | None = None
    """Parity check that this single call belongs to. Its answer is only compared."""
    pieces: CutList | None = None
    """Split list of which this call sends one piece."""
    units: int = 0
    """Units that it counts in the limit, from its beginning to its end."""
    load: int = 0
    """Units in flight to the same target when it began, its own included."""
    then: list[Try] = field(default_factory=list)
    """Attempts that start when this one has ended."""

    def begins(self, served: ServedModel) -> None:
        """Count the units of the call from now on."""
        held = sum(item.held.lease.units for item in self.items)
        self.units = 1 if served.rule.unit_per_call else held
        self.load = served.under_way = served.under_way + self.units

    def measured(self, ended_at: float) -> None:
        """Record how long the call took, to learn which size pays off. A follow-up is not measured."""
        size = self.items[0].served.size
        if size.mode is not Mode.AUTO or self.again:
            return
        held = [item.held for item in self.items]
        # From the claim on, because waiting in a group also costs units of the limit.
        unit_s = sum(each.lease.units * (ended_at - each.claimed_at) for each in held)
        began_at = min(each.claimed_at for each in held)
        items = sum(item.part.size for item in self.items)
        size.took(CallTime(self.most, items, unit_s, began_at, ended_at, self.load))


Ends = list[tuple["HeldLease", "Forwarded"]]
Answers = dict[str, "Forwarded"]
"""Results by the token of the lease."""


@dataclass(frozen=True, slots=True)
class FollowUp:
    """Consequences of an answer."""

    ends: Ends = field(default_factory=list)
    tries: list[Try] = field(default_factory=list)
    back: list[HeldLease] = field(default_factory=list)
    """Leases that return to their place in the queue."""


def within(served: ServedModel, items: list[BatchItem]) -> Iterator[list[BatchItem]]:
    """Yield the members in calls that the server is known to accept."""
    few: list[BatchItem] = []
    size, tokens = 0, 0
    for item in items:
        size, tokens = size + item.part.size, tokens + item.part.tokens
        if few and (size > (served.size.takes or size) or tokens > served.size.tokens):
            yield few
            few, size, tokens = [], item.part.size, item.part.tokens
        few.append(item)
    if few:
        yield few


def joined(item: BatchItem, pieces: CutList, status: int) -> Delivered | Failed:
    whole = shapes.join(item.part, pieces.parts, pieces.bodies)
    if isinstance(whole, shapes.Unfit):
        return Failed(
            f"the answers to {len(pieces.parts)} pieces of the list could not be joined: {whole.why}"
        )
    return Delivered(status, whole)


def cut_list(item: BatchItem) -> CutList | None:
    """Split the list of a member into pieces that the server accepts. `None` if it is not too long."""
    part, takes, tokens = item.part, item.served.size.takes, item.served.size.tokens
    if part.size < 2 or ((takes is None or part.size <= takes) and part.tokens <= tokens):
        return None
    parts = shapes.cut(part, takes or part.size, tokens)
    return CutList(parts) if len(parts) > 1 else None
