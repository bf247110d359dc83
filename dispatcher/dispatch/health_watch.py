"""Finds the health of this process on request, and logs it when it changes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from dispatcher.core.gateway.recent_attempts import RecentTries
from dispatcher.core.health import Assessment, Health, HealthFacts, HealthRecord
from dispatcher.core.limit.limiter import Limiter
from dispatcher.dispatch.in_flight import Holding
from dispatcher.dispatch.models.model_requests import Models
from dispatcher.dispatch.queue_access import QueueView, now
from dispatcher.telemetry.events import Event, emit

EACH_S = 2.0
"""Time between two checks for the log. A request for the status always finds the health anew."""
_FAULTS = (Health.DEGRADED, Health.FAILING, Health.UNKNOWN)
"""Health values that are logged as warnings."""


@dataclass(slots=True)
class HealthWatch:
    """Finds the health from the state of the parts of the dispatcher."""

    limiter: Limiter
    view: QueueView
    recent: RecentTries
    holding: Holding
    models: Models
    observing: bool = False
    record: HealthRecord = field(default_factory=HealthRecord)

    async def run(self) -> None:
        """Log each change of the health until cancelled. Nothing here waits for the queue, which may hang."""
        while True:
            at = now()
            newest = self.assess(at)
            if self.record.changed(at):
                emit(
                    Event.UNHEALTHY if newest.health in _FAULTS else Event.HEALTH,
                    health=str(newest.health),
                    cause=str(newest.cause),
                    why=newest.sentence,
                    look_at=newest.cause.look_at,
                )
            await asyncio.sleep(EACH_S)

    def assess(self, at: float) -> Assessment:
        """Find the health anew and return it."""
        allowance = self.limiter.allowance(at)
        counts = self.view.counts
        held_back = self.models.held_back() if counts is not None and counts.awaiting else ()
        return self.record.look(
            HealthFacts(
                now=at,
                reason=allowance.reason,
                because=allowance.because,
                observing=self.observing,
                queue_problem=self.view.problem,
                signals_problem=self.limiter.signals_problem,
                counts=counts,
                counted_at=self.view.counted_at,
                models_why=held_back[0][2] if held_back else "",
                running=self.holding.running,
                unanswered=self.recent.unanswered,
                all_failed=self.recent.all_failed(at),
                failures=self.recent.failures(at),
                rejections=self.recent.rejections(at),
                answered_at=self.recent.answered_at,
                usual_s=self.limiter.usual_s,
                mean_s=self.limiter.mean_s,
            )
        )
