"""Bytes that a queue stores for a fixed series of steps, with a fixed clock and fixed ids.

    python -m tests.queue.stored_bytes        writes stored_bytes.txt

Dispatchers of two versions share a queue while one replaces the other, so each must be able to read what the
other one stores. The file has for each step what it stored (`+`) and removed (`-`): the key, the field of a
hash or the element of a set, and the bytes or the score. Keys with replies to calls are missing, because
only the caller reads them.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import redis
from msgspec.structs import replace

from dispatcher.features.models.queue.waiting import ModelWait
from dispatcher.features.models.registry import PinRequest
from dispatcher.features.sequences.conversation import encode_conversation
from dispatcher.features.sequences.decisions import (
    SequenceOverride,
    SequenceTerms,
)
from dispatcher.features.sequences.queue.turn_end import TurnEnd
from dispatcher.features.sequences.turns import CarryMode, OnError, Turn
from dispatcher.features.slices.progress import Progress, Stage, encode_progress
from dispatcher.queue.contract import DeadLetter, Lease, Overload, Permit, Release, Settlement
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.redis import lua_scripts
from dispatcher.queue.redis.clock import ServerClock
from dispatcher.requests.lanes import Lane
from dispatcher.requests.request import encode_member
from dispatcher.requests.result import add_partial_answer, encode_answer, encode_failure
from dispatcher.requests.submission import Submission
from dispatcher.wire_format import ErrorCode
from tests.queue.factories import OwnerAndAdmin, queues
from tests.queue.servers import Server, server

GOLDEN = Path(__file__).parent / "stored_bytes.txt"
NAMES = QueueNames("{q}", "results", allowed_lists=("*",))
START = 1_764_000_000
DEADLINE = START + 3600
CLOCK_KEY = "clock"
LEASE_S = 30.0
TERMS = SequenceTerms(max_active=2, overrides=(SequenceOverride("qwen*", 300.0, 1),))
MAX_PER_LANE = {Lane.SUSPECTS: 10, Lane.STARTED: 10}

# The time of all scripts is the value of CLOCK_KEY.
FIXED_TIME = """
local call = redis.call
local function current_time() return tonumber(call('GET', 'clock')) end
local function format_float(number) return string.format('%.6f', number) end
"""


class FixedClock(ServerClock):
    """Clock of a server whose time is that of the event loop."""

    is_known = True

    def observe_reply(self, sent_at: float, received_at: float, server_time: float) -> None: ...

    def get_offset(self, now: float) -> float:
        return 0.0


@contextmanager
def fixed_clock_and_ids() -> Iterator[None]:
    numbers = itertools.count(1)
    with ExitStack() as stack:
        stack.enter_context(patch.dict(lua_scripts._LUA, time=FIXED_TIME))
        stack.enter_context(patch("secrets.token_hex", lambda size: f"{next(numbers):0{2 * size}x}"))
        stack.enter_context(patch("time.time", lambda: float(START)))
        stack.callback(lua_scripts.load_script.cache_clear)
        lua_scripts.load_script.cache_clear()
        yield


def read_everything(client: Any) -> dict[str, str]:
    """Return all stored values by their places: key and field, key and index, or key and element."""
    stored: dict[str, str] = {}
    for key in client.scan_iter():
        name = key.decode()
        if ":reply:" in name or name == CLOCK_KEY:
            continue
        values: Iterable[tuple[object, object]]
        match client.type(key):
            case b"string":
                values = [("value", client.get(key))]
            case b"hash":
                values = client.hgetall(key).items()
            case b"zset":
                values = client.zrange(key, 0, -1, withscores=True)
            case b"list":
                values = enumerate(client.lrange(key, 0, -1))
            case other:
                raise TypeError(other)
        stored |= {f"{name} {_show(place)}": _show(value) for place, value in values}
    return stored


def _show(value: object) -> str:
    """Return bytes in quotes, with each byte that is no printable ASCII as `\\x..`, and numbers exactly."""
    if isinstance(value, bytes):
        return repr(value)[1:]
    return f"{value:.17g}" if isinstance(value, float) else str(value)


class Recorder:
    """Queue with requests of each kind, and what its steps store."""

    def __init__(self, queue: OwnerAndAdmin, client: redis.Redis) -> None:
        self.queue = queue
        self.text = ""
        self.entries: list[list[Any]] = []
        """Arrays of all entries that were stored."""
        self.client = client
        self._before: dict[str, str] = {}
        self._nonces = itertools.count(1)
        self.now = float(START)

    def set_time(self, seconds: float) -> None:
        """Set the time in seconds since START."""
        self.now = START + seconds
        self.client.set(CLOCK_KEY, f"{self.now:.6f}")

    def record(self, step: str) -> None:
        after = read_everything(self.client)
        lines = [f"- {place}" for place in sorted(self._before.keys() - after.keys())]
        lines += [
            f"+ {place} {value}" for place, value in sorted(after.items()) if value != self._before.get(place)
        ]
        self.text += "\n".join([f"# {step}, after {self.now - START:g} s", *lines, "", ""])
        self._before = after
        packed: Any = self.client.hvals(f"{NAMES.queue_prefix}:entries")
        self.entries += [msgspec.msgpack.decode(each) for each in packed]

    def permit(self) -> Permit:
        return Permit(100, self.now, 0)

    async def claim(self, max_count: int = 100) -> dict[str, Lease]:
        """Claim requests, and return the leases by request id."""
        nonce = f"nonce-{next(self._nonces)}"
        claimed = await self.queue.claim(max_count, nonce, self.permit(), max_per_lane=MAX_PER_LANE)
        return {msgspec.json.decode(lease.member)["data"]["id"]: lease for lease in claimed.leases}

    async def submit(
        self, request_id: str, payload: bytes, *, score: float = float(DEADLINE), **fields: Any
    ) -> None:
        token = f"token-of-{request_id}"
        member = encode_member(request_id, payload, DEADLINE, created=START, token=token, **fields)
        await self.queue.submit([Submission(member, score, request_id, token, DEADLINE)])


CHAT = b'{"messages":[{"role":"user","content":"Hi"}]}'
EMBEDDING = b'{"input":"Hi"}'
ANSWER = '{"choices":[{"message":{"role":"assistant","content":"H\u00e9"}}]}'.encode()
FOREIGN = b'{"request_kind":"redis","data":{"id":"foreign","deadline":1764003600,"payload":{"prompt":"hi"}}}'
"""Member that a producer of llm-d has written."""
PROGRESS = Progress(
    stage=Stage.SLICES,
    slices=1,
    text="The sky \u00e9",
    token_ids=b"1,2",
    prompt_token_ids=b"7,8,9",
    tokens=2,
    uncounted_tokens=1,
    prompt_tokens=3,
    cached_tokens=0,
    response_id="chatcmpl-1",
    created=START,
    object="chat.completion",
    model="qwen",
    version="qwen-v2",
    session_token="server-1",
)
NO_LEASE = Lease(0, "", b"", 0.0, 0, 0, 0, 0)
TURNS = {
    "turn-0": Turn("chat", 0),
    "turn-1": Turn("chat", 1, on_error=OnError.HOLD, carry=CarryMode.MESSAGES, secret="s" * 16),
    "turn-2": Turn("chat", 2, last=True),
    "begins": Turn("begins", reset=True, override="qwen*"),
    "follows": Turn("begins", override="qwen*"),
    "parked": Turn("parked", override="qwen*"),
}


async def record_steps(queue: OwnerAndAdmin, client: redis.Redis) -> Recorder:
    """Run the steps, and return what they have stored."""
    recorder = Recorder(queue, client)
    recorder.set_time(0)
    await _submit_requests(recorder)
    leases = await recorder.claim()
    recorder.record("claim")
    turns = [(leases[name], turn) for name, turn in TURNS.items()]
    await queue.claim_turns(turns, TERMS)
    recorder.record("claim turns")
    await queue.set_lease_units([(leases["merged-1"], 2), (leases["merged-2"], 0)], recorder.permit())
    recorder.record("set the lease units of a merged call")
    await _release_requests(recorder, leases)
    await _settle_requests(recorder, leases)
    await _continue_slices(recorder)
    await _let_leases_run_out(recorder)
    await _change_by_hand(recorder)
    await _answer_remaining_requests(recorder)
    await _use_model_registry(recorder)
    return recorder


async def _submit_requests(recorder: Recorder) -> None:
    submit = recorder.submit
    await submit("plain", CHAT, headers={"x-a": "1"}, metadata={"tenant": "blue"}, labels={"team": "red"})
    await submit("refused", CHAT, endpoint="/v1/chat/completions", correlation_id="c-1")
    await submit("dead", CHAT)
    for name, turn in TURNS.items():
        await submit(name, CHAT, extra=turn)
    await submit("sliced", CHAT)
    await submit("restarted", CHAT)
    await submit("waits", CHAT, results="batch:other-results")
    await submit("cancelled", CHAT)
    await submit("merged-1", EMBEDDING, endpoint="/v1/embeddings")
    await submit("merged-2", EMBEDDING, endpoint="/v1/embeddings")
    await submit("priority", CHAT, score=2e11)
    recorder.client.zadd(NAMES.queue, {FOREIGN: DEADLINE})
    recorder.record("submit")


async def _release_requests(recorder: Recorder, leases: dict[str, Lease]) -> None:
    await recorder.queue.release(
        [
            Release(leases["refused"], delay_s=10.0, is_refusal=True, last_attempt="429 of the gateway"),
            Release(leases["dead"], is_failed_attempt=True, last_attempt="503", new_score=DEADLINE + 60.5),
            Release(leases["sliced"], progress=encode_progress(PROGRESS)),
            Release(
                leases["restarted"], progress=encode_progress(Progress(Stage.RESTART)), is_undelivered=True
            ),
            Release(leases["waits"], extra=ModelWait("qwen-v9")),
            Release(leases["cancelled"], extra=ModelWait("qwen-v9"), progress=b"begun"),
            Release(leases["priority"]),
        ]
    )
    recorder.record("release")


async def _settle_requests(recorder: Recorder, leases: dict[str, Lease]) -> None:
    token = "token-of-plain"
    plain = encode_answer(
        "plain", 200, ANSWER, {"slices": 3, "cached_tokens": 40}, token=token, chosen_model="qwen-v2"
    )
    merged = [
        encode_answer("merged-1", 200, b"\xff\x00 is no UTF-8", token="token-of-merged-1"),
        add_partial_answer(
            encode_failure("merged-2", ErrorCode.RETRIES_EXHAUSTED, "why", 503, b"ignored"), b"busy"
        ),
    ]
    end = TurnEnd(
        TURNS["turn-0"],
        sticky_token="server-1",
        conversation=encode_conversation(CHAT, ANSWER, 1000),
    )
    await recorder.queue.settle(
        [
            _settle(leases, "plain", plain),
            Settlement(leases["foreign"], encode_answer("foreign", 404, b"{}"), "named-list"),
            _settle(leases, "turn-0", encode_answer("turn-0", 200, ANSWER), extra=end),
            *[_settle(leases, f"merged-{at}", result) for at, result in enumerate(merged, 1)],
        ]
    )
    recorder.record("settle")


def _settle(leases: dict[str, Lease], request_id: str, result: bytes, **options: Any) -> Settlement:
    return Settlement(leases[request_id], result, "", request_id, f"token-of-{request_id}", **options)


async def _continue_slices(recorder: Recorder) -> None:
    queue = recorder.queue
    recorder.set_time(11)
    await queue.sweep()
    recorder.record("sweep of a delayed request")
    leases = await recorder.claim()
    await queue.claim_turns([(leases["turn-1"], TURNS["turn-1"])], TERMS)
    recorder.record("claim again")
    second = replace(PROGRESS, stage=Stage.REST, slices=2, text="The sky is", repeats_text=True, cut_tokens=1)
    release = Release(leases["sliced"], progress=encode_progress(second), is_failed_attempt=True)
    await queue.release_and_claim_again([release], "nonce-again", recorder.permit())
    recorder.record("release with progress, and claim again")
    failure = encode_failure("dead", ErrorCode.RETRIES_EXHAUSTED, "it failed 3 times", token="token-of-dead")
    await queue.move_to_dead_letters([DeadLetter(_settle(leases, "dead", failure), "it failed", True)])
    failure = encode_failure("turn-1", ErrorCode.INFERENCE_ERROR, "500", 500, b"{}")
    end = TurnEnd(TURNS["turn-1"], has_failed=True, cause="turn-1: it broke")
    await queue.settle([_settle(leases, "turn-1", failure, extra=end)])
    recorder.record("dead letter, and a failed turn that holds its sequence")


async def _let_leases_run_out(recorder: Recorder) -> None:
    """Let the owner be silent until its leases run out, twice, so that their requests become suspects."""
    at = 20.0
    for _ in range(2):
        # The first sweep after a gap gives living owners time to renew their leases.
        for seconds in (LEASE_S + 1, 8.0, 8.0):
            at += seconds
            recorder.set_time(at)
            await recorder.queue.sweep()
        recorder.record("sweep of leases that ran out")
        await recorder.claim(3)
    recorder.record("claim of suspects")


async def _change_by_hand(recorder: Recorder) -> None:
    queue = recorder.queue
    await queue.release_sequence("chat")
    await queue.abort_sequence("begins", "an operator said so")
    await queue.cancel_sequence("parked")
    await queue.cancel_request("cancelled", "token-of-cancelled")
    await queue.pause("ada", "maintenance")
    now = recorder.now
    overload = Overload(now, now + 5.0, is_out_of_capacity=True, in_flight=7)
    await queue.share_state(recorder.permit(), overload)
    recorder.record("changes by operators and producers, and a shared overload")
    await queue.resume()
    recorder.set_time(now + 6.0 - START)
    await queue.claim_probe("nonce-probe", recorder.permit())
    await queue.return_waiting_for_models(["qwen-v9"])
    await queue.share_pool_identity(b"pool-east", 30.0)
    await queue.get_or_create_sequence_secret()
    recorder.record("claim of a probe, and return of requests that waited for their model")


async def _answer_remaining_requests(recorder: Recorder) -> None:
    """Answer the requests of sequences that were ended by hand."""
    remaining = await recorder.queue.find_remaining_requests(10)
    answers = []
    for each in remaining:
        request_id = msgspec.json.decode(each.request.member)["data"]["id"]
        result = encode_failure(request_id, each.error_code, each.message)
        answers.append((each.request, Settlement(NO_LEASE, result, "")))
    await recorder.queue.settle_unleased(answers)
    recorder.record("results of requests without a lease")


async def _use_model_registry(recorder: Recorder) -> None:
    queue = recorder.queue
    await queue.take_warm_up_lock("qwen-v2", "10.0.0.2:8000")
    await queue.mark_warm("qwen-v1", "10.0.0.1:8000")
    await queue.refresh_warm_markers((), (), ["qwen-v1"])
    await queue.pin_versions([PinRequest("chat", "qwen-v1", (), 100.0)])
    await queue.set_label("qwen", "stable", "1", "ada")
    await queue.drain_version("qwen-v0", "ada")
    recorder.record("model registry")


@asynccontextmanager
async def recorded(engine: Server) -> AsyncIterator[Recorder]:
    """Yield what the steps store in an empty server."""
    with fixed_clock_and_ids(), engine.client() as client:
        client.flushall()
        async with queues(engine.url, "owner-1", names=NAMES, lease_s=LEASE_S, max_pending=1000) as (queue,):
            for backend in (queue.backend, queue.queue_admin.backend):
                backend.clock = FixedClock()
            yield await record_steps(queue, client)


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder, server("valkey", Path(folder)) as engine:
        async with recorded(engine) as recorder:
            GOLDEN.write_text(recorder.text)


if __name__ == "__main__":
    asyncio.run(main())
