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

from dispatcher.cli.terminal import fail

EXAMPLES = {
    "completion": [
        "source <(batch-dispatcher completion bash)     # in ~/.bashrc",
        "source <(batch-dispatcher completion zsh)      # in ~/.zshrc, after compinit",
        "batch-dispatcher completion fish > ~/.config/fish/completions/batch-dispatcher.fish",
    ]
}
PROGRAM = "batch-dispatcher"
Shell = Literal["bash", "zsh", "fish"]
Value = Literal["", "file", "choice", "other"]
"""Kind of value that an option takes. Empty if it takes none."""


@dataclass(frozen=True, slots=True)
class Flag:
    """An option, with all its names."""

    names: tuple[str, ...]
    help: str
    value: Value = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Offer:
    """Words that may follow a program, a verb or a group of verbs on the command line."""

    path: str
    """Verbs so far, such as `/dead/list`. Empty for the program itself."""
    verbs: tuple[tuple[str, str], ...]
    """Name and summary of each verb that may follow."""
    flags: tuple[Flag, ...]
    arguments: tuple[str, ...]
    """Allowed values of the arguments."""
    files: bool
    """True if an argument may be the name of a file."""


def completion(
    shell: Annotated[Shell | None, typer.Argument(help="Whose script to print.")] = None,
) -> None:
    """Print the script with which a shell completes verbs, options and files."""
    if shell is None:  # optional only for this message: that of typer lists each shell on its own line
        raise fail(f"say for which shell: batch-dispatcher completion {'|'.join(get_args(Shell))}", 2)
    from dispatcher.cli import app

    program = typer.main.get_command(app)
    levels = [*_levels(program, typer.Context(program), "")]
    verbs = tuple(name for name, _ in levels[0].verbs)
    # `help` takes any words; offer the verbs.
    levels = [replace(level, arguments=verbs) if level.path == "/help" else level for level in levels]
    typer.echo({"bash": bash, "zsh": zsh, "fish": fish}[shell](levels))


def _levels(command: Any, ctx: Any, path: str) -> Iterator[Offer]:
    names = command.list_commands(ctx) if hasattr(command, "list_commands") else []
    inner = {name: command.get_command(ctx, name) for name in names}
    flags: list[Flag] = []
    words: list[str] = []
    files = False
    for each in command.get_params(ctx):
        kinds = _kinds(each)
        choices = tuple(
            str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)
        )
        is_file = Path in kinds
        if each.param_type_name == "argument":
            words += choices
            files = files or is_file
            continue
        value: Value = "file" if is_file else "choice" if choices else "other"
        spelled = (*each.opts, *each.secondary_opts)
        flags.append(Flag(spelled, _first_sentence(each.help), "" if each.is_flag else value, choices))
    told = tuple((name, _first_sentence(found.help)) for name, found in inner.items())
    yield Offer(path, told, tuple(flags), tuple(words), files)
    for name, found in inner.items():
        yield from _levels(found, typer.Context(found, parent=ctx, info_name=name), f"{path}/{name}")


def _kinds(parameter: Any) -> list[Any]:
    """Return the annotated type of a parameter, and the types inside if it is optional or a list."""
    annotation = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    return [annotation, *(() if get_origin(annotation) is Literal else get_args(annotation))]


def _first_sentence(text: str | None) -> str:
    # The last dot of several, as in "..", does not end a sentence.
    told = " ".join((text or "").split("\n\n")[0].split())
    return re.split(r"(?<=[^.])[.:;](?:\s|$)", told)[0]


# Shell code that finds the level: it follows the words as long as they are verbs. Options are skipped.
_FIND = """  local -a words_=({words})
  local at="" word
  for word in "${{words_[@]:1}}"; do
    case "$at/$word" in
      {paths}) at="$at/$word" ;;
    esac
  done"""


def _paths(levels: list[Offer]) -> str:
    return "|".join(level.path for level in levels if level.path) or "/"


def _values(levels: list[Offer], act: Callable[[Flag], str]) -> str:
    """Return the arms of the shell's `case` that complete the value of an option, by level and option."""
    arms = []
    for level in levels:
        for flag in level.flags:
            if flag.value:
                # The shell compares "<level> <previous word>": the value follows its option.
                shown = "|".join(f'"{level.path} {name}"' for name in flag.names)
                arms.append(f"    {shown}) {act(flag)}; return ;;")
    return "\n".join(arms)


def bash(levels: list[Offer]) -> str:
    """Return the script for bash, which is read with `source`."""

    def act(flag: Flag) -> str:
        if flag.value == "file":
            return 'compopt -o filenames; COMPREPLY=($(compgen -f -- "$cur"))'
        if flag.value == "choice":
            return f'COMPREPLY=($(compgen -W {shlex.quote(" ".join(flag.choices))} -- "$cur"))'
        return ":"

    find = _FIND.format(words='"${COMP_WORDS[@]:0:COMP_CWORD}"', paths=_paths(levels))
    there = []
    for level in levels:
        offered = [*(name for name, _ in level.verbs), *level.arguments]
        offered += [name for flag in level.flags for name in flag.names]
        more = '; compopt -o filenames; COMPREPLY+=($(compgen -f -- "$cur"))' if level.files else ""
        words = shlex.quote(" ".join(offered))
        there.append(f'    "{level.path}") COMPREPLY=($(compgen -W {words} -- "$cur")){more} ;;')
    return f"""# bash completion of {PROGRAM}
_batch_dispatcher() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}"
  COMPREPLY=()
{find}
  case "$at $prev" in
{_values(levels, act)}
  esac
  case "$at" in
{chr(10).join(there)}
  esac
}}
complete -F _batch_dispatcher {PROGRAM}"""


def zsh(levels: list[Offer]) -> str:
    """Return the script for zsh.

    It is read with `source`, or installed as `_batch-dispatcher` in a directory of $fpath.
    """

    def act(flag: Flag) -> str:
        if flag.value == "file":
            return "_files"
        return f"compadd -- {shlex.join(flag.choices)}" if flag.value == "choice" else "_message value"

    # `words` is set by zsh. Arrays of zsh start at 1, and the first word is the program.
    find = _FIND.format(words='"${(@)words[1,CURRENT-1]}"', paths=_paths(levels)).replace(
        '"${words_[@]:1}"', '"${(@)words_[2,-1]}"'
    )
    there = []
    for level in levels:
        offered = [f"{name}:{_escaped(told)}" for name, told in level.verbs]
        offered += [f"{name}:" for name in level.arguments]
        options = [f"{name}:{_escaped(flag.help)}" for flag in level.flags for name in flag.names]
        acts = [f"local -a verbs=({shlex.join(offered)})", "_describe verb verbs"] if offered else []
        acts += [f"local -a options_=({shlex.join(options)})", "_describe -o option options_"]
        acts += ["_files"] if level.files else []
        there.append(f'    "{level.path}") {"; ".join(acts)} ;;')
    return f"""#compdef {PROGRAM}
# zsh completion of {PROGRAM}
_batch_dispatcher() {{
{find}
  case "$at ${{words[CURRENT-1]}}" in
{_values(levels, act)}
  esac
  case "$at" in
{chr(10).join(there)}
  esac
}}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _batch_dispatcher "$@"
else compdef _batch_dispatcher {PROGRAM}; fi"""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace(":", "\\:")


def fish(levels: list[Offer]) -> str:
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
        at = f"complete -c {PROGRAM} -n {shlex.quote(f'__batch_dispatcher_at {shlex.quote(level.path)}')}"
        if not level.files:
            lines.append(f"{at} -f")  # fish offers files unless it is told not to
        lines += [f"{at} -a {name} -d {shlex.quote(told)}" for name, told in level.verbs]
        lines += [f"{at} -a {word}" for word in level.arguments]
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
            lines.append(f"{at} {names}{values} -d {shlex.quote(flag.help)}")
    return "\n".join(lines)
