"""`batch-dispatcher models label|drain`: label and drain versions of models, for all replicas at once.

Labels and drains are stored in the queue, whether a dispatcher runs or not. If one runs, its /status resolves
short names and shows whether the change has any effect.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from dispatcher.cli import render
from dispatcher.cli.admin_client import StatusProblem, fetch_status
from dispatcher.cli.connection import Json, QueueTarget, find_queue, run_with_admin
from dispatcher.cli.overview import DispatcherOptions, locate_targets
from dispatcher.cli.pause import OperatorName, get_operator_name
from dispatcher.cli.terminal import exit_error, print_error, print_json, print_lines, print_warning
from dispatcher.features.models.status import ModelsStatus, ModelStatus, VersionStatus
from dispatcher.features.models.version_policy import VersionPolicy
from dispatcher.features.models.versions import list_aliases
from dispatcher.telemetry.status import Status

if TYPE_CHECKING:
    from dispatcher.features.models.queue.calls import ModelAdminCalls

T = TypeVar("T")

LABEL_EXAMPLES = [
    "batch-dispatcher models label qwen stable 3",
    "batch-dispatcher models label qwen stable --clear     # the settings' again",
]
DRAIN_EXAMPLES = [
    "batch-dispatcher models drain qwen-v3 --why 'a bad quantisation'",
    "batch-dispatcher models drain v3 --model qwen",
    "batch-dispatcher models drain qwen-v3 --undo",
]
_MAX_NAMES_SHOWN = 10


def run_with_calls(target: QueueTarget, use: Callable[[ModelAdminCalls], Awaitable[T]]) -> T:
    """Return what `use` returns, which is given the calls of models to the queue."""
    from dispatcher.features.models.queue.calls import ModelAdminCalls

    return run_with_admin(target, lambda admin: use(admin.open_calls(ModelAdminCalls)))


def label(
    family: Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model in requests.")],
    name: Annotated[str, typer.Argument(metavar="LABEL", help="Name of the label in the policy.")],
    version: Annotated[
        str | None,
        typer.Argument(metavar="VERSION", help="Such as `3`, `v3` or `qwen-v3`.", show_default=False),
    ] = None,
    clear: Annotated[
        bool, typer.Option("--clear", help="Remove the label: that of the settings counts again.")
    ] = False,
    operator: OperatorName = "",
    *,
    where: DispatcherOptions,
    json_output: Json = False,
) -> None:
    """Set a label to a version, for a rollout or a rollback. It overrides the settings.

    The label stays, across restarts, until it is set again or removed with --clear. Exit code 1: there was no
    label to remove, or the queue cannot be reached.
    """
    if clear == (version is not None):
        raise exit_error("give a version, or --clear to take the label back", 2)
    _check_names(MODEL=family, LABEL=name, VERSION=family if version is None else version)
    reported = _fetch_models(where)
    has_changed = run_with_calls(
        reported.target, lambda calls: calls.set_label(family, name, version, get_operator_name(operator))
    )
    if json_output:
        print_json({"model": family, "label": name, "version": version, "changed": has_changed})
    elif version is not None:
        print_lines(f"{family}: {name} is {version}")
    elif has_changed:
        print_lines(f"{family}: {name} is what the settings say")
    else:
        print_error(f"{family}: no verb has set the label {name}", fg=None)
    if not has_changed:
        raise typer.Exit(1)
    if why := reported.explain_no_effect(family) or _explain_unused_label(
        reported.find_row(family), family, name, version
    ):
        print_warning(why)


def drain(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Full name of the version, as listed by endpoints.")
    ],
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Model that NAME is a version of: `3`, `v3`.",
            show_default=False,
        ),
    ] = "",
    undo: Annotated[bool, typer.Option("--undo", help="Let the version take requests again.")] = False,
    why: Annotated[
        str, typer.Option(help="Reason, which is shown when somebody asks why requests wait.")
    ] = "",
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask first if a label stands for the version.")
    ] = False,
    operator: OperatorName = "",
    *,
    where: DispatcherOptions,
    json_output: Json = False,
) -> None:
    """Stop a version or a model from taking new requests, until --undo. Requests that run go on.

    Requests go to other versions if some may be used; otherwise they wait. The command asks first if the
    policy's label stands for the version, because requests may then go to a version that the label was to
    keep them from. Without a terminal, or with --json, it demands --yes instead. With --model, a short form
    of the name will do while a dispatcher answers. Exit code 1 if a short form matches no version or several,
    if there was nothing to undo, or if the answer was no.
    """
    if undo and why:
        raise exit_error("--why: say it when you drain, not with --undo", 2)
    _check_names(NAME=name)
    reported = _fetch_models(where)
    # A drained name is a full name, even if no endpoint lists it any more.
    drained_names = (
        run_with_calls(reported.target, lambda calls: calls.read_model_registry()).drained_models
        if undo
        else ()
    )
    full_name, operator_name = reported.resolve_name(name, model, drained_names), get_operator_name(operator)
    if undo:
        has_changed = run_with_calls(reported.target, lambda calls: calls.undrain_version(full_name))
    else:
        # Only a running dispatcher knows what the policy selects; without one nothing is asked.
        if not yes and (diversion := reported.explain_diversion(full_name)):
            _confirm_drain(diversion, can_ask=not json_output and sys.stdin.isatty())
        run_with_calls(reported.target, lambda calls: calls.drain_version(full_name, operator_name, why))
        has_changed = True
    no_effect = reported.explain_no_effect() or ("" if undo else reported.explain_unlisted(full_name))
    if json_output:
        print_json(
            {
                "name": full_name,
                "drained": None if undo else {"by": operator_name, "why": why},
                "changed": has_changed,
            }
        )
    elif not undo:
        what = "is marked as drained" if no_effect else "takes nothing new"
        print_lines(
            f"{full_name} {what}; take it back with: batch-dispatcher models drain {full_name} --undo"
        )
    elif has_changed:
        print_lines(
            f"{full_name} is no longer marked as drained" if no_effect else f"{full_name} may take requests"
        )
    else:
        print_error(f"{full_name} was not drained", fg=None)
    if not has_changed:
        raise typer.Exit(1)
    if warning := no_effect or ("" if undo else reported.explain_consequence(full_name)):
        print_warning(warning)


class _ReportedModels:
    """Models in the /status of a dispatcher of the queue.

    If no dispatcher answers, `problem` says why, and no models are known.
    """

    def __init__(self, target: QueueTarget, status: Status | None, problem: str) -> None:
        self.target = target
        self.problem = problem
        self._status = status
        section = ModelsStatus() if status is None else status.get_section(ModelsStatus)
        self._models: Sequence[ModelStatus] = section.models

    def find_row(self, model: str) -> ModelStatus | None:
        return next((row for row in self._models if row.name == model), None)

    def explain_no_effect(self, family: str = "") -> str:
        """Return why a label or a drain changes nothing now. Empty if it takes effect within seconds."""
        if self._status is None:
            return f"no dispatcher tells of it ({self.problem}): it takes effect when one runs"
        if not self._models:
            later = "it takes effect once they are watched (settings: models)"
            return f"the dispatcher that answers watches no models: {later}"
        row = self.find_row(family) if family else None
        if family and (row is None or row.policy is None):
            return f"{family} has no versions by the settings of the dispatcher that answers: no effect"
        return ""

    def resolve_name(self, name: str, model: str, known_names: Collection[str]) -> str:
        """Return the full name of a model or version, as endpoints list it.

        Names in `known_names` are full names. Exits with 1 if the name is only a short form, and says which
        names it may stand for.
        """
        if model:
            return self._resolve_version(model, name)
        names = {model_row.name for model_row in self._models} | {
            version_row.name for _, version_row in self._iterate_versions()
        }
        matches = [
            (model_row, version_row)
            for model_row, version_row in self._iterate_versions()
            if name in list_aliases(version_row.name, version_row.label)
        ]
        # An unknown name is accepted: a version may be drained before any endpoint lists it.
        if name in names or name in known_names or not matches:
            return name
        candidates = _format_names(
            [f"{version_row.name} (of {model_row.name})" for model_row, version_row in matches]
        )
        raise exit_error(f"{name} is a short form of {candidates}: give the full name, or --model")

    def _resolve_version(self, model: str, name: str) -> str:
        row = self.find_row(model)
        if row is None or not row.versions:
            models_with_versions = _format_names(
                [model_row.name for model_row in self._models if model_row.versions]
            )
            hint = f"; there are versions of {models_with_versions}" if models_with_versions else ""
            why = f" ({self.problem})" if self.problem else ""
            raise exit_error(f"--model: no versions of {model} are known{why}{hint}; else give the full name")
        names = [version_row.name for version_row in row.versions]
        matches = [
            version_row.name
            for version_row in row.versions
            if name in list_aliases(version_row.name, version_row.label)
        ]
        if len(matches) != 1:
            what = f"may mean {_format_names(matches)}" if matches else "is no version of it"
            raise exit_error(f"{model}: {name} {what}; there are {_format_names(names)}")
        return matches[0]

    def explain_unlisted(self, full_name: str) -> str:
        """Return why draining a name that no endpoint lists changes nothing now. Empty if one lists it."""
        is_known = self.find_row(full_name) is not None or any(
            each.name == full_name for _, each in self._iterate_versions()
        )
        return "" if is_known else f"no endpoint lists {full_name} now: it takes effect when one does"

    def explain_consequence(self, full_name: str) -> str:
        """Return a warning if no other version of the model can take the requests. Empty if one can."""
        family = next(
            (
                model_row
                for model_row, version_row in self._iterate_versions()
                if version_row.name == full_name
            ),
            None,
        )
        if family is None:
            return ""
        others = [
            version_row
            for version_row in family.versions
            if version_row.name != full_name and version_row.serving and not version_row.drained
        ]
        name = family.name
        return "" if others else f"no other version of {name} is served: its requests wait until one is"

    def explain_diversion(self, full_name: str) -> str:
        """Return which versions take over if the version is drained and a label of the policy stands for it.

        Empty if the policy selects another version, or if no other version could take over.
        """
        for model_row, version_row in self._iterate_versions():
            label = next(
                (each for each in version_row.labels if model_row.policy == str(VersionPolicy(label=each))),
                "",
            )
            if version_row.name != full_name or version_row.drained or not label:
                continue
            other_versions = [
                other_version
                for other_version in model_row.versions
                if other_version.name != full_name and other_version.serving and not other_version.drained
            ]
            # rollover.py keeps versions open, or else opens the newest, which is the first in the list.
            successors = [
                other_version.name for other_version in other_versions if other_version.state == "open"
            ] or [other_version.name for other_version in other_versions[:1]]
            if successors:
                return (
                    f"the label {label} of {model_row.name} stands for {full_name}: without it "
                    "requests go to "
                    f"{_format_names(successors)}, unless its transition is resource; to choose where, "
                    f"set the label first: batch-dispatcher models label {model_row.name} {label} VERSION"
                )
        return ""

    def _iterate_versions(self) -> Iterator[tuple[ModelStatus, VersionStatus]]:
        for model_row in self._models:
            for version_row in model_row.versions or ():
                yield model_row, version_row


def _fetch_models(where: DispatcherOptions) -> _ReportedModels:
    """Return the models that the dispatcher of the queue reports. Exits with 2 if no queue is named."""
    _, address = locate_targets(where)
    target = find_queue(where)
    if address is None:
        return _ReportedModels(target, None, "nothing says where one is")
    status = asyncio.run(fetch_status(address))
    if isinstance(status, StatusProblem):
        return _ReportedModels(target, None, str(status))
    # Another dispatcher may listen on that port: its models are not those of this queue.
    if status.process.queue != target.names.queue:
        return _ReportedModels(target, None, render.format_other_queue(status))
    return _ReportedModels(target, status, "")


def _confirm_drain(question: str, *, can_ask: bool) -> None:
    """Ask whether to drain. Exits with 2 if the user cannot be asked, and with 1 if the answer is no."""
    if not can_ask:
        raise exit_error(f"{question}; give --yes to drain it all the same", 2)
    if not typer.confirm(f"{question}. Drain it all the same?", err=True):
        raise typer.Exit(1)


def _check_names(**names: str) -> None:
    """Exit with 2 if one of the names is invalid."""
    from dispatcher.features.models.queue.registry_rules import check_names
    from dispatcher.requests.submission import CallRefusedError

    try:
        check_names(**names)
    except CallRefusedError as error:
        raise exit_error(str(error), 2) from error


def _explain_unused_label(row: ModelStatus | None, family: str, label: str, version: str | None) -> str:
    """Return why a label that is set has no effect. Empty if it has one, or if it was removed."""
    if row is None or version is None:
        return ""
    if row.policy != str(VersionPolicy(label=label)):
        return f"the policy of {family} is {row.policy}: it does not ask for the label {label}"
    versions = row.versions
    if any(
        version_row.serving and version in list_aliases(version_row.name, version_row.label)
        for version_row in versions
    ):
        return ""
    served_names = _format_names([version_row.name for version_row in versions if version_row.serving])
    alternatives = f"there are {served_names}" if served_names else "there is none"
    return f"no version of {family} that is served is called {version}: {alternatives}"


def _format_names(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMES_SHOWN
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
