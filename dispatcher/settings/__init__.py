"""Typed configuration: load the file and the environment, refuse what is wrong all at once, reload, watch."""

from __future__ import annotations

from dispatcher.settings.load import ClientSettings, Refusal, load, load_client, parse, read, reload
from dispatcher.settings.model import (
    AdminSettings,
    BudgetSettings,
    EppSettings,
    GatewaySettings,
    LogSettings,
    PoolSettings,
    PrometheusSettings,
    RetrySettings,
    Settings,
    ShutdownSettings,
    SignalsSettings,
    Source,
    TlsSettings,
    TracingSettings,
)
from dispatcher.settings.queue import QueueSettings
from dispatcher.settings.source import Problem
from dispatcher.settings.values import SecretUrl
from dispatcher.settings.watch import watch

__all__ = [
    "AdminSettings",
    "BudgetSettings",
    "ClientSettings",
    "EppSettings",
    "GatewaySettings",
    "LogSettings",
    "PoolSettings",
    "Problem",
    "PrometheusSettings",
    "QueueSettings",
    "Refusal",
    "RetrySettings",
    "SecretUrl",
    "Settings",
    "ShutdownSettings",
    "SignalsSettings",
    "Source",
    "TlsSettings",
    "TracingSettings",
    "load",
    "load_client",
    "parse",
    "read",
    "reload",
    "watch",
]
