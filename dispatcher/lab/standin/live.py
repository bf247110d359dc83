"""A gateway, an endpoint picker and a pool in one process, over HTTP on loopback.

For the demo, the scenario tests and the benchmarks: what the dispatcher sees of a cluster, with realtime
traffic, faults that can be switched while it runs, and a report of what really happened.

    python -m dispatcher.lab.standin --slots 32 --seconds 0.5 --queue-limit 8

prints one line of JSON with the three URLs once it listens, and runs until SIGTERM or SIGINT. Each option is
a field of `Config`. `POST <control>/control` takes a `Control`, `GET <control>/observed` returns what
happened, `GET <control>/log?after=N` each request. With `--generation '{}'` the text of a completion depends
on all text before it; `"sim": {"generation": {…}}` in a payload does the same for one request. The three
listeners fail independently. Beside the picker's `/metrics`, each model server has its own page:
`/servers/0/metrics`, and so on to the last of `--endpoints`; its list of models, `/servers/0/v1/models`; and
it takes requests directly, at `/servers/0/v1/completions`, `…/v1/chat/completions`, `…/v1/embeddings`. The
gateway has the lists of all at `/v1/models`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from dispatcher.lab.standin.config import CHANGED_IN_CONFIG, Config, Control
from dispatcher.lab.standin.gateway import Gateway
from dispatcher.lab.standin.http import Exchange, Server
from dispatcher.lab.standin.made_up_traffic import TRACE_MAKERS, parse_steps
from dispatcher.lab.standin.picker import Picker
from dispatcher.lab.standin.pool import Pool
from dispatcher.lab.standin.program import parse_options, serve
from dispatcher.lab.standin.server_ports import ServerPorts
from dispatcher.lab.standin.serving import ModelServers
from dispatcher.lab.standin.trace import Trace, TraceError, load_trace
from dispatcher.lab.standin.traffic import RealtimeTraffic


class LiveWorld:
    """World that listens at `gateway_url`, `metrics_url` and `control_url` inside of `async with`.

    The constructor raises TraceError for invalid traffic.
    """

    gateway_url: str
    metrics_url: str
    control_url: str

    def __init__(self, config: Config) -> None:
        # A copy, since `apply_control` changes it.
        self._config = config = msgspec.structs.replace(config)
        self.picker = Picker(config)
        self.pool = Pool(config, self.picker.record_pool_state, self.picker.record_latency)
        self.servers = ModelServers(config, self._handle_server_change)
        self.gateway = Gateway(config, self.pool, self.servers, lambda: self.ports.addresses)
        self.realtime = RealtimeTraffic(config, self.pool)
        self._steps = parse_steps(config.steps)
        self._trace = _load_traffic(config) if config.trace else None
        self.ports = ServerPorts(config, self.picker, self.pool, self.servers, self.gateway)
        self._control_server = Server(self._handle_command, config.host, config.control_port)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> LiveWorld:
        config = self._config
        for server in (self.gateway.server, self.ports, self._control_server):
            await server.open()
        scheme = "https" if config.tls_cert else "http"
        self.gateway_url = f"{scheme}://{config.host}:{self.gateway.server.port}"
        self.metrics_url = f"http://{config.host}:{self.ports.server.port}/metrics"
        self.control_url = f"http://{config.host}:{self._control_server.port}"
        self._resize_pool()
        self._start_task(self.picker.flush_averages())
        self._start_task(self.picker.refresh_metrics_periodically(self._handle_metrics_refresh))
        self._start_task(self.realtime.hold_levels(self._steps))
        if self._trace is not None:
            self._start_task(self.realtime.replay_trace(self._trace, config.trace_from_s, config.trace_speed))
        return self

    async def __aexit__(self, *exc: object) -> None:
        # No new realtime requests while the world closes.
        self.realtime.hold_level(0)
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in (self.gateway.server, self.ports, self._control_server):
            await server.close()
        for result in ended:
            if isinstance(result, Exception):
                raise result  # a world whose traffic failed is not the one that the test asked for

    async def apply_control(self, control: Control) -> None:
        """Apply the changes. They are in effect when this returns."""
        unset = msgspec.UNSET
        self._apply_pool_changes(control)
        # After these, since the listeners follow the servers that are present.
        await self.ports.update_listeners()
        if control.realtime is not unset:
            self.realtime.hold_level(control.realtime)
        if control.flush:
            self.picker.flush_now()
        if control.metrics is not unset:
            await self.ports.set_page_fault(control.metrics)
        if control.gateway is not unset:
            await self.gateway.set_fault(control.gateway)
        if control.kill_server:
            self.gateway.kill_server(control.kill_server)
        if control.evict:
            self.gateway.evict_request(control.evict)
        if control.restart:
            self.pool.restart_measurement()
            self.gateway.restart_measurement()

    def _apply_pool_changes(self, control: Control) -> None:
        unset = msgspec.UNSET
        for name in CHANGED_IN_CONFIG:
            if (value := getattr(control, name)) is not unset:
                setattr(self._config, name, value)
        if control.declared is not unset:
            self.picker.declared = control.declared
        if control.endpoints is not unset:
            self.servers.set_server_count(control.endpoints)
        if control.lists is not unset:
            self.ports.listing_fault = control.lists
        if control.models is not unset:
            self.servers.serve_models(control.models)
        if control.adapter is not unset:
            self._start_task(self.servers.load_adapter(control.adapter))
        if control.roll is not unset:
            self._start_task(self.servers.replace_servers(control.roll))
        self._resize_pool()

    def build_report(self) -> dict[str, Any]:
        """Return a report of what really happened."""
        return {
            "at": time.monotonic(),
            "gateway": self.gateway.build_report(),
            "pool": self.pool.build_report(),
            "models": self.servers.build_report(),
            **self.ports.build_report(),
        }

    def _handle_server_change(self) -> None:
        """Adapt the world to servers that have gone or come back."""
        self.gateway.forget_missing_servers()
        self._resize_pool()
        self._start_task(self.ports.update_listeners())

    def _resize_pool(self) -> None:
        self.picker.endpoints = len(self.servers.present)
        # A server that is gone takes its share of the slots with it.
        slots = round(self._config.slots * self.servers.present_share)
        if self._config.flow_control and self._config.detector == "concurrency":
            slots = min(slots, self.picker.declared)  # the picker sends no more than it assumes
        # Before `resize`, which starts as many waiting requests as this allows.
        self.pool.admission_limit = self.picker.admission_limit
        self.pool.resize(slots, self.picker.endpoints)

    def _handle_metrics_refresh(self) -> None:
        """Let requests into the pool after the picker has read the metrics of its model servers."""
        if self.pool.admission_limit != self.picker.admission_limit:
            self._resize_pool()

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.create_task(coroutine))

    def _handle_command(self, exchange: Exchange) -> None:
        """Handle a request to the control address, which works whatever fault the other listeners have."""
        url = urlsplit(exchange.target)
        if exchange.method == "POST" and url.path == "/control":
            try:
                control = msgspec.json.decode(exchange.body, type=Control)
            except msgspec.MsgspecError as error:
                exchange.answer(400, f"{error}\n".encode())
                return
            task = asyncio.create_task(self._apply_and_answer(control, exchange))
            self._tasks.add(task)
            # The task set holds a reference, without which the task could be garbage-collected.
            task.add_done_callback(self._tasks.discard)
        elif url.path == "/observed":
            _send_json(exchange, self.build_report())
        elif url.path == "/log":
            after = int(parse_qs(url.query).get("after", ["0"])[0])
            _send_json(exchange, [entry for entry in self.gateway.log if entry.number > after])
        else:
            exchange.answer(404, b"POST /control, GET /observed, GET /log?after=N\n")

    async def _apply_and_answer(self, control: Control, exchange: Exchange) -> None:
        try:
            await self.apply_control(control)
        except OSError as error:
            exchange.answer(500, f"{error}\n".encode())
        else:
            _send_json(exchange, self.build_report())


def _send_json(exchange: Exchange, value: object) -> None:
    exchange.answer(200, msgspec.json.encode(value), [("content-type", "application/json")])


def _load_traffic(config: Config) -> Trace:
    """Return the realtime traffic to replay. Raises TraceError."""
    make_trace = TRACE_MAKERS.get(config.trace)
    if make_trace is not None:
        return make_trace(config.seed)
    return load_trace(Path(config.trace), slots=config.slots, seed=config.seed)


def _parse_options(arguments: Sequence[str] | None) -> Config:
    return parse_options(Config, arguments, "dispatcher.lab.standin", __doc__, json_field="generation")


async def _serve(config: Config) -> None:
    await serve(
        LiveWorld(config),
        lambda world: {
            "gateway": world.gateway_url,
            "metrics": world.metrics_url,
            "control": world.control_url,
            "servers": world.ports.urls,
        },
    )


def main(arguments: Sequence[str] | None = None) -> None:
    import uvloop  # a third of the cost per request on asyncio's own loop

    try:
        uvloop.run(_serve(_parse_options(arguments)))
    except (TraceError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
