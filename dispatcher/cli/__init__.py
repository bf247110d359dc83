"""The command line: each verb is a function of its own module, imported only when the verb is used."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dispatcher.cli.screen import complain, for_programs

VERBS = {
    "run": "dispatcher.cli.run",
    "init": "dispatcher.cli.init",
    "check": "dispatcher.cli.check",
    "submit": "dispatcher.cli.submit",
    "result": "dispatcher.cli.result",
    "describe": "dispatcher.cli.describe",
    "list": "dispatcher.cli.listing",
    "peek": "dispatcher.cli.listing",
    "results": "dispatcher.cli.result",
    "status": "dispatcher.cli.status",
    "explain": "dispatcher.cli.status",
    "top": "dispatcher.cli.top",
    "pause": "dispatcher.cli.pause",
    "resume": "dispatcher.cli.pause",
    "cancel": "dispatcher.cli.cancel",
    "dead": "dispatcher.cli.dead",
    "queue": "dispatcher.cli.queue",
    "simulate": "dispatcher.cli.simulate",
    "demo": "dispatcher.cli.demo",
    "completion": "dispatcher.cli.completion",
    "help": "dispatcher.cli.help",
    "version": "dispatcher.cli.version",
}
"""Verb → the module that has a function of that name, or a `typer.Typer` for a family (`dead list|show|…`).

In the order of the help. The function's docstring is the verb's help, and the `EXAMPLES` of its module, by
`verb` or `family verb`, are shown below it; keep heavy imports inside the function.
"""
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""What wrong usage raises; typer has no name for it."""


class _Verbs(TyperGroup):
    """Finds commands by name, without importing the others."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [verb for verb, module in VERBS.items() if importlib.util.find_spec(module) is not None]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(VERBS[cmd_name])
        verb = getattr(module, cmd_name)
        if not isinstance(verb, typer.Typer):
            family = typer.Typer(add_completion=False)
            family.command(cmd_name)(verb)
            verb = family
        command: Any = typer.main.get_command(verb)
        command.name = cmd_name
        examples = getattr(module, "EXAMPLES", {})
        for each, found in ((cmd_name, command), *_inner(command, cmd_name)):
            # Where a docstring breaks its lines is nothing to a terminal.
            found.help = "\n\n".join(" ".join(part.split()) for part in (found.help or "").split("\n\n"))
            for option in (*found.params, found.get_help_option(ctx)):
                if getattr(option, "is_flag", False):
                    option.metavar = ""  # "<bool>" says nothing, and its column takes the help's room
            if each in examples:
                found.epilog = "Examples:\n\n" + "\n".join(examples[each])
        return command

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = args[: args.index("--")] if "--" in args else args
        for_programs.set("--json" in given)
        with _wrong_usage_as_json():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _wrong_usage_as_json():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        names: Any = dict.fromkeys(self.list_commands(ctx))
        self.commands = names  # for "did you mean"
        return super().resolve_command(ctx, args)


def _inner(family: Any, name: str) -> list[tuple[str, Any]]:
    return [(f"{name} {each}", found) for each, found in getattr(family, "commands", {}).items()]


@contextmanager
def _wrong_usage_as_json() -> Iterator[None]:
    """With --json wrong usage is told to a program, too."""
    try:
        yield
    except USAGE_ERROR as error:
        if not for_programs.get():
            raise
        told: Any = error
        complain(told.format_message())
        raise typer.Exit(2) from error


def _version(wanted: bool) -> None:
    if wanted:
        from dispatcher.cli.version import version

        version()
        raise typer.Exit


app = typer.Typer(
    name="batch-dispatcher",
    cls=_Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # its tracebacks show local variables: secrets among them
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Fills the idle slack of LLM inference pools with batch requests.

    Without --config a verb takes $BATCH_DISPATCHER_CONFIG, ./config.yaml, or
    ~/.config/batch-dispatcher/config.yaml.

    Exit codes: 0 done, 1 failed, 2 wrong usage or configuration.
    """


def main() -> None:
    """The `batch-dispatcher` command."""
    app(prog_name="batch-dispatcher")
