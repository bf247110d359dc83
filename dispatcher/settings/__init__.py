"""Typed configuration: loads the file and the environment, reports all problems at once, reloads and watches
the file."""

from __future__ import annotations

from dispatcher.settings.load import (
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
    PoolSettings,
    Settings,
)
from dispatcher.settings.models import ModelSettings
from dispatcher.settings.signals import (
    EppSettings,
    SignalsSettings,
    Source,
)
from dispatcher.settings.tls import TlsSettings
from dispatcher.settings.values import SecretUrl
from dispatcher.settings.watch import watch_config
from dispatcher.settings.yaml_source import Problem

__all__ = [
    "AdminSettings",
    "BudgetSettings",
    "EppSettings",
    "GatewaySettings",
    "ModelSettings",
    "PoolSettings",
    "Problem",
    "ReloadRejection",
    "SecretUrl",
    "Settings",
    "SignalsSettings",
    "Source",
    "TlsSettings",
    "load_client_settings",
    "load_settings",
    "parse_settings",
    "read_config",
    "reload_settings",
    "watch_config",
]
