"""The chart accepts exactly the values that the program accepts, and names each invalid value."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from dispatcher.features.models.settings import get_models
from dispatcher.queue.redis.connect import connect
from dispatcher.settings.load import key_paths, parse_settings
from dispatcher.settings.model import Settings
from dispatcher.settings.values import is_secret_name
from tests.deploy.cases import BASIC, CASES
from tests.deploy.rejected_values import REJECTED_VALUES
from tests.deploy.release import CHART, helm, render
from tests.paths import DOCS
from tests.support import require_tool

SETTINGS_WITHOUT_VALUE = {"queue.data_dir", "queue.fsync", "admin.host"}
"""Settings without a value: an embedded queue has no producers in a pod, and probes come from outside."""


@pytest.mark.parametrize(
    "values", [{}, *(CASES[name] for name in ("files", "network-policy-all-rules", "rules"))]
)
def test_lint_reports_no_problem(values: Mapping[str, Any]) -> None:
    done = helm("lint", "--strict", values={**BASIC, **values})
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


@pytest.mark.parametrize(
    ("values", "message"), REJECTED_VALUES, ids=[message for _, message in REJECTED_VALUES]
)
def test_invalid_value_is_rejected_by_name(values: Mapping[str, Any], message: str) -> None:
    done = helm("template", "night", values={**BASIC, **values})
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert "nil pointer" not in done.stderr


def test_all_invalid_values_are_reported_together() -> None:
    config = {"retry": {"base_s": 90}, "budget": {"upper": 0.5}}
    error_output = helm("template", "night", values={"config": config}).stderr
    assert [line.partition(":")[0] for line in error_output.splitlines() if line.startswith("- ")] == [
        "- pool.name",
        "- gateway.url",
        "- config.retry.max_s",
        "- config.budget.upper",
        "- image.registry",
        "- image.digest",
    ]


def test_lint_reports_each_invalid_value_once() -> None:
    error_output = helm("lint").stderr
    assert [
        error_output.count(each) for each in ("- pool.name: is required", "- gateway.url: is required")
    ] == [1, 1]


def test_header_that_the_program_masks_is_rejected_in_values() -> None:
    secret_headers = ("Authorization", "Proxy-Authorization", "Cookie", "api-key", "ApiKey", "X-Auth-Token",
              "Ocp-Apim-Subscription-Key", "X-Client-Secret", "x_password")  # fmt: skip
    other_headers = ("Host", "X-Route", "X-Scope-OrgID")
    assert {name for name in (*secret_headers, *other_headers) if is_secret_name(name)} == set(secret_headers)
    for names, expected_headers in (
        ((*secret_headers, *other_headers), set(secret_headers)),
        (other_headers, set()),
    ):
        gateway = {"url": "http://gateway", "headers": dict.fromkeys(names, "hunter2")}
        error_output = helm("template", "night", values={**BASIC, "gateway": gateway}).stderr
        assert (
            set(re.findall(r"gateway\.headers: (\S+) looks like a secret", error_output)) == expected_headers
        )
        assert "hunter2" not in error_output


def test_headers_from_an_environment_variable_reach_the_program() -> None:
    variable = {"name": "BATCH_DISPATCHER__GATEWAY__HEADERS", "value": '{"X-Api-Key": "hunter2"}'}
    release = render({"gateway": {"url": "http://a", "headers": {"X-Odd": "1"}}, "extraEnv": [variable]})
    assert release.settings().gateway.headers == {"X-Api-Key": "hunter2"}, "the variable replaces all headers"


def test_error_does_not_repeat_a_misplaced_secret() -> None:
    config = {"queue": {"url": "redis://:hunter2@redis"}}
    assert "hunter2" not in helm("template", "night", values={**BASIC, "config": config}).stderr


def test_every_setting_of_the_program_is_a_value_of_the_same_type() -> None:
    """Every key of every section reaches the program unchanged."""
    tls = {"ca_file": "/a", "cert_file": "/b", "key_file": "/c", "insecure_skip_verify": True}
    top_level: dict[str, Any] = {
        "pool": {"name": "qwen", "namespace": "models"},
        "gateway": {
            "url": "https://gateway/prefix",
            "path": "/v1/chat/completions",
            "allowed_paths": ["/v1/*", "/v2/completions"],
            "allowed_headers": ["x-*"],
            "objective": "batch",
            "body_priority": 100,
            "fairness_from": "tenant",
            "headers": {"Host": "models", "X-Odd": "yes", "X-Number": "1e3"},
            "timeout_s": 12.5,
            "max_response_bytes": 33_554_432,
            "max_buffered_bytes": 67_108_864,
            "inference_ttl_s": None,
            "token_file": "/more/token",
            "tls": tls,
        },
    }
    prometheus = {
        "url": "https://prometheus",
        "token_file": "/more/prometheus",
        "headers": {"X-Scope-OrgID": "007"},
        "tls": tls,
        "queries": {"saturation": 'a{b="c"} > 0 or vector(0)', "queued": "vector(0)", "capacity": "x",
                    "ttft": "y", "tpot": "z"},
    }  # fmt: skip
    config: dict[str, Any] = {
        "queue": {"url": "redis://redis/3", "name": "a{b}c", "results": "out", "lease_s": 20,
                  "owner_timeout_s": 4, "poll_s": 0.01, "max_payload_bytes": 1_000_000_000,
                  "result_ttl_s": 0, "dead_max": 5, "max_pending": 9, "result_lists": ["t:*"]},
        "signals": {
            "source": "auto", "interval_s": 0.25, "max_age_s": 0.5, "use": "both", "prometheus": prometheus,
            "epp": {"urls": ["http://a:9090/metrics"], "service": "picker", "port": 9191, "token_file": "/t",
                    "tls": tls},
        },
        "budget": {"reserve": 0, "upper": 1, "max_sys": 1e6, "per_endpoint": 32, "max_in_flight": 7,
                   "overload_backoff": 0.5, "initial_per_endpoint": 4,
                   "capacity": "learn"},
        "batching": {"mode": "on", "rules": [
            {"paths": ["/v1/models/*:predict"], "shape": "tensorflow", "max_size": 64,
             "preferred_sizes": [16, 32], "max_delay_s": 0, "unit": "call",
             "max_items": 1000, "max_tokens_per_call": None,
             "default_timeout_s": 60, "timeout_action": "delay"},
            {"paths": ["/v1/embeddings"]},
        ]},
        "sequences": {"max_idle_s": 60, "max_age_s": 3600, "max_active": 9, "max_waiting": 10,
                      "on_error": "hold", "after_end": "refuse", "header": "x-sticky",
                      "session_id_header": "x-id", "carry": "messages", "max_carry_bytes": 4096,
                      "models": [{"match": "chat-*", "max_idle_s": 30, "max_active": 2}]},
        "slicing": {"mode": "on", "tokens": 128, "min_tokens": 300, "stream": True, "revoke": "off",
                    "paths": ["/v1/chat/completions"]},
        "tokens": {"mode": "off", "per_endpoint": 480_000},
        "serving": {"observe": "endpoints", "urls": ["http://a:8000", "http://b:8000/models"],
                    "interval_s": 0.5, "when_not_served": "fail", "token_file": "/more/models", "tls": tls,
                    "subset_header": "x-subset", "warmup": {"by": "gateway", "timeout_s": 1.5}},
        "models": [
            {"name": "Qwen/Qwen3-32B", "when_not_served": "fail"},
            {"name": "adapter", "match": "adapter-v{version}", "policy": {"specific": ["2", "v3"]},
             "labels": {"stable": "2"}, "transition": "resource", "pin": "job",
             "weights": {"v3": 0.05, "2": 0},
             "warmup": "/more/warmup.jsonl", "warmup_required": True},
            {"name": "m-latest", "match": "m-{version}", "policy": "latest"},
            {"name": "m-all", "match": "m-{version}", "policy": "all"},
            {"name": "m-2", "match": "m-{version}", "policy": {"latest": 2}},
            {"name": "m-stable", "match": "m-{version}", "policy": {"label": "stable"}},
        ],
        "retry": {"base_s": 0.001, "max_s": 86400, "max_attempts": 1},
        "shutdown": {"drain_s": 0},
        "admin": {"allowed_hosts": ["dispatcher.example"], "port": 9000, "token_file": "/more/admin"},
        "log": {"level": "debug", "format": "console"},
        "tracing": {"endpoint": "http://collector:4318", "sample_ratio": 1e-7},
    }  # fmt: skip
    settings = render({**top_level, "config": config}).settings()
    pod_settings = {"admin": {**config["admin"], "host": "0.0.0.0"}}
    expected = parse_settings(json.dumps({**top_level, **config, **pod_settings}), {})
    assert isinstance(expected, Settings)
    assert settings.model_dump() == expected.model_dump()
    paths_given = {path for section in (top_level, config) for path in list_paths(section)}
    settings_left = set(key_paths(Settings)) - {find_setting(path) for path in paths_given}
    assert {path for path in settings_left if not path.startswith("signals.vllm.")} == SETTINGS_WITHOUT_VALUE


def test_model_servers_can_be_configured_instead_of_the_picker() -> None:
    tls = {"ca_file": "/ca", "cert_file": "/cert", "key_file": "/key", "insecure_skip_verify": True}
    vllm = {"service": "vllm", "port": 8001, "token_file": "/t", "tls": tls}
    for servers in (vllm, {"urls": ["http://a:8000"]}):
        rendered = render(
            {**BASIC, "config": {"signals": {"vllm": servers}}, "kubernetes": {"enabled": False}}
        )
        vllm_settings = rendered.settings().signals.vllm
        assert vllm_settings.model_dump(include=set(servers), exclude={"urls"}) == {
            name: value for name, value in servers.items() if name != "urls"
        }
        assert [url.reveal() for url in vllm_settings.urls] == servers.get("urls", [])
    vllm_paths = {path for path in key_paths(Settings) if path.startswith("signals.vllm.")}
    paths_given = set(list_paths({"signals": {"vllm": {**vllm, "urls": []}}}))
    assert vllm_paths <= paths_given


def list_paths(section: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in section.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from list_paths(value, f"{prefix}{name}.")


def find_setting(path: str) -> str:
    """Return the setting of a path, without the keys of a map."""
    return next((each for each in key_paths(Settings) if path == each), path)


def test_settings_are_optional() -> None:
    settings = render({}).settings()
    assert settings.model_fields_set == {"pool", "gateway", "queue", "admin"}
    assert settings.queue.url.reveal() == "redis://night-batch-dispatcher-valkey.llm.svc:6379"
    assert settings.pool.namespace == "llm"


def test_null_selects_the_default_of_the_program() -> None:
    nulls = {"budget": {"upper": None, "max_in_flight": None}, "signals": {"max_age_s": None}}
    assert render({"config": nulls}).settings().limit_policy() == render({}).settings().limit_policy()


def test_lists_and_maps_can_be_set_to_null() -> None:
    maps = (
        "affinity",
        "nodeSelector",
        "resources",
        "securityContext",
        "podLabels",
        "strategy",
    )
    lists = ("tolerations", "extraEnv", "extraVolumes", "extraObjects", "extraContainers", "imagePullSecrets")
    release = render(dict.fromkeys((*maps, *lists)) | {"podSecurityContext": {"runAsUser": None}})
    assert release.settings() == render({}).settings()
    assert "runAsUser" not in release.pod["securityContext"]
    assert release.pod["securityContext"]["runAsNonRoot"] is True


def test_every_value_is_described() -> None:
    readme = (CHART / "README.md").read_text()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    undescribed = [
        path
        for path in list_leaves(values)
        if not any(f"| `{parent}` |" in readme for parent in list_parents(path))
    ]
    assert undescribed == []


def list_leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from list_leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def list_parents(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]


def test_values_in_the_guides_can_be_rendered() -> None:
    for page, count in (("install.md", 12), ("models.md", 1)):
        text = (DOCS / "how-to" / page).read_text()
        found = re.findall(r"<!-- values -->\n```yaml\n(.*?)```", text, re.DOTALL)
        assert len(found) == text.count("<!-- values -->") == count
        for values in found:
            assert isinstance(render(yaml.safe_load(values)).settings(), Settings)


def test_warmup_file_is_mounted_at_the_path_of_the_guide() -> None:
    page = (DOCS / "how-to" / "models.md").read_text()
    (values,) = re.findall(r"<!-- values -->\n```yaml\n(.*?)```", page, re.DOTALL)
    release = render(yaml.safe_load(values))
    (model,) = get_models(release.settings())
    mounts = {each["mountPath"]: each["name"] for each in release.container["volumeMounts"]}
    volumes = {each["name"]: each for each in release.pod["volumes"]}
    folder, _, name = model.warmup.rpartition("/")
    assert volumes[mounts[folder]]["configMap"]["name"] == "qwen-warmup"
    assert f"create configmap qwen-warmup --from-file={name}\n" in page


@pytest.mark.parametrize(
    "model",
    [
        {"policy": "newest"},
        {"policy": {"latest": 0}},
        {"policy": {"latest": 2, "label": "a"}},
        {"policy": {"specific": []}},
        {"policy": {"specific": [2]}},
        {"policy": {}},
        {"labels": {"stable": 2}},
        {"weights": {"v3": "0.05"}},
        {"pin": "user"},
        {"warmup": 7},
        {"warm_up": "a"},
    ],
    ids=json.dumps,
)
def test_invalid_model_version_is_rejected_before_installation(model: Mapping[str, Any]) -> None:
    config = {"models": [{"name": "q", "match": "q-.+", **model}]}
    done = helm("template", "night", values={**BASIC, "config": config})
    assert (done.returncode, done.stdout) == (1, "")
    assert "/config/models/0" in done.stderr


def test_program_accepts_the_urls_of_the_guide() -> None:
    page = (DOCS / "how-to" / "install.md").read_text()
    urls = re.findall(r"`(rediss?(?:\+\w+)?://USER:PASSWORD@[^`]+)`", page)
    assert {url.partition(":")[0] for url in urls} == {"rediss", "redis+sentinel", "redis+cluster"}
    required = {section: BASIC[section] for section in ("pool", "gateway")}
    for url in urls:
        found = parse_settings(json.dumps(required), {"BATCH_DISPATCHER__QUEUE__URL": url})
        assert isinstance(found, Settings), found
        assert found.queue.url.credentials == ("USER", "PASSWORD")
        connect(url)  # This only creates a client, which connects at its first use.


def test_values_named_in_the_guides_exist() -> None:
    page = (DOCS / "how-to" / "install.md").read_text()
    readme = (CHART / "README.md").read_text()
    top_level_values = set(yaml.safe_load((CHART / "values.yaml").read_text())) - {
        "config",
        "gateway",
        "pool",
    }
    for path in re.findall(r"[`=]([a-zA-Z]+(?:\.[a-zA-Z]+)+)\b(?!_)", page):
        if path.partition(".")[0] in top_level_values:
            is_described = any(f"| `{parent}` |" in readme for parent in list_parents(path))
            assert is_described or f"| `{path}." in readme, path


def test_packaged_texts_have_no_links_to_files_outside_the_package() -> None:
    texts = "".join(
        (CHART / name).read_text() for name in ("README.md", "values.yaml", "templates/NOTES.txt")
    )
    assert "](" not in re.sub(r"\]\(https?://", "", texts)
    assert "../" not in texts


def test_package_contains_files_read_by_the_templates(tmp_path: Any) -> None:
    done = package_chart(tmp_path)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tgz")
    names = subprocess.run(["tar", "-tzf", archive], capture_output=True, text=True, check=True).stdout
    for name in ("alerts.yaml", "dashboard.json", "inhibit.yaml", "settings.json"):
        assert f"batch-dispatcher/files/{name}" in names
    assert "batch-dispatcher/values.schema.json" in names


def package_chart(directory: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [require_tool("helm"), "package", str(CHART), "--destination", str(directory)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
