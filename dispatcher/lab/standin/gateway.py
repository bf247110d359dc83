"""Inference gateway of the live world. It forwards requests to the pool, and can be given faults."""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import isnan
from typing import Any

import msgspec

from dispatcher.lab.standin.config import Config, Fault
from dispatcher.lab.standin.generation_api import (
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


_HEALTHY = Answer()


@dataclass(slots=True, eq=False)
class _Request:
    """Request at the gateway or at a server, with the answer that it will get."""

    exchange: Exchange
    entry: LogEntry
    answer: Answer = _HEALTHY
    max_tokens: int | None = None
    tokens: int = 0
    """Number of tokens that an answer reports whose text is not generated."""
    run: GenerationRun | None = None
    """`None` if the text of the answer is not generated."""


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
        self._pooled: dict[_Request, Job] = {}
        """Requests that are in the pool."""
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
        request = self._add_request(exchange)
        entry = request.entry
        self._answer_counts["arrived"] += 1
        if entry.id:
            self._arrivals_by_id[entry.id] += 1
        self._get_level(entry).change_by(1, entry.arrived_at)
        self._process_request(request)

    def handle_direct_request(self, exchange: Exchange, number: int) -> None:
        """Handle a request that comes to a server directly, without the faults, counts and delays of the
        gateway."""
        request = self._add_request(exchange)
        request.entry.direct, request.entry.model_server = True, number
        self._answer_counts["direct"] += 1
        self._process_request(request)

    def _add_request(self, exchange: Exchange) -> _Request:
        headers = exchange.headers
        objective = headers.get(OBJECTIVE) or headers.get(OLD_OBJECTIVE)
        tenant = headers.get(FAIRNESS_ID) or headers.get(OLD_FAIRNESS_ID, "")
        self._number += 1
        id_ = headers.get(REQUEST_ID, "")
        entry = LogEntry(self._number, id_, objective != "realtime", tenant, time.monotonic())
        self.log.append(entry)
        return _Request(exchange, entry)

    def _process_request(self, request: _Request) -> None:
        exchange = request.exchange
        exchange.on_disconnect = lambda: self._abort_request(request, 0)
        try:
            self._choose_answer(request)
        except msgspec.MsgspecError as error:
            # In the format of errors of the real endpoint picker.
            request.answer = build_plain_text(400, f"inference error: BadRequest - {error}")
            self._send_answer(request)
            return
        if request.answer.kind == "reset":
            exchange.reset()
            self._end_request(request, -1)
        else:
            self._call_after_path(self._enter_picker, request)

    def _call_after_path(self, callback: Callable[..., None], request: _Request, *arguments: Any) -> None:
        if self._config.path_s > 0 and not request.entry.direct:
            self._loop.call_later(self._config.path_s, callback, request, *arguments)
        else:
            callback(request, *arguments)

    def _choose_answer(self, request: _Request) -> None:
        """Choose the answer of a request: that of the fault, if it applies, or the one that the payload asks
        for."""
        fault, entry, body = self._fault, request.entry, request.exchange.body
        # Decoded only if the answer depends on it, since benchmarks send many requests.
        if request.exchange.method == "POST" and (self._config.seconds is None or b'"sim"' in body):
            payload = msgspec.json.decode(body, type=_Payload)
            request.answer, request.max_tokens = payload.sim, payload.max_tokens
        if (
            not entry.direct
            and fault.answer is not None
            # `None` stands for any number of requests.
            and self._fault_left != 0
            and (not fault.match or fault.match in entry.tenant or fault.match.encode() in body)
            and (fault.share >= 1.0 or self._random.random() < fault.share)
        ):
            if self._fault_left is not None:
                self._fault_left -= 1
            request.answer = fault.answer

    def _enter_picker(self, request: _Request) -> None:
        """Handle a request that has arrived at the picker."""
        # The client may have disconnected on the way to the pool.
        if not request.exchange.is_open:
            return
        if request.answer.kind == "status":
            self._call_after_path(self._send_answer, request)
        elif request.exchange.method != "POST":  # a model server rejects it without running it
            self._refuse_request(request, 405, "Method Not Allowed")
        elif request.entry.direct:
            self._submit_to_pool(request)
        else:
            number = self.servers.pick_server(self._get_named_servers(request))
            if number is None or not self.servers.present:
                body = "inference error: ServiceUnavailable - no endpoint available"
                self._refuse_request(request, 503, body, "rejected-no-endpoints")
            else:
                request.entry.model_server = number
                self._submit_to_pool(request)

    def _get_named_servers(self, request: _Request) -> set[int] | None:
        """Return the servers that the request lists, or `None` if it may go to any."""
        named = request.exchange.headers.get(self._config.subset_header.lower())
        if named is None:
            return None
        labels = self._get_server_labels()
        return {labels[label] for each in named.split(",") if (label := each.strip()) in labels}

    def _submit_to_pool(self, request: _Request) -> None:
        entry, answer, body = request.entry, request.answer, request.exchange.body
        visit = self.servers.visit_server(entry.model_server, body)
        entry.model = visit.model
        if visit.is_unknown:
            self._refuse_request(request, 404, build_not_found(visit.model))
            return
        server = self.prefixes.pick_server(request.exchange.headers.get(AFFINITY_TOKEN, ""))
        try:
            request.run = run = self._start_generation(request, server, visit.cold_s)
        except InvalidRequestError as error:
            self._refuse_request(request, 400, error.build_body())
            return
        seconds = self._config.seconds if answer.seconds is None else answer.seconds
        if run is not None:
            tokens, work_s = run.answer.token_count, run.answer.work_s
        else:
            tokens = request.max_tokens or self._draw_tokens(entry.id) if seconds is None else 0
            work_s = compute_work_s(BATCH_CONTEXT, tokens) + visit.cold_s
        request.tokens = tokens or request.max_tokens or 1
        if seconds is not None:
            seconds += visit.cold_s
        if answer.kind == "hang":
            seconds = 86_400.0  # it keeps its slot until the client disconnects
        job = Job(
            is_batch=entry.batch,
            work_s=work_s,
            seconds=seconds,
            tokens=tokens,
            on_finish=partial(self._finish_request, request),
            on_start=None if run is None else run.start,
        )
        if not self._pool.submit_job(job):
            # Without flow control the model server refuses, and only the gateway sets this header.
            reason = "rejected-saturated" if self._config.flow_control and not entry.direct else ""
            self._refuse_request(request, 429, "inference error: ResourceExhausted - saturated", reason)
            return
        self._pooled[request] = job
        # Only now: a request that was refused has not warmed the model.
        self.servers.mark_warm(visit)
        entry.cold = visit.cold_s > 0
        entry.server = server
        self.prefixes.record_prompt(server, body)

    def _refuse_request(self, request: _Request, status: int, body: str, reason: str = "") -> None:
        request.answer, request.run = build_plain_text(status, body, reason), None
        self._call_after_path(self._send_answer, request)

    def _finish_request(self, request: _Request) -> None:
        """Answer a request that has run to its end."""
        request.entry.started_at = self._pooled.pop(request).started_at
        if request.answer.kind == "hang":
            return
        run = request.run
        if run is not None:
            request.entry.generated_tokens = run.answer.token_count
            run.finish()
        if run is not None and run.stream is not None:
            stream = run.stream
            self._call_after_path(self._deliver, request, stream.take_first_half(), stream.take_rest())
        else:
            self._call_after_path(self._send_answer, request)

    def _abort_request(self, request: _Request, status: int) -> None:
        """End a request that may be in the pool, whose client or gateway broke the connection."""
        self._remove_from_pool(request)
        self._end_request(request, status)

    def _remove_from_pool(self, request: _Request) -> None:
        """Remove a request from the pool. No effect if it is not there."""
        job = self._pooled.pop(request, None)
        if job is not None:
            self._pool.remove_job(job)
            request.entry.started_at = None if isnan(job.started_at) else job.started_at
            if request.run is not None:
                request.entry.generated_tokens = request.run.stop()

    def evict_request(self, id_: str) -> None:
        """Let the picker stop the requests with this id for more important ones. No effect on requests
        that are not in the pool."""
        for request in [each for each in self._pooled if each.entry.id == id_]:
            run = request.run
            if run is not None and run.stream is not None and run.stream.has_begun:
                self._cut_connection(request)
            else:
                self._remove_from_pool(request)
                body = "inference error: ResourceExhausted - evicted"
                self._refuse_request(request, 429, body, "evicted-priority")

    def kill_server(self, token: str) -> None:
        """End the model server with this session token: its caches are lost, and so are the answers that it
        generates."""
        self.prefixes.remove_server(token)
        self._token_caches.pop(token, None)
        for request in [*self._pooled]:
            if request.run is not None and request.entry.server == token:
                request.run.cache = None
                self._cut_connection(request)

    def forget_missing_servers(self) -> None:
        """Empty the caches of the model servers that are gone."""
        kept = {f"{_NUMBERED}{number}" for number in self.servers.present}
        for place in [*self._token_caches]:
            if place.startswith(_NUMBERED) and place not in kept:
                del self._token_caches[place]

    def _start_generation(self, request: _Request, server: str, cold_s: float) -> GenerationRun | None:
        """Return the run of a request whose text is generated, or `None` if its answer has other content.

        Raises InvalidRequestError.
        """
        exchange, entry, answer = request.exchange, request.entry, request.answer
        config = self._config.generation if answer.generation is None else answer.generation
        path = exchange.target.partition("?")[0]
        if config is None or answer.has_own_content or not path.endswith("/completions"):
            return None
        parsed = parse_request(exchange.body, is_chat=path.endswith("/chat/completions"), config=config)
        # A request that names its server is not at the server of its session.
        is_named = entry.direct or self._config.subset_header.lower() in exchange.headers
        place = f"{_NUMBERED}{entry.model_server}" if is_named else server
        cache = self._token_caches[place] if config.prefix_cache else None
        cached = 0 if cache is None else cache.count_cached(parsed.model, parsed.prompt)
        run = GenerationRun(parsed.generate_answer(cached, cold_s), cache)
        entry.model = parsed.model
        entry.prompt_tokens, entry.cached_tokens = len(parsed.prompt), cached
        # A request that hangs sends nothing at all.
        if parsed.is_stream and answer.kind != "hang":
            headers = [*build_headers(server, answer), ("content-type", "text/event-stream; charset=utf-8")]
            run.stream = EventStream(
                run.answer,
                [*run.answer.build_events(entry.id, int(time.time()))],
                build_head(answer.status, headers, None),
                send=lambda data: self._call_after_path(self._send_part, request, data),
                pauses=answer.kind in ("cut", "slow"),
                on_pause=lambda: self._call_after_path(self._cut_if_asked, request),
            )
        return run

    def _draw_tokens(self, id_: str) -> int:
        # Seeded by the id: the cost of a request does not depend on the requests before it.
        return drawn(random.Random(f"{self._config.seed}:{id_}"))

    # What is sent.

    def _is_swallowed(self, request: _Request) -> bool:
        """Return whether nothing is sent: in a black hole the connection ends with the fault."""
        return self._fault.listener == "blackhole" and not request.entry.direct

    def _send_part(self, request: _Request, data: bytes) -> None:
        """Send a part of a stream."""
        if not self._is_swallowed(request):
            request.exchange.send(data)

    def _send_answer(self, request: _Request) -> None:
        exchange, entry, answer = request.exchange, request.entry, request.answer
        completion = b"" if request.run is None else request.run.answer.build_body(entry.id, int(time.time()))
        headers, body, is_chunked = build_content(
            exchange, entry.id, entry.server, answer, request.tokens, completion
        )
        half = len(body) // 2
        start = build_head(answer.status, headers, None if is_chunked else len(body))
        self._deliver(request, start + body[:half], body[half:])

    def _deliver(self, request: _Request, first: bytes, rest: bytes) -> None:
        """Send the first part of an answer, and then the rest, as the kind of the answer says."""
        exchange, answer = request.exchange, request.answer
        if not exchange.is_open or self._is_swallowed(request):
            return
        if answer.kind == "cut":
            exchange.send(first)
            self._cut_soon(request)
        elif answer.kind == "slow":
            exchange.send(first)
            self._loop.call_later(answer.slow_s, self._complete_answer, request, rest)
        else:
            self._complete_answer(request, first + rest)

    def _complete_answer(self, request: _Request, rest: bytes) -> None:
        if request.exchange.is_open:
            self._end_request(request, request.answer.status)
            request.exchange.send(rest)
            request.exchange.finish()

    def _cut_soon(self, request: _Request) -> None:
        """Close the connection after what was sent has reached the client."""
        self._loop.call_later(_CUT_DELAY_S, self._cut_connection, request)

    def _cut_if_asked(self, request: _Request) -> None:
        if request.answer.kind == "cut":
            self._cut_soon(request)

    def _cut_connection(self, request: _Request) -> None:
        if request.exchange.is_open:
            self._abort_request(request, -1)
            request.exchange.close()

    def _end_request(self, request: _Request, status: int) -> None:
        entry = request.entry
        # It refers to the request, which refers to the exchange.
        request.exchange.on_disconnect = None
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
