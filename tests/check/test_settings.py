"""Doubts about a valid configuration: settings that have no effect, or are seldom intended."""

from __future__ import annotations

import pytest

from dispatcher.check.settings import find_doubts, report_derived_settings
from dispatcher.settings import Settings, parse_settings

WITHOUT_DOUBTS = "gateway: {url: http://gw, objective: batch, allowed_paths: [/v1/*, /models/*:predict]}\n"


def list_doubts(text: str) -> list[str]:
    settings = parse_settings(WITHOUT_DOUBTS + text, {})
    assert isinstance(settings, Settings), settings
    assert all(finding.level == "warning" for finding in find_doubts(settings))
    return [f"{finding.where}: {finding.what}" for finding in find_doubts(settings)]


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


@pytest.mark.parametrize(
    ("signals", "is_doubtful"),
    [
        ("{}", True),
        ("{vllm: {urls: ['http://a']}}", False),
        ("{source: fixed}", False),
    ],
)
def test_missing_objective_is_doubtful_only_in_an_inference_pool(signals: str, *, is_doubtful: bool) -> None:
    text = f"gateway: {{url: http://gw}}\nbudget: {{max_in_flight: 4}}\nsignals: {signals}\n"
    settings = parse_settings(text, {})
    assert isinstance(settings, Settings)
    assert [finding.where for finding in find_doubts(settings)] == ["gateway.objective"] * is_doubtful


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
    assert list(find_doubts(settings)) == []


def test_default_batching_rule_is_not_doubtful_if_its_path_is_not_allowed() -> None:
    settings = parse_settings("gateway: {url: http://gw, objective: b, allowed_paths: [/v1/completions]}", {})
    assert isinstance(settings, Settings)
    assert list(find_doubts(settings)) == []


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
    settings = parse_settings(
        f"{WITHOUT_DOUBTS}signals: {{vllm: {{urls: ['http://a', 'http://b']}}}}\n{text}", {}
    )
    assert isinstance(settings, Settings), settings
    assert [str(each).partition(" signals")[0] for each in report_derived_settings(settings)] == message
