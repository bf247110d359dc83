"""What the world's monitoring shows of it: the readings a dispatcher gets, with all their faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from dispatcher.core.budget import Reading, Signal
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
    """The EPP's metrics page.

    With the concurrency detector whatever waits is in the EPP. The utilization detector lets requests through
    until each pod has five waiting; so long those wait in the model servers.
    """

    signals: Sequence[Signal]
    slots_per_pod: float
    """As the configuration has it: per_endpoint."""
    true_slots_per_pod: float
    detector: Detector = Detector.CONCURRENCY
    kv_full: float = 0.1
    """KV cache in use when every slot is taken."""
    flush_s: float = 0.0
    """The averages behind `requests` are renewed this often; 0: always fresh."""
    _flushed: PoolState | None = None

    def flush(self, state: PoolState) -> None:
        """The averages now say this."""
        self._flushed = state

    def read(self, state: PoolState) -> list[Reading]:
        """A reading of each signal, of a scrape at `state.at`."""
        if not state.slots:  # as the EPP has it: a pool without endpoints is saturated
            return [Reading(s, state.at, state.at, f_sys=1.0, f_epp=0.0, max_sys=0.0) for s in self.signals]
        return [
            self._saturation(state) if signal is Signal.SATURATION else self._requests(state)
            for signal in self.signals
        ]

    def _saturation(self, state: PoolState) -> Reading:
        max_sys = self._max_sys(state)
        if self.detector is Detector.CONCURRENCY:
            f_sys, queued = state.running / max_sys, float(state.waiting)
        else:
            pods = self._pods(state)
            waiting, queued = self._split(state)
            kv = self.kv_full * state.running / state.slots
            f_sys = max(waiting / pods / DETECTOR_QUEUE, kv / DETECTOR_KV)
        return Reading(
            Signal.SATURATION,
            opened_at=state.at,
            closed_at=state.at,
            f_sys=f_sys,
            f_epp=queued / max_sys,
            max_sys=max_sys,
            exact=self.detector is Detector.CONCURRENCY,
            source="simulated",
        )

    def _requests(self, state: PoolState) -> Reading:
        seen = self._flushed if self.flush_s and self._flushed is not None else state
        max_sys = self._max_sys(state)
        # Without `saturation` there is no flow control: nothing waits in the EPP.
        flow_control = Signal.SATURATION in self.signals
        waiting = self._split(seen)[0] if flow_control else seen.waiting
        queued = self._split(state)[1] if flow_control else 0
        return Reading(
            Signal.REQUESTS,
            opened_at=max(0.0, state.at - self.flush_s),  # the world began at 0, and so did its averages
            closed_at=state.at,
            f_sys=(seen.running + waiting) / max_sys,
            f_epp=queued / max_sys,
            max_sys=max_sys,
            source="simulated",
        )

    def _pods(self, state: PoolState) -> float:
        return state.slots / self.true_slots_per_pod

    def _max_sys(self, state: PoolState) -> float:
        return self.slots_per_pod * self._pods(state)

    def _split(self, state: PoolState) -> tuple[float, float]:
        """What waits in the model servers, and what in the EPP."""
        if self.detector is Detector.CONCURRENCY:
            return 0, state.waiting
        inside = min(state.waiting, DETECTOR_QUEUE * self._pods(state))
        return inside, state.waiting - inside
