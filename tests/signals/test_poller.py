"""The poller of signal sources: which source it uses, what it publishes, and that every failure closes the
gate."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal

import pytest
from structlog.testing import capture_logs

from dispatcher.limit.budget import Policy, Reason, Signal
from dispatcher.limit.limiter import Limiter
from dispatcher.limit.poll import ReadFailure
from dispatcher.limit.realtime_impact import ReplicaHistograms
from dispatcher.settings.signals import SignalsSettings
from dispatcher.signals.epp.series import PoolView
from dispatcher.signals.epp.source import EppSource
from dispatcher.signals.poller import RETURN_AFTER_POLLS, Poller, SignalSource, SourcePoll, SourcePreference
from dispatcher.signals.prometheus.session import PrometheusAddress
from dispatcher.signals.prometheus.source import PrometheusSource
from dispatcher.signals.scrape import Targets
from tests.signals import fakes
from tests.signals.fakes import (
    HEALTHY_VALUES,
    answering,
    fake_epp,
    fake_prometheus,
    http_answer,
    raw_server,
    read_page,
)
from tests.support import free_port, wait_until

INTERVAL_S = 0.05
FAILED = ReadFailure(Reason.UNREADABLE, "broken 1", "mend it")


@dataclass
class ScriptedSource:
    """A source that returns what the test sets."""

    name: Literal["epp", "prometheus"]
    answer: tuple[PoolView, ...] | ReadFailure | None = None
    """Result of a poll, or `None` for a healthy view of this moment."""
    fails_every: int = 0
    """Interval of failing polls: each poll of this number fails whatever `answer` is. 0 for none."""
    age_s: float = 0.0
    min_interval_s: float = 0.0
    latencies: ReplicaHistograms | None = None
    polls: int = 0
    running_polls: int = 0
    max_running_polls: int = 0
    release: asyncio.Event | None = None
    closed: bool = False
    started_at: list[float] = field(default_factory=list)
    addresses: list[tuple[str, ...] | None] = field(default_factory=list)

    async def poll(self) -> tuple[PoolView, ...] | ReadFailure:
        self.polls += 1
        self.started_at.append(asyncio.get_running_loop().time())
        self.running_polls += 1
        self.max_running_polls = max(self.max_running_polls, self.running_polls)
        try:
            if self.release is not None:
                await self.release.wait()
            await asyncio.sleep(0)
        finally:
            self.running_polls -= 1
        if self.fails_every and self.polls % self.fails_every == 1:
            return FAILED
        return (healthy_view(self.age_s),) if self.answer is None else self.answer

    async def close(self) -> None:
        self.closed = True

    async def read_latencies(self) -> ReplicaHistograms | None:
        return self.latencies

    def set_replicas(self, addresses: tuple[str, ...] | None) -> None:
        self.addresses.append(addresses)


def healthy_view(age_s: float = 0.0, **changes: Any) -> PoolView:
    now = asyncio.get_running_loop().time() - age_s
    return replace(PoolView(now, now, saturation=0.5, queued=0, running=10, waiting=0, ready=1), **changes)


@contextlib.asynccontextmanager
async def run_poller(
    *sources: SignalSource, policy: Policy | None = None, **signals: Any
) -> AsyncIterator[tuple[Poller, list[SourcePoll]]]:
    """Run a poller, and yield it with the list of all polls that it publishes."""
    polls: list[SourcePoll] = []
    settings = SignalsSettings.model_validate({"interval_s": INTERVAL_S, **signals})
    poller = Poller(sources, settings, policy or Policy(), polls.append, jitter=random.Random(1))
    running = asyncio.create_task(poller.run())
    try:
        yield poller, polls
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def wait_for_poll(polls: list[SourcePoll], condition: Callable[[SourcePoll], bool]) -> SourcePoll:
    """Wait for a new poll for which the condition holds."""
    start = len(polls)
    return await wait_until(lambda: next((poll for poll in polls[start:] if condition(poll)), None))


# One source


async def test_defect_in_computing_latencies_does_not_stop_the_polls() -> None:
    epp = ScriptedSource("epp", latencies=ReplicaHistograms("", ttft={inf: "no number"}))  # type: ignore[dict-item]
    async with run_poller(epp) as (_, polls):
        poll = await wait_for_poll(polls, lambda poll: poll.realtime_impact.why_not != "not read yet")
        assert poll.realtime_impact.why_not.startswith("the dispatcher failed")
        await wait_for_poll(polls, lambda poll: bool(poll.readings))


async def test_poll_has_its_source_signals_and_readings() -> None:
    epp = ScriptedSource("epp")
    async with run_poller(epp) as (_, polls):
        await wait_until(lambda: len(polls) >= 3)
    poll = polls[-1]
    assert (poll.source, poll.failures) == ("epp", ())
    assert poll.signals == (Signal.SATURATION, Signal.REQUESTS)
    assert {reading.signal for reading in poll.readings} == set(poll.signals)
    assert all(
        reading.source == "epp" and reading.closed_at <= poll.completed_at for reading in poll.readings
    )
    assert {reading.max_age_s for reading in poll.readings} == {10}
    assert epp.closed


async def test_source_is_not_polled_again_before_it_has_answered() -> None:
    epp = ScriptedSource("epp", release=asyncio.Event())
    async with run_poller(epp) as (poller, polls):
        await wait_until(lambda: epp.polls == 1)
        for _ in range(5):
            poller.poll_soon()
            await asyncio.sleep(INTERVAL_S)
        assert epp.polls == 1
        assert epp.release is not None
        epp.release.set()
        await wait_until(lambda: len(polls) >= 3)
    assert epp.max_running_polls == 1


async def test_polls_keep_their_interval() -> None:
    """Polls delayed by a busy machine are not repeated in a burst, and intervals have jitter."""
    epp = ScriptedSource("epp")
    async with run_poller(epp) as (_, polls):
        await wait_until(lambda: len(polls) >= 20)
    gaps = [after - state for state, after in itertools.pairwise(epp.started_at)]
    assert min(gaps) >= 0.89 * INTERVAL_S
    assert len({round(gap, 3) for gap in gaps}) > 1


async def test_source_is_not_polled_more_often_than_its_minimum_interval() -> None:
    slow = ScriptedSource("prometheus", min_interval_s=3600)
    async with run_poller(slow) as (_, polls):
        await wait_until(lambda: polls)
        await asyncio.sleep(5 * INTERVAL_S)
    assert slow.polls == 1


async def test_poll_soon_does_not_wait_for_the_interval() -> None:
    epp = ScriptedSource("epp")
    async with run_poller(epp, interval_s=3600) as (poller, polls):
        await wait_until(lambda: len(polls) == 1)
        poller.poll_soon()
        await wait_until(lambda: len(polls) == 2)


async def test_failure_is_published_with_its_reason_and_readings_follow_it() -> None:
    epp = ScriptedSource("epp", FAILED)
    async with run_poller(epp) as (_, polls):
        poll = await wait_for_poll(polls, lambda poll: bool(poll.failures))
        assert (poll.readings, poll.failures) == ((), (FAILED,))
        epp.answer = None
        await wait_for_poll(polls, lambda poll: bool(poll.readings))


async def test_old_sample_is_stale() -> None:
    epp = ScriptedSource("epp", age_s=11)
    async with run_poller(epp) as (_, polls):
        poll = await wait_for_poll(polls, lambda poll: bool(poll.failures))
        assert poll.readings == ()
        assert poll.failures[0].reason is Reason.STALE
        assert re.fullmatch(r"the samples are 1\d\.\d s old, more than 10 s", poll.failures[0].why)
        assert "signals.max_age_s" in poll.failures[0].hint


async def test_missing_replica_is_a_failure() -> None:
    """The watch reports two replicas, and one is read: requests that wait in the other are unknown."""
    epp = ScriptedSource("epp")
    async with run_poller(epp) as (poller, polls):
        await wait_until(lambda: polls)
        poller.update_from_watch(("10.0.0.1", "10.0.0.2"))
        poll = await wait_for_poll(polls, lambda poll: bool(poll.failures))
        assert "1 of the endpoint picker's 2 replicas" in poll.failures[0].why
        assert epp.addresses[-1] == ("10.0.0.1", "10.0.0.2")
        poller.update_from_watch(("10.0.0.1",))
        await wait_for_poll(polls, lambda poll: bool(poll.readings))


async def test_reconfigure_takes_effect_at_once_and_closes_the_old_source() -> None:
    old, new = ScriptedSource("epp"), ScriptedSource("prometheus")
    async with run_poller(old, interval_s=3600) as (poller, polls):
        await wait_until(lambda: polls)
        poller.update_from_watch(("10.0.0.1",))
        settings = SignalsSettings.model_validate({"interval_s": INTERVAL_S, "use": "requests"})
        poller.reconfigure([new], settings, Policy(max_sys=64))
        poll = await wait_for_poll(polls, lambda poll: poll.source == "prometheus")
        assert old.closed
        assert new.addresses == [("10.0.0.1",)]
        assert [reading.signal for reading in poll.readings] == [Signal.REQUESTS]
        assert poll.readings[0].max_sys == 64
    assert new.closed


async def test_learned_capacity_and_differing_setting_are_logged_once_each() -> None:
    """A reload that changes the setting or nothing does not log the learned capacity again."""
    request_counts = itertools.cycle((3, 7, 11, 15))
    epp = ScriptedSource("epp")

    def show_next_page() -> None:
        request_count = next(request_counts)
        now = 10.0 * len(polls)  # far enough apart for a proof
        epp.answer = (
            PoolView(now, now, saturation=request_count / 16, queued=0, ready=1, in_flight=request_count),
        )

    with capture_logs() as logs:
        async with run_poller(epp, max_age_s=3600) as (poller, polls):
            show_next_page()

            async def prove_capacity(policy: Policy) -> None:
                poller.reconfigure([epp], SignalsSettings(interval_s=INTERVAL_S), policy)
                count = len(polls)
                for number in range(1, 9):
                    await wait_until(lambda number=number: len(polls) >= count + number)  # type: ignore[misc]
                    show_next_page()

            for policy in (Policy(), Policy(reserve=0.1), Policy(per_endpoint=16), Policy(per_endpoint=8)):
                await prove_capacity(policy)
                assert polls[-1].picker_k == 16
    logged = [log for log in logs if log["event"].startswith("capacity")]
    assert [(log["event"], log["per_endpoint"]) for log in logged] == [
        ("capacity-learned", None),
        ("capacity-differs", 8),
    ]


async def test_capacity_learned_from_the_previous_picker_is_not_compared_after_a_restart() -> None:
    """The picker was configured with the number of our settings and restarted between two polls."""
    epp = ScriptedSource("epp")

    def pages(k: int, started: float, request_counts: Iterable[int]) -> Iterator[PoolView]:
        for number, request_count in enumerate(request_counts):
            at = 10.0 * number + started
            yield PoolView(
                at,
                at,
                saturation=request_count / k,
                queued=0,
                ready=1,
                in_flight=request_count,
                address="a:9090",
                started_at=started,
            )

    with capture_logs() as logs:
        async with run_poller(epp, policy=Policy(per_endpoint=16), max_age_s=1e9) as (_, polls):

            async def poll_page(page_with: PoolView) -> SourcePoll:
                epp.answer, count = (page_with,), len(polls)
                await wait_until(lambda: len(polls) > count + 1)
                return polls[-1]

            for page_with in pages(32, 100.0, (3, 7, 11, 15) * 2):
                await poll_page(page_with)
            assert polls[-1].picker_k == 32
            (restarted,) = pages(16, 5000.0, [0])
            assert (await poll_page(restarted)).picker_k is None
            for page_with in pages(16, 5000.0, (3, 7, 11, 15) * 2):
                await poll_page(page_with)
            assert polls[-1].picker_k == 16
    logged = [(log["event"], log["picker"]) for log in logs if log["event"].startswith("capacity")]
    assert logged == [("capacity-learned", 32), ("capacity-differs", 32), ("capacity-learned", 16)]


async def test_only_changes_are_logged() -> None:
    """A failure whose sentence differs only in a number is not a change."""
    epp = ScriptedSource("epp", FAILED)
    with capture_logs() as logs:
        async with run_poller(epp, policy=Policy(per_endpoint=100)) as (_, polls):
            await wait_until(lambda: len(polls) >= 5)
            epp.answer = replace(FAILED, why="broken 2.5")
            count = len(polls)
            await wait_until(lambda: len(polls) >= count + 5)
            epp.answer = None
            await wait_for_poll(polls, lambda poll: bool(poll.readings))
            count = len(polls)
            await wait_until(lambda: len(polls) >= count + 5)
    assert [log["event"] for log in logs] == [
        "signals-source",
        "signals-in-use",
        "signals-unreadable",
        "signals-readable",
    ]
    assert logs[2]["hint"] == "mend it"


# Two sources


async def test_fallback_source_is_not_polled_while_it_is_not_needed() -> None:
    epp, prometheus = ScriptedSource("epp"), ScriptedSource("prometheus")
    async with run_poller(epp, prometheus) as (_, polls):
        await wait_until(lambda: len(polls) >= 5)
    assert prometheus.polls == 0
    assert {poll.source for poll in polls} == {"epp"}


async def test_fallback_to_prometheus_does_not_close_the_gate() -> None:
    """The failure of one source is not published while the other can be read."""
    epp, prometheus = ScriptedSource("epp"), ScriptedSource("prometheus", age_s=5)
    async with run_poller(epp, prometheus) as (_, polls):
        await wait_until(lambda: len(polls) >= 2)
        epp.answer = FAILED
        poll = await wait_for_poll(polls, lambda poll: poll.source == "prometheus")
        assert {reading.max_age_s for reading in poll.readings} == {60}
        await wait_until(lambda: len(polls) >= 8)
    assert all(not poll.failures for poll in polls)


async def test_preferred_source_is_used_again_after_some_good_polls() -> None:
    epp, prometheus = ScriptedSource("epp", FAILED), ScriptedSource("prometheus")
    async with run_poller(epp, prometheus) as (_, polls):
        await wait_for_poll(polls, lambda poll: poll.source == "prometheus")
        epp.answer, epp.polls = None, 0
        await wait_for_poll(polls, lambda poll: poll.source == "epp")
        assert epp.polls >= RETURN_AFTER_POLLS


async def test_flapping_preferred_source_is_not_used() -> None:
    """It fails each time one poll before it would be used again."""
    epp, prometheus = ScriptedSource("epp", fails_every=RETURN_AFTER_POLLS), ScriptedSource("prometheus")
    async with run_poller(epp, prometheus) as (_, polls):
        await wait_until(lambda: epp.polls >= 4 * RETURN_AFTER_POLLS and polls)
    assert {poll.source for poll in polls} == {"prometheus"}


async def test_failures_of_both_sources_are_published() -> None:
    epp, prometheus = (
        ScriptedSource("epp", FAILED),
        ScriptedSource("prometheus", replace(FAILED, why="gone too")),
    )
    async with run_poller(epp, prometheus) as (_, polls):
        poll = await wait_for_poll(polls, lambda poll: len(poll.failures) == 2)
        assert [unread.why for unread in poll.failures] == ["epp: broken 1", "prometheus: gone too"]
        epp.answer = None  # without another source, the first good poll counts
        epp.polls = 0
        await wait_for_poll(polls, lambda poll: poll.source == "epp" and bool(poll.readings))


async def test_hanging_preferred_source_does_not_delay_the_fallback() -> None:
    epp, prometheus = ScriptedSource("epp", FAILED), ScriptedSource("prometheus")
    async with run_poller(epp, prometheus) as (_, polls):
        await wait_for_poll(polls, lambda poll: poll.source == "prometheus")
        epp.release = asyncio.Event()
        await wait_until(lambda: epp.running_polls == 1)
        count = len(polls)
        await wait_until(lambda: len(polls) >= count + 5)
    assert {poll.source for poll in polls[-5:]} == {"prometheus"}


async def test_missing_endpoints_do_not_cause_a_fallback() -> None:
    """Prometheus would only report the same, later."""
    epp, prometheus = ScriptedSource("epp", (healthy_view(ready=0),)), ScriptedSource("prometheus")
    async with run_poller(epp, prometheus) as (_, polls):
        await wait_until(lambda: len(polls) >= 5)
    assert prometheus.polls == 0
    assert {unread.reason for poll in polls for unread in poll.failures} == {Reason.NO_ENDPOINTS}


def test_first_source_that_answers_is_used() -> None:
    preference = SourcePreference(["epp", "prometheus"])
    assert preference.is_needed("epp")
    assert not preference.is_needed("prometheus")
    assert not preference.record_answer("epp", is_good=False)
    assert preference.is_needed("prometheus")
    assert preference.record_answer("prometheus", is_good=False)
    assert preference.record_answer("epp", is_good=True)
    assert not preference.record_answer("prometheus", is_good=True)  # an answer to an earlier poll


# Each failure of each source, as the limiter sees it


def create_epp_source(url: str, fault: str = "") -> SignalSource:
    return EppSource("qwen", Targets(urls=(url,)), timeout_s=fakes.timeout_for(fault))


def create_prometheus_source(url: str, fault: str = "") -> SignalSource:
    timeout_s = fakes.timeout_for(fault)
    return PrometheusSource(PrometheusAddress(url), "qwen", "default", timeout_s=timeout_s, max_age_s=60)


def page_with(*replacements: tuple[str, str]) -> bytes:
    text = read_page("router-newest-flow-control-on")
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    return text.encode()


READY_SERIES = 'ready_endpoints{name="qwen"} '
SATURATION_SERIES = 'stage="effective"} '

PAGE_FAULTS: dict[str, tuple[bytes, Reason]] = {
    "empty page": (b"", Reason.UNREADABLE),
    "half a page": (page_with()[:-2], Reason.UNREADABLE),
    "garbage": (b"\x00\xff" * 4000, Reason.UNREADABLE),
    "no running requests": (page_with(("average_running", "x"), ("request_running", "y")), Reason.UNREADABLE),
    "no ready endpoints": (page_with((READY_SERIES, 'x{name="qwen"} ')), Reason.UNREADABLE),
    "zero ready endpoints": (page_with((READY_SERIES + "4", READY_SERIES + "0")), Reason.NO_ENDPOINTS),
    "NaN saturation": (page_with((SATURATION_SERIES + "0.4", SATURATION_SERIES + "NaN")), Reason.IMPLAUSIBLE),
    "infinite saturation": (
        page_with((SATURATION_SERIES + "0.4", SATURATION_SERIES + "+Inf")),
        Reason.IMPLAUSIBLE,
    ),
    "negative saturation": (
        page_with((SATURATION_SERIES + "0.4", SATURATION_SERIES + "-1")),
        Reason.IMPLAUSIBLE,
    ),
    "NaN ready": (page_with((READY_SERIES + "4", READY_SERIES + "NaN")), Reason.IMPLAUSIBLE),
    "another pool": (page_with(('"qwen"', '"llama"')), Reason.UNREADABLE),
}

NETWORK_FAULTS: dict[str, Any] = {
    "reset": fakes.resetting,
    "hanging": fakes.hanging,
    "HTTP 500": answering(b"HTTP/1.1 500 X\r\nContent-Length: 0\r\n\r\n"),
    "HTTP 403": answering(b"HTTP/1.1 403 X\r\nContent-Length: 0\r\n\r\n"),
    "HTTP 302": answering(b"HTTP/1.1 302 X\r\nLocation: http://127.0.0.1:1\r\nContent-Length: 0\r\n\r\n"),
    "not HTTP": answering(b"nonsense\r\n\r\n"),
}

ROW_FAULTS: dict[str, tuple[dict[str, float], float, Reason]] = {
    "no series": ({}, 1, Reason.UNREADABLE),
    "old sample": (HEALTHY_VALUES, 61, Reason.STALE),
    "NaN": (HEALTHY_VALUES | {"SATURATION": float("nan")}, 1, Reason.IMPLAUSIBLE),
    "infinite": (HEALTHY_VALUES | {"QUEUED": float("inf")}, 1, Reason.IMPLAUSIBLE),
    "no running requests": (
        {k: v for k, v in HEALTHY_VALUES.items() if k != "RUNNING"},
        1,
        Reason.UNREADABLE,
    ),
    "no ready endpoints": ({k: v for k, v in HEALTHY_VALUES.items() if k != "READY"}, 1, Reason.UNREADABLE),
    "zero ready endpoints": (HEALTHY_VALUES | {"READY": 0.0}, 1, Reason.NO_ENDPOINTS),
    "a queue beyond any pool": (HEALTHY_VALUES | {"QUEUED": 1e308}, 1, Reason.IMPLAUSIBLE),
    "a capacity beyond any pool": (HEALTHY_VALUES | {"READY": 1e300}, 1, Reason.IMPLAUSIBLE),
    "running requests beyond any pool": (HEALTHY_VALUES | {"RUNNING": 1e16}, 1, Reason.IMPLAUSIBLE),
    "a capacity below all numbers": (HEALTHY_VALUES | {"READY": 5e-324}, 1, Reason.IMPLAUSIBLE),
    "unknown age": (HEALTHY_VALUES, float("nan"), Reason.UNREADABLE),
}


@pytest.mark.parametrize("state", ["open", "starting"])
@pytest.mark.parametrize("fault", PAGE_FAULTS)
async def test_every_page_fault_closes_the_gate(fault: str, state: str) -> None:
    body, reason = PAGE_FAULTS[fault]
    async with raw_server(answering(http_answer(body))) as port:
        await assert_poll_closes_gate(create_epp_source(f"http://127.0.0.1:{port}"), reason, state)


@pytest.mark.parametrize("kind", ["epp", "prometheus"])
@pytest.mark.parametrize("fault", [*NETWORK_FAULTS, "refused"])
async def test_every_network_fault_closes_the_gate(fault: str, kind: str) -> None:
    create_source = create_epp_source if kind == "epp" else create_prometheus_source
    if fault == "refused":
        await assert_poll_closes_gate(
            create_source(f"http://127.0.0.1:{free_port()}"), Reason.UNREADABLE, "open"
        )
        return
    async with raw_server(NETWORK_FAULTS[fault]) as port:
        await assert_poll_closes_gate(
            create_source(f"http://127.0.0.1:{port}", fault), Reason.UNREADABLE, "open"
        )


@pytest.mark.parametrize("state", ["open", "starting"])
@pytest.mark.parametrize("fault", ROW_FAULTS)
async def test_every_fault_of_prometheus_series_closes_the_gate(fault: str, state: str) -> None:
    rows, age_s, reason = ROW_FAULTS[fault]
    async with fake_prometheus() as prometheus:
        prometheus.add_target(rows, age_s=age_s)
        await assert_poll_closes_gate(create_prometheus_source(prometheus.url), reason, state)


async def assert_poll_closes_gate(source: SignalSource, reason: Reason, state: str) -> None:
    """Check that one poll of a faulty source makes a limiter allow nothing, whether it was open or had just
    started."""
    loop = asyncio.get_running_loop()
    limiter = Limiter(Policy(max_age_s=60), (Signal.SATURATION, Signal.REQUESTS))
    if state == "open":
        # Older than the samples that follow, because the limiter uses the newest sample.
        async with run_poller(ScriptedSource("epp", age_s=8)) as (_, polls):
            await wait_until(lambda: polls)
        limiter.apply_poll(polls[-1], polls[-1].completed_at)
        assert limiter.get_allowance(polls[-1].completed_at + 1).limit > 0
    async with run_poller(source, use="both") as (_, polls):
        await wait_until(lambda: polls)
    limiter.apply_poll(polls[0], polls[0].completed_at)
    allowance = limiter.get_allowance(loop.time() + 1)
    assert allowance.limit == 0
    if polls[0].failures:
        assert polls[0].failures[0].reason is reason
    if polls[0].failures and state == "starting":
        reason = Reason.STARTING  # the failure is part of the explanation
    assert allowance.reason is reason
    assert not polls[0].failures or polls[0].failures[0].why


async def test_one_failed_poll_does_not_close_the_gate_and_two_do() -> None:
    limiter = Limiter(Policy(), (Signal.SATURATION, Signal.REQUESTS))
    epp = ScriptedSource("epp")
    async with run_poller(epp, interval_s=0.5) as (_, polls):
        await wait_until(lambda: len(polls) > 2)
        for poll in polls:
            limiter.apply_poll(poll, poll.completed_at)
        read_at = polls[-1].readings[0].closed_at
        epp.answer = FAILED
        first = await wait_for_poll(polls, lambda poll: bool(poll.failures))
        limiter.apply_poll(first, first.completed_at)
        assert first.failing_since == first.completed_at
        assert read_at + 2.2 * 0.5 < first.closes_at < read_at + 3 * 0.5
        assert limiter.get_allowance(first.completed_at).limit > 0
        second = await wait_for_poll(polls, lambda poll: bool(poll.failures))
        assert (second.failing_since, second.closes_at) == (first.completed_at, first.closes_at)
        limiter.apply_poll(second, second.completed_at)
        closed = limiter.get_allowance(first.closes_at)
        assert (closed.limit, closed.reason) == (0, Reason.UNREADABLE)
        epp.answer = None
        good = await wait_for_poll(polls, lambda poll: not poll.failures)
        assert good.failing_since is None


@pytest.mark.parametrize("reason", [Reason.NO_ENDPOINTS, Reason.IMPLAUSIBLE])
async def test_missing_or_implausible_pool_closes_the_gate_at_once_and_a_later_failure_keeps_it_closed(
    reason: Reason,
) -> None:
    epp = ScriptedSource("epp")
    async with run_poller(epp) as (_, polls):
        await wait_until(lambda: polls)
        epp.answer = ReadFailure(reason, "no pods")
        poll = await wait_for_poll(polls, lambda poll: bool(poll.failures))
        assert poll.closes_at == -inf
        epp.answer = FAILED
        poll = await wait_for_poll(polls, lambda poll: poll.failures == (FAILED,))
        assert poll.closes_at == -inf


async def test_earlier_readings_do_not_count_after_a_reconfiguration() -> None:
    epp, other = ScriptedSource("epp"), ScriptedSource("epp", FAILED)
    async with run_poller(epp) as (poller, polls):
        await wait_until(lambda: polls)
        poller.reconfigure((other,), SignalsSettings(interval_s=INTERVAL_S), Policy())
        poll = await wait_for_poll(polls, lambda poll: bool(poll.failures))
        assert poll.closes_at == -inf


async def test_good_page_opens_the_gate() -> None:
    """The tables above prove nothing unless a good page opens the gate."""
    policy = Policy(per_endpoint=100)
    limiter = Limiter(policy, (Signal.SATURATION, Signal.REQUESTS))
    async with fake_epp() as epp, run_poller(create_epp_source(epp.url), policy=policy) as (_, polls):
        await wait_until(lambda: polls)
    limiter.apply_poll(polls[0], polls[0].completed_at)
    # D = 1 − (0.4 + 12/400 + 0.05) = 0.52 of 400
    assert limiter.get_allowance(polls[0].completed_at + 1).limit == 208


async def test_defect_in_a_source_closes_the_gate_and_the_poller_goes_on() -> None:
    class Broken(ScriptedSource):
        async def poll(self) -> tuple[PoolView, ...] | ReadFailure:
            await super().poll()
            raise ImportError("half a package")

    async with run_poller(Broken("epp"), interval_s=0.05) as (_, polls):
        await wait_until(lambda: len(polls) >= 2)
    for poll in polls:
        (unread,) = poll.failures
        assert unread.reason is Reason.UNREADABLE
        assert "half a package" in unread.why


IMPOSSIBLE_VALUES: dict[str, dict[str, float]] = {
    "two queues whose sum is beyond all numbers": {"queued": 1.7e308},
    "averages beyond all numbers": {"running": 1.7e308, "waiting": 1.7e308, "ready": 1e10},
    "a capacity below all numbers": {"ready": 5e-324},
    "a saturation beyond all numbers": {"saturation": 1e308, "ready": 1e308, "in_flight": 1e308},
}


@pytest.mark.parametrize("values", IMPOSSIBLE_VALUES.values(), ids=IMPOSSIBLE_VALUES)
async def test_impossible_values_close_the_gate_and_the_poller_goes_on(values: dict[str, float]) -> None:
    """Two replicas show the values, and the limiter handles the polls."""
    two = tuple(healthy_view(**values) for _ in range(2))
    policy = Policy(per_endpoint=0.4)
    limiter = Limiter(policy, (Signal.SATURATION, Signal.REQUESTS))
    polls: list[SourcePoll] = []

    def handle_poll(poll: SourcePoll) -> None:
        limiter.apply_poll(poll, poll.completed_at)
        polls.append(poll)

    poller = Poller([ScriptedSource("epp", two)], SignalsSettings(interval_s=0.1), policy, handle_poll)
    task = asyncio.create_task(poller.run())
    await wait_until(lambda: len(polls) >= 2 or task.done())
    assert not task.done(), task.exception()
    task.cancel()
    assert limiter.get_allowance(polls[-1].completed_at).limit == 0
    assert not [unread.why for poll in polls for unread in poll.failures if "failed" in unread.why]


async def test_defect_in_the_poll_handler_does_not_stop_the_poller() -> None:
    polls: list[SourcePoll] = []

    def handle_poll(poll: SourcePoll) -> None:
        polls.append(poll)
        if poll.readings:
            raise ZeroDivisionError("of ours")

    poller = Poller([ScriptedSource("epp")], SignalsSettings(interval_s=0.1), Policy(), handle_poll)
    task = asyncio.create_task(poller.run())
    await wait_until(lambda: len(polls) >= 4 or task.done())
    assert not task.done(), task.exception()
    task.cancel()
    assert ["of ours" in each.failures[0].why for each in polls if each.failures] == [True] * (
        len(polls) // 2
    )
