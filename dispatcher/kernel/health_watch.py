"""Finds the health of this process on request, and logs it when it changes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from dispatcher.kernel.context import KernelContext
from dispatcher.kernel.queue_access import loop_time
from dispatcher.limit.health import Assessment, Health, HealthFacts, HealthRecord
from dispatcher.telemetry.events import Event, emit

CHECK_INTERVAL_S = 2.0
"""Time between two checks for the log. A request for the status always finds the health anew."""
_FAULTS = (Health.DEGRADED, Health.FAILING, Health.UNKNOWN)
"""Health values that are logged as warnings."""


@dataclass(slots=True)
class HealthWatch:
    """Finds the health from the state of the parts of the dispatcher."""

    context: KernelContext
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
                    cause=newest.cause.name,
                    why=newest.sentence,
                    hint=newest.cause.hint,
                )
            await asyncio.sleep(CHECK_INTERVAL_S)

    def assess_health(self, at: float) -> Assessment:
        """Find the health anew and return it."""
        context = self.context
        limiter, view, recent_attempts = context.limiter, context.access.view, context.journal.recent_attempts
        allowance, counts = limiter.get_allowance(at), view.counts
        reasons = [] if counts is None else [explain(counts) for explain in context.hooks.explain_waiting]
        return self.record.update_health(
            HealthFacts(
                now=at,
                reason=allowance.reason,
                reason_detail=allowance.detail,
                is_observing=context.options.observe,
                queue_problem=view.problem,
                signals_problem=limiter.signals_problem,
                counts=counts,
                counted_at=view.counted_at,
                waiting_reasons=[each for each in reasons if each is not None],
                running_count=context.in_flight.running_count,
                unanswered_attempts=recent_attempts.unanswered,
                has_only_failures=recent_attempts.has_only_failures(at),
                failure_summary=recent_attempts.describe_failures(at),
                rejection_summary=recent_attempts.describe_rejections(at),
                answered_at=recent_attempts.answered_at,
                median_duration_s=limiter.median_duration_s,
                mean_duration_s=limiter.mean_duration_s,
            )
        )
