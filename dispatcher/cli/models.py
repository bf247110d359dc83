"""`batch-dispatcher models list|show`: models of the pool, versions, and requests that wait for them.

The verbs that change something are in rollout.py, and `record` is in record.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dispatcher.cli import rollout
from dispatcher.cli.admin_client import running
from dispatcher.cli.connection import Json, ask, find, warn_of
from dispatcher.cli.record import EXAMPLE, record
from dispatcher.cli.status import DispatcherOptions, meant
from dispatcher.cli.terminal import answer, complain, fail, say, table, warn
from dispatcher.core.duration import told

if TYPE_CHECKING:
    from dispatcher.ports import ModelMarks
    from dispatcher.queue.redis.queue_admin import RedisDesk

EXAMPLES = {
    "models list": ["batch-dispatcher models list", "batch-dispatcher models list --waiting"],
    "models show": ["batch-dispatcher models show qwen"],
    "models label": rollout.LABEL_EXAMPLES,
    "models drain": rollout.DRAIN_EXAMPLES,
    "models record": EXAMPLE,
}
models = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Models: which ones the pool serves, and which requests wait for them.",
)


Name = Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model in requests.")]
Models = Sequence[Mapping[str, Any]]


@models.command("list")
def list_(
    waiting: Annotated[bool, typer.Option("--waiting", help="Only models that requests wait for.")] = False,
    *,
    where: DispatcherOptions,
    json_output: Json = False,
) -> None:
    """List the models that the pool serves, has served, or should serve, as a dispatcher sees them.

    Versions are listed below their model, the newest first, without versions that are gone. If no dispatcher
    answers, the list comes from the queue: models that requests wait for, and models that were labelled or
    drained. Exit code 1: neither dispatcher nor queue answers.
    """
    found, watched = _found(where)
    chosen = [each for each in found if each["waiting"] != 0 or not waiting]
    if json_output:
        answer(chosen)
    elif chosen:
        say(
            *table(
                ["MODEL", "STATE", "ENDPOINTS", "WAITING", "FOR", "NOTE"],
                [row for each in chosen for row in _rows(each)],
            )
        )
    elif waiting or not watched:
        complain(
            "no request waits for its model" + ("" if waiting else ", none is labelled or drained"), fg=None
        )
    else:
        complain("no model is known: `models` names none, and none is served", fg=None)


@models.command()
def show(name: Name, where: DispatcherOptions, json_output: Json = False) -> None:
    """Show one model: its state, its endpoints, its versions and labels, and the requests that wait for it.

    Exit code 1: the model is not known.
    """
    found, _ = _found(where)
    for each in found:
        if each["name"] == name:
            if json_output:
                answer(each)
            else:
                say(name, *(f"  {field:<11} {value}" for field, value in _details(each)))
            return
        if name in [version["name"] for version in each["versions"]]:
            raise fail(f"{name} is a version of {each['name']}: batch-dispatcher models show {each['name']}")
    names = ", ".join(str(each["name"]) for each in found[:10])
    raise fail(f"{name}: no model that is known here{f'; there are {names}' if names else ''}")


def _found(where: DispatcherOptions) -> tuple[Models, bool]:
    """Return the models, and true if they come from a dispatcher that watches them."""
    place, address = meant(where)
    dispatcher, problem = asyncio.run(running(address)) if address else (None, "nothing says where one is")
    if dispatcher is not None and dispatcher.get("models"):
        warn_of(place)
        # Defaults for fields that a dispatcher of an older version does not send. `model` comes first for
        # the order of the fields, and last for their values.
        older: dict[str, Any] = {"drained_by": None, "policy": None, "labels": {}, "versions": []}
        return [{**each, **older, **each} for each in dispatcher["models"]], True

    async def act(desk: RedisDesk) -> tuple[Mapping[str, int], ModelMarks]:
        return await desk.awaited(), await desk.model_marks()

    awaited, marks = ask(find(where), act)
    if dispatcher is None:
        complain(f"no dispatcher tells which are served: {problem}", fg=None)
    if marks.problem:
        warn(marks.problem)
    names = {*awaited, *marks.drained, *(family for family, _ in marks.labels)}
    # Models that most requests wait for come first.
    ordered = sorted(names, key=lambda name: (-awaited.get(name, 0), name))
    return [_unwatched(name, awaited.get(name, 0), marks) for name in ordered], False


def _unwatched(name: str, waiting: int, marks: ModelMarks) -> Mapping[str, Any]:
    """Return the row of a model of which only the queue knows."""
    unknown = dict.fromkeys(("serving", "endpoints", "unread", "since_s", "named", "denied", "policy"))
    drained = marks.drained.get(name)
    labels = {
        label: {"version": version, "by": marks.labelled.get((family, label))}
        for (family, label), version in marks.labels.items()
        if family == name
    }
    said: dict[str, Any] = {"drained_by": drained, "labels": labels, "versions": []}
    sentence = f"drained {drained}; nobody watches it" if drained else "nobody watches it"
    return {"name": name, "state": "unknown", **unknown, **said, "waiting": waiting, "sentence": sentence}


def _rows(each: Mapping[str, Any]) -> list[Sequence[str]]:
    """Return the row of a model, and the rows of its versions that are served or expected."""
    row = [
        str(each["name"]),
        str(each["state"]),
        _endpoints(each),
        _waiting(each),
        "" if each["since_s"] is None else told(each["since_s"]),
        str(each["sentence"]),
    ]
    there = [one for one in each["versions"] if one["state"] not in ("gone", "absent")]
    return [row, *(_version_row(one, each["labels"]) for one in there)]


def _waiting(each: Mapping[str, Any]) -> str:
    """Return how many requests wait for a model. It is unknown until the queue was counted."""
    return "unknown" if each["waiting"] is None else f"{each['waiting']:,}"


def _version_row(one: Mapping[str, Any], labels: Mapping[str, Any]) -> Sequence[str]:
    note = _version(one, labels)
    return [f"  {one['name']}", one["state"], str(one["serving"]), "", told(one["since_s"]), note]


def _version(one: Mapping[str, Any], labels: Mapping[str, Any]) -> str:
    """Return the note on a version. `labels`: labels of its model."""
    parts = [f"{one['share']:.1%} of the requests"] if one["share"] else []
    if one["warm"] is not None:
        parts.append(f"warm at {one['warm']} of {one['serving']}")
    parts += (
        [f"labelled {', '.join(_label(name, labels) for name in one['labels'])}"] if one["labels"] else []
    )
    parts += [f"drained {one.get('drained_by') or ''}".rstrip()] if one["drained"] else []
    return "; ".join(parts)


def _endpoints(each: Mapping[str, Any]) -> str:
    return "" if each["serving"] is None else f"{each['serving']} of {each['endpoints']}"


def _details(each: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [("state", f"{each['state']}: {each['sentence']}")]
    if each["serving"] is not None:
        unread = f", {each['unread']} cannot be read" if each["unread"] else ""
        rows.append(("endpoints", f"{_endpoints(each)} serve it{unread}"))
        rows.append(("since", f"{told(each['since_s'])}"))
        rows.append(("named", "in the settings" if each["named"] else "no: it was served before"))
    if each["policy"] is not None:
        rows.append(("policy", str(each["policy"])))
    for label, said in each["labels"].items():
        rows.append(("label", f"{label} is {said['version']}, {_by(said)}"))
    for one in each["versions"]:
        endpoints = "1 endpoint" if one["serving"] == 1 else f"{one['serving']} endpoints"
        stands = f"{one['state']} for {told(one['since_s'])}, at {endpoints}"
        rows.append(
            (
                "version",
                "; ".join(filter(None, [f"{one['name']} ({one['label']}): {stands}", _version(one, {})])),
            )
        )
    return [*rows, ("waiting", _waiting(each))]


def _label(name: str, labels: Mapping[str, Any]) -> str:
    """Return the name of a label, with the operator who set it if one did."""
    by = labels.get(name, {}).get("by")
    return f"{name} ({by})" if by else name


def _by(label: Mapping[str, Any]) -> str:
    return f"set {label['by']}" if label["by"] else "by the settings"


models.command()(rollout.label)
models.command()(rollout.drain)
models.command()(record)
