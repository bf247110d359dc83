"""Check a configuration without any connection, and report problems of a dispatcher that runs with it."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from dispatcher.check.finding import Finding
from dispatcher.core.patterns import matches_pattern, patterns_overlap
from dispatcher.settings import Settings
from dispatcher.settings.load import key_paths
from dispatcher.settings.small_files import read_regular_file
from dispatcher.settings.watched_files import TokenFileError, read_token
from dispatcher.settings.yaml_source import Problem

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
    if settings.batching.mode != "off" and "rules" in settings.batching.model_fields_set:
        yield from _find_unused_rules(settings)
    yield from _find_useless_version_settings(settings)


def report_derived_settings(settings: Settings) -> Iterator[Finding]:
    """Report settings whose value is derived from another setting."""
    if settings.observes_models and settings.serving_with_servers.urls != settings.serving.urls:
        many = len(settings.serving_with_servers.urls)
        servers, verb = ("model server", "is") if many == 1 else ("model servers", "are")
        what = f"not set, so the {many} {servers} of signals.vllm.urls {verb} asked"
        yield Finding("ok", "serving.urls", what)


def _find_useless_version_settings(settings: Settings) -> Iterator[Finding]:
    """Report settings of versions and warm-ups that have no effect."""
    for at, model in enumerate(settings.models):
        where = f"models[{at}]"
        if model.weights and model.policy.max_count == 1:
            what = (
                f"have no effect, because the policy {model.policy} uses one version: set policy to all, or "
                "to the versions that share the requests"
            )
            yield Finding("warning", f"{where}.weights", what)
        unset = model.policy.label and model.policy.label not in model.labels
        if unset:
            what = (
                f"the label {model.policy.label!r} is not in labels: no version is used until `models label` "
                "sets it"
            )
            yield Finding("warning", f"{where}.policy", what)
    if settings.serving.subset_header and not any(model.warmup for model in settings.models):
        what = "has no effect, because no model has a warm-up, so that every server may be used"
        yield Finding("warning", "serving.subset_header", what)


def _find_unused_rules(settings: Settings) -> Iterator[Finding]:
    """Report paths of batching rules that no request can match."""
    allowed = (*settings.gateway.allowed_paths, settings.gateway.path)
    before: list[tuple[int, str]] = []
    for number, rule in enumerate(settings.batching.rules):
        where = f"batching.rules[{number}].paths"
        for path in rule.paths:
            taken = next((by for by, pattern in before if matches_pattern(pattern, path)), None)
            if not any(patterns_overlap(each, path) for each in allowed):
                what = f"{path}: has no effect, because gateway.allowed_paths does not allow it"
                yield Finding("warning", where, what)
            elif taken is not None:
                what = f"{path}: has no effect, because batching.rules[{taken}] matches it first"
                yield Finding("warning", where, what)
        before += [(number, path) for path in rule.paths]


def check_files(settings: Settings) -> Iterator[Finding]:
    """Check every file that a setting names. The keys of these settings end in FILE_ENDINGS."""
    for where in key_paths(Settings):
        if where.endswith("_file"):
            name = attrgetter(where)(settings)
            if name:
                yield _check_file(where, Path(name))
    if any(model.warmup for model in settings.models):
        yield from _check_warmups(settings)


def _check_warmups(settings: Settings) -> Iterator[Finding]:
    # Imported here because few configurations have warm-ups, and the import is slow.
    from dispatcher.settings.warmups import WarmupFiles

    warmups = WarmupFiles(settings)
    for model in warmups.paths:
        found = warmups.read_requests(model)
        if isinstance(found, Problem):
            yield Finding("failed", found.where, found.what)
        else:
            calls = sum(each.repeat for each in found)
            what = f"{warmups.paths[model]}: {len(found):,} requests, {calls:,} calls for each server"
            yield Finding("ok", warmups.setting_path(model), what)


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
