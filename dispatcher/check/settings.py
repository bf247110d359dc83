"""Check a configuration without any connection, and report problems of a dispatcher that runs with it."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from dispatcher.check.feature_check import list_feature_checks
from dispatcher.check.finding import Finding
from dispatcher.settings.load import key_paths
from dispatcher.settings.model import Settings
from dispatcher.settings.small_files import read_regular_file
from dispatcher.settings.watched_files import TokenFileError, read_token

FILE_ENDINGS = ("_file", ".warmup")
"""Endings of the keys of settings that name a file."""


def find_doubts(settings: Settings) -> Iterator[Finding]:
    """Report settings that are valid but probably not intended, or that cannot work on this machine."""
    for where in key_paths(Settings):
        if where.endswith(".insecure_skip_verify") and attrgetter(where)(settings):
            what = "certificates are not verified: anybody on the network path can read and answer"
            yield Finding("warning", where, what)
    if not settings.gateway.objective and settings.signals.watches_pool:
        what = "not set: batch requests compete with all requests of priority 0"
        yield Finding("warning", "gateway.objective", what)
    if settings.tracing.endpoint:
        from dispatcher.telemetry import otlp  # the import also loads the logging module

        try:
            otlp.import_opentelemetry(settings)
        except OSError as error:
            yield Finding("failed", "tracing.endpoint", str(error))
    if settings.signals.use == "saturation":
        what = (
            "the EPP's default detector can read near 0 while every slot is taken; use auto unless it runs "
        )
        yield Finding("warning", "signals.use", what + "the concurrency detector")
    for check in list_feature_checks():
        yield from check.check_settings(settings)


def check_files(settings: Settings) -> Iterator[Finding]:
    """Check every file that a setting names. The keys of these settings end in FILE_ENDINGS."""
    for where in key_paths(Settings):
        if where.endswith("_file"):
            name = attrgetter(where)(settings)
            if name:
                yield _check_file(where, Path(name))
    for check in list_feature_checks():
        yield from check.check_files(settings)


def _check_file(where: str, path: Path) -> Finding:
    try:
        empty = not read_regular_file(path, 1)
    except OSError as error:
        return Finding("failed", where, f"{path}: {error.strerror or error}")
    if empty:
        return Finding("failed", where, f"{path}: is empty")
    if where.endswith("token_file"):
        try:
            read_token(path)
        except TokenFileError as error:
            return Finding("failed", where, f"{path}: {error.problem}")
    return Finding("ok", where, f"{path} is readable")
