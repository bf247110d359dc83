"""The status of a dispatcher that is nothing but its limiter."""

from __future__ import annotations

from dispatcher.core.health import HealthRecord
from dispatcher.core.limiter import Limiter
from dispatcher.core.recent import RecentTries
from dispatcher.dispatch.access import QueueView
from dispatcher.dispatch.models import Models
from dispatcher.overview import overview
from dispatcher.settings import Settings
from dispatcher.signals.capacity import Endpoints
from dispatcher.signals.poller import SourcePoll
from dispatcher.telemetry.status import ProcessStatus, Status

PROCESS = ProcessStatus("1", "3", "qwen", "batch:{qwen}:requests", "one", observe=False, started_at=0.0)


def status_of(
    limiter: Limiter,
    now: float,
    settings: Settings,
    *,
    poll: SourcePoll | None = None,
    queue: QueueView | None = None,
    running: int = 0,
    models: Models | None = None,
    recent: RecentTries | None = None,
    health: HealthRecord | None = None,
) -> Status:
    return overview(
        now,
        process=PROCESS,
        settings=settings,
        limiter=limiter,
        running=running,
        queue=queue or QueueView(),
        poll=poll,
        watched=Endpoints(),
        slow=None,
        models=models,
        recent=recent,
        health=health,
    )
