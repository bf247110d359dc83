"""Test oracle: records all submitted requests, and compares them with the result lists at the end.

Submitters submit requests and record which ones were acknowledged. `compare_with_results` compares this
record with the result lists and uses no other source. Writes that a killed server may lose
(docs/reference/queue-contract.md, "What Redis itself may lose") are recognized by time: a request that was
neither submitted nor answered within a `LossWindow` must not be missing.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from redis import RedisError

from dispatcher.client import BatchClient, BatchError, Handle
from dispatcher.lab.standin.generation_api import GenerationConfig
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.redis.connect import connect
from dispatcher.queue.redis.scripts import Client as RedisClient
from dispatcher.requests.request import encode_member
from tests.features.slices.generation_gateway import generate_whole
from tests.features.slices.slice_scene import summarize
from tests.support import wait_until

GENERATION = GenerationConfig(chunk_tokens=1)
"""Behaviour of the stand-in servers that generate text. Each token depends on all tokens before it."""
GENERATED_PATH = "/v1/completions"
SLICE_TOKENS = 20
_MAX_GENERATED_TOKENS = 8 * SLICE_TOKENS
_GENERATED_FRACTION = 0.5
"""Fraction of the plain requests that are generations, where slices are on."""
Kind = Literal["plain", "refused", "failing", "cancelled"]
"""`refused`: always answered with 429; `failing`: always with 500; `cancelled`: by its submitter."""
_REFUSED_FRACTION = 0.05
"""Fraction of the first tenth of the requests.

If requests were refused all the time, the pool would never be full.
"""
_FAILING_FRACTION = 0.05
_CANCELLED_FRACTION = 0.02
SUBMITTER_COUNT = 5
_RETRY_PAUSE_S = 0.5
"""Pause after a submission that was rejected or got no reply."""

_ALLOWED_RESULTS: Mapping[Kind, frozenset[str]] = {
    # Injected resets and refusals may use up the attempts of any request.
    "plain": frozenset({"200", "RETRIES_EXHAUSTED"}),
    "refused": frozenset({"DEADLINE_EXCEEDED"}),
    "failing": frozenset({"RETRIES_EXHAUSTED", "DEADLINE_EXCEEDED"}),
    "cancelled": frozenset({"200", "RETRIES_EXHAUSTED", "CANCELLED"}),
}


@dataclass
class SubmittedRequest:
    """Record of a submitted request."""

    id: str
    result_list: str
    payload: str
    kind: Kind
    is_generation: bool = False
    """True if the answer is generated text. Otherwise, it is the payload."""
    is_accepted: bool = True
    """False if no reply came, so that the request may have been accepted or not.

    It has one result or none.
    """
    replied_at: float = 0.0
    """Time of the reply to its submission."""

    def is_answer(self, answer: str) -> bool:
        """Return whether this is the answer of one call without faults."""
        if not self.is_generation:
            return answer == self.payload
        return summarize(answer) == summarize(
            generate_whole(GENERATED_PATH, self.payload.encode(), GENERATION)
        )


@dataclass(frozen=True)
class LossWindow:
    """Time (CLOCK_MONOTONIC) in which acknowledged writes may be lost."""

    since: float
    until: float

    def __contains__(self, moment: float) -> bool:
        return self.since <= moment <= self.until


@dataclass
class Report:
    """Result of the comparison: ids by kind of fault. All lists are empty if there is none."""

    answered_once: int = 0
    missing: list[str] = field(default_factory=list)
    duplicates: list[str] = field(default_factory=list)
    misdelivered: list[str] = field(default_factory=list)
    """Results in the list of another submitter, or with an unknown id."""
    wrong_results: list[str] = field(default_factory=list)
    """Results with the answer to another request, or with an outcome that its kind does not allow."""
    forgotten: list[str] = field(default_factory=list)
    """Missing results that a killed server may have lost, which is allowed."""
    repeated: list[str] = field(default_factory=list)
    """Second results because a killed server may have lost the first settlement, which is allowed."""
    result_counts: Counter[str] = field(default_factory=Counter)
    sliced_count: int = 0
    """Number of results of several slices."""

    @property
    def found(self) -> dict[str, list[str]]:
        kinds = ("missing", "duplicates", "misdelivered", "wrong_results", "forgotten", "repeated")
        return {kind: getattr(self, kind) for kind in kinds}

    @property
    def faults(self) -> dict[str, list[str]]:
        """Faults that are never allowed."""
        allowed = ("forgotten", "repeated")
        return {kind: ids for kind, ids in self.found.items() if ids and kind not in allowed}


def compare_with_results(
    submitted: Mapping[str, SubmittedRequest],
    lists: Mapping[str, Iterable[bytes]],
    loss_windows: Sequence[LossWindow] = (),
    gateway_times: Mapping[str, Sequence[float]] | None = None,
) -> Report:
    """Compare submitted requests with the result lists.

    `gateway_times` has the end of each attempt at the gateway by request id.
    """
    report = Report()
    result_counts: Counter[str] = Counter()
    for name, results in lists.items():
        for raw_result in results:
            result = json.loads(raw_result)
            request = submitted.get(result["id"])
            if request is None or request.result_list != name:
                report.misdelivered.append(f"{result['id']} in {name}")
                continue
            result_counts[request.id] += 1
            outcome = str(result.get("error_code") or result.get("status_code"))
            report.result_counts[outcome] += 1
            report.sliced_count += "slices" in result
            if outcome not in _ALLOWED_RESULTS[request.kind] or (
                outcome == "200" and not request.is_answer(result["payload"])
            ):
                report.wrong_results.append(
                    f"{request.id} ({request.kind}): {raw_result.decode(errors='replace')[:300]}"
                )

    def may_be_lost(request: SubmittedRequest) -> bool:
        moments = [request.replied_at, *(gateway_times or {}).get(request.id, ())]
        return any(moment in window for moment in moments for window in loss_windows)

    for request in submitted.values():
        count = result_counts[request.id]
        if count == 1:
            report.answered_once += 1
        elif count > 1:
            (report.repeated if may_be_lost(request) else report.duplicates).append(request.id)
        elif request.is_accepted:
            (report.forgotten if may_be_lost(request) else report.missing).append(request.id)
    return report


class Submitter:
    """Producer with its own result list, or one that uses `ZADD` and the default list (`is_foreign`).

    With `generates`, some of its requests are generations of several slices.
    """

    def __init__(
        self, name: str, url: str, names: QueueNames, *, is_foreign: bool, seed: str, generates: bool = False
    ) -> None:
        self.submitted: dict[str, SubmittedRequest] = {}
        self._name = name
        self._redis: Any = connect(url)
        self._names = names
        options: dict[str, Any] = {"queue": names.queue, "results": names.result_list, "retry_for": 0.0}
        self._client = None if is_foreign else BatchClient(url, **options)
        self._result_list = names.result_list if is_foreign else f"batch-results:{name}"
        self._random_source = random.Random(seed)
        self._generated_fraction = _GENERATED_FRACTION if generates else 0.0

    async def submit(
        self, max_request_s: float, refused_deadline_s: float, *, may_be_refused: bool
    ) -> Handle | None:
        """Submit one request. Return its handle if it should be cancelled soon."""
        random_source = self._random_source
        kinds: tuple[Kind, ...] = ("refused", "failing", "cancelled", "plain")
        shares = (
            _REFUSED_FRACTION if may_be_refused else 0.0,
            _FAILING_FRACTION,
            _CANCELLED_FRACTION if self._client is not None else 0.0,
        )
        (drawn_kind,) = random_source.choices(kinds, (*shares, 1.0 - sum(shares)))
        kind: Kind = "plain" if drawn_kind == "cancelled" else drawn_kind
        id_ = f"{self._name}-{len(self.submitted)}"
        stand_in_answer: dict[str, Any] = {
            "echo": True,
            "seconds": round(random_source.uniform(0.02, max_request_s), 3),
        }
        if kind != "plain":
            stand_in_answer = {"kind": "status", "status": 429 if kind == "refused" else 500, "body": "no"}
        body: dict[str, Any] = {
            "from": self._name,
            "id": id_,
            "salt": random_source.random(),
            "sim": stand_in_answer,
        }
        is_generation = kind == "plain" and random_source.random() < self._generated_fraction
        if is_generation:
            max_tokens = random_source.randint(1, _MAX_GENERATED_TOKENS)
            body = {"model": "m", "prompt": f"Tell the story of {id_}.", "max_tokens": max_tokens}
        payload = json.dumps(body)
        request = self.submitted[id_] = SubmittedRequest(
            id_, self._result_list, payload, kind, is_generation=is_generation, is_accepted=False
        )
        deadline_s = refused_deadline_s if kind == "refused" else 3600.0
        handle = None
        try:
            if self._client is not None:
                handle = await self._client.enqueue(
                    payload.encode(), deadline=deadline_s, id=id_, results=self._result_list
                )
            else:
                deadline = int(time.time() + deadline_s)
                member = encode_member(id_, payload.encode(), deadline)
                await self._redis.zadd(self._names.queue, {member: deadline})
            request.is_accepted = True
        except (BatchError, RedisError, OSError):
            pass  # it is unknown whether the request was accepted
        request.replied_at = time.monotonic()
        return handle if drawn_kind == "cancelled" else None

    async def cancel_request(self, handle: Handle, after_s: float) -> None:
        assert self._client is not None
        await asyncio.sleep(after_s)
        self.submitted[handle.id].kind = "cancelled"
        try:
            await self._client.cancel(handle)
        except BatchError:
            return  # the cancellation may have been effective all the same

    async def aclose(self) -> None:
        await self._redis.aclose()
        if self._client is not None:
            await self._client.aclose()

    async def submit_all(
        self,
        count: int,
        get_allowed_fraction: Callable[[], float],
        max_request_s: float,
        refused_deadline_s: float,
    ) -> None:
        """Submit until `count` requests are accepted, at any time at most the allowed fraction of them."""
        accepted_count = 0

        def is_next_allowed() -> bool:
            return accepted_count <= count * get_allowed_fraction()

        async with asyncio.TaskGroup() as tasks:
            while accepted_count < count:
                await wait_until(is_next_allowed, 1200, every_s=0.05)
                handle = await self.submit(
                    max_request_s, refused_deadline_s, may_be_refused=accepted_count < count / 10
                )
                if next(reversed(self.submitted.values())).is_accepted:
                    accepted_count += 1
                else:
                    await asyncio.sleep(_RETRY_PAUSE_S)
                if handle is not None:
                    tasks.create_task(self.cancel_request(handle, self._random_source.uniform(0.0, 2.0)))


async def read_result_lists(redis: RedisClient, names: QueueNames) -> dict[str, list[bytes]]:
    """Return the content of all result lists, including the default one."""
    client: Any = redis  # redis-py types replies for every protocol at once
    lists = [names.result_list, *(f"batch-results:caller-{number}" for number in range(SUBMITTER_COUNT))]
    return {name: await client.lrange(name, 0, -1) for name in lists}
