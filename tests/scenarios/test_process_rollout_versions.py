"""A dispatcher of this checkout beside one of an older commit on the same queue, as during a rolling update.

Each of them is killed in turn, so that the other one continues what it has stored.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from dispatcher.features.sequences.turns import Turn
from dispatcher.lab.standin.generation_api import GenerationConfig
from dispatcher.requests.request import encode_member
from tests.features.slices.generation_gateway import generate_whole
from tests.paths import ROOT
from tests.scenarios.gateway_log import MAX_CHECK_PROMPT, find_order_errors, list_slices, summarize
from tests.scenarios.processes import Dispatcher, LogEntry, Stage, World, build_source_environment
from tests.support import require_tool, wait_until_sync

COMMIT_BEFORE = "ed6b24dab58ec468afa829433d46ace22ca90421"
"""Commit whose dispatcher runs beside that of this checkout."""
COMPLETIONS = "/v1/completions"
CONFIG = GenerationConfig(trims_content=True)
SLICE_TOKENS = 30
TURNS = 4
START_S = 30.0


@pytest.fixture(scope="module")
def version_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the package of COMMIT_BEFORE. Without a Git checkout that has it, the test is skipped."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no Git checkout, so there is no older version")
    git = [require_tool("git"), "-C", str(ROOT)]
    if subprocess.run([*git, "cat-file", "-e", COMMIT_BEFORE], capture_output=True, check=False).returncode:
        pytest.skip(f"this Git checkout does not have the commit {COMMIT_BEFORE}, as a shallow one")
    folder = tmp_path_factory.mktemp("version-before")
    archive = folder.with_suffix(".zip")
    subprocess.run([*git, "archive", "--output", str(archive), COMMIT_BEFORE, "dispatcher"], check=True)
    shutil.unpack_archive(archive, folder)
    command = [sys.executable, "-c", "import dispatcher; print(dispatcher.__file__)"]
    environ = {**os.environ, **build_source_environment(folder)}
    imported = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    assert Path(imported).is_relative_to(folder), imported
    return folder


@dataclass
class MixedVersions:
    """A dispatcher of each version, and requests of each kind."""

    stage: Stage
    version_before: Path
    source: random.Random
    world: World = field(init=False)
    dispatchers: list[Dispatcher] = field(init=False)
    """That of the version before comes first."""
    payloads: dict[str, bytes] = field(default_factory=dict)
    """Body of each request."""
    sequence_count: int = 0

    def __post_init__(self) -> None:
        config = msgspec.json.encode(CONFIG).decode()
        self.world = self.stage.world(generation=config, seconds=0.5, prefix_servers=2)
        settings = self.stage.settings(
            self.world,
            queue={"lease_s": 3},
            retry={"base_s": 0.05, "max_s": 0.2},
            slicing={"mode": "on", "tokens": SLICE_TOKENS, "min_tokens": SLICE_TOKENS + 1},
        )
        self.dispatchers = [
            self.stage.dispatcher(settings, source=self.version_before),
            self.stage.dispatcher(settings),
        ]
        for dispatcher in self.dispatchers:
            self.wait_for_slices(dispatcher)

    def wait_for_slices(self, dispatcher: Dispatcher) -> None:
        """Submit long requests until the dispatcher has checked that the model continues generations."""

        def is_checked() -> bool:
            models = dispatcher.status()["sliced_models"]
            if any(not model["whole_reason"] for model in models):
                return True
            if self.stage.producer.collect().keys() >= self.payloads.keys():
                self.submit(plain=0, sequences=0, sliced=4)
            return False

        wait_until_sync(is_checked, START_S, what="the check of the model")

    def submit(self, *, plain: int, sequences: int, sliced: int) -> None:
        members = [self._encode(f"p{len(self.payloads)}-0", 5) for _ in range(plain)]
        members += [self._encode(f"g{len(self.payloads)}-0", 150) for _ in range(sliced)]
        for number in range(self.sequence_count, self.sequence_count + sequences):
            # A turn with a long answer is sent in slices as well.
            members += [
                self._encode(f"s{number}-{index}", (5, 100)[index % 2], Turn(f"s{number}", index))
                for index in range(TURNS)
            ]
        self.sequence_count += sequences
        self.source.shuffle(members)
        self.stage.producer.add_members(dict.fromkeys(members, time.time() + 3600))
        self.stage.producer.submitted = [*self.payloads]

    def _encode(self, request_id: str, max_tokens: int, sequence: Turn | None = None) -> bytes:
        prompt = "".join(self.source.choices("aeinst.", k=2 * MAX_CHECK_PROMPT))
        fields = {"model": "m", "temperature": 0, "max_tokens": max_tokens, "prompt": prompt}
        payload = self.payloads[request_id] = msgspec.json.encode({**fields, "ignore_eos": True})
        return encode_member(
            request_id, payload, int(time.time()) + 3600, endpoint=COMPLETIONS, sequence=sequence
        )

    def kill_amid_requests(self, dispatcher: Dispatcher) -> None:
        """Kill the dispatcher while it runs requests and others have progress or wait for their turn.

        A few requests are submitted at a time, because the dispatcher that reaches the limit first would keep
        all of it if more waited.
        """
        producer = self.stage.producer
        prefix = producer.names.queue_prefix

        def is_amid_requests() -> bool:
            if not producer.count_requests()["pending"]:
                self.submit(plain=6, sequences=1, sliced=3)
            has_progress = producer.client.hlen(f"{prefix}:progress") > 0
            has_waiting_turns = producer.client.zcard(f"{prefix}:sequenced") > 0
            return has_progress and has_waiting_turns and dispatcher.status()["running"] >= 3

        wait_until_sync(is_amid_requests, START_S, what="requests of each kind to run", every_s=0.05)
        dispatcher.kill()

    def find_wrong_results(self) -> list[tuple[str, object]]:
        """Return the results that are not the text that one call generates."""
        wrong: list[tuple[str, object]] = []
        for request_id, payload in self.payloads.items():
            (result,) = self.stage.producer.results[request_id]
            expected = summarize(generate_whole(COMPLETIONS, payload, CONFIG))
            if result.get("status_code") != 200 or summarize(result["payload"]) != expected:
                wrong.append((request_id, result))
        return wrong

    def find_order_errors(self) -> list[str]:
        entries = defaultdict[str, list[LogEntry]](list)
        for entry in list_slices(self.world.log()):
            entries[entry.id.split("-")[0]].append(entry)
        return [
            f"s{number}: {error}"
            for number in range(self.sequence_count)
            for error in find_order_errors(entries[f"s{number}"], TURNS)
        ]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "rounds",
    [1, pytest.param(10, marks=[pytest.mark.long, pytest.mark.timeout(1200)])],
)
def test_each_request_has_one_right_result_while_dispatchers_of_two_versions_are_killed(
    own_stage: Stage, version_before: Path, rounds: int
) -> None:
    run = MixedVersions(own_stage, version_before, random.Random(1))
    for _ in range(rounds):
        for killed in run.dispatchers:
            run.kill_amid_requests(killed)
            # The other one continues alone what the killed one has stored.
            own_stage.producer.wait_for_all(timeout_s=120)
            killed.start()
            run.wait_for_slices(killed)
    producer = own_stage.producer
    producer.wait_for_all()
    assert run.find_wrong_results() == []
    assert run.find_order_errors() == []
    assert producer.count_results() == {"200": len(run.payloads)}
    assert not producer.find_duplicates()
    assert not producer.find_lost_requests()
    sliced_count = sum(results[0].get("slices", 1) > 1 for results in producer.results.values())
    print(f"{len(run.payloads)} requests, {sliced_count} in slices; {own_stage.producer.count_results()}")
    assert sliced_count
