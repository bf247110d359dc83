"""Text about queue and dispatcher: the lines of `status` and `top`, and the paragraph of `explain`.

`overview` is the dictionary that `fetch_overview` in status.py returns; `status` is the /status of a
dispatcher, which may be of an older version and lack newer fields.
"""

from __future__ import annotations

from typing import Any

from dispatcher.cli.admin_client import StatusProblemKind
from dispatcher.core.duration import format_time_until
from dispatcher.telemetry.status import CAPACITY_SOURCES

MAX_MODELS = 8
"""Largest number of models with a line about merging."""
COUNT_NAMES = ("pending", "leased", "delayed", "dead")


def format_status(overview: dict[str, Any]) -> list[str]:
    """Return all known facts, one per line, with the health of the dispatcher first."""
    text_lines = [*format_health(overview)]
    if not overview["queue_problem"]:
        counts = "  ".join(f"{name} {overview[name]}" for name in COUNT_NAMES)
        text_lines.append(f"{overview['queue']}: {counts}")
        if overview["paused"]:
            text_lines.append(_format_pause(overview["paused"]))
    status = overview["dispatcher"]
    if not status:
        return [*text_lines, f"{_format_no_answer(overview)}."]
    if _is_foreign(overview):
        text_lines.append(f"the dispatcher that answers works on another queue, {status['queue']}:")
    text_lines.append(f"{status['reason']}: {status['explanation']}")
    return [*text_lines, *format_details(status)]


def format_details(status: dict[str, Any]) -> list[str]:
    """Return the lines about a dispatcher that follow the explanation of its gate."""
    optional_lines = (
        _format_capacity(status),
        _format_rate(status),
        _format_deadlines(status),
        _format_realtime_impact(status),
    )
    capacity, rate, deadlines, impact = ([line] if line else [] for line in optional_lines)
    problems, readings, replicas = (
        _format_problems(status),
        _format_readings(status),
        _format_replicas(status),
    )
    return [*capacity, *problems, *readings, *rate, *deadlines, *impact, *_format_batching(status), *replicas]


def format_summary(status: dict[str, Any]) -> list[str]:
    """Return the lines about a dispatcher for `top`: frequent changes first, without the readings."""
    head = (_format_rate(status), _format_deadlines(status), _format_realtime_impact(status))
    tail = [_format_capacity(status)] if _format_capacity(status) else []
    return [*filter(None, head), *_format_problems(status), *_format_replicas(status), *tail]


def format_log_line(overview: dict[str, Any]) -> str:
    """Return the most important facts in one line, as for a log."""
    parts = [f"{name} {overview[name]}" for name in COUNT_NAMES if overview[name] is not None]
    if overview["queue_problem"]:
        parts.append(overview["queue_problem"])
    status = overview["dispatcher"]
    if not status:
        return "  ".join([*parts, "no dispatcher answers"])
    parts.append(f"limit {status.get('limit')}  in flight {status.get('in_flight')}")
    if status.get("service_rate"):
        parts.append(f"{status['service_rate']:.3g}/s")
    state = status.get("health")
    return "  ".join([*parts, f"{state} ({status['reason']})" if state else status["reason"]])


def format_explanation(overview: dict[str, Any]) -> str:
    """Return a paragraph that explains why the dispatcher sends as much as it does."""
    # A dispatcher of another queue is mentioned after the facts about this queue.
    status, is_foreign = overview["dispatcher"], _is_foreign(overview)
    sentences = [] if is_foreign else format_health(overview)
    if status and not is_foreign:
        sentences.append(status["explanation"])
        if refused := status.get("config_problem"):
            sentences.append(f"{_CONFIG_REFUSED}: {refused}.")
    elif not status:
        sentences.append(f"{_format_no_answer(overview)}; so nothing is known of its gate.")
    if overview["paused"]:
        sentences.append(f"The queue is {_format_pause(overview['paused'])}.")
    if not overview["queue_problem"]:
        pending, leased, delayed, dead = (overview[name] for name in COUNT_NAMES)
        why = " (`batch-dispatcher dead list` says why)" if dead else ""
        sentences.append(
            f"{_format_count(pending, 'request waits', 'requests wait')}, "
            f"{_format_count(leased, 'is held', 'are held')}, "
            f"{_format_count(delayed, 'waits for a retry', 'wait for a retry')}, "
            f"{_format_count(dead, 'is dead', 'are dead')}{why}."
        )
    if status and is_foreign:
        sentences.append(f"The dispatcher that answers works on another queue, {status['queue']}:")
        sentences.append(status["explanation"])
    if status and (capacity := _format_capacity(status)):
        sentences.append(capacity)
    if status and status["reading_age_s"] is not None:
        sentences.append(
            f"The newest sample, from {status['source']}, is {status['reading_age_s']:.1f} s old."
        )
    return " ".join(sentences)


def format_health(overview: dict[str, Any]) -> list[str]:
    """Return one line: health of the dispatcher, since when, why, and where to look first.

    The list is empty if no dispatcher answers, or if its version does not report its health.
    """
    status = overview["dispatcher"]
    if not status or not status.get("health"):
        return []
    since_s, look_at = status["health_since_s"], status["health_hint"]
    since = "" if since_s is None else f" for {format_duration(since_s)}"
    state = str(status["health"]).capitalize()
    return [f"{state}{since}: {status['health_sentence']}{f' Look at: {look_at}.' if look_at else ''}"]


def _format_count(number: int, singular: str, plural: str) -> str:
    return f"{number} {singular if number == 1 else plural}"


def _is_foreign(overview: dict[str, Any]) -> bool:
    status = overview["dispatcher"]
    return bool(status and overview["queue"] and status["queue"] != overview["queue"])


def _format_no_answer(overview: dict[str, Any]) -> str:
    sentence = f"No dispatcher answers ({overview['dispatcher_problem']})"
    is_not_listening = overview["dispatcher_problem_kind"] == StatusProblemKind.NOT_LISTENING
    return f"{sentence}: start one with `batch-dispatcher run`" if is_not_listening else sentence


def _format_pause(pause: dict[str, str]) -> str:
    who, why = pause["by"], pause["why"]
    return f"paused{f' by {who}' if who else ''}{f': {why}' if why else ''}"


_CONFIG_REFUSED = "The changed configuration is refused, the one before is in force"


def _format_capacity(status: dict[str, Any]) -> str:
    """Return sentences about the source of the capacity and the state of the Kubernetes watch.

    Empty if neither is known, or if the dispatcher is of an older version.
    """
    source, ready, unsure_s = (
        status.get(name) for name in ("max_sys_source", "watch_endpoints", "watch_stale_s")
    )
    parts = (
        [f"the capacity is {status['max_sys']:.5g} by {_format_capacity_source(status)}"]
        if source is not None
        else []
    )
    if source == "learned" and status.get("configured_max_sys") is not None:
        parts[0] += f", {status['configured_max_sys']:g} are configured"
    elif source == "learned":
        parts[0] += f" (measured {_format_times(status.get('max_sys_confirmed', 1))})"
    watch = "which" if source == "watch" else "the Kubernetes watch"
    if ready is not None:
        # Without a fresh watch the last count is shown with its age.
        ago = "" if unsure_s is None else f" {unsure_s:.0f} s ago"
        parts.append(f"{watch} {'saw' if ago else 'sees'} {ready} ready endpoints{ago}")
    elif unsure_s is not None:
        parts.append(f"{watch} has seen nothing for {unsure_s:.0f} s and bounds nothing")
    whole = (", " if source == "watch" else "; ").join(parts)
    return " ".join(
        filter(None, [f"{whole[:1].upper()}{whole[1:]}." if whole else "", _format_per_endpoint(status)])
    )


def _format_capacity_source(status: dict[str, Any]) -> str:
    source, per_endpoint = status["max_sys_source"], status.get("per_endpoint")
    if source == "setting":
        return (
            CAPACITY_SOURCES[source]
            if per_endpoint is None
            else f"budget.per_endpoint, {per_endpoint:g}, × ready endpoints"
        )
    return CAPACITY_SOURCES.get(source, str(source))


def _format_per_endpoint(status: dict[str, Any]) -> str:
    """Return a sentence about the assumed concurrency of an endpoint.

    It says if the endpoint picker uses another number.
    """
    per_endpoint, source, picker_value = (
        status.get(name) for name in ("per_endpoint", "per_endpoint_source", "picker_max_concurrency")
    )
    match source:
        case "setting" if picker_value is not None and picker_value != per_endpoint:
            return (
                f"budget.per_endpoint is {per_endpoint:g}, the endpoint picker counts with "
                f"{picker_value}: one of them is wrong."
            )
        case "picker":
            return f"An endpoint is taken to run {per_endpoint:g} requests, as the endpoint picker counts."
        case "suggestion":
            return f"The picker's page suggests {per_endpoint:g} requests per endpoint; not proven yet."
        case "server":
            return f"An endpoint is taken to run {per_endpoint:g} requests, as the model servers' pages say."
        case "search" if status["max_sys_source"] == "search":
            return (
                f"Nobody names the capacity: the search started at {per_endpoint:g} requests per "
                "endpoint, and the "
                "estimate grows while requests run and nobody waits. Set budget.per_endpoint, or measure it "
                "with `batch-dispatcher check --probe`."
            )
        case _:
            return ""


def _format_times(count: int) -> str:
    return "once" if count <= 1 else f"{count} times"


# The dispatcher may be of an older version. Lines about fields that it does not have are left out.


def _format_problems(status: dict[str, Any]) -> list[str]:
    """Return the problems of a dispatcher that its explanation does not mention."""
    problems = [(_CONFIG_REFUSED, status.get("config_problem"))]
    problems += [
        (f"The {part} cannot be reached", status.get(f"{part}_problem")) for part in ("queue", "gateway")
    ]
    problems += [("The reserve is little", status.get("reserve_problem"))]
    failing_s = status.get("signals_failing_s")
    for_s = "" if failing_s is None else f" for {failing_s:.0f} s now"
    problems += [(f"The signals cannot be read{for_s}", status.get("signals_problem"))]
    problems += [("Marks of models in the queue count for nothing", status.get("model_registry_problem"))]
    problems += [("The Kubernetes watch has a problem", each) for each in status.get("watch_problems") or ()]
    problems += [
        (f"Batching has ended for {_format_model_and_path(each)}", each["off_reason"])
        for each in status.get("batching") or ()
        if each["off_reason"]
    ][:MAX_MODELS]
    # The explanation may contain a problem already; do not repeat it.
    return [f"{what}: {why}" for what, why in problems if why and why not in status["explanation"]]


def _format_readings(status: dict[str, Any]) -> list[str]:
    """Return a line for each reading, and one with the values of the series behind them."""
    readings = status.get("readings") or ()
    lines = [
        f"Reading {each['signal']}, {each['age_s']:.1f} s old, from {each['source']}: "
        f"F_SYS {each['f_sys']:.3f}, F_EPP {each['f_epp']:.3f} of {each['max_sys']:g} requests"
        for each in readings
    ]
    series = {name: value for each in readings for name, value in each["raw"].items()}
    if series:
        lines.append(f"Made of: {', '.join(f'{name} {value:g}' for name, value in series.items())}")
    return lines


def _format_rate(status: dict[str, Any]) -> str:
    """Return the rate, and the time that the pending requests take at this rate. Empty if not known."""
    rate, waits = status.get("service_rate"), status.get("pending")
    if not rate or not waits:
        return ""
    return f"Rate: {rate:.3g} requests per second; what waits takes {format_duration(waits / rate)} at that."


def format_duration(seconds: float) -> str:
    """Format a duration roughly, in the largest unit of which there are at least two."""
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _format_deadlines(status: dict[str, Any]) -> str:
    # earliest_deadline_s is relative to now, and negative if it has passed.
    slack_s, at_risk, rate = (status.get(name) for name in ("earliest_deadline_s", "at_risk", "service_rate"))
    if not status.get("pending") or slack_s is None:
        return ""
    earliest = format_time_until(slack_s, 0.0)
    risk = "not known how many are at risk" if at_risk is None else f"{at_risk} at risk"
    ended = "" if rate is None else f" while {rate:.3g} requests end per second"
    return f"Deadlines: the earliest {earliest}; {risk}{ended}."


def _format_realtime_impact(status: dict[str, Any]) -> str:
    """Return the latencies of realtime requests, with the share of the capacity that batch work used."""
    values = [
        f"{words} {status[f'{name}_p50_s'] * 1000:.0f} ms median, {status[f'{name}_p95_s'] * 1000:.0f} "
        "ms 95 %"
        for words, name in (("first token", "ttft"), ("each further token", "tpot"))
        if status.get(f"{name}_p50_s") is not None and status.get(f"{name}_p95_s") is not None
    ]
    if not values:
        return f"Impact on realtime: not known: {why}" if (why := status.get("impact_problem")) else ""
    whose = {"realtime": "realtime alone", "all": "all requests, batch requests included"}[
        status["impact_scope"]
    ]
    share = (
        ""
        if status["batch_share"] is None
        else f", while batch held {status['batch_share']:.0%} of the capacity"
    )
    return f"Impact on realtime, last 5 minutes: {'; '.join(values)}; of {whose}{share}."


def _format_batching(status: dict[str, Any]) -> list[str]:
    """Return a line about merging for each model.

    Models for which merging was switched off are listed with the problems instead.
    """
    merged = [each for each in status.get("batching") or () if not each["off_reason"]]
    lines = [
        f"Batching of {_format_model_and_path(each)}: {each['sentence']}." for each in merged[:MAX_MODELS]
    ]
    more = len(merged) - len(lines)
    return [*lines, *([f"Batching of {more} more: see --json."] if more else [])]


def _format_model_and_path(served: dict[str, Any]) -> str:
    model = served["model"]
    return f"{model} at {served['path']}" if model else str(served["path"])


def _format_replicas(status: dict[str, Any]) -> list[str]:
    return [
        f"Replica {each['owner']}{' (this one)' if each['owner'] == status['owner'] else ''}: "
        f"{each['leases']} in flight{_format_last_contact(status, each)}"
        for each in status.get("replicas") or ()
    ]


def _format_last_contact(status: dict[str, Any], replica: dict[str, Any]) -> str:
    """Return the time since the last heartbeat of a replica, if it is known.

    Replicas send their heartbeats through the queue.
    """
    if status.get("queue_problem"):
        return " when the queue was last read"
    silent_s = replica["silent_s"]  # None if queue.owner_timeout_s is 0: heartbeats are off
    return "" if silent_s is None else f", last heard of {silent_s:.1f} s ago"
