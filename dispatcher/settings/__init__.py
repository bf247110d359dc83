"""Typed configuration: load the file and the environment, refuse what is wrong all at once, reload, watch."""

from __future__ import annotations

from dispatcher.settings.load import Refusal, load, parse, read, reload
from dispatcher.settings.model import (
    Admin,
    Budget,
    Epp,
    Gateway,
    Log,
    Pool,
    Prometheus,
    Retry,
    Settings,
    Shutdown,
    Signals,
    Source,
    Tls,
    Tracing,
)
from dispatcher.settings.queue import Queue
from dispatcher.settings.source import Problem
from dispatcher.settings.values import SecretUrl
from dispatcher.settings.watch import watch

__all__ = [
    "Admin",
    "Budget",
    "Epp",
    "Gateway",
    "Log",
    "Pool",
    "Problem",
    "Prometheus",
    "Queue",
    "Refusal",
    "Retry",
    "SecretUrl",
    "Settings",
    "Shutdown",
    "Signals",
    "Source",
    "Tls",
    "Tracing",
    "load",
    "parse",
    "read",
    "reload",
    "watch",
]
