"""`batch-dispatcher dead list|show|requeue|purge`: requests that were put aside for an operator."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dispatcher.cli.screen import complain, say
from dispatcher.cli.target import Config, Json, QueueName, QueueUrl, Within, ask, find

if TYPE_CHECKING:
    from dispatcher.ports import Dead

dead = typer.Typer(add_completion=False, no_args_is_help=True, help="Requests that were put aside, and why.")

Entry = Annotated[int, typer.Argument(help="The number that `dead list` shows.")]
Entries = Annotated[list[int] | None, typer.Argument(help="The numbers that `dead list` shows.")]
Everything = Annotated[bool, typer.Option("--all", help="All of them.")]


@dead.command("list")
def list_(
    config: Config = None,
    queue_url: QueueUrl = "",
    queue: QueueName = "",
    most: Annotated[int, typer.Option(min=1, help="How many.")] = 100,
    after: Annotated[int, typer.Option(help="Only those with a higher number.")] = 0,
    json_output: Json = False,
) -> None:
    """List the dead: number, time, id, reason."""
    found = ask(find(config, queue_url, queue), lambda desk: desk.dead_list(most, after))
    if json_output:
        typer.echo(json.dumps([_shown(one) for one in found]))
        return
    for one in found:
        shown = _shown(one)
        say(f"{one.entry}  {shown['died_at']}  {shown['id'] or '(unreadable)'}  {one.reason}")


@dead.command()
def show(entry: Entry, config: Config = None, queue_url: QueueUrl = "", queue: QueueName = "") -> None:
    """Show one, whole, as JSON. Exit code 1: there is none of that number."""
    found = ask(find(config, queue_url, queue), lambda desk: desk.dead_list(1, entry - 1))
    if not found or found[0].entry != entry:
        complain(f"{entry}: not among the dead")
        raise typer.Exit(1)
    member = found[0].member.decode(errors="replace")
    typer.echo(json.dumps({**_shown(found[0]), "member": member}, indent=2))


@dead.command()
def requeue(
    entries: Entries = None,
    everything: Everything = False,
    deadline: Within = 3600.0,
    config: Config = None,
    queue_url: QueueUrl = "",
    queue: QueueName = "",
) -> None:
    """Accept them anew with a new deadline. Each has had its error result: this may give a second one.

    Exit code 1: some could not be requeued; an unreadable member stays dead.
    """
    wanted = _wanted(entries, everything)

    async def act(desk: Any) -> tuple[int, int]:
        named = wanted if wanted is not None else [one.entry async for one in _each(desk)]
        return await desk.dead_requeue(named, int(time.time() + deadline)), len(named)

    done, asked = ask(find(config, queue_url, queue), act)
    say(f"{done} of {asked} are pending again; a second result may come for each")
    if done < asked:
        raise typer.Exit(1)


@dead.command()
def purge(
    entries: Entries = None,
    everything: Everything = False,
    config: Config = None,
    queue_url: QueueUrl = "",
    queue: QueueName = "",
) -> None:
    """Forget them."""
    wanted = _wanted(entries, everything)
    done = ask(find(config, queue_url, queue), lambda desk: desk.dead_purge(wanted))
    say(f"{done} forgotten")


def _wanted(entries: list[int] | None, everything: bool) -> list[int] | None:
    """The entries that were named; None: all."""
    if bool(entries) == everything:
        complain("give numbers, or --all")
        raise typer.Exit(2)
    return entries or None


async def _each(desk: Any) -> Any:
    after = 0
    while found := await desk.dead_list(1000, after):
        for one in found:
            yield one
        after = found[-1].entry


def _shown(one: Dead) -> dict[str, Any]:
    from dispatcher.core.request import parse

    return {
        "entry": one.entry,
        "id": parse(one.member).id,
        "reason": one.reason,
        "died_at": datetime.fromtimestamp(one.died_at, UTC).isoformat(timespec="seconds"),
        "deliveries": one.deliveries,
        "attempts": one.attempts,
        "refusals": one.refusals,
    }
