"""A dispatcher without configured capacity, and pickers that do not report one either."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.scenarios.processes import Stage

pytestmark = pytest.mark.slow

SLOTS, SERVERS = 48, 3
REALTIME_PER_S, REALTIME_S, BATCH_S = 6.0, 1.2, 1.35
MEASURED_S = 30.0


def write_poisson_trace(path: Path, seconds: float) -> Path:
    """Write realtime requests that arrive at random, REALTIME_PER_S on average."""
    random_source, at, lines = random.Random(0), 0.0, ["seconds,context_tokens,generated_tokens"]
    while (at := at + random_source.expovariate(REALTIME_PER_S)) < seconds:
        lines.append(f"{at:.4f},500,50")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.first
@pytest.mark.parametrize("picker", ["utilization", "concurrency", "no flow control"])
def test_realtime_requests_barely_wait_beside_a_dispatcher_without_configured_capacity(
    stage: Stage, tmp_path: Path, picker: str
) -> None:
    """An earlier version sent 285 requests to 48 slots for long, and realtime requests waited for seconds.

    The stand-in reproduces that with the dispatcher of commit 71b41bd: at most 292 requests with the
    utilization detector, and 289 without flow control.
    """
    world = stage.world(
        slots=SLOTS,
        endpoints=SERVERS,
        flow_control=str(picker != "no flow control").lower(),
        detector="concurrency" if picker == "concurrency" else "utilization",
        kv_at_full=0.1,
        seconds=BATCH_S,
        realtime_seconds=REALTIME_S,
        trace=write_poisson_trace(tmp_path / "realtime.csv", MEASURED_S + 60.0),
    )
    stage.producer.submit(2500)
    settings = stage.settings(world, max_sys=None)
    dispatcher = stage.dispatcher(settings)
    pool = world.observe_for(MEASURED_S)["pool"]
    status = dispatcher.status()
    print(f"{picker}: {pool['all']}, realtime waits {pool['wait_s']['realtime']}, {status['max_sys']} found")
    assert pool["all"]["peak"] <= 1.5 * SLOTS
    assert pool["all"]["mean"] <= SLOTS
    assert pool["wait_s"]["realtime"]["p50"] == pytest.approx(0.0, abs=0.05)
    assert pool["wait_s"]["realtime"]["mean"] < 0.25
    assert 0.85 * SLOTS <= status["max_sys"] <= 1.3 * SLOTS
