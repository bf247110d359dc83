"""`batch-dispatcher submit`: one request, and its result."""

from __future__ import annotations

import secrets
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from dispatcher.cli.result import awaited, print_result, still_queued
from dispatcher.cli.screen import answer, complain, fail, say
from dispatcher.cli.sought import answers
from dispatcher.cli.target import Config, Labels, PoolName, QueueName, QueueUrl, Within, ask, find, pairs_of
from dispatcher.core.patterns import any_fits

if TYPE_CHECKING:
    from dispatcher.core.request import PoppedResult
    from dispatcher.ports import Submission
    from dispatcher.queue.redis.desk import RedisDesk

Pairs = Annotated[list[str] | None, typer.Option(help="name=value; may be repeated.")]
GRACE_S = 10.0
"""Behind its deadline, by when a dispatcher has answered if there is one."""


def submit(
    payload: Annotated[str, typer.Argument(help="The request body, a JSON object; - reads standard input.")],
    config: Config = None,
    queue_url: QueueUrl = "",
    queue: QueueName = "",
    pool: PoolName = "",
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
    import msgspec

    from dispatcher.client.item import Item, Tokens, submission_of

    target = find(config, queue_url, queue, pool)
    if endpoint and target.settings and not any_fits(target.settings.gateway.allowed_paths, endpoint):
        raise fail(f"--endpoint {endpoint}: not among gateway.allowed_paths: no dispatcher would send it", 2)
    name = request_id or f"r-{secrets.token_hex(8)}"
    body = sys.stdin.buffer.read() if payload == "-" else payload.encode(errors="surrogateescape")
    item = Item(
        body,
        path=endpoint,
        id=name,
        deadline=deadline,
        priority=priority,
        headers=dict(pairs_of("--header", header)),
        metadata=dict(pairs_of("--metadata", metadata)),
        labels=dict(pairs_of("--label", label)),
    )
    results = target.names.answers(name) if wait else ""
    try:
        sent = submission_of(item, Tokens().make(), queue=target.names.queue, results=results)
    except ValueError as error:
        raise fail(str(error), 2) from error
    if {"custom_id", "url", "body"} <= msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys():
        what = (
            "this is a line of an OpenAI batch file: submit --file sends those (to send it alone, give what "
            "stands under `body`, and as --endpoint what stands under `url`)"
        )
        raise fail(what, 2)
    submitted = False

    async def act(desk: RedisDesk) -> PoppedResult | None:
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
        answer({"id": name}) if json_output else say(name)
    elif result is None:
        raise fail(f"no result for {name} within {deadline + GRACE_S:.0f} s: is there a dispatcher?")
    else:
        print_result(result, json_output=json_output)


async def _answer(desk: RedisDesk, sent: Submission) -> PoppedResult | None:
    """Its result, where it has come. Others may write that list, but do not know the token."""
    from dispatcher.core.request import decode_result

    for each in await answers(desk, sent.request_id):
        if (result := decode_result(each)).request_token == sent.request_token:
            return result
    return None
