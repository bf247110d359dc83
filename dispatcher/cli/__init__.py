"""The command line: each verb is a function of its own module, imported only when the verb is used."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from dispatcher.cli.options import unfolded
from dispatcher.cli.terminal import complain, for_programs

VERBS = {
    "run": "dispatcher.cli.run",
    "init": "dispatcher.cli.init",
    "check": "dispatcher.cli.check",
    "submit": "dispatcher.cli.submit",
    "result": "dispatcher.cli.result",
    "describe": "dispatcher.cli.describe",
    "list": "dispatcher.cli.list_requests",
    "peek": "dispatcher.cli.list_requests",
    "results": "dispatcher.cli.result",
    "status": "dispatcher.cli.status",
    "explain": "dispatcher.cli.status",
    "top": "dispatcher.cli.top",
    "pause": "dispatcher.cli.pause",
    "resume": "dispatcher.cli.pause",
    "cancel": "dispatcher.cli.cancel",
    "dead": "dispatcher.cli.dead",
    "sequences": "dispatcher.cli.sequences",
    "streams": "dispatcher.cli.streams",
    "models": "dispatcher.cli.models",
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
SUMMARIES = {
    "run": "Fill the pool's slack from the queue, until SIGTERM.",
    "init": "Write a commented configuration, of options or, on a terminal, of a few questions.",
    "check": "Validate a configuration, print what it sets, then try every connection and say what each "
    "found.",
    "submit": "Submit one request, wait for its result and print it; or a whole batch file.",
    "result": "Print the result of a request that `submit` sent, or that lies in the queue's default list.",
    "describe": "Say where a request lies, its place in line, its tries, why it is not sent; or that it was "
    "answered.",
    "list": "List requests: those that run, those in line in their order, those that wait for a retry, the "
    "dead.",
    "peek": "Show what is sent next, in its order, and what holds it back.",
    "results": "Show what lies in a result list, the oldest first; as JSON lines with --json, and when they "
    "are taken.",
    "status": "Show the queue, and of the dispatcher that answers its gate, readings, rate and replicas.",
    "explain": "Say in one paragraph why the dispatcher sends what it sends.",
    "top": "Watch the pool: who has its capacity, what waits, how fast it goes and when it is done.",
    "pause": "Have all dispatchers of the queue send nothing new until `resume`. What runs goes on.",
    "resume": "Let the dispatchers send again.",
    "cancel": "Cancel requests, or a sequence: their result is CANCELLED; in flight the connection is "
    "closed.",
    "dead": "Requests that were put aside, and why.",
    "sequences": "Requests that run in order, one at a time, by sequence.",
    "streams": "Streams of the Python client that have a name.",
    "models": "Models: which the pool serves, who waits for which.",
    "queue": "The queue as a whole.",
    "simulate": "Try batch work on a pool in virtual time, before you install anything.",
    "demo": "Show the dispatcher at work: a pool with realtime traffic, a queue, a crash, and a verdict.",
    "completion": "Print the script by which a shell completes verbs, options and files.",
    "help": "Show the help of a verb.",
    "version": "Print the version of the dispatcher and of the Python it runs on.",
}
"""The first paragraph of each verb's help, for the list of all: to import every verb takes half a second."""
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""What wrong usage raises; typer has no name for it."""


class _Verbs(TyperGroup):
    """Finds commands by name, without importing the others; and for the list of all none of them."""

    _summing_up = False

    def list_commands(self, ctx: Any) -> list[str]:
        return [verb for verb, module in VERBS.items() if importlib.util.find_spec(module) is not None]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        if self._summing_up:
            return TyperCommand(cmd_name, help=SUMMARIES[cmd_name])
        module = importlib.import_module(VERBS[cmd_name])
        verb = getattr(module, cmd_name)
        if not isinstance(verb, typer.Typer):
            family = typer.Typer(add_completion=False)
            family.command(cmd_name)(verb)
            verb = family
        for info in verb.registered_commands:
            info.callback = info.callback and unfolded(info.callback)
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

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._summing_up = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._summing_up = False

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
