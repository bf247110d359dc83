"""Completion, the list of verbs, and errors of the whole command line."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dispatcher.cli import VERBS, app
from dispatcher.features import import_modules
from tests.fork_server import run_cli


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("batch-dispatcher st", ["status", "streams"]),
        ("batch-dispatcher dead re", ["requeue"]),
        ("batch-dispatcher status --wa", ["--wait", "--watch"]),
        ("batch-dispatcher sequences show --status he", ["held"]),
        ("batch-dispatcher run --config some", []),  # bash completes names of files then
    ],
)
def test_shell_completes_verbs_options_and_choices(line: str, expected: list[str]) -> None:
    assert sorted(complete(line).stdout.split()) == expected


def complete(line: str, *, program: str = "from dispatcher.cli import main; main()") -> Any:
    """Ask for completions as the script of typer for bash does."""
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    environ = {**os.environ, **asked, "_BATCH_DISPATCHER_COMPLETE": "complete_bash"}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environ, check=False
    )


@pytest.mark.parametrize("line", ["batch-dispatcher ", "batch-dispatcher status --"])
def test_completion_imports_neither_settings_nor_redis(line: str) -> None:
    """These imports take half a second, and completion runs at each Tab."""
    program = (
        "import sys\n"
        "from dispatcher.cli import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    print(sorted({'dispatcher.settings', 'redis', 'rich', 'aiohttp'} & set(sys.modules)))"
    )
    *completions, imported = complete(line, program=program).stdout.splitlines()
    assert completions
    assert imported == "[]"


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
            app, [*names, "--help"], env={"COLUMNS": "80"}, prog_name="batch-dispatcher"
        )
        assert output.exit_code == 0, output.output
        assert f"batch-dispatcher {' '.join(names)}" in output.stdout
        assert [line for line in output.stdout.splitlines() if len(line) > 80] == []


def test_list_of_verbs_shows_the_first_sentence_of_each_help() -> None:
    assert {name: (command(name).help or "").split("\n\n")[0] for name in VERBS} == {
        name: verb.summary for name, verb in VERBS.items()
    }


def test_list_of_verbs_imports_no_verb() -> None:
    code = (
        "import sys\n"
        "from dispatcher.cli import VERBS, app\n"
        "app(['--help'], standalone_mode=False)\n"
        "print(sorted({verb.path for verb in VERBS.values()} & set(sys.modules)))\n"
        "print(*(name for name in sys.modules if name.startswith('dispatcher.features.')))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    verbs_imported, feature_modules = output.stdout.splitlines()[-2:]
    assert verbs_imported == "[]"
    declarations = import_modules("verbs").values()
    assert set(feature_modules.split()) == {
        name for module in declarations for name in (module.__name__, module.__package__)
    }
    assert all(f" {verb} " in output.stdout for verb in VERBS)


def test_version_is_printed_with_that_of_python() -> None:
    assert run_cli("--version").stdout == run_cli("-V").stdout
    assert re.fullmatch(r"batch-dispatcher \S+ \(Python \S+\)\n", run_cli("-V").stdout)


def test_removed_verb_is_answered_with_the_nearest_one() -> None:
    output = run_cli("results")
    assert output.returncode == 2
    assert "No such command 'results'. Did you mean 'result', 'resume'?" in " ".join(output.stderr.split())


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
