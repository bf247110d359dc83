"""`batch-dispatcher models list|show|record`: which the pool serves, and which requests wait for theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dispatcher.cli.record import EXAMPLE, record
from dispatcher.cli.running import running
from dispatcher.cli.screen import answer, complain, fail, say, table
from dispatcher.cli.status import AdminUrl, meant
from dispatcher.cli.target import Config, Json, PoolName, QueueName, QueueUrl, ask, find, warn_of
from dispatcher.core.duration import told

EXAMPLES = {
    "models list": ["batch-dispatcher models list", "batch-dispatcher models list --waiting"],
    "models show": ["batch-dispatcher models show qwen"],
    "models record": EXAMPLE,
}
models = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Models: which the pool serves, who waits for which."
)

models.command()(record)

Name = Annotated[str, typer.Argument(metavar="MODEL", help="As requests name it.")]
Models = Sequence[Mapping[str, Any]]


@models.command("list")
def list_(
    waiting: Annotated[bool, typer.Option("--waiting", help="Only those that requests wait for.")] = False,
    config: Config = None,
    queue_url: QueueUrl = "",
    queue: QueueName = "",
    pool: PoolName = "",
    admin_url: AdminUrl = "",
    json_output: Json = False,
) -> None:
    """List the models that the pool serves, served, or should serve, as the dispatcher that answers sees it.

    Where none answers, those that requests wait for, as the queue tells. Exit code 1: neither does.
    """
    found, watched = _found(config, queue_url, queue, pool, admin_url)
    chosen = [each for each in found if each["waiting"] or not waiting]
    if json_output:
        answer(chosen)
    elif chosen:
        say(
            *table(["MODEL", "STATE", "ENDPOINTS", "WAITING", "FOR", "NOTE"], [_row(each) for each in chosen])
        )
    elif waiting or not watched:
        complain("no request waits for its model", fg=None)
    else:
        complain("no model is known: `models` names none, and none is served", fg=None)


@models.command()
def show(
    name: Name,
    config: Config = None,
    queue_url: QueueUrl = "",
    queue: QueueName = "",
    pool: PoolName = "",
    admin_url: AdminUrl = "",
    json_output: Json = False,
) -> None:
    """Show one: its state, where it is served, how many requests wait for it.

    Exit code 1: nothing is known of it.
    """
    found, _ = _found(config, queue_url, queue, pool, admin_url)
    for each in found:
        if each["name"] == name:
            if json_output:
                answer(each)
            else:
                say(name, *(f"  {field:<11} {value}" for field, value in _details(each)))
            return
    names = ", ".join(str(each["name"]) for each in found[:10])
    raise fail(f"{name}: no model that is known here{f'; there are {names}' if names else ''}")


def _found(config: Path | None, queue_url: str, queue: str, pool: str, admin_url: str) -> tuple[Models, bool]:
    """The models, and whether a dispatcher that watches them has told."""
    place, address = meant(config, queue_url, queue, pool, admin_url)
    warn_of(place)
    dispatcher, problem = asyncio.run(running(address)) if address else (None, "nothing says where one is")
    if dispatcher is not None and dispatcher.get("models"):
        return dispatcher["models"], True
    awaited = ask(find(config, queue_url, queue, pool), lambda desk: desk.awaited())
    if dispatcher is None:
        complain(f"no dispatcher tells which are served: {problem}", fg=None)
    return [
        _unwatched(name, count) for name, count in sorted(awaited.items(), key=lambda each: -each[1])
    ], False


def _unwatched(name: str, waiting: int) -> Mapping[str, Any]:
    """What the queue alone tells."""
    unknown = dict.fromkeys(("serving", "endpoints", "unread", "since_s", "named", "denied"))
    return {"name": name, "state": "unknown", **unknown, "waiting": waiting, "sentence": "nobody watches it"}


def _row(each: Mapping[str, Any]) -> Sequence[str]:
    return [
        str(each["name"]),
        str(each["state"]),
        _endpoints(each),
        f"{each['waiting']:,}",
        "" if each["since_s"] is None else told(each["since_s"]),
        str(each["sentence"]),
    ]


def _endpoints(each: Mapping[str, Any]) -> str:
    return "" if each["serving"] is None else f"{each['serving']} of {each['endpoints']}"


def _details(each: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [("state", f"{each['state']}: {each['sentence']}")]
    if each["serving"] is not None:
        unread = f", {each['unread']} cannot be read" if each["unread"] else ""
        rows.append(("endpoints", f"{_endpoints(each)} serve it{unread}"))
        rows.append(("since", f"{told(each['since_s'])}"))
        rows.append(("named", "in the settings" if each["named"] else "no: it was served before"))
    return [*rows, ("waiting", f"{each['waiting']:,}")]
