"""Typed configuration: loads the file and the environment, reports all problems at once, reloads and watches
the file."""

from __future__ import annotations

from dispatcher.settings.load import (
    ClientSettings,
    ReloadRejection,
    load_client_settings,
    load_settings,
    parse_settings,
    read_config,
    reload_settings,
)
from dispatcher.settings.model import (
    AdminSettings,
    BudgetSettings,
    GatewaySettings,
    LogSettings,
    PoolSettings,
    RetrySettings,
    Settings,
    ShutdownSettings,
    TracingSettings,
)
from dispatcher.settings.models import ModelSettings
from dispatcher.settings.queue import QueueSettings
from dispatcher.settings.serving import ServingSettings
from dispatcher.settings.signals import (
    EppSettings,
    PrometheusSettings,
    SignalsSettings,
    Source,
    VllmSettings,
)
from dispatcher.settings.tls import TlsSettings
from dispatcher.settings.values import SecretUrl
from dispatcher.settings.watch import watch_config
from dispatcher.settings.yaml_source import Problem

__all__ = [
    "AdminSettings",
    "BudgetSettings",
    "ClientSettings",
    "EppSettings",
    "GatewaySettings",
    "LogSettings",
    "ModelSettings",
    "PoolSettings",
    "Problem",
    "PrometheusSettings",
    "QueueSettings",
    "ReloadRejection",
    "RetrySettings",
    "SecretUrl",
    "ServingSettings",
    "Settings",
    "ShutdownSettings",
    "SignalsSettings",
    "Source",
    "TlsSettings",
    "TracingSettings",
    "VllmSettings",
    "load_client_settings",
    "load_settings",
    "parse_settings",
    "read_config",
    "reload_settings",
    "watch_config",
]
