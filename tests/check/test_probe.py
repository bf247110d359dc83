"""`check --probe`: when it sends, when it stops, what it reports. tests/scenarios runs it as a process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dispatcher.check.probe import ProbePlan, build_payload, measure_capacity
from dispatcher.check.ramp import (
    OBSERVE_S,
    READINGS,
    SUGGESTION_S,
    PoolSample,
    ProbeEnd,
    Ramp,
    extract_counts,
)
from dispatcher.limit.budget import Reading, Signal
from dispatcher.settings.load import parse_settings
from dispatcher.settings.model import Settings
from tests.fork_server import run_cli

MAX_IN_FLIGHT = 100


def make_sample(at: float, **changes: Any) -> PoolSample:
    """Return a reading of an empty pool with two endpoints and unknown capacity."""
    defaults: dict[str, Any] = {
        "present": 0.0,
        "running": 0.0,
        "waiting": 0.0,
        "max_probe_requests": 0,
        "endpoints": 2.0,
        "per_endpoint": 8.0,
        "per_endpoint_source": "search",
    }
    return PoolSample(sampled_at=at, **defaults | changes)


def make_sample_of_probe(at: float, count: int, **changes: Any) -> PoolSample:
    """Return a reading of a pool in which only `count` requests of the probe run."""
    counts = {"present": float(count), "running": float(count), "max_probe_requests": count}
    return make_sample(at, **counts | changes)


@pytest.fixture
def ramp() -> Ramp:
    """Return a ramp that has observed a quiet pool and has begun to send."""
    new_ramp = Ramp(MAX_IN_FLIGHT)
    new_ramp.observe_sample(make_sample(0.0))
    new_ramp.observe_sample(make_sample(OBSERVE_S))
    new_ramp.sent_count = 1
    assert new_ramp.may_send
    return new_ramp


async def test_probe_fails_if_the_signals_are_fixed() -> None:
    text = "gateway: {url: 'http://127.0.0.1:1'}\nsignals: {source: fixed}\nbudget: {max_in_flight: 4}\n"
    settings = parse_settings(text, {})
    assert isinstance(settings, Settings)
    finding = await measure_capacity(settings, ProbePlan("m"))
    assert (finding.level, "signals.source is fixed" in finding.what) == ("failed", True)


def test_probe_watches_the_pool_before_it_sends() -> None:
    ramp = Ramp(MAX_IN_FLIGHT)
    ramp.observe_sample(make_sample(0.0))
    ramp.observe_sample(make_sample(OBSERVE_S - 1.0))
    assert (ramp.may_send, ramp.end) == (False, None)
    ramp.observe_sample(make_sample(OBSERVE_S))
    assert (ramp.may_send, ramp.end) == (True, None)


@pytest.mark.parametrize(
    ("pool", "is_quiet"),
    [
        ({"present": 8.0, "running": 8.0}, True),
        ({"present": 9.0, "running": 9.0}, False),
        ({"present": 1.0, "running": 0.0, "waiting": 1.0}, False),
    ],
)
def test_nothing_is_sent_unless_the_pool_is_quiet(pool: dict[str, float], is_quiet: bool) -> None:
    ramp = Ramp(MAX_IN_FLIGHT)
    ramp.observe_sample(make_sample(0.0, **pool))
    ramp.observe_sample(make_sample(OBSERVE_S, **pool))
    assert ramp.may_send is is_quiet
    if not is_quiet:
        assert ramp.end is ProbeEnd.NOT_QUIET
        found = ramp.build_finding()
        assert (found.level, found.where) == ("warning", "budget.per_endpoint")
        assert "not a quiet hour" in found.what
        assert "nothing was sent" in found.what


def test_traffic_of_others_ends_the_ramp(ramp: Ramp) -> None:
    ramp.observe_sample(make_sample_of_probe(7.0, 36, present=48.0, running=48.0))
    assert ramp.may_send, "12 of 48 are a quarter"
    ramp.observe_sample(make_sample_of_probe(8.0, 36, present=49.0, running=49.0))
    assert ramp.end is ProbeEnd.NOT_QUIET
    assert "nothing more was sent" in ramp.build_finding().what


def test_requests_of_the_probe_may_wait(ramp: Ramp) -> None:
    ramp.observe_sample(make_sample_of_probe(7.0, 40, running=32.0, waiting=8.0))
    assert ramp.end is None


def test_ceiling_is_reported_once_it_has_lasted(ramp: Ramp) -> None:
    for at in range(READINGS):
        assert ramp.end is None
        ramp.observe_sample(
            make_sample_of_probe(7.0 + at, 38, running=33.0, waiting=5.0, ceiling=33.0, confirmations=1)
        )
    assert (ramp.end, ramp.may_send) == (ProbeEnd.CEILING, False)
    found = ramp.build_finding()
    assert found.level == "ok"
    assert found.what == (
        "the pool ran 33 requests at once on 2 endpoints while others waited: set budget.per_endpoint to 16"
    )


def test_changed_ceiling_has_to_last_again(ramp: Ramp) -> None:
    for at, ceiling in enumerate((20.0, 20.0, 30.0, 30.0)):
        ramp.observe_sample(
            make_sample_of_probe(7.0 + at, 38, running=ceiling, waiting=5.0, ceiling=ceiling, confirmations=1)
        )
    assert ramp.end is None
    ramp.observe_sample(
        make_sample_of_probe(11.0, 38, running=30.0, waiting=5.0, ceiling=30.0, confirmations=1)
    )
    assert ramp.end is ProbeEnd.CEILING


def test_ceiling_that_the_limiter_confirmed_is_reported_at_once(ramp: Ramp) -> None:
    ramp.observe_sample(make_sample_of_probe(7.0, 33, ceiling=32.0, confirmations=2))
    assert ramp.end is ProbeEnd.CEILING


def test_pool_that_runs_less_than_one_request_per_endpoint_has_its_total_reported(ramp: Ramp) -> None:
    ramp.observe_sample(make_sample_of_probe(7.0, 3, running=1.0, waiting=2.0, ceiling=1.0, confirmations=2))
    assert ramp.build_finding().what.endswith("set budget.max_sys to 1")


def test_reaching_the_bound_reports_how_many_ran_at_least(ramp: Ramp) -> None:
    for at in range(READINGS):
        assert ramp.end is None
        ramp.observe_sample(make_sample_of_probe(7.0 + at, MAX_IN_FLIGHT))
    assert ramp.end is ProbeEnd.BOUND
    assert ramp.build_finding().what == (
        "at least 100 requests ran at once with no request waiting (the bound of --probe-most was reached)"
    )


def test_requests_count_as_running_only_if_two_readings_in_a_row_show_them(ramp: Ramp) -> None:
    ramp.observe_sample(make_sample_of_probe(7.0, 30))
    ramp.observe_sample(make_sample_of_probe(8.0, 60))
    ramp.observe_sample(make_sample_of_probe(9.0, 60, running=30.0, waiting=30.0))
    ramp.stop(ProbeEnd.TIME)
    found = ramp.build_finding()
    assert (found.level, found.hint) == ("warning", "--probe-seconds")
    assert "at least 30 requests ran at once with no request waiting" in found.what


def test_unconfirmed_ceiling_is_not_recommended(ramp: Ramp) -> None:
    ramp.observe_sample(
        make_sample_of_probe(7.0, 38, running=33.0, waiting=5.0, ceiling=33.0, confirmations=1)
    )
    ramp.stop(ProbeEnd.TIME)
    found = ramp.build_finding()
    assert found.level == "warning"
    assert "33 requests ran at once while others waited" in found.what
    assert "set budget" not in found.what


def test_timeout_before_the_first_request_is_explained() -> None:
    ramp = Ramp(MAX_IN_FLIGHT)
    ramp.stop(ProbeEnd.TIME, "no reading yet of requests")
    assert ramp.build_finding().what == (
        "the time was over before the pool could be judged: no reading yet of requests; nothing was sent"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"per_endpoint_source": "picker", "per_endpoint": 16.0}, "the endpoint picker counts with 16"),
        ({"per_endpoint_source": "server", "per_endpoint": 16.0}, "the model servers' own pages name 16"),
        (
            {"per_endpoint_source": None, "is_capacity_known": True},
            "a query in the settings gives the capacity",
        ),
    ],
)
def test_known_capacity_is_not_measured(changes: dict[str, Any], message: str) -> None:
    ramp = Ramp(MAX_IN_FLIGHT)
    ramp.observe_sample(make_sample(0.0, **changes))
    assert ramp.end is ProbeEnd.NAMED
    found = ramp.build_finding()
    assert (found.level, found.what.startswith(message)) == ("ok", True)
    assert "nothing was sent" in found.what


def test_suggestion_of_the_picker_is_reported_once_it_has_lasted(ramp: Ramp) -> None:
    ramp.observe_sample(make_sample_of_probe(7.0, 20, per_endpoint_source="suggestion", per_endpoint=100.0))
    ramp.observe_sample(make_sample_of_probe(8.0, 20, per_endpoint_source="suggestion", per_endpoint=16.0))
    ramp.observe_sample(
        make_sample_of_probe(7.5 + SUGGESTION_S, 20, per_endpoint_source="suggestion", per_endpoint=16.0)
    )
    assert ramp.may_send
    ramp.observe_sample(
        make_sample_of_probe(8.0 + SUGGESTION_S, 20, per_endpoint_source="suggestion", per_endpoint=16.0)
    )
    found = ramp.build_finding()
    assert found.level == "ok"
    assert found.what.startswith("the endpoint picker's pages suggest 16 requests per endpoint")


def test_nothing_is_sent_if_requests_cannot_be_counted() -> None:
    ramp = Ramp(MAX_IN_FLIGHT)
    ramp.observe_sample(make_sample(0.0, present=None, running=None))
    assert (ramp.end, ramp.build_finding().level) == (ProbeEnd.UNCOUNTED, "warning")


@pytest.mark.parametrize(
    ("end", "level"),
    [(ProbeEnd.REFUSED, "warning"), (ProbeEnd.CLOSED, "failed"), (ProbeEnd.FAILED, "failed")],
)
def test_reason_that_ended_the_probe_is_reported_and_later_ones_are_not(
    ramp: Ramp, end: ProbeEnd, level: str
) -> None:
    ramp.stop(end, "the first reason")
    ramp.stop(ProbeEnd.TIME)
    found = ramp.build_finding()
    assert (found.level, ramp.may_send) == (level, False)
    assert "the first reason" in found.what


def test_requests_are_counted_from_the_available_fields_of_a_reading() -> None:
    exact = Reading(Signal.REQUESTS, 0.0, 0.0, f_sys=0.5, f_epp=0.1, max_sys=20.0, running=10.0, waiting=2.0)
    assert extract_counts(exact) == (12.0, 10.0, 2.0)
    averages = Reading(Signal.REQUESTS, 0.0, 0.0, 0.6, 0.0, 20.0, averages=(9.0, 3.0))
    assert extract_counts(averages) == (12.0, 9.0, 3.0)
    score = Reading(Signal.SATURATION, 0.0, 0.0, 0.5, 0.0, 20.0, is_request_count=False)
    assert extract_counts(score) == (None, None, 0.0)


def test_payload_has_the_format_of_the_default_path() -> None:
    defaults = {"model": "m", "prompt": "capacity probe", "max_tokens": 64}
    assert json.loads(build_payload("/v1/completions", "m")) == defaults
    chat = json.loads(build_payload("/v1/chat/completions", "m"))
    assert chat["messages"] == [{"role": "user", "content": "capacity probe"}]
    assert "prompt" not in chat


@pytest.mark.parametrize(
    ("options", "models", "message"),
    [
        (("--offline", "--probe-model", "m"), "", "--offline tries no connection"),
        ((), "", "--probe-model NAME"),
        ((), "models: [{name: a}, {name: b}]\n", "--probe-model NAME"),
        (("--probe-model", "m", "--probe-seconds", "9"), "", "--probe-seconds must be from 10 to 300"),
    ],
)
def test_invalid_options_of_the_probe_exit_with_2(
    tmp_path: Path, options: tuple[str, ...], models: str, message: str
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("gateway: {url: http://gw}\n" + models)
    done = run_cli("check", "--config", config, "--probe", "--json", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in json.loads(done.stderr)["error"]
