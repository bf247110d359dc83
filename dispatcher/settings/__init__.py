"""Typed configuration: load the file and the environment, refuse what is wrong all at once, reload, watch."""

from __future__ import annotations

from dispatcher.settings.model import (
    Admin,
    Budget,
    Epp,
    Gateway,
    Log,
    Pool,
    Prometheus,
    Queue,
    Retry,
    Settings,
    Shutdown,
    Signals,
    Source,
    Tls,
    Tracing,
)
from dispatcher.settings.values import SecretUrl

__all__ = [
    "Admin",
    "Budget",
    "Epp",
    "Gateway",
    "Log",
    "Pool",
    "Prometheus",
    "Queue",
    "Retry",
    "SecretUrl",
    "Settings",
    "Shutdown",
    "Signals",
    "Source",
    "Tls",
    "Tracing",
]
