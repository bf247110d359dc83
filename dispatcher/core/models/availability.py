"""Determine which models a pool serves, from the models that its endpoints list, and what follows for a
request.

    ready      an endpoint lists the model, more recently than the newest answer that the model is not there
    loading    no endpoint lists it, and one reports that it is loading it
    absent     no endpoint lists it, and all of them can be read
    unknown    no endpoint lists it, and some cannot be read: these may serve it

For an endpoint that cannot be read, its last listing counts for a while (TRUST_S). The listing of an endpoint
that has left the pool is forgotten.

A request is sent if its model is ready, or if the model is not known and some endpoint cannot be read: then
the server decides. A request waits if its model is expected, because the operator named it or it was served
before. It ends at once if its model can only be a mistake. Nothing here closes the gate: a model delays only
its own requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from dispatcher.core.models.names import quoted
from dispatcher.core.requests.lanes import MODEL_BYTES

# docs/decisions/0020-requests-wait-for-their-model.md explains these rules.
TRUST_S = 30.0
"""Seconds for which the last listing of an endpoint counts while it cannot be read."""
DENIED_S, DENIED_MOST_S = 5.0, 300.0
"""Seconds for which a listed model counts as absent after an answer that it is not there. The time doubles
with each such answer, up to the second value, until a request is answered or other endpoints list the
model."""
SEEN_MOST = 10_000
GATEWAY = "gateway"
"""Name of the endpoint if the gateway was asked for the models of all endpoints."""
_NAMES_TOLD = 10


@dataclass(frozen=True, slots=True)
class Listing:
    """Answer of one endpoint about the models that it serves, or the reason why there is no answer."""

    endpoint: str
    """Host and port, for people. `gateway` if the gateway was asked for all endpoints."""
    asked_at: float
    """Loop time before the endpoint was asked. The listing describes this moment or a later one."""
    models: tuple[str, ...] | None
    """Ids that requests may name. `None` if the listing could not be read."""
    loading: tuple[str, ...] = ()
    """Ids of models that the endpoint loads and does not serve yet, if it reports them."""
    problem: str = ""
    """One sentence that says why the listing could not be read."""
    down: bool = False
    """True if no process listens there. The next process that listens has none of the earlier state."""


class ModelState(StrEnum):
    READY = "ready"
    LOADING = "loading"
    ABSENT = "absent"
    UNKNOWN = "unknown"


class WhenAbsent(StrEnum):
    """Behaviour of requests for a model that is expected and not served."""

    WAIT = "wait"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class ModelTerms:
    """Settings of the operator."""

    named: Mapping[str, WhenAbsent] = field(default_factory=dict)
    """Models that the settings name."""
    absent: WhenAbsent = WhenAbsent.WAIT
    """Behaviour for other models that were served before."""


@dataclass(frozen=True, slots=True)
class ModelSeen:
    """One model at one moment."""

    name: str
    state: ModelState
    serving: int
    """Number of endpoints that list it."""
    endpoints: int
    """Number of all endpoints."""
    unread: int
    """Number of endpoints whose models are not known."""
    since: float
    """Loop time of the last change of its state."""
    named: bool
    """True if the settings name the model."""
    denied: bool
    """True if endpoints list the model, and an answer said that it is not there."""


@dataclass(frozen=True, slots=True)
class ModelMoved:
    """Change of a model's state."""

    seen: ModelSeen
    before: ModelState


@dataclass(frozen=True, slots=True)
class GoesToModel:
    """The request is sent: the model is served, as far as is known."""


@dataclass(frozen=True, slots=True)
class AwaitsModel:
    """The request waits: the model is expected, and not served now."""

    why: str
    """Reason why the model cannot be used, with its name, such as `model 'm' is being loaded`."""


@dataclass(frozen=True, slots=True)
class NoSuchModel:
    """The request ends: the model is not served, and not expected."""

    why: str
    """One sentence with the names of the models that are served."""


ModelVerdict = GoesToModel | AwaitsModel | NoSuchModel
_GOES = GoesToModel()


@dataclass(slots=True)
class _Denial:
    at: float
    until: float
    times: int
    """Number of such answers in a row, while the same endpoints listed the model."""
    by: frozenset[str]


class PoolModels:
    """State of the models of a pool. Its size is bounded, whatever endpoints list."""

    def __init__(self, terms: ModelTerms, now: float) -> None:
        self.terms = terms
        self._began_at = now
        self._said: dict[str, Listing] = {}
        """Last readable listing of each endpoint."""
        self._endpoints: dict[str, str] = {}
        """Endpoints of the newest round, each with its problem. Empty for no problem."""
        self._down: set[str] = set()
        """Endpoints of the newest round where no process listens."""
        self._serving: dict[str, list[Listing]] = {}
        self._loading: set[str] = set()
        self._unread = 0
        self._heard = False
        self._seen: dict[str, None] = {}
        """Models that were served once, the most recent ones last."""
        self._states: dict[str, tuple[ModelState, float]] = {}
        """State of each expected model, with the time of its last change."""
        self._denials: dict[str, _Denial] = {}

    # Observations.

    def heard(self, listings: Sequence[Listing], now: float) -> list[ModelMoved]:
        """Record the listings of a round, one for each endpoint. Return the resulting changes."""
        self._heard = True
        self._endpoints = {each.endpoint: each.problem for each in listings}
        self._down = {each.endpoint for each in listings if each.down}
        self._said = {name: said for name, said in self._said.items() if name in self._endpoints}
        for each in listings:
            if each.models is not None:
                self._said[each.endpoint] = each
        # Listings of this round, and recent ones of endpoints that cannot be read now.
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
        """Remember models that were served once, or for which requests wait."""
        for name in names:
            # Reinserting moves the model to the end, so that the oldest ones are forgotten first.
            self._seen.pop(name, None)
            self._seen[name] = None
        for name in list(self._seen)[: max(0, len(self._seen) - SEEN_MOST)]:
            del self._seen[name]

    def denied(self, model: str, sent_at: float, now: float) -> None:
        """Record an answer that there is no such model, to a request sent at `sent_at`."""
        if self.partly(model):  # the request may have reached an endpoint without the model
            return
        before = self._denials.get(model)
        if before is not None and sent_at <= before.at:  # both requests were sent before the first answer
            return
        by = frozenset(said.endpoint for said in self._serving.get(model, ()))
        times = before.times + 1 if before is not None and before.by == by else 1
        # The exponent is bounded, because a large one would overflow the float.
        hold_s = min(DENIED_MOST_S, DENIED_S * 2.0 ** min(times - 1, 16))
        self._denials[model] = _Denial(now, now + hold_s, times, by)

    def answered(self, model: str, sent_at: float) -> None:
        """Record that a request sent at `sent_at` was served."""
        denial = self._denials.get(model)
        if denial is not None and sent_at > denial.at:
            del self._denials[model]

    def reconfigure(self, terms: ModelTerms) -> None:
        self.terms = terms

    # Queries.

    @property
    def endpoints(self) -> Set[str]:
        """Endpoints of the newest round."""
        return self._endpoints.keys()

    @property
    def loading(self) -> frozenset[str]:
        return frozenset(self._loading)

    def ready(self, now: float) -> dict[str, frozenset[str]]:
        """Return the models that are served, each with the endpoints that list it."""
        return {
            name: frozenset([said.endpoint for said in serving])
            for name, serving in self._serving.items()
            if not self._is_denied(name, now)
        }

    def gone(self, model: str, endpoint: str) -> bool:
        """Return whether the endpoint no longer serves the model, or may have become another process."""
        problem = self._endpoints.get(endpoint)
        if problem is None or endpoint in self._down:
            return True
        # An endpoint that cannot be read may still serve the model.
        return not problem and all(said.endpoint != endpoint for said in self._serving.get(model, ()))

    # Decisions.

    def verdict(self, model: str, now: float) -> ModelVerdict:
        """Decide about a request for this model."""
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
        """Return a description of the model's state."""
        state = self._state(model, now)
        if state is not ModelState.READY:
            return f"it {self._why(model, state)}"
        count, endpoints = len(self._serving[model]), len(self._endpoints)
        return "it is served" if count == endpoints else f"it is served by {count} of {endpoints} endpoints"

    def partly(self, model: str) -> bool:
        """Return whether some readable endpoints serve the model and others do not, so that a request may
        reach either."""
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
        """Return the models that the settings name, then those that are or were served, sorted by name."""
        return [*self.terms.named, *sorted(self._seen.keys() - self.terms.named.keys())]

    @property
    def problems(self) -> dict[str, str]:
        """Endpoints that could not be read in the newest round, with the reason."""
        return {name: problem for name, problem in self._endpoints.items() if problem}

    # Internals.

    def _rule(self, model: str) -> WhenAbsent | None:
        """Return the behaviour for the model. `None` if it is not expected."""
        # Requests wait under a shortened name, so a longer name could be mistaken for another model.
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
        # A listing counts again if it is newer than the denial, and the pause is over.
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
