"""`batch-dispatcher status` and `explain`: what waits, what runs, and why not more."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dispatcher.cli.target import Config, Json, QueueName, QueueUrl, Target, ask, find

if TYPE_CHECKING:
    from dispatcher.queue.desk import RedisDesk


def status(
    config: Config = None,
    queue_url: QueueUrl = "",
    queue: QueueName = "",
    watch: Annotated[bool, typer.Option("--watch", help="Again each second, until interrupted.")] = False,
    json_output: Json = False,
) -> None:
    """Show the queue; and with --config, where the dispatcher's admin port answers, its gate.

    Exit code 1: the queue cannot be reached; an embedded one is there only while its dispatcher runs.
    """
    target = find(config, queue_url, queue)
    while True:
        shown = ask(target, lambda desk: look(target, desk))
        typer.echo(json.dumps(shown) if json_output else _text(shown))
        if not watch:
            return
        time.sleep(1.0)


def explain(
    config: Config = None, queue_url: QueueUrl = "", queue: QueueName = "", json_output: Json = False
) -> None:
    """Say in one paragraph why the dispatcher sends what it sends.

    Where none answers (only --config says where to ask), say what the queue alone can tell. Exit code 1: the
    queue cannot be reached.
    """
    target = find(config, queue_url, queue)
    shown = ask(target, lambda desk: look(target, desk))
    paragraph = _paragraph(shown)
    typer.echo(json.dumps({"explanation": paragraph, **shown}) if json_output else paragraph)


async def look(target: Target, desk: RedisDesk) -> dict[str, Any]:
    """What the queue tells, and the dispatcher where it answers."""
    counts = await desk.counts()
    paused = await desk.paused()
    return {
        "queue": target.names.queue,
        "pending": counts.pending,
        "leased": counts.leased,
        "delayed": counts.delayed,
        "dead": counts.dead,
        "paused": None if paused is None else {"by": paused[0], "why": paused[1]},
        "dispatcher": await _dispatcher(target),
    }


def _paragraph(shown: dict[str, Any]) -> str:
    gate, paused = shown["dispatcher"], shown["paused"]
    told = [gate["explanation"] if gate else "No dispatcher answers, so nothing is known of its gate."]
    if paused:
        told.append(f"The queue is {_paused(paused)}.")
    told.append(
        f"{shown['pending']} requests wait, {shown['leased']} are held, {shown['delayed']} wait for a retry, "
        f"{shown['dead']} are dead."
    )
    if gate and (capacity := _capacity(gate)):
        told.append(capacity)
    if gate and gate["reading_age_s"] is not None:
        told.append(f"The newest sample, from {gate['source']}, is {gate['reading_age_s']:.1f} s old.")
    return " ".join(told)


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


def _paused(switch: dict[str, str]) -> str:
    by, why = switch["by"], switch["why"]
    return f"paused{f' by {by}' if by else ''}{f': {why}' if why else ''}"


_WORDS = {
    "watch": "the Kubernetes watch",
    "picker": "the endpoint picker",
    "query": "signals.prometheus.queries.capacity",
}


def _capacity(gate: dict[str, Any]) -> str:
    """Whose word the capacity is, and what the watch knows; empty: nothing of it, or an older dispatcher."""
    by, ready, unsure_s = (gate.get(name) for name in ("max_sys_by", "watch_endpoints", "watch_unsure_s"))
    told = [f"the capacity is {gate['max_sys']:g} by {_whose_word(gate)}"] if by is not None else []
    watch = "which" if by == "watch" else "the Kubernetes watch"
    if ready is not None:
        ago = "" if unsure_s is None else f" {unsure_s:.0f} s ago"
        told.append(f"{watch} {'saw' if ago else 'sees'} {ready} ready endpoints{ago}")
    elif unsure_s is not None:
        told.append(f"{watch} has seen nothing for {unsure_s:.0f} s and bounds nothing")
    whole = (", " if by == "watch" else "; ").join(told)
    return " ".join(filter(None, [f"{whole[:1].upper()}{whole[1:]}." if whole else "", _per_endpoint(gate)]))


def _whose_word(gate: dict[str, Any]) -> str:
    by, each = gate["max_sys_by"], gate.get("per_endpoint")
    if by == "setting":
        return "budget.max_sys" if each is None else f"budget.per_endpoint, {each:g}, × ready endpoints"
    if by == "picker" and gate.get("per_endpoint_from") in ("unseen", "assumption"):
        return "an assumption"
    return _WORDS.get(by, str(by))


def _per_endpoint(gate: dict[str, Any]) -> str:
    """What an endpoint is taken to run at once, and whether the picker counts with another number."""
    each, source, k = (
        gate.get(name) for name in ("per_endpoint", "per_endpoint_from", "picker_max_concurrency")
    )
    match source:
        case "setting" if k is not None and k != each:
            return (
                f"budget.per_endpoint is {each:g}, the endpoint picker counts with {k}: one of them is wrong."
            )
        case "picker":
            return f"An endpoint is taken to run {each:g} requests, as the endpoint picker counts."
        case "suggestion":
            return f"The picker's page suggests {each:g} requests per endpoint; not proven yet."
        case "unseen":
            return (
                f"An endpoint is assumed to run {each:g} requests until the picker's page shows some; "
                "not learned yet."
            )
        case "assumption":
            return (
                f"An endpoint is assumed to run {each:g} requests: set budget.per_endpoint to what it does."
            )
        case _:
            return ""


def _text(shown: dict[str, Any]) -> str:
    counts = "  ".join(f"{name} {shown[name]}" for name in ("pending", "leased", "delayed", "dead"))
    lines = [f"{shown['queue']}: {counts}"]
    if shown["paused"]:
        lines.append(_paused(shown["paused"]))
    if shown["dispatcher"]:
        dispatcher = shown["dispatcher"]
        if dispatcher["pool"] and shown["queue"] != dispatcher["queue"]:
            lines.append(f"the dispatcher that answers works on another queue, {dispatcher['queue']}:")
        lines.append(f"{dispatcher['reason']}: {dispatcher['explanation']}")
        if capacity := _capacity(dispatcher):
            lines.append(capacity)
    return "\n".join(lines)
