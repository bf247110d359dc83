"""What the world's monitoring shows of it: the readings a dispatcher gets, with all their faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from dispatcher.core.budget import Policy, Reading, Signal
from dispatcher.signals.series import Lessons, View, judge
from dispatcher.sim.world import PoolState

DETECTOR_QUEUE = 5
DETECTOR_KV = 0.8
"""Thresholds of the default saturation detector: waiting per endpoint, and share of the KV cache."""


class Detector(StrEnum):
    """What the EPP computes its pool saturation with."""

    CONCURRENCY = "concurrency"
    """Requests running ÷ capacity: a true count."""
    UTILIZATION = "utilization"
    """The default: mean over pods of max(waiting / 5, kv / 0.8). A pressure score."""


@dataclass(slots=True)
class Exporter:
    """The EPP's metrics page, and what the dispatcher's own reader makes of it.

    With the concurrency detector whatever waits is in the EPP. The utilization detector lets requests through
    until each pod has five waiting; so long those wait in the model servers.
    """

    signals: Sequence[Signal]
    slots_per_pod: float
    """As the configuration has it: per_endpoint, and the picker's maxConcurrency."""
    true_slots_per_pod: float
    detector: Detector = Detector.CONCURRENCY
    kv_full: float = 0.1
    """KV cache in use when every slot is taken."""
    flush_s: float = 0.0
    """The averages are renewed this often; 0: always fresh."""
    shows_running: bool = True
    """The page has the requests that the picker sent and saw no answer of, which is always of now."""
    _flushed: PoolState | None = None
    _lessons: Lessons = field(default_factory=Lessons)

    def flush(self, state: PoolState) -> None:
        """The averages now say this."""
        self._flushed = state

    def read(self, state: PoolState) -> list[Reading]:
        """A reading of each signal, of a scrape at `state.at`."""
        if not state.slots:  # as the EPP has it: a pool without endpoints is saturated
            return [Reading(s, state.at, state.at, f_sys=1.0, f_epp=0.0, max_sys=0.0) for s in self.signals]
        views = [self.view(state)]
        self._lessons.learn(views)
        use = "both" if len(self.signals) > 1 else self.signals[0].value
        found = judge(views, use, Policy(per_endpoint=self.slots_per_pod), "simulated", self._lessons)
        # The world began at 0, and so did its averages.
        return [replace(reading, opened_at=max(0.0, reading.opened_at)) for reading in found.readings]

    def view(self, state: PoolState) -> View:
        """The page of a scrape at `state.at`."""
        seen = self._flushed if self.flush_s and self._flushed is not None else state
        flow_control = Signal.SATURATION in self.signals
        utilization = flow_control and self.detector is Detector.UTILIZATION
        inside, queued = self._split(state, flow_control)
        return View(
            state.at,
            state.at,
            saturation=self._saturation(state, inside) if flow_control else None,
            queued=queued if flow_control else None,
            running=seen.running / self._pods(seen),
            waiting=self._split(seen, flow_control)[0] / self._pods(seen),
            kv_cache=self._kv(seen),
            ready=self._pods(state),
            in_flight=state.running + inside if self.shows_running else None,
            utilization=frozenset({"default"} if utilization else ()),
        )

    def _saturation(self, state: PoolState, inside: float) -> float:
        pods = self._pods(state)
        if self.detector is Detector.CONCURRENCY:
            return state.running / (self.slots_per_pod * pods)
        return max(inside / pods / DETECTOR_QUEUE, self._kv(state) / DETECTOR_KV)

    def _kv(self, state: PoolState) -> float:
        return self.kv_full * state.running / state.slots if state.slots else 1.0

    def _pods(self, state: PoolState) -> float:
        return max(1.0, state.slots / self.true_slots_per_pod)

    def _split(self, state: PoolState, flow_control: bool) -> tuple[float, float]:
        """What waits in the model servers, and what in the EPP."""
        if not flow_control:
            return state.waiting, 0.0
        if self.detector is Detector.CONCURRENCY:
            return 0.0, state.waiting
        inside = min(state.waiting, DETECTOR_QUEUE * self._pods(state))
        return inside, state.waiting - inside
