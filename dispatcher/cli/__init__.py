"""The command line `batch-dispatcher`.

Each verb is a function in its own module, and the module is imported only when the verb is used.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from dispatcher.cli.options import unfold_options
from dispatcher.cli.terminal import is_json_output, print_error

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
"""Module of each verb, in the order in which the help lists the verbs.

The module has a function with the name of the verb, or a `typer.Typer` for a group of verbs such as `dead`.
The docstring of the function is the help of the verb. The examples below it come from `EXAMPLES` of the
module, by `verb` or `group verb`. Keep heavy imports inside the function.
"""
SUMMARIES = {
    "run": "Send requests from the queue into the free capacity of the pool, until SIGTERM.",
    "init": "Write a commented configuration, from options or, on a terminal, from a few questions.",
    "check": "Validate a configuration, print its settings, then try every connection and report what was "
    "found.",
    "submit": "Submit one request, wait for its result and print it, or submit a whole batch file.",
    "result": "Print the result of a request, from the list of its id or from the default list of the queue.",
    "describe": "Describe one request: its state, its place in the queue, its attempts, and why it is not "
    "sent yet.",
    "list": "List requests that run, that are in the queue, that wait for a retry, or that are dead.",
    "peek": "Show the next requests, in order, and what holds them back.",
    "results": "Show a result list, the oldest result first: as a table, or as JSON lines with --json or "
    "--take.",
    "status": "Show the queue, and the gate, readings, rate and replicas of the dispatcher that answers.",
    "explain": "Explain in one paragraph why the dispatcher sends as much as it does.",
    "top": "Watch the pool live: how its capacity is used, what waits, and how fast requests are done.",
    "pause": "Stop all dispatchers of the queue from sending new requests, until `resume`. Requests that run "
    "go on.",
    "resume": "Let the dispatchers send again.",
    "cancel": "Cancel requests or a sequence. The result is CANCELLED; connections in flight are closed.",
    "dead": "Dead requests: requests in the dead-letter set, and why they are there.",
    "sequences": "Sequences: requests that run in order, one at a time.",
    "streams": "Named streams of the Python client.",
    "models": "Models: which ones the pool serves, and which requests wait for them.",
    "queue": "The queue as a whole.",
    "simulate": "Try batch work on a pool in virtual time, before you install anything.",
    "demo": "Run a demonstration: a pool with realtime traffic, a queue, a crash, and a verdict.",
    "completion": "Print the script with which a shell completes verbs, options and files.",
    "help": "Show the help of a verb.",
    "version": "Print the version of the dispatcher and of the Python it runs on.",
}
"""First paragraph of the help of each verb, for the list of all verbs.

The list uses these copies because importing every verb takes half a second. A test compares them with the
help.
"""
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""Base class of the errors for wrong usage (`UsageError`), which typer does not export."""


class VerbGroup(TyperGroup):
    """Group of all verbs that imports only the module of the verb that is used.

    The list of all verbs imports no module: it is made of `SUMMARIES`.
    """

    _is_listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return [verb for verb, module in VERBS.items() if importlib.util.find_spec(module) is not None]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        if self._is_listing:
            return TyperCommand(cmd_name, help=SUMMARIES[cmd_name])
        module = importlib.import_module(VERBS[cmd_name])
        verb = getattr(module, cmd_name)
        if not isinstance(verb, typer.Typer):
            family = typer.Typer(add_completion=False)
            family.command(cmd_name)(verb)
            # A Typer with one command is built as that command, without a group.
            verb = family
        for info in verb.registered_commands:
            info.callback = info.callback and unfold_options(info.callback)
        command: Any = typer.main.get_command(verb)
        command.name = cmd_name
        examples = getattr(module, "EXAMPLES", {})
        for name, subcommand in ((cmd_name, command), *_list_subcommands(command, cmd_name)):
            # The line breaks of a docstring mean nothing on a terminal: keep the paragraphs, join the lines.
            subcommand.help = "\n\n".join(
                " ".join(part.split()) for part in (subcommand.help or "").split("\n\n")
            )
            for option in (*subcommand.params, subcommand.get_help_option(ctx)):
                if getattr(option, "is_flag", False):
                    option.metavar = ""  # "<bool>" says nothing, and its column would narrow the help text
            if name in examples:
                subcommand.epilog = "Examples:\n\n" + "\n".join(examples[name])
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        # get_command() returns stubs with the summary while this is set.
        self._is_listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._is_listing = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Set before anything is parsed, so that the error of a wrong option is printed as JSON, too.
        # A "--json" behind "--" is an argument, not an option.
        verb_args = args[: args.index("--")] if "--" in args else args
        is_json_output.set("--json" in verb_args)
        with _print_usage_errors_as_json():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _print_usage_errors_as_json():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        names: Any = dict.fromkeys(self.list_commands(ctx))
        self.commands = names  # names only: enough for the suggestion "did you mean"
        return super().resolve_command(ctx, args)


def _list_subcommands(family: Any, name: str) -> list[tuple[str, Any]]:
    return [
        (f"{name} {inner_name}", subcommand)
        for inner_name, subcommand in getattr(family, "commands", {}).items()
    ]


@contextmanager
def _print_usage_errors_as_json() -> Iterator[None]:
    """Print wrong usage as JSON if the command line has --json."""
    try:
        yield
    except USAGE_ERROR as error:
        if not is_json_output.get():
            raise  # typer prints it for people
        usage_error: Any = error
        print_error(usage_error.format_message())
        raise typer.Exit(2) from error


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from dispatcher.cli.version import version

        version()
        raise typer.Exit


app = typer.Typer(
    name="batch-dispatcher",
    cls=VerbGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # its tracebacks show local variables: secrets among them
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _define_global_options(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Fills the free capacity of LLM inference pools with batch requests.

    Without --config a verb uses $BATCH_DISPATCHER_CONFIG, ./config.yaml, or
    ~/.config/batch-dispatcher/config.yaml.

    Exit codes: 0 done, 1 failed, 2 wrong usage or configuration.
    """


def main() -> None:
    """Run the `batch-dispatcher` command."""
    app(prog_name="batch-dispatcher")
