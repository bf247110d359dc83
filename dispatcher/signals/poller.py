"""The loop that asks the sources, and decides whose word counts.

Every source is followed by a loop of its own, so that a slow one delays nothing else, and each is asked
again only when it has answered. In `auto` the direct scrape counts as long as it can be read; Prometheus,
whose samples are older, stands in while it cannot. The way back is taken after RETURN_AFTER good scrapes in
a row, so that an EPP that comes and goes does not make the budget jump between two ages of reading, or at
once where Prometheus cannot be read either.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from dispatcher.core.limit.budget import Policy, Reason, Signal
from dispatcher.core.limit.picker_inference import Count
from dispatcher.core.limit.poll import Poll, Unread
from dispatcher.core.limit.realtime_impact import Growth, Histograms, Price, Shares, price
from dispatcher.core.limit.staleness import Patience
from dispatcher.settings import SignalsSettings
from dispatcher.settings import Source as SourceName
from dispatcher.signals.epp.series import View
from dispatcher.signals.readings import Lessons, PerEndpointFrom, Verdict, at_most, judge
from dispatcher.telemetry.events import Event, emit

RETURN_AFTER = 3
LATENCY_EACH_S = 30.0
"""A source that reckons latencies itself is asked for them this often."""
PRICE_MAX_AGE_S = 90.0
"""A price that was not renewed for so long is no longer told."""
JITTER = 0.1
"""Cadence varies by this share, so that replicas do not all ask at one moment for ever."""


class Source(Protocol):
    """A way to the EPP's series."""

    @property
    def name(self) -> SourceName: ...

    @property
    def interval_least_s(self) -> float:
        """Asking more often than this tells nothing new."""
        ...

    async def poll(self) -> tuple[View, ...] | Unread:
        """The newest samples, one view per EPP replica. Bounded in time; never raises for what a network
        or a server can do."""
        ...

    async def latency(self) -> Histograms | None:
        """What the latencies of the last minutes are, where the source reckons that itself; None: its views
        have what is counted on. Bounded in time, never raises for what a server can do."""
        ...

    async def close(self) -> None: ...

    def discovered(self, addresses: tuple[str, ...] | None) -> None:
        """The EPP's pods as the Kubernetes watch sees them, for a source that asks them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePoll(Poll):
    """What one poll of a source told, and what people are shown of it."""

    source: SourceName
    failing_since: float | None = None
    """When something was `unread` first, of those polls without a good one between."""
    detector: str = ""
    """What is known of the EPP's saturation detector, in words."""
    per_endpoint: float | None = None
    """Requests per endpoint that the capacity was reckoned with; None: it came another way, or not at all."""
    per_endpoint_from: PerEndpointFrom | None = None
    picker_k: int | None = None
    """The picker's maxConcurrency, where its pages show it."""
    price: Price = field(default_factory=Price)
    """What users of the pool see of it; no part of any decision."""


class Preference:
    """Whose word counts: the preferred source's while it can be read, its stand-in's while not."""

    def __init__(self, names: Sequence[str]) -> None:
        self._preferred = names[0]
        self._good_in_a_row: dict[str, int | None] = dict.fromkeys(names)
        self.current: str | None = None
        """The source that counts; None before the first answer that did."""

    def needed(self, name: str) -> bool:
        """Whether to ask a source now: a stand-in rests while it has nobody to stand in for."""
        if name == self._preferred:
            return True
        preferred = self._good_in_a_row[self._preferred]
        return preferred is not None and (preferred == 0 or self.current != self._preferred)

    def heard(self, name: str, good: bool) -> bool:
        """A source has answered. True: its word counts, be it that nothing can be read."""
        before = self._good_in_a_row[name] or 0
        self._good_in_a_row[name] = before + 1 if good else 0
        others = [row for other, row in self._good_in_a_row.items() if other != name]
        if name != self._preferred:
            back = bool(self._good_in_a_row[self._preferred])
            counts = not back or (good and self.current == name)
        elif good:
            counts = self.current in (None, name) or before + 1 >= RETURN_AFTER or not any(others)
        else:
            # Nothing is said before the stand-in has answered: a failure told now would close the gate
            # until a sample newer than it, which through Prometheus takes a scrape interval.
            counts = not others
        if counts:
            self.current = name
        return counts


class Poller:
    """Polls until cancelled and hands every result that counts to `on_poll`.

    `sources`: one at least, the preferred one first; a second one stands in (`sources.sources` makes them).
    `policy` gives the capacity's terms, `batch_share` how much of it our requests have now.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        signals: SignalsSettings,
        policy: Policy,
        on_poll: Callable[[SourcePoll], None],
        *,
        jitter: random.Random | None = None,
        batch_share: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._batch_share = batch_share
        self._shares = Shares()
        self._prices: dict[str, tuple[float, Price]] = {}
        """By source, the newest and of when it is."""
        self._growth = Growth()
        self._sources = self._next = tuple(sources)
        self._signals = signals
        self._policy = policy
        self._on_poll = on_poll
        self._jitter = jitter or random.Random()
        self._preference = Preference([source.name for source in sources])
        self._wakes: dict[str, asyncio.Event] = {}
        self._failures: dict[str, tuple[Unread, ...]] = {}
        self._replicas: tuple[str, ...] | None = None
        self._endpoints: int | None = None
        """Number of ready endpoints in Kubernetes, if it is known."""
        self._in_use: tuple[Signal, ...] = ()
        self._source: SourceName | None = None
        self._told: object = None
        self._patience = Patience(0.0, 0.0)
        self._read_from: SourceName | None = None
        """The source of the newest readings."""
        self._failing_since: float | None = None
        self._count = Count()
        self._lessons: dict[str, Lessons] = {}
        self._learned: int | None = None
        """The picker's k that was reported last."""
        self._compared: tuple[int, float | None] | None = None
        """The picker's k and the setting beside it, as they were compared last."""
        self._searching = False
        """Whether the capacity had to be searched for, by the last verdict that could tell."""
        self._changed = asyncio.Event()

    def reconfigure(self, sources: Sequence[Source], signals: SignalsSettings, policy: Policy) -> None:
        """Go on with other sources and settings, at once. The sources before are closed."""
        self._next = tuple(sources)
        self._signals = signals
        self._policy = policy
        self._changed.set()

    def discovered(self, addresses: tuple[str, ...] | None, endpoints: int | None = None) -> None:
        """Take in the EPP's pods and the number of ready endpoints from the Kubernetes watch.

        Both are `None` if there is no watch, or it sees nothing.
        """
        self._endpoints = endpoints
        if addresses == self._replicas:
            return
        self._replicas = addresses
        for source in self._next:
            source.discovered(addresses)
        self.poll_soon()

    def poll_soon(self) -> None:
        """Ask now instead of at the next turn."""
        for wake in self._wakes.values():
            wake.set()

    async def run(self) -> None:
        """Poll until cancelled, then close the sources."""
        while True:
            self._changed.clear()
            sources = self._sources = self._next
            self._preference = Preference([source.name for source in sources])
            self._wakes = {source.name: asyncio.Event() for source in sources}
            self._failures = {}
            self._forget_read()
            before = self._lessons
            self._lessons = {source.name: Lessons(self._count, before.get(source.name)) for source in sources}
            self._growth = Growth()
            self._prices = {}
            for source in sources:
                source.discovered(self._replicas)
            try:
                async with asyncio.TaskGroup() as group:
                    followed = [group.create_task(self._follow(source)) for source in sources]
                    followed += [group.create_task(self._follow_latency(source)) for source in sources]
                    await self._changed.wait()
                    for task in followed:
                        task.cancel()
            finally:
                for source in sources:
                    await source.close()

    async def _follow(self, source: Source) -> None:
        loop = asyncio.get_running_loop()
        wake = self._wakes[source.name]
        while True:
            began = loop.time()
            wake.clear()
            if self._preference.needed(source.name):
                self._heard(source.name, await _polled(source))
            pause = self._interval_s(source.name) * self._jitter.uniform(1 - JITTER, 1 + JITTER)
            # However long the poll took, the next one leaves it some rest.
            rest = max(pause - (loop.time() - began), JITTER * pause)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest):
                    await wake.wait()

    async def _follow_latency(self, source: Source) -> None:
        """Ask a source for latencies, unless another shows them."""
        while True:
            if not any(found.requests for name, found in self._fresh() if name != source.name):
                try:
                    seen = await source.latency()
                    if seen is None:
                        return
                    found = self._priced(source.name, seen)
                except Exception as error:  # of ours; it is of no weight
                    found = Price(source=source.name, why_not=_defect(f"signals.{source.name}", error).why)
                self._prices[source.name] = asyncio.get_running_loop().time(), found
            await asyncio.sleep(LATENCY_EACH_S * self._jitter.uniform(1 - JITTER, 1 + JITTER))

    def _priced(self, name: str, seen: Histograms) -> Price:
        share = self._shares.mean
        if seen.why_not:
            return Price(batch_share=share, source=name, why_not=seen.why_not)
        return price(seen.ttft, seen.tpot, seen.of, f"{name}: {seen.name}", share)

    def _look_at_latencies(self, name: str, seen: tuple[View, ...] | Unread, now: float) -> None:
        self._shares.saw(now, self._batch_share())
        if isinstance(seen, Unread):
            return
        shown = [view.histograms for view in seen if view.histograms is not None]
        if shown and len(shown) == len(seen):
            self._growth.saw(now, shown)
            self._prices[name] = now, self._growth.price(self._shares.mean, name)

    def _fresh(self) -> list[tuple[str, Price]]:
        """The prices that are still told, by source, the preferred one first."""
        since = asyncio.get_running_loop().time() - PRICE_MAX_AGE_S
        known = [(each.name, self._prices[each.name]) for each in self._sources if each.name in self._prices]
        return [(name, found) for name, (at, found) in known if at >= since]

    @property
    def _price(self) -> Price:
        """Of the first source that knows of requests; else of the first that says why not."""
        known = [found for _, found in self._fresh()]
        lost = Price(why_not=f"not read for {PRICE_MAX_AGE_S:g} s") if self._prices else Price()
        return next((found for found in known if found.requests), known[0] if known else lost)

    def _heard(self, name: SourceName, seen: tuple[View, ...] | Unread) -> None:
        now = asyncio.get_running_loop().time()
        try:
            self._look_at_latencies(name, seen, now)
        except Exception as error:  # of ours; it is of no weight
            self._prices[name] = now, Price(why_not=_defect(f"signals.{name}", error).why)
        try:
            self._take(name, self._judge(name, seen, now), seen, now)
        except Exception as error:  # of ours, on what a picker shows: it closes the gate, and ends nothing
            self._forget_read()
            defect = _defect(f"signals.{name}", error)
            self._take(name, self._judge(name, defect, now), defect, now)

    def _take(self, name: SourceName, verdict: Verdict, seen: tuple[View, ...] | Unread, now: float) -> None:
        # No endpoint is a fact about the pool, not a failure of the source that tells it.
        self._failures[name] = tuple(
            each for each in verdict.unread if each.reason is not Reason.NO_ENDPOINTS
        )
        good = not self._failures[name]
        if self._preference.heard(name, good):
            if not good and len(self._sources) > 1:
                verdict = replace(verdict, unread=self._all_failures())
            self._wait(name, verdict.unread, seen, now)
            self._publish(name, verdict, now)
        elif not good:
            for other, wake in self._wakes.items():
                if other != name:
                    wake.set()  # the stand-in's turn

    def _wait(
        self, name: SourceName, unread: Sequence[Unread], seen: tuple[View, ...] | Unread, now: float
    ) -> None:
        """Keep what tells how long the readings before stand while nothing can be read."""
        if unread:
            self._failing_since = now if self._failing_since is None else self._failing_since
            if any(each.reason is not Reason.UNREADABLE for each in unread):
                self._forget_read()  # it is no longer so
            return
        self._failing_since = None
        if name != self._read_from:
            self._read_from = name
            self._patience = Patience(self._interval_s(name), self._signals.max_age_for(name))
        if not isinstance(seen, Unread):
            self._patience.read(min(view.opened_at for view in seen), max(view.closed_at for view in seen))

    def _forget_read(self) -> None:
        """No reading of before is acted on while nothing can be read."""
        self._read_from, self._patience = None, Patience(0.0, 0.0)

    def _interval_s(self, name: SourceName) -> float:
        """How often a source is asked, at the most."""
        least_s = next(source.interval_least_s for source in self._sources if source.name == name)
        return max(self._signals.interval_s, least_s)

    def _all_failures(self) -> tuple[Unread, ...]:
        """What every source failed with, each under its name."""
        return tuple(
            replace(failure, why=f"{source.name}: {failure.why}")
            for source in self._sources
            for failure in self._failures.get(source.name, ())
        )

    def _judge(self, name: SourceName, seen: tuple[View, ...] | Unread, now: float) -> Verdict:
        use = self._signals.use
        if isinstance(seen, Unread):
            return Verdict(self._in_use or at_most(use), (), (seen,), "")
        lessons = self._lessons[name]
        lessons.learn(seen, self._endpoints)
        verdict = judge(seen, use, self._policy, name, lessons, self._endpoints)
        age_s = now - min(view.opened_at for view in seen)
        max_age_s = self._signals.max_age_for(name)
        if age_s > max_age_s:
            why = f"the samples are {age_s:.1f} s old, more than {max_age_s:g} s"
            stale = Unread(Reason.STALE, why, "signals.max_age_s, where the scrape interval is that long")
            return replace(verdict, readings=(), unread=(stale,))
        if self._replicas is not None and len(seen) < len(self._replicas):
            why = f"{len(seen)} of the endpoint picker's {len(self._replicas)} replicas can be seen"
            hint = "each EPP pod must be scraped by itself (a PodMonitor), not their Service"
            return replace(verdict, readings=(), unread=(Unread(Reason.UNREADABLE, why, hint),))
        return verdict

    def _publish(self, name: SourceName, verdict: Verdict, now: float) -> None:
        if self._source != name:
            before, self._source = self._source, name
            failed = self._failures.get(before, ()) if before is not None else ()
            why = failed[0].why if failed else None
            emit(Event.SIGNALS_SOURCE, source=name, before=before, why=why)
        if verdict.signals != self._in_use:
            self._in_use = verdict.signals
            emit(
                Event.SIGNALS_IN_USE,
                signals=[str(each) for each in verdict.signals],
                detector=verdict.detector,
            )
        self._say(verdict)
        self._compare()
        searching = verdict.per_endpoint_from == "search"
        if searching and not self._searching:
            emit(Event.CAPACITY_SEARCH, per_endpoint=verdict.per_endpoint)
        self._searching = searching or (self._searching and verdict.per_endpoint_from is None)
        good_s = self._signals.max_age_for(name)
        self._on_poll(
            SourcePoll(
                at=now,
                source=name,
                signals=verdict.signals,
                readings=tuple(replace(each, good_s=good_s) for each in verdict.readings),
                unread=verdict.unread,
                closes_at=self._patience.until(),
                failing_since=self._failing_since,
                detector=verdict.detector,
                per_endpoint=verdict.per_endpoint,
                per_endpoint_from=verdict.per_endpoint_from,
                picker_k=self._count.k,
                price=self._price,
            )
        )

    def _compare(self) -> None:
        """Tell, once, what the picker counts with; warn of a setting that contradicts it."""
        k, wanted = self._count.k, self._policy.per_endpoint
        if k is None:
            return
        if k != self._learned:
            self._learned = k
            emit(Event.CAPACITY_LEARNED, picker=k, per_endpoint=wanted)
        if (k, wanted) != self._compared:
            self._compared = (k, wanted)
            if wanted is not None and wanted != k:
                emit(Event.CAPACITY_DIFFERS, picker=k, per_endpoint=wanted)

    def _say(self, verdict: Verdict) -> None:
        """Log what cannot be read, once as long as it stays the same but for its numbers."""
        told = tuple((each.reason, each.signal, re.sub(r"[\d.]+", "#", each.why)) for each in verdict.unread)
        if told == self._told:
            return
        if verdict.unread:
            for each in verdict.unread:
                emit(Event.SIGNALS_UNREADABLE, reason=str(each.reason), why=each.why, hint=each.hint)
        elif self._told:
            emit(Event.SIGNALS_READABLE, source=self._source)
        self._told = told


async def _polled(source: Source) -> tuple[View, ...] | Unread:
    """What a source tells; a defect of ours in it closes the gate, and does not end the dispatcher."""
    try:
        return await source.poll()
    except Exception as error:
        return _defect(f"signals.{source.name}", error)


def _defect(where: str, error: Exception) -> Unread:
    emit(Event.SURPRISE, where=where, error=repr(error))
    return Unread(Reason.UNREADABLE, f"the dispatcher failed: {error!r}", "a defect: please report it")
