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

from dispatcher.limit.budget import Policy, Reason, Signal
from dispatcher.limit.picker_inference import ConcurrencyInference
from dispatcher.limit.poll import Poll, ReadFailure
from dispatcher.limit.realtime_impact import (
    BatchShares,
    HistogramGrowth,
    RealtimeImpact,
    ReplicaHistograms,
    compute_impact,
)
from dispatcher.limit.staleness import StalenessLimit
from dispatcher.settings.signals import SignalsSettings
from dispatcher.settings.signals import Source as SourceName
from dispatcher.signals.epp.series import PoolView
from dispatcher.signals.readings import (
    PerEndpointFrom,
    PickerFacts,
    PollReadings,
    derive_readings,
    list_possible_signals,
)
from dispatcher.telemetry.events import Event, emit

RETURN_AFTER_POLLS = 3
LATENCY_INTERVAL_S = 30.0
"""Interval at which a source that computes latencies itself is asked for them."""
IMPACT_MAX_AGE_S = 90.0
"""Age above which an impact on realtime is no longer reported."""
JITTER = 0.1
"""Share by which intervals vary, so that replicas that once poll together do not do so for ever."""


class SignalSource(Protocol):
    """A source of the pool's load, such as the pages of the endpoint picker."""

    @property
    def name(self) -> SourceName: ...

    @property
    def min_interval_s(self) -> float:
        """Shortest useful interval. More frequent polls return the same samples."""
        ...

    async def poll(self) -> tuple[PoolView, ...] | ReadFailure:
        """Return the newest samples, one view per EPP replica.

        The time of a poll is bounded. An error of the network or a server is an Unread, never an exception.
        """
        ...

    async def read_latencies(self) -> ReplicaHistograms | None:
        """Return the latencies of the last minutes, if the source computes them itself.

        `None` if the views of the source have the histograms. The time is bounded, and an error of a server
        is never an exception.
        """
        ...

    async def close(self) -> None: ...

    def set_replicas(self, addresses: tuple[str, ...] | None) -> None:
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
    per_endpoint_source: PerEndpointFrom | None = None
    picker_k: int | None = None
    """The picker's maxConcurrency. `None` if its pages do not show it."""
    realtime_impact: RealtimeImpact = field(default_factory=RealtimeImpact)
    """Latencies of the pool's users. They are shown, and no decision depends on them."""


class SourcePreference:
    """Decides which source counts: the preferred one while it can be read, its fallback while it cannot."""

    def __init__(self, names: Sequence[str]) -> None:
        self._preferred = names[0]
        self._good_polls_in_a_row: dict[str, int | None] = dict.fromkeys(names)
        self.current: str | None = None
        """Name of the source that counts. `None` before the first answer that counted."""

    def is_needed(self, name: str) -> bool:
        """Return True if the source must be polled now. A fallback rests while the preferred source works."""
        if name == self._preferred:
            return True
        # `None` means that the preferred source has not answered yet. Its first answer comes before the
        # fallback is asked.
        preferred = self._good_polls_in_a_row[self._preferred]
        return preferred is not None and (preferred == 0 or self.current != self._preferred)

    def record_answer(self, name: str, is_good: bool) -> bool:
        """Record whether the answer of a source was good. Return True if the answer counts.

        A failure may count as well: if no source can be read.
        """
        before = self._good_polls_in_a_row[name] or 0
        self._good_polls_in_a_row[name] = before + 1 if is_good else 0
        others = [row for other, row in self._good_polls_in_a_row.items() if other != name]
        if name != self._preferred:
            back = bool(self._good_polls_in_a_row[self._preferred])
            counts = not back or (is_good and self.current == name)
        elif is_good:
            counts = self.current in (None, name) or before + 1 >= RETURN_AFTER_POLLS or not any(others)
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
        sources: Sequence[SignalSource],
        signals: SignalsSettings,
        policy: Policy,
        on_poll: Callable[[SourcePoll], None],
        *,
        jitter: random.Random | None = None,
        batch_share: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._batch_share = batch_share
        self._shares = BatchShares()
        self._impacts: dict[str, tuple[float, RealtimeImpact]] = {}
        """Time and value of the newest impact on realtime, by source."""
        self._growth = HistogramGrowth()
        self._sources = self._next_sources = tuple(sources)
        self._signals = signals
        self._policy = policy
        self._on_poll = on_poll
        self._jitter = jitter or random.Random()
        self._preference = SourcePreference([source.name for source in sources])
        self._wake_events: dict[str, asyncio.Event] = {}
        self._failures: dict[str, tuple[ReadFailure, ...]] = {}
        self._replicas: tuple[str, ...] | None = None
        self._endpoints: int | None = None
        """Number of ready endpoints in Kubernetes, if it is known."""
        self._signals_in_use: tuple[Signal, ...] = ()
        self._source_in_use: SourceName | None = None
        self._logged_problems: object = None
        self._staleness_limit = StalenessLimit(0.0, 0.0)
        self._source_read: SourceName | None = None
        """The source of the newest readings."""
        self._failing_since: float | None = None
        self._count = ConcurrencyInference()
        self._facts: dict[str, PickerFacts] = {}
        self._reported_k: int | None = None
        """The picker's k that was reported last."""
        self._compared: tuple[int, float | None] | None = None
        """The picker's k and the setting beside it, as they were compared last."""
        self._is_searching = False
        """True if the capacity had to be searched for in the last poll that had a capacity."""
        self._changed = asyncio.Event()

    def reconfigure(self, sources: Sequence[SignalSource], signals: SignalsSettings, policy: Policy) -> None:
        """Switch to other sources and settings at once. The previous sources are closed."""
        self._next_sources = tuple(sources)
        self._signals = signals
        self._policy = policy
        self._changed.set()

    def update_from_watch(self, addresses: tuple[str, ...] | None, endpoints: int | None = None) -> None:
        """Set the EPP's pods and the number of ready endpoints, as the Kubernetes watch sees them.

        Both are `None` if there is no watch, or if it does not know them.
        """
        self._endpoints = endpoints
        if addresses == self._replicas:
            return
        self._replicas = addresses
        for source in self._next_sources:
            source.set_replicas(addresses)
        self.poll_soon()

    def poll_soon(self) -> None:
        """Poll every source now instead of after its interval."""
        for wake in self._wake_events.values():
            wake.set()

    async def run(self) -> None:
        """Poll until cancelled, then close the sources."""
        while True:
            self._changed.clear()
            sources = self._sources = self._next_sources
            self._preference = SourcePreference([source.name for source in sources])
            self._wake_events = {source.name: asyncio.Event() for source in sources}
            self._failures = {}
            self._forget_readings()
            # Pickers and their k stay known across configurations. Requests that came past the picker are
            # learned anew.
            previous_facts = self._facts
            self._facts = {
                source.name: PickerFacts(self._count, previous_facts.get(source.name)) for source in sources
            }
            self._growth = HistogramGrowth()
            self._impacts = {}
            for source in sources:
                source.set_replicas(self._replicas)
            try:
                async with asyncio.TaskGroup() as group:
                    poll_tasks = [group.create_task(self._poll_repeatedly(source)) for source in sources]
                    poll_tasks += [group.create_task(self._poll_latencies(source)) for source in sources]
                    await self._changed.wait()
                    for task in poll_tasks:
                        task.cancel()
            finally:
                for source in sources:
                    await source.close()

    async def _poll_repeatedly(self, source: SignalSource) -> None:
        loop = asyncio.get_running_loop()
        wake = self._wake_events[source.name]
        while True:
            began = loop.time()
            wake.clear()
            if self._preference.is_needed(source.name):
                self._handle_result(source.name, await _poll_source(source))
            pause = self._interval_s(source.name) * self._jitter.uniform(1 - JITTER, 1 + JITTER)
            # After a poll that took longer than the interval the source still gets a short rest.
            rest = max(pause - (loop.time() - began), JITTER * pause)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest):
                    await wake.wait()

    async def _poll_latencies(self, source: SignalSource) -> None:
        """Ask a source for latencies, unless another source shows them."""
        while True:
            if not any(
                impact.request_count for name, impact in self._list_fresh_impacts() if name != source.name
            ):
                try:
                    histograms = await source.read_latencies()
                    if histograms is None:
                        return  # the views of this source have the histograms
                    impact = self._compute_impact(source.name, histograms)
                except Exception as error:  # an internal error; latencies are shown only, so polling goes on
                    impact = RealtimeImpact(
                        source=source.name, why_not=_report_defect(f"signals.{source.name}", error).why
                    )
                self._impacts[source.name] = asyncio.get_running_loop().time(), impact
            await asyncio.sleep(LATENCY_INTERVAL_S * self._jitter.uniform(1 - JITTER, 1 + JITTER))

    def _compute_impact(self, name: str, histograms: ReplicaHistograms) -> RealtimeImpact:
        share = self._shares.mean_share
        if histograms.why_not:
            return RealtimeImpact(batch_share=share, source=name, why_not=histograms.why_not)
        return compute_impact(
            histograms.ttft, histograms.tpot, histograms.scope, f"{name}: {histograms.series_name}", share
        )

    def _record_latencies(self, name: str, result: tuple[PoolView, ...] | ReadFailure, now: float) -> None:
        self._shares.add_share(now, self._batch_share())
        if isinstance(result, ReadFailure):
            return
        shown = [view.histograms for view in result if view.histograms is not None]
        # The growth is only right if all replicas are compared over the same time.
        if shown and len(shown) == len(result):
            self._growth.add_histograms(now, shown)
            self._impacts[name] = now, self._growth.compute_impact(self._shares.mean_share, name)

    def _list_fresh_impacts(self) -> list[tuple[str, RealtimeImpact]]:
        """Return the impacts that are not too old, each with its source, the preferred one first."""
        since = asyncio.get_running_loop().time() - IMPACT_MAX_AGE_S
        known = [
            (each.name, self._impacts[each.name]) for each in self._sources if each.name in self._impacts
        ]
        return [(name, found) for name, (at, found) in known if at >= since]

    @property
    def _realtime_impact(self) -> RealtimeImpact:
        """Impact on realtime from the first source that saw requests, or else from the first known source."""
        known = [found for _, found in self._list_fresh_impacts()]
        lost = (
            RealtimeImpact(why_not=f"not read for {IMPACT_MAX_AGE_S:g} s")
            if self._impacts
            else RealtimeImpact()
        )
        return next((found for found in known if found.request_count), known[0] if known else lost)

    def _handle_result(self, name: SourceName, result: tuple[PoolView, ...] | ReadFailure) -> None:
        now = asyncio.get_running_loop().time()
        try:
            self._record_latencies(name, result, now)
        except Exception as error:  # an internal error; latencies are shown only, so the poll still counts
            self._impacts[name] = now, RealtimeImpact(why_not=_report_defect(f"signals.{name}", error).why)
        try:
            self._apply_readings(name, self._derive_readings(name, result, now), result, now)
        except Exception as error:  # an internal error: it closes the gate, and does not end the dispatcher
            self._forget_readings()
            defect = _report_defect(f"signals.{name}", error)
            self._apply_readings(name, self._derive_readings(name, defect, now), defect, now)

    def _apply_readings(
        self,
        name: SourceName,
        poll_readings: PollReadings,
        result: tuple[PoolView, ...] | ReadFailure,
        now: float,
    ) -> None:
        # A pool without endpoints is a fact about the pool, and no failure of the source that reports it. The
        # fallback must not replace it.
        self._failures[name] = tuple(
            each for each in poll_readings.unread if each.reason is not Reason.NO_ENDPOINTS
        )
        is_good = not self._failures[name]
        if self._preference.record_answer(name, is_good):
            if not is_good and len(self._sources) > 1:
                poll_readings = replace(poll_readings, unread=self._collect_failures())
            self._update_staleness(name, poll_readings.unread, result, now)
            self._publish_poll(name, poll_readings, now)
        elif not is_good:
            for other, wake in self._wake_events.items():
                if other != name:
                    wake.set()  # so that the fallback is polled at once

    def _update_staleness(
        self,
        name: SourceName,
        unread: Sequence[ReadFailure],
        result: tuple[PoolView, ...] | ReadFailure,
        now: float,
    ) -> None:
        """Record how long the previous readings remain valid while nothing can be read."""
        if unread:
            self._failing_since = now if self._failing_since is None else self._failing_since
            if any(each.reason is not Reason.UNREADABLE for each in unread):
                # A fact such as `no-endpoints` contradicts the previous readings, so they end at once.
                self._forget_readings()
            return
        self._failing_since = None
        # Another source has another interval between its samples.
        if name != self._source_read:
            self._source_read = name
            self._staleness_limit = StalenessLimit(self._interval_s(name), self._signals.max_age_for(name))
        if not isinstance(result, ReadFailure):
            self._staleness_limit.record_sample(
                min(view.opened_at for view in result), max(view.closed_at for view in result)
            )

    def _forget_readings(self) -> None:
        """Drop the previous readings, so that they no longer count while nothing can be read."""
        self._source_read, self._staleness_limit = None, StalenessLimit(0.0, 0.0)

    def _interval_s(self, name: SourceName) -> float:
        """Return the interval at which a source is polled."""
        least_s = next(source.min_interval_s for source in self._sources if source.name == name)
        return max(self._signals.interval_s, least_s)

    def _collect_failures(self) -> tuple[ReadFailure, ...]:
        """Return the failures of all sources, each with the name of its source."""
        return tuple(
            replace(failure, why=f"{source.name}: {failure.why}")
            for source in self._sources
            for failure in self._failures.get(source.name, ())
        )

    def _derive_readings(
        self, name: SourceName, result: tuple[PoolView, ...] | ReadFailure, now: float
    ) -> PollReadings:
        use = self._signals.use
        # Before the first views all signals that may be used are closed.
        if isinstance(result, ReadFailure):
            return PollReadings(self._signals_in_use or list_possible_signals(use), (), (result,), "")
        facts = self._facts[name]
        facts.learn_from_views(result, self._endpoints)
        poll_readings = derive_readings(result, use, self._policy, name, facts, self._endpoints)
        age_s = now - min(view.opened_at for view in result)
        max_age_s = self._signals.max_age_for(name)
        if age_s > max_age_s:
            why = f"the samples are {age_s:.1f} s old, more than {max_age_s:g} s"
            stale = ReadFailure(
                Reason.STALE, why, "signals.max_age_s, where the scrape interval is that long"
            )
            return replace(poll_readings, readings=(), unread=(stale,))
        # Prometheus shows a single replica if it scrapes the Service instead of the pods: the queues of the
        # other replicas are hidden then.
        if self._replicas is not None and len(result) < len(self._replicas):
            why = f"{len(result)} of the endpoint picker's {len(self._replicas)} replicas can be seen"
            hint = "each EPP pod must be scraped by itself (a PodMonitor), not their Service"
            return replace(poll_readings, readings=(), unread=(ReadFailure(Reason.UNREADABLE, why, hint),))
        return poll_readings

    def _publish_poll(self, name: SourceName, poll_readings: PollReadings, now: float) -> None:
        if self._source_in_use != name:
            before, self._source_in_use = self._source_in_use, name
            failed = self._failures.get(before, ()) if before is not None else ()
            why = failed[0].why if failed else None
            emit(Event.SIGNALS_SOURCE, source=name, before=before, why=why)
        if poll_readings.signals != self._signals_in_use:
            self._signals_in_use = poll_readings.signals
            emit(
                Event.SIGNALS_IN_USE,
                signals=[str(each) for each in poll_readings.signals],
                detector=poll_readings.detector,
            )
        self._log_unreadable(poll_readings)
        self._compare_picker_with_setting()
        searching = poll_readings.per_endpoint_source == "search"
        if searching and not self._is_searching:
            emit(Event.CAPACITY_SEARCH, per_endpoint=poll_readings.per_endpoint)
        self._is_searching = searching or (self._is_searching and poll_readings.per_endpoint_source is None)
        good_s = self._signals.max_age_for(name)
        self._on_poll(
            SourcePoll(
                completed_at=now,
                source=name,
                signals=poll_readings.signals,
                readings=tuple(replace(each, max_age_s=good_s) for each in poll_readings.readings),
                failures=poll_readings.unread,
                closes_at=self._staleness_limit.compute_stale_at(),
                failing_since=self._failing_since,
                detector=poll_readings.detector,
                per_endpoint=poll_readings.per_endpoint,
                per_endpoint_source=poll_readings.per_endpoint_source,
                picker_k=self._count.k,
                realtime_impact=self._realtime_impact,
            )
        )

    def _compare_picker_with_setting(self) -> None:
        """Log the picker's maxConcurrency once, and warn if `budget.per_endpoint` contradicts it."""
        k, configured = self._count.k, self._policy.per_endpoint
        if k is None:
            return
        if k != self._reported_k:
            self._reported_k = k
            emit(Event.CAPACITY_LEARNED, picker=k, per_endpoint=configured)
        if (k, configured) != self._compared:
            self._compared = (k, configured)
            if configured is not None and configured != k:
                emit(Event.CAPACITY_DIFFERS, picker=k, per_endpoint=configured)

    def _log_unreadable(self, poll_readings: PollReadings) -> None:
        """Log what cannot be read. A problem that differs only in its numbers is not logged again."""
        problems = tuple(
            (each.reason, each.signal, re.sub(r"[\d.]+", "#", each.why)) for each in poll_readings.unread
        )
        if problems == self._logged_problems:
            return
        if poll_readings.unread:
            for each in poll_readings.unread:
                emit(Event.SIGNALS_UNREADABLE, reason=str(each.reason), why=each.why, hint=each.hint)
        elif self._logged_problems:
            emit(Event.SIGNALS_READABLE, source=self._source_in_use)
        self._logged_problems = problems


async def _poll_source(source: SignalSource) -> tuple[PoolView, ...] | ReadFailure:
    """Poll the source. An internal error closes the gate, and does not end the dispatcher."""
    try:
        return await source.poll()
    except Exception as error:
        return _report_defect(f"signals.{source.name}", error)


def _report_defect(where: str, error: Exception) -> ReadFailure:
    emit(Event.INTERNAL_ERROR, where=where, error=repr(error))
    return ReadFailure(Reason.UNREADABLE, f"the dispatcher failed: {error!r}", "a defect: please report it")
