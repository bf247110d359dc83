"""Inference gateway of the live world. It forwards requests to the pool, and can be given faults."""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isnan
from typing import Any

import msgspec

from dispatcher.lab.standin.config import Config, Fault
from dispatcher.lab.standin.generation_api import (
    GeneratedAnswer,
    InvalidRequestError,
    parse_request,
)
from dispatcher.lab.standin.generation_run import EventStream, GenerationRun
from dispatcher.lab.standin.http import Exchange, Server, build_head
from dispatcher.lab.standin.model import BATCH_CONTEXT, compute_work_s
from dispatcher.lab.standin.model import draw_tokens as drawn
from dispatcher.lab.standin.pool import Job, Level, Pool
from dispatcher.lab.standin.prefixes import PrefixServers, TokenCache
from dispatcher.lab.standin.replies import Answer, build_content, build_headers, build_plain_text
from dispatcher.lab.standin.serving import ModelServers, build_not_found
from dispatcher.requests.headers import (
    AFFINITY_TOKEN,
    FAIRNESS_ID,
    OBJECTIVE,
    OLD_FAIRNESS_ID,
    OLD_OBJECTIVE,
    REQUEST_ID,
)


class LogEntry(msgspec.Struct):
    """Log entry of one request. Times are those of CLOCK_MONOTONIC, which all processes of a machine
    share."""

    number: int
    id: str
    batch: bool
    tenant: str
    """Value of the fairness header."""
    arrived_at: float
    started_at: float | None = None
    """Time at which the request got a slot."""
    ended_at: float | None = None
    """Time at which the answer was sent or the client disconnected."""
    server: str = ""
    """Model server that the request went to, by its session token."""
    model_server: int = -1
    """Number of the model server that the request went to. -1 if all are equal, or if it went to none."""
    model: str = ""
    """Model that the request asked for."""
    cold: bool = False
    """True if this was the first request for the model on that server, which takes longer."""
    direct: bool = False
    """True if the request came to the server directly, not through the gateway."""
    prompt_tokens: int = 0
    """Number of tokens of the prompt, if the text of the answer is generated."""
    cached_tokens: int = 0
    """Number of tokens of the prompt that the server had in its prefix cache."""
    generated_tokens: int = 0
    """Number of tokens that were generated until the request ended."""
    status: int | None = None
    """HTTP status. `None`: not ended. 0: the client disconnected. -1: the gateway broke the connection."""


class _Payload(msgspec.Struct):
    sim: Answer = msgspec.field(default_factory=Answer)
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class _Pooled:
    """Request that is in the pool."""

    exchange: Exchange
    entry: LogEntry
    job: Job
    run: GenerationRun | None


_HEALTHY = Answer()
_CUT_DELAY_S = 0.01
_NUMBERED = "servers/"
"""Begin of the name of a model server that is known by its number."""


class Gateway:
    """Server at the address of the gateway.

    A request is a batch request unless its objective header is `realtime`. `get_server_labels` returns the
    names of the servers in the subset header, with the number of each server.
    """

    def __init__(
        self,
        config: Config,
        pool: Pool,
        servers: ModelServers,
        get_server_labels: Callable[[], Mapping[str, int]],
    ) -> None:
        self.prefixes = PrefixServers(config.prefix_servers, config.prefix_blocks, config.seed)
        self.servers = servers
        self.log: deque[LogEntry] = deque(maxlen=config.log_max)
        """Newest requests in the order of their arrival."""
        self.levels = {"batch": Level(), "realtime": Level()}
        """Number of requests at the gateway, from the last byte of the request to the answer, including both
        ways."""
        self.server = Server(self._handle_request, config.host, config.port, _load_tls(config))
        self._config = config
        self._pool = pool
        self._get_server_labels = get_server_labels
        self._random = random.Random(config.seed)
        self._loop = asyncio.get_running_loop()
        self._fault = Fault()
        self._fault_left: int | None = None
        self._number = 0
        self._answer_counts: Counter[str] = Counter()
        self._arrivals_by_id: Counter[str] = Counter()
        self._served_by_id: Counter[str] = Counter()
        self._pooled: dict[int, _Pooled] = {}
        """Requests that are in the pool, by the number of their log entry."""
        self._token_caches: defaultdict[str, TokenCache] = defaultdict(TokenCache)
        """Cache of each server by its session token, or by its number for requests that name their server."""

    async def set_fault(self, fault: Fault | None) -> None:
        """Replace the current fault; `None` to remove it."""
        previous, self._fault = self._fault, fault or Fault()
        self._fault_left = self._fault.times
        if self._fault.listener == "refuse":
            await self.server.close()
        elif self._fault.listener == "blackhole":
            await self.server.start_blackhole()
        # The listener is opened again after any fault of the listener, with TLS or without.
        elif self._fault.listener == "plaintext" or previous.listener:
            await self.server.open(plain=self._fault.listener == "plaintext")

    def restart_measurement(self) -> None:
        """Start a new measurement. The log and the counts by request id stay."""
        for level in self.levels.values():
            level.restart_measurement()
        self._answer_counts.clear()
        self.prefixes.restart_measurement()

    def build_report(self) -> dict[str, Any]:
        arrived_again = {id_: times for id_, times in self._arrivals_by_id.items() if times > 1}
        served_again = {id_: times for id_, times in self._served_by_id.items() if times > 1}
        return {
            **{kind: level.build_report() for kind, level in self.levels.items()},
            "arrived": self._answer_counts["arrived"],
            "direct": self._answer_counts["direct"],
            "answers": {key: count for key, count in sorted(self._answer_counts.items()) if key.isdigit()},
            "gone": self._answer_counts["gone"],
            "broken": self._answer_counts["broken"],
            "prefixes": self.prefixes.build_report(),
            "connections": len(self.server.connections),
            "ids": {
                "distinct": len(self._arrivals_by_id),
                "served": len(self._served_by_id),
                "arrived_again": len(arrived_again),
                "served_again": len(served_again),
                "examples": dict(list((served_again or arrived_again).items())[:20]),
            },
        }

    def _handle_request(self, exchange: Exchange) -> None:
        # Not a request to the pool: neither logged nor counted.
        if (
            exchange.method == "GET"
            and exchange.target.partition("?")[0] == "/v1/models"
            and self.servers.present
        ):
            exchange.answer(200, self.servers.get_gateway_listing(), [("content-type", "application/json")])
            return
        entry = self._add_log_entry(exchange)
        self._answer_counts["arrived"] += 1
        if entry.id:
            self._arrivals_by_id[entry.id] += 1
        self._get_level(entry).change_by(1, entry.arrived_at)
        self._process_request(exchange, entry)

    def handle_direct_request(self, exchange: Exchange, number: int) -> None:
        """Handle a request that comes to a server directly, without the faults, counts and delays of the
        gateway."""
        entry = self._add_log_entry(exchange)
        entry.direct, entry.model_server = True, number
        self._answer_counts["direct"] += 1
        self._process_request(exchange, entry)

    def _add_log_entry(self, exchange: Exchange) -> LogEntry:
        headers = exchange.headers
        objective = headers.get(OBJECTIVE) or headers.get(OLD_OBJECTIVE)
        tenant = headers.get(FAIRNESS_ID) or headers.get(OLD_FAIRNESS_ID, "")
        self._number += 1
        id_ = headers.get(REQUEST_ID, "")
        entry = LogEntry(self._number, id_, objective != "realtime", tenant, time.monotonic())
        self.log.append(entry)
        return entry

    def _process_request(self, exchange: Exchange, entry: LogEntry) -> None:
        # `_submit_to_pool` replaces this as soon as the request is in the pool.
        exchange.on_disconnect = lambda: self._end_request(entry, 0)
        try:
            payload, answer = self._choose_answer(exchange, entry)
        except msgspec.MsgspecError as error:
            # In the format of errors of the real endpoint picker.
            self._send_answer(
                exchange, entry, build_plain_text(400, f"inference error: BadRequest - {error}")
            )
            return
        if answer.kind == "reset":
            exchange.reset()
            self._end_request(entry, -1)
        else:
            self._call_after_path(self._enter_picker, exchange, entry, payload, answer)

    def _call_after_path(
        self, callback: Callable[..., None], exchange: Exchange, entry: LogEntry, *arguments: Any
    ) -> None:
        path_s = self._get_path_s(entry)
        if path_s > 0:
            self._loop.call_later(path_s, callback, exchange, entry, *arguments)
        else:
            callback(exchange, entry, *arguments)

    def _get_path_s(self, entry: LogEntry) -> float:
        return 0.0 if entry.direct else self._config.path_s

    def _choose_answer(self, exchange: Exchange, entry: LogEntry) -> tuple[_Payload | None, Answer]:
        """Return the answer for this request: that of the fault, if it applies, or the one that the payload
        asks for."""
        fault, tenant, payload = self._fault, entry.tenant, None
        # Decoded only if the answer depends on it, since benchmarks send many requests.
        if exchange.method == "POST" and (self._config.seconds is None or b'"sim"' in exchange.body):
            payload = msgspec.json.decode(exchange.body, type=_Payload)
        if (
            not entry.direct
            and fault.answer is not None
            # `None` stands for any number of requests.
            and self._fault_left != 0
            and (not fault.match or fault.match in tenant or fault.match.encode() in exchange.body)
            and (fault.share >= 1.0 or self._random.random() < fault.share)
        ):
            if self._fault_left is not None:
                self._fault_left -= 1
            return payload, fault.answer
        return payload, payload.sim if payload is not None else _HEALTHY

    def _enter_picker(
        self, exchange: Exchange, entry: LogEntry, payload: _Payload | None, answer: Answer
    ) -> None:
        """Handle a request that has arrived at the picker."""
        # The client may have disconnected on the way to the pool.
        if not exchange.is_open:
            return
        if answer.kind == "status":
            self._call_after_path(self._send_answer, exchange, entry, answer)
        elif exchange.method != "POST":  # a model server rejects it without running it
            self._call_after_path(
                self._send_answer, exchange, entry, build_plain_text(405, "Method Not Allowed")
            )
        elif entry.direct:
            self._submit_to_pool(exchange, entry, payload, answer)
        elif (
            not self.servers.present
            or (number := self.servers.pick_server(self._get_named_servers(exchange))) is None
        ):
            reason = "rejected-no-endpoints"
            refusal = build_plain_text(
                503, "inference error: ServiceUnavailable - no endpoint available", reason
            )
            self._call_after_path(self._send_answer, exchange, entry, refusal)
        else:
            entry.model_server = number
            self._submit_to_pool(exchange, entry, payload, answer)

    def _get_named_servers(self, exchange: Exchange) -> set[int] | None:
        """Return the servers that the request lists, or `None` if it may go to any."""
        named = exchange.headers.get(self._config.subset_header.lower())
        if named is None:
            return None
        labels = self._get_server_labels()
        return {labels[label] for each in named.split(",") if (label := each.strip()) in labels}

    def _submit_to_pool(
        self, exchange: Exchange, entry: LogEntry, payload: _Payload | None, answer: Answer
    ) -> None:
        visit = self.servers.visit_server(entry.model_server, exchange.body)
        entry.model = visit.model
        if visit.is_unknown:
            refusal = Answer(kind="status", status=404, body=build_not_found(visit.model))
            self._call_after_path(self._send_answer, exchange, entry, refusal)
            return

        server = self.prefixes.pick_server(exchange.headers.get(AFFINITY_TOKEN, ""))
        try:
            run = self._start_generation(exchange, entry, answer, server, visit.cold_s)
        except InvalidRequestError as error:
            refusal = Answer(kind="status", status=400, body=error.build_body())
            self._call_after_path(self._send_answer, exchange, entry, refusal)
            return

        max_tokens = payload.max_tokens if payload is not None else None
        seconds = self._config.seconds if answer.seconds is None else answer.seconds
        if run is not None:
            generated = run.answer.token_count
        elif seconds is None:
            generated = max_tokens or self._draw_tokens(entry.id)
        else:
            generated = 0

        def handle_finish() -> None:
            self._pooled.pop(entry.number, None)
            entry.started_at = job.started_at
            if answer.kind == "hang":
                return
            if run is not None:
                self._finish_generation(run, exchange, entry, answer)
            else:
                self._call_after_path(
                    self._send_answer, exchange, entry, answer, generated or max_tokens or 1
                )

        job = Job(
            is_batch=entry.batch,
            work_s=compute_work_s(BATCH_CONTEXT, generated) + visit.cold_s
            if run is None
            else run.answer.work_s,
            # A request that hangs keeps its slot until the client disconnects.
            seconds=86_400.0
            if answer.kind == "hang"
            else seconds
            if seconds is None
            else seconds + visit.cold_s,
            tokens=generated,
            on_finish=handle_finish,
            on_start=None if run is None else run.start,
        )
        if not self._pool.submit_job(job):
            # Without flow control the model server refuses, and only the gateway sets this header.
            reason = "rejected-saturated" if self._config.flow_control and not entry.direct else ""
            refusal = build_plain_text(429, "inference error: ResourceExhausted - saturated", reason)
            self._call_after_path(self._send_answer, exchange, entry, refusal)
            return

        # Only now: a request that was refused has not warmed the model.
        self.servers.mark_warm(visit)
        entry.cold = visit.cold_s > 0
        entry.server = server
        self.prefixes.record_prompt(server, exchange.body)
        self._pooled[entry.number] = _Pooled(exchange, entry, job, run)
        exchange.on_disconnect = lambda: self._abort_request(entry, 0)

    def _abort_request(self, entry: LogEntry, status: int) -> None:
        """End a request that may be in the pool, whose client or gateway broke the connection."""
        self._remove_from_pool(entry)
        self._end_request(entry, status)

    def _remove_from_pool(self, entry: LogEntry) -> None:
        """Remove a request from the pool. No effect if it is not there."""
        pooled = self._pooled.pop(entry.number, None)
        if pooled is not None:
            job, run = pooled.job, pooled.run
            self._pool.remove_job(job)
            entry.started_at = None if isnan(job.started_at) else job.started_at
            if run is not None:
                entry.generated_tokens = run.stop()

    def evict_request(self, id_: str) -> None:
        """Let the picker stop the requests with this id for more important ones. No effect on requests
        that are not in the pool."""
        for pooled in [each for each in self._pooled.values() if each.entry.id == id_]:
            exchange, entry, run = pooled.exchange, pooled.entry, pooled.run
            if run is not None and run.stream is not None and run.stream.has_begun:
                self._cut_connection(exchange, entry)
                continue
            self._remove_from_pool(entry)
            refusal = build_plain_text(
                429, "inference error: ResourceExhausted - evicted", "evicted-priority"
            )
            self._call_after_path(self._send_answer, exchange, entry, refusal)

    def kill_server(self, token: str) -> None:
        """End the model server with this session token: its caches are lost, and so are the answers that it
        generates."""
        self.prefixes.remove_server(token)
        self._token_caches.pop(token, None)
        for pooled in [*self._pooled.values()]:
            if pooled.run is not None and pooled.entry.server == token:
                pooled.run.cache = None
                self._cut_connection(pooled.exchange, pooled.entry)

    def forget_missing_servers(self) -> None:
        """Empty the caches of the model servers that are gone."""
        kept = {f"{_NUMBERED}{number}" for number in self.servers.present}
        for place in [*self._token_caches]:
            if place.startswith(_NUMBERED) and place not in kept:
                del self._token_caches[place]

    # Generated text.

    def _start_generation(
        self, exchange: Exchange, entry: LogEntry, answer: Answer, server: str, cold_s: float
    ) -> GenerationRun | None:
        """Return the run of a request whose text is generated, or `None` if its answer has other content.

        Raises InvalidRequestError.
        """
        config = self._config.generation if answer.generation is None else answer.generation
        path = exchange.target.partition("?")[0]
        if config is None or answer.has_own_content or not path.endswith("/completions"):
            return None
        request = parse_request(exchange.body, is_chat=path.endswith("/chat/completions"), config=config)
        # A request that names its server is not at the server of its session.
        is_named = entry.direct or self._config.subset_header.lower() in exchange.headers
        place = f"{_NUMBERED}{entry.model_server}" if is_named else server
        cache = self._token_caches[place] if config.prefix_cache else None
        cached = 0 if cache is None else cache.count_cached(request.model, request.prompt)
        run = GenerationRun(request.generate_answer(cached, cold_s), cache)
        entry.model = request.model
        entry.prompt_tokens, entry.cached_tokens = len(request.prompt), cached
        # A request that hangs sends nothing at all.
        if request.is_stream and answer.kind != "hang":
            run.stream = self._build_stream(run.answer, exchange, entry, answer, server)
        return run

    def _build_stream(
        self, generated: GeneratedAnswer, exchange: Exchange, entry: LogEntry, answer: Answer, server: str
    ) -> EventStream:
        headers = [*build_headers(server, answer), ("content-type", "text/event-stream; charset=utf-8")]

        def handle_pause() -> None:
            if answer.kind == "cut":
                self._cut_connection_later(exchange, entry)

        return EventStream(
            generated,
            [*generated.build_events(entry.id, int(time.time()))],
            build_head(answer.status, headers, None),
            send=lambda data: self._call_after_path(self._send_part, exchange, entry, data),
            pauses=answer.kind in ("cut", "slow"),
            on_pause=handle_pause,
        )

    def _finish_generation(
        self, run: GenerationRun, exchange: Exchange, entry: LogEntry, answer: Answer
    ) -> None:
        """Send a generated answer, or what remains of it."""
        count, stream = run.answer.token_count, run.stream
        entry.generated_tokens = count
        run.finish()
        if stream is None:
            body = run.answer.build_body(entry.id, int(time.time()))
            self._call_after_path(self._send_answer, exchange, entry, answer, count, body)
        elif answer.kind in ("cut", "slow"):
            self._call_after_path(self._send_part, exchange, entry, stream.take_first_half())
            if answer.kind == "cut":
                self._cut_connection_later(exchange, entry)
            else:
                self._loop.call_later(
                    self._get_path_s(entry) + answer.slow_s,
                    self._complete_answer,
                    exchange,
                    entry,
                    stream.take_rest(),
                    answer.status,
                )
        else:
            rest = stream.take_rest()
            self._call_after_path(self._complete_stream, exchange, entry, rest, answer.status)

    def _send_part(self, exchange: Exchange, entry: LogEntry, data: bytes) -> None:
        """Send a part of a stream. In a black hole nothing is sent."""
        if self._fault.listener != "blackhole" or entry.direct:
            exchange.send(data)

    def _complete_stream(self, exchange: Exchange, entry: LogEntry, rest: bytes, status: int) -> None:
        if self._fault.listener != "blackhole" or entry.direct:
            self._complete_answer(exchange, entry, rest, status)

    def _draw_tokens(self, id_: str) -> int:
        # Seeded by the id: the cost of a request does not depend on the requests before it.
        return drawn(random.Random(f"{self._config.seed}:{id_}"))

    def _send_answer(
        self, exchange: Exchange, entry: LogEntry, answer: Answer, generated: int = 0, completion: bytes = b""
    ) -> None:
        if not exchange.is_open or (self._fault.listener == "blackhole" and not entry.direct):
            return  # in a black hole nothing is sent; the connection ends with the fault
        headers, body, stream = build_content(exchange, entry.id, entry.server, answer, generated, completion)
        start = build_head(answer.status, headers, None if stream else len(body))
        if answer.kind in ("cut", "slow"):
            half = len(body) // 2
            exchange.send(start + body[:half])
            if answer.kind == "cut":
                # The delay lets the first half reach the client before the connection closes.
                self._loop.call_later(_CUT_DELAY_S, self._cut_connection, exchange, entry)
            else:
                self._loop.call_later(
                    answer.slow_s, self._complete_answer, exchange, entry, body[half:], answer.status
                )
        else:
            self._complete_answer(exchange, entry, start + body, answer.status)

    def _complete_answer(self, exchange: Exchange, entry: LogEntry, rest: bytes, status: int) -> None:
        if exchange.is_open:
            self._end_request(entry, status)
            exchange.send(rest)
            exchange.finish()

    def _cut_connection_later(self, exchange: Exchange, entry: LogEntry) -> None:
        """Close the connection after what was sent has reached the client."""
        self._loop.call_later(self._get_path_s(entry) + _CUT_DELAY_S, self._cut_connection, exchange, entry)

    def _cut_connection(self, exchange: Exchange, entry: LogEntry) -> None:
        if exchange.is_open:
            self._abort_request(entry, -1)
            exchange.close()

    def _end_request(self, entry: LogEntry, status: int) -> None:
        entry.status = status
        entry.ended_at = time.monotonic()
        if entry.direct:
            return
        self._get_level(entry).change_by(-1, entry.ended_at)
        self._answer_counts[{0: "gone", -1: "broken"}.get(status) or str(status)] += 1
        if status == 200 and entry.id:
            self._served_by_id[entry.id] += 1

    def _get_level(self, entry: LogEntry) -> Level:
        return self.levels["batch" if entry.batch else "realtime"]


def _load_tls(config: Config) -> ssl.SSLContext | None:
    if not config.tls_cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(config.tls_cert, config.tls_key or None)
    return context
