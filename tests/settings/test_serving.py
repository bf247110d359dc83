"""Settings of models: which are named, whether they are observed, and what is refused."""

from __future__ import annotations

import json

import pytest

from dispatcher.core.requests.lanes import MAX_MODEL_NAME_BYTES
from dispatcher.settings import ModelSettings, Settings, effective, parse_settings
from dispatcher.settings.load import reload_settings
from dispatcher.settings.models import MAX_MODELS

MINIMAL = "gateway: {url: http://gw}\n"


def settings(text: str, **environ: str) -> Settings:
    found = parse_settings(MINIMAL + text, environ)
    assert isinstance(found, Settings), found
    return found


def refused(text: str, **environ: str) -> str:
    found = parse_settings(MINIMAL + text, environ)
    assert isinstance(found, list)
    return "; ".join(map(str, found))


def test_without_models_nothing_is_observed() -> None:
    found = settings("")
    assert (found.models, found.serving.observe, found.serving.interval_s) == ((), "auto", 5.0)
    assert not found.observes_models


@pytest.mark.parametrize(
    ("observe", "bare", "with_models"),
    [("auto", False, True), ("off", False, False), ("gateway", True, True), ("endpoints", True, True)],
)
def test_auto_observes_where_models_are_named(observe: str, bare: bool, with_models: bool) -> None:
    assert settings(f"serving: {{observe: {observe}}}").observes_models is bare
    named = settings(f"serving: {{observe: {observe}}}\nmodels: [{{name: m}}]")
    assert named.observes_models is with_models


def vllm(*pages: str, serving: str = "", more: str = "") -> Settings:
    return settings(f"signals: {{vllm: {{urls: {[*pages]}{more}}}}}\nserving: {{{serving}}}")


@pytest.mark.parametrize(
    ("page", "listed"),
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
def test_servers_are_those_whose_metrics_pages_are_read(page: str, listed: str) -> None:
    found = vllm(page)
    assert [each.reveal() for each in found.serving_with_servers.urls] == [listed] * bool(listed)
    assert found.serving.urls == (), "what the operator said stays as he said it"


def test_servers_of_the_signals_come_with_their_token_and_tls_where_none_is_said() -> None:
    theirs = ", token_file: /theirs, tls: {ca_file: /ca}"
    found = vllm("http://a", more=theirs).serving_with_servers
    assert (found.token_file, found.tls.ca_file) == ("/theirs", "/ca")
    found = vllm(
        "http://a", more=theirs, serving="token_file: /mine, tls: {ca_file: /my-ca}"
    ).serving_with_servers
    assert (found.token_file, found.tls.ca_file, len(found.urls)) == ("/mine", "/my-ca", 1)


@pytest.mark.parametrize(
    "serving",
    ["urls: ['http://b']", "observe: gateway", "warmup: {by: gateway}"],
)
def test_servers_of_the_signals_are_not_taken_where_something_else_is_said(serving: str) -> None:
    found = vllm("http://a", serving=serving, more=", token_file: /theirs")
    assert found.serving_with_servers is found.serving


def test_where_one_page_tells_no_server_none_is_taken() -> None:
    assert vllm("http://a", "http://b/stats").serving_with_servers.urls == ()
    assert settings("signals: {vllm: {service: servers}}").serving_with_servers.urls == ()


def test_a_model_waits_unless_it_is_told_otherwise() -> None:
    found = settings("models:\n- name: Qwen/Qwen3-32B\n- {name: 'ein größeres', when_not_served: fail}\n")
    assert [(each.name, each.when_not_served) for each in found.models] == [
        ("Qwen/Qwen3-32B", "wait"),
        ("ein größeres", "fail"),
    ]


def test_models_come_from_a_variable_as_json() -> None:
    variable = {"BATCH_DISPATCHER__MODELS": '[{"name": "a"}, {"name": "b", "when_not_served": "fail"}]'}
    assert [each.name for each in settings("models: [{name: x}]", **variable).models] == ["a", "b"]
    wrong = {"BATCH_DISPATCHER__MODELS": '[{"name": "a", "when_not_serve": "fail"}]'}
    key = "environment: BATCH_DISPATCHER__MODELS[0].when_not_serve"
    said = f"{key}: unknown key (did you mean when_not_served?)"
    assert refused("", **wrong) == said


def test_as_many_models_as_are_allowed_can_be_written_down_and_read_back() -> None:
    lines = "\n".join(f"- name: model-{number}\n  when_not_served: fail" for number in range(MAX_MODELS))
    found = settings(f"models:\n{lines}\n")
    assert len(found.models) == MAX_MODELS
    shown = "\n".join(map(str, effective.render_lines(found)))
    again = parse_settings(shown, {})
    assert isinstance(again, Settings)
    assert again.models == found.models
    more = f"models:\n{lines}\n- name: one-more\n"
    assert refused(more).endswith("models: must be at most 1000 models, not 1001")


def test_a_name_may_be_as_long_as_a_server_lists_it() -> None:
    longest = "ü" * (MAX_MODEL_NAME_BYTES // 2)
    assert settings(f"models: [{{name: {longest}}}]").models == (ModelSettings(name=longest),)
    assert "must not be longer than 256 bytes" in refused(f"models: [{{name: {longest}x}}]")


@pytest.mark.parametrize(
    ("text", "said"),
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
def test_what_makes_no_sense_is_refused(text: str, said: str) -> None:
    assert said in refused(text)


def test_all_of_it_can_change_while_the_dispatcher_runs() -> None:
    old = settings("")
    changed = MINIMAL + "serving: {interval_s: 1, when_not_served: fail}\nmodels: [{name: a}]\n"
    new = reload_settings(old, changed, {})
    assert isinstance(new, Settings)
    assert effective.describe_changes(old, new) == [
        "serving.interval_s: 5 → 1",
        "serving.when_not_served: wait → fail",
        'models: [] → [{"name": "a", "when_not_served": "wait"}]',
    ]


def test_passwords_of_servers_do_not_show() -> None:
    found = settings("serving: {urls: ['http://user:hunter2@a:8000']}\nmodels: [{name: a}]")
    assert "hunter2" not in json.dumps(effective.settings_as_json(found)) + "\n".join(
        map(str, effective.render_lines(found))
    )
