"""`init` writes a valid configuration and never overwrites a file."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.cli.init import Answers, Way, format_config
from dispatcher.cli.kubectl import FoundPool, build_pool
from dispatcher.settings.load import parse_settings
from dispatcher.settings.model import Settings
from tests.fork_server import run_cli

Output = subprocess.CompletedProcess[str]
Init = Callable[..., Output]


@pytest.fixture
def init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Init:
    monkeypatch.chdir(tmp_path)
    bare = {name: value for name, value in os.environ.items() if not name.startswith("BATCH_DISPATCHER")}

    def run(*arguments: str, verb: str = "init") -> Output:
        return run_cli(verb, *arguments, env={**bare, "HOME": str(tmp_path), "PATH": str(tmp_path / "bin")})

    return run


def test_written_configuration_passes_check_and_contains_the_answers(init: Init, tmp_path: Path) -> None:
    flags = [
        "--pool",
        "qwen",
        "--namespace",
        "llm",
        "--gateway",
        "http://127.0.0.1:8000",
        "--objective",
        "batch",
    ]
    flags += ["--queue-url", "redis://redis:6379/1", "--epp", "http://127.0.0.1:9090", "--per-endpoint", "32"]
    done = init(*flags, "--reserve", "0.1")
    assert (done.returncode, done.stdout) == (0, "config.yaml is written. Next: batch-dispatcher check\n")
    checked = init("--offline", "--json", verb="check")
    assert checked.returncode == 0, checked.stderr
    found = json.loads(checked.stdout)["settings"]
    assert (found["pool"], found["budget"]["per_endpoint"]) == ({"name": "qwen", "namespace": "llm"}, 32)
    assert (found["gateway"]["objective"], found["queue"]["url"]) == ("batch", "redis://redis:6379/1")
    assert (found["signals"]["epp"]["urls"], found["budget"]["reserve"]) == (["http://127.0.0.1:9090"], 0.1)


def test_one_answer_suffices_and_the_rest_keeps_its_defaults(init: Init) -> None:
    assert init("--gateway", "http://gw").returncode == 0
    checked = init("--offline", "--json", verb="check")
    assert json.loads(checked.stdout)["settings"]["budget"]["per_endpoint"] == "auto"
    assert checked.returncode == 0


def test_nothing_is_overwritten(init: Init, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine")
    done = init("--gateway", "http://gw")
    assert (done.returncode, (tmp_path / "config.yaml").read_text()) == (1, "mine")
    assert done.stderr == "config.yaml exists and is not overwritten: name another with --output\n"
    assert init("--gateway", "http://gw", "--output", "other.yaml").returncode == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "give --gateway"),
        (["--gateway", "gw:8000"], "--gateway (gateway.url): must begin with"),
        (["--gateway", "http://gw", "--epp", "x"], "--epp (signals.epp.urls[0])"),
        (["--gateway", "http://gw", "--queue-url", "http://h"], "--queue-url (queue.url)"),
        (["--gateway", "http://gw", "--pool", "a b"], "--pool (pool.name)"),
        (["--gateway", "http://gw", "--reserve", "2"], "--reserve"),
        (["--server", "a:8000"], "--gateway (gateway.url): must begin with"),
        (["--server", "http://a", "--server", "b"], "give --gateway"),
        (["--gateway", "http://gw", "--server", "http://a", "--server", "http://a/"], "--server"),
        (["--gateway", "http://gw", "--prometheus", "p"], "--prometheus (signals.prometheus.url)"),
        (["--gateway", "http://gw", "--fixed-limit", "0"], "--fixed-limit"),
        (["--server", "http://a", "--fixed-limit", "4"], "give one of --epp"),
        (["--from-cluster", "--prometheus", "http://p"], "give one of --epp"),
    ],
)
def test_invalid_answer_is_named_and_nothing_is_written(
    init: Init, tmp_path: Path, flags: list[str], said: str
) -> None:
    done = init(*flags)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    assert "line " not in done.stderr, "a file was not written"
    assert not (tmp_path / "config.yaml").exists()


def run_on_terminal(tmp_path: Path, *answers: str) -> Settings:
    """Run `init` on a terminal, give these answers, and return the settings that it wrote."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(sys.executable, [sys.executable, "-m", "dispatcher", "init"])
    os.write(terminal, "".join(f"{each}\n" for each in answers).encode())
    with contextlib.suppress(OSError):  # the terminal was closed
        while os.read(terminal, 4096):
            pass
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    found = parse_settings((tmp_path / "config.yaml").read_text(), {})
    assert isinstance(found, Settings)
    return found


def test_invalid_url_is_asked_for_again_at_once_on_a_terminal(init: Init, tmp_path: Path) -> None:
    """An error after the last question would lose all answers."""
    answers = "qwen", "gw:8000", "http://gw:8000", "batch", "", "picker:9090", "http://picker:9090"
    found = run_on_terminal(tmp_path, "", *answers)
    assert found.gateway.url.reveal() == "http://gw:8000"
    assert [each.reveal() for each in found.signals.epp.urls] == ["http://picker:9090"]


def test_model_servers_are_asked_for_on_a_terminal(init: Init, tmp_path: Path) -> None:
    servers = "http://a:8000 b", "http://a:8000 http://b:8000"
    found = run_on_terminal(
        tmp_path, "vllm", "servers", "qwen", *servers, "http://balancer", "", "many", "256"
    )
    assert [each.reveal() for each in found.signals.vllm.urls] == ["http://a:8000", "http://b:8000"]
    assert (found.gateway.url.reveal(), found.budget.per_endpoint) == ("http://balancer", 256)


def test_single_model_server_is_also_the_gateway_on_a_terminal(init: Init, tmp_path: Path) -> None:
    found = run_on_terminal(tmp_path, "servers", "qwen", "http://a:8000", "", "")
    assert (found.gateway.url.reveal(), found.budget.per_endpoint) == ("http://a:8000", None)


def test_prometheus_is_asked_for_on_a_terminal(init: Init, tmp_path: Path) -> None:
    found = run_on_terminal(
        tmp_path, "prometheus", "qwen", "http://gw", "batch", "", "http://prometheus:9090"
    )
    assert (found.signals.source, found.gateway.objective) == ("prometheus", "batch")
    assert found.signals.prometheus.url.reveal() == "http://prometheus:9090"


def test_fixed_limit_is_asked_for_on_a_terminal(init: Init, tmp_path: Path) -> None:
    found = run_on_terminal(tmp_path, "fixed", "qwen", "http://gw", "", "0", "16")
    assert (found.signals.source, found.budget.max_in_flight) == ("fixed", 16)


def test_password_is_not_written_to_the_file(init: Init, tmp_path: Path) -> None:
    done = init("--gateway", "http://gw", "--queue-url", "redis://:sesame@redis")
    assert (done.returncode, "export BATCH_DISPATCHER__QUEUE__URL" in done.stderr) == (0, True)
    assert "sesame" not in (tmp_path / "config.yaml").read_text()


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=40)


@given(st.sampled_from(get_args(Way)), TEXT, TEXT, TEXT, TEXT)
def test_answer_sets_only_its_own_value(way: Way, pool: str, gateway: str, objective: str, url: str) -> None:
    """Values that are no URL or name are refused; accepted values appear only at their own place."""
    url = f"http://{url}"
    given_ = Answers(
        f"http://{gateway}",
        pool=pool,
        objective=objective,
        way=way,
        epp=url,
        servers=(url,),
        prometheus=url,
        fixed_limit=4,
    )
    found = parse_settings(format_config(given_), {})
    if isinstance(found, Settings):
        assert found.gateway.url.reveal() == given_.gateway
        assert (found.pool.name, found.gateway.objective) == (
            pool,
            objective if given_.has_inference_pool else "",
        )
        signals = found.signals
        named = [
            *signals.epp.urls,
            *signals.vllm.urls,
            *([signals.prometheus.url] if signals.prometheus.url else []),
        ]
        assert [each.reveal() for each in named] == ([] if way == "fixed" else [url])
        assert found.budget.reserve == 0.05


def make_object(name: str, namespace: str = "llm", **more: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": namespace}, **more}


POOL = make_object("qwen", spec={"endpointPickerRef": {"name": "qwen-epp"}})
ROUTE = make_object(
    "route",
    spec={
        "parentRefs": [{"name": "gw", "namespace": "edge"}],
        "rules": [{"backendRefs": [{"kind": "InferencePool", "name": "qwen"}]}],
    },
)
GATEWAY = make_object(
    "gw",
    "edge",
    spec={"listeners": [{"protocol": "TCP", "port": 1}, {"protocol": "HTTP", "port": 80}]},
    status={"addresses": [{"type": "IPAddress", "value": "10.0.0.7"}]},
)
OBJECTIVES = [
    make_object(name, spec={"priority": priority, "poolRef": {"name": pool}})
    for name, priority, pool in [("chat", 10, "qwen"), ("batch", -10, "qwen"), ("other", -20, "llama")]
]


def test_pool_is_found_with_its_picker_gateway_and_objective() -> None:
    whole = FoundPool("qwen", "llm", "qwen-epp", "http://10.0.0.7", "batch")
    assert build_pool(POOL, [ROUTE], [GATEWAY], OBJECTIVES) == whole
    assert build_pool(POOL, [], [GATEWAY], OBJECTIVES[:1]) == FoundPool("qwen", "llm", "qwen-epp")
    bare = make_object("qwen", spec=None, status=None)
    assert build_pool(bare, [make_object("r")], [make_object("gw", "edge")], [make_object("o")]) == FoundPool(
        "qwen", "llm"
    )
    tls = {**GATEWAY, "spec": {"listeners": [{"protocol": "HTTPS", "port": 8443}]}}
    assert build_pool(POOL, [ROUTE], [tls], []).gateway == "https://10.0.0.7:8443"


@pytest.fixture
def kubectl(tmp_path: Path) -> Callable[[dict[str, Any]], None]:
    """Install a kubectl that returns these objects and denies access to all others."""

    def install(known: dict[str, Any]) -> None:
        (tmp_path / "bin").mkdir()
        program = tmp_path / "bin" / "kubectl"
        cases = "".join(
            f"{kind}.*|{kind}) cat <<'END'\n{json.dumps({'items': items})}\nEND\n;;\n"
            for kind, items in known.items()
        )
        refused = '*) echo "Error from server (Forbidden): $2 is forbidden" >&2; exit 1;;\n'
        shell = "PATH=/usr/bin:/bin\n"
        program.write_text(f'#!/bin/sh\n{shell}case "$2" in\n{cases}{refused}esac\n')
        program.chmod(0o755)

    return install


def test_readable_objects_of_a_cluster_are_used(
    init: Init, kubectl: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    assert "kubectl is not installed" in init("--from-cluster").stderr
    known = {"inferencepools": [POOL], "httproutes": [ROUTE], "gateways": [GATEWAY]}
    kubectl({**known, "inferenceobjectives": OBJECTIVES})
    done = init("--from-cluster")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "config.yaml").read_text()
    for line in ("name: qwen ", "namespace: llm", 'url: "http://10.0.0.7"', "objective: batch"):
        assert line in text.replace("url: http://10.0.0.7", 'url: "http://10.0.0.7"')


def test_values_missing_in_the_cluster_are_asked_for(
    init: Init, kubectl: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    kubectl({"inferencepools": [POOL, make_object("llama")]})
    several = init("--from-cluster")
    assert (several.returncode, "llm/llama, llm/qwen. Choose by --pool" in several.stderr) == (2, True)
    missing = init("--from-cluster", "--pool", "qwen")
    assert (missing.returncode, "no gateway was found" in missing.stderr) == (2, True)
    assert init("--from-cluster", "--pool", "qwen", "--gateway", "http://gw").returncode == 0
    assert "no InferencePool nix" in init("--from-cluster", "--pool", "nix", "-o", "x.yaml").stderr


def test_refusal_by_the_cluster_is_shown_with_its_message(
    init: Init, kubectl: Callable[[dict[str, Any]], None]
) -> None:
    kubectl({})
    done = init("--from-cluster")
    assert (done.returncode, "is forbidden" in done.stderr) == (1, True)
