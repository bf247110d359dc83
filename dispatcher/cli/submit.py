"""`batch-dispatcher submit`: one request, and its result."""

from __future__ import annotations

import secrets
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dispatcher.cli.result import awaited, print_result, still_queued
from dispatcher.cli.screen import complain, say
from dispatcher.cli.sought import answers
from dispatcher.cli.target import Config, Labels, QueueName, QueueUrl, Within, ask, find, pairs_of
from dispatcher.core.patterns import any_fits

if TYPE_CHECKING:
    from dispatcher.core.request import Result
    from dispatcher.ports import Submission
    from dispatcher.queue.keys import Names
    from dispatcher.queue.redis.desk import RedisDesk

Pairs = Annotated[list[str] | None, typer.Option(help="name=value; may be repeated.")]
GRACE_S = 10.0
"""Behind its deadline, by when a dispatcher has answered if there is one."""


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
    label: Labels = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Await and print the result.")] = True,
    json_output: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")] = False,
) -> None:
    """Submit one request, wait for its result and print it; its id comes first, on standard error.

    The result is found again by `result ID`. Exit code 1: it is an error, or none came.
    """
    target = find(config, queue_url, queue)
    if endpoint and target.settings and not any_fits(target.settings.gateway.allowed_paths, endpoint):
        complain(f"--endpoint {endpoint}: not among gateway.allowed_paths, so no dispatcher would send it")
        raise typer.Exit(2)
    name = request_id or f"r-{secrets.token_hex(8)}"
    try:
        sent = _submission(
            target.names,
            name,
            sys.stdin.buffer.read() if payload == "-" else payload.encode(errors="surrogateescape"),
            int(time.time() + deadline),
            priority=priority,
            results=target.names.answers(name) if wait else "",
            endpoint=endpoint,
            headers=dict(pairs_of("--header", header)),
            metadata=dict(pairs_of("--metadata", metadata)),
            labels=dict(pairs_of("--label", label)),
        )
    except ValueError as error:
        complain(str(error))
        raise typer.Exit(2) from error
    submitted = False

    async def act(desk: RedisDesk) -> Result | None:
        nonlocal submitted
        await desk.submit([sent])
        submitted = True
        if not wait:
            return None
        complain(f"{name} submitted", fg=None)
        return await awaited(target, desk, name, lambda: _answer(desk, sent), deadline + GRACE_S)

    try:
        result = ask(target, act)
    except KeyboardInterrupt:
        if submitted:
            raise still_queued(name) from None
        raise
    if not wait:
        say(name)
    elif result is None:
        complain(f"no result for {name} within {deadline + GRACE_S:.0f} s: is there a dispatcher?")
        raise typer.Exit(1)
    else:
        print_result(result, json_output=json_output)


def _submission(
    names: Names,
    request_id: str,
    body: bytes,
    deadline: int,
    *,
    priority: int | None,
    metadata: dict[str, str],
    **fields: Any,
) -> Submission:
    """Raises ValueError for what no dispatcher would take."""
    import msgspec

    from dispatcher.core.request import encode_member
    from dispatcher.core.score import score_of
    from dispatcher.ports import Submission
    from dispatcher.telemetry.tracing import sending

    try:
        keys = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys()
    except msgspec.DecodeError as error:
        raise ValueError(f"the payload is no JSON object: {error}") from error
    if {"custom_id", "url", "body"} <= keys:
        raise ValueError(
            "the payload is a line of an OpenAI batch file: submit --file sends those (for a single one give "
            "what stands under `body`, and as --endpoint what stands under `url`)"
        )
    token, now = secrets.token_hex(16), int(time.time())
    with sending(names.queue, request_id, metadata) as carried:
        member = encode_member(
            request_id, body, deadline, created=now, token=token, metadata=carried, **fields
        )
    return Submission(member, score_of(deadline, priority), request_id, token, deadline)


async def _answer(desk: RedisDesk, sent: Submission) -> Result | None:
    """Its result, where it has come. Others may write that list, but do not know the token."""
    from dispatcher.core.request import decode_result

    for each in await answers(desk, sent.request_id):
        if (result := decode_result(each)).request_token == sent.request_token:
            return result
    return None
