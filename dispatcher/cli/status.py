"""`batch-dispatcher status`: what waits, what runs, and why not more."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from dispatcher.cli.target import Config, QueueName, QueueUrl, Target, find


def status(
    config: Config = None,
    queue_url: QueueUrl = "",
    queue: QueueName = "",
    watch: Annotated[bool, typer.Option("--watch", help="Again each second, until interrupted.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the queue; and with --config, where the dispatcher's admin port answers, its gate.

    Exit code 1: the queue cannot be reached.
    """
    import asyncio

    from dispatcher.ports import QueueUnavailableError

    target = find(config, queue_url, queue)
    while True:
        try:
            shown = asyncio.run(_look(target))
        except QueueUnavailableError as error:
            typer.secho(str(error), err=True, fg=typer.colors.RED)
            raise typer.Exit(1) from error
        typer.echo(json.dumps(shown) if json_output else _text(shown))
        if not watch:
            return
        time.sleep(1.0)


async def _look(target: Target) -> dict[str, Any]:
    from dispatcher.queue.connect import connect
    from dispatcher.queue.desk import RedisDesk

    desk = RedisDesk(connect(target.url), target.names)
    try:
        counts = await desk.counts()
        paused = await desk.paused()
    finally:
        await desk.aclose()
    return {
        "queue": target.names.queue,
        "pending": counts.pending,
        "leased": counts.leased,
        "delayed": counts.delayed,
        "dead": counts.dead,
        "paused": None if paused is None else {"by": paused[0], "why": paused[1]},
        "dispatcher": await _dispatcher(target),
    }


async def _dispatcher(target: Target) -> dict[str, Any] | None:
    """/status of the dispatcher that runs by this configuration on this machine; None where none answers."""
    if target.settings is None:
        return None
    import aiohttp

    admin = target.settings.admin
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(admin.host, admin.host)  # noqa: S104 - what is listened on
    headers = {}
    if admin.token_file:
        headers["Authorization"] = f"Bearer {_token(admin.token_file)}"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as session,
            session.get(f"http://{host}:{admin.port}/status", headers=headers) as answer,
        ):
            found = await answer.json() if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None
    return found if isinstance(found, dict) and "explanation" in found else None


def _token(path: str) -> str:
    return Path(path).read_text().strip()


def _text(shown: dict[str, Any]) -> str:
    counts = "  ".join(f"{name} {shown[name]}" for name in ("pending", "leased", "delayed", "dead"))
    lines = [f"{shown['queue']}: {counts}"]
    if shown["paused"]:
        lines.append(f"paused by {shown['paused']['by']}: {shown['paused']['why']}")
    if shown["dispatcher"]:
        dispatcher = shown["dispatcher"]
        lines.append(f"{dispatcher['reason']}: {dispatcher['explanation']}")
    return "\n".join(lines)
