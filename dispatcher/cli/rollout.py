"""`batch-dispatcher models label|drain`: label and drain versions of models, for all replicas at once.

Labels and drains are stored in the queue, whether a dispatcher runs or not. If one runs, its /status resolves
short names and shows whether the change has any effect.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from dispatcher.cli.admin_client import running
from dispatcher.cli.connection import Json, QueueTarget, ask, find
from dispatcher.cli.pause import By, who_asks
from dispatcher.cli.status import DispatcherOptions, meant
from dispatcher.cli.terminal import answer, complain, fail, say, warn
from dispatcher.core.models.version_policy import VersionPolicy
from dispatcher.core.models.versions import words_of

LABEL_EXAMPLES = [
    "batch-dispatcher models label qwen stable 3",
    "batch-dispatcher models label qwen stable --clear     # the settings' again",
]
DRAIN_EXAMPLES = [
    "batch-dispatcher models drain qwen-v3 --why 'a bad quantisation'",
    "batch-dispatcher models drain v3 --model qwen",
    "batch-dispatcher models drain qwen-v3 --undo",
]
_NAMES_TOLD = 10
_Row = Mapping[str, Any]
"""Row of a model, or of one of its versions, in /status."""


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
    by: By = "",
    *,
    where: DispatcherOptions,
    json_output: Json = False,
) -> None:
    """Set a label to a version, for a rollout or a rollback. It overrides the settings.

    The label stays, across restarts, until it is set again or removed with --clear. Exit code 1: there was no
    label to remove, or the queue cannot be reached.
    """
    if clear == (version is not None):
        raise fail("give a version, or --clear to take the label back", 2)
    _check_names(MODEL=family, LABEL=name, VERSION=family if version is None else version)
    seen = _look(where)
    done = ask(seen.target, lambda desk: desk.label(family, name, version, who_asks(by)))
    if json_output:
        answer({"model": family, "label": name, "version": version, "changed": done})
    elif version is not None:
        say(f"{family}: {name} is {version}")
    elif done:
        say(f"{family}: {name} is what the settings say")
    else:
        complain(f"{family}: no verb has set the label {name}", fg=None)
    if not done:
        raise typer.Exit(1)
    if why := seen.without_effect(family) or _label_unused(seen.row(family), family, name, version):
        warn(why)


def drain(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Full name of the version, as listed by endpoints.")
    ],
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Model of which NAME is a version: `3`, `v3`.",
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
    by: By = "",
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
        raise fail("--why: say it when you drain, not with --undo", 2)
    _check_names(NAME=name)
    seen = _look(where)
    # A drained name is a full name, even if no endpoint lists it any more.
    before = ask(seen.target, lambda desk: desk.model_marks()).drained if undo else ()
    full, who = seen.full_name(name, model, before), who_asks(by)
    if undo:
        done = ask(seen.target, lambda desk: desk.undrain(full))
    else:
        # Only a running dispatcher knows what the policy selects; without one nothing is asked.
        if not yes and (diverted := seen.diverted(full)):
            _confirm(diverted, asks=not json_output and sys.stdin.isatty())
        ask(seen.target, lambda desk: desk.drain(full, who, why))
        done = True
    later = seen.without_effect() or ("" if undo else seen.unlisted(full))
    if json_output:
        answer({"name": full, "drained": None if undo else {"by": who, "why": why}, "changed": done})
    elif not undo:
        what = "is marked as drained" if later else "takes nothing new"
        say(f"{full} {what}; take it back with: batch-dispatcher models drain {full} --undo")
    elif done:
        say(f"{full} is no longer marked as drained" if later else f"{full} may take requests")
    else:
        complain(f"{full} was not drained", fg=None)
    if not done:
        raise typer.Exit(1)
    if told := later or ("" if undo else seen.consequence(full)):
        warn(told)


class _Seen:
    """Models in the /status of a dispatcher of the queue.

    If no dispatcher answers, `problem` says why, and no models are known.
    """

    def __init__(self, target: QueueTarget, told: Mapping[str, Any] | None, problem: str) -> None:
        self.target = target
        self.problem = problem
        self._told = told
        self._models: Sequence[_Row] = (told or {}).get("models") or ()

    def row(self, model: str) -> _Row | None:
        return next((each for each in self._models if each["name"] == model), None)

    def without_effect(self, family: str = "") -> str:
        """Return why a label or a drain changes nothing now. Empty if it takes effect within seconds."""
        if self._told is None:
            return f"no dispatcher tells of it ({self.problem}): it takes effect when one runs"
        if not self._models:
            later = "it takes effect once they are watched (settings: models)"
            return f"the dispatcher that answers watches no models: {later}"
        row = self.row(family) if family else None
        if family and (row is None or row.get("policy") is None):
            return f"{family} has no versions by the settings of the dispatcher that answers: no effect"
        return ""

    def full_name(self, name: str, model: str, said: Collection[str]) -> str:
        """Return the full name of a model or version, as endpoints list it.

        Names in `known_names` are full names. Exits with 1 if the name is only a short form, and says which
        names it may stand for.
        """
        if model:
            return self._version_of(model, name)
        names = {each["name"] for each in self._models} | {each["name"] for _, each in self._versions()}
        meant = [(of, each) for of, each in self._versions() if name in words_of(each["name"], each["label"])]
        # An unknown name is accepted: a version may be drained before any endpoint lists it.
        if name in names or name in said or not meant:
            return name
        may = _several([f"{each['name']} (of {of['name']})" for of, each in meant])
        raise fail(f"{name} is a short form of {may}: give the full name, or --model")

    def _version_of(self, model: str, name: str) -> str:
        row = self.row(model)
        if row is None or not row.get("versions"):
            there = _several([each["name"] for each in self._models if each.get("versions")])
            told = f"; there are versions of {there}" if there else ""
            why = f" ({self.problem})" if self.problem else ""
            raise fail(f"--model: no versions of {model} are known{why}{told}; else give the full name")
        names = [each["name"] for each in row["versions"]]
        meant = [each["name"] for each in row["versions"] if name in words_of(each["name"], each["label"])]
        if len(meant) != 1:
            what = f"may mean {_several(meant)}" if meant else "is no version of it"
            raise fail(f"{model}: {name} {what}; there are {_several(names)}")
        return str(meant[0])

    def unlisted(self, full: str) -> str:
        """Return why draining a name that no endpoint lists changes nothing now. Empty if one lists it."""
        known = self.row(full) is not None or any(each["name"] == full for _, each in self._versions())
        return "" if known else f"no endpoint lists {full} now: it takes effect when one does"

    def consequence(self, full: str) -> str:
        """Return a warning if no other version of the model can take the requests. Empty if one can."""
        family = next((of for of, each in self._versions() if each["name"] == full), None)
        if family is None:
            return ""
        others = [
            each
            for each in family["versions"]
            if each["name"] != full and each["serving"] and not each["drained"]
        ]
        name = family["name"]
        return "" if others else f"no other version of {name} is served: its requests wait until one is"

    def diverted(self, full: str) -> str:
        """Return which versions take over if the version is drained and a label of the policy stands for it.

        Empty if the policy selects another version, or if no other version could take over.
        """
        for of, each in self._versions():
            label = next(
                (each for each in each["labels"] if of["policy"] == str(VersionPolicy(label=each))), ""
            )
            if each["name"] != full or each["drained"] or not label:
                continue
            left = [
                one for one in of["versions"] if one["name"] != full and one["serving"] and not one["drained"]
            ]
            # rollover.py keeps versions open, or else opens the newest, which is the first in the list.
            to = [one["name"] for one in left if one["state"] == "open"] or [one["name"] for one in left[:1]]
            if to:
                return (
                    f"the label {label} of {of['name']} stands for {full}: without it requests go to "
                    f"{_several(to)}, unless its transition is resource; to choose where, set the label "
                    f"first: batch-dispatcher models label {of['name']} {label} VERSION"
                )
        return ""

    def _versions(self) -> Iterator[tuple[_Row, _Row]]:
        for of in self._models:
            for each in of.get("versions") or ():
                yield of, each


def _look(where: DispatcherOptions) -> _Seen:
    """Return the models that the dispatcher of the queue reports. Exits with 2 if no queue is named."""
    _, address = meant(where)
    target = find(where)
    if address is None:
        return _Seen(target, None, "nothing says where one is")
    told, problem = asyncio.run(running(address))
    # Another dispatcher may listen on that port: its models are not those of this queue.
    if told is not None and told["queue"] != target.names.queue:
        return _Seen(target, None, f"the one that answers works on another queue, {told['queue']}")
    return _Seen(target, told, problem or "")


def _confirm(what: str, *, asks: bool) -> None:
    """Ask whether to drain. Exits with 2 if the user cannot be asked, and with 1 if the answer is no."""
    if not asks:
        raise fail(f"{what}; give --yes to drain it all the same", 2)
    if not typer.confirm(f"{what}. Drain it all the same?", err=True):
        raise typer.Exit(1)


def _check_names(**names: str) -> None:
    """Exit with 2 if one of the names is invalid."""
    from dispatcher.ports import CallRefusedError
    from dispatcher.queue.model_registry import check_names

    try:
        check_names(**names)
    except CallRefusedError as error:
        raise fail(str(error), 2) from error


def _label_unused(row: _Row | None, family: str, label: str, version: str | None) -> str:
    """Return why a label that is set has no effect. Empty if it has one, or if it was removed."""
    if row is None or version is None:
        return ""
    if row["policy"] != str(VersionPolicy(label=label)):
        return f"the policy of {family} is {row['policy']}: it does not ask for the label {label}"
    versions = row["versions"]
    if any(one["serving"] and version in words_of(one["name"], one["label"]) for one in versions):
        return ""
    served = _several([one["name"] for one in versions if one["serving"]])
    there = f"there are {served}" if served else "there is none"
    return f"no version of {family} that is served is called {version}: {there}"


def _several(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_TOLD
    return ", ".join(names[:_NAMES_TOLD]) + (f" and {more} more" if more > 0 else "")
