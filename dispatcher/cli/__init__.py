"""The command line `batch-dispatcher`.

Each verb is a function in its own module, and the module is imported only when the verb is used.
"""

from __future__ import annotations

import importlib
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from dispatcher.cli.options import unfold_options
from dispatcher.cli.terminal import is_json_output, print_error
from dispatcher.features import import_modules


@dataclass(frozen=True, slots=True)
class Verb:
    """Entry of a verb in the list of all verbs."""

    group: str
    module: str
    """Module that has a function with the name of the verb, or a `typer.Typer` for several such as `dead`. A
    name without a dot is a module of dispatcher.cli."""
    summary: str
    """First paragraph of the help. The list of all verbs uses this copy because importing every verb takes
    half a second. A test compares it with the help."""

    @property
    def path(self) -> str:
        return self.module if "." in self.module else f"{__name__}.{self.module}"


VERBS = {
    "run": Verb("Run", "run", "Send requests from the queue into the idle capacity of the pool."),
    "init": Verb("Run", "init", "Write a commented configuration, from options or from a few questions."),
    "check": Verb("Run", "check", "Validate a configuration, print its settings, and try every connection."),
    "simulate": Verb(
        "Run", "simulate", "Try batch work on a pool in virtual time, before you install anything."
    ),
    "demo": Verb("Run", "demo", "Run a demonstration: a pool with realtime traffic, a queue, and a crash."),
    "submit": Verb("Submit", "submit", "Submit one request and print its result."),
    "result": Verb("Submit", "result", "Print the result of a request, or the results in a list."),
    "cancel": Verb("Submit", "cancel", "Cancel requests, also those that run. The result is CANCELLED."),
    "status": Verb(
        "Inspect", "status", "Show the queue, and the gate, readings, rate and replicas of a dispatcher."
    ),
    "explain": Verb(
        "Inspect", "status", "Explain in one paragraph why the dispatcher sends as much as it does."
    ),
    "top": Verb(
        "Inspect", "status", "Watch the pool live: how its capacity is used, and how fast requests end."
    ),
    "list": Verb(
        "Inspect",
        "list_requests",
        "List requests that run, wait or are dead, or the ones that are sent next.",
    ),
    "describe": Verb(
        "Inspect", "describe", "Describe one request: its state, its attempts, and why it is not sent yet."
    ),
    "pause": Verb(
        "Operate", "pause", "Stop all dispatchers of the queue from sending new requests, until `resume`."
    ),
    "resume": Verb("Operate", "pause", "Let the dispatchers send again."),
    "dead": Verb("Operate", "dead", "Dead requests: put them back into the queue, or delete them."),
    "queue": Verb("Operate", "queue", "The queue as a whole."),
}
"""All verbs by name, in the order in which the help lists them.

The docstring of the function is the help of the verb. The examples below it come from `EXAMPLES` of the
module, by `verb` or `group verb`. Keep heavy imports inside the function.

Each feature declares its verbs in its module `verbs`, as group, module of its folder, and summary. They come
last in their group, or replace a verb of the same name. These modules are imported with each call of the
program, so they import nothing.
"""
for _module in import_modules("verbs").values():
    for _name, (_group, _file, _summary) in _module.VERBS.items():
        VERBS[_name] = Verb(_group, f"{_module.__package__}.{_file}", _summary)
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""Base class of the errors for wrong usage (`UsageError`), which typer does not export."""


class VerbGroup(TyperGroup):
    """Group of all verbs that imports only the module of the verb that is used.

    The list of all verbs, in the help and for completion, imports no module: it is made of `VERBS`.
    """

    _is_listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return [*VERBS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        if self._is_listing:
            verb = VERBS[cmd_name]
            return TyperCommand(cmd_name, help=verb.summary, rich_help_panel=verb.group)
        module = importlib.import_module(VERBS[cmd_name].path)
        found = getattr(module, cmd_name)
        if not isinstance(found, typer.Typer):
            family = typer.Typer(add_completion=False)
            family.command(cmd_name)(found)
            # A Typer with one command is built as that command, without a group.
            found = family
        for info in found.registered_commands:
            info.callback = info.callback and unfold_options(info.callback)
        command: Any = typer.main.get_command(found)
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
        with self._list_verbs():
            super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        with self._list_verbs():
            return super().shell_complete(ctx, incomplete)

    @contextmanager
    def _list_verbs(self) -> Iterator[None]:
        """Let `get_command` return stubs with the summary inside the block."""
        self._is_listing = True
        try:
            yield
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
        from dispatcher import __version__

        typer.echo(f"batch-dispatcher {__version__} (Python {platform.python_version()})")
        raise typer.Exit


app = typer.Typer(
    name="batch-dispatcher",
    cls=VerbGroup,
    no_args_is_help=True,
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
    """Fills the idle capacity of LLM inference pools with batch requests.

    Without --config a verb uses $BATCH_DISPATCHER_CONFIG, ./config.yaml, or
    ~/.config/batch-dispatcher/config.yaml.

    Exit codes: 0 done, 1 failed, 2 wrong usage or configuration.
    """


def main() -> None:
    """Run the `batch-dispatcher` command."""
    app(prog_name="batch-dispatcher")
