"""Verbs that list, label and drain model versions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner

from dispatcher.cli import app
from dispatcher.features.models.cli import rollout
from dispatcher.features.models.queue.waiting import ModelWait
from dispatcher.features.models.registry import ModelRegistryState
from dispatcher.queue.contract import Release
from dispatcher.queue.keys import QueueNames
from dispatcher.requests.request import encode_member
from dispatcher.requests.submission import Submission
from tests.queue.factories import OwnerAndAdmin, claim, queues
from tests.queue.servers import ENGINES, Server, server

NAMES = QueueNames("batch:{qwen}:requests", "batch:{qwen}:results")
LATER = 4_000_000_000


def version(name: str, state: str = "open", **more: Any) -> dict[str, Any]:
    """Return a version as in /status."""
    document = {
        "label": name.rpartition("-v")[2],
        "since_s": 90.0,
        "serving": 2,
        "warm": None,
        "desired": True,
    }
    rest: dict[str, Any] = {"drained": False, "drained_by": None, "share": 0.0, "labels": []}
    return {"name": name, "state": state, **document, **rest, **more}


def model(name: str, *versions: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    document = {
        "state": "ready",
        "serving": 2,
        "endpoints": 2,
        "unread_count": 0,
        "waiting": 0,
        "since_s": 90.0,
    }
    rest: dict[str, Any] = {
        "named": True,
        "denied": False,
        "drained_by": None,
        "sentence": "it is served",
        "labels": {},
    }
    policy = "latest" if versions else None
    return {"name": name, **document, **rest, "policy": policy, "versions": list(versions), **more}


BY_LABEL = '{"label": "stable"}'
QWEN = model(
    "qwen",
    version("qwen-v3", "cold", warm=1, label="3", serving=2),
    version("qwen-v2", share=1.0, warm=2, labels=["stable"]),
    version("qwen-v1", "retiring", drained=True, drained_by="by bob since noon: it leaks"),
    version("qwen-v0", "gone", serving=0),
    policy=BY_LABEL,
    labels={"stable": {"version": "2", "by": "by ada since noon"}, "old": {"version": "1", "by": None}},
)


UNWATCHED = "it takes effect once they are watched (settings: models)"
NOBODY = (
    "no dispatcher tells of it (nothing listens on admin.port 1 of this machine): it takes effect when "
    "one runs"
)


@dataclass(frozen=True, slots=True)
class VerbOutput:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return [*self.out.splitlines(), *self.err.splitlines()]


@dataclass
class Environment:
    """A queue, and a dispatcher that answers while `answers` is True."""

    server: Server
    queue: OwnerAndAdmin
    folder: Path
    models: Sequence[Mapping[str, Any]] = ()
    works_on: str = NAMES.queue
    answers: bool = True
    ports: dict[bool, int] = field(default_factory=dict)

    async def run_verb(self, *arguments: str) -> VerbOutput:
        config = self.folder / "config.yaml"
        config.write_text(
            yaml.safe_dump(
                {
                    "pool": {"name": "qwen"},
                    "gateway": {"url": "http://127.0.0.1:1"},
                    "queue": {"url": self.server.url},
                    "admin": {"host": "127.0.0.1", "port": self.ports[self.answers]},
                }
            )
        )
        given = ["models", *arguments, "--config", str(config)]
        found = await asyncio.to_thread(CliRunner().invoke, app, given)
        if not isinstance(found.exception, SystemExit | None):
            raise found.exception
        return VerbOutput(found.exit_code, found.stdout, found.stderr)

    async def refresh_warm_markers(self) -> ModelRegistryState:
        marks: ModelRegistryState = await self.queue.read_model_registry()
        return marks


@pytest.fixture(scope="module")
def queue_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with server(ENGINES[-1], tmp_path_factory.mktemp("rollout")) as running:
        yield running


@pytest.fixture
async def environment(queue_server: Server, tmp_path: Path) -> AsyncIterator[Environment]:
    with queue_server.client() as client:
        client.flushall()
    async with queues(queue_server.url, "owner", names=NAMES) as (queue,):
        made = Environment(queue_server, queue, tmp_path)

        async def status(_: web.Request) -> web.Response:
            return web.json_response(
                {"reason": "full", "explanation": "…", "queue": made.works_on, "models": made.models}
            )

        application = web.Application()
        application.router.add_get("/status", status)
        async with TestServer(application) as answering:
            assert answering.port
            made.ports = {True: answering.port, False: 1}
            yield made


# Labels.


async def test_label_selects_a_version_until_it_is_cleared(environment: Environment) -> None:
    environment.models = [QWEN]
    output = await environment.run_verb("label", "qwen", "stable", "v3", "--by", "ada")
    assert (output.code, output.lines) == (0, ["qwen: stable is v3"])
    marks = await environment.refresh_warm_markers()
    assert marks.labels == {("qwen", "stable"): "v3"}
    assert marks.label_origins["qwen", "stable"].startswith("by ada since ")
    cleared = await environment.run_verb("label", "qwen", "stable", "--clear")
    assert (cleared.code, cleared.lines) == (0, ["qwen: stable is what the settings say"])
    assert (await environment.refresh_warm_markers()) == ModelRegistryState()
    again = await environment.run_verb("label", "qwen", "stable", "--clear", "--json")
    assert again.code == 1
    assert json.loads(again.out) == {"model": "qwen", "label": "stable", "version": None, "changed": False}
    assert (await environment.run_verb("label", "qwen", "stable", "--clear")).lines == [
        "qwen: no verb has set the label stable"
    ]


@pytest.mark.parametrize(
    ("models", "arguments", "warning"),
    [
        ([], ("qwen", "stable", "3"), f"watches no models: {UNWATCHED}"),
        ([model("qwen")], ("qwen", "stable", "3"), "qwen has no versions by the settings"),
        ([QWEN], ("llama", "stable", "3"), "llama has no versions by the settings"),
        ([QWEN], ("qwen", "stable", "9"), "is called 9: there are qwen-v3, qwen-v2, qwen-v1"),
        ([QWEN], ("qwen", "canary", "3"), f"policy of qwen is {BY_LABEL}: it does not ask"),
        ([model("qwen", version("qwen-v2"))], ("qwen", "stable", "2"), "policy of qwen is latest"),
        (
            [model("qwen", version("qwen-v2", "gone", serving=0), policy=BY_LABEL)],
            ("qwen", "stable", "2"),
            "is called 2: there is none",
        ),
    ],
)  # fmt: skip
async def test_label_without_effect_is_set_with_a_warning(
    environment: Environment, models: Any, arguments: tuple[str, ...], warning: str
) -> None:
    environment.models = models
    output = await environment.run_verb("label", *arguments)
    assert (output.code, len(output.lines)) == (0, 2), output
    assert warning in output.err
    assert (await environment.refresh_warm_markers()).labels == {arguments[:2]: arguments[2]}


async def test_label_is_stored_in_the_queue_without_a_dispatcher(environment: Environment) -> None:
    environment.answers = False
    for arguments in (("label", "qwen", "stable", "2"), ("drain", "qwen-v3")):
        output = await environment.run_verb(*arguments)
        assert output.code == 0
        assert output.err == f"{NOBODY}\n"
    document = await environment.run_verb("label", "qwen", "stable", "2", "--json")
    assert json.loads(document.err) == {"warning": NOBODY}
    environment.answers, environment.works_on = True, "batch:{other}:requests"
    assert (
        "works on another queue, batch:{other}:requests"
        in (await environment.run_verb("drain", "qwen-v3")).err
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("label", "qwen", "stable"),
        ("label", "qwen", "stable", "3", "--clear"),
        ("label", "q" * 257, "stable", "3"),
        ("label", "qwen", "", "3"),
        ("drain", "a\nb"),
        ("drain", "qwen-v3", "--undo", "--why", "it is mended"),
    ],
)
async def test_invalid_arguments_of_label_and_drain_are_wrong_usage(
    environment: Environment, arguments: tuple[str, ...]
) -> None:
    output = await environment.run_verb(*arguments)
    assert (output.code, output.out) == (2, "")
    assert output.err
    assert await environment.refresh_warm_markers() == ModelRegistryState()


# Drains.


async def test_drain_accepts_a_full_name_and_shows_how_to_undo_it(environment: Environment) -> None:
    environment.models = [QWEN, model("other")]
    output = await environment.run_verb("drain", "qwen-v3", "--why", "a bad quantisation", "--by", "ada")
    undo = "batch-dispatcher models drain qwen-v3 --undo"
    assert (output.code, output.lines) == (0, [f"qwen-v3 takes nothing new; take it back with: {undo}"])
    drained = (await environment.refresh_warm_markers()).drained_models
    assert drained["qwen-v3"].startswith("by ada since ")
    assert drained["qwen-v3"].endswith(": a bad quantisation")
    assert (await environment.run_verb("drain", "other")).err == "", "a model without versions counts as well"
    undone = await environment.run_verb("drain", "qwen-v3", "--undo")
    assert (undone.code, undone.lines) == (0, ["qwen-v3 may take requests"])
    assert (await environment.refresh_warm_markers()).drained_models.keys() == {"other"}
    again = await environment.run_verb("drain", "qwen-v3", "--undo")
    assert (again.code, again.lines) == (1, ["qwen-v3 was not drained"])


async def test_short_version_name_is_resolved_with_its_model(environment: Environment) -> None:
    environment.models = [QWEN, model("llama", version("llama-v3"))]
    refused = await environment.run_verb("drain", "v3")
    assert (refused.code, refused.out) == (1, "")
    short = "v3 is a short form of qwen-v3 (of qwen), llama-v3 (of llama): give the full name, or --model"
    assert refused.err == f"{short}\n"
    document = await environment.run_verb("drain", "v3", "--model", "qwen", "--by", "ada", "--json")
    assert json.loads(document.out) == {
        "name": "qwen-v3",
        "drained": {"by": "ada", "why": ""},
        "changed": True,
    }
    assert (await environment.refresh_warm_markers()).drained_models.keys() == {"qwen-v3"}
    undone = await environment.run_verb("drain", "3", "--model", "qwen", "--undo", "--json")
    assert json.loads(undone.out) == {"name": "qwen-v3", "drained": None, "changed": True}
    unknown = await environment.run_verb("drain", "v9", "--model", "qwen")
    assert unknown.code == 1
    assert unknown.err == "qwen: v9 is no version of it; there are qwen-v3, qwen-v2, qwen-v1, qwen-v0\n"
    other = await environment.run_verb("drain", "v9", "--model", "bge")
    assert (other.code, "there are versions of qwen, llama" in other.err) == (1, True)
    twins = [version("qwen-a-v3", label="3"), version("qwen-b-v3", label="3")]
    environment.models = [model("qwen", *twins)]
    assert (
        "3 may mean qwen-a-v3, qwen-b-v3" in (await environment.run_verb("drain", "3", "--model", "qwen")).err
    )
    environment.answers = False
    assert (
        "no versions of qwen are known (nothing listens on"
        in (await environment.run_verb("drain", "3", "--model", "qwen")).err
    )
    assert await environment.refresh_warm_markers() == ModelRegistryState()


async def test_short_name_drained_without_a_dispatcher_can_be_undone(environment: Environment) -> None:
    environment.answers = False
    assert (await environment.run_verb("drain", "v3")).code == 0
    environment.answers, environment.models = True, [QWEN]
    assert (await environment.run_verb("drain", "v3", "--undo")).lines == ["v3 may take requests"]
    assert await environment.refresh_warm_markers() == ModelRegistryState()


async def test_drain_warns_if_no_other_version_is_served(environment: Environment) -> None:
    last = [version("qwen-v3"), version("qwen-v2", drained=True), version("qwen-v1", "gone", serving=0)]
    environment.models = [model("qwen", *last)]
    output = await environment.run_verb("drain", "qwen-v3")
    assert output.err == "no other version of qwen is served: its requests wait until one is\n"
    assert (await environment.run_verb("drain", "qwen-v3", "--undo")).err == ""


@pytest.mark.parametrize(
    ("others", "goes_to"),
    [
        ([version("qwen-v4", "cold"), version("qwen-v3", "cold")], "qwen-v4"),
        ([version("qwen-v4", "cold"), version("qwen-v1")], "qwen-v1"),
    ],
    ids=["the newest", "what is open"],
)
@pytest.mark.parametrize("form", [("qwen-v2",), ("v2", "--model", "qwen")])
async def test_draining_a_labelled_version_names_its_successor_and_requires_yes(
    environment: Environment, others: list[dict[str, Any]], goes_to: str, form: Sequence[str]
) -> None:
    versions = sorted([version("qwen-v2", labels=["old", "stable"]), *others], key=lambda one: one["name"])
    environment.models = [model("qwen", *reversed(versions), policy=BY_LABEL)]
    for more in ((), ("--json",)):
        refused = await environment.run_verb("drain", *form, *more)
        assert refused.code == 2
        assert (
            f"the label stable of qwen stands for qwen-v2: without it requests go to {goes_to},"
            in refused.err
        )
        assert "batch-dispatcher models label qwen stable VERSION; give --yes" in refused.err
        assert (await environment.refresh_warm_markers()).drained_models == {}
    assert (await environment.run_verb("drain", *form, "--yes")).code == 0
    assert (await environment.refresh_warm_markers()).drained_models.keys() == {"qwen-v2"}
    assert (await environment.run_verb("drain", *form, "--undo")).code == 0, "no question is asked"


@pytest.mark.parametrize(
    "one",
    [
        model("qwen", version("qwen-v3"), version("qwen-v2", labels=["stable"]), policy="latest"),
        model("qwen", version("qwen-v3"), version("qwen-v2", labels=["old"]), policy=BY_LABEL),
        model(
            "qwen", version("qwen-v3"), version("qwen-v2", labels=["stable"], drained=True), policy=BY_LABEL
        ),
        model("qwen", version("qwen-v3", serving=0), version("qwen-v2", labels=["stable"]), policy=BY_LABEL),
    ],
    ids=["another policy", "another label", "drained already", "no successor"],
)
async def test_draining_asks_nothing_if_no_label_is_overridden(
    environment: Environment, one: dict[str, Any]
) -> None:
    environment.models = [one]
    assert (await environment.run_verb("drain", "qwen-v2")).code == 0


@pytest.mark.parametrize("answer", ["y", "n"])
def test_answer_on_a_terminal_decides_about_draining(answer: str) -> None:
    given = typer.Typer()
    given.command()(lambda: rollout._confirm_drain("it goes elsewhere", can_ask=True))
    done = CliRunner().invoke(given, input=f"{answer}\n")
    assert done.exit_code == (0 if answer == "y" else 1)
    assert "it goes elsewhere. Drain it all the same?" in done.stderr


@pytest.mark.parametrize(
    ("answers", "models", "why"),
    [
        (True, [], f"the dispatcher that answers watches no models: {UNWATCHED}"),
        (False, [], NOBODY),
        (True, [QWEN], "no endpoint lists mistral now: it takes effect when one does"),
    ],
    ids=["unwatched", "nobody", "unlisted"],
)
async def test_drain_without_immediate_effect_says_when_it_takes_effect(
    environment: Environment, answers: bool, models: Any, why: str
) -> None:
    """The messages about the mark and about its effect agree."""
    environment.answers, environment.models = answers, models
    output = await environment.run_verb("drain", "mistral")
    undo = "batch-dispatcher models drain mistral --undo"
    assert (output.code, output.lines) == (
        0,
        [f"mistral is marked as drained; take it back with: {undo}", why],
    )
    assert (await environment.refresh_warm_markers()).drained_models.keys() == {"mistral"}
    undone = await environment.run_verb("drain", "mistral", "--undo")
    watched = answers and models
    document = "mistral may take requests" if watched else "mistral is no longer marked as drained"
    assert (undone.code, undone.lines) == (0, [document] if watched else [document, why])
    assert await environment.refresh_warm_markers() == ModelRegistryState()


# Listing.


async def test_list_shows_versions_below_their_model(environment: Environment) -> None:
    environment.models = [QWEN, model("other", waiting=3)]
    output = await environment.run_verb("show")
    rows = [line.split("  ") for line in output.out.splitlines()]
    assert [[cell.strip() for cell in row if cell.strip()] for row in rows[1:5]] == [
        ["qwen", "ready", "2 of 2", "0", "90 s", "it is served"],
        ["qwen-v3", "cold", "2", "90 s", "warm at 1 of 2"],
        [
            "qwen-v2",
            "open",
            "2",
            "90 s",
            "100.0% of the requests; warm at 2 of 2; labelled stable (by ada since noon)",
        ],
        ["qwen-v1", "retiring", "2", "90 s", "drained by bob since noon: it leaks"],
    ]
    assert "qwen-v0" not in output.out, "the version is gone"
    waiting = await environment.run_verb("show", "--waiting")
    assert "qwen" not in waiting.out
    assert json.loads((await environment.run_verb("show", "--json")).out) == environment.models


async def test_show_prints_policy_labels_and_all_versions(environment: Environment) -> None:
    environment.models = [QWEN]
    output = await environment.run_verb("show", "qwen")
    document = [" ".join(line.split()) for line in output.out.splitlines()]
    assert f"policy {BY_LABEL}" in document
    assert "label stable is 2, set by ada since noon" in document
    assert "label old is 1, by the settings" in document
    assert "version qwen-v3 (3): cold for 90 s, at 2 endpoints; warm at 1 of 2" in document
    assert "version qwen-v0 (0): gone for 90 s, at 0 endpoints" in document
    refused = await environment.run_verb("show", "qwen-v2")
    assert (refused.code, refused.err) == (
        1,
        "qwen-v2 is a version of qwen: batch-dispatcher models show qwen\n",
    )


async def test_models_are_listed_if_the_number_of_waiting_requests_is_unknown(
    environment: Environment,
) -> None:
    environment.models = [model("early", waiting=None), model("other", waiting=0)]
    for options in ((), ("--waiting",)):
        document = await environment.run_verb("show", *options)
        assert (document.code, "other" in document.out) == (0, not options)
        row = next(line for line in document.out.splitlines() if line.startswith("early"))
        assert " unknown " in row
    shown = (await environment.run_verb("show", "early")).out.splitlines()
    assert [line.split()[-1] for line in shown if "waiting" in line] == ["unknown"]


async def test_labels_and_drains_are_listed_from_the_queue_without_a_dispatcher(
    environment: Environment,
) -> None:
    environment.answers = False
    member = encode_member("early", b'{"model": "qwen"}', LATER)
    await environment.queue.submit([Submission(member, LATER)])
    (lease,) = (await claim(environment.queue, 1)).leases
    await environment.queue.release([Release(lease, is_undelivered=True, extra=ModelWait("qwen"))])
    await environment.queue.drain_version("llama-v1", "ada", "it leaks")
    await environment.queue.set_label("mistral", "stable", "2", "bob")
    rows = json.loads((await environment.run_verb("show", "--json")).out)
    assert [(each["name"], each["state"], each["waiting"]) for each in rows] == [
        ("qwen", "unknown", 1),
        ("llama-v1", "unknown", 0),
        ("mistral", "unknown", 0),
    ]
    assert rows[1]["drained_by"].endswith(": it leaks")
    assert rows[2]["labels"]["stable"]["by"].startswith("by bob since")
    assert "drained by ada since" in (await environment.run_verb("show")).out
    assert "stable is 2, set by bob since" in (await environment.run_verb("show", "mistral")).out
    with environment.server.client() as client:
        for key in NAMES.feature_pool_keys:
            client.set(key, "foreign")
    foreign = await environment.run_verb("show")
    assert foreign.code == 0
    assert "models:labels holds a string" in foreign.err
    refused = await environment.run_verb("drain", "qwen-v3")
    assert (refused.code, refused.out) == (1, "")
    assert "models:drains holds a string" in refused.err


async def test_model_without_versions_in_the_status_is_listed(environment: Environment) -> None:
    new = ("drained_by", "policy", "labels", "versions")
    environment.models = [{name: value for name, value in model("qwen").items() if name not in new}]
    for arguments in (("show",), ("show", "qwen")):
        output = await environment.run_verb(*arguments)
        assert (output.code, output.err) == (0, "")
    assert "has no versions" in (await environment.run_verb("label", "qwen", "stable", "2")).err
    assert (await environment.run_verb("drain", "qwen")).code == 0
