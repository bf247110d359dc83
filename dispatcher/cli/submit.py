"""`batch-dispatcher submit`: one request, and its result."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from dispatcher.cli.screen import complain, say
from dispatcher.cli.submit_file import (
    BodyTemplate,
    Errors,
    File,
    Group,
    Ordered,
    Output,
    SkipBad,
    TemplateField,
    file_options,
    file_paths,
    submit_file,
)
from dispatcher.cli.target import Config, QueueName, QueueUrl, WithinOrNone, find
from dispatcher.core.plain import plain

if TYPE_CHECKING:
    from dispatcher.client import Result

DEADLINE_S = 3600.0
FILE_DEADLINE_S = 86_400.0
Pairs = Annotated[list[str] | None, typer.Option(help="name=value; may be repeated.")]


def submit(
    payload: Annotated[
        str, typer.Argument(help="The request body, a JSON object; - reads standard input.")
    ] = "",
    file: File = None,
    output: Output = None,
    errors: Errors = None,
    skip_bad: SkipBad = False,
    ordered: Ordered = False,
    group: Group = "prefix",
    template: BodyTemplate = None,
    field: TemplateField = "",
    config: Config = None,
    queue_url: QueueUrl = "",
    queue: QueueName = "",
    request_id: Annotated[str, typer.Option("--id", help="Default: a random one.")] = "",
    endpoint: Annotated[str, typer.Option(help="The gateway's path; default: gateway.path.")] = "",
    deadline: WithinOrNone = None,
    priority: Annotated[int | None, typer.Option(min=0, max=9, help="0 is served first.")] = None,
    header: Pairs = None,
    metadata: Pairs = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Await and print the result.")] = True,
    json_output: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")] = False,
) -> None:
    """Submit one request, wait for its result and print it; or a whole batch file.

    A batch file that was broken off goes on by the same command. Exit code 1: the result is an error, or none
    came; of a file, some lines failed.
    """
    import asyncio

    import msgspec

    from dispatcher.client import BatchClient, BatchError

    target = find(config, queue_url, queue)
    if file is not None:
        if payload or request_id or not wait:
            complain("--file: give it no request, no --id and no --no-wait")
            raise typer.Exit(2)
        paths = file_paths(file, output, errors)
        options = file_options(
            target,
            deadline=FILE_DEADLINE_S if deadline is None else deadline,
            priority=priority,
            headers=_pairs("--header", header),
            metadata=_pairs("--metadata", metadata),
            endpoint=endpoint,
            template=template,
            field=field,
            group=group,
            ordered=ordered,
            skip_bad=skip_bad,
        )
        submit_file(target, paths, options, as_json=json_output)
    if not payload:
        complain("give a request, or --file")
        raise typer.Exit(2)
    body = sys.stdin.buffer.read() if payload == "-" else payload.encode()
    headers, attributes = _pairs("--header", header), _pairs("--metadata", metadata)

    async def go() -> tuple[str, Result | None]:
        names = target.names
        async with BatchClient(
            target.url, queue=names.queue, results=names.results, retry_for=0.0, cancel_on_close=False
        ) as client:
            handle = await client.enqueue(
                body,
                id=request_id,
                deadline=DEADLINE_S if deadline is None else deadline,
                priority=priority,
                path=endpoint,
                headers=headers,
                metadata=attributes,
                results=None if wait else "",
            )
            return handle.id, await client.result(handle) if wait else None

    try:
        submitted, result = asyncio.run(go())
    except ValueError as error:
        complain(str(error))
        raise typer.Exit(2) from error
    except BatchError as error:
        complain(str(error))
        raise typer.Exit(1) from error
    if result is None:
        say(submitted)
        return
    told = msgspec.json.encode(_fields(result)).decode() if json_output else result.text
    # A program wants it byte for byte, a terminal without what would steer it.
    typer.echo(plain(told, keep="\n\t") if sys.stdout.isatty() else told)
    if not result.ok:
        why = result.code or f"status {result.status}"
        complain(f"{submitted}: {why}: {result.message}".rstrip(": "), fg=None)
        raise typer.Exit(1)


def _fields(result: Result) -> dict[str, str | int | None]:
    """As the queue contract has a result, without its token."""
    fields = {
        "id": result.id,
        "payload": result.text,
        "status_code": result.status,
        "error_code": result.code,
        "error_message": result.message,
        "payload_note": result.note,
    }
    return {name: value for name, value in fields.items() if value or name in ("id", "payload")}


def _pairs(option: str, given: list[str] | None) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in given or ()]
    for name, equals, _ in pairs:
        if not name or not equals:
            complain(f"{option}: give name=value")
            raise typer.Exit(2)
    return {name: value for name, _, value in pairs}
