"""What a dispatcher tells of a hostile crowd, at debug and traced in full: every request, and no secret."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dispatcher.core.sequences.turns import Turn
from tests.scenarios.processes import NAMES, POOL, Stage
from tests.support import wait_until_sync
from tests.telemetry.traces import Collector

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"


def test_neither_log_nor_traces_hold_a_payload_a_token_or_a_secret(stage: Stage, tmp_path: Path) -> None:
    world = stage.world(slots=32, seconds=0.05)
    holders = ("gateway", "admin", "redis", "collector", "header")
    secret = {name: f"the-{name}-must-not-show" for name in holders}
    for name in ("gateway", "admin"):
        (tmp_path / name).write_text(secret[name])
    collector = Collector()
    with collector.serve():
        one = stage.dispatcher(
            stage.settings(
                world,
                gateway={
                    "token_file": str(tmp_path / "gateway"),
                    "headers": {"x-key": secret["header"]},
                    "timeout_s": 1,
                },
                queue={"url": stage.server.url.replace("//", f"//default:{secret['redis']}@", 1)},
                admin={"token_file": str(tmp_path / "admin")},
                retry={"base_s": 0.05, "max_s": 0.1, "max_attempts": 2},
                log={"level": "debug"},
                tracing={"endpoint": collector.url.replace("//", f"//us:{secret['collector']}@")},
            )
        )
        hostile: list[dict[str, Any]] = [
            {"kind": "status", "status": 302, "body": "the-answer-must-not-show"},
            {"kind": "status", "status": 500, "body": "the-answer-must-not-show"},
            {"kind": "status", "status": 400, "body": "the-answer-must-not-show"},
            {"kind": "reset"},
            {"kind": "cut"},
            {"kind": "hang"},
        ]
        for sim in [{}, *hostile]:
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
                    sequence=Turn("chat", secret="the-secret-of-a-sequence-must-not-show"),
                    metadata={"traceparent": PARENT},
                )
                stage.producer.wait_for_all(timeout_s=20)  # a gateway's answers are a gateway's from now on
        stage.producer.put(
            {b'{"the-member-must-not-show': 1.0, b'{"data":{"the-member-must-not-show":1}}': 2.0}
        )
        stage.producer.wait_for_all(timeout_s=40)
        wait_until_sync(lambda: stage.producer.count_requests()["leased"] == 0, what="all leases to end")
        assert one.terminate() == 0
    log = "".join(path.read_text() for path in sorted(one.folder.glob("log.*")))
    for told in (log, *(body.decode("latin-1") for body in collector.bodies)):
        assert "must-not-show" not in told, told[max(0, told.index("must-not-show") - 200) :][:400]

    ids = set(stage.producer.submitted)
    tries, ended = one.events("attempt"), one.events("lease-ended")
    assert (
        {each["request"] for each in tries}
        == {each["request"] for each in one.events("attempt-started")}
        == ids
    )
    assert {each["request"] for each in ended} >= ids
    assert {each["trace"] for each in tries} == {"a" * 32}
    assert {each["attempt"] for each in tries} == {1, 2}
    assert {each["outcome"] for each in tries} == {"delivered", "failed"}
    spans = collector.spans()
    assert {bytes(span.trace_id).hex() for span in spans} == {"a" * 32}
    assert sum(span.name == "POST" for span in spans) == len(tries)
    assert sum(span.name == f"wait {NAMES.queue}" for span in spans) == len(tries)
    gates = one.events("gate")
    terms = {"reason", "limit", "in_flight", "explanation"}
    budget = {"f_sys", "f_epp", "reserve", "budget", "headroom", "max_sys", "signal", "reading_age_s"}
    assert all(terms <= gate.keys() for gate in gates)
    assert any(terms | budget <= gate.keys() for gate in gates)
    assert one.events("started")[0]["pool"] == POOL
