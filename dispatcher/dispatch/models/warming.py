"""Warm-up: recorded requests go to a version that is cold at an endpoint, before work does.

    cold ──▶ right ──▶ one call after the other ──▶ warm
              │ another owner has it                 what was answered with errors: cold again for a while
              ▼                                      where a warm-up is required, else warm all the same
            later

Only while the gate is open; each call counts one unit of the limit, for which work makes room, that of other
owners too: the rights are known to all. An endpoint that cannot be reached, or that does not know the model
yet, is asked again soon, and is not warm by that. Who cannot go on (his gate is closed, the limit is full of
others' work, he ends) gives the right back: another owner may be able to. Who hung until his right lapsed
begins nothing more, unless he can take it anew.

Where there is no gateway, one request at a time shows when it is back. If all that is queued waits for what
is cold, nothing could show it, and nothing would ever be warm: then a call of a warm-up goes instead.
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
"""Endpoints that are warmed at the same time."""
LOOK_S = 1.0
SOON_S = 5.0
"""Until what could not be begun is tried again."""
AGAIN_S = (30.0, 300.0)
"""Until what was answered with errors is tried again: doubling from the first to the second."""
RENEW_S = 10.0
RIGHT_S = 30.0
"""Then a right that was not renewed has lapsed (ports/model_registry.py)."""
CLOSED_S = 10.0
"""Who has the right keeps it so long while he can make no room; what was answered is not sent again."""
GIVE_BACK_S = 1.0
"""A process that ends tries so long to give the right back. Else it lapses."""
ROOM_S = 0.05
"""How often it is looked whether there is room."""
ERRORS_MOST = 10
"""After so many the rest is not sent."""
_WHY_CHARS = 200
_MAY_BEGIN = frozenset(reason for reason in Reason if not reason.closed) | {Reason.GATEWAY_UNREACHABLE}


@dataclass(slots=True)
class WarmUp:
    """One warm-up, on its way."""

    version: str
    endpoint: str
    calls: int = 0
    errors: list[str] = field(default_factory=list)
    spent_s: float = 0.0
    """Waiting for answers."""
    ours_until: float = 0.0
    """Then the right may be another's, by a clock that goes on while the machine sleeps."""
    note: str = ""
    """Why what is sent may be out of date."""


class Warming:
    """Of one process."""

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
        """Calls under way, or that wait for room, of this process."""
        self.done: dict[str, int] = dict.fromkeys(("warm", "errors", "again"), 0)
        """Warm-ups by what became of them: all was answered; some not; it is to be tried again."""
        self.options = options
        self._access = access
        self._limiter = limiter
        self._holding = holding
        self._gateway = gateway
        self._versions = versions
        self._servers = servers
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._rests: dict[tuple[str, str], tuple[float, int]] = {}
        """Until when, and how often in a row it has failed."""
        self._stopped: dict[tuple[str, str], WarmUp] = {}
        """Those that the gate has stopped, to be gone on with."""
        self._number = 0
        self._under_way = 0
        self._probe = 0
        """Within this limit one call may be sent to see whether the gateway is back."""

    async def run(self) -> None:
        """Warm what is cold. Who only observes warms nothing."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                if self._begin(tasks):
                    await asyncio.sleep(LOOK_S)
                    if not self.options.observe:
                        await self._versions.exchange()  # what others warm counts here
                else:
                    self._versions.stirred.clear()
                    await self._versions.stirred.wait()

    @property
    def units(self) -> int:
        """Of the limit, beside leases: what the warm-ups of this process count, and those of others."""
        return self._units + len(self._others)

    @property
    def _others(self) -> list[tuple[str, str]]:
        """What other owners have the right to warm: each sends one call at a time."""
        marks, me = self._versions.marks, self._access.queue.owner
        return [(model, endpoint) for model, endpoint, owner in marks.warming if owner != me] if marks else []

    def reconfigure(self, options: Options) -> None:
        """What is under way goes on as it began."""
        self.options = options
        self._rests.clear()
        self._stopped.clear()  # other requests may be sent now

    def probe(self, claimed: Claimed, limit: int) -> None:
        """Where nothing was to be claimed that shows whether the gateway is back, a call that waits may."""
        if not claimed.leases and not claimed.waiting and self._units > self._under_way:
            self._probe = limit

    # One warm-up.

    def _begin(self, tasks: asyncio.TaskGroup) -> bool:
        """Whether anything is cold."""
        at = now()
        cold = [(family, *each) for family in self._versions for each in family.cold()]
        wanted = {(version, endpoint) for _, version, endpoint in cold}
        self._rests = {pair: rest for pair, rest in self._rests.items() if pair in wanted}
        self._stopped = {pair: stopped for pair, stopped in self._stopped.items() if pair in wanted}
        if self._versions.marks is None or self.options.observe:  # what is warm already is not known yet
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
            await self._versions.exchange()  # who had the right before may have warmed it
            renewing = asyncio.create_task(self._renew(warm_up))
            try:
                whole = await self._send(family, warm_up)
            except Exception as error:  # of a file, or of whatever answers: it ends nothing else
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
        """Take the right, or renew it."""
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
        """What follows. `whole`: all was answered, one way or the other."""
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
        """Send it all. Whether it came to an end: nothing else may be said of an endpoint that is away."""
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
        """Whether the right is ours: taken anew where it may have lapsed, with what others have done."""
        if self._has_lapsed(warm_up):
            if not await self._take(warm_up):
                return False
            await self._versions.exchange()
        return True

    def _has_lapsed(self, warm_up: WarmUp) -> bool:
        return self._access.clock() >= warm_up.ours_until

    def _wanted(self, family: ModelFamily, warm_up: WarmUp) -> bool:
        """It is there still, and the settings have it."""
        known = self._versions.told(family) is not None
        return known and (warm_up.version, warm_up.endpoint) in family.cold()

    async def _room(self, warm_up: WarmUp) -> bool:
        """Whether a unit of the limit is free for a call, once it is; False: the gate stays closed, or it is
        the work of others that fills the limit, which may be long."""
        pair = warm_up.version, warm_up.endpoint
        ends_at = now() + CLOSED_S
        while True:
            allowance = self._limiter.allowance(now())
            # Where there are more warm-ups than units all owners agree on whose turn it is.
            mine = max(self._under_way, sum(each < pair for each in self._running))
            before = sum(each < pair for each in self._others)
            taken = self._holding.units + self._limiter.others + mine + before
            if allowance.limit > taken or self._probe > taken:
                self._probe = 0
                return True
            if not allowance.reason.closed and self._holding.units:
                ends_at = now() + CLOSED_S  # what ends of that is not replaced
            elif now() >= ends_at or allowance.reason is Reason.DRAINING:
                return False
            await asyncio.sleep(ROOM_S)

    async def _call(self, warm_up: WarmUp, call: WarmupCall, ends_at: float) -> Outcome:
        self._number += 1
        token = f"warm-up-{self._number}"
        straight = self.options.versions.straight
        if straight is None:
            straight = not self._versions.steered
        self._under_way += 1
        self._limiter.sent(token, now())
        try:
            if straight and self._servers is not None and warm_up.endpoint != GATEWAY:
                return await self._servers.post(warm_up.endpoint, call.path, call.body, deadline=ends_at)
            request = Request(
                f"{self._access.queue.owner}-{token}",
                int(self._access.queue.unix_now() + ends_at - now()) + 1,
                call.body,
                endpoint=call.path,
                version=warm_up.version,
                endpoints=warm_up.endpoint if self._versions.steered else "",
            )
            sent = await self._gateway.forward(request, token=token, deadline=ends_at, may_send=_may)
            if sent.held is not None:
                sent.held.free()  # only the beginning of the answer is used, and nothing of it is kept
            self._seen(sent)
            return sent.outcome
        finally:
            self._under_way -= 1
            self._limiter.answered(token, now())

    def _seen(self, sent: Forwarded) -> None:
        """Tell the limiter whether there is a gateway."""
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
    """What an answer says against a warm-up; empty: nothing. None: nothing was answered by the model."""
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
