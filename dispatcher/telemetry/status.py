"""What the dispatcher knows of itself at one moment: /status as it stands, and every gauge."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Status:
    """What the dispatcher knows of itself at one moment: /status as it stands, and every gauge."""

    version: str
    pool: str
    queue: str
    owner: str
    observe: bool
    reason: str
    open: bool
    explanation: str
    limit: int
    in_flight: int
    """Of all replicas together."""
    running: int
    """Of this process."""
    signal: str | None
    f_sys: float | None
    f_epp: float | None
    reserve: float | None
    budget: float | None
    """D."""
    headroom: int | None
    max_sys: float | None
    max_sys_by: str | None
    """Whose word `max_sys` is: one of CAPACITIES."""
    ceiling: float | None
    reading_age_s: float | None
    source: str | None
    detector: str | None = None
    """What is known of the picker's saturation detector."""
    per_endpoint: float | None = None
    """Requests per endpoint that the capacity is reckoned with; None: it comes another way."""
    per_endpoint_from: Literal["setting", "picker", "assumption"] | None = None
    picker_max_concurrency: int | None = None
    """As the picker's pages show it; None: they do not."""
    readings: list[dict[str, Any]] = field(default_factory=list)
    """The newest reading of each signal with the raw values it came from."""
    watch_endpoints: int | None = None
    """Ready endpoints by the Kubernetes watch; None: it knows none, and bounds nothing."""
    watch_unsure_s: float | None = None
    """How long ago the API was heard last, while something cannot be asked; None: all of it is followed."""
    watch_problems: list[str] = field(default_factory=list)
    pending: int | None = None
    leased: int | None = None
    delayed: int | None = None
    dead: int | None = None
    paused: bool = False
    queue_problem: str | None = None
    config_generation: int = 1
    config_problem: str | None = None
    loop_lag_s: float = 0.0
    """The latest that the event loop woke in the last seconds."""

    def json(self) -> dict[str, Any]:
        return asdict(self)
