"""The status of a dispatcher that consists only of a limiter, or of a limiter and features."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from dispatcher.kernel import Journal, Options
from dispatcher.kernel.context import KernelContext
from dispatcher.kernel.queue_access import QueueView
from dispatcher.limit.health import HealthRecord
from dispatcher.limit.limiter import Limiter
from dispatcher.requests.outcomes.outcome import RetryPolicy
from dispatcher.requests.outcomes.recent_attempts import RecentAttempts
from dispatcher.service.status_builder import build_status
from dispatcher.settings.model import Settings
from dispatcher.signals.kubernetes.capacity import Endpoints
from dispatcher.signals.poller import SourcePoll
from dispatcher.telemetry.metrics import Metrics
from dispatcher.telemetry.status import ProcessStatus, Status

PROCESS = ProcessStatus("1", "3", "qwen", "batch:{qwen}:requests", "one", observe=False, started_at=0.0)


class SlowLimiter(Limiter):
    """Limiter of calls that take `call_duration_s`."""

    call_duration_s = 0.0

    @property
    def mean_duration_s(self) -> float:
        return self.call_duration_s


def create_context(
    limiter: Limiter,
    *,
    queue: QueueView | None = None,
    recent: RecentAttempts | None = None,
    options: Options | None = None,
) -> KernelContext:
    """Return a context with a queue that is only viewed, and without a gateway."""
    access: Any = SimpleNamespace(
        view=queue or QueueView(), queue=SimpleNamespace(open_calls=lambda kind: None)
    )
    journal, gateway = Journal(Metrics()), cast("Any", None)
    journal.recent_attempts = recent or journal.recent_attempts
    return KernelContext(access, limiter, gateway, journal, options or Options(RetryPolicy()))


def build_context_status(
    context: KernelContext,
    now: float,
    settings: Settings,
    *,
    poll: SourcePoll | None = None,
    health: HealthRecord | None = None,
) -> Status:
    return build_status(
        now,
        context,
        process=PROCESS,
        settings=settings,
        health=health or HealthRecord(),
        poll=poll,
        endpoints=Endpoints(),
    )


def build_limiter_status(
    limiter: Limiter,
    now: float,
    settings: Settings,
    *,
    poll: SourcePoll | None = None,
    queue: QueueView | None = None,
    recent: RecentAttempts | None = None,
    health: HealthRecord | None = None,
) -> Status:
    context = create_context(limiter, queue=queue, recent=recent)
    return build_context_status(context, now, settings, poll=poll, health=health)
