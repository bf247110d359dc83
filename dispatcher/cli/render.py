"""Text about queue and dispatcher: the lines of `status` and `top`, and the paragraph of `explain`.

`overview` is the dictionary that `fetch_overview` in status.py returns; `status` is the /status of a
dispatcher, which may be of an older version and lack newer fields.
"""

from __future__ import annotations

from typing import Any

from dispatcher.core.duration import until
from dispatcher.telemetry.status import CAPACITIES

MODELS_MOST = 8
"""Largest number of models with a line about merging."""
COUNTS = ("pending", "leased", "delayed", "dead")


def lines(shown: dict[str, Any]) -> list[str]:
    """Return all known facts, one per line, with the health of the dispatcher first."""
    told = [*health(shown)]
    if not shown["queue_problem"]:
        counts = "  ".join(f"{name} {shown[name]}" for name in COUNTS)
        told.append(f"{shown['queue']}: {counts}")
        if shown["paused"]:
            told.append(_paused(shown["paused"]))
    gate = shown["dispatcher"]
    if not gate:
        return [*told, f"{_unheard(shown)}."]
    if _foreign(shown):
        told.append(f"the dispatcher that answers works on another queue, {gate['queue']}:")
    told.append(f"{gate['reason']}: {gate['explanation']}")
    return [*told, *details(gate)]


def details(gate: dict[str, Any]) -> list[str]:
    """Return the lines about a dispatcher that follow the explanation of its gate."""
    once = (_capacity(gate), _pace(gate), _deadlines(gate), _price(gate))
    capacity, pace, deadlines, price = ([line] if line else [] for line in once)
    problems, readings, replicas = _problems(gate), _readings(gate), _replicas(gate)
    return [*capacity, *problems, *readings, *pace, *deadlines, *price, *_batching(gate), *replicas]


def glance(gate: dict[str, Any]) -> list[str]:
    """Return the lines about a dispatcher for `top`: frequent changes first, without the readings."""
    first = (_pace(gate), _deadlines(gate), _price(gate))
    last = [_capacity(gate)] if _capacity(gate) else []
    return [*filter(None, first), *_problems(gate), *_replicas(gate), *last]


def line(shown: dict[str, Any]) -> str:
    """Return the most important facts in one line, as for a log."""
    told = [f"{name} {shown[name]}" for name in COUNTS if shown[name] is not None]
    if shown["queue_problem"]:
        told.append(shown["queue_problem"])
    gate = shown["dispatcher"]
    if not gate:
        return "  ".join([*told, "no dispatcher answers"])
    told.append(f"limit {gate.get('limit')}  in flight {gate.get('in_flight')}")
    if gate.get("service_rate"):
        told.append(f"{gate['service_rate']:.3g}/s")
    state = gate.get("health")
    return "  ".join([*told, f"{state} ({gate['reason']})" if state else gate["reason"]])


def paragraph(shown: dict[str, Any]) -> str:
    """Return a paragraph that explains why the dispatcher sends as much as it does."""
    # A dispatcher of another queue is mentioned after the facts about this queue.
    gate, foreign = shown["dispatcher"], _foreign(shown)
    told = [] if foreign else health(shown)
    if gate and not foreign:
        told.append(gate["explanation"])
        if refused := gate.get("config_problem"):
            told.append(f"{_REFUSED}: {refused}.")
    elif not gate:
        told.append(f"{_unheard(shown)}; so nothing is known of its gate.")
    if shown["paused"]:
        told.append(f"The queue is {_paused(shown['paused'])}.")
    if not shown["queue_problem"]:
        waits, held, later, dead = (shown[name] for name in COUNTS)
        why = " (`batch-dispatcher dead list` says why)" if dead else ""
        told.append(
            f"{_counted(waits, 'request waits', 'requests wait')}, {_counted(held, 'is held', 'are held')}, "
            f"{_counted(later, 'waits for a retry', 'wait for a retry')}, "
            f"{_counted(dead, 'is dead', 'are dead')}{why}."
        )
    if gate and foreign:
        told.append(f"The dispatcher that answers works on another queue, {gate['queue']}:")
        told.append(gate["explanation"])
    if gate and (capacity := _capacity(gate)):
        told.append(capacity)
    if gate and gate["reading_age_s"] is not None:
        told.append(f"The newest sample, from {gate['source']}, is {gate['reading_age_s']:.1f} s old.")
    return " ".join(told)


def health(shown: dict[str, Any]) -> list[str]:
    """Return one line: health of the dispatcher, since when, why, and where to look first.

    The list is empty if no dispatcher answers, or if its version does not report its health.
    """
    gate = shown["dispatcher"]
    if not gate or not gate.get("health"):
        return []
    since_s, look_at = gate["health_since_s"], gate["health_look_at"]
    since = "" if since_s is None else f" for {duration(since_s)}"
    state = str(gate["health"]).capitalize()
    return [f"{state}{since}: {gate['health_sentence']}{f' Look at: {look_at}.' if look_at else ''}"]


def _counted(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"


def _foreign(shown: dict[str, Any]) -> bool:
    gate = shown["dispatcher"]
    return bool(gate and shown["queue"] and gate["queue"] != shown["queue"])


def _unheard(shown: dict[str, Any]) -> str:
    told = f"No dispatcher answers ({shown['dispatcher_problem']})"
    # The sentence comes from admin_client.py: the connection was refused.
    nobody = "nobody on" in shown["dispatcher_problem"]
    return f"{told}: start one with `batch-dispatcher run`" if nobody else told


def _paused(switch: dict[str, str]) -> str:
    by, why = switch["by"], switch["why"]
    return f"paused{f' by {by}' if by else ''}{f': {why}' if why else ''}"


_REFUSED = "The changed configuration is refused, the one before is in force"


def _capacity(gate: dict[str, Any]) -> str:
    """Return sentences about the source of the capacity and the state of the Kubernetes watch.

    Empty if neither is known, or if the dispatcher is of an older version.
    """
    by, ready, unsure_s = (gate.get(name) for name in ("max_sys_by", "watch_endpoints", "watch_unsure_s"))
    told = [f"the capacity is {gate['max_sys']:.5g} by {_whose_word(gate)}"] if by is not None else []
    if by == "learned" and gate.get("configured_max_sys") is not None:
        told[0] += f", {gate['configured_max_sys']:g} are configured"
    elif by == "learned":
        told[0] += f" (measured {_times(gate.get('max_sys_confirmed', 1))})"
    watch = "which" if by == "watch" else "the Kubernetes watch"
    if ready is not None:
        # Without a fresh watch the last count is shown with its age.
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
    return CAPACITIES.get(by, str(by))


def _per_endpoint(gate: dict[str, Any]) -> str:
    """Return a sentence about the assumed concurrency of an endpoint.

    It says if the endpoint picker uses another number.
    """
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
        case "server":
            return f"An endpoint is taken to run {each:g} requests, as the model servers' pages say."
        case "search" if gate["max_sys_by"] == "search":
            return (
                f"Nobody names the capacity: the search started at {each:g} requests per endpoint, and the "
                "estimate grows while requests run and nobody waits. Set budget.per_endpoint, or measure it "
                "with `batch-dispatcher check --probe`."
            )
        case _:
            return ""


def _times(count: int) -> str:
    return "once" if count <= 1 else f"{count} times"


# The dispatcher may be of an older version. Lines about fields that it does not have are left out.


def _problems(told: dict[str, Any]) -> list[str]:
    """Return the problems of a dispatcher that its explanation does not mention."""
    found = [(_REFUSED, told.get("config_problem"))]
    found += [(f"The {part} cannot be reached", told.get(f"{part}_problem")) for part in ("queue", "gateway")]
    found += [("The reserve is little", told.get("reserve_problem"))]
    failing_s = told.get("signals_failing_s")
    for_s = "" if failing_s is None else f" for {failing_s:.0f} s now"
    found += [(f"The signals cannot be read{for_s}", told.get("signals_problem"))]
    found += [("Marks of models in the queue count for nothing", told.get("model_marks_problem"))]
    found += [("The Kubernetes watch has a problem", each) for each in told.get("watch_problems") or ()]
    found += [
        (f"Batching has ended for {_of(each)}", each["why_off"])
        for each in told.get("batching") or ()
        if each["why_off"]
    ][:MODELS_MOST]
    # The explanation may contain a problem already; do not repeat it.
    return [f"{what}: {why}" for what, why in found if why and why not in told["explanation"]]


def _readings(told: dict[str, Any]) -> list[str]:
    """Return a line for each reading, and one with the values of the series behind them."""
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


def _pace(told: dict[str, Any]) -> str:
    """Return the rate, and the time that the pending requests take at this rate. Empty if not known."""
    rate, waits = told.get("service_rate"), told.get("pending")
    if not rate or not waits:
        return ""
    return f"Rate: {rate:.3g} requests per second; what waits takes {duration(waits / rate)} at that."


def duration(seconds: float) -> str:
    """Format a duration roughly, in the largest unit of which there are at least two."""
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _deadlines(told: dict[str, Any]) -> str:
    # earliest_deadline_s is relative to now, and negative if it has passed.
    slack_s, at_risk, rate = (told.get(name) for name in ("earliest_deadline_s", "at_risk", "service_rate"))
    if not told.get("pending") or slack_s is None:
        return ""
    earliest = until(slack_s, 0.0)
    risk = "not known how many are at risk" if at_risk is None else f"{at_risk} at risk"
    ended = "" if rate is None else f" while {rate:.3g} requests end per second"
    return f"Deadlines: the earliest {earliest}; {risk}{ended}."


def _price(told: dict[str, Any]) -> str:
    """Return the latencies of realtime requests, with the share of the capacity that batch work used."""
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


def _batching(told: dict[str, Any]) -> list[str]:
    """Return a line about merging for each model.

    Models for which merging was switched off are listed with the problems instead.
    """
    merged = [each for each in told.get("batching") or () if not each["why_off"]]
    lines = [f"Batching of {_of(each)}: {each['sentence']}." for each in merged[:MODELS_MOST]]
    more = len(merged) - len(lines)
    return [*lines, *([f"Batching of {more} more: see --json."] if more else [])]


def _of(served: dict[str, Any]) -> str:
    model = served["model"]
    return f"{model} at {served['path']}" if model else str(served["path"])


def _replicas(told: dict[str, Any]) -> list[str]:
    return [
        f"Replica {each['owner']}{' (this one)' if each['owner'] == told['owner'] else ''}: "
        f"{each['leases']} in flight{_heard(told, each)}"
        for each in told.get("replicas") or ()
    ]


def _heard(told: dict[str, Any], replica: dict[str, Any]) -> str:
    """Return the time since the last heartbeat of a replica, if it is known.

    Replicas send their heartbeats through the queue.
    """
    if told.get("queue_problem"):
        return " when the queue was last read"
    silent_s = replica["silent_s"]  # None if queue.owner_timeout_s is 0: heartbeats are off
    return "" if silent_s is None else f", last heard of {silent_s:.1f} s ago"
