"""Finds the health of this process on request, and logs it when it changes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from dispatcher.core.gateway.recent_attempts import RecentAttempts
from dispatcher.core.health import Assessment, Health, HealthFacts, HealthRecord
from dispatcher.core.limit.limiter import Limiter
from dispatcher.dispatch.in_flight import InFlightTable
from dispatcher.dispatch.models.model_router import ModelRouter
from dispatcher.dispatch.queue_access import QueueView, loop_time
from dispatcher.telemetry.events import Event, emit

CHECK_INTERVAL_S = 2.0
"""Time between two checks for the log. A request for the status always finds the health anew."""
_FAULTS = (Health.DEGRADED, Health.FAILING, Health.UNKNOWN)
"""Health values that are logged as warnings."""


@dataclass(slots=True)
class HealthWatch:
    """Finds the health from the state of the parts of the dispatcher."""

    limiter: Limiter
    view: QueueView
    recent_attempts: RecentAttempts
    in_flight: InFlightTable
    model_router: ModelRouter
    is_observing: bool = False
    record: HealthRecord = field(default_factory=HealthRecord)

    async def run(self) -> None:
        """Log each change of the health until cancelled. Nothing here waits for the queue, which may hang."""
        while True:
            at = loop_time()
            newest = self.assess_health(at)
            if self.record.take_change(at):
                emit(
                    Event.UNHEALTHY if newest.health in _FAULTS else Event.HEALTH,
                    health=str(newest.health),
                    cause=str(newest.cause),
                    why=newest.sentence,
                    hint=newest.cause.hint,
                )
            await asyncio.sleep(CHECK_INTERVAL_S)

    def assess_health(self, at: float) -> Assessment:
        """Find the health anew and return it."""
        allowance = self.limiter.get_allowance(at)
        counts = self.view.counts
        held_back = (
            self.model_router.list_held_back() if counts is not None and counts.waiting_for_model else ()
        )
        return self.record.update_health(
            HealthFacts(
                now=at,
                reason=allowance.reason,
                reason_detail=allowance.detail,
                is_observing=self.is_observing,
                queue_problem=self.view.problem,
                signals_problem=self.limiter.signals_problem,
                counts=counts,
                counted_at=self.view.counted_at,
                model_problem=held_back[0][2] if held_back else "",
                running_count=self.in_flight.running_count,
                unanswered_attempts=self.recent_attempts.unanswered,
                has_only_failures=self.recent_attempts.has_only_failures(at),
                failure_summary=self.recent_attempts.describe_failures(at),
                rejection_summary=self.recent_attempts.describe_rejections(at),
                answered_at=self.recent_attempts.answered_at,
                median_duration_s=self.limiter.median_duration_s,
                mean_duration_s=self.limiter.mean_duration_s,
            )
        )
