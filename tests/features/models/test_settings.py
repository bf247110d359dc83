"""Settings `models` and `serving`: which models are configured, and how they are observed."""

from __future__ import annotations

import json

import pytest

from dispatcher.features.models.settings import (
    MAX_MODELS,
    ModelSettings,
    ServingSettings,
    find_serving,
    get_models,
    is_observing_models,
)
from dispatcher.requests.lanes import MAX_MODEL_NAME_BYTES
from dispatcher.settings import effective
from dispatcher.settings.load import parse_settings, reload_settings
from dispatcher.settings.model import Settings

MINIMAL = "gateway: {url: http://gw}\n"


def parse_valid(text: str, **environ: str) -> Settings:
    found = parse_settings(MINIMAL + text, environ)
    assert isinstance(found, Settings), found
    return found


def parse_invalid(text: str, **environ: str) -> str:
    found = parse_settings(MINIMAL + text, environ)
    assert isinstance(found, list)
    return "; ".join(map(str, found))


def test_without_models_nothing_is_observed() -> None:
    found = parse_valid("")
    serving = found.get_section(ServingSettings)
    assert (get_models(found), serving.observe, serving.interval_s) == ((), "auto", 5.0)
    assert not is_observing_models(found)


@pytest.mark.parametrize(
    ("observe", "without_models", "with_models"),
    [("auto", False, True), ("off", False, False), ("gateway", True, True), ("endpoints", True, True)],
)
def test_auto_observes_if_models_are_configured(
    observe: str, without_models: bool, with_models: bool
) -> None:
    assert is_observing_models(parse_valid(f"serving: {{observe: {observe}}}")) is without_models
    with_model = parse_valid(f"serving: {{observe: {observe}}}\nmodels: [{{name: m}}]")
    assert is_observing_models(with_model) is with_models


def parse_with_vllm(*metrics_urls: str, serving: str = "", more: str = "") -> Settings:
    return parse_valid(f"signals: {{vllm: {{urls: {[*metrics_urls]}{more}}}}}\nserving: {{{serving}}}")


@pytest.mark.parametrize(
    ("metrics_url", "models_url"),
    [
        ("http://a:8000", "http://a:8000/v1/models"),
        ("http://a:8000/", "http://a:8000/v1/models"),
        ("https://me:secret@a/metrics", "https://me:secret@a/v1/models"),
        ("http://a/one/metrics/", "http://a/one/v1/models"),
        ("http://a/prometheus/metrics", "http://a/v1/models"),
        ("http://a/stats", ""),
        ("http://a/metrics?all=1", ""),
    ],
)
def test_model_lists_are_read_from_the_servers_of_the_metrics_pages(
    metrics_url: str, models_url: str
) -> None:
    found = parse_with_vllm(metrics_url)
    assert [each.reveal() for each in find_serving(found).urls] == [models_url] * bool(models_url)
    assert found.get_section(ServingSettings).urls == (), "the setting of the operator is not changed"


def test_servers_of_the_signals_use_their_token_and_tls_unless_serving_has_its_own() -> None:
    of_signals = ", token_file: /theirs, tls: {ca_file: /ca}"
    found = find_serving(parse_with_vllm("http://a", more=of_signals))
    assert (found.token_file, found.tls.ca_file) == ("/theirs", "/ca")
    own = "token_file: /mine, tls: {ca_file: /my-ca}"
    found = find_serving(parse_with_vllm("http://a", more=of_signals, serving=own))
    assert (found.token_file, found.tls.ca_file, len(found.urls)) == ("/mine", "/my-ca", 1)


@pytest.mark.parametrize(
    "serving",
    ["urls: ['http://b']", "observe: gateway", "warmup: {by: gateway}"],
)
def test_servers_of_the_signals_are_not_used_if_serving_says_otherwise(serving: str) -> None:
    found = parse_with_vllm("http://a", serving=serving, more=", token_file: /theirs")
    assert find_serving(found) is found.get_section(ServingSettings)


def test_no_servers_are_derived_if_one_page_does_not_reveal_its_server() -> None:
    assert find_serving(parse_with_vllm("http://a", "http://b/stats")).urls == ()
    assert find_serving(parse_valid("signals: {vllm: {service: servers}}")).urls == ()


def test_requests_for_a_model_wait_by_default() -> None:
    found = parse_valid("models:\n- name: Qwen/Qwen3-32B\n- {name: 'ein größeres', when_not_served: fail}\n")
    assert [(each.name, each.when_not_served) for each in get_models(found)] == [
        ("Qwen/Qwen3-32B", "wait"),
        ("ein größeres", "fail"),
    ]


def test_models_are_read_as_json_from_a_variable() -> None:
    variable = {"BATCH_DISPATCHER__MODELS": '[{"name": "a"}, {"name": "b", "when_not_served": "fail"}]'}
    assert [each.name for each in get_models(parse_valid("models: [{name: x}]", **variable))] == ["a", "b"]
    wrong = {"BATCH_DISPATCHER__MODELS": '[{"name": "a", "when_not_serve": "fail"}]'}
    key = "environment: BATCH_DISPATCHER__MODELS[0].when_not_serve"
    message = f"{key}: unknown key (did you mean when_not_served?)"
    assert parse_invalid("", **wrong) == message


def test_largest_number_of_models_can_be_written_and_read_back() -> None:
    lines = "\n".join(f"- name: model-{number}\n  when_not_served: fail" for number in range(MAX_MODELS))
    found = parse_valid(f"models:\n{lines}\n")
    assert len(get_models(found)) == MAX_MODELS
    shown = "\n".join(map(str, effective.render_lines(found)))
    again = parse_settings(shown, {})
    assert isinstance(again, Settings)
    assert get_models(again) == get_models(found)
    more = f"models:\n{lines}\n- name: one-more\n"
    assert parse_invalid(more).endswith("models: must be at most 1000 models, not 1001")


def test_model_name_may_have_up_to_256_bytes() -> None:
    longest = "ü" * (MAX_MODEL_NAME_BYTES // 2)
    assert get_models(parse_valid(f"models: [{{name: {longest}}}]")) == (ModelSettings(name=longest),)
    assert "must not be longer than 256 bytes" in parse_invalid(f"models: [{{name: {longest}x}}]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [{name: a}, {name: b}, {name: a}]", "models: names a model twice, in [0] and [2]"),
        ("models: [{name: ''}]", "models[0].name: must not be empty"),
        ("models: [{name: ' a'}]", "models[0].name: must not be empty, nor have blanks at its ends"),
        ('models: [{name: "a\\nb"}]', "models[0].name: must not hold line breaks"),
        ("models: [{when_not_served: wait}]", "models[0].name: is required"),
        ("models: [{name: 7}]", "models[0].name: a text is expected"),
        (
            "models: [{name: a, when_not_served: drop}]",
            "models[0].when_not_served: must be one of wait, fail",
        ),
        ("models: {name: a}", "models: a list is expected"),
        ("serving: {observe: endpoint}", "must be one of auto, off, gateway, endpoints (did you mean endp"),
        ("serving: {interval_s: 0}", "serving.interval_s: must be at least 0.1"),
        ("serving: {urls: ['ftp://a']}", "serving.urls[0]: must begin with http:// or https://"),
        (
            "serving: {urls: ['http://a:8000', 'http://a:8000/v1/models/']}",
            "serving.urls: has a server twice",
        ),
        ("serving: {urls: ['']}", "serving.urls: holds an empty URL"),
        ("serving: {observe: gateway, urls: ['http://a']}", "stands beside serving.observe: gateway"),
        ("serving: {tls: {cert_file: a}}", "cert_file and key_file are needed together"),
    ],
)
def test_invalid_setting_is_rejected(text: str, message: str) -> None:
    assert message in parse_invalid(text)


def test_models_and_serving_can_change_while_the_dispatcher_runs() -> None:
    old = parse_valid("")
    changed = MINIMAL + "serving: {interval_s: 1, when_not_served: fail}\nmodels: [{name: a}]\n"
    new = reload_settings(old, changed, {})
    assert isinstance(new, Settings)
    assert effective.describe_changes(old, new) == [
        "serving.interval_s: 5 → 1",
        "serving.when_not_served: wait → fail",
        'models: [] → [{"name": "a", "when_not_served": "wait"}]',
    ]


def test_passwords_of_server_urls_are_masked() -> None:
    found = parse_valid("serving: {urls: ['http://user:hunter2@a:8000']}\nmodels: [{name: a}]")
    assert "hunter2" not in json.dumps(effective.settings_as_json(found)) + "\n".join(
        map(str, effective.render_lines(found))
    )
