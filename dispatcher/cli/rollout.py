"""`batch-dispatcher models label|drain`: what operators say of versions, for all replicas at once.

The queue keeps it, whether a dispatcher runs or not; one that does is asked what a short form means, and
whether what is said has any effect.
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
"""Of a model, or of one of its versions, as /status tells it."""


def label(
    family: Annotated[str, typer.Argument(metavar="MODEL", help="As requests name it.")],
    name: Annotated[str, typer.Argument(metavar="LABEL", help="As the policy asks for it.")],
    version: Annotated[
        str | None,
        typer.Argument(metavar="VERSION", help="As in `3`, `v3`, `qwen-v3`.", show_default=False),
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Take it back: the settings' counts again.")] = False,
    by: By = "",
    *,
    where: DispatcherOptions,
    json_output: Json = False,
) -> None:
    """Have a label mean a version, whatever the settings say: a rollout, and the way back.

    It stands until it is set anew or taken back with --clear, through restarts, too. Exit code 1: there was
    none to take back, or the queue cannot be reached.
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
    name: Annotated[str, typer.Argument(metavar="NAME", help="The full name, as endpoints list it.")],
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="MODEL", help="NAME is a version of this one: `3`, `v3`.", show_default=False
        ),
    ] = "",
    undo: Annotated[bool, typer.Option("--undo", help="Let it take requests again.")] = False,
    why: Annotated[str, typer.Option(help="Told to everybody who asks why requests wait for it.")] = "",
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask first, where it is what a label stands for.")
    ] = False,
    by: By = "",
    *,
    where: DispatcherOptions,
    json_output: Json = False,
) -> None:
    """Have a version, or a model, take nothing new until --undo; what runs goes on to its end.

    Requests go to other versions if some may be used; otherwise they wait. The command asks first if the
    policy's label stands for the version, because requests may then go to a version that the label was to
    keep them from. Without a terminal, or with --json, it demands --yes instead. With --model, a short form
    of the name will do while a dispatcher answers. Exit code 1 if a short form fits no version or several,
    if there was nothing to undo, or if the answer was no.
    """
    if undo and why:
        raise fail("--why: say it when you drain, not with --undo", 2)
    _check_names(NAME=name)
    seen = _look(where)
    before = ask(seen.target, lambda desk: desk.model_marks()).drained if undo else ()
    full, who = seen.full_name(name, model, before), who_asks(by)
    if undo:
        done = ask(seen.target, lambda desk: desk.undrain(full))
    else:
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
    """What a dispatcher of that queue tells of models; `problem`: why none does."""

    def __init__(self, target: QueueTarget, told: Mapping[str, Any] | None, problem: str) -> None:
        self.target = target
        self.problem = problem
        self._told = told
        self._models: Sequence[_Row] = (told or {}).get("models") or ()

    def row(self, model: str) -> _Row | None:
        return next((each for each in self._models if each["name"] == model), None)

    def without_effect(self, family: str = "") -> str:
        """Why what is said changes nothing now; empty: it does, a few seconds from now."""
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
        """What is meant, as endpoints list it, or as it was `said` before; exits with 1 where it is a short
        form that may mean several, and says which."""
        if model:
            return self._version_of(model, name)
        names = {each["name"] for each in self._models} | {each["name"] for _, each in self._versions()}
        meant = [(of, each) for of, each in self._versions() if name in words_of(each["name"], each["label"])]
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
        """Why draining it changes nothing now, though models are watched; empty: it does."""
        known = self.row(full) is not None or any(each["name"] == full for _, each in self._versions())
        return "" if known else f"no endpoint lists {full} now: it takes effect when one does"

    def consequence(self, full: str) -> str:
        """What whoever drains it should know; empty: nothing."""
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
        """Return a sentence that says which versions take over from one that the policy selects by a label.

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
    """Where the queue is, and what a dispatcher of it tells. Exits with 2 where nobody names it."""
    _, address = meant(where)
    target = find(where)
    if address is None:
        return _Seen(target, None, "nothing says where one is")
    told, problem = asyncio.run(running(address))
    if told is not None and told["queue"] != target.names.queue:
        return _Seen(target, None, f"the one that answers works on another queue, {told['queue']}")
    return _Seen(target, told, problem or "")


def _confirm(what: str, *, asks: bool) -> None:
    """Ask whether to drain. Exit with 2 if there is nobody to ask, and with 1 if the answer is no."""
    if not asks:
        raise fail(f"{what}; give --yes to drain it all the same", 2)
    if not typer.confirm(f"{what}. Drain it all the same?", err=True):
        raise typer.Exit(1)


def _check_names(**names: str) -> None:
    """Exit with 2 where one cannot be a name."""
    from dispatcher.ports import CallRefusedError
    from dispatcher.queue.model_registry import check_names

    try:
        check_names(**names)
    except CallRefusedError as error:
        raise fail(str(error), 2) from error


def _label_unused(row: _Row | None, family: str, label: str, version: str | None) -> str:
    """Why a label that is set has no effect all the same; empty: it has, or was taken back."""
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
