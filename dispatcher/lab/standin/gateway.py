"""The inference gateway of the live world: takes requests to the pool, answers, and breaks as told."""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from math import isnan
from typing import Any, Literal

import msgspec

from dispatcher.core.requests.headers import (
    FAIRNESS_ID,
    OBJECTIVE,
    OLD_FAIRNESS_ID,
    OLD_OBJECTIVE,
    REQUEST_ID,
    SESSION_TOKEN,
)
from dispatcher.lab.standin.http import Exchange, Server, head
from dispatcher.lab.standin.model import BATCH_CONTEXT, work_s
from dispatcher.lab.standin.model import generated as drawn
from dispatcher.lab.standin.pool import Job, Level, Pool
from dispatcher.lab.standin.prefixes import PrefixServers
from dispatcher.lab.standin.replies import Answer, content, plain_text
from dispatcher.lab.standin.serving import ModelServers, not_found


class Fault(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What is wrong with the gateway: the way it answers, or the listener itself."""

    listener: Literal["", "refuse", "blackhole", "plaintext"] = ""
    """`refuse`: it stops listening and drops what is connected. `blackhole`: connections neither open nor
    answer. `plaintext`: it stops speaking TLS."""
    answer: Answer | None = None
    match: str = ""
    """Only for requests that have this in their body or fairness header."""
    share: float = 1.0
    """Only for this share of them (seeded)."""
    times: int | None = None
    """Only for so many of them."""


class LogEntry(msgspec.Struct):
    """One request, as it went. Times are of CLOCK_MONOTONIC, the same for all processes of a machine."""

    number: int
    id: str
    batch: bool
    tenant: str
    """The fairness header."""
    arrived_at: float
    started_at: float | None = None
    """When it got its slot."""
    ended_at: float | None = None
    """When its answer was sent, or its client was gone."""
    server: str = ""
    """The model server that it went to, as its session token has it."""
    model_server: int = -1
    """The number of that to which it came; -1: any will do, or it came to none."""
    model: str = ""
    """What it asked that one for."""
    cold: bool = False
    """It was the first that asked for it there, and took so much longer."""
    direct: bool = False
    """It came to the server past the gateway."""
    status: int | None = None
    """None: not ended; 0: its client went away; -1: the gateway broke the connection."""


class _Payload(msgspec.Struct):
    sim: Answer = msgspec.field(default_factory=Answer)
    max_tokens: int | None = None


_HEALTHY = Answer()


class Gateway:
    """What is at the gateway's address.

    A request is batch, unless its objective header says `realtime`. `seconds`: how long every request runs;
    None: by its tokens and by how full the pool is. `path_s`: the way to the pool, and again the way back.
    """

    def __init__(
        self,
        pool: Pool,
        host: str,
        port: int,
        tls: ssl.SSLContext | None,
        *,
        seconds: float | None,
        path_s: float,
        prefixes: PrefixServers,
        servers: ModelServers,
        drop_reason: str,
        seed: int,
        log_max: int,
    ) -> None:
        self.seconds = seconds
        self.path_s = path_s
        self.prefixes = prefixes
        self.servers = servers
        self.endpoints = True
        """False: the picker knows none, and says so."""
        self.subset_header = ""
        """By this a request says to which servers it may go; empty: by none."""
        self.labels: Callable[[], Mapping[str, int]] = dict
        """The names by which it may say so, with the server's number."""
        self.log: deque[LogEntry] = deque(maxlen=log_max)
        """The newest requests in the order of their arrival."""
        self.levels = {"batch": Level(), "realtime": Level()}
        """Requests at the gateway, from the last byte of one to its answer: both ways included."""
        self.server = Server(self._arrive, host, port, tls)
        self._pool = pool
        self._drop_reason = drop_reason
        self._seed = seed
        self._random = random.Random(seed)
        self._loop = asyncio.get_running_loop()
        self._fault = Fault()
        self._fault_left: int | None = None
        self._number = 0
        self._counts: Counter[str] = Counter()
        self._arrivals: Counter[str] = Counter()
        self._served: Counter[str] = Counter()

    async def break_(self, fault: Fault | None) -> None:
        """Be broken in this way from now on; None: whole again."""
        was, self._fault = self._fault, fault or Fault()
        self._fault_left = self._fault.times
        if self._fault.listener == "refuse":
            await self.server.close()
        elif self._fault.listener == "blackhole":
            await self.server.blackhole()
        elif self._fault.listener == "plaintext" or was.listener:
            await self.server.open(plain=self._fault.listener == "plaintext")

    def restart(self) -> None:
        """Begin a new measurement. The log and what is known of ids stay."""
        for level in self.levels.values():
            level.restart()
        self._counts.clear()
        self.prefixes.restart()

    def report(self) -> dict[str, Any]:
        again = {id_: times for id_, times in self._arrivals.items() if times > 1}
        served_again = {id_: times for id_, times in self._served.items() if times > 1}
        return {
            **{kind: level.report() for kind, level in self.levels.items()},
            "arrived": self._counts["arrived"],
            "direct": self._counts["direct"],
            "answers": {key: count for key, count in sorted(self._counts.items()) if key.isdigit()},
            "gone": self._counts["gone"],
            "broken": self._counts["broken"],
            "prefixes": self.prefixes.report(),
            "connections": len(self.server.connections),
            "ids": {
                "distinct": len(self._arrivals),
                "served": len(self._served),
                "arrived_again": len(again),
                "served_again": len(served_again),
                "examples": dict(list((served_again or again).items())[:20]),
            },
        }

    def _arrive(self, exchange: Exchange) -> None:
        if exchange.method == "GET" and exchange.target.partition("?")[0] == "/v1/models" and self.endpoints:
            exchange.answer(200, self.servers.union(), [("content-type", "application/json")])
            return
        entry = self._logged(exchange)
        self._counts["arrived"] += 1
        if entry.id:
            self._arrivals[entry.id] += 1
        self._level(entry).add(1, entry.arrived_at)
        self._begin(exchange, entry)

    def straight(self, exchange: Exchange, number: int) -> None:
        """A request comes to this server past the gateway: none of its faults, its counts and its ways."""
        entry = self._logged(exchange)
        entry.direct, entry.model_server = True, number
        self._counts["direct"] += 1
        self._begin(exchange, entry)

    def _logged(self, exchange: Exchange) -> LogEntry:
        headers = exchange.headers
        objective = headers.get(OBJECTIVE) or headers.get(OLD_OBJECTIVE)
        tenant = headers.get(FAIRNESS_ID) or headers.get(OLD_FAIRNESS_ID, "")
        self._number += 1
        id_ = headers.get(REQUEST_ID, "")
        entry = LogEntry(self._number, id_, objective != "realtime", tenant, time.monotonic())
        self.log.append(entry)
        return entry

    def _begin(self, exchange: Exchange, entry: LogEntry) -> None:
        exchange.on_gone = lambda: self._end(entry, 0)
        try:
            payload, how = self._how(exchange, entry)
        except msgspec.MsgspecError as error:
            self._answer(exchange, entry, plain_text(400, f"inference error: BadRequest - {error}"))
            return
        if how.kind == "reset":
            exchange.reset()
            self._end(entry, -1)
        else:
            self._travel(self._enter, exchange, entry, payload, how)

    def _travel(self, then: Callable[..., None], exchange: Exchange, entry: LogEntry, *what: Any) -> None:
        if self.path_s > 0 and not entry.direct:
            self._loop.call_later(self.path_s, then, exchange, entry, *what)
        else:
            then(exchange, entry, *what)

    def _how(self, exchange: Exchange, entry: LogEntry) -> tuple[_Payload | None, Answer]:
        """How this request is to be answered: as the gateway's fault has it, or else as it asks itself."""
        fault, tenant, payload = self._fault, entry.tenant, None
        if exchange.method == "POST" and (self.seconds is None or b'"sim"' in exchange.body):
            payload = msgspec.json.decode(exchange.body, type=_Payload)
        if (
            not entry.direct
            and fault.answer is not None
            and self._fault_left != 0
            and (not fault.match or fault.match in tenant or fault.match.encode() in exchange.body)
            and (fault.share >= 1.0 or self._random.random() < fault.share)
        ):
            if self._fault_left is not None:
                self._fault_left -= 1
            return payload, fault.answer
        return payload, payload.sim if payload is not None else _HEALTHY

    def _enter(self, exchange: Exchange, entry: LogEntry, payload: _Payload | None, how: Answer) -> None:
        """The request has come to the picker."""
        if not exchange.open:
            return
        if how.kind == "status":
            self._travel(self._answer, exchange, entry, how)
        elif exchange.method != "POST":  # a model server answers it at once, and runs nothing
            self._travel(self._answer, exchange, entry, plain_text(405, "Method Not Allowed"))
        elif entry.direct:
            self._submit(exchange, entry, payload, how)
        elif not self.endpoints or (number := self.servers.pick(self._named(exchange))) is None:
            reason = "rejected-no-endpoints"
            refusal = plain_text(503, "inference error: ServiceUnavailable - no endpoint available", reason)
            self._travel(self._answer, exchange, entry, refusal)
        else:
            entry.model_server = number
            self._submit(exchange, entry, payload, how)

    def _named(self, exchange: Exchange) -> set[int] | None:
        """The servers that the request names; None: it may go to any."""
        named = exchange.headers.get(self.subset_header) if self.subset_header else None
        if named is None:
            return None
        labels = self.labels()
        return {labels[label] for each in named.split(",") if (label := each.strip()) in labels}

    def _submit(self, exchange: Exchange, entry: LogEntry, payload: _Payload | None, how: Answer) -> None:
        seconds = self.seconds if how.seconds is None else how.seconds
        generated = 0
        if seconds is None:
            generated = (
                payload.max_tokens if payload is not None and payload.max_tokens else self._drawn(entry.id)
            )

        wanted = payload.max_tokens if payload is not None else None
        met = self.servers.meet(entry.model_server, exchange.body)
        entry.model = met.model
        if met.unknown:
            refusal = Answer(kind="status", status=404, body=not_found(met.model))
            self._travel(self._answer, exchange, entry, refusal)
            return

        def finished() -> None:
            entry.started_at = job.started_at
            if how.kind != "hang":
                self._travel(self._answer, exchange, entry, how, generated or wanted or 1)

        job = Job(
            batch=entry.batch,
            work_s=work_s(BATCH_CONTEXT, generated) + met.cold_s,
            seconds=86_400.0 if how.kind == "hang" else seconds if seconds is None else seconds + met.cold_s,
            tokens=generated,
            on_finish=finished,
        )
        if not self._pool.submit(job):
            reason = "" if entry.direct else self._drop_reason
            refusal = plain_text(429, "inference error: ResourceExhausted - saturated", reason)
            self._travel(self._answer, exchange, entry, refusal)
            return

        self.servers.warmed(met)
        entry.cold = met.cold_s > 0
        entry.server = self.prefixes.read(exchange.body, exchange.headers.get(SESSION_TOKEN, ""))

        def gone() -> None:
            self._pool.leave(job)
            entry.started_at = None if isnan(job.started_at) else job.started_at
            self._end(entry, 0)

        exchange.on_gone = gone

    def _drawn(self, id_: str) -> int:
        # By the id and not in turn: a request costs the same whoever came before it.
        return drawn(random.Random(f"{self._seed}:{id_}"))

    def _answer(self, exchange: Exchange, entry: LogEntry, how: Answer, generated: int = 0) -> None:
        if not exchange.open or (self._fault.listener == "blackhole" and not entry.direct):
            return  # in the hole the connection stays as it is; it ends when the hole does
        headers, body, stream = content(exchange, entry.id, entry.server, how, generated)
        start = head(how.status, headers, None if stream else len(body))
        if how.kind in ("cut", "slow"):
            half = len(body) // 2
            exchange.send(start + body[:half])
            if how.kind == "cut":
                self._loop.call_later(0.01, self._cut, exchange, entry)
            else:
                self._loop.call_later(how.slow_s, self._complete, exchange, entry, body[half:], how.status)
        else:
            self._complete(exchange, entry, start + body, how.status)

    def _complete(self, exchange: Exchange, entry: LogEntry, rest: bytes, status: int) -> None:
        if exchange.open:
            self._end(entry, status)
            exchange.send(rest)
            exchange.finish()

    def _cut(self, exchange: Exchange, entry: LogEntry) -> None:
        if exchange.open:
            self._end(entry, -1)
            exchange.close()

    def _end(self, entry: LogEntry, status: int) -> None:
        entry.status = status
        entry.ended_at = time.monotonic()
        if entry.direct:
            return
        self._level(entry).add(-1, entry.ended_at)
        self._counts[{0: "gone", -1: "broken"}.get(status) or str(status)] += 1
        if status == 200 and entry.id:
            self._served[entry.id] += 1

    def _level(self, entry: LogEntry) -> Level:
        return self.levels["batch" if entry.batch else "realtime"]
