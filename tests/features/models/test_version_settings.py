"""Settings of model versions and their warm-up: notations, values, and what is rejected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dispatcher.features.models.settings import (
    MAX_VERSIONS,
    ModelSettings,
    ServingSettings,
    get_models,
)
from dispatcher.features.models.version_policy import VersionPolicy
from dispatcher.features.models.version_template import VersionTemplate
from dispatcher.settings import effective
from dispatcher.settings.load import parse_settings, reload_settings
from dispatcher.settings.model import Settings

MINIMAL = "gateway: {url: http://gw}\n"
MATCH = "name: qwen, match: 'qwen-v{version}'"
ALL_KEYS = """
serving:
  subset_header: x-subset
  warmup: {by: gateway, timeout_s: 60}
models:
- name: qwen
  match: qwen-v{version}
  policy: {label: stable}
  labels: {stable: "2", next: v3}
  transition: resource
  pin: job
  weights: {v3: 0.05, qwen-v2: 0.95}
  warmup: warm/qwen.jsonl
  warmup_required: true
"""


def parse_valid(text: str, directory: Path | None = None, **environ: str) -> Settings:
    found = parse_settings(MINIMAL + text, environ, directory=directory)
    assert isinstance(found, Settings), found
    return found


def parse_invalid(text: str, **environ: str) -> str:
    found = parse_settings(MINIMAL + text, environ)
    assert isinstance(found, list), found
    return "; ".join(map(str, found))


def test_a_model_that_is_only_named_has_no_versions() -> None:
    (model,) = get_models(parse_valid("models: [{name: qwen}]"))
    assert model.version_template is None
    assert not model.is_family
    assert (model.policy, model.transition, model.pin) == (VersionPolicy(1), "availability", "request")
    assert (model.labels, model.weights, model.warmup, model.warmup_required) == ({}, {}, "", False)


def test_all_keys_are_applied() -> None:
    found = parse_valid(ALL_KEYS)
    (model,) = get_models(found)
    assert model.is_family
    assert model.version_template == VersionTemplate("qwen-v")
    assert model.policy == VersionPolicy(label="stable")
    assert model.labels == {"stable": "2", "next": "v3"}
    assert (model.transition, model.pin, model.warmup_required) == ("resource", "job", True)
    assert model.weights == {"v3": 0.05, "qwen-v2": 0.95}
    serving = found.get_section(ServingSettings)
    assert (serving.subset_header, serving.warmup.by) == ("x-subset", "gateway")
    assert serving.warmup.timeout_s == 60


@pytest.mark.parametrize(
    ("text", "policy", "max_count", "rendered"),
    [
        ("latest", VersionPolicy(1), 1, "latest"),
        ("", VersionPolicy(1), 1, "latest"),
        ("all", VersionPolicy(everything=True), None, "all"),
        ("{latest: 1}", VersionPolicy(1), 1, "latest"),
        ("{latest: 2}", VersionPolicy(2), 2, '{"latest": 2}'),
        ('{specific: ["2", v3]}', VersionPolicy(specific=("2", "v3")), 2, '{"specific": ["2", "v3"]}'),
        ("{label: größte}", VersionPolicy(label="größte"), 1, '{"label": "größte"}'),
    ],
)
def test_policy_can_be_written_in_several_forms(
    text: str, policy: VersionPolicy, max_count: int | None, rendered: str
) -> None:
    (model,) = get_models(parse_valid(f"models: [{{{MATCH}, policy: {text}}}]"))
    assert (model.policy, model.policy.max_count, str(model.policy)) == (policy, max_count, rendered)
    assert ModelSettings(name="q", match="q{version}", policy=policy).policy == policy


def test_rendered_models_can_be_read_back_and_omit_defaults() -> None:
    found = parse_valid(ALL_KEYS)
    rendered = "\n".join(map(str, effective.render_lines(found)))
    parsed = parse_settings(rendered, {})
    assert isinstance(parsed, Settings)
    assert get_models(parsed) == get_models(found)
    assert parsed.get_section(ServingSettings) == found.get_section(ServingSettings)
    dumped = effective.settings_as_json(found)["settings"]["models"]
    assert dumped[0]["policy"] == {"label": "stable"}
    json.dumps(dumped)
    (short,) = effective.settings_as_json(parse_valid("models: [{name: a, warmup: b.jsonl}]"))["settings"][
        "models"
    ]
    assert short == {"name": "a", "when_not_served": "wait", "warmup": "b.jsonl"}


def test_path_of_a_warm_up_is_relative_to_the_configuration_file(tmp_path: Path) -> None:
    (model,) = get_models(parse_valid("models: [{name: qwen, warmup: warm/../qwen.jsonl}]", tmp_path))
    assert model.warmup == str(tmp_path / "qwen.jsonl")
    (model,) = get_models(parse_valid("models: [{name: qwen, warmup: /etc/qwen.jsonl}]", tmp_path))
    assert model.warmup == "/etc/qwen.jsonl"
    variable = {"BATCH_DISPATCHER__MODELS": '[{"name": "a", "warmup": "qwen.jsonl"}]'}
    (model,) = get_models(parse_valid("", tmp_path, **variable))
    assert model.warmup == "qwen.jsonl", "paths in variables are relative to the working directory"


def test_invalid_list_of_models_does_not_break_the_resolution_of_paths(tmp_path: Path) -> None:
    for text in ("models: 7", "models: [7]", "models: {warmup: a}", "models: [{name: a, warmup: 7}]"):
        assert isinstance(parse_settings(MINIMAL + text, {}, directory=tmp_path), list)


def test_rollback_by_label_is_one_change_in_a_reload() -> None:
    old = parse_valid(ALL_KEYS)
    new = reload_settings(old, MINIMAL + ALL_KEYS.replace('stable: "2"', 'stable: "1"'), {})
    assert isinstance(new, Settings)
    (change,) = effective.describe_changes(old, new)
    assert change.startswith("models: ")
    assert '"stable": "2"' in change.partition(" → ")[0]
    assert '"stable": "1"' in change.partition(" → ")[2]


def test_models_can_be_set_in_the_environment() -> None:
    models = '[{"name": "q", "match": "q-{version}", "policy": {"latest": 2}, "weights": {"2": 0}}]'
    variables = {
        "BATCH_DISPATCHER__MODELS": models,
        "BATCH_DISPATCHER__SERVING__SUBSET_HEADER": "x-subset",
        "BATCH_DISPATCHER__SERVING__WARMUP__TIMEOUT_S": "5",
    }
    found = parse_settings(MINIMAL, variables)
    assert isinstance(found, Settings), found
    (model,), serving = get_models(found), found.get_section(ServingSettings)
    assert (model.policy.latest, model.weights) == (2, {"2": 0})
    assert (serving.subset_header, serving.warmup.timeout_s) == ("x-subset", 5)
    invalid = {"BATCH_DISPATCHER__MODELS": models.replace(":latest", "").replace('"latest": 2', '"last": 2')}
    assert parse_invalid("", **invalid).startswith(
        "environment: BATCH_DISPATCHER__MODELS[0].policy: must be latest"
    )


def test_two_models_may_share_a_template() -> None:
    found = parse_valid("models: [{name: a, match: 'm-{version}'}, {name: b, match: 'm-{version}'}]")
    assert [each.match for each in get_models(found)] == ["m-{version}", "m-{version}"]


TOO_MANY_WEIGHTS = ", ".join(f"v{number}: 0.001" for number in range(MAX_VERSIONS + 1))
TOO_MANY_NAMES = ", ".join(f'"{number}"' for number in range(MAX_VERSIONS + 1))
TOO_MANY_LABELS = ", ".join(f'l{number}: "1"' for number in range(MAX_VERSIONS + 1))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("name: q, match: 'q-v(.*)'", "models[0].match: must contain {version} exactly once, as in qwen-v"),
        ("name: q, match: 'q-{version}-{size}'", "models[0].match: must not contain { or } outside of"),
        ("name: q, match: ' {version}'", "models[0].match: must not be empty, nor have blanks at its ends"),
        (f"name: q, match: '{'q' * 248}{{version}}'", "models[0].match: must not be longer than 256 bytes"),
        ("name: q, match: 7", "models[0].match: a text is expected"),
        *(
            (f"name: q, {key}", f"models[0].{key.partition(':')[0]}: needs match, which says what")
            for key in (
                "policy: all",
                "labels: {a: '1'}",
                "transition: resource",
                "pin: job",
                "weights: {a: 1}",
            )
        ),
        (f"{MATCH}, policy: lates", "{label: stable} (did you mean latest?)"),
        (f"{MATCH}, policy: 2", 'models[0].policy: must be latest, all, {latest: 2}, {specific: ["2"]} or'),
        (f"{MATCH}, policy: [a]", "models[0].policy: must be latest, all"),
        (f"{MATCH}, policy: {{}}", "models[0].policy: must be latest, all"),
        (f"{MATCH}, policy: {{newest: 2}}", "models[0].policy: must be latest, all"),
        (f"{MATCH}, policy: {{latest: 1, label: a}}", "models[0].policy: must be one of latest, all"),
        (f"{MATCH}, policy: {{latest: 0}}", "policy: latest: must be a whole number, at least 1"),
        (f"{MATCH}, policy: {{latest: true}}", "policy: latest: must be a whole number, at least 1"),
        (f"{MATCH}, policy: {{latest: 1.5}}", "policy: latest: must be a whole number, at least 1"),
        (f"{MATCH}, policy: {{specific: []}}", "policy: specific: must be a list of at least one version"),
        (f"{MATCH}, policy: {{specific: a}}", "policy: specific: must be a list of at least one version"),
        (
            f"{MATCH}, policy: {{specific: [{TOO_MANY_NAMES}]}}",
            "policy: specific: must be at most 100 versions, not 101",
        ),
        (
            f"{MATCH}, policy: {{specific: [2]}}",
            'specific: a version is a text: put it in quotes, as in ["2"]',
        ),
        (f"{MATCH}, policy: {{specific: [' a']}}", "specific: must not be empty, nor have blanks"),
        (f"{MATCH}, policy: {{label: 2}}", "policy: label: a text is expected: put it in quotes"),
        (f"{MATCH}, policy: {{label: ''}}", "policy: label: must not be empty"),
        (f'{MATCH}, policy: {{label: "a\\nb"}}', "policy: label: must not hold line breaks"),
        (f"{MATCH}, labels: {{a: 2}}", "models[0].labels.a: a text is expected: put it in quotes"),
        (f"{MATCH}, labels: {{'': a}}", "models[0].labels: a label: must not be empty"),
        (f"{MATCH}, labels: {{a: ''}}", "models[0].labels: a: must not be empty"),
        (f"{MATCH}, labels: {{{TOO_MANY_LABELS}}}", "labels: must be at most 100 labels, not 101"),
        (f"{MATCH}, transition: fast", "transition: must be one of availability, resource"),
        (f"{MATCH}, pin: user", "pin: must be one of request, sequence, job"),
        (f"{MATCH}, weights: {{v3: 5}}", "weights: v3: must be a share between 0 and 1, not 5 (5% is 0.05)"),
        (f"{MATCH}, weights: {{v3: -0.1}}", "weights: v3: must be a share between 0 and 1, not -0.1"),
        (f"{MATCH}, weights: {{v3: .nan}}", "models[0].weights.v3: must be a finite number"),
        (f"{MATCH}, weights: {{v3: true}}", "models[0].weights.v3: a number is expected"),
        (f"{MATCH}, weights: {{'': 0.1}}", "weights: a version: must not be empty"),
        (f"{MATCH}, weights: {{a: 0.6, b: 0.6}}", "weights: must not sum up to more than 1, not 1.2"),
        (f"{MATCH}, weights: {{'3': 0.1, v3: 0.1}}", "weights: names a version twice, as 3 and v3"),
        (f"{MATCH}, weights: {{v3: 0.1, qwen-v3: 0.1}}", "weights: names a version twice, as v3 and qwen-v3"),
        (f"{MATCH}, weights: {{{TOO_MANY_WEIGHTS}}}", "weights: must be at most 100 versions, not 101"),
        ("name: q, warmup_required: true", "warmup_required: needs warmup, the file with the requests"),
        ("name: q, warmup: 7", "models[0].warmup: a text is expected"),
    ],
)
def test_invalid_model_is_rejected(model: str, message: str) -> None:
    assert message in parse_invalid(f"models: [{{{model}}}]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("serving: {subset_header: 'a b'}", "serving.subset_header: is not a header name"),
        ("serving: {subset_header: Content_Type}", "cannot be used for this: it has a meaning of its own"),
        ("serving: {subset_header: x-request-id}", "cannot be used for this: it has a meaning of its own"),
        (
            "serving: {subset_header: X_Session_Token}",
            "subset_header: sequences.header has that header already",
        ),
        (
            "serving: {subset_header: x-a}\nsequences: {session_id_header: x-a}",
            "subset_header: sequences.session_id_header has that header already",
        ),
        (
            "serving: {warmup: {by: gateway}, observe: endpoints}",
            "by: gateway needs serving.subset_header, for else it cannot name a server",
        ),
        (
            "serving: {warmup: {by: gateway}, urls: ['http://a:8000']}",
            "by: gateway needs serving.subset_header, for else it cannot name a server",
        ),
        (
            "serving: {warmup: {by: endpoints}, observe: gateway}",
            "by: endpoints cannot be had with serving.observe: gateway",
        ),
        ("serving: {warmup: {by: pods}}", "must be one of auto, gateway, endpoints"),
        ("serving: {warmup: {timeout_s: 0}}", "serving.warmup.timeout_s: must be above 0"),
        (
            "serving: {observe: off}\nmodels: [{name: a}, {name: b, match: 'b-{version}'}]",
            "models: [1].match needs to see what is served, and serving.observe is off",
        ),
        (
            "serving: {observe: off}\nmodels: [{name: a, warmup: a.jsonl}]",
            "models: [0].warmup needs to see what is served, and serving.observe is off",
        ),
    ],
)
def test_conflicting_settings_are_rejected(text: str, message: str) -> None:
    assert message in parse_invalid(text)


def test_subset_header_must_not_be_a_header_of_the_gateway_settings() -> None:
    text = "gateway: {url: http://gw, headers: {X-Subset: a}}\nserving: {subset_header: x-subset}\n"
    found = parse_settings(text, {})
    assert isinstance(found, list)
    assert "serving: subset_header: gateway.headers has that header already" in str(found[0])


@pytest.mark.parametrize("header", ["x-gateway-destination-endpoint-subset", "x-subset"])
def test_subset_header_may_have_any_other_name(header: str) -> None:
    found = parse_valid(f"serving: {{subset_header: {header}, warmup: {{by: gateway}}, observe: endpoints}}")
    assert found.get_section(ServingSettings).subset_header == header
