"""Calls of producers and consumers: one function for each script, as in steps/, and the wait for results.

They are separate from those of dispatchers, so that a program which only submits loads little.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dispatcher.queue.constants import CANCEL_TTL_S, REPLY_TTL_S
from dispatcher.queue.keys import KEPT_SUFFIX, MAX_TOKEN_BYTES, OWNER_SUFFIX, QueueNames
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.scripts import MAX_SCRIPT_BYTES, ScriptRunner, WrongKeyError
from dispatcher.requests.submission import Submission

MAX_COLLECTED = 1000
_MAX_SCANNED = 100
NOT_SERVED_AFTER_S = 30.0
"""Seconds without a sweep after which no dispatcher serves the queue: each of them sweeps every few
seconds."""
KEPT_TTL_S = 604_800
"""Seconds for which results are kept for a client if their list has no lifetime of its own."""


async def submit(
    backend: Backend,
    submissions: Sequence[Submission],
    *,
    reply_key: str = "",
    reply_ttl_s: int = REPLY_TTL_S,
    obsolete_replies: Sequence[str] = (),
) -> int:
    """Submit requests. Return how many were not pending already.

    `reply_key` is the key of the reply for `reply_ttl_s`, so that a repeated call with the same key submits
    nothing twice; empty for a new key. `obsolete_replies` are the keys of calls that will not be repeated.
    """
    rows = []
    for each in submissions:
        request_id, token, deadline = build_active_marker(each)
        rows.append(
            {
                "score": repr(float(each.score)),
                "member": each.member,
                "id": request_id,
                "token": token,
                "deadline": deadline,
            }
        )
    reply = await backend.run_script(
        "submit",
        {
            "reply_s": reply_ttl_s,
            "channel": backend.names.wake_channel,
            "requests": rows,
            "obsolete_replies": obsolete_replies,
        },
        keys={"REPLY": reply_key or backend.create_reply_key()},
        size_bytes=sum(len(each.member) for each in submissions),
    )
    added: int = reply.value
    return added


def build_active_marker(submission: Submission) -> tuple[str, str, int]:
    """Return the active marker of a submission: id, token and deadline. They are empty if it cannot be
    cancelled."""
    if not (submission.request_id and submission.request_token and submission.deadline):
        return "", "", 0
    if len(submission.request_token.encode(errors="surrogatepass")) > MAX_TOKEN_BYTES:
        return "", "", 0
    return submission.request_id, submission.request_token, submission.deadline


async def cancel_request(
    backend: Backend, request_id: str, request_token: str, foreign_token: bytes | str
) -> int:
    """Mark requests as cancelled. Return how many. `foreign_token` is what a producer of llm-d has left under
    the id."""
    reply = await backend.run_script(
        "cancel_request",
        {
            "channel": backend.names.wake_channel,
            "ttl_s": CANCEL_TTL_S,
            "request_id": request_id,
            "request_token": request_token,
            "foreign_token": foreign_token,
        },
    )
    cancelled_count: int = reply.value
    return cancelled_count


async def is_request_active(backend: Backend, request_id: str) -> bool:
    """Return whether a request of this id that can be cancelled waits or runs."""
    scripts = backend.scripts
    return bool(
        await scripts.call_with_retries(lambda: scripts.client.exists(backend.names.active_key(request_id)))
    )


@dataclass(frozen=True, slots=True)
class ResultBox:
    """Result list of one client, and its keys for the results that it has taken from the list."""

    result_list: str

    @property
    def kept_key(self) -> str:
        return f"{self.result_list}:{KEPT_SUFFIX}"

    @property
    def owner_key(self) -> str:
        return f"{self.result_list}:{OWNER_SUFFIX}"


@dataclass(frozen=True, slots=True)
class CollectReply:
    """Reply to one collection of results."""

    holder: str = ""
    """Client that takes the results instead, in which case nothing was done. Otherwise empty."""
    has_been_reset: bool = False
    """True if the kept results are not those that the client has seen, because Redis lost them or they
    expired."""
    last_number: int = 0
    """Highest number that was returned so far."""
    results: Sequence[tuple[int, bytes]] = ()


async def collect_results(
    scripts: ScriptRunner,
    box: ResultBox,
    *,
    client_id: str,
    owner_ttl_s: int,
    last_seen: int,
    acknowledged: Sequence[int] = (),
) -> CollectReply:
    """Take new results, and delete the acknowledged ones. `client_id` is empty if no other client shares the
    list."""
    reply = await scripts.run(
        "collect_results",
        {
            "client_id": client_id,
            "owner_ttl_s": owner_ttl_s,
            "last_seen": last_seen,
            "max_count": MAX_COLLECTED,
            "max_bytes": MAX_SCRIPT_BYTES,
            "kept_ttl_s": KEPT_TTL_S,
            "acknowledged": acknowledged,
        },
        keys={"LIST": box.result_list, "KEPT": box.kept_key, "OWNER": box.owner_key},
    )
    return _decode_collect(reply.value)


def _decode_collect(reply: Sequence[Any]) -> CollectReply:
    if len(reply) == 1:
        return CollectReply(holder=reply[0].decode(errors="replace"))
    _, has_been_reset, last, *rest = reply
    return CollectReply(
        has_been_reset=bool(has_been_reset),
        last_number=int(last),
        results=[(int(rest[at]), rest[at + 1]) for at in range(0, len(rest), 2)],
    )


async def wait_for_result(scripts: ScriptRunner, box: ResultBox, timeout_s: float) -> bool:
    """Wait until there is a result in the list, at most `timeout_s`. The result is moved from the end of the
    list to its end, so it stays there."""

    async def wait_for_element() -> bool:
        found = await scripts.client.execute_command(
            "BLMOVE", box.result_list, box.result_list, "RIGHT", "RIGHT", timeout_s
        )
        return found is not None

    return await scripts.call_with_retries(wait_for_element)


async def get_sweep_age_s(scripts: ScriptRunner, names: QueueNames) -> float | None:
    """Return the seconds since a dispatcher last swept the queue, in Redis time. `None` if none ever has."""
    tick_field = f"tick:{names.queue}"

    async def read_age() -> float | None:
        client: Any = scripts.client
        if (tick := await client.hget(names.control_key, tick_field)) is None:
            return None
        # Without a target, a Cluster would send TIME to all of its nodes.
        where = {"target_nodes": client.get_default_node()} if scripts.is_cluster else {}
        seconds, micros = await client.execute_command("TIME", **where)
        return max(0.0, int(seconds) + int(micros) / 1e6 - float(tick))

    return await scripts.call_with_retries(read_age)


async def get_last_kept_number(scripts: ScriptRunner, box: ResultBox) -> int:
    """Return the highest number of the kept results. 0 if there are none. Raises WrongKeyError if the key is
    no hash."""
    kind = (await scripts.call_with_retries(lambda: scripts.client.type(box.kept_key))).decode()
    if kind not in ("none", "hash"):
        raise WrongKeyError(f"{box.kept_key} holds a {kind}, not a hash")
    return int(await scripts.call_with_retries(lambda: scripts.client.hget(box.kept_key, "last")) or 0)


async def iterate_kept_results(scripts: ScriptRunner, box: ResultBox) -> AsyncIterator[tuple[int, bytes]]:
    """Yield all kept results, some of them perhaps twice."""
    cursor, count = 0, 1
    while True:
        scan = partial(scripts.client.hscan, box.kept_key, cursor, count=count)
        cursor, found = await scripts.call_with_retries(scan, size_bytes=MAX_SCRIPT_BYTES)
        # The sizes are not known in advance. Aim at about a megabyte per call.
        size = sum(map(len, found.values()))
        count = max(1, min(_MAX_SCANNED, 4 * count, MAX_SCRIPT_BYTES * max(1, len(found)) // (size + 1)))
        for name, result in found.items():
            if name.isdigit():  # the hash also has the fields `first` and `last`
                yield int(name), result
        if not cursor:
            return


async def read_kept_result(scripts: ScriptRunner, box: ResultBox, number: int) -> bytes | None:
    """Return one kept result. `None` if it is there no longer."""
    found: bytes | None = await scripts.call_with_retries(
        lambda: scripts.client.hget(box.kept_key, str(number))
    )
    return found


async def release_box_ownership(scripts: ScriptRunner, box: ResultBox, client_id: str) -> None:
    """Let another client of the name take the results from now on."""

    async def delete_if_owner() -> None:
        # One byte more than the name is read, to recognise a longer one.
        if await scripts.client.getrange(box.owner_key, 0, len(client_id)) == client_id.encode():
            await scripts.client.delete(box.owner_key)

    await scripts.call_with_retries(delete_if_owner)


async def delete_box(scripts: ScriptRunner, box: ResultBox) -> None:
    """Delete the list and the kept results."""
    await scripts.call_with_retries(lambda: scripts.client.delete(box.result_list, box.kept_key))
