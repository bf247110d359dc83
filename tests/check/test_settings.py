"""What a configuration allows, though it is seldom meant."""

from __future__ import annotations

import pytest

from dispatcher.check.settings import find_doubts, report_derived_settings
from dispatcher.settings import Settings, parse_settings

QUIET = "gateway: {url: http://gw, objective: batch, allowed_paths: [/v1/*, /models/*:predict]}\n"


def told(text: str) -> list[str]:
    settings = parse_settings(QUIET + text, {})
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
def test_rules_of_batching_that_can_count_are_no_doubt(text: str) -> None:
    assert told(text) == []


@pytest.mark.parametrize(
    ("signals", "doubted"),
    [
        ("{}", True),
        ("{vllm: {urls: ['http://a']}}", False),
        ("{source: fixed}", False),
    ],
)
def test_a_missing_objective_is_a_doubt_only_in_an_inference_pool(signals: str, *, doubted: bool) -> None:
    text = f"gateway: {{url: http://gw}}\nbudget: {{max_in_flight: 4}}\nsignals: {signals}\n"
    settings = parse_settings(text, {})
    assert isinstance(settings, Settings)
    assert [finding.where for finding in find_doubts(settings)] == ["gateway.objective"] * doubted


def test_a_path_that_is_not_allowed_is_told_and_one_that_an_earlier_rule_has() -> None:
    first = "{paths: [/other/rerank, /v1/rerank]}"
    rules = f"[{first}, {{paths: ['/v1/*'], shape: predict}}, {{paths: [/v1/embeddings]}}]"
    nowhere = "no request may go there: gateway.allowed_paths does not have it"
    assert told(f"batching: {{rules: {rules}}}") == [
        f"batching.rules[0].paths: /other/rerank: {nowhere}",
        "batching.rules[2].paths: /v1/embeddings: never asked, for batching.rules[1] has it already",
    ]


def test_the_gateways_own_path_is_allowed() -> None:
    text = "gateway: {url: http://gw, objective: b, path: /my/embeddings, allowed_paths: []}\n"
    settings = parse_settings(text + "batching: {rules: [{paths: [/my/embeddings]}]}", {})
    assert isinstance(settings, Settings)
    assert list(find_doubts(settings)) == []


def test_the_default_rule_is_no_doubt_where_only_other_paths_are_allowed() -> None:
    settings = parse_settings("gateway: {url: http://gw, objective: b, allowed_paths: [/v1/completions]}", {})
    assert isinstance(settings, Settings)
    assert list(find_doubts(settings)) == []


MATCH = "name: q, match: 'q-(?P<version>.+)'"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            f"models: [{{name: a}}, {{{MATCH}, weights: {{v3: 0.05}}}}]",
            "models[1].weights: the policy latest opens one version, which gets all",
        ),
        (
            f"models: [{{{MATCH}, policy: {{label: stable}}, labels: {{old: '1'}}}}]",
            "models[0].policy: the label 'stable' is not among its labels: none is open until a verb sets it",
        ),
        ("serving: {subset_header: x-a}", "serving.subset_header: is sent with no request"),
    ],
)
def test_what_is_said_of_versions_in_vain_is_told(text: str, said: str) -> None:
    (found,) = told(text)
    assert found.startswith(said)


@pytest.mark.parametrize(
    "text",
    [
        f"models: [{{{MATCH}, policy: all, weights: {{v3: 0.05}}}}]",
        f"models: [{{{MATCH}, policy: {{label: stable}}, labels: {{stable: '1'}}}}]",
        "serving: {subset_header: x-a}\nmodels: [{name: a, warmup: a.jsonl}]",
    ],
)
def test_what_is_said_of_versions_is_no_doubt_where_it_counts(text: str) -> None:
    assert told(text) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models: [{name: m}]", ["ok: serving.urls: names none, so the 2 model servers are asked that"]),
        ("", []),
        ("models: [{name: m}]\nserving: {urls: ['http://c']}", []),
        ("models: [{name: m}]\nserving: {observe: gateway}", []),
    ],
)
def test_whose_servers_are_asked_for_their_models_is_told(text: str, said: list[str]) -> None:
    settings = parse_settings(f"{QUIET}signals: {{vllm: {{urls: ['http://a', 'http://b']}}}}\n{text}", {})
    assert isinstance(settings, Settings), settings
    assert [str(each).partition(" signals")[0] for each in report_derived_settings(settings)] == said
