"""What the world's monitoring shows of it: the readings a dispatcher gets, with all their faults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from dispatcher.core.limit.budget import Policy, Signal
from dispatcher.lab.simulation.world import PoolState
from dispatcher.lab.standin.model import KV_AT_FULL, WAITING_AT_FULL
from dispatcher.signals.epp.series import View
from dispatcher.signals.readings import Lessons, Verdict, at_most, judge

REQUEST_TOKENS, POD_TOKENS = 650, 1_000_000
"""Of a request, about; and what its mode for tokens takes an endpoint for where nobody says."""


class Detector(StrEnum):
    """What the EPP computes its pool saturation with."""

    UTILIZATION = "utilization"
    """Its default: mean over pods of max(waiting / 5, kv / 0.8). A pressure score."""
    CONCURRENCY = "concurrency"
    """Requests in the pods ÷ what it takes them for: a true count."""
    TOKENS = "tokens"
    """The same of tokens, by its other mode: a count of something else."""
    COMPOSITE = "composite"
    """The larger of the first two."""
    NONE = "none"
    """Flow control is off: the picker holds nobody back and shows no saturation."""
    SERVERS = "servers"
    """There is no picker: the pages of the model servers themselves are read."""

    @property
    def flow_control(self) -> bool:
        """Whether the picker has a queue and shows its saturation."""
        return self not in (Detector.NONE, Detector.SERVERS)

    @property
    def by_queues(self) -> bool:
        """Whether the queues of the model servers decide if the picker holds requests back."""
        return self in (Detector.UTILIZATION, Detector.COMPOSITE)


class Signals(StrEnum):
    """`signals.use` of the configuration."""

    AUTO = "auto"
    SATURATION = "saturation"
    REQUESTS = "requests"
    BOTH = "both"

    @property
    def at_most(self) -> Sequence[Signal]:
        """What may be asked for before anything is known of the EPP."""
        return at_most(self.value)


@dataclass(slots=True)
class Exporter:
    """The EPP's metrics pages, and what the dispatcher's own reader makes of them."""

    use: Signals
    policy: Policy
    """The configured capacity."""
    picker_per_pod: float
    """maxConcurrency of the picker."""
    detector: Detector = Detector.CONCURRENCY
    kv_full: float = 0.1
    """KV cache in use when every slot is taken."""
    flush_s: float = 0.0
    """The averages are renewed this often; 0: always fresh."""
    stamp_s: float = 0.0
    """A sample is dated so much later than it was taken."""
    shows_running: bool = True
    """The page has the requests that the picker sent and saw no answer of, which is always of now."""
    shows_server_queues: bool = True
    """The page has the queue of each model server, as the picker last read it."""
    pickers: int = 1
    """Active replicas, each with an even share of the requests."""
    _flushed: PoolState | None = None
    _lessons: Lessons = field(default_factory=Lessons)

    def flush(self, state: PoolState) -> None:
        """The averages now say this."""
        self._flushed = state

    def read(self, state: PoolState) -> Verdict:
        """What a scrape at `state.at` comes to."""
        views = [self.view(state, number) for number in range(self.pickers)]
        self._lessons.learn(views)
        found = judge(views, self.use, self.policy, "simulated", self._lessons)
        readings = [
            # The world began at 0, and so did its averages. And it counts all that a request weighs.
            replace(reading, opened_at=max(0.0, reading.opened_at), beyond_calls=math.inf)
            for reading in found.readings
        ]
        return replace(found, readings=tuple(readings))

    def view(self, state: PoolState, number: int = 0) -> View:
        """The page of a replica of the picker, scraped at `state.at`."""
        if self.detector is Detector.SERVERS:
            return self._servers(state)
        seen = self._flushed if self.flush_s and self._flushed is not None else state
        flow_control = self.detector.flow_control
        sent = self._share(state.running + self._inside(state), number)
        at = state.at + self.stamp_s
        return View(
            at,
            at,
            saturation=self._saturation(state, sent) if flow_control else None,
            queued=self._share(state.waiting - self._inside(state), number) if flow_control else None,
            running=seen.running / max(1, seen.pods),
            waiting=self._inside(seen) / max(1, seen.pods),
            kv_cache=self._kv(seen),
            server_queued=self._seen_inside(state) if self.shows_server_queues else None,
            ready=state.pods,
            in_flight=sent if self.shows_running else None,
            utilization=frozenset({"default"} if self.detector.by_queues else ()),
        )

    def _servers(self, state: PoolState) -> View:
        """The pages of all model servers together."""
        at, pods = state.at + self.stamp_s, max(1, state.pods)
        return View(
            at,
            at,
            running=state.running / pods,
            waiting=state.waiting / pods,
            kv_cache=self._kv(state),
            ready=state.pods,
            of_now=True,
        )

    def _inside(self, state: PoolState) -> int:
        """Requests that wait in the pods: without flow control all, in whatever order."""
        return state.inside if self.detector.flow_control else state.waiting

    def _seen_inside(self, state: PoolState) -> float:
        """The same, as the picker last read it."""
        outside = 0 if self.detector.flow_control else state.waiting - state.inside
        return float(state.inside_seen + outside)

    def _share(self, requests: int, number: int) -> int:
        """What of them is this replica's."""
        return requests // self.pickers + (number < requests % self.pickers)

    def _saturation(self, state: PoolState, sent: int) -> float:
        if not state.pods:
            return 1.0
        if self.detector is Detector.CONCURRENCY:
            return sent / (self.picker_per_pod * state.pods)
        if self.detector is Detector.TOKENS:
            return sent * REQUEST_TOKENS / (POD_TOKENS * state.pods)
        pressure = max(state.inside_seen / state.pods / WAITING_AT_FULL, self._kv(state) / KV_AT_FULL)
        if self.detector is Detector.COMPOSITE:
            return max(pressure, sent / (self.picker_per_pod * state.pods))
        return pressure

    def _kv(self, state: PoolState) -> float:
        return self.kv_full * state.running / state.slots if state.slots else 1.0
