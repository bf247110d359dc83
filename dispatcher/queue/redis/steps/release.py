"""Return leased requests to the queue: release.lua."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dispatcher.common.value import Value
from dispatcher.queue.constants import LOST, REPLY_TTL_S
from dispatcher.queue.contract import ClaimResult, Release, SettleStatus
from dispatcher.queue.keys import MAX_TOKEN_BYTES, encode_key
from dispatcher.queue.redis.backend import Backend
from dispatcher.queue.redis.lua_scripts import get_feature_columns
from dispatcher.queue.redis.steps.common import ClaimOffer, decode_claim_result

_NO_EXTRA = get_feature_columns("releases")
_NO_CANCEL_KEY = b"", b""


class ReleaseReply(Value, frozen=True):
    statuses: list[SettleStatus]
    claim_result: ClaimResult | None = None
    """Requests that were claimed again, with neither member nor progress. `None` if nothing was offered, if
    none can be claimed again, or if the reply was lost."""


async def release(
    backend: Backend, releases: Sequence[Release], offer: ClaimOffer | None = None
) -> ReleaseReply:
    """Release requests. `offer` is one to claim requests again."""
    rows = [_describe_release(backend, each) for each in releases]
    reply = await backend.run_script(
        "release",
        {
            "reply_s": REPLY_TTL_S,
            "offer": None if offer is None else offer.describe(backend),
            "releases": rows,
        },
        keys={"REPLY": backend.create_reply_key()},
        size_bytes=sum([len(row["progress"]) for row in rows]),
    )
    now, claimed, *values = reply.value
    backend.observe_clock(reply, now)
    statuses = [SettleStatus.LOST if value == LOST else SettleStatus.DONE for value in values]
    if not isinstance(claimed, list):  # no offer, or the reply of a repeated call, which has only a number
        return ReleaseReply(statuses)
    return ReleaseReply(statuses, decode_claim_result(backend, reply, claimed))


def _describe_release(backend: Backend, release: Release) -> dict[str, Any]:
    progress, extra = release.stored_progress, release.extra
    request_id, token = _NO_CANCEL_KEY if extra is None else map(encode_key, release.cancel_key)
    # These are stored with the request, so they are left out if they are too long.
    if max(len(request_id), len(token)) > MAX_TOKEN_BYTES:
        request_id, token = _NO_CANCEL_KEY
    return {
        **_NO_EXTRA,
        "entry_id": release.lease.entry_id,
        "token": release.lease.token,
        "delay_s": f"{release.delay_s:.6f}",
        "failed_attempts": int(release.is_failed_attempt),
        "refusals": int(release.is_refusal),
        "undelivered": int(release.is_undelivered),
        "last_attempt": release.last_attempt,
        "new_score": "" if release.new_score is None else f"{release.new_score:.17g}",
        "has_progress": progress is not None,
        "progress": progress or b"",
        "can_be_claimed_again": release.can_be_claimed_again,
        "request_id": request_id,
        "request_token": token,
        **(extra.to_columns(backend.names) if extra is not None else {}),
    }
