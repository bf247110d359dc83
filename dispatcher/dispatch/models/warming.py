"""Warm-up: sends recorded requests to a version that is cold at an endpoint, before it gets work.

    cold ──▶ lock ──▶ one call after the other ──▶ warm
              │ another owner has it                 after errors: if the warm-up is required, cold again for
              ▼                                      a while, else warm all the same
            later

Warm-ups run only while the gate is open. Each call counts one unit of the limit. Requests make room for the
calls of all owners, because all know the locks. An endpoint that is unreachable, or that does not know the
model yet, is tried again soon and is not marked as warm. An owner that cannot continue (its gate is closed,
the limit is full of others' requests, it stops) releases the lock, so that another owner can continue. An
owner that hung until its lock expired sends nothing more unless it gets the lock again.

While the gateway is unreachable, one request at a time probes it. If all queued requests wait for a cold
version, none could probe it and nothing would ever be warm. In that case a call of a warm-up is the probe.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from dispatcher.core.gateway.outcome import (
    Delivered,
    Evicted,
    Failed,
    Outcome,
    Overloaded,
    TooLarge,
    TooLate,
    Unreachable,
)
from dispatcher.core.limit.budget import Reason
from dispatcher.core.models.availability import GATEWAY
from dispatcher.core.models.names import says_no_model
from dispatcher.core.models.warmup import plan
from dispatcher.core.printable import plain, shortened
from dispatcher.core.requests.request import Request
from dispatcher.dispatch.queue_access import now
from dispatcher.telemetry.events import Event, emit

if TYPE_CHECKING:
    from dispatcher.core.limit.limiter import Limiter
    from dispatcher.core.models.rollover import ModelFamily
    from dispatcher.core.models.warmup import WarmupCall
    from dispatcher.dispatch.in_flight import Holding
    from dispatcher.dispatch.models.versions import Versions
    from dispatcher.dispatch.options import Options
    from dispatcher.dispatch.queue_access import QueueAccess
    from dispatcher.ports import Claimed, Forwarded, Gateway, ModelServers

AT_ONCE = 4
"""Maximum number of endpoints that are warmed at the same time."""
LOOK_S = 1.0
SOON_S = 5.0
"""Time until a warm-up that could not begin is tried again."""
AGAIN_S = (30.0, 300.0)
"""Shortest and longest time until a warm-up with errors is tried again. It doubles in between."""
RENEW_S = 10.0
RIGHT_S = 30.0
"""Lifetime of a lock that is not renewed (ports/model_registry.py)."""
CLOSED_S = 10.0
"""Time that an owner keeps the lock while there is no room. Calls that were answered are not sent again
later."""
GIVE_BACK_S = 1.0
"""Time that a stopping process tries to release the lock. Otherwise the lock expires."""
ROOM_S = 0.05
"""Interval of the check for room."""
ERRORS_MOST = 10
"""Number of errors after which the remaining calls are not sent."""
_WHY_CHARS = 200
_MAY_BEGIN = frozenset(reason for reason in Reason if not reason.closed) | {Reason.GATEWAY_UNREACHABLE}


@dataclass(slots=True)
class WarmUp:
    """One warm-up in progress."""

    version: str
    endpoint: str
    calls: int = 0
    errors: list[str] = field(default_factory=list)
    spent_s: float = 0.0
    """Time spent waiting for answers."""
    ours_until: float = 0.0
    """Time at which another owner may get the lock, by a clock that goes on while the machine sleeps."""
    note: str = ""
    """Reason why the warm-up requests may be out of date."""


class Warming:
    """Runs the warm-ups of one process."""

    def __init__(
        self,
        access: QueueAccess,
        limiter: Limiter,
        holding: Holding,
        gateway: Gateway,
        versions: Versions,
        options: Options,
        servers: ModelServers | None = None,
    ) -> None:
        self._units = 0
        """Number of calls of this process that run or wait for room."""
        self.done: dict[str, int] = dict.fromkeys(("warm", "errors", "again"), 0)
        """Number of warm-ups by result: all calls answered; some with errors; to be tried again."""
        self.options = options
        self._access = access
        self._limiter = limiter
        self._holding = holding
        self._gateway = gateway
        self._versions = versions
        self._servers = servers
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._rests: dict[tuple[str, str], tuple[float, int]] = {}
        """Time of the next try, and number of failures in a row."""
        self._stopped: dict[tuple[str, str], WarmUp] = {}
        """Warm-ups that the gate has interrupted, to be continued."""
        self._number = 0
        self._under_way = 0
        self._probe = 0
        """Limit within which one call may be sent to probe the gateway. 0 if none may."""

    async def run(self) -> None:
        """Warm cold versions until cancelled. An observer warms nothing."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                if self._begin(tasks):
                    await asyncio.sleep(LOOK_S)
                    if not self.options.observe:
                        await self._versions.exchange()  # learn what others have warmed
                else:
                    self._versions.stirred.clear()
                    await self._versions.stirred.wait()

    @property
    def units(self) -> int:
        """Units of the limit used by warm-ups of all owners, beside the leases."""
        return self._units + len(self._others)

    @property
    def _others(self) -> list[tuple[str, str]]:
        """Pairs that other owners have locked: each of these sends one call at a time."""
        marks, me = self._versions.marks, self._access.queue.owner
        return [(model, endpoint) for model, endpoint, owner in marks.warming if owner != me] if marks else []

    def reconfigure(self, options: Options) -> None:
        """Use new options. Running warm-ups continue as they began."""
        self.options = options
        self._rests.clear()
        self._stopped.clear()  # the recorded requests may have changed

    def probe(self, claimed: Claimed, limit: int) -> None:
        """Allow a waiting call to probe the gateway, if no request was left to be claimed for that."""
        if not claimed.leases and not claimed.waiting and self._units > self._under_way:
            self._probe = limit

    # ── one warm-up ──────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, tasks: asyncio.TaskGroup) -> bool:
        """Start warm-ups. Return True if any version is cold."""
        at = now()
        cold = [(family, *each) for family in self._versions for each in family.cold()]
        wanted = {(version, endpoint) for _, version, endpoint in cold}
        self._rests = {pair: rest for pair, rest in self._rests.items() if pair in wanted}
        self._stopped = {pair: stopped for pair, stopped in self._stopped.items() if pair in wanted}
        if self._versions.marks is None or self.options.observe:  # unknown what is warm already
            return bool(cold)
        if self._limiter.allowance(at).reason not in _MAY_BEGIN:
            return bool(cold)
        for family, version, endpoint in cold:
            pair = version, endpoint
            if len(self._running) < AT_ONCE and pair not in self._running and self._rest(pair)[0] <= at:
                warm_up = self._stopped.pop(pair, None) or WarmUp(version, endpoint)
                self._running[pair] = tasks.create_task(self._warm(family, warm_up))
        return bool(cold)

    def _rest(self, pair: tuple[str, str]) -> tuple[float, int]:
        return self._rests.get(pair, (0.0, 0))

    async def _warm(self, family: ModelFamily, warm_up: WarmUp) -> None:
        pair = version, endpoint = warm_up.version, warm_up.endpoint
        queue, times = self._access.queue, self._rest(pair)[1]
        try:
            if not await self._take(warm_up):
                self._rests[pair] = now() + SOON_S, times
                return
            await self._versions.exchange()  # the previous owner of the lock may have warmed it
            renewing = asyncio.create_task(self._renew(warm_up))
            try:
                whole = await self._send(family, warm_up)
            except Exception as error:  # a bad file or answer must not stop other warm-ups
                emit(Event.SURPRISE, where="warm-up", error=repr(error))
                warm_up.errors.append(f"the dispatcher failed: {shortened(repr(error), _WHY_CHARS)}")
                whole = True
            finally:
                renewing.cancel()
            await self._end(family, warm_up, whole=whole, times=times)
        except asyncio.CancelledError:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GIVE_BACK_S):
                    await self._access.ask("unwarmed", queue.unwarmed(version, endpoint))
            raise
        finally:
            del self._running[pair]

    async def _take(self, warm_up: WarmUp) -> bool:
        """Take or renew the lock."""
        asked_at = self._access.clock()
        right = self._access.queue.warming(warm_up.version, warm_up.endpoint)
        taken = await self._access.ask("warming", right)
        if taken is not None:
            warm_up.ours_until = asked_at + RIGHT_S if taken else asked_at
        return bool(taken)

    async def _renew(self, warm_up: WarmUp) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            await self._take(warm_up)

    async def _end(self, family: ModelFamily, warm_up: WarmUp, *, whole: bool, times: int) -> None:
        """Record the result of a warm-up. `is_finished` says that all calls were answered, with errors or
        without."""
        pair = version, endpoint = warm_up.version, warm_up.endpoint
        queue, errors, told = self._access.queue, warm_up.errors, self._versions.told(family)
        again = not whole or told is None or (errors and told.required)
        if again:
            await self._access.ask("unwarmed", queue.unwarmed(version, endpoint))
            rest_s = min(AGAIN_S[1], AGAIN_S[0] * 2.0 ** min(times, 10)) if whole else SOON_S
            self._rests[pair] = now() + rest_s, times + bool(whole)
        else:
            await self._versions.warmed(version, endpoint)
        self.done["again" if again else "errors" if errors else "warm"] += 1
        if whole:
            emit(
                Event.WARM_UP_FAILED if errors else Event.WARM_UP,
                model=version,
                endpoint=endpoint,
                calls=warm_up.calls,
                spent_s=round(warm_up.spent_s, 3),
                errors=len(errors),
                why=errors[0] if errors else warm_up.note,
                opens=not again,
            )

    async def _send(self, family: ModelFamily, warm_up: WarmUp) -> bool:
        """Send all calls. Return False if that was interrupted: nothing can be said about an endpoint that is
        unreachable."""
        told = self._versions.told(family)
        if told is None or told.warmup is None:
            return False
        requests, warm_up.note = await told.warmup()
        most_s = self.options.versions.warm_s
        calls = plan(requests, self.options.batching, warm_up.version)
        for call in islice(calls, warm_up.calls, None):
            while True:
                if warm_up.spent_s >= most_s:
                    warm_up.errors.append(f"not done within {most_s:g} s")
                    return True
                self._units += 1
                try:
                    if not await self._is_ours(warm_up) or not await self._room(warm_up):
                        self._stopped[warm_up.version, warm_up.endpoint] = warm_up
                        return False
                    if self._has_lapsed(warm_up):
                        continue
                    if not self._wanted(family, warm_up):
                        return False
                    began_at = now()
                    with self._versions.under_way(warm_up.version):
                        outcome = await self._call(warm_up, call, began_at + most_s - warm_up.spent_s)
                finally:
                    self._units -= 1
                warm_up.spent_s += now() - began_at
                if not isinstance(outcome, Overloaded | Evicted):
                    break
                # Refused or evicted: send the same call again. Waiting does not count as spent time.
                await asyncio.sleep(min(max(outcome.retry_after_s or 0.0, 1.0), self.options.retry.max_s))
            warm_up.calls += 1
            if (why := _error(outcome, warm_up.version)) is None:
                return False
            if why:
                warm_up.errors.append(why)
                if len(warm_up.errors) == ERRORS_MOST:
                    break
        return True

    async def _is_ours(self, warm_up: WarmUp) -> bool:
        """Return True if this owner has the lock. An expired lock is taken again, and the state of others is
        read."""
        if self._has_lapsed(warm_up):
            if not await self._take(warm_up):
                return False
            await self._versions.exchange()
        return True

    def _has_lapsed(self, warm_up: WarmUp) -> bool:
        return self._access.clock() >= warm_up.ours_until

    def _wanted(self, family: ModelFamily, warm_up: WarmUp) -> bool:
        """Return True if the version is still cold there and in the settings."""
        known = self._versions.told(family) is not None
        return known and (warm_up.version, warm_up.endpoint) in family.cold()

    async def _room(self, warm_up: WarmUp) -> bool:
        """Wait until a unit of the limit is free. Return False if the gate stays closed, or requests of other
        owners fill the limit, which may last long."""
        pair = warm_up.version, warm_up.endpoint
        ends_at = now() + CLOSED_S
        while True:
            allowance = self._limiter.allowance(now())
            # With more warm-ups than units, the owners agree on the order by sorting the pairs.
            mine = max(self._under_way, sum(each < pair for each in self._running))
            before = sum(each < pair for each in self._others)
            taken = self._holding.units + self._limiter.others + mine + before
            # A probe is allowed for one call only.
            if allowance.limit > taken or self._probe > taken:
                self._probe = 0
                return True
            if not allowance.reason.closed and self._holding.units:
                ends_at = now() + CLOSED_S  # no new requests are claimed in place of those that end
            elif now() >= ends_at or allowance.reason is Reason.DRAINING:
                return False
            # Polling is simple and cheap here: at most MAX_PARALLEL_WARM_UPS tasks wait.
            await asyncio.sleep(ROOM_S)

    async def _call(self, warm_up: WarmUp, call: WarmupCall, ends_at: float) -> Outcome:
        self._number += 1
        token = f"warm-up-{self._number}"
        straight = self.options.versions.straight
        if straight is None:
            straight = not self._versions.steered
        self._under_way += 1
        # Counts in the limit like a request of this process.
        self._limiter.sent(token, now())
        try:
            if straight and self._servers is not None and warm_up.endpoint != GATEWAY:
                return await self._servers.post(warm_up.endpoint, call.path, call.body, deadline=ends_at)
            request = Request(
                f"{self._access.queue.owner}-{token}",
                # Deadlines are whole Unix seconds: round up, since `ends_at` is the real limit.
                int(self._access.queue.unix_now() + ends_at - now()) + 1,
                call.body,
                endpoint=call.path,
                version=warm_up.version,
                endpoints=warm_up.endpoint if self._versions.steered else "",
            )
            sent = await self._gateway.forward(request, token=token, deadline=ends_at, may_send=_may)
            if sent.held is not None:
                sent.held.free()  # only the start of the answer is used
            self._seen(sent)
            return sent.outcome
        finally:
            self._under_way -= 1
            self._limiter.answered(token, now())

    def _seen(self, sent: Forwarded) -> None:
        """Tell the limiter whether the gateway is reachable."""
        match sent.outcome:
            case Unreachable(why):
                self._limiter.unreachable(sent.ended_at, why)
            case Delivered() | TooLarge() | Overloaded() | Evicted():
                self._limiter.reached(sent.ended_at, sent.sent_at)
            case _:
                pass


def _may() -> bool:
    return True


def _error(outcome: Outcome, version: str) -> str | None:
    """Return the error of an answer, empty if there is none. `None` if the model did not answer at all."""
    match outcome:
        case Delivered(status, body) if says_no_model(status, body, version):
            return None
        case Delivered(status, body) if status >= 300:
            return f"{status}: {shortened(plain(body.decode(errors='replace')), _WHY_CHARS)}"
        case Delivered() | TooLarge():
            return ""
        case Failed(why, status):
            return shortened(why if status is None else f"{status}: {why}", _WHY_CHARS)
        case TooLate():
            return "no answer in time"
        case _:
            return None
