"""`batch-dispatcher completion`: write the completion script of a shell.

The script contains all verbs and options, so that Tab does not start Python, which would take half a second.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from dispatcher.cli.terminal import exit_error

EXAMPLES = {
    "completion": [
        "source <(batch-dispatcher completion bash)     # in ~/.bashrc",
        "source <(batch-dispatcher completion zsh)      # in ~/.zshrc, after compinit",
        "batch-dispatcher completion fish > ~/.config/fish/completions/batch-dispatcher.fish",
    ]
}
PROGRAM = "batch-dispatcher"
Shell = Literal["bash", "zsh", "fish"]
ValueKind = Literal["", "file", "choice", "other"]
"""Kind of value that an option takes. Empty if it takes none."""


@dataclass(frozen=True, slots=True)
class Flag:
    """An option, with all its names."""

    names: tuple[str, ...]
    help: str
    value: ValueKind = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CommandLevel:
    """Words that may follow a program, a verb or a group of verbs on the command line."""

    path: str
    """Verbs so far, such as `/dead/list`. Empty for the program itself."""
    verbs: tuple[tuple[str, str], ...]
    """Name and summary of each verb that may follow."""
    flags: tuple[Flag, ...]
    arguments: tuple[str, ...]
    """Allowed values of the arguments."""
    accepts_file: bool
    """True if an argument may be the name of a file."""


def completion(
    shell: Annotated[Shell | None, typer.Argument(help="Whose script to print.")] = None,
) -> None:
    """Print the script with which a shell completes verbs, options and files."""
    if shell is None:  # optional only for this message: that of typer lists each shell on its own line
        raise exit_error(f"say for which shell: batch-dispatcher completion {'|'.join(get_args(Shell))}", 2)
    from dispatcher.cli import app

    program = typer.main.get_command(app)
    levels = [*_list_levels(program, typer.Context(program), "")]
    verbs = tuple(name for name, _ in levels[0].verbs)
    # `help` takes any words; offer the verbs.
    levels = [replace(level, arguments=verbs) if level.path == "/help" else level for level in levels]
    typer.echo(
        {"bash": format_bash_script, "zsh": format_zsh_script, "fish": format_fish_script}[shell](levels)
    )


def _list_levels(command: Any, ctx: Any, path: str) -> Iterator[CommandLevel]:
    names = command.list_commands(ctx) if hasattr(command, "list_commands") else []
    subcommands = {name: command.get_command(ctx, name) for name in names}
    flags: list[Flag] = []
    words: list[str] = []
    accepts_file = False
    for parameter in command.get_params(ctx):
        kinds = _list_value_types(parameter)
        choices = tuple(
            str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)
        )
        is_file = Path in kinds
        if parameter.param_type_name == "argument":
            words += choices
            accepts_file = accepts_file or is_file
            continue
        value: ValueKind = "file" if is_file else "choice" if choices else "other"
        option_names = (*parameter.opts, *parameter.secondary_opts)
        flags.append(
            Flag(option_names, _first_sentence(parameter.help), "" if parameter.is_flag else value, choices)
        )
    verbs = tuple((name, _first_sentence(subcommand.help)) for name, subcommand in subcommands.items())
    yield CommandLevel(path, verbs, tuple(flags), tuple(words), accepts_file)
    for name, subcommand in subcommands.items():
        yield from _list_levels(
            subcommand, typer.Context(subcommand, parent=ctx, info_name=name), f"{path}/{name}"
        )


def _list_value_types(parameter: Any) -> list[Any]:
    """Return the annotated type of a parameter, and the types inside if it is optional or a list."""
    annotation = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    return [annotation, *(() if get_origin(annotation) is Literal else get_args(annotation))]


def _first_sentence(text: str | None) -> str:
    # The last dot of several, as in "..", does not end a sentence.
    paragraph = " ".join((text or "").split("\n\n")[0].split())
    return re.split(r"(?<=[^.])[.:;](?:\s|$)", paragraph)[0]


# Shell code that finds the level: it follows the words as long as they are verbs. Options are skipped.
_FIND_LEVEL = """  local -a words_=({words})
  local at="" word
  for word in "${{words_[@]:1}}"; do
    case "$at/$word" in
      {paths}) at="$at/$word" ;;
    esac
  done"""


def _join_paths(levels: list[CommandLevel]) -> str:
    return "|".join(level.path for level in levels if level.path) or "/"


def _format_value_cases(levels: list[CommandLevel], complete_value: Callable[[Flag], str]) -> str:
    """Return the arms of the shell's `case` that complete the value of an option, by level and option."""
    arms = []
    for level in levels:
        for flag in level.flags:
            if flag.value:
                # The shell compares "<level> <previous word>": the value follows its option.
                pattern = "|".join(f'"{level.path} {name}"' for name in flag.names)
                arms.append(f"    {pattern}) {complete_value(flag)}; return ;;")
    return "\n".join(arms)


def format_bash_script(levels: list[CommandLevel]) -> str:
    """Return the script for bash, which is read with `source`."""

    def complete_value(flag: Flag) -> str:
        if flag.value == "file":
            return 'compopt -o filenames; COMPREPLY=($(compgen -f -- "$cur"))'
        if flag.value == "choice":
            return f'COMPREPLY=($(compgen -W {shlex.quote(" ".join(flag.choices))} -- "$cur"))'
        return ":"

    find = _FIND_LEVEL.format(words='"${COMP_WORDS[@]:0:COMP_CWORD}"', paths=_join_paths(levels))
    cases = []
    for level in levels:
        offered = [*(name for name, _ in level.verbs), *level.arguments]
        offered += [name for flag in level.flags for name in flag.names]
        file_completion = (
            '; compopt -o filenames; COMPREPLY+=($(compgen -f -- "$cur"))' if level.accepts_file else ""
        )
        words = shlex.quote(" ".join(offered))
        cases.append(f'    "{level.path}") COMPREPLY=($(compgen -W {words} -- "$cur")){file_completion} ;;')
    return f"""# bash completion of {PROGRAM}
_batch_dispatcher() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}"
  COMPREPLY=()
{find}
  case "$at $prev" in
{_format_value_cases(levels, complete_value)}
  esac
  case "$at" in
{chr(10).join(cases)}
  esac
}}
complete -F _batch_dispatcher {PROGRAM}"""


def format_zsh_script(levels: list[CommandLevel]) -> str:
    """Return the script for zsh.

    It is read with `source`, or installed as `_batch-dispatcher` in a directory of $fpath.
    """

    def complete_value(flag: Flag) -> str:
        if flag.value == "file":
            return "_files"
        return f"compadd -- {shlex.join(flag.choices)}" if flag.value == "choice" else "_message value"

    # `words` is set by zsh. Arrays of zsh start at 1, and the first word is the program.
    find = _FIND_LEVEL.format(words='"${(@)words[1,CURRENT-1]}"', paths=_join_paths(levels)).replace(
        '"${words_[@]:1}"', '"${(@)words_[2,-1]}"'
    )
    cases = []
    for level in levels:
        offered = [f"{name}:{_escape_text(summary)}" for name, summary in level.verbs]
        offered += [f"{name}:" for name in level.arguments]
        options = [f"{name}:{_escape_text(flag.help)}" for flag in level.flags for name in flag.names]
        commands = [f"local -a verbs=({shlex.join(offered)})", "_describe verb verbs"] if offered else []
        commands += [f"local -a options_=({shlex.join(options)})", "_describe -o option options_"]
        commands += ["_files"] if level.accepts_file else []
        cases.append(f'    "{level.path}") {"; ".join(commands)} ;;')
    return f"""#compdef {PROGRAM}
# zsh completion of {PROGRAM}
_batch_dispatcher() {{
{find}
  case "$at ${{words[CURRENT-1]}}" in
{_format_value_cases(levels, complete_value)}
  esac
  case "$at" in
{chr(10).join(cases)}
  esac
}}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _batch_dispatcher "$@"
else compdef _batch_dispatcher {PROGRAM}; fi"""


def _escape_text(text: str) -> str:
    return text.replace("\\", "\\\\").replace(":", "\\:")


def format_fish_script(levels: list[CommandLevel]) -> str:
    """Return the script for fish, which is read with `source` or installed in ~/.config/fish/completions."""
    lines = [
        f"# fish completion of {PROGRAM}",
        "function __batch_dispatcher_at",
        '    set -l at ""',
        "    for word in (commandline -opc)[2..]",
        f'        if contains -- "$at/$word" {shlex.join(level.path for level in levels if level.path)}',
        '            set at "$at/$word"',
        "        end",
        "    end",
        '    test "$at" = "$argv[1]"',
        "end",
    ]
    for level in levels:
        prefix = f"complete -c {PROGRAM} -n {shlex.quote(f'__batch_dispatcher_at {shlex.quote(level.path)}')}"
        if not level.accepts_file:
            lines.append(f"{prefix} -f")  # fish offers files unless it is told not to
        lines += [f"{prefix} -a {name} -d {shlex.quote(summary)}" for name, summary in level.verbs]
        lines += [f"{prefix} -a {word}" for word in level.arguments]
        for flag in level.flags:
            names = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names
            )
            values = {
                "": "",
                "file": " -rF",
                "choice": f" -x -a {shlex.quote(' '.join(flag.choices))}",
                "other": " -x",
            }[flag.value]
            lines.append(f"{prefix} {names}{values} -d {shlex.quote(flag.help)}")
    return "\n".join(lines)
