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

from dispatcher.requests.lanes import MAX_MODEL_NAME_BYTES
from dispatcher.requests.model_names import quote_model

# docs/contributing/decisions/0020-requests-wait-for-their-model.md explains these rules.
TRUST_S = 30.0
"""Seconds for which the last listing of an endpoint counts while it cannot be read."""
DENIAL_S, MAX_DENIAL_S = 5.0, 300.0
"""Seconds for which a listed model counts as absent after an answer that it is not there. The time doubles
with each such answer, up to the second value, until a request is answered or other endpoints list the
model."""
MAX_REMEMBERED_MODELS = 10_000
MAX_SHOWN = 50
"""Largest number of models in a status."""
GATEWAY = "gateway"
"""Name of the endpoint if the gateway was asked for the models of all endpoints."""
_MAX_NAMES_SHOWN = 10


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
    is_down: bool = False
    """True if no process listens there. The next process that listens has none of the earlier state."""


class ModelState(StrEnum):
    READY = "ready"
    LOADING = "loading"
    ABSENT = "absent"
    UNKNOWN = "unknown"


class WhenNotServed(StrEnum):
    """Behaviour of requests for a model that is expected and not served."""

    WAIT = "wait"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class ModelTerms:
    """Settings of the operator."""

    named_models: Mapping[str, WhenNotServed] = field(default_factory=dict)
    """Models that the settings name."""
    when_not_served: WhenNotServed = WhenNotServed.WAIT
    """Behaviour for other models that were served before."""


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    """One model at one moment."""

    name: str
    state: ModelState
    serving_count: int
    """Number of endpoints that list it."""
    endpoint_count: int
    """Number of all endpoints."""
    unread_count: int
    """Number of endpoints whose models are not known."""
    state_since: float
    """Loop time of the last change of its state."""
    is_named: bool
    """True if the settings name the model."""
    is_denied: bool
    """True if endpoints list the model, and an answer said that it is not there."""


@dataclass(frozen=True, slots=True)
class SendToModel:
    """The request is sent: the model is served, as far as is known."""


@dataclass(frozen=True, slots=True)
class WaitForModel:
    """The request waits: the model is expected, and not served now."""

    why: str
    """Reason why the model cannot be used, with its name, such as `model 'm' is being loaded`."""


@dataclass(frozen=True, slots=True)
class NoSuchModel:
    """The request ends: the model is not served, and not expected."""

    why: str
    """One sentence with the names of the models that are served."""


ModelDecision = SendToModel | WaitForModel | NoSuchModel
_SEND = SendToModel()


@dataclass(slots=True)
class _Denial:
    denied_at: float
    holds_until: float
    count: int
    """Number of such answers in a row, while the same endpoints listed the model."""
    endpoints: frozenset[str]


class PoolModels:
    """State of the models of a pool. Its size is bounded, whatever endpoints list."""

    def __init__(self, terms: ModelTerms, now: float) -> None:
        self.terms = terms
        self._began_at = now
        self._listings: dict[str, Listing] = {}
        """Last readable listing of each endpoint."""
        self._endpoint_problems: dict[str, str] = {}
        """Endpoints of the newest round, each with its problem. Empty for no problem."""
        self._down_endpoints: set[str] = set()
        """Endpoints of the newest round where no process listens."""
        self._serving: dict[str, list[Listing]] = {}
        self._loading: set[str] = set()
        self._unread_count = 0
        self._has_listings = False
        self._once_served: dict[str, None] = {}
        """Models that were served once, the most recent ones last."""
        self._states: dict[str, tuple[ModelState, float]] = {}
        """State of each expected model, with the time of its last change."""
        self._denials: dict[str, _Denial] = {}

    # Observations.

    def record_listings(
        self, listings: Sequence[Listing], now: float
    ) -> list[tuple[ModelSnapshot, ModelState]]:
        """Record the listings of a round, one for each endpoint. Return each model whose state has changed,
        with its previous state."""
        self._has_listings = True
        self._endpoint_problems = {listing.endpoint: listing.problem for listing in listings}
        self._down_endpoints = {listing.endpoint for listing in listings if listing.is_down}
        self._listings = {
            name: last_listing
            for name, last_listing in self._listings.items()
            if name in self._endpoint_problems
        }
        for listing in listings:
            if listing.models is not None:
                self._listings[listing.endpoint] = listing
        # Listings of this round, and recent ones of endpoints that cannot be read now.
        trusted = [
            last_listing for last_listing in self._listings.values() if last_listing.asked_at > now - TRUST_S
        ]
        self._unread_count = len(self._endpoint_problems) - len(trusted)
        self._serving, self._loading = {}, set()
        for last_listing in trusted:
            for name in last_listing.models or ():
                self._serving.setdefault(name, []).append(last_listing)
            self._loading.update(last_listing.loading)
        self.expect_models(self._serving)
        return self._collect_changes(now)

    def expect_models(self, names: Iterable[str]) -> None:
        """Remember models that were served once, or for which requests wait."""
        for name in names:
            # Reinserting moves the model to the end, so that the oldest ones are forgotten first.
            self._once_served.pop(name, None)
            self._once_served[name] = None
        for name in list(self._once_served)[: max(0, len(self._once_served) - MAX_REMEMBERED_MODELS)]:
            del self._once_served[name]

    def record_denial(self, model: str, sent_at: float, now: float) -> None:
        """Record an answer that there is no such model, to a request sent at `sent_at`."""
        if self.is_partly_served(model):  # the request may have reached an endpoint without the model
            return
        previous = self._denials.get(model)
        # Both requests were sent before the first answer.
        if previous is not None and sent_at <= previous.denied_at:
            return
        endpoints = frozenset(listing.endpoint for listing in self._serving.get(model, ()))
        times = previous.count + 1 if previous is not None and previous.endpoints == endpoints else 1
        # The exponent is bounded, because a large one would overflow the float.
        hold_s = min(MAX_DENIAL_S, DENIAL_S * 2.0 ** min(times - 1, 16))
        self._denials[model] = _Denial(now, now + hold_s, times, endpoints)

    def record_answer(self, model: str, sent_at: float) -> None:
        denial = self._denials.get(model)
        if denial is not None and sent_at > denial.denied_at:
            del self._denials[model]

    # Queries.

    @property
    def endpoints(self) -> Set[str]:
        """Endpoints of the newest round."""
        return self._endpoint_problems.keys()

    @property
    def loading_models(self) -> frozenset[str]:
        return frozenset(self._loading)

    def list_ready(self, now: float) -> dict[str, frozenset[str]]:
        """Return the models that are served, each with the endpoints that list it."""
        return {
            name: frozenset([listing.endpoint for listing in serving])
            for name, serving in self._serving.items()
            if not self._is_denied(name, now)
        }

    def is_gone(self, model: str, endpoint: str) -> bool:
        """Return whether the endpoint no longer serves the model, or may have become another process."""
        problem = self._endpoint_problems.get(endpoint)
        if problem is None or endpoint in self._down_endpoints:
            return True
        # An endpoint that cannot be read may still serve the model.
        return not problem and all(listing.endpoint != endpoint for listing in self._serving.get(model, ()))

    # Decisions.

    def decide_request(self, model: str, now: float) -> ModelDecision:
        state = self._compute_state(model, now)
        if state is ModelState.READY or not model:
            return _SEND
        rule = self._get_rule(model)
        if rule is WhenNotServed.WAIT:
            return WaitForModel(f"model {quote_model(model)} {self._explain_state(model, state)}")
        if state is ModelState.ABSENT or (rule is not None and state is ModelState.LOADING):
            return NoSuchModel(
                f"no model {quote_model(model)} is served here: {self._describe_served_names()}"
            )
        return _SEND

    def describe_model(self, model: str, now: float) -> str:
        state = self._compute_state(model, now)
        if state is not ModelState.READY:
            return f"it {self._explain_state(model, state)}"
        count, endpoints = len(self._serving[model]), len(self._endpoint_problems)
        return "it is served" if count == endpoints else f"it is served by {count} of {endpoints} endpoints"

    def is_partly_served(self, model: str) -> bool:
        """Return whether some readable endpoints serve the model and others do not, so that a request may
        reach either."""
        return 0 < len(self._serving.get(model, ())) < len(self._endpoint_problems) - self._unread_count

    def make_snapshot(self, model: str, now: float) -> ModelSnapshot:
        state = self._compute_state(model, now)
        state_since = self._states.get(model, (state, self._began_at))[1]
        return ModelSnapshot(
            name=model,
            state=state,
            serving_count=len(self._serving.get(model, ())),
            endpoint_count=len(self._endpoint_problems),
            unread_count=self._unread_count,
            state_since=state_since,
            is_named=model in self.terms.named_models,
            is_denied=self._is_denied(model, now),
        )

    def list_known(self) -> list[str]:
        """Return the models that the settings name, then those that are or were served, sorted by name."""
        return [*self.terms.named_models, *sorted(self._once_served.keys() - self.terms.named_models.keys())]

    @property
    def problems(self) -> dict[str, str]:
        """Endpoints that could not be read in the newest round, with the reason."""
        return {name: problem for name, problem in self._endpoint_problems.items() if problem}

    # Internals.

    def _get_rule(self, model: str) -> WhenNotServed | None:
        """Return the behaviour for the model. `None` if it is not expected."""
        # Requests wait under a shortened name, so a longer name could be mistaken for another model.
        if len(model.encode(errors="replace")) > MAX_MODEL_NAME_BYTES:
            return None
        rule = self.terms.named_models.get(model)
        if rule is not None:
            return rule
        return self.terms.when_not_served if model in self._once_served else None

    def _compute_state(self, model: str, now: float) -> ModelState:
        if model in self._serving and not self._is_denied(model, now):
            return ModelState.READY
        if model in self._loading:
            return ModelState.LOADING
        if model in self._serving:
            return ModelState.ABSENT
        are_all_read = self._has_listings and self._endpoint_problems and not self._unread_count
        return ModelState.ABSENT if are_all_read else ModelState.UNKNOWN

    def _is_denied(self, model: str, now: float) -> bool:
        denial = self._denials.get(model)
        if denial is None or self.is_partly_served(model):
            return False
        newest = max((listing.asked_at for listing in self._serving.get(model, ())), default=-inf)
        # A listing counts again if it is newer than the denial, and the pause is over.
        return newest <= denial.denied_at or now < denial.holds_until

    def _collect_changes(self, now: float) -> list[tuple[ModelSnapshot, ModelState]]:
        changes, states = [], {}
        for name in self.list_known():
            state = self._compute_state(name, now)
            previous_state, state_since = self._states.get(name, (ModelState.UNKNOWN, self._began_at))
            states[name] = (state, state_since if state is previous_state else now)
            if state is not previous_state:
                self._states[name] = states[name]
                changes.append((self.make_snapshot(name, now), previous_state))
        self._states = states
        return changes

    def _explain_state(self, model: str, state: ModelState) -> str:
        count = len(self._endpoint_problems)
        match state:
            case ModelState.LOADING:
                return "is being loaded"
            case ModelState.ABSENT if model in self._serving:
                return "is listed, and the server answers that it is not there"
            case ModelState.ABSENT:
                return f"is served by none of {count} endpoints" if count > 1 else "is not served"
        if not self._has_listings:
            return "is not known yet: no endpoint was asked"
        if not self._endpoint_problems:
            return "cannot be served: the pool has no endpoint"
        endpoint, problem = next(iter(self.problems.items()), ("", ""))
        reason = f": {endpoint}: {problem}" if problem else ""
        return f"cannot be known: {self._unread_count} of {count} endpoints cannot be read{reason}"

    def _describe_served_names(self) -> str:
        names = sorted(self._serving)
        if not names:
            return "none is"
        shown = ", ".join(map(quote_model, names[:_MAX_NAMES_SHOWN]))
        more = len(names) - _MAX_NAMES_SHOWN
        return f"there {'is' if len(names) == 1 else 'are'} {shown}{f' and {more} more' if more > 0 else ''}"
