"""Monitoring of the simulated world: the readings that a dispatcher gets, with all their errors and
delays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from dispatcher.lab.simulation.world import PoolState
from dispatcher.lab.standin.model import KV_AT_FULL, WAITING_AT_FULL
from dispatcher.limit.budget import Policy, Signal
from dispatcher.signals.epp.series import InFlightLoad, PoolView
from dispatcher.signals.readings import PickerFacts, PollReadings, derive_readings, list_possible_signals

REQUEST_TOKENS, POD_TOKENS = 650, 1_000_000
"""Average tokens of a request, and the default number of tokens per endpoint in the token mode of the
picker."""
KV_FULL = 0.1
"""Share of the KV cache that is in use while every slot is taken."""


class Detector(StrEnum):
    """Quantity from which the picker computes the saturation of the pool."""

    UTILIZATION = "utilization"
    """Default of the picker: mean over pods of max(waiting / 5, kv / 0.8). A score of pressure, not a
    count."""
    CONCURRENCY = "concurrency"
    """Requests in the pods ÷ maxConcurrency: a true count."""
    TOKENS = "tokens"
    """Tokens in the pods ÷ maximum, by the other mode of the concurrency detector: a count of something
    else."""
    COMPOSITE = "composite"
    """Maximum of utilization and concurrency."""
    NONE = "none"
    """Flow control is off: the picker does not queue requests and shows no saturation."""
    SERVERS = "servers"
    """There is no picker: the metrics of the model servers are read instead."""

    @property
    def has_flow_control(self) -> bool:
        """True if the picker has a queue and shows its saturation."""
        return self not in (Detector.NONE, Detector.SERVERS)

    @property
    def uses_server_queues(self) -> bool:
        """True if the queues of the model servers decide whether the picker holds requests back."""
        return self in (Detector.UTILIZATION, Detector.COMPOSITE)


class Signals(StrEnum):
    """Value of `signals.use` in the configuration."""

    AUTO = "auto"
    SATURATION = "saturation"
    REQUESTS = "requests"
    BOTH = "both"

    @property
    def possible_signals(self) -> Sequence[Signal]:
        """Signals that may be read before anything is known about the picker."""
        return list_possible_signals(self.value)


@dataclass(slots=True)
class Exporter:
    """Metrics of the picker, and the readings that the dispatcher makes of them."""

    signals: Signals
    policy: Policy
    """Configured capacity."""
    picker_per_pod: float
    """maxConcurrency of the picker."""
    detector: Detector = Detector.CONCURRENCY
    flush_s: float = 0.0
    """Interval at which the averages are renewed. 0 if they are always current."""
    stamp_s: float = 0.0
    """Delay of the timestamp of a sample after the sample."""
    shows_running: bool = True
    """True if the page shows the requests that the picker sent and that have no answer yet. This number is
    always current."""
    shows_in_flight: bool = False
    """True if the page shows the same requests by priority, by the picker's in-flight-load producer."""
    shows_server_queues: bool = True
    """True if the page shows the queue of each model server, as the picker last read it."""
    pickers: int = 1
    """Number of active replicas of the picker, each with an even share of the requests."""
    _flushed: PoolState | None = None
    _lessons: PickerFacts = field(default_factory=PickerFacts)

    def flush_averages(self, state: PoolState) -> None:
        """Renew the averages from this state."""
        self._flushed = state

    def scrape_pages(self, state: PoolState) -> PollReadings:
        """Return the readings of a scrape at `state.at`."""
        views = [self.build_view(state, number) for number in range(self.pickers)]
        self._lessons.learn_from_views(views)
        verdict = derive_readings(views, self.signals, self.policy, "simulated", self._lessons)
        readings = [
            # Averages cannot start before the world does, at 0. The simulated pages count the full weight of
            # a request.
            replace(reading, opened_at=max(0.0, reading.opened_at), items_beyond_calls=math.inf)
            for reading in verdict.readings
        ]
        return replace(verdict, readings=tuple(readings))

    def build_view(self, state: PoolState, number: int = 0) -> PoolView:
        """Return the page of one replica of the picker, scraped at `state.at`."""
        if self.detector is Detector.SERVERS:
            return self._build_servers_view(state)
        averaged = self._flushed if self.flush_s and self._flushed is not None else state
        flow_control = self.detector.has_flow_control
        # Everything that the picker has sent and that is not answered: running or waiting in a pod.
        sent = self._get_picker_share(state.running + self._count_waiting_in_pods(state), number)
        batch_sent = state.batch_running + self._count_batch_waiting_in_pods(state)
        batch_queued = state.batch_running + state.batch_waiting - batch_sent
        at = state.at + self.stamp_s
        return PoolView(
            at,
            at,
            saturation=self._compute_saturation(state, sent) if flow_control else None,
            queued=self._get_picker_share(state.waiting - self._count_waiting_in_pods(state), number)
            if flow_control
            else None,
            running=averaged.running / max(1, averaged.pods),
            waiting=self._count_waiting_in_pods(averaged) / max(1, averaged.pods),
            kv_cache=self._compute_kv_usage(averaged),
            server_queued=self._get_last_read_waiting(state) if self.shows_server_queues else None,
            endpoints_with_room=float(state.last_read_pods_with_room) if self.shows_server_queues else None,
            running_deviation=averaged.running_deviation,
            ready=state.pods,
            in_flight=sent if self.shows_running else None,
            batch_queued=float(self._get_picker_share(batch_queued, number)),
            load=InFlightLoad(float(sent), float(self._get_picker_share(batch_sent, number)))
            if self.shows_in_flight
            else None,
            utilization_detectors=frozenset({"default"} if self.detector.uses_server_queues else ()),
        )

    def _build_servers_view(self, state: PoolState) -> PoolView:
        """Return the metrics of all model servers together."""
        at, pods = state.at + self.stamp_s, max(1, state.pods)
        return PoolView(
            at,
            at,
            running=state.running / pods,
            waiting=state.waiting / pods,
            kv_cache=self._compute_kv_usage(state),
            ready=state.pods,
            has_current_averages=True,
        )

    def _count_waiting_in_pods(self, state: PoolState) -> int:
        """Return the number of requests that wait in the pods. Without flow control all waiting requests
        do."""
        return state.waiting_in_pods if self.detector.has_flow_control else state.waiting

    def _count_batch_waiting_in_pods(self, state: PoolState) -> int:
        return state.batch_waiting_in_pods if self.detector.has_flow_control else state.batch_waiting

    def _get_last_read_waiting(self, state: PoolState) -> float:
        """Return the same number as of the last time the picker read the metrics."""
        # The world may hold requests in its picker for the order alone; without flow control they count as in
        # pods.
        outside = 0 if self.detector.has_flow_control else state.waiting - state.waiting_in_pods
        return float(state.last_read_waiting_in_pods + outside)

    def _get_picker_share(self, requests: int, number: int) -> int:
        """Return the share of this replica of the picker."""
        return requests // self.pickers + (number < requests % self.pickers)

    def _compute_saturation(self, state: PoolState, sent: int) -> float:
        if not state.pods:
            return 1.0
        if self.detector is Detector.CONCURRENCY:
            return sent / (self.picker_per_pod * state.pods)
        if self.detector is Detector.TOKENS:
            return sent * REQUEST_TOKENS / (POD_TOKENS * state.pods)
        # The formula of the utilization detector with its default thresholds.
        pressure = max(
            state.last_read_waiting_in_pods / state.pods / WAITING_AT_FULL,
            self._compute_kv_usage(state) / KV_AT_FULL,
        )
        if self.detector is Detector.COMPOSITE:
            return max(pressure, sent / (self.picker_per_pod * state.pods))
        return pressure

    def _compute_kv_usage(self, state: PoolState) -> float:
        if state.kv_usage is not None:
            return state.kv_usage
        # No slots: the detector treats a pool without servers as full.
        return KV_FULL * state.running / state.slots if state.slots else 1.0
