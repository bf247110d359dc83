"""Completion in real shells."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dispatcher.cli import SUMMARIES, VERBS, app
from tests.fork_server import run_cli


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    made = {}
    for shell in ("bash", "zsh", "fish"):
        output = run_cli("completion", shell)
        assert output.returncode == 0, output.stderr
        made[shell] = folder / f"completion.{shell}"
        made[shell].write_text(output.stdout)
    return made


def test_completion_without_a_shell_lists_the_shells() -> None:
    output = run_cli("completion")
    assert (output.returncode, output.stdout) == (2, "")
    assert output.stderr == "say for which shell: batch-dispatcher completion bash|zsh|fish\n"


def bash(script: Path, line: str, folder: Path) -> set[str]:
    words = line.split(" ")
    asked = "\n".join(
        [
            f"source {script}",
            f"COMP_WORDS=({' '.join(words[:-1])} '{words[-1]}')",
            f"COMP_CWORD={len(words) - 1}",
            "compopt() { :; }",  # defined only during completion by readline
            "_batch_dispatcher",
            'printf "%s\\n" "${COMPREPLY[@]}"',
        ]
    )
    done = subprocess.run(
        ["bash", "--norc", "-euc", asked], capture_output=True, text=True, check=True, cwd=folder
    )
    assert done.stderr == ""
    return set(done.stdout.split())


def fish(script: Path, line: str, folder: Path) -> set[str]:
    environ = {"HOME": str(folder), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    asked = f"source {script}; complete -C '{line}'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", asked], capture_output=True, text=True, cwd=folder, env=environ
    )
    assert (done.returncode, done.stderr) == (0, "")
    return {each.split("\t")[0] for each in done.stdout.splitlines()}


def zsh(script: Path, line: str, folder: Path) -> set[str]:
    """Return the completed line, or the list of candidates. zsh completes only in a terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe(
            "zsh", ["zsh", "-f", "-i"], {"PATH": os.environ["PATH"], "TERM": "dumb", "HOME": str(folder)}
        )
    output = b""

    def read_until(mark: bytes) -> None:
        nonlocal output
        end = time.monotonic() + 30
        while mark not in output:
            assert time.monotonic() < end, output
            if select.select([terminal], [], [], 0.2)[0]:
                output += os.read(terminal, 65536)

    begin = "unsetopt zle_bracketed_paste; PS1='<''p>'; LISTMAX=1000; autoload -U compinit; compinit -u -D"
    show = 'show() { print -r -- "<<$BUFFER>>" }; zle -N show; bindkey ^T show'
    try:
        os.write(terminal, f"{begin}; {show}; source {script}; print re''ady\n".encode())
        read_until(b"ready\r\n")
        read_until(b"<p>")
        output = b""
        os.write(terminal, f"{line}\t\x14".encode())
        read_until(b">>")
        return {each.decode() for each in re.findall(rb"[\w./-]+", output)}
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


SHELLS = {"bash": bash, "fish": fish, "zsh": zsh}


@pytest.mark.parametrize("shell", SHELLS)
def test_shell_completes_verbs_options_choices_and_files(
    shell: str, scripts: dict[str, Path], tmp_path: Path
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "some-config.yaml").touch()
    for line, expected, not_expected in (
        ("batch-dispatcher st", {"status"}, "--watch"),
        ("batch-dispatcher dead re", {"requeue"}, "resume"),
        ("batch-dispatcher status --wa", {"--watch", "--wait"}, "--observe"),
        ("batch-dispatcher completion f", {"fish"}, "bash"),
        ("batch-dispatcher run --config some", {"some-config.yaml"}, "status"),
    ):
        found = SHELLS[shell](scripts[shell], line, tmp_path)
        assert expected <= found, (line, found)
        assert not_expected not in found, (line, found)


def test_shell_completes_without_starting_python(scripts: dict[str, Path]) -> None:
    for script in scripts.values():
        assert not re.search(r"\$\(\s*batch-dispatcher|\(batch-dispatcher", script.read_text())


def command(*names: str) -> Any:
    found: Any = typer.main.get_command(app)
    for name in names:
        found = found.get_command(typer.Context(found), name)
    return found


def verbs() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name in command().list_commands(typer.Context(command())):
        inner = getattr(command(name), "commands", {})
        found += [(name, each) for each in inner] or [(name,)]
    return found


def test_each_example_in_a_help_text_is_valid_usage() -> None:
    shown = 0
    for names in verbs():
        for example in re.findall(r"batch-dispatcher ([^|&)>#\n]*)", command(*names).epilog or ""):
            words = [word.strip("'") for word in re.findall(r"'[^']*'|\S+", example)]
            depth = 2 if len(words) > 1 and hasattr(command(words[0]), "commands") else 1
            command(*words[:depth]).make_context(words[0], words[depth:])
            shown += 1
    assert shown >= 15


def test_help_fits_a_terminal_of_80_columns() -> None:
    for names in verbs():
        output = CliRunner().invoke(
            app, ["help", *names], env={"COLUMNS": "80"}, prog_name="batch-dispatcher"
        )
        assert output.exit_code == 0, output.output
        assert f"batch-dispatcher {' '.join(names)}" in output.stdout
        assert [line for line in output.stdout.splitlines() if len(line) > 80] == []


def test_list_of_verbs_shows_the_first_sentence_of_each_help() -> None:
    assert {verb: (command(verb).help or "").split("\n\n")[0] for verb in VERBS} == SUMMARIES


def test_list_of_verbs_imports_no_verb() -> None:
    code = (
        "import sys\n"
        "from dispatcher.cli import VERBS, app\n"
        "app(['--help'], standalone_mode=False)\n"
        "print(sorted(set(VERBS.values()) & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.splitlines()[-1] == "[]"
    assert all(f" {verb} " in output.stdout for verb in VERBS)


def test_version_is_also_an_option() -> None:
    assert run_cli("--version").stdout == run_cli("-V").stdout == run_cli("version").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["statuss", "--json"], 2, "Did you mean 'status'"),
        (["status", "--json", "--nonsense"], 2, "--nonsense"),
        (["pause", "--json", "--queue-url", "redis://127.0.0.1:1"], 1, "127.0.0.1:1: connection refused"),
        (["explain", "--json", "--config", "/none.yaml"], 1, "/none.yaml: cannot be read"),
        (["resume", "--json", "--queue-url", "http://h"], 2, "queue.url"),
    ],
)
def test_errors_are_json_with_json_output(arguments: list[str], code: int, said: str) -> None:
    output = run_cli(*arguments)
    assert output.returncode == code
    lines = [json.loads(line) for line in output.stderr.splitlines()]
    assert lines
    assert all(line.keys() <= {"error", "warning"} for line in lines)
    assert said in json.dumps(lines)


def test_no_color_is_obeyed_on_a_terminal() -> None:
    """Without a terminal there is no colour anyway."""
    for environ, is_coloured in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
        pid, terminal = pty.fork()
        if pid == 0:
            os.environ.pop("NO_COLOR", None)
            os.environ.update({"TERM": "xterm", **environ})
            os.execvp(
                sys.executable, [sys.executable, "-m", "dispatcher", "check", "--offline", "-c", "/none.yaml"]
            )
        output = b""
        try:
            while chunk := os.read(terminal, 4096):
                output += chunk
        except OSError:  # the process has ended
            pass
        os.close(terminal)
        os.waitpid(pid, 0)
        assert b"cannot be read" in output
        assert (b"\x1b[" in output) is is_coloured, output


def test_verbs_match_the_declared_table() -> None:
    assert {names[0] for names in verbs()} == set(VERBS)
