"""The status of a dispatcher that consists only of a limiter."""

from __future__ import annotations

from dispatcher.app.status_builder import build_status
from dispatcher.core.gateway.recent_attempts import RecentAttempts
from dispatcher.core.health import HealthRecord
from dispatcher.core.limit.limiter import Limiter
from dispatcher.dispatch.models.model_router import ModelRouter
from dispatcher.dispatch.queue_access import QueueView
from dispatcher.settings import Settings
from dispatcher.signals.kubernetes.capacity import Endpoints
from dispatcher.signals.poller import SourcePoll
from dispatcher.telemetry.status import ProcessStatus, Status

PROCESS = ProcessStatus("1", "3", "qwen", "batch:{qwen}:requests", "one", observe=False, started_at=0.0)


def build_limiter_status(
    limiter: Limiter,
    now: float,
    settings: Settings,
    *,
    poll: SourcePoll | None = None,
    queue: QueueView | None = None,
    running: int = 0,
    models: ModelRouter | None = None,
    recent: RecentAttempts | None = None,
    health: HealthRecord | None = None,
) -> Status:
    return build_status(
        now,
        process=PROCESS,
        settings=settings,
        limiter=limiter,
        running_count=running,
        queue=queue or QueueView(),
        poll=poll,
        endpoints=Endpoints(),
        loop_problem=None,
        model_router=models,
        recent_attempts=recent,
        health=health,
    )
