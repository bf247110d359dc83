"""Which models a pool serves, by what its endpoints say, and what follows for a request. Pure.

    ready      an endpoint names it, in a listing that is younger than the newest answer that it is not there
    loading    none does; one says that it loads it
    absent     none does, and all of them can be read
    unknown    none does, and some cannot be read: it may be served there

An endpoint that cannot be read is believed for a while by what it said last (TRUST_S). One that has left the
list is forgotten with all that it said.

A request goes where its model is ready, or where nobody knows of such a model and not all can be read: then
the server is to say. It waits where the model is expected (the operator named it, or it was served before),
and ends at once where it can only be a mistake. Nothing here closes the gate: one model holds back its own
requests, and no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from dispatcher.core.models.names import quoted
from dispatcher.core.requests.lanes import MODEL_BYTES

TRUST_S = 30.0
"""So long what an endpoint said last is believed while it cannot be read."""
DENIED_S, DENIED_MOST_S = 5.0, 300.0
"""After an answer that a listed model is not there it is not asked for so long; twice as long each further
time, until one is answered, or other endpoints list it."""
SEEN_MOST = 10_000
GATEWAY = "gateway"
"""The endpoint, where the gateway was asked for all."""
_NAMES_TOLD = 10


@dataclass(frozen=True, slots=True)
class Listing:
    """What one endpoint said of the models that it serves, or why it said nothing."""

    endpoint: str
    """For people: host and port; `gateway` where the gateway was asked for all of them."""
    asked_at: float
    """Loop time before it was asked: what it says is of then or later."""
    models: tuple[str, ...] | None
    """The ids that requests may name; None: it could not be read."""
    loading: tuple[str, ...] = ()
    """Those among others that it has begun to load and does not serve yet, where it tells."""
    problem: str = ""
    """One sentence: why it could not be read."""
    down: bool = False
    """Nobody listens there: whoever answers next is another process, which knows nothing of before."""


class ModelState(StrEnum):
    READY = "ready"
    LOADING = "loading"
    ABSENT = "absent"
    UNKNOWN = "unknown"


class WhenAbsent(StrEnum):
    """What a request of a model does that is expected and not there."""

    WAIT = "wait"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class ModelTerms:
    """What the operator decided."""

    named: Mapping[str, WhenAbsent] = field(default_factory=dict)
    """The models that the settings name."""
    absent: WhenAbsent = WhenAbsent.WAIT
    """For others that were served before."""


@dataclass(frozen=True, slots=True)
class ModelSeen:
    """One model at one moment."""

    name: str
    state: ModelState
    serving: int
    """Endpoints that name it."""
    endpoints: int
    """All there are."""
    unread: int
    """Those among them of which nothing is known."""
    since: float
    """Loop time of the last change of its state."""
    named: bool
    """The settings name it."""
    denied: bool
    """Endpoints name it, and an answer said that it is not there."""


@dataclass(frozen=True, slots=True)
class ModelMoved:
    """The state of a model has changed."""

    seen: ModelSeen
    before: ModelState


@dataclass(frozen=True, slots=True)
class GoesToModel:
    """It is served, as far as anybody knows."""


@dataclass(frozen=True, slots=True)
class AwaitsModel:
    """The model is expected, and not served now."""

    why: str
    """Reason why the model cannot be used, with its name, such as `model 'm' is being loaded`."""


@dataclass(frozen=True, slots=True)
class NoSuchModel:
    """It is not served, and nobody expects it."""

    why: str
    """With the names that are served."""


ModelVerdict = GoesToModel | AwaitsModel | NoSuchModel
_GOES = GoesToModel()


@dataclass(slots=True)
class _Denial:
    at: float
    until: float
    times: int
    """So often in a row, while the same endpoints named it."""
    by: frozenset[str]


class PoolModels:
    """All that is known of the models of a pool. Bounded, whatever endpoints say."""

    def __init__(self, terms: ModelTerms, now: float) -> None:
        self.terms = terms
        self._began_at = now
        self._said: dict[str, Listing] = {}
        """What each endpoint said last that could be read."""
        self._endpoints: dict[str, str] = {}
        """Those of the newest round, with what is wrong with each; empty: nothing."""
        self._down: set[str] = set()
        """Those of them where nobody listens."""
        self._serving: dict[str, list[Listing]] = {}
        self._loading: set[str] = set()
        self._unread = 0
        self._heard = False
        self._seen: dict[str, None] = {}
        """Models that were served once, those seen last at the end."""
        self._states: dict[str, tuple[ModelState, float]] = {}
        """Of the models that are expected, with the time of the last change."""
        self._denials: dict[str, _Denial] = {}

    # What is heard.

    def heard(self, listings: Sequence[Listing], now: float) -> list[ModelMoved]:
        """A round: each endpoint there is, once. What has changed by it."""
        self._heard = True
        self._endpoints = {each.endpoint: each.problem for each in listings}
        self._down = {each.endpoint for each in listings if each.down}
        self._said = {name: said for name, said in self._said.items() if name in self._endpoints}
        for each in listings:
            if each.models is not None:
                self._said[each.endpoint] = each
        trusted = [said for said in self._said.values() if said.asked_at > now - TRUST_S]
        self._unread = len(self._endpoints) - len(trusted)
        self._serving, self._loading = {}, set()
        for said in trusted:
            for name in said.models or ():
                self._serving.setdefault(name, []).append(said)
            self._loading.update(said.loading)
        self.expect(self._serving)
        return self._moved(now)

    def expect(self, names: Iterable[str]) -> None:
        """These were served once, or requests wait for them."""
        for name in names:
            self._seen.pop(name, None)
            self._seen[name] = None
        for name in list(self._seen)[: max(0, len(self._seen) - SEEN_MOST)]:
            del self._seen[name]

    def denied(self, model: str, sent_at: float, now: float) -> None:
        """A request that was sent then was answered that there is no such model."""
        if self.partly(model):  # it may have come to one of the others
            return
        before = self._denials.get(model)
        if before is not None and sent_at <= before.at:  # they were sent together
            return
        by = frozenset(said.endpoint for said in self._serving.get(model, ()))
        times = before.times + 1 if before is not None and before.by == by else 1
        hold_s = min(DENIED_MOST_S, DENIED_S * 2.0 ** min(times - 1, 16))
        self._denials[model] = _Denial(now, now + hold_s, times, by)

    def answered(self, model: str, sent_at: float) -> None:
        """A request that was sent then was served."""
        denial = self._denials.get(model)
        if denial is not None and sent_at > denial.at:
            del self._denials[model]

    def reconfigure(self, terms: ModelTerms) -> None:
        self.terms = terms

    # What is known.

    @property
    def endpoints(self) -> Set[str]:
        """Those of the newest round."""
        return self._endpoints.keys()

    @property
    def loading(self) -> frozenset[str]:
        return frozenset(self._loading)

    def ready(self, now: float) -> dict[str, frozenset[str]]:
        """The models that are served, with the endpoints that name them."""
        return {
            name: frozenset([said.endpoint for said in serving])
            for name, serving in self._serving.items()
            if not self._is_denied(name, now)
        }

    def gone(self, model: str, endpoint: str) -> bool:
        """The endpoint does not serve it any more, or may be another process by now."""
        problem = self._endpoints.get(endpoint)
        if problem is None or endpoint in self._down:
            return True
        return not problem and all(said.endpoint != endpoint for said in self._serving.get(model, ()))

    # What follows.

    def verdict(self, model: str, now: float) -> ModelVerdict:
        """What becomes of a request for this model."""
        state = self._state(model, now)
        if state is ModelState.READY or not model:
            return _GOES
        rule = self._rule(model)
        if rule is WhenAbsent.WAIT:
            return AwaitsModel(f"model {quoted(model)} {self._why(model, state)}")
        if state is ModelState.ABSENT or (rule is not None and state is ModelState.LOADING):
            return NoSuchModel(f"no model {quoted(model)} is served here: {self._names()}")
        return _GOES

    def sentence(self, model: str, now: float) -> str:
        """How it is with a model."""
        state = self._state(model, now)
        if state is not ModelState.READY:
            return f"it {self._why(model, state)}"
        count, endpoints = len(self._serving[model]), len(self._endpoints)
        return "it is served" if count == endpoints else f"it is served by {count} of {endpoints} endpoints"

    def partly(self, model: str) -> bool:
        """Some endpoints serve it and others, that can be read, do not: who sends there may meet either."""
        return 0 < len(self._serving.get(model, ())) < len(self._endpoints) - self._unread

    def look(self, model: str, now: float) -> ModelSeen:
        state = self._state(model, now)
        at = self._states.get(model, (state, self._began_at))[1]
        return ModelSeen(
            name=model,
            state=state,
            serving=len(self._serving.get(model, ())),
            endpoints=len(self._endpoints),
            unread=self._unread,
            since=at,
            named=model in self.terms.named,
            denied=self._is_denied(model, now),
        )

    def known(self) -> list[str]:
        """Those that the settings name, then those that are served or were, by name."""
        return [*self.terms.named, *sorted(self._seen.keys() - self.terms.named.keys())]

    @property
    def problems(self) -> dict[str, str]:
        """Endpoints that could not be read in the newest round, with the reason."""
        return {name: problem for name, problem in self._endpoints.items() if problem}

    # Details.

    def _rule(self, model: str) -> WhenAbsent | None:
        """None: nobody expects it."""
        if len(model.encode(errors="replace")) > MODEL_BYTES:
            return None
        named = self.terms.named.get(model)
        if named is not None:
            return named
        return self.terms.absent if model in self._seen else None

    def _state(self, model: str, now: float) -> ModelState:
        if model in self._serving and not self._is_denied(model, now):
            return ModelState.READY
        if model in self._loading:
            return ModelState.LOADING
        if model in self._serving:
            return ModelState.ABSENT
        return (
            ModelState.ABSENT if self._heard and self._endpoints and not self._unread else ModelState.UNKNOWN
        )

    def _is_denied(self, model: str, now: float) -> bool:
        denial = self._denials.get(model)
        if denial is None or self.partly(model):
            return False
        newest = max((said.asked_at for said in self._serving.get(model, ())), default=-inf)
        return newest <= denial.at or now < denial.until

    def _moved(self, now: float) -> list[ModelMoved]:
        moved, states = [], {}
        for name in self.known():
            state = self._state(name, now)
            before, at = self._states.get(name, (ModelState.UNKNOWN, self._began_at))
            states[name] = (state, at if state is before else now)
            if state is not before:
                self._states[name] = states[name]
                moved.append(ModelMoved(self.look(name, now), before))
        self._states = states
        return moved

    def _why(self, model: str, state: ModelState) -> str:
        count = len(self._endpoints)
        match state:
            case ModelState.LOADING:
                return "is being loaded"
            case ModelState.ABSENT if model in self._serving:
                return "is listed, and the server answers that it is not there"
            case ModelState.ABSENT:
                return f"is served by none of {count} endpoints" if count > 1 else "is not served"
        if not self._heard:
            return "is not known yet: no endpoint was asked"
        if not self._endpoints:
            return "cannot be served: the pool has no endpoint"
        endpoint, problem = next(iter(self.problems.items()), ("", ""))
        said = f": {endpoint}: {problem}" if problem else ""
        return f"cannot be known: {self._unread} of {count} endpoints cannot be read{said}"

    def _names(self) -> str:
        names = sorted(self._serving)
        if not names:
            return "none is"
        told = ", ".join(map(quoted, names[:_NAMES_TOLD]))
        more = len(names) - _NAMES_TOLD
        return f"there {'is' if len(names) == 1 else 'are'} {told}{f' and {more} more' if more > 0 else ''}"
