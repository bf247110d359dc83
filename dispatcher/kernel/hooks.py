"""The places where features take part in the kernel. The kernel knows no feature by name.

    Stage       decides whether claimed requests go on (pipeline.py)
    LeasePart   takes part in the exchange of single leases: what is sent, what the answer means, how the
                lease ends (attempts.py). The kernel asks it only about tokens in its `leases`, so that a
                plain request costs one lookup for each feature.
    Grouping    sends several leases in one call (sending.py, attempts.py)
    Load        takes units of the limit beside the leases (claiming.py)
    Room        limits how many requests are claimed, beside the limit on units (weights.py)
    Hooks       has all of them in their order, with callbacks for what happens beside the requests

A feature keeps what it knows about a lease by the token of the lease, until `forget_lease`. It calls the
queue only in `look_up`, in `after_sweep` and in its tasks, never starts an attempt by itself, and ends a
lease only with `KernelContext.complete`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from dispatcher.gateway.contract import AttemptResult
    from dispatcher.kernel.claimed_request import ClaimedRequest
    from dispatcher.kernel.completions import Completion
    from dispatcher.kernel.in_flight import Attempt, InFlightLease
    from dispatcher.limit.allowance import Allowance
    from dispatcher.limit.health import WaitingReason
    from dispatcher.queue.contract import ClaimResult, Release, Settlement
    from dispatcher.requests.outcomes.outcome import Outcome
    from dispatcher.requests.queue_counts import QueueCounts
    from dispatcher.requests.request import Request
    from dispatcher.telemetry.status import FeatureStatus


class Stage(Protocol):
    """A stage of the pipeline."""

    def look_up(self, requests: list[ClaimedRequest]) -> Awaitable[None] | None:
        """Return the call to the queue that these requests need. `None` if they need none. The calls of all
        stages run at the same time."""
        ...

    def apply(self, requests: list[ClaimedRequest]) -> list[ClaimedRequest]:
        """Return the requests that go on. All others are completed or removed."""
        ...


@dataclass(frozen=True, slots=True)
class Conclusion:
    """Meaning of the answer to an attempt for one lease."""

    outcome: Outcome
    tokens: tuple[int, int, int] | None = None
    """Numbers for `LeasePart.record_tokens`. `None` if the answer has to be searched for them."""
    release: Release | None = None
    """Release of a request that goes on with another call. `None` if the outcome decides."""
    result_fields: Mapping[str, object] | None = None
    """Fields that the result of a joined answer has in addition. `None` for an answer to one call."""


class LeasePart:
    """Part of a feature that takes part in single leases. Each method has a default that changes nothing."""

    leases: Container[str]
    """Tokens of the leases that the feature takes part in."""

    def forget_lease(self, token: str) -> None:
        """Forget a lease that has ended. Called exactly once."""

    async def prepare(
        self, attempt: Attempt, request: Request, deadline: float, may_send: Callable[[], bool]
    ) -> Request | AttemptResult:
        """Return the request to send in place of `request`, which the parts before have prepared. Return a
        result if calls that have to come first have ended the attempt."""
        return request

    def explain(self, attempt: Attempt, outcome: Outcome, sent_at: float) -> Outcome:
        """Return what the outcome of an attempt means, before it is judged."""
        return outcome

    def conclude(
        self, entry: InFlightLease, request: Request, result: AttemptResult, outcome: Outcome
    ) -> Conclusion:
        """Return what the judged outcome means for one lease. `result` is what the gateway answered. Only the
        first part that has the lease is asked."""
        return Conclusion(outcome)

    def stop(self, entry: InFlightLease, request: Request) -> None:
        """Keep what is worth keeping of an answer that is no longer awaited."""

    def record_tokens(
        self, entry: InFlightLease, tokens_in: int, tokens_out: int, cached_tokens: int
    ) -> None:
        """Record the tokens that an answer of the model server reports, and how many of those in were in its
        prefix cache. 0 stands for a missing number."""

    def end(self, entry: InFlightLease, completion: Completion, result: AttemptResult) -> Completion:
        """Return the completion of an answered request with what the feature adds to it. `result` has the
        joined answer if there were several calls."""
        return completion


@dataclass(frozen=True, slots=True)
class FollowUp:
    """Consequences of the answer to a call for several leases."""

    ended: list[tuple[InFlightLease, AttemptResult]] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    """Attempts that start now, in place of the ended one."""
    returned: list[InFlightLease] = field(default_factory=list)
    """Leases that return to their place in the queue."""


class Groups(Protocol):
    """Leases that wait for others, to be sent in one call."""

    @property
    def next_due_at(self) -> float | None:
        """Time at which the next group may be ready. `None` if no request waits in a group."""
        ...

    @property
    def unweighted_count(self) -> int:
        """Number of waiting requests that count no unit yet, because they will share the unit of a call."""
        ...

    def take_all(self) -> list[InFlightLease]:
        """Remove and return all leases that wait in groups."""
        ...

    def take_ready(
        self, now: float, *, is_complete: bool, is_lease_valid: Callable[[InFlightLease], bool]
    ) -> tuple[Sequence[tuple[Sequence[Any], int]], list[InFlightLease]]:
        """Return the calls that are ready, for `prepare_first_attempt`, and the leases that must not be sent.

        `is_complete` says that no other request can arrive soon.
        """
        ...


class Grouping(Protocol):
    """Leases that are sent in one call, and calls that follow from its answer."""

    @property
    def leases(self) -> Container[str]:
        """Tokens of the leases that wait in groups, or are in one of the calls."""
        ...

    @property
    def groups(self) -> Groups: ...

    def weigh(self, token: str) -> float:
        """Return the units of a lease. Less than 1 is its share of a call, allocated when that is sent."""
        ...

    def add_to_group(self, entry: InFlightLease, now: float, left_s: float) -> None:
        """Let a lease wait for its group. `left_s` is the time to its deadline."""
        ...

    def get_entries(self, members: Sequence[Any]) -> list[InFlightLease]:
        """Return the leases of a call that is ready."""
        ...

    def prepare_first_attempt(self, members: Sequence[Any], max_items: int) -> Attempt:
        """Return the attempt for a call that is ready."""
        ...

    def counts_one_unit(self, attempt: Attempt) -> bool:
        """Return True if the attempt counts one unit for any number of leases."""
        ...

    def handle_answer(self, attempt: Attempt, result: AttemptResult) -> FollowUp:
        """Return how each lease of an attempt ends, and the attempts that follow."""
        ...

    def handle_stopped(self, attempt: Attempt) -> FollowUp:
        """Return what follows from an attempt whose answer is no longer awaited."""
        ...

    def handle_unsent(self, attempt: Attempt) -> FollowUp:
        """Return what follows from an attempt that could not start because the gate has closed."""
        ...


class Load(Protocol):
    """Calls of a feature that count in the limit and have no lease."""

    @property
    def units(self) -> int:
        """Units that the calls of all owners take."""
        ...

    def allow_probe(self, claim_result: ClaimResult, limit: int) -> None:
        """Allow a call to probe the gateway, if no request was left to be claimed for that."""
        ...


class Room(Protocol):
    """Room of a feature for requests, beside the limit on units. Its stage returns requests without room."""

    @property
    def problem(self) -> str:
        """Reason why fewer requests are claimed than the limit allows. Empty if there is none."""
        ...

    def plan_claim(self, max_count: int) -> int:
        """Return how many of `max_count` requests may be claimed now."""
        ...


class KnownEndpoints(Protocol):
    """State of the endpoints of the pool, as far as Kubernetes shows it."""

    @property
    def addresses(self) -> tuple[str, ...] | None:
        """Host and port of each ready endpoint. `None` if they are not known."""
        ...

    @property
    def is_complete(self) -> bool:
        """True if nothing more is expected to become known soon."""
        ...

    @property
    def has_cluster(self) -> bool:
        """False if there is no Kubernetes cluster."""
        ...


@dataclass(frozen=True, slots=True)
class Hooks:
    """All parts of the features, in the order in which they are called."""

    rewrite_request: tuple[Callable[[Request], Request], ...] = ()
    """Called with each parsed request, before anything else looks at it."""
    first_stages: tuple[Stage, ...] = ()
    """Stages that may find out that the queue has ended a lease: before the check for cancellation."""
    stages: tuple[Stage, ...] = ()
    lease_parts: tuple[LeasePart, ...] = ()
    grouping: Grouping | None = None
    loads: tuple[Load, ...] = ()
    rooms: tuple[Room, ...] = ()
    on_allowance: tuple[Callable[[Allowance], None], ...] = ()
    """Called each time the loop has worked. May stop leases."""
    on_counts: tuple[Callable[[QueueCounts], None], ...] = ()
    """Called with each count of the queue."""
    on_endpoints: tuple[Callable[[KnownEndpoints], None], ...] = ()
    """Called when something about the endpoints of the pool has changed."""
    after_sweep: tuple[Callable[[], Awaitable[None]], ...] = ()
    """Called about once a second, after a sweep of the queue."""
    claims_request: tuple[Callable[[Request], bool], ...] = ()
    """Return True if a feature sends the request in calls that no other feature may change."""
    join_copies: tuple[Callable[[str, bytes, int], Iterable[tuple[bytes, int]]], ...] = ()
    """Return the bodies of calls that have several copies of a request, each with the number of copies.
    Called with path, body and the largest number of bytes of such a body."""
    find_started_model: tuple[Callable[[bytes], str], ...] = ()
    """Return the name of the model that the calls behind this progress were sent to. Empty if it is the model
    that the request names."""
    find_call_tokens: tuple[Callable[[str], tuple[int | None, int] | None], ...] = ()
    """Return the tokens of the prompt (`None` if they are not known) and the largest number of tokens of the
    answer, if a feature sends a part of a request. Called with the token of the lease, after the stage of the
    feature. `None` if the request is sent whole."""
    end_request: tuple[Callable[[Settlement, bool], Settlement], ...] = ()
    """Called with the end of a request for which progress is stored, or from whose member a feature has read
    something, and with True if it becomes a dead letter. Return what is settled instead."""
    explain_waiting: tuple[Callable[[QueueCounts], WaitingReason | None], ...] = ()
    """Return why requests wait in the queue for something else than room. `None` if they do not."""
    status: tuple[Callable[[float, QueueCounts | None], FeatureStatus], ...] = ()
    """Return what a feature adds to the status now. Called with the counts of the queue if they are known."""
    tasks: tuple[tuple[str, Callable[[], Awaitable[None]]], ...] = ()
    """Names and functions of tasks that run until the process stops."""
    reconfigure: tuple[Callable[[], None], ...] = ()
    """Called after the options in the context were replaced."""
    # For each method, the parts that have one, so that the others cost nothing.
    preparing: tuple[LeasePart, ...] = field(init=False)
    explaining: tuple[LeasePart, ...] = field(init=False)
    concluding: tuple[LeasePart, ...] = field(init=False)
    measuring: tuple[LeasePart, ...] = field(init=False)
    stopping: tuple[LeasePart, ...] = field(init=False)
    ending: tuple[LeasePart, ...] = field(init=False)

    def __post_init__(self) -> None:
        for field_name, method in (
            ("preparing", "prepare"),
            ("explaining", "explain"),
            ("concluding", "conclude"),
            ("measuring", "record_tokens"),
            ("stopping", "stop"),
            ("ending", "end"),
        ):
            default = getattr(LeasePart, method)
            parts = tuple(part for part in self.lease_parts if getattr(type(part), method) is not default)
            object.__setattr__(self, field_name, parts)


def join_hooks(parts: Sequence[Hooks]) -> Hooks:
    """Return the hooks of all features, in the given order. At most one of them may have a grouping."""
    names = [each.name for each in fields(Hooks) if each.init and each.name != "grouping"]
    joined: dict[str, Any] = {
        name: tuple(hook for part in parts for hook in getattr(part, name)) for name in names
    }
    return Hooks(**joined, grouping=next((part.grouping for part in parts if part.grouping), None))
