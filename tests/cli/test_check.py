"""`check` prints the effective settings to stdout and problems to stderr, and sets the exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fork_server import run_cli
from tests.function_calls import count_calls
from tests.support import free_port

COMMAND = [sys.executable, "-m", "dispatcher"]


def make_environ(**environ: str) -> dict[str, str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("BATCH_DISPATCHER__")
    }
    return {**inherited, "COLUMNS": "200", **environ}


def run(*arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return run_cli(*arguments, env=make_environ(**environ))


def run_cold(*arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a new interpreter, for tests of its imports and its start time."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env=make_environ(**environ)
    )


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("gateway: {url: http://gw, objective: batch}\nqueue: {url: 'redis://:sesame@redis'}\n")
    return path


def test_valid_configuration_is_printed_with_defaults_marked(config: Path) -> None:
    given = {"BATCH_DISPATCHER__BUDGET__RESERVE": "0.2"}
    done = run("check", "--offline", "--all", "--config", config, **given)
    assert (done.returncode, done.stderr) == (0, "")
    printed = done.stdout.splitlines()
    assert "  objective: batch" in printed
    assert "  reserve: 0.2  # environment" in printed
    assert "  timeout_s: 300  # default" in printed
    assert "  url: redis://:***@redis" in printed
    assert "sesame" not in done.stdout
    short = run("check", "--offline", "--config", config, **given)
    assert short.stdout.splitlines() == [
        f"# {config}; all else is at its default: --all shows it",
        "gateway:",
        "  url: http://gw",
        "  objective: batch",
        "queue:",
        "  url: redis://:***@redis",
        "budget:",
        "  reserve: 0.2  # environment",
        "all well; no connection was tried (--offline)",
    ]


@pytest.mark.parametrize("verb", ["check", "run"])
def test_configuration_that_is_a_pipe_is_refused(tmp_path: Path, verb: str) -> None:
    os.mkfifo(tmp_path / "config.yaml")
    done = run(verb, "--config", tmp_path / "config.yaml")
    assert done.returncode == 2
    assert "config.yaml: cannot be read: it is not a regular file, but a pipe" in done.stderr


def test_invalid_configuration_exits_with_2_and_lists_every_problem(config: Path) -> None:
    config.write_text("gateway: {url: http://gw}\nbudget: {reserv: 0.1}\nlog: {level: x}\n")
    done = run("check", "--config", config)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "config.yaml: line 2: budget.reserv: unknown key (did you mean reserve?)",
        "config.yaml: line 3: log.level: must be one of debug, info, warning, error",
    ]


def test_missing_file_exits_with_2(tmp_path: Path) -> None:
    done = run("check", "--config", tmp_path / "none.yaml")
    assert done.returncode == 2
    assert done.stderr == f"{tmp_path / 'none.yaml'}: cannot be read: No such file or directory\n"


def test_json_contains_settings_defaults_and_findings(config: Path) -> None:
    done = run("check", "--offline", "--config", config, "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 0
    assert answer["ok"] is True
    assert answer["settings"]["queue"]["url"] == "redis://:***@redis"
    assert "budget.reserve" in answer["defaults"]
    assert "gateway.url" not in answer["defaults"]


def test_json_contains_problems_with_their_places(config: Path) -> None:
    config.write_text("gateway: {url: http://gw}\nbudget: {reserv: 0.1}\n")
    done = run("check", "--config", config, "--json")
    assert done.returncode == 2
    what = "unknown key (did you mean reserve?)"
    problem = {"source": "config.yaml", "where": "budget.reserv", "what": what, "line": 2}
    assert json.loads(done.stdout) == {"ok": False, "problems": [problem]}


def test_file_named_in_the_configuration_must_exist(config: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    missing = run("check", "--offline", "--config", config, BATCH_DISPATCHER__GATEWAY__TOKEN_FILE=str(token))
    assert missing.returncode == 1
    assert missing.stderr == f"failed: gateway.token_file: {token}: No such file or directory\n"
    token.write_text("sesame")
    there = run("check", "--offline", "--config", config, BATCH_DISPATCHER__GATEWAY__TOKEN_FILE=str(token))
    assert there.returncode == 0
    assert f"ok: gateway.token_file: {token} is readable" in there.stdout
    assert "sesame" not in there.stdout


def test_warmup_files_must_exist_and_be_valid(config: Path, tmp_path: Path) -> None:
    file = tmp_path / "warm.jsonl"
    config.write_text("gateway: {url: http://gw}\nmodels: [{name: qwen, warmup: warm.jsonl}]\n")
    missing = run("check", "--offline", "--config", config)
    assert missing.returncode == 1
    assert f"failed: models[0].warmup: {file}: cannot be read: No such file or directory\n" in missing.stderr
    file.write_text('{"body": {"prompt": "sesame"}}\n')
    wrong = run("check", "--offline", "--config", config)
    assert wrong.returncode == 1
    assert f"failed: models[0].warmup: {file}: line 1: body.model: is missing" in wrong.stderr
    file.write_text('{"body": {"model": "qwen", "prompt": "sesame"}, "repeat": 3}\n')
    there = run("check", "--offline", "--config", config)
    assert there.returncode == 0
    assert f"ok: models[0].warmup: {file}: 1 requests, 3 calls for each server" in there.stdout
    assert "sesame" not in wrong.stderr + there.stdout


def test_doubtful_settings_are_warnings_and_not_failures(config: Path) -> None:
    done = run(
        "check",
        "--offline",
        "--config",
        config,
        BATCH_DISPATCHER__GATEWAY__OBJECTIVE="",
        BATCH_DISPATCHER__GATEWAY__TLS__INSECURE_SKIP_VERIFY="true",
        BATCH_DISPATCHER__SIGNALS__USE="saturation",
    )
    assert done.returncode == 0
    assert [line.split(": ")[:2] for line in done.stderr.splitlines()] == [
        ["warning", "gateway.tls.insecure_skip_verify"],
        ["warning", "gateway.objective"],
        ["warning", "signals.use"],
    ]


@pytest.mark.parametrize("arguments", [(), ("chek",), ("check",), ("check", "--confg", "x"), ("check", "x")])
def test_wrong_usage_exits_2(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).returncode == 2


def test_mistyped_verb_gets_the_most_similar_suggestion() -> None:
    assert "Did you mean 'check'?" in run("chek").stderr


def test_version_is_the_version_of_the_package() -> None:
    from dispatcher import __version__

    assert run("--version").stdout.startswith(f"batch-dispatcher {__version__} ")


@pytest.fixture
def nobody_there(config: Path) -> Path:
    """Return a configuration whose addresses all refuse connections."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    config.write_text(
        f"gateway: {{url: 'http://{addresses[0]}'}}\nqueue: {{url: 'redis://{addresses[1]}'}}\n"
        f"signals: {{epp: {{urls: ['http://{addresses[2]}']}}}}\n"
    )
    return config


def test_check_imports_no_client_library_if_every_connection_is_refused(nobody_there: Path) -> None:
    """Client libraries take seconds to import; validation and refused connections need none of them."""
    code = (
        "import sys; from dispatcher.cli import app;"
        f"app(['check', '--config', {str(nobody_there)!r}], standalone_mode=False);"
        "print(*sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "HOME": str(nobody_there.parent)},  # no kubeconfig
    )
    heavy = {
        "kubernetes",
        "prometheus_api_client",
        "redis",
        "httpx",
        "aiohttp",
        "matplotlib",
        "numpy",
        "watchfiles",
    }
    assert "connection refused" in done.stderr
    assert heavy & set(done.stderr.split()) == set()


@pytest.mark.slow
def test_check_costs_little_more_than_starting_python_with_its_libraries(nobody_there: Path) -> None:
    """Function calls are compared: 482,700 of them, 254,000 for the libraries."""
    environ = make_environ(HOME=str(nobody_there.parent))  # no kubeconfig
    check = count_calls(
        "from dispatcher.cli import app\n"
        f"assert app(['check', '--config', {str(nobody_there)!r}], standalone_mode=False) in (None, 0)",
        environ=environ,
    )
    libraries = count_calls("import asyncio, pydantic_settings, typer, yaml", environ=environ)
    assert check <= 1.95 * libraries


@pytest.mark.parametrize("verb", [["check", "--offline"], ["run"]], ids=["check", "run"])
def test_tracing_without_its_extra_names_the_extra_to_install(
    config: Path, tmp_path: Path, verb: list[str]
) -> None:
    (tmp_path / "opentelemetry.py").write_text("raise ImportError('not here')\n")
    with config.open("a") as file:
        file.write("tracing: {endpoint: 'http://collector:4318'}\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = run_cold(*verb, "--config", config, PYTHONPATH=path)
    assert done.returncode == (1 if verb == ["run"] else 0)
    assert "pip install 'batch-dispatcher[otel]'" in done.stderr


@pytest.fixture
def unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a configuration with unreachable addresses, outside any cluster."""
    for name in ("KUBERNETES_SERVICE_HOST", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    config = tmp_path / "config.yaml"
    config.write_text(
        f"gateway: {{url: 'http://127.0.0.1:{free_port()}', objective: batch}}\n"
        f"queue: {{url: 'redis://127.0.0.1:{free_port()}'}}\n"
    )
    return config


def test_failed_connection_fails_only_a_strict_check(unreachable: Path) -> None:
    printed_text = run_cli("check", "--config", unreachable, "--all")
    assert printed_text.returncode == 0
    assert printed_text.stderr.count("failed: ") == 3
    assert printed_text.stdout.splitlines()[-1] == "3 failed (exit code 0 all the same; with --strict: 1)"
    assert "  lease_s: 30  # default" in printed_text.stdout
    assert run_cli("check", "--config", unreachable, "--strict").returncode == 1


@pytest.mark.parametrize("flag", ["--offline", "--no-connect"])
def test_offline_check_opens_no_connection(unreachable: Path, flag: str) -> None:
    printed_text = run_cli("check", "--config", unreachable, flag, "--strict")
    assert (printed_text.returncode, printed_text.stderr) == (0, "")


def test_json_contains_findings_of_connections(unreachable: Path) -> None:
    done = run_cli("check", "--config", unreachable, "--strict", "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["ok"], answer["problems"]) == (1, False, [])
    assert [finding["where"] for finding in answer["findings"] if finding["level"] == "failed"] == [
        "gateway.url",
        "queue.url",
        "signals",
    ]
