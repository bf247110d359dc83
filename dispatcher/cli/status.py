"""`batch-dispatcher status` and `explain`: what waits, what runs, and why not more."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dispatcher.cli.running import running
from dispatcher.cli.screen import say
from dispatcher.cli.target import Config, Json, QueueName, QueueTarget, QueueUrl, ask, find
from dispatcher.telemetry.status import CAPACITIES

if TYPE_CHECKING:
    from dispatcher.queue.redis.desk import RedisDesk


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
        say(*([json.dumps(shown)] if json_output else _lines(shown)))
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
    say(json.dumps({"explanation": paragraph, **shown}) if json_output else paragraph)


async def look(target: QueueTarget, desk: RedisDesk) -> dict[str, Any]:
    """What the queue tells, and the dispatcher where it answers."""
    counts = await desk.counts()
    paused = await desk.paused()
    admin = target.settings.admin if target.settings else None
    dispatcher, problem = await running(admin) if admin else (None, "only --config says where to ask")
    return {
        "queue": target.names.queue,
        "pending": counts.pending,
        "leased": counts.leased,
        "delayed": counts.delayed,
        "dead": counts.dead,
        "paused": None if paused is None else {"by": paused[0], "why": paused[1]},
        "dispatcher": dispatcher,
        "dispatcher_problem": problem,
    }


def _paragraph(shown: dict[str, Any]) -> str:
    gate, paused = shown["dispatcher"], shown["paused"]
    told = [gate["explanation"] if gate else f"{_unheard(shown)}, so nothing is known of its gate."]
    if gate and (refused := gate.get("config_problem")):
        told.append(f"{_REFUSED}: {refused}.")
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


def _unheard(shown: dict[str, Any]) -> str:
    return f"No dispatcher answers ({shown['dispatcher_problem']})"


def _paused(switch: dict[str, str]) -> str:
    by, why = switch["by"], switch["why"]
    return f"paused{f' by {by}' if by else ''}{f': {why}' if why else ''}"


_REFUSED = "The changed configuration is refused, the one before is in force"


def _capacity(gate: dict[str, Any]) -> str:
    """Whose word the capacity is, and what the watch knows; empty: nothing of it, or an older dispatcher."""
    by, ready, unsure_s = (gate.get(name) for name in ("max_sys_by", "watch_endpoints", "watch_unsure_s"))
    told = [f"the capacity is {gate['max_sys']:.5g} by {_whose_word(gate)}"] if by is not None else []
    if by == "learned":
        told[0] += f", {gate['configured_max_sys']:g} are configured"
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
        return CAPACITIES[by] if each is None else f"budget.per_endpoint, {each:g}, × ready endpoints"
    if by == "picker" and gate.get("per_endpoint_from") in ("unseen", "assumption"):
        return "an assumption"
    return CAPACITIES.get(by, str(by))


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


def _lines(shown: dict[str, Any]) -> list[str]:
    counts = "  ".join(f"{name} {shown[name]}" for name in ("pending", "leased", "delayed", "dead"))
    lines = [f"{shown['queue']}: {counts}"]
    if shown["paused"]:
        lines.append(_paused(shown["paused"]))
    dispatcher = shown["dispatcher"]
    if not dispatcher:
        return [*lines, f"{_unheard(shown)}."]
    if dispatcher["pool"] and shown["queue"] != dispatcher["queue"]:
        lines.append(f"the dispatcher that answers works on another queue, {dispatcher['queue']}:")
    lines.append(f"{dispatcher['reason']}: {dispatcher['explanation']}")
    one_line = (_capacity(dispatcher), _deadlines(dispatcher), _price(dispatcher))
    capacity, deadlines, price = ([line] if line else [] for line in one_line)
    problems, readings, replicas = _problems(dispatcher), _readings(dispatcher), _replicas(dispatcher)
    return [*lines, *capacity, *problems, *readings, *deadlines, *price, *replicas]


# An older dispatcher may answer: what it does not tell is left out.


def _problems(told: dict[str, Any]) -> list[str]:
    """What is wrong beside the reason that is shown."""
    found = [(_REFUSED, told.get("config_problem"))]
    found += [(f"The {part} cannot be reached", told.get(f"{part}_problem")) for part in ("queue", "gateway")]
    found += [("The reserve is little", told.get("reserve_problem"))]
    failing_s = told.get("signals_failing_s")
    for_s = "" if failing_s is None else f" for {failing_s:.0f} s now"
    found += [(f"The signals cannot be read{for_s}", told.get("signals_problem"))]
    found += [("The Kubernetes watch has a problem", each) for each in told.get("watch_problems") or ()]
    return [f"{what}: {why}" for what, why in found if why and why not in told["explanation"]]


def _readings(told: dict[str, Any]) -> list[str]:
    """How old each reading is, and the values of the series that they were made of."""
    readings = told.get("readings") or ()
    lines = [
        f"Reading {each['signal']}, {each['age_s']:.1f} s old, from {each['source']}: "
        f"F_SYS {each['f_sys']:.3f}, F_EPP {each['f_epp']:.3f} of {each['max_sys']:g} requests"
        for each in readings
    ]
    series = {name: value for each in readings for name, value in each["raw"].items()}
    if series:
        lines.append(f"Made of: {', '.join(f'{name} {value:g}' for name, value in series.items())}")
    return lines


def _deadlines(told: dict[str, Any]) -> str:
    slack_s, at_risk, rate = (told.get(name) for name in ("earliest_deadline_s", "at_risk", "service_rate"))
    if not told.get("pending") or slack_s is None:
        return ""
    earliest = f"{-slack_s:.0f} s ago" if slack_s < 0 else f"in {slack_s:.0f} s"
    risk = "not known how many are at risk" if at_risk is None else f"{at_risk} at risk"
    ended = "" if rate is None else f" while {rate:.3g} requests end per second"
    return f"Deadlines: the earliest {earliest}; {risk}{ended}."


def _price(told: dict[str, Any]) -> str:
    """What interactive users wait, beside what batch work took."""
    values = [
        f"{words} {told[f'{name}_p50_s'] * 1000:.0f} ms median, {told[f'{name}_p95_s'] * 1000:.0f} ms 95 %"
        for words, name in (("first token", "ttft"), ("each further token", "tpot"))
        if told.get(f"{name}_p50_s") is not None and told.get(f"{name}_p95_s") is not None
    ]
    if not values:
        return f"Price to realtime: not known: {why}" if (why := told.get("price_why_not")) else ""
    whose = {"realtime": "realtime alone", "all": "all requests, ours among them"}[told["price_of"]]
    share = (
        "" if told["batch_share"] is None else f", while batch held {told['batch_share']:.0%} of the capacity"
    )
    return f"Price to realtime, last 5 minutes: {'; '.join(values)}; of {whose}{share}."


def _replicas(told: dict[str, Any]) -> list[str]:
    return [
        f"Replica {each['owner']}{' (this one)' if each['owner'] == told['owner'] else ''}: "
        f"{each['leases']} in flight, last heard of {each['silent_s']:.1f} s ago"
        for each in told.get("replicas") or ()
    ]
