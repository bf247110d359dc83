"""Doubts about settings of models that are valid and have no effect."""

from __future__ import annotations

import pytest

from dispatcher.features.models.check import CHECK
from dispatcher.settings.load import parse_settings
from dispatcher.settings.model import Settings

GATEWAY = "gateway: {url: http://gw}\n"


def list_doubts(text: str) -> list[str]:
    settings = parse_settings(GATEWAY + text, {})
    assert isinstance(settings, Settings), settings
    findings = [*CHECK.check_settings(settings)]
    assert all(finding.level == "warning" for finding in findings)
    return [f"{finding.where}: {finding.what}" for finding in findings]


MATCH = "name: q, match: 'q-{version}'"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"models: [{{name: a}}, {{{MATCH}, weights: {{v3: 0.05}}}}]",
            "models[1].weights: have no effect, because the policy latest uses one version",
        ),
        (
            f"models: [{{{MATCH}, policy: {{label: stable}}, labels: {{old: '1'}}}}]",
            "models[0].policy: the label 'stable' is not in labels: no version is used until",
        ),
        (
            "serving: {subset_header: x-a}",
            "serving.subset_header: has no effect, because no model has a warm-up",
        ),
    ],
)
def test_version_settings_without_effect_are_doubtful(text: str, message: str) -> None:
    (doubt,) = list_doubts(text)
    assert doubt.startswith(message)


@pytest.mark.parametrize(
    "text",
    [
        f"models: [{{{MATCH}, policy: all, weights: {{v3: 0.05}}}}]",
        f"models: [{{{MATCH}, policy: {{label: stable}}, labels: {{stable: '1'}}}}]",
        "serving: {subset_header: x-a}\nmodels: [{name: a, warmup: a.jsonl}]",
    ],
)
def test_effective_version_settings_are_not_doubtful(text: str) -> None:
    assert list_doubts(text) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [{name: m}]", ["ok: serving.urls: not set, so the 2 model servers of"]),
        ("", []),
        ("models: [{name: m}]\nserving: {urls: ['http://c']}", []),
        ("models: [{name: m}]\nserving: {observe: gateway}", []),
    ],
)
def test_model_servers_derived_from_the_signals_are_reported(text: str, message: list[str]) -> None:
    settings = parse_settings(f"{GATEWAY}signals: {{vllm: {{urls: ['http://a', 'http://b']}}}}\n{text}", {})
    assert isinstance(settings, Settings), settings
    assert [str(each).partition(" signals")[0] for each in CHECK.check_settings(settings)] == message
