"""Whose word counts, what is told of it, and that no failure of any source leaves room to send."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal

import pytest
from structlog.testing import capture_logs

from dispatcher.core.limit.budget import Policy, Reason, Signal
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.limit.poll import ReadFailure
from dispatcher.core.limit.realtime_impact import ReplicaHistograms
from dispatcher.settings import SignalsSettings
from dispatcher.signals.epp.series import PoolView
from dispatcher.signals.epp.source import EppSource
from dispatcher.signals.poller import RETURN_AFTER_POLLS, Poller, SignalSource, SourcePoll, SourcePreference
from dispatcher.signals.prometheus.session import PrometheusAddress
from dispatcher.signals.prometheus.source import PrometheusSource
from dispatcher.signals.scrape import Targets
from tests.signals import fakes
from tests.signals.fakes import GOOD, answering, fake_epp, fake_prometheus, golden, raw_server, whole
from tests.support import free_port, wait_until

INTERVAL_S = 0.05
FAILED = ReadFailure(Reason.UNREADABLE, "broken 1", "mend it")


@dataclass
class Scripted:
    """A source that says what it is told to say."""

    name: Literal["epp", "prometheus"]
    answer: tuple[PoolView, ...] | ReadFailure | None = None
    """None: a healthy view of this moment."""
    fails_every: int = 0
    """Each poll of this number fails whatever `answer` says; 0: none."""
    age_s: float = 0.0
    min_interval_s: float = 0.0
    latencies: ReplicaHistograms | None = None
    polls: int = 0
    under_way: int = 0
    most_under_way: int = 0
    hold: asyncio.Event | None = None
    closed: bool = False
    began_at: list[float] = field(default_factory=list)
    addresses: list[tuple[str, ...] | None] = field(default_factory=list)

    async def poll(self) -> tuple[PoolView, ...] | ReadFailure:
        self.polls += 1
        self.began_at.append(asyncio.get_running_loop().time())
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            if self.hold is not None:
                await self.hold.wait()
            await asyncio.sleep(0)
        finally:
            self.under_way -= 1
        if self.fails_every and self.polls % self.fails_every == 1:
            return FAILED
        return (healthy(self.age_s),) if self.answer is None else self.answer

    async def close(self) -> None:
        self.closed = True

    async def read_latencies(self) -> ReplicaHistograms | None:
        return self.latencies

    def set_replicas(self, addresses: tuple[str, ...] | None) -> None:
        self.addresses.append(addresses)


def healthy(age_s: float = 0.0, **changes: Any) -> PoolView:
    now = asyncio.get_running_loop().time() - age_s
    return replace(PoolView(now, now, saturation=0.5, queued=0, running=10, waiting=0, ready=1), **changes)


@contextlib.asynccontextmanager
async def polling(
    *sources: SignalSource, policy: Policy | None = None, **signals: Any
) -> AsyncIterator[tuple[Poller, list[SourcePoll]]]:
    """A poller at work, and everything it has told."""
    told: list[SourcePoll] = []
    settings = SignalsSettings.model_validate({"interval_s": INTERVAL_S, **signals})
    poller = Poller(sources, settings, policy or Policy(), told.append, jitter=random.Random(1))
    running = asyncio.create_task(poller.run())
    try:
        yield poller, told
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def later(told: list[SourcePoll], want: Callable[[SourcePoll], bool]) -> Callable[[], Awaitable[SourcePoll]]:
    """Waits for a poll from now on that is as wanted."""
    start = len(told)

    async def found() -> SourcePoll:
        return await wait_until(lambda: next((poll for poll in told[start:] if want(poll)), None))

    return found


# ── one source ──────────────────────────────────────────────────────────────────────────────────────────


async def test_a_defect_in_reckoning_latencies_costs_no_poll() -> None:
    epp = Scripted("epp", latencies=ReplicaHistograms("", ttft={inf: "no number"}))  # type: ignore[dict-item]
    async with polling(epp) as (_, told):
        poll = await later(told, lambda poll: poll.realtime_impact.why_not != "not read yet")()
        assert poll.realtime_impact.why_not.startswith("the dispatcher failed")
        await later(told, lambda poll: bool(poll.readings))()


async def test_every_poll_is_told_with_what_it_came_from() -> None:
    epp = Scripted("epp")
    async with polling(epp) as (_, told):
        await wait_until(lambda: len(told) >= 3)
    poll = told[-1]
    assert (poll.source, poll.failures) == ("epp", ())
    assert poll.signals == (Signal.SATURATION, Signal.REQUESTS)
    assert {reading.signal for reading in poll.readings} == set(poll.signals)
    assert all(
        reading.source == "epp" and reading.closed_at <= poll.completed_at for reading in poll.readings
    )
    assert {reading.max_age_s for reading in poll.readings} == {10}
    assert epp.closed


async def test_a_source_is_asked_again_only_when_it_has_answered() -> None:
    epp = Scripted("epp", hold=asyncio.Event())
    async with polling(epp) as (poller, told):
        await wait_until(lambda: epp.polls == 1)
        for _ in range(5):
            poller.poll_soon()
            await asyncio.sleep(INTERVAL_S)
        assert epp.polls == 1
        assert epp.hold is not None
        epp.hold.set()
        await wait_until(lambda: len(told) >= 3)
    assert epp.most_under_way == 1


async def test_polls_keep_their_cadence() -> None:
    """Never in bursts to catch up with what a busy machine delayed, and not all at the same distance."""
    epp = Scripted("epp")
    async with polling(epp) as (_, told):
        await wait_until(lambda: len(told) >= 20)
    gaps = [after - before for before, after in itertools.pairwise(epp.began_at)]
    assert min(gaps) >= 0.89 * INTERVAL_S
    assert len({round(gap, 3) for gap in gaps}) > 1


async def test_a_source_is_not_asked_more_often_than_it_learns_anything() -> None:
    slow = Scripted("prometheus", min_interval_s=3600)
    async with polling(slow) as (_, told):
        await wait_until(lambda: told)
        await asyncio.sleep(5 * INTERVAL_S)
    assert slow.polls == 1


async def test_poll_soon_does_not_wait_for_the_turn() -> None:
    epp = Scripted("epp")
    async with polling(epp, interval_s=3600) as (poller, told):
        await wait_until(lambda: len(told) == 1)
        poller.poll_soon()
        await wait_until(lambda: len(told) == 2)


async def test_a_failure_names_its_reason_and_a_return_is_told() -> None:
    epp = Scripted("epp", FAILED)
    async with polling(epp) as (_, told):
        poll = await later(told, lambda poll: bool(poll.failures))()
        assert (poll.readings, poll.failures) == ((), (FAILED,))
        epp.answer = None
        await later(told, lambda poll: bool(poll.readings))()


async def test_an_old_sample_is_stale() -> None:
    epp = Scripted("epp", age_s=11)
    async with polling(epp) as (_, told):
        poll = await later(told, lambda poll: bool(poll.failures))()
        assert poll.readings == ()
        assert poll.failures[0].reason is Reason.STALE
        assert re.fullmatch(r"the samples are 1\d\.\d s old, more than 10 s", poll.failures[0].why)
        assert "signals.max_age_s" in poll.failures[0].hint


async def test_a_hidden_replica_closes() -> None:
    """The watch knows of two, one is seen: what waits in the other is not known."""
    epp = Scripted("epp")
    async with polling(epp) as (poller, told):
        await wait_until(lambda: told)
        poller.update_from_watch(("10.0.0.1", "10.0.0.2"))
        poll = await later(told, lambda poll: bool(poll.failures))()
        assert "1 of the endpoint picker's 2 replicas" in poll.failures[0].why
        assert epp.addresses[-1] == ("10.0.0.1", "10.0.0.2")
        poller.update_from_watch(("10.0.0.1",))
        await later(told, lambda poll: bool(poll.readings))()


async def test_reconfigure_takes_effect_at_once_and_closes_what_was() -> None:
    old, new = Scripted("epp"), Scripted("prometheus")
    async with polling(old, interval_s=3600) as (poller, told):
        await wait_until(lambda: told)
        poller.update_from_watch(("10.0.0.1",))
        settings = SignalsSettings.model_validate({"interval_s": INTERVAL_S, "use": "requests"})
        poller.reconfigure([new], settings, Policy(max_sys=64))
        poll = await later(told, lambda poll: poll.source == "prometheus")()
        assert old.closed
        assert new.addresses == [("10.0.0.1",)]
        assert [reading.signal for reading in poll.readings] == [Signal.REQUESTS]
        assert poll.readings[0].max_sys == 64
    assert new.closed


async def test_what_is_learned_is_logged_once_and_each_setting_that_differs() -> None:
    """A reload that changes the setting, or nothing, teaches nothing anew."""
    fills = itertools.cycle((3, 7, 11, 15))
    epp = Scripted("epp")

    def pages() -> None:
        fill = next(fills)
        now = 10.0 * len(told)  # as far apart as they must be for a proof
        epp.answer = (PoolView(now, now, saturation=fill / 16, queued=0, ready=1, in_flight=fill),)

    with capture_logs() as logs:
        async with polling(epp, max_age_s=3600) as (poller, told):
            pages()

            async def proven(policy: Policy) -> None:
                poller.reconfigure([epp], SignalsSettings(interval_s=INTERVAL_S), policy)
                count = len(told)
                for number in range(1, 9):
                    await wait_until(lambda number=number: len(told) >= count + number)  # type: ignore[misc]
                    pages()

            for policy in (Policy(), Policy(reserve=0.1), Policy(per_endpoint=16), Policy(per_endpoint=8)):
                await proven(policy)
                assert told[-1].picker_k == 16
    named = [log for log in logs if log["event"].startswith("capacity")]
    assert [(log["event"], log["per_endpoint"]) for log in named] == [
        ("capacity-learned", None),
        ("capacity-differs", 8),
    ]


async def test_a_picker_that_began_anew_is_not_judged_by_the_number_of_the_one_before() -> None:
    """The picker was set to the number in our settings and restarted, between two polls."""
    epp = Scripted("epp")

    def pages(k: int, started: float, fills: Iterable[int]) -> Iterator[PoolView]:
        for number, fill in enumerate(fills):
            at = 10.0 * number + started
            yield PoolView(
                at,
                at,
                saturation=fill / k,
                queued=0,
                ready=1,
                in_flight=fill,
                address="a:9090",
                started_at=started,
            )

    with capture_logs() as logs:
        async with polling(epp, policy=Policy(per_endpoint=16), max_age_s=1e9) as (_, told):

            async def show(page: PoolView) -> SourcePoll:
                epp.answer, count = (page,), len(told)
                await wait_until(lambda: len(told) > count + 1)
                return told[-1]

            for page in pages(32, 100.0, (3, 7, 11, 15) * 2):
                await show(page)
            assert told[-1].picker_k == 32
            (restarted,) = pages(16, 5000.0, [0])
            assert (await show(restarted)).picker_k is None
            for page in pages(16, 5000.0, (3, 7, 11, 15) * 2):
                await show(page)
            assert told[-1].picker_k == 16
    named = [(log["event"], log["picker"]) for log in logs if log["event"].startswith("capacity")]
    assert named == [("capacity-learned", 32), ("capacity-differs", 32), ("capacity-learned", 16)]


async def test_the_log_tells_changes_only() -> None:
    """A number that moves within a sentence is no change."""
    epp = Scripted("epp", FAILED)
    with capture_logs() as logs:
        async with polling(epp, policy=Policy(per_endpoint=100)) as (_, told):
            await wait_until(lambda: len(told) >= 5)
            epp.answer = replace(FAILED, why="broken 2.5")
            count = len(told)
            await wait_until(lambda: len(told) >= count + 5)
            epp.answer = None
            await later(told, lambda poll: bool(poll.readings))()
            count = len(told)
            await wait_until(lambda: len(told) >= count + 5)
    assert [log["event"] for log in logs] == [
        "signals-source",
        "signals-in-use",
        "signals-unreadable",
        "signals-readable",
    ]
    assert logs[2]["hint"] == "mend it"


# ── two sources ─────────────────────────────────────────────────────────────────────────────────────────


async def test_the_stand_in_rests_while_it_is_not_needed() -> None:
    epp, prometheus = Scripted("epp"), Scripted("prometheus")
    async with polling(epp, prometheus) as (_, told):
        await wait_until(lambda: len(told) >= 5)
    assert prometheus.polls == 0
    assert {poll.source for poll in told} == {"epp"}


async def test_prometheus_stands_in_without_closing_the_gate() -> None:
    """The failure of one source is not told while the other can be read."""
    epp, prometheus = Scripted("epp"), Scripted("prometheus", age_s=5)
    async with polling(epp, prometheus) as (_, told):
        await wait_until(lambda: len(told) >= 2)
        epp.answer = FAILED
        poll = await later(told, lambda poll: poll.source == "prometheus")()
        assert {reading.max_age_s for reading in poll.readings} == {60}
        await wait_until(lambda: len(told) >= 8)
    assert all(not poll.failures for poll in told)


async def test_the_way_back_is_taken_after_some_good_scrapes() -> None:
    epp, prometheus = Scripted("epp", FAILED), Scripted("prometheus")
    async with polling(epp, prometheus) as (_, told):
        await later(told, lambda poll: poll.source == "prometheus")()
        epp.answer, epp.polls = None, 0
        await later(told, lambda poll: poll.source == "epp")()
        assert epp.polls >= RETURN_AFTER_POLLS


async def test_a_flapping_source_does_not_take_the_word() -> None:
    """It is always one good scrape short of having it back."""
    epp, prometheus = Scripted("epp", fails_every=RETURN_AFTER_POLLS), Scripted("prometheus")
    async with polling(epp, prometheus) as (_, told):
        await wait_until(lambda: epp.polls >= 4 * RETURN_AFTER_POLLS and told)
    assert {poll.source for poll in told} == {"prometheus"}


async def test_with_both_gone_both_are_named() -> None:
    epp, prometheus = Scripted("epp", FAILED), Scripted("prometheus", replace(FAILED, why="gone too"))
    async with polling(epp, prometheus) as (_, told):
        poll = await later(told, lambda poll: len(poll.failures) == 2)()
        assert [unread.why for unread in poll.failures] == ["epp: broken 1", "prometheus: gone too"]
        epp.answer = None  # the way back need not be a long one where nothing else is left
        epp.polls = 0
        await later(told, lambda poll: poll.source == "epp" and bool(poll.readings))()


async def test_a_hanging_preferred_source_does_not_delay_its_stand_in() -> None:
    epp, prometheus = Scripted("epp", FAILED), Scripted("prometheus")
    async with polling(epp, prometheus) as (_, told):
        await later(told, lambda poll: poll.source == "prometheus")()
        epp.hold = asyncio.Event()
        await wait_until(lambda: epp.under_way == 1)
        count = len(told)
        await wait_until(lambda: len(told) >= count + 5)
    assert {poll.source for poll in told[-5:]} == {"prometheus"}


async def test_no_endpoint_is_a_fact_and_not_a_failure() -> None:
    """Prometheus would only tell the same, later."""
    epp, prometheus = Scripted("epp", (healthy(ready=0),)), Scripted("prometheus")
    async with polling(epp, prometheus) as (_, told):
        await wait_until(lambda: len(told) >= 5)
    assert prometheus.polls == 0
    assert {unread.reason for poll in told for unread in poll.failures} == {Reason.NO_ENDPOINTS}


def test_nobody_is_preferred_before_it_has_answered() -> None:
    preference = SourcePreference(["epp", "prometheus"])
    assert preference.is_needed("epp")
    assert not preference.is_needed("prometheus")
    assert not preference.record_answer("epp", is_good=False)
    assert preference.is_needed("prometheus")
    assert preference.record_answer("prometheus", is_good=False)
    assert preference.record_answer("epp", is_good=True)
    assert not preference.record_answer("prometheus", is_good=True)  # an answer that was under way


# ── every failure of every source, seen by the limiter ──────────────────────────────────────────────────


def epp_source(url: str, fault: str = "") -> SignalSource:
    return EppSource("qwen", Targets(urls=(url,)), timeout_s=fakes.patience_s(fault))


def prometheus_source(url: str, fault: str = "") -> SignalSource:
    timeout_s = fakes.patience_s(fault)
    return PrometheusSource(PrometheusAddress(url), "qwen", "default", timeout_s=timeout_s, max_age_s=60)


def page(*replacements: tuple[str, str]) -> bytes:
    text = golden("router-newest-flow-control-on")
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    return text.encode()


READY = 'ready_endpoints{name="qwen"} '
STAGE = 'stage="effective"} '

PAGE_FAULTS: dict[str, tuple[bytes, Reason]] = {
    "empty page": (b"", Reason.UNREADABLE),
    "half a page": (page()[:-2], Reason.UNREADABLE),
    "garbage": (b"\x00\xff" * 4000, Reason.UNREADABLE),
    "no running requests": (page(("average_running", "x"), ("request_running", "y")), Reason.UNREADABLE),
    "no ready endpoints": (page((READY, 'x{name="qwen"} ')), Reason.UNREADABLE),
    "zero ready endpoints": (page((READY + "4", READY + "0")), Reason.NO_ENDPOINTS),
    "NaN saturation": (page((STAGE + "0.4", STAGE + "NaN")), Reason.IMPLAUSIBLE),
    "infinite saturation": (page((STAGE + "0.4", STAGE + "+Inf")), Reason.IMPLAUSIBLE),
    "negative saturation": (page((STAGE + "0.4", STAGE + "-1")), Reason.IMPLAUSIBLE),
    "NaN ready": (page((READY + "4", READY + "NaN")), Reason.IMPLAUSIBLE),
    "another pool": (page(('"qwen"', '"llama"')), Reason.UNREADABLE),
}

TALKS: dict[str, Any] = {
    "reset": fakes.resetting,
    "hanging": fakes.hanging,
    "HTTP 500": answering(b"HTTP/1.1 500 X\r\nContent-Length: 0\r\n\r\n"),
    "HTTP 403": answering(b"HTTP/1.1 403 X\r\nContent-Length: 0\r\n\r\n"),
    "HTTP 302": answering(b"HTTP/1.1 302 X\r\nLocation: http://127.0.0.1:1\r\nContent-Length: 0\r\n\r\n"),
    "not HTTP": answering(b"nonsense\r\n\r\n"),
}

ROW_FAULTS: dict[str, tuple[dict[str, float], float, Reason]] = {
    "no series": ({}, 1, Reason.UNREADABLE),
    "old sample": (GOOD, 61, Reason.STALE),
    "NaN": (GOOD | {"SATURATION": float("nan")}, 1, Reason.IMPLAUSIBLE),
    "infinite": (GOOD | {"QUEUED": float("inf")}, 1, Reason.IMPLAUSIBLE),
    "no running requests": ({k: v for k, v in GOOD.items() if k != "RUNNING"}, 1, Reason.UNREADABLE),
    "no ready endpoints": ({k: v for k, v in GOOD.items() if k != "READY"}, 1, Reason.UNREADABLE),
    "zero ready endpoints": (GOOD | {"READY": 0.0}, 1, Reason.NO_ENDPOINTS),
    "a queue beyond any pool": (GOOD | {"QUEUED": 1e308}, 1, Reason.IMPLAUSIBLE),
    "a capacity beyond any pool": (GOOD | {"READY": 1e300}, 1, Reason.IMPLAUSIBLE),
    "running requests beyond any pool": (GOOD | {"RUNNING": 1e16}, 1, Reason.IMPLAUSIBLE),
    "a capacity below all numbers": (GOOD | {"READY": 5e-324}, 1, Reason.IMPLAUSIBLE),
    "unknown age": (GOOD, float("nan"), Reason.UNREADABLE),
}


@pytest.mark.parametrize("before", ["open", "starting"])
@pytest.mark.parametrize("fault", PAGE_FAULTS)
async def test_no_page_fault_leaves_an_allowance(fault: str, before: str) -> None:
    body, reason = PAGE_FAULTS[fault]
    async with raw_server(answering(whole(body))) as port:
        await closes(epp_source(f"http://127.0.0.1:{port}"), reason, before)


@pytest.mark.parametrize("kind", ["epp", "prometheus"])
@pytest.mark.parametrize("fault", [*TALKS, "refused"])
async def test_no_network_fault_leaves_an_allowance(fault: str, kind: str) -> None:
    made = epp_source if kind == "epp" else prometheus_source
    if fault == "refused":
        await closes(made(f"http://127.0.0.1:{free_port()}"), Reason.UNREADABLE, "open")
        return
    async with raw_server(TALKS[fault]) as port:
        await closes(made(f"http://127.0.0.1:{port}", fault), Reason.UNREADABLE, "open")


@pytest.mark.parametrize("before", ["open", "starting"])
@pytest.mark.parametrize("fault", ROW_FAULTS)
async def test_no_fault_of_prometheus_series_leaves_an_allowance(fault: str, before: str) -> None:
    rows, age_s, reason = ROW_FAULTS[fault]
    async with fake_prometheus() as prometheus:
        prometheus.show(rows, age_s=age_s)
        await closes(prometheus_source(prometheus.url), reason, before)


async def closes(source: SignalSource, reason: Reason, before: str) -> None:
    """One poll of a faulty source: the limiter, open until then or just started, allows nothing."""
    loop = asyncio.get_running_loop()
    limiter = Limiter(Policy(max_age_s=60), (Signal.SATURATION, Signal.REQUESTS))
    if before == "open":
        # Older than what follows: the limiter goes by the newest sample.
        async with polling(Scripted("epp", age_s=8)) as (_, told):
            await wait_until(lambda: told)
        limiter.apply_poll(told[-1], told[-1].completed_at)
        assert limiter.get_allowance(told[-1].completed_at + 1).limit > 0
    async with polling(source, use="both") as (_, told):
        await wait_until(lambda: told)
    limiter.apply_poll(told[0], told[0].completed_at)
    allowance = limiter.get_allowance(loop.time() + 1)
    assert allowance.limit == 0
    if told[0].failures:
        assert told[0].failures[0].reason is reason
    if told[0].failures and before == "starting":
        reason = Reason.STARTING  # the failure is told in its sentence
    assert allowance.reason is reason
    assert not told[0].failures or told[0].failures[0].why


async def test_one_failed_scrape_of_several_closes_nothing_and_two_do() -> None:
    limiter = Limiter(Policy(), (Signal.SATURATION, Signal.REQUESTS))
    epp = Scripted("epp")
    async with polling(epp, interval_s=0.5) as (_, told):
        await wait_until(lambda: len(told) > 2)
        for poll in told:
            limiter.apply_poll(poll, poll.completed_at)
        read_at = told[-1].readings[0].closed_at
        epp.answer = FAILED
        first = await later(told, lambda poll: bool(poll.failures))()
        limiter.apply_poll(first, first.completed_at)
        assert first.failing_since == first.completed_at
        assert read_at + 2.2 * 0.5 < first.closes_at < read_at + 3 * 0.5
        assert limiter.get_allowance(first.completed_at).limit > 0
        second = await later(told, lambda poll: bool(poll.failures))()
        assert (second.failing_since, second.closes_at) == (first.completed_at, first.closes_at)
        limiter.apply_poll(second, second.completed_at)
        closed = limiter.get_allowance(first.closes_at)
        assert (closed.limit, closed.reason) == (0, Reason.UNREADABLE)
        epp.answer = None
        good = await later(told, lambda poll: not poll.failures)()
        assert good.failing_since is None


@pytest.mark.parametrize("fact", [Reason.NO_ENDPOINTS, Reason.IMPLAUSIBLE])
async def test_a_fact_closes_at_once_and_a_failure_after_it_opens_nothing(fact: Reason) -> None:
    epp = Scripted("epp")
    async with polling(epp) as (_, told):
        await wait_until(lambda: told)
        epp.answer = ReadFailure(fact, "no pods")
        poll = await later(told, lambda poll: bool(poll.failures))()
        assert poll.closes_at == -inf
        epp.answer = FAILED
        poll = await later(told, lambda poll: poll.failures == (FAILED,))()
        assert poll.closes_at == -inf


async def test_after_a_new_configuration_nothing_stands_that_was_read_before() -> None:
    epp, other = Scripted("epp"), Scripted("epp", FAILED)
    async with polling(epp) as (poller, told):
        await wait_until(lambda: told)
        poller.reconfigure((other,), SignalsSettings(interval_s=INTERVAL_S), Policy())
        poll = await later(told, lambda poll: bool(poll.failures))()
        assert poll.closes_at == -inf


async def test_a_real_scrape_opens_the_limiter() -> None:
    """The table above proves nothing unless a good page does allow something."""
    policy = Policy(per_endpoint=100)
    limiter = Limiter(policy, (Signal.SATURATION, Signal.REQUESTS))
    async with fake_epp() as epp, polling(epp_source(epp.url), policy=policy) as (_, told):
        await wait_until(lambda: told)
    limiter.apply_poll(told[0], told[0].completed_at)
    # D = 1 − (0.4 + 12/400 + 0.05) = 0.52 of 400
    assert limiter.get_allowance(told[0].completed_at + 1).limit == 208


async def test_a_defect_in_a_source_closes_the_gate_and_ends_nothing() -> None:
    class Broken(Scripted):
        async def poll(self) -> tuple[PoolView, ...] | ReadFailure:
            await super().poll()
            raise ImportError("half a package")

    async with polling(Broken("epp"), interval_s=0.05) as (_, polls):
        await wait_until(lambda: len(polls) >= 2)
    for poll in polls:
        (unread,) = poll.failures
        assert unread.reason is Reason.UNREADABLE
        assert "half a package" in unread.why


ABSURD: dict[str, dict[str, float]] = {
    "two queues whose sum is beyond all numbers": {"queued": 1.7e308},
    "averages beyond all numbers": {"running": 1.7e308, "waiting": 1.7e308, "ready": 1e10},
    "a capacity below all numbers": {"ready": 5e-324},
    "a saturation beyond all numbers": {"saturation": 1e308, "ready": 1e308, "in_flight": 1e308},
}


@pytest.mark.parametrize("values", ABSURD.values(), ids=ABSURD)
async def test_what_no_pool_has_is_implausible_and_no_defect(values: dict[str, float]) -> None:
    """Of two replicas, with the law behind it: a value is refused, and nothing ends."""
    two = tuple(healthy(**values) for _ in range(2))
    policy = Policy(per_endpoint=0.4)
    limiter = Limiter(policy, (Signal.SATURATION, Signal.REQUESTS))
    told: list[SourcePoll] = []

    def hear(poll: SourcePoll) -> None:
        limiter.apply_poll(poll, poll.completed_at)
        told.append(poll)

    poller = Poller([Scripted("epp", two)], SignalsSettings(interval_s=0.1), policy, hear)
    task = asyncio.create_task(poller.run())
    await wait_until(lambda: len(told) >= 2 or task.done())
    assert not task.done(), task.exception()
    task.cancel()
    assert limiter.get_allowance(told[-1].completed_at).limit == 0
    assert not [unread.why for poll in told for unread in poll.failures if "failed" in unread.why]


async def test_a_defect_in_what_hears_of_a_poll_ends_nothing() -> None:
    told: list[SourcePoll] = []

    def hear(poll: SourcePoll) -> None:
        told.append(poll)
        if poll.readings:
            raise ZeroDivisionError("of ours")

    poller = Poller([Scripted("epp")], SignalsSettings(interval_s=0.1), Policy(), hear)
    task = asyncio.create_task(poller.run())
    await wait_until(lambda: len(told) >= 4 or task.done())
    assert not task.done(), task.exception()
    task.cancel()
    assert ["of ours" in each.failures[0].why for each in told if each.failures] == [True] * (len(told) // 2)
