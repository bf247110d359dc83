"""The command line: each verb is a function of its own module, imported only when the verb is used."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import typer
from typer.core import TyperGroup

VERBS = {
    "run": "dispatcher.cli.run",
    "check": "dispatcher.cli.check",
    "submit": "dispatcher.cli.submit",
    "result": "dispatcher.cli.result",
    "describe": "dispatcher.cli.describe",
    "list": "dispatcher.cli.listing",
    "peek": "dispatcher.cli.listing",
    "results": "dispatcher.cli.result",
    "status": "dispatcher.cli.status",
    "explain": "dispatcher.cli.status",
    "pause": "dispatcher.cli.pause",
    "resume": "dispatcher.cli.pause",
    "cancel": "dispatcher.cli.cancel",
    "dead": "dispatcher.cli.dead",
    "queue": "dispatcher.cli.queue",
    "simulate": "dispatcher.cli.simulate",
    "demo": "dispatcher.cli.demo",
    "version": "dispatcher.cli.version",
}
"""Verb → the module that has a function of that name, or a `typer.Typer` for a family (`dead list|show|…`).

In the order of the help. The function's docstring is the verb's help; keep heavy imports inside the function.
"""


class _Verbs(TyperGroup):
    """Finds commands by name, without importing the others."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [verb for verb, module in VERBS.items() if importlib.util.find_spec(module) is not None]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        verb = getattr(importlib.import_module(VERBS[cmd_name]), cmd_name)
        if not isinstance(verb, typer.Typer):
            family = typer.Typer(add_completion=False)
            family.command(cmd_name)(verb)
            verb = family
        command = typer.main.get_command(verb)
        command.name = cmd_name
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        names: Any = dict.fromkeys(self.list_commands(ctx))
        self.commands = names  # for "did you mean"
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="batch-dispatcher",
    cls=_Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # its tracebacks show local variables: secrets among them
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root() -> None:
    """Fills the idle slack of LLM inference pools with batch requests.

    Exit codes: 0 done, 1 failed, 2 wrong usage or configuration.
    """


def main() -> None:
    """The `batch-dispatcher` command."""
    app(prog_name="batch-dispatcher")
