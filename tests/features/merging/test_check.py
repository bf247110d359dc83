"""Doubts about batching rules that are valid and have no effect."""

from __future__ import annotations

import pytest

from dispatcher.features.merging.check import CHECK
from dispatcher.settings.load import parse_settings
from dispatcher.settings.model import Settings

GATEWAY = "gateway: {url: http://gw, allowed_paths: [/v1/*, /models/*:predict]}\n"


def list_doubts(text: str) -> list[str]:
    settings = parse_settings(GATEWAY + text, {})
    assert isinstance(settings, Settings), settings
    findings = [*CHECK.check_settings(settings)]
    assert all(finding.level == "warning" for finding in findings)
    return [f"{finding.where}: {finding.what}" for finding in findings]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "batching: {rules: [{paths: [/v1/embeddings]}, {paths: ['/models/*:predict']}]}",
        "batching: {rules: [{paths: ['/*/embeddings'], shape: embeddings}]}",
        "batching: {rules: [{paths: [/v1/embeddings]}, {paths: ['/v1/*'], shape: predict}]}",
        "batching: {mode: off, rules: [{paths: [/other/rerank]}]}",
        "batching: {rules: [{paths: [/v1/embeddings, /v1/embeddings]}]}",
    ],
)
def test_effective_batching_rules_are_not_doubtful(text: str) -> None:
    assert list_doubts(text) == []


def test_batching_paths_without_effect_are_doubtful() -> None:
    first = "{paths: [/other/rerank, /v1/rerank]}"
    rules = f"[{first}, {{paths: ['/v1/*'], shape: predict}}, {{paths: [/v1/embeddings]}}]"
    not_allowed = "has no effect, because gateway.allowed_paths does not allow it"
    assert list_doubts(f"batching: {{rules: {rules}}}") == [
        f"batching.rules[0].paths: /other/rerank: {not_allowed}",
        "batching.rules[2].paths: /v1/embeddings: has no effect, because batching.rules[1] matches it first",
    ]


def test_default_path_of_the_gateway_is_not_doubtful() -> None:
    text = "gateway: {url: http://gw, objective: b, path: /my/embeddings, allowed_paths: []}\n"
    settings = parse_settings(text + "batching: {rules: [{paths: [/my/embeddings]}]}", {})
    assert isinstance(settings, Settings)
    assert list(CHECK.check_settings(settings)) == []


def test_default_batching_rule_is_not_doubtful_if_its_path_is_not_allowed() -> None:
    settings = parse_settings("gateway: {url: http://gw, objective: b, allowed_paths: [/v1/completions]}", {})
    assert isinstance(settings, Settings)
    assert list(CHECK.check_settings(settings)) == []
