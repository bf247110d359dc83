"""Which values the chart takes: all that the program takes, nothing else; what is wrong is said by name."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from dispatcher.queue.redis.connect import connect
from dispatcher.settings import Settings
from dispatcher.settings.load import key_paths, parse_settings
from dispatcher.settings.values import is_secret_name
from tests.deploy.cases import BASIC, CASES
from tests.deploy.refused import REFUSED
from tests.deploy.release import CHART, helm, render
from tests.paths import DOCS
from tests.support import require_tool

NOT_HERE = {"queue.data_dir", "queue.fsync", "admin.host"}
"""Not offered: an embedded queue would have no producers in a pod, and probes come from outside it."""


@pytest.mark.parametrize("values", [{}, *(CASES[name] for name in ("files", "fenced-all", "rules"))])
def test_lint_finds_nothing(values: Mapping[str, Any]) -> None:
    done = helm("lint", "--strict", values={**BASIC, **values})
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


@pytest.mark.parametrize(("values", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_wrong_value_is_refused_by_name(values: Mapping[str, Any], says: str) -> None:
    done = helm("template", "night", values={**BASIC, **values})
    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr
    assert "nil pointer" not in done.stderr


def test_everything_wrong_is_said_at_once() -> None:
    config = {"retry": {"base_s": 90}, "budget": {"upper": 0.5}}
    told = helm("template", "night", values={"config": config}).stderr
    assert [line.partition(":")[0] for line in told.splitlines() if line.startswith("- ")] == [
        "- pool.name",
        "- gateway.url",
        "- config.retry.max_s",
        "- config.budget.upper",
    ]


def test_lint_says_what_is_wrong_once() -> None:
    told = helm("lint").stderr
    assert [told.count(each) for each in ("- pool.name: is required", "- gateway.url: is required")] == [1, 1]


def test_header_that_the_program_would_mask_comes_from_a_secret_or_not_at_all() -> None:
    secret = ("Authorization", "Proxy-Authorization", "Cookie", "api-key", "ApiKey", "X-Auth-Token",
              "Ocp-Apim-Subscription-Key", "X-Client-Secret", "x_password")  # fmt: skip
    others = ("Host", "X-Route", "X-Scope-OrgID")
    assert {name for name in (*secret, *others) if is_secret_name(name)} == set(secret)
    for names, wanted in (((*secret, *others), set(secret)), (others, set())):
        gateway = {"url": "http://gateway", "headers": dict.fromkeys(names, "hunter2")}
        told = helm("template", "night", values={**BASIC, "gateway": gateway}).stderr
        assert set(re.findall(r"gateway\.headers: (\S+) looks like a secret", told)) == wanted
        assert "hunter2" not in told


def test_headers_from_a_secret_reach_the_program() -> None:
    variable = {"name": "BATCH_DISPATCHER__GATEWAY__HEADERS", "value": '{"X-Api-Key": "hunter2"}'}
    release = render({"gateway": {"url": "http://a", "headers": {"X-Odd": "1"}}, "extraEnv": [variable]})
    assert release.settings().gateway.headers == {"X-Api-Key": "hunter2"}, "all of them, or none"


def test_a_secret_in_the_wrong_place_is_not_repeated() -> None:
    config = {"queue": {"url": "redis://:hunter2@redis"}}
    assert "hunter2" not in helm("template", "night", values={**BASIC, "config": config}).stderr


def test_every_setting_of_the_program_is_a_value_of_the_same_kind() -> None:
    """Each key of every section, given outright, comes through to the program as it was given."""
    tls = {"ca_file": "/a", "cert_file": "/b", "key_file": "/c", "insecure_skip_verify": True}
    given: dict[str, Any] = {
        "pool": {"name": "qwen", "namespace": "models"},
        "gateway": {
            "url": "https://gateway/prefix",
            "path": "/v1/chat/completions",
            "allowed_paths": ["/v1/*", "/v2/completions"],
            "allowed_headers": ["x-*"],
            "objective": "batch",
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
                   "overload_backoff": 0.5, "initial_per_endpoint": 4},
        "batching": {"mode": "on", "rules": [
            {"paths": ["/v1/models/*:predict"], "shape": "tensorflow", "max_size": 64,
             "preferred_sizes": [16, 32], "max_delay_s": 0, "idle_flush": False, "unit": "call",
             "max_items": 1000, "max_tokens_per_call": None, "check_every": 50},
            {"paths": ["/v1/embeddings"]},
        ]},
        "sequences": {"max_idle_s": 60, "max_age_s": 3600, "max_active": 9, "max_waiting": 10,
                      "on_error": "hold", "gap_s": 5, "after_end": "refuse", "header": "x-sticky",
                      "session_id_header": "x-id", "carry": "messages", "max_carry_bytes": 4096},
        "serving": {"observe": "endpoints", "urls": ["http://a:8000", "http://b:8000/models"],
                    "interval_s": 0.5, "when_not_served": "fail", "token_file": "/more/models", "tls": tls,
                    "subset_header": "x-subset", "warmup": {"by": "gateway", "timeout_s": 1.5}},
        "models": [
            {"name": "Qwen/Qwen3-32B", "when_not_served": "fail"},
            {"name": "adapter", "match": "adapter-v(?P<version>[0-9]+)", "policy": {"specific": ["2", "v3"]},
             "labels": {"stable": "2"}, "transition": "resource", "pin": "job",
             "weights": {"v3": 0.05, "2": 0},
             "warmup": "/more/warmup.jsonl", "warmup_required": True},
            *({"name": f"m-{policy}", "match": "m-.+", "policy": policy} for policy in ("latest", "all")),
            {"name": "m-2", "match": "m-.+", "policy": {"latest": 2}},
            {"name": "m-stable", "match": "m-.+", "policy": {"label": "stable"}},
        ],
        "retry": {"base_s": 0.001, "max_s": 86400, "max_attempts": 1, "max_deliveries": 1},
        "shutdown": {"drain_s": 0},
        "admin": {"port": 9000, "token_file": "/more/admin"},
        "log": {"level": "debug", "format": "console"},
        "tracing": {"endpoint": "http://collector:4318", "sample_ratio": 1e-7},
    }  # fmt: skip
    settings = render({**given, "config": config}).settings()
    in_a_pod = {"admin": {**config["admin"], "host": "0.0.0.0"}}
    expected = parse_settings(json.dumps({**given, **config, **in_a_pod}), {})
    assert isinstance(expected, Settings)
    assert settings.model_dump() == expected.model_dump()
    named = {path for section in (given, config) for path in paths(section)}
    left = set(key_paths(Settings)) - {path_of(path) for path in named}
    assert {path for path in left if not path.startswith("signals.vllm.")} == NOT_HERE


def test_model_servers_are_values_and_stand_in_place_of_the_picker() -> None:
    tls = {"ca_file": "/ca", "cert_file": "/cert", "key_file": "/key", "insecure_skip_verify": True}
    vllm = {"service": "vllm", "port": 8001, "token_file": "/t", "tls": tls}
    for servers in (vllm, {"urls": ["http://a:8000"]}):
        rendered = render(
            {**BASIC, "config": {"signals": {"vllm": servers}}, "kubernetes": {"enabled": False}}
        )
        shown = rendered.settings().signals.vllm
        assert shown.model_dump(include=set(servers), exclude={"urls"}) == {
            name: value for name, value in servers.items() if name != "urls"
        }
        assert [url.reveal() for url in shown.urls] == servers.get("urls", [])
    offered = {path for path in key_paths(Settings) if path.startswith("signals.vllm.")}
    given = set(paths({"signals": {"vllm": {**vllm, "urls": []}}}))
    assert offered <= given


def paths(section: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in section.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from paths(value, f"{prefix}{name}.")


def path_of(path: str) -> str:
    """Without the names within a map."""
    return next((each for each in key_paths(Settings) if path == each), path)


def test_no_setting_has_to_be_given() -> None:
    settings = render({}).settings()
    assert settings.model_fields_set == {"pool", "gateway", "queue", "admin"}
    assert settings.queue.url.reveal() == "redis://night-batch-dispatcher-valkey.llm.svc:6379"
    assert settings.pool.namespace == "llm"


def test_null_is_the_program_s_default_where_the_program_has_it_so() -> None:
    nothing = {"budget": {"upper": None, "max_in_flight": None}, "signals": {"max_age_s": None}}
    assert render({"config": nothing}).settings().limit_policy() == render({}).settings().limit_policy()


def test_lists_and_maps_can_be_taken_out() -> None:
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
    bare = [path for path in leaves(values) if not any(f"| `{above}` |" in readme for above in upward(path))]
    assert bare == []


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def upward(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]


def test_value_sets_of_the_guide_render() -> None:
    for page, count in (("install.md", 11), ("models.md", 1)):
        text = (DOCS / "how-to" / page).read_text()
        found = re.findall(r"<!-- values -->\n```yaml\n(.*?)```", text, re.DOTALL)
        assert len(found) == text.count("<!-- values -->") == count
        for values in found:
            assert isinstance(render(yaml.safe_load(values)).settings(), Settings)


def test_a_warmup_file_lies_where_the_guide_mounts_it() -> None:
    page = (DOCS / "how-to" / "models.md").read_text()
    (values,) = re.findall(r"<!-- values -->\n```yaml\n(.*?)```", page, re.DOTALL)
    release = render(yaml.safe_load(values))
    (model,) = release.settings().models
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
def test_a_version_that_is_written_wrong_is_refused_before_it_is_installed(model: Mapping[str, Any]) -> None:
    config = {"models": [{"name": "q", "match": "q-.+", **model}]}
    done = helm("template", "night", values={**BASIC, "config": config})
    assert (done.returncode, done.stdout) == (1, "")
    assert "/config/models/0" in done.stderr


def test_urls_of_the_guide_are_the_program_s() -> None:
    page = (DOCS / "how-to" / "install.md").read_text()
    urls = re.findall(r"`(rediss?(?:\+\w+)?://USER:PASSWORD@[^`]+)`", page)
    assert {url.partition(":")[0] for url in urls} == {"rediss", "redis+sentinel", "redis+cluster"}
    for url in urls:
        found = parse_settings(json.dumps(BASIC), {"BATCH_DISPATCHER__QUEUE__URL": url})
        assert isinstance(found, Settings), found
        assert found.queue.url.credentials == ("USER", "PASSWORD")
        connect(url)  # a client, which connects when it is first used


def test_values_that_the_guide_names_exist() -> None:
    page = (DOCS / "how-to" / "install.md").read_text()
    readme = (CHART / "README.md").read_text()
    tops = set(yaml.safe_load((CHART / "values.yaml").read_text())) - {"config", "gateway", "pool"}
    for path in re.findall(r"[`=]([a-zA-Z]+(?:\.[a-zA-Z]+)+)\b(?!_)", page):
        if path.partition(".")[0] in tops:
            there = any(f"| `{above}` |" in readme for above in upward(path))
            assert there or f"| `{path}." in readme, path


def test_links_of_the_readme_lead_to_what_is_there() -> None:
    links = re.findall(r"\]\(([^)#]+)", (CHART / "README.md").read_text())
    assert links
    assert [link for link in links if not (CHART / link).exists()] == []


def test_package_holds_what_the_templates_read(tmp_path: Any) -> None:
    done = helm_package(tmp_path)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tgz")
    names = subprocess.run(["tar", "-tzf", archive], capture_output=True, text=True, check=True).stdout
    for name in ("alerts.yaml", "dashboard.json", "inhibit.yaml", "settings.json"):
        assert f"batch-dispatcher/files/{name}" in names
    assert "batch-dispatcher/values.schema.json" in names


def helm_package(directory: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [require_tool("helm"), "package", str(CHART), "--destination", str(directory)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
