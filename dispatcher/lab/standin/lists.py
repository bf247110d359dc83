"""Model server for list calls with configurable times, limits and faults.

    python -m dispatcher.lab.standin.lists --call-s 0.02 --item-s 0.002 --max-items 32

prints one line of JSON with its URL once it listens on loopback, and runs until SIGTERM or SIGINT. Each
option is a field of `ListConfig`. It has /v1/embeddings, /v1/models/{m}:predict, /v2/models/{m}/infer,
/rerank, /score, /embed and /predict; `GET /observed` returns counts of the calls, `POST /control` changes the
fields that it contains. `ListServer.answer_call` does the same without HTTP, also in virtual time.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from dispatcher.lab.standin.http import Exchange, Server
from dispatcher.lab.standin.list_models import BadCallError, ListCall, parse_call
from dispatcher.lab.standin.program import parse_options, serve


class ListConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Behaviour and faults of a server. The fields may be changed while it runs."""

    host: Annotated[str, Meta(description="Where it listens.")] = "127.0.0.1"
    port: Annotated[int, Meta(description="0: any.")] = 0
    call_s: Annotated[float, Meta(description="Seconds that each call takes.")] = 0.02
    item_s: Annotated[float, Meta(description="Seconds for each of its items.")] = 0.002
    log_s: Annotated[float, Meta(description="Seconds times log2(1 + items).")] = 0.0
    workers: Annotated[int, Meta(description="Calls that it works on at once; the others wait.")] = 1
    max_items: Annotated[int, Meta(description="Items that a call may have; 0: any number.")] = 0
    max_tokens: Annotated[int, Meta(description="Tokens that a call may have; 0: any number.")] = 0
    words: Annotated[
        Literal["tei", "openai", "triton", "tensorflow", "cohere", "infinity", "plain"],
        Meta(description="Whose words it has for a call with too many."),
    ] = "tei"
    bad: Annotated[str, Meta(description="A call with this in one of its items is answered 400."), "none"] = (
        ""
    )
    wrong_above: Annotated[int, Meta(description="Calls of more items get wrong numbers; 0: none.")] = 0
    missing: Annotated[int, Meta(description="So many of the next answers lack their last item.")] = 0
    fail: Annotated[int, Meta(description="So many of the next calls are answered 503.")] = 0
    shuffled: Annotated[bool, Meta(description="Numbered items are answered last one first.")] = False
    dims: Annotated[int, Meta(description="Numbers of a vector.")] = 8
    model: Annotated[str, Meta(description="Its name, where a call names none.")] = "m"

    def compute_seconds(self, items: int) -> float:
        """Return the duration of a call with this number of items."""
        return self.call_s + self.item_s * items + self.log_s * math.log2(1 + items)


@dataclass(slots=True)
class RecordedCall:
    """Record of one call. Times are those of the event loop."""

    path: str
    texts: Sequence[str]
    """Text of each item, also for calls that were refused."""
    tokens: int
    arrived_at: float
    started_at: float = math.nan
    """Time at which the model started with the call. NaN if the call was refused before."""
    ended_at: float = math.nan
    status: int = 0
    """HTTP status. 0 if the call has not ended or its client disconnected."""


StatusAndBody = tuple[int, bytes]
"""Status and body of an answer."""


class ListServer:
    """Server without a port: answers calls in time, and records them."""

    def __init__(self, config: ListConfig | None = None) -> None:
        self.config = config or ListConfig()
        self.calls: list[RecordedCall] = []
        """All calls in the order of their arrival."""
        self.running = 0
        self.most_running = 0
        self._waiting_calls: list[asyncio.Future[None]] = []

    @property
    def items(self) -> int:
        """Number of items that were answered with 200."""
        return sum(len(call.texts) for call in self.calls if call.status == 200)

    def build_report(self) -> dict[str, Any]:
        """Return the counts of all calls."""
        done = [call for call in self.calls if call.status == 200]
        return {
            "calls": len(self.calls),
            "answered": len(done),
            "items": self.items,
            "tokens": sum(call.tokens for call in done),
            "sizes": [len(call.texts) for call in self.calls],
            "statuses": [call.status for call in self.calls],
            "most_running": self.most_running,
            "busy_s": sum(call.ended_at - call.started_at for call in done),
        }

    async def answer_call(self, path: str, body: bytes) -> StatusAndBody:
        """Return the answer to a call after the time that the call takes."""
        config = self.config
        record = RecordedCall(path, (), 0, asyncio.get_running_loop().time())
        self.calls.append(record)
        try:
            call = parse_call(
                path,
                body,
                model=config.model,
                dims=config.dims,
                index_last=config.words in ("tei", "infinity"),
            )
        except BadCallError as error:
            return self._record_end(
                record, 400, {"error": {"message": str(error), "type": "invalid_request_error"}}
            )
        record.texts, record.tokens = call.texts, call.tokens
        if (refusal := self._check_refusal(call, path)) is not None:
            return self._record_end(record, *refusal)
        await self._wait_for_worker()
        try:
            record.started_at = asyncio.get_running_loop().time()
            await asyncio.sleep(config.compute_seconds(len(call.texts)))
        finally:
            self._release_worker()
        wrong = 0 < config.wrong_above < len(call.texts)
        answer = self._apply_faults(call.make_answer(wrong))
        return self._record_end(record, 200, answer, pretty=call.is_indented)

    def _check_refusal(self, call: ListCall, path: str) -> tuple[int, Any] | None:
        config = self.config
        if config.fail > 0:
            config.fail -= 1
            return 503, {"error": "Model is overloaded", "error_type": "Overloaded"}
        if 0 < config.max_items < len(call.texts):
            return build_too_many_error(
                config.words, len(call.texts), config.max_items, native="/v1/" not in path
            )
        if 0 < config.max_tokens < call.tokens:
            message = f"Requested {call.tokens} tokens, max {config.max_tokens} tokens per request"
            kind = "max_tokens_per_request"
            return 400, {"error": {"message": message, "type": kind, "param": None, "code": kind}}
        bad = next((at for at, text in enumerate(call.texts) if config.bad and config.bad in text), None)
        if bad is not None:
            message = f"Invalid input at position {bad}"
            return 400, {"error": {"message": message, "type": "invalid_request_error", "code": None}}
        return None

    def _apply_faults(self, answer: Any) -> Any:
        listed = answer
        if isinstance(answer, dict):
            listed = next(value for value in answer.values() if isinstance(value, list))
        if self.config.shuffled and listed and isinstance(listed[0], dict) and "index" in listed[0]:
            listed.reverse()
        if self.config.missing > 0:
            self.config.missing -= 1
            if isinstance(answer, dict) and "outputs" in answer:
                for output in listed:
                    _drop_last_row(output)
            else:
                listed.pop()
        return answer

    def _record_end(
        self, record: RecordedCall, status: int, answer: Any, *, pretty: bool = False
    ) -> StatusAndBody:
        record.status, record.ended_at = status, asyncio.get_running_loop().time()
        if pretty:
            # TensorFlow Serving indents its answers.
            return status, json.dumps(answer, indent=4).encode()
        return status, msgspec.json.encode(answer)

    async def _wait_for_worker(self) -> None:
        """Wait until a worker is free: first come, first served."""
        # Calls that wait already go first.
        if self.running >= self.config.workers or self._waiting_calls:
            mine = asyncio.get_running_loop().create_future()
            self._waiting_calls.append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                # Cancelled after its turn came: the worker must go to the next call.
                if mine in self._waiting_calls:
                    self._waiting_calls.remove(mine)
                else:
                    self._release_worker()
                raise
        else:
            self.running += 1
        self.most_running = max(self.most_running, self.running)

    def _release_worker(self) -> None:
        self.running -= 1
        # More than one call starts if the number of workers was raised meanwhile.
        while self._waiting_calls and self.running < self.config.workers:
            self.running += 1
            self._waiting_calls.pop(0).set_result(None)


def _drop_last_row(output: dict[str, Any]) -> None:
    """Remove the last row of a tensor, whose data are nested or flat."""
    row_count, data = output["shape"][0], output["data"]
    output["shape"] = [row_count - 1, *output["shape"][1:]]
    output["data"] = data[: len(data) - len(data) // row_count]


def build_too_many_error(words: str, count: int, max_items: int, *, native: bool = False) -> tuple[int, Any]:
    """Return the answer with which a real server refuses a call with too many items."""
    tei = f"batch size {count} > maximum allowed batch size {max_items}"
    openai = (
        f"Invalid 'input': array too long. Expected an array with maximum length {max_items}, "
        f"but got an array with length {count} instead."
    )
    listed = f"List should have at most {max_items} items after validation, not {count}"
    # Answers of the real servers, by which the dispatcher learns their limits.
    responses: dict[str, tuple[int, Any]] = {
        "tei": (
            413,
            {"error": tei, "error_type": "Validation"}
            if native
            else {"message": tei, "code": 413, "type": "Validation"},
        ),
        "openai": (
            400,
            {
                "error": {
                    "message": openai,
                    "type": "invalid_request_error",
                    "param": "input",
                    "code": "array_above_max_length",
                }
            },
        ),
        "triton": (400, {"error": f"inference request batch-size must be <= {max_items} for 'm'"}),
        "tensorflow": (
            400,
            {"error": f"Task size {count} is larger than maximum input batch size {max_items}"},
        ),
        "cohere": (
            400,
            {
                "message": "invalid request: total number of texts must be at most "
                f"{max_items} - received {count}"
            },
        ),
        "infinity": (422, {"detail": [{"type": "too_long", "loc": ["body", "input"], "msg": listed}]}),
        "plain": (413, "Payload Too Large"),
    }
    return responses[words]


class ListService:
    """`ListServer` behind a port on loopback. An async context manager."""

    def __init__(self, config: ListConfig | None = None) -> None:
        self.lists = ListServer(config)
        self._server = Server(self._handle_exchange, self.lists.config.host, self.lists.config.port)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://{self._server.host}:{self._server.port}"

    async def __aenter__(self) -> ListService:
        await self._server.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _handle_exchange(self, exchange: Exchange) -> None:
        path = exchange.target.partition("?")[0]
        if path == "/observed":
            _send_json(exchange, 200, msgspec.json.encode(self.lists.build_report()))
        elif path == "/control":
            self._apply_control(exchange)
        elif exchange.method != "POST":
            _send_json(exchange, 200 if path == "/health" else 404, b"{}")
        else:
            self._start_task(exchange, self._answer_call(exchange))

    def _apply_control(self, exchange: Exchange) -> None:
        """Change the fields that the body contains."""
        try:
            changes = msgspec.json.decode(exchange.body, type=dict[str, Any])
            changed = msgspec.convert({**msgspec.structs.asdict(self.lists.config), **changes}, ListConfig)
        except msgspec.MsgspecError as error:
            _send_json(exchange, 400, msgspec.json.encode({"error": str(error)}))
            return
        self.lists.config = changed
        _send_json(exchange, 200, msgspec.json.encode(changed))

    async def _answer_call(self, exchange: Exchange) -> None:
        status, body = await self.lists.answer_call(exchange.target, exchange.body)
        _send_json(exchange, status, body)

    def _start_task(self, exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A call whose client disconnected frees its worker.
        exchange.on_disconnect = task.cancel


def _send_json(exchange: Exchange, status: int, body: bytes) -> None:
    exchange.answer(status, body, [("content-type", "application/json")])


async def _serve(config: ListConfig) -> None:
    await serve(ListService(config), lambda service: {"url": service.url})


def main(arguments: Sequence[str] | None = None) -> None:
    config = parse_options(ListConfig, arguments, "dispatcher.lab.standin.lists", __doc__)
    try:
        asyncio.run(_serve(config))
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
