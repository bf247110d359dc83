"""What a rule for batches makes of a request, and what a try of several is for."""

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
"""Models behind paths of which something is remembered."""
PATHS_MOST = 256
MODEL_CHARS = 100
"""Of a name that is longer."""
PROGRESS_MOST = 64
"""Lists of which answers to pieces are kept while they wait for another try."""
PROGRESS_BYTES = 64 << 20


@dataclass(slots=True, eq=False)
class ServedModel:
    """What travels together in principle: requests to one model behind one path."""

    path: str
    model: str
    rule: BatchRule
    size: CallSize
    under_way: int = 0
    """Units of its calls."""

    @property
    def delay_s(self) -> float:
        """How long a request waits for company, at the most."""
        rule_s = self.rule.forming.max_delay_s
        return self.size.delay_s(rule_s) if self.rule.stretches else rule_s

    def limits(self) -> dict[str, Any]:
        """What it takes, as far as is known, for the log."""
        size = self.size
        about = {"path": self.path, "model": self.model}
        return {**about, "most": size.takes, "most_tokens": None if size.tokens == inf else size.tokens}

    def told(self) -> dict[str, Any]:
        """What is merged, and what is known, for people."""
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
    """One request of a rule."""

    held: HeldLease
    request: Request
    part: Part
    served: ServedModel
    key: Hashable
    """Those with equal keys may travel together."""
    alone: bool = False
    """It travels in no company: it may be the one that spoils a call."""
    waiting: Waiting | None = None
    """As the former sees it, while it waits for company."""

    @property
    def token(self) -> str:
        """Of its lease."""
        return self.held.lease.token

    @property
    def units(self) -> int | float:
        """What it weighs by itself: a list that is sent in pieces no more than one of them. Where a call
        counts one unit, its share of that in full company."""
        if self.served.rule.unit_per_call:
            return min(1, self.part.size / self.served.size.settled)
        takes = self.served.size.takes
        return self.part.size if takes is None else min(self.part.size, takes)


@dataclass(slots=True, eq=False)
class Proof:
    """A merged call that was answered, while single calls show whether it was answered rightly."""

    items: list[BatchItem]
    answers: dict[str, Forwarded]
    """What each item ends with if it was, by the token of its lease."""
    checks: int
    """Single calls that are still to come back."""
    singles: dict[str, Forwarded] = field(default_factory=dict)
    """What those were answered, by the token of the lease."""
    differs: str = ""


@dataclass(slots=True, eq=False)
class CutList:
    """An over-long list on its way in several calls, one after the other."""

    parts: list[Part]
    bodies: list[bytes] = field(default_factory=list)
    """The answers to the first of them."""


class ServedModels:
    """What the rules say of paths, and what is known of the models behind them."""

    def __init__(self, rules: Sequence[BatchRule]) -> None:
        self._rules = rules
        self._by_path: dict[str, BatchRule | None] = {}
        """As paths were asked for."""
        self._models: OrderedDict[tuple[str, str], ServedModel] = OrderedDict()

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(list(self._models.values()))

    def rule(self, path: str) -> BatchRule | None:
        """The first that counts for a path."""
        try:
            return self._by_path[path]
        except KeyError:
            pass
        if len(self._by_path) >= PATHS_MOST:
            self._by_path.clear()
        found = next((rule for rule in self._rules if any_fits(rule.paths, path)), None)
        self._by_path[path] = found
        return found

    def of(self, path: str, model: str, rule: BatchRule) -> ServedModel:
        """The model behind the path. Of too many the one that was longest not asked for is forgotten."""
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
    """What was answered to pieces of lists that wait for another try. Of this process, and not for ever."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, tuple[str, CutList]] = OrderedDict()
        """By the entry in the queue, with the token of the request."""

    def keep(self, item: BatchItem, pieces: CutList) -> None:
        if not pieces.bodies:
            return
        self._kept[item.held.lease.entry] = item.request.token, pieces
        while len(self._kept) > PROGRESS_MOST or self._bytes() > PROGRESS_BYTES:
            self._kept.popitem(last=False)

    def take(self, item: BatchItem) -> CutList | None:
        """What is kept of it, which is kept no longer."""
        token, pieces = self._kept.pop(item.held.lease.entry, ("", None))
        return pieces if token == item.request.token else None

    def _bytes(self) -> int:
        return sum(len(body) for _, pieces in self._kept.values() for body in pieces.bodies)


@dataclass(slots=True, eq=False)
class Bundle:
    """What one try is for."""

    items: list[BatchItem]
    most: int
    """The largest call that was allowed when it was formed."""
    again: bool
    """It follows from another try of these leases."""
    proof: Proof | None = None
    """Set where its answer is only to be compared."""
    pieces: CutList | None = None
    """Set where it carries a piece of a list."""
    units: int = 0
    """What it counts of the limit, from its beginning to its end."""
    load: int = 0
    """Units that were under way to the same model when it began, its own among them."""
    then: list[Try] = field(default_factory=list)
    """Tries that go when this one is back."""

    def begins(self, served: ServedModel) -> None:
        """It counts from now on."""
        held = sum(item.held.lease.units for item in self.items)
        self.units = 1 if served.rule.unit_per_call else held
        self.load = served.under_way = served.under_way + self.units

    def measured(self, ended_at: float) -> None:
        """Its answer came: what it took tells what pays. What follows from another call is no measure."""
        size = self.items[0].served.size
        if size.mode is not Mode.AUTO or self.again:
            return
        held = [item.held for item in self.items]
        unit_s = sum(each.lease.units * (ended_at - each.claimed_at) for each in held)
        began_at = min(each.claimed_at for each in held)
        items = sum(item.part.size for item in self.items)
        size.took(CallTime(self.most, items, unit_s, began_at, ended_at, self.load))


Ends = list[tuple["HeldLease", "Forwarded"]]
Answers = dict[str, "Forwarded"]
"""By the token of the lease."""


@dataclass(frozen=True, slots=True)
class FollowUp:
    """What follows from an answer."""

    ends: Ends = field(default_factory=list)
    tries: list[Try] = field(default_factory=list)
    back: list[HeldLease] = field(default_factory=list)
    """Those that go back to their place in the queue."""


def within(served: ServedModel, items: list[BatchItem]) -> Iterator[list[BatchItem]]:
    """The same in calls that the server takes, as far as is known."""
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
    """Its list in pieces that the server takes; None: it is not too long."""
    part, takes, tokens = item.part, item.served.size.takes, item.served.size.tokens
    if part.size < 2 or ((takes is None or part.size <= takes) and part.tokens <= tokens):
        return None
    parts = shapes.cut(part, takes or part.size, tokens)
    return CutList(parts) if len(parts) > 1 else None
