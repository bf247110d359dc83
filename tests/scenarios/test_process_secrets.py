"""Debug log and traces of hostile requests contain every request, but no payloads and no secrets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dispatcher.features.sequences.turns import Turn
from tests.scenarios.processes import NAMES, POOL, Stage
from tests.support import wait_until_sync
from tests.telemetry.trace_collector import Collector

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"


def test_log_and_traces_contain_no_payload_token_or_secret(stage: Stage, tmp_path: Path) -> None:
    world = stage.world(slots=32, seconds=0.05)
    secret_names = ("gateway", "admin", "redis", "collector", "header")
    secrets = {name: f"the-{name}-must-not-show" for name in secret_names}
    for name in ("gateway", "admin"):
        (tmp_path / name).write_text(secrets[name])
    collector = Collector()
    with collector.serve():
        dispatcher = stage.dispatcher(
            stage.settings(
                world,
                gateway={
                    "token_file": str(tmp_path / "gateway"),
                    "headers": {"x-key": secrets["header"]},
                    "timeout_s": 1,
                },
                queue={"url": stage.server.url.replace("//", f"//default:{secrets['redis']}@", 1)},
                admin={"token_file": str(tmp_path / "admin")},
                retry={"base_s": 0.05, "max_s": 0.1, "max_attempts": 2},
                log={"level": "debug"},
                tracing={"endpoint": collector.url.replace("//", f"//us:{secrets['collector']}@")},
            )
        )
        hostile_answers: list[dict[str, Any]] = [
            {"kind": "status", "status": 302, "body": "the-answer-must-not-show"},
            {"kind": "status", "status": 500, "body": "the-answer-must-not-show"},
            {"kind": "status", "status": 400, "body": "the-answer-must-not-show"},
            {"kind": "reset"},
            {"kind": "cut"},
            {"kind": "hang"},
        ]
        for sim in [{}, *hostile_answers]:
            payload = json.dumps({"prompt": "the-payload-must-not-show", "sim": sim}).encode()
            stage.producer.submit(
                5,
                payload,
                prefix=sim.get("kind", "plain"),
                token="the-token-must-not-show",
                headers={"authorization": "the-header-must-not-show", "x-own": "the-header-must-not-show"},
                metadata={"traceparent": PARENT, "note": "the-metadata-must-not-show"},
            )
            if not sim:
                stage.producer.submit(
                    2,
                    payload,
                    prefix="turn",
                    extra=Turn("chat", secret="the-secret-of-a-sequence-must-not-show"),
                    metadata={"traceparent": PARENT},
                )
                stage.producer.wait_for_all(timeout_s=20)  # from now on the gateway counts as verified
        stage.producer.add_members(
            {b'{"the-member-must-not-show': 1.0, b'{"data":{"the-member-must-not-show":1}}': 2.0}
        )
        stage.producer.wait_for_all(timeout_s=40)
        wait_until_sync(lambda: stage.producer.count_requests()["leased"] == 0, what="all leases to end")
        assert dispatcher.terminate() == 0
    log = "".join(path.read_text() for path in sorted(dispatcher.folder.glob("log.*")))
    for text in (log, *(body.decode("latin-1") for body in collector.bodies)):
        assert "must-not-show" not in text, text[max(0, text.index("must-not-show") - 200) :][:400]

    ids = set(stage.producer.submitted)
    attempts, ended_leases = dispatcher.events("attempt"), dispatcher.events("lease-ended")
    assert (
        {each["request"] for each in attempts}
        == {each["request"] for each in dispatcher.events("attempt-started")}
        == ids
    )
    assert {each["request"] for each in ended_leases} >= ids
    assert {each["trace"] for each in attempts} == {"a" * 32}
    assert {each["attempt"] for each in attempts} == {1, 2}
    assert {each["outcome"] for each in attempts} == {"delivered", "failed"}
    spans = collector.read_spans()
    assert {bytes(span.trace_id).hex() for span in spans} == {"a" * 32}
    assert sum(span.name == "POST" for span in spans) == len(attempts)
    assert sum(span.name == f"wait {NAMES.queue}" for span in spans) == len(attempts)
    gates = dispatcher.events("gate")
    fields = {"reason", "limit", "in_flight", "explanation"}
    budget_fields = {"f_sys", "f_epp", "reserve", "budget", "headroom", "max_sys", "signal", "reading_age_s"}
    assert all(fields <= gate.keys() for gate in gates)
    assert any(fields | budget_fields <= gate.keys() for gate in gates)
    assert dispatcher.events("started")[0]["pool"] == POOL
