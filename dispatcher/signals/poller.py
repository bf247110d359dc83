"""Poll the signal sources, and decide which source counts.

Each source is polled by a task of its own, so that a slow source delays no other one. A source is polled
again only when it has answered. With `auto`, the direct scrape counts as long as it can be read. Prometheus,
whose samples are older, is the fallback while it cannot. The poller returns to the direct scrape after
RETURN_AFTER_POLLS good scrapes in a row, so that an EPP that comes and goes does not make the budget jump
between two ages of readings. It returns at once if Prometheus cannot be read either.
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
"""Interval at which a source that computes latencies itself is asked for them."""
PRICE_MAX_AGE_S = 90.0
"""Age above which an impact on realtime is no longer reported."""
JITTER = 0.1
"""Share by which intervals vary, so that replicas that once poll together do not do so for ever."""


class Source(Protocol):
    """A source of the pool's load, such as the pages of the endpoint picker."""

    @property
    def name(self) -> SourceName: ...

    @property
    def interval_least_s(self) -> float:
        """Shortest useful interval. More frequent polls return the same samples."""
        ...

    async def poll(self) -> tuple[View, ...] | Unread:
        """Return the newest samples, one view per EPP replica.

        The time of a poll is bounded. An error of the network or a server is an Unread, never an exception.
        """
        ...

    async def latency(self) -> Histograms | None:
        """Return the latencies of the last minutes, if the source computes them itself.

        `None` if the views of the source have the histograms. The time is bounded, and an error of a server
        is never an exception.
        """
        ...

    async def close(self) -> None: ...

    def discovered(self, addresses: tuple[str, ...] | None) -> None:
        """Set the addresses of the EPP's pods from the Kubernetes watch, for a source that scrapes them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePoll(Poll):
    """Result of one poll of a source, with the facts that status and metrics show about it."""

    source: SourceName
    failing_since: float | None = None
    """Time of the first poll with something `unread` since the last good poll. `None` after a good poll."""
    detector: str = ""
    """Description of the EPP's saturation detector."""
    per_endpoint: float | None = None
    """Requests per endpoint from which the capacity was computed. `None` if it was not computed this way."""
    per_endpoint_from: PerEndpointFrom | None = None
    picker_k: int | None = None
    """The picker's maxConcurrency. `None` if its pages do not show it."""
    price: Price = field(default_factory=Price)
    """Latencies of the pool's users. They are shown, and no decision depends on them."""


class Preference:
    """Decides which source counts: the preferred one while it can be read, its fallback while it cannot."""

    def __init__(self, names: Sequence[str]) -> None:
        self._preferred = names[0]
        self._good_in_a_row: dict[str, int | None] = dict.fromkeys(names)
        self.current: str | None = None
        """Name of the source that counts. `None` before the first answer that counted."""

    def needed(self, name: str) -> bool:
        """Return True if the source must be polled now. A fallback rests while the preferred source works."""
        if name == self._preferred:
            return True
        # `None` means that the preferred source has not answered yet. Its first answer comes before the
        # fallback is asked.
        preferred = self._good_in_a_row[self._preferred]
        return preferred is not None and (preferred == 0 or self.current != self._preferred)

    def heard(self, name: str, good: bool) -> bool:
        """Record whether the answer of a source was good. Return True if the answer counts.

        A failure may count as well: if no source can be read.
        """
        before = self._good_in_a_row[name] or 0
        self._good_in_a_row[name] = before + 1 if good else 0
        others = [row for other, row in self._good_in_a_row.items() if other != name]
        if name != self._preferred:
            back = bool(self._good_in_a_row[self._preferred])
            counts = not back or (good and self.current == name)
        elif good:
            counts = self.current in (None, name) or before + 1 >= RETURN_AFTER or not any(others)
        else:
            # A failure does not count before the fallback has answered. It would close the gate until a
            # sample that is newer than the failure, which takes a scrape interval through Prometheus.
            counts = not others
        if counts:
            self.current = name
        return counts


class Poller:
    """Polls the sources until cancelled, and calls `on_poll` with every result that counts.

    `sources` has at least one source, the preferred one first. A second one is the fallback.
    `sources.build_sources` creates them. `policy` has the settings of the capacity. `batch_share` returns the
    share of the capacity that batch requests use now.
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
        """Time and value of the newest impact on realtime, by source."""
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
        """True if the capacity had to be searched for in the last poll that had a capacity."""
        self._changed = asyncio.Event()

    def reconfigure(self, sources: Sequence[Source], signals: SignalsSettings, policy: Policy) -> None:
        """Switch to other sources and settings at once. The previous sources are closed."""
        self._next = tuple(sources)
        self._signals = signals
        self._policy = policy
        self._changed.set()

    def discovered(self, addresses: tuple[str, ...] | None, endpoints: int | None = None) -> None:
        """Set the EPP's pods and the number of ready endpoints, as the Kubernetes watch sees them.

        Both are `None` if there is no watch, or if it does not know them.
        """
        self._endpoints = endpoints
        if addresses == self._replicas:
            return
        self._replicas = addresses
        for source in self._next:
            source.discovered(addresses)
        self.poll_soon()

    def poll_soon(self) -> None:
        """Poll every source now instead of after its interval."""
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
            # Pickers and their k stay known across configurations. Requests that came past the picker are
            # learned anew.
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
            # After a poll that took longer than the interval the source still gets a short rest.
            rest = max(pause - (loop.time() - began), JITTER * pause)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest):
                    await wake.wait()

    async def _follow_latency(self, source: Source) -> None:
        """Ask a source for latencies, unless another source shows them."""
        while True:
            if not any(found.requests for name, found in self._fresh() if name != source.name):
                try:
                    seen = await source.latency()
                    if seen is None:
                        return  # the views of this source have the histograms
                    found = self._priced(source.name, seen)
                except Exception as error:  # an internal error; latencies are shown only, so polling goes on
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
        # The growth is only right if all replicas are compared over the same time.
        if shown and len(shown) == len(seen):
            self._growth.saw(now, shown)
            self._prices[name] = now, self._growth.price(self._shares.mean, name)

    def _fresh(self) -> list[tuple[str, Price]]:
        """Return the impacts that are not too old, each with its source, the preferred one first."""
        since = asyncio.get_running_loop().time() - PRICE_MAX_AGE_S
        known = [(each.name, self._prices[each.name]) for each in self._sources if each.name in self._prices]
        return [(name, found) for name, (at, found) in known if at >= since]

    @property
    def _price(self) -> Price:
        """Impact on realtime from the first source that saw requests, or else from the first known source."""
        known = [found for _, found in self._fresh()]
        lost = Price(why_not=f"not read for {PRICE_MAX_AGE_S:g} s") if self._prices else Price()
        return next((found for found in known if found.requests), known[0] if known else lost)

    def _heard(self, name: SourceName, seen: tuple[View, ...] | Unread) -> None:
        now = asyncio.get_running_loop().time()
        try:
            self._look_at_latencies(name, seen, now)
        except Exception as error:  # an internal error; latencies are shown only, so the poll still counts
            self._prices[name] = now, Price(why_not=_defect(f"signals.{name}", error).why)
        try:
            self._take(name, self._judge(name, seen, now), seen, now)
        except Exception as error:  # an internal error: it closes the gate, and does not end the dispatcher
            self._forget_read()
            defect = _defect(f"signals.{name}", error)
            self._take(name, self._judge(name, defect, now), defect, now)

    def _take(self, name: SourceName, verdict: Verdict, seen: tuple[View, ...] | Unread, now: float) -> None:
        # A pool without endpoints is a fact about the pool, and no failure of the source that reports it. The
        # fallback must not replace it.
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
                    wake.set()  # so that the fallback is polled at once

    def _wait(
        self, name: SourceName, unread: Sequence[Unread], seen: tuple[View, ...] | Unread, now: float
    ) -> None:
        """Record how long the previous readings remain valid while nothing can be read."""
        if unread:
            self._failing_since = now if self._failing_since is None else self._failing_since
            if any(each.reason is not Reason.UNREADABLE for each in unread):
                # A fact such as `no-endpoints` contradicts the previous readings, so they end at once.
                self._forget_read()
            return
        self._failing_since = None
        # Another source has another interval between its samples.
        if name != self._read_from:
            self._read_from = name
            self._patience = Patience(self._interval_s(name), self._signals.max_age_for(name))
        if not isinstance(seen, Unread):
            self._patience.read(min(view.opened_at for view in seen), max(view.closed_at for view in seen))

    def _forget_read(self) -> None:
        """Drop the previous readings, so that they no longer count while nothing can be read."""
        self._read_from, self._patience = None, Patience(0.0, 0.0)

    def _interval_s(self, name: SourceName) -> float:
        """Return the interval at which a source is polled."""
        least_s = next(source.interval_least_s for source in self._sources if source.name == name)
        return max(self._signals.interval_s, least_s)

    def _all_failures(self) -> tuple[Unread, ...]:
        """Return the failures of all sources, each with the name of its source."""
        return tuple(
            replace(failure, why=f"{source.name}: {failure.why}")
            for source in self._sources
            for failure in self._failures.get(source.name, ())
        )

    def _judge(self, name: SourceName, seen: tuple[View, ...] | Unread, now: float) -> Verdict:
        use = self._signals.use
        # Before the first views all signals that may be used are closed.
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
        # Prometheus shows a single replica if it scrapes the Service instead of the pods: the queues of the
        # other replicas are hidden then.
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
        """Log the picker's maxConcurrency once, and warn if `budget.per_endpoint` contradicts it."""
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
        """Log what cannot be read. A problem that differs only in its numbers is not logged again."""
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
    """Poll the source. An internal error closes the gate, and does not end the dispatcher."""
    try:
        return await source.poll()
    except Exception as error:
        return _defect(f"signals.{source.name}", error)


def _defect(where: str, error: Exception) -> Unread:
    emit(Event.SURPRISE, where=where, error=repr(error))
    return Unread(Reason.UNREADABLE, f"the dispatcher failed: {error!r}", "a defect: please report it")
