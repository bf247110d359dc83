"""`batch-dispatcher models show`: models of the pool, versions, and requests that wait for them.

The verbs that change something are in rollout.py, and `record` is in record.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from dispatcher.cli.admin_client import fetch_status
from dispatcher.cli.connection import Json, find_queue, print_config_problems
from dispatcher.cli.overview import DispatcherOptions, locate_targets
from dispatcher.cli.terminal import (
    exit_error,
    format_table,
    print_error,
    print_json,
    print_lines,
    print_warning,
)
from dispatcher.common.duration import format_duration
from dispatcher.features.models.cli import rollout
from dispatcher.features.models.cli.record import RECORD_EXAMPLES, record
from dispatcher.features.models.status import LabelStatus, ModelsStatus, ModelStatus, VersionStatus
from dispatcher.telemetry.status import Status

if TYPE_CHECKING:
    from dispatcher.features.models.queue.calls import ModelAdminCalls
    from dispatcher.features.models.registry import ModelRegistryState

EXAMPLES = {
    "models show": [
        "batch-dispatcher models show",
        "batch-dispatcher models show --waiting",
        "batch-dispatcher models show qwen",
    ],
    "models label": rollout.LABEL_EXAMPLES,
    "models drain": rollout.DRAIN_EXAMPLES,
    "models record": RECORD_EXAMPLES,
}
models = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Models: which ones the pool serves, and which requests wait for them.",
)


@models.command()
def show(
    name: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="Name of the model in requests. Default: all models.")
    ] = "",
    waiting: Annotated[bool, typer.Option("--waiting", help="Only models that requests wait for.")] = False,
    *,
    where: DispatcherOptions,
    json_output: Json = False,
) -> None:
    """Show the models that the pool serves, has served, or should serve, or one of them in detail.

    In the table, versions are listed below their model, the newest first, without versions that are gone. One
    model is shown with its endpoints, its versions and labels, and the requests that wait for it. If no
    dispatcher answers, the models come from the queue: those that requests wait for, and those that were
    labelled or drained. Exit code 1: the model is not known, or neither dispatcher nor queue answers.
    """
    if name and waiting:
        raise exit_error("--waiting: give it without the name of a model", 2)
    model_rows, is_watched = _read_models(where)
    if name:
        _show_one(name, model_rows, as_json=json_output)
        return
    chosen_rows = [model for model in model_rows if model.waiting != 0 or not waiting]
    if json_output:
        print_json([asdict(model) for model in chosen_rows])
    elif chosen_rows:
        print_lines(
            *format_table(
                ["MODEL", "STATE", "ENDPOINTS", "WAITING", "FOR", "NOTE"],
                [row for model in chosen_rows for row in _format_rows(model)],
            )
        )
    elif waiting or not is_watched:
        print_error(
            "no request waits for its model" + ("" if waiting else ", none is labelled or drained"), fg=None
        )
    else:
        print_error("no model is known: `models` names none, and none is served", fg=None)


def _show_one(name: str, model_rows: Sequence[ModelStatus], *, as_json: bool) -> None:
    for model in model_rows:
        if model.name == name:
            if as_json:
                print_json(asdict(model))
            else:
                print_lines(name, *(f"  {field:<11} {value}" for field, value in _list_details(model)))
            return
        if name in [version.name for version in model.versions]:
            raise exit_error(
                f"{name} is a version of {model.name}: batch-dispatcher models show {model.name}"
            )
    names = ", ".join(model.name for model in model_rows[:10])
    raise exit_error(f"{name}: no model that is known here{f'; there are {names}' if names else ''}")


def _read_models(where: DispatcherOptions) -> tuple[Sequence[ModelStatus], bool]:
    """Return the models, and true if they come from a dispatcher that watches them."""
    location, address = locate_targets(where)
    status = asyncio.run(fetch_status(address)) if address else "nothing says where one is"
    if isinstance(status, Status) and status.get_section(ModelsStatus).models:
        print_config_problems(location)
        return status.get_section(ModelsStatus).models, True

    async def read_queue(calls: ModelAdminCalls) -> tuple[Mapping[str, int], ModelRegistryState]:
        return await calls.count_waiting_by_model(), await calls.read_model_registry()

    waiting_by_model, registry = rollout.run_with_calls(find_queue(where), read_queue)
    if not isinstance(status, Status):
        print_error(f"no dispatcher tells which are served: {status}", fg=None)
    if registry.problem:
        print_warning(registry.problem)
    names = {*waiting_by_model, *registry.drained_models, *(family for family, _ in registry.labels)}
    # Models that most requests wait for come first.
    ordered = sorted(names, key=lambda name: (-waiting_by_model.get(name, 0), name))
    return [_make_unwatched_row(name, waiting_by_model.get(name, 0), registry) for name in ordered], False


def _make_unwatched_row(name: str, waiting: int, registry: ModelRegistryState) -> ModelStatus:
    drained = registry.drained_models.get(name)
    return ModelStatus(
        name,
        waiting=waiting,
        drained_by=drained,
        labels={
            label: LabelStatus(version, registry.label_origins.get((family, label)))
            for (family, label), version in registry.labels.items()
            if family == name
        },
        sentence=f"drained {drained}; nobody watches it" if drained else "nobody watches it",
    )


def _format_rows(model: ModelStatus) -> list[Sequence[str]]:
    """Return the row of a model, and the rows of its versions that are served or expected."""
    row = [
        model.name,
        model.state,
        _format_endpoints(model),
        _format_waiting(model),
        "" if model.since_s is None else format_duration(model.since_s),
        model.sentence,
    ]
    present_versions = [version for version in model.versions if version.state not in ("gone", "absent")]
    return [row, *(_format_version_row(version, model.labels) for version in present_versions)]


def _format_waiting(model: ModelStatus) -> str:
    """Return how many requests wait for a model. It is unknown until the queue was counted."""
    return "unknown" if model.waiting is None else f"{model.waiting:,}"


def _format_version_row(version: VersionStatus, labels: Mapping[str, LabelStatus]) -> Sequence[str]:
    note = _format_version_note(version, labels)
    return [
        f"  {version.name}",
        version.state,
        str(version.serving),
        "",
        format_duration(version.since_s),
        note,
    ]


def _format_version_note(version: VersionStatus, labels: Mapping[str, LabelStatus]) -> str:
    """Return the note on a version. `labels`: labels of its model."""
    parts = [f"{version.share:.1%} of the requests"] if version.share else []
    if version.warm is not None:
        parts.append(f"warm at {version.warm} of {version.serving}")
    parts += (
        [f"labelled {', '.join(_format_label(name, labels) for name in version.labels)}"]
        if version.labels
        else []
    )
    parts += [f"drained {version.drained_by or ''}".rstrip()] if version.drained else []
    return "; ".join(parts)


def _format_endpoints(model: ModelStatus) -> str:
    return "" if model.serving is None else f"{model.serving} of {model.endpoints}"


def _list_details(model: ModelStatus) -> list[tuple[str, str]]:
    rows = [("state", f"{model.state}: {model.sentence}")]
    if model.serving is not None and model.since_s is not None:
        unread = f", {model.unread_count} cannot be read" if model.unread_count else ""
        rows.append(("endpoints", f"{_format_endpoints(model)} serve it{unread}"))
        rows.append(("since", format_duration(model.since_s)))
        rows.append(("named", "in the settings" if model.named else "no: it was served before"))
    if model.policy is not None:
        rows.append(("policy", model.policy))
    for label, label_value in model.labels.items():
        rows.append(("label", f"{label} is {label_value.version}, {_format_setter(label_value)}"))
    for version in model.versions:
        endpoints = "1 endpoint" if version.serving == 1 else f"{version.serving} endpoints"
        stands = f"{version.state} for {format_duration(version.since_s)}, at {endpoints}"
        rows.append(
            (
                "version",
                "; ".join(
                    filter(
                        None,
                        [
                            f"{version.name} ({version.label}): {stands}",
                            _format_version_note(version, {}),
                        ],
                    )
                ),
            )
        )
    return [*rows, ("waiting", _format_waiting(model))]


def _format_label(name: str, labels: Mapping[str, LabelStatus]) -> str:
    """Return the name of a label, with the operator who set it if one did."""
    setter = labels[name].by if name in labels else None
    return f"{name} ({setter})" if setter else name


def _format_setter(label: LabelStatus) -> str:
    return f"set {label.by}" if label.by else "by the settings"


models.command()(rollout.label)
models.command()(rollout.drain)
models.command()(record)
