"""Factories for tests of the queue: members, settlements, permits, and queues on a running server."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import redis.asyncio

from dispatcher.features import FEATURES
from dispatcher.gateway.contract import AttemptResult
from dispatcher.queue.contract import ClaimResult, Lease, Permit, Queue, Release, Settlement, SettleStatus
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.lua_files import ALL_FEATURES
from dispatcher.queue.owners import DeadOwnerDetector
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.owner import QueueOptions, RedisQueue
from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
from dispatcher.requests.lanes import Lane
from dispatcher.requests.outcomes.outcome import Delivered
from dispatcher.requests.request import Request
from dispatcher.requests.submission import Submission

NAMES = QueueNames("batch:{pool}:requests", "batch:{pool}:results", allowed_lists=("*",))
"""Any result list is allowed. test_contract.py tests the default rules."""


def member(
    request_id: str = "r-1", deadline: int | None = None, *, token: str = "", results: str = ""
) -> bytes:
    """Return a member as any producer writes it."""
    internal = {"request_token": token, "result_queue_name": results}
    data = {"id": request_id, "deadline": deadline or int(time.time()) + 600, "payload": {"prompt": "hi"}}
    return msgspec.json.encode({"internal": internal, "request_kind": "redis", "data": data})


def submission(request_id: str = "r-1", deadline: int | None = None, *, token: str = "") -> Submission:
    """Return a submission as our client makes it."""
    until = deadline or int(time.time()) + 600
    return Submission(member(request_id, until, token=token), until, request_id, token, until)


def answer(lease: Lease, results: str = "", *, token: str = "", text: str = "ok") -> Settlement:
    """Return the settlement of an answered request."""
    request_id = msgspec.json.decode(lease.member)["data"]["id"]
    result = msgspec.json.encode({"id": request_id, "status_code": 200, "payload": text})
    return Settlement(lease, result, results, request_id, token)


def permit(limit: int = 1000, *, read_at: float | None = None, lost: int = 0) -> Permit:
    """Return a permit by a reading of now."""
    now = asyncio.get_running_loop().time()
    return Permit(limit, now if read_at is None else read_at, lost)


_nonces = iter(range(10**9))


async def claim(queue: Queue, most: int = 1000, limit: int = 1000, **options: Any) -> ClaimResult:
    """Claim with a new nonce and a new permit."""
    return await queue.claim(most, f"nonce-{next(_nonces)}", permit(limit), **options)


async def claim_one(queue: Queue) -> Lease:
    """Claim the next request, which must exist."""
    (lease,) = (await claim(queue, 1)).leases
    return lease


class InstantGateway:
    """Gateway that answers every request at once."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def forward(
        self, request: Request, *, token: str, deadline: float, may_send: object
    ) -> AttemptResult:
        now = asyncio.get_running_loop().time()
        self.sent.append(request.id)
        return AttemptResult(Delivered(200, b"{}"), now, now)

    def get_connected_at(self, token: str) -> float | None:
        return None

    def resize_connection_pool(self, max_requests: int) -> None: ...


def parse_entry_id(lease: bytes) -> int:
    """Return the entry of a lease by its name in Redis: `12:owner`, or `12*3:owner` for three units."""
    return int(re.split(rb"[*:]", lease)[0])


def parse_lease_units(lease: bytes) -> int:
    """Return the units of a lease by its name in Redis."""
    several = re.match(rb"\d+\*(\d+):", lease)
    return 1 if several is None else int(several[1])


def ids(members: Iterable[bytes]) -> list[str]:
    return [msgspec.json.decode(each)["data"]["id"] for each in members]


if TYPE_CHECKING or "models" in FEATURES:
    from dispatcher.features.models.queue.calls import ModelAdminCalls, ModelCalls
if TYPE_CHECKING or "sequences" in FEATURES:
    from dispatcher.features.sequences.queue.calls import SequenceAdminCalls, SequenceCalls
if TYPE_CHECKING:

    class _OwnerAndAdmin(
        RedisQueue, RedisQueueAdmin, ModelCalls, ModelAdminCalls, SequenceCalls, SequenceAdminCalls
    ):
        """All interfaces for the type checker. At run time, they are objects of their own."""

        async def check_cancelled(self, requests: Sequence[tuple[str, str]]) -> Sequence[bool]: ...

else:
    _OwnerAndAdmin = RedisQueue


class OwnerAndAdmin(_OwnerAndAdmin):
    """Owner with a queue admin and the calls of features over the same connection, because most tests submit
    the requests that they claim."""

    def __init__(
        self,
        client: Any,
        names: QueueNames,
        owner: str,
        *,
        dead_owner_detector: DeadOwnerDetector | None = None,
        features: Sequence[str] = ALL_FEATURES,
        **options: Any,
    ) -> None:
        own = QueueOptions(**options)
        super().__init__(
            client, names, owner, own, dead_owner_detector=dead_owner_detector, features=features
        )
        self.queue_admin = admin = RedisQueueAdmin(client, names, attempt_timeout_s=own.attempt_timeout_s)
        self._parts: list[object] = [admin]
        if "models" in FEATURES:
            self._parts += ModelCalls(self), ModelAdminCalls(admin)
        if "sequences" in FEATURES:
            self._parts += SequenceCalls(self), SequenceAdminCalls(admin)

    if not TYPE_CHECKING:  # with `__getattr__`, the type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            """Return a method that an owner does not have: submit, pause …, or a call of a feature."""
            return next(getattr(part, name) for part in self._parts if hasattr(part, name))


@asynccontextmanager
async def queues(
    url: str, *owners: str, names: QueueNames = NAMES, **options: Any
) -> AsyncIterator[list[OwnerAndAdmin]]:
    """Yield one queue for each owner, with its own connections."""
    async with AsyncExitStack() as stack:
        made = []
        for owner in owners:
            queue = OwnerAndAdmin(connect(url), names, owner, **options)
            stack.push_async_callback(queue.aclose)
            made.append(queue)
        yield made


STARTED = {Lane.STARTED: 1000}
"""Room for started requests in a claim, as dispatchers have it."""


async def start_requests(queue: OwnerAndAdmin, *names: str, progress: bytes = b"part 1") -> None:
    """Submit these requests, claim them, and release them with progress."""
    await queue.submit([submission(name, 4_000_000_000) for name in names])
    leases = (await claim(queue, max_per_lane={})).leases
    assert len(leases) == len(names)
    releases = [Release(lease, progress=progress) for lease in leases]
    assert await queue.release(releases) == [SettleStatus.DONE] * len(names)


async def claim_started(queue: OwnerAndAdmin, max_count: int = 1000) -> list[Lease]:
    return list((await claim(queue, max_count, max_per_lane=STARTED)).leases)


async def count_commands_by_name(client: redis.asyncio.Redis, step: Awaitable[object]) -> Counter[str]:
    """Return how often a step runs each command on the server, including the commands of its scripts."""
    await client.config_resetstat()
    await step
    stats: Any = await client.info("commandstats")
    calls = {name.removeprefix("cmdstat_"): reply["calls"] for name, reply in stats.items()}
    del calls["config|resetstat"]
    return Counter(calls)
