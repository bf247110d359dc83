"""`batch-dispatcher submit`: one request, and its result."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from dispatcher.cli.screen import complain, say
from dispatcher.cli.target import Config, QueueName, QueueUrl, Within, find
from dispatcher.core.plain import plain

Pairs = Annotated[list[str] | None, typer.Option(help="name=value; may be repeated.")]


def submit(
    payload: Annotated[str, typer.Argument(help="The request body, a JSON object; - reads standard input.")],
    config: Config = None,
    queue_url: QueueUrl = "",
    queue: QueueName = "",
    request_id: Annotated[str, typer.Option("--id", help="Default: a random one.")] = "",
    endpoint: Annotated[str, typer.Option(help="The gateway's path; default: gateway.path.")] = "",
    deadline: Within = 3600.0,
    priority: Annotated[int | None, typer.Option(min=0, max=9, help="0 is served first.")] = None,
    header: Pairs = None,
    metadata: Pairs = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Await and print the result.")] = True,
    json_output: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")] = False,
) -> None:
    """Submit one request, wait for its result and print it.

    Exit code 1: the result is an error, or none came.
    """
    import asyncio

    import msgspec

    from dispatcher.client import NoResultError, open_client
    from dispatcher.core.request import Result
    from dispatcher.ports import QueueUnavailableError

    target = find(config, queue_url, queue)
    body = sys.stdin.buffer.read() if payload == "-" else payload.encode()
    headers, attributes = _pairs("--header", header), _pairs("--metadata", metadata)

    async def go() -> tuple[str, Result | None]:
        async with open_client(target.url, target.names) as client:
            ticket = await client.submit(
                body,
                id=request_id,
                deadline_s=deadline,
                priority=priority,
                endpoint=endpoint,
                headers=headers,
                metadata=attributes,
                results=None if wait else "",
            )
            return ticket.id, await client.result(ticket) if wait else None

    try:
        submitted, result = asyncio.run(go())
    except ValueError as error:
        complain(str(error))
        raise typer.Exit(2) from error
    except (NoResultError, QueueUnavailableError) as error:
        complain(str(error))
        raise typer.Exit(1) from error
    if result is None:
        say(submitted)
        return
    told = msgspec.json.encode(result).decode() if json_output else result.payload
    # A program wants it byte for byte, a terminal without what would steer it.
    typer.echo(plain(told, keep="\n\t") if sys.stdout.isatty() else told)
    if result.status_code is None or result.status_code >= 400 or result.error_code is not None:
        why = result.error_code or f"status {result.status_code}"
        complain(f"{submitted}: {why}: {result.error_message or ''}".rstrip(": "), fg=None)
        raise typer.Exit(1)


def _pairs(option: str, given: list[str] | None) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in given or ()]
    for name, equals, _ in pairs:
        if not name or not equals:
            complain(f"{option}: give name=value")
            raise typer.Exit(2)
    return {name: value for name, _, value in pairs}
