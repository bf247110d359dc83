"""Stage that sends requests only if the KV memory of the pool has room for their tokens.

    claim    no more requests than the room has place for, by the mean of recent ones
    apply    weigh each claimed request; return to the queue what has no room
    learn    from the usage that each answer reports

A request without room returns to its place in the queue, and nothing is claimed until there is room for it,
so that smaller requests cannot overtake it for ever. If no other batch request is in flight anywhere, one
request is sent in any case, because the estimate may be wrong, and a request that is really too long gets its
answer from the model server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatcher.features.tokens.body_scan import scan_body
from dispatcher.features.tokens.estimator import CallTokens, TokenEstimator
from dispatcher.features.tokens.memory import KvMemory
from dispatcher.features.tokens.options import TokenOptions
from dispatcher.kernel.completions import build_return
from dispatcher.kernel.hooks import LeasePart
from dispatcher.kernel.queue_access import loop_time

if TYPE_CHECKING:
    from dispatcher.kernel.claimed_request import ClaimedRequest
    from dispatcher.kernel.context import KernelContext
    from dispatcher.kernel.in_flight import InFlightLease
    from dispatcher.limit.budget import KvUse

MAX_AGE_S = 10.0
"""Age of the newest reading of the KV memory from which nothing more is sent, if newer readings lack it."""
RETRY_S = 1.0
"""Time after which a request is claimed although there may be no room for it: the one that had none may be
gone, and others may be smaller than usual."""


class TokenBudget(LeasePart):
    """Counts the tokens of the requests of one process."""

    def __init__(self, context: KernelContext) -> None:
        self._context = context
        self._limiter = context.limiter
        self.memory = KvMemory()
        self.estimator = TokenEstimator()
        self.returned_count = 0
        """Number of times that a request returned to the queue because there was no room for its tokens."""
        self.needed: float | None = None
        """Tokens of the request that waits for room, or of a usual one before it was weighed. `None` if none
        waits."""
        self.leases: dict[str, CallTokens] = self.memory.calls
        self._kv_use: KvUse | None = None
        """Newest reading that was applied. `None` if tokens are not counted."""
        self._seen_use: KvUse | None = None
        """Newest reading that was looked at."""
        self._is_missing = False
        """True if the newest readings do not show the KV memory any more."""
        self._next_try_at = 0.0
        """Time from which a request is claimed that may have no room."""
        self.reconfigure()

    def reconfigure(self) -> None:
        self._options = self._context.options.of(TokenOptions)
        self._seen_use = None
        if not self._options.is_on:
            self._kv_use = self.needed = None

    # ── the room ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def problem(self) -> str:
        """Reason why nothing is sent, or why less is sent than the limit allows. Empty if there is none."""
        if self.is_reading_lost:
            return "the readings do not show the use of the KV memory any more"
        if self.needed is None:
            return ""
        room = max(0.0, self.compute_room())
        return (
            f"the KV memory has room for {room:,.0f} tokens, and the next request needs about "
            f"{self.needed:,.0f}"
        )

    def compute_room(self) -> float:
        """Return how many tokens more may be reserved now."""
        return self.memory.compute_room(self._limiter.other_owners_units)

    def plan_claim(self, max_count: int) -> int:
        """Return how many of `max_count` requests may be claimed."""
        if not self._options.is_on:
            return max_count
        if self._limiter.kv_use is not self._seen_use:
            self.apply_reading()
        if self._kv_use is None or max_count < 1:
            return max_count
        if self.is_reading_lost:
            return 0
        room = self.compute_room()
        usual = self.memory.mean_call if self.needed is None else self.needed
        if self._fits(usual, room):
            self.needed = None
            # Before the first request was weighed, it shows what the others are like.
            return min(max_count, max(1, int(room // usual)) if usual else 1)
        now = loop_time()
        if room <= 0 or now < self._next_try_at:
            self.needed = usual or None
            return 0
        self._next_try_at = now + RETRY_S
        self.needed = None
        return 1

    def _fits(self, tokens: float, room: float) -> bool:
        """Return whether a call may be sent: there is room for its tokens, or it is the only batch request
        and the pool is not full."""
        if tokens <= room:
            return True
        return room > 0 and not self.leases and not self._limiter.other_owners_units

    @property
    def is_reading_lost(self) -> bool:
        """True if readings do not show the KV memory any more, so that nothing is sent."""
        use = self._kv_use
        return use is not None and self._is_missing and loop_time() - use.closed_at > MAX_AGE_S

    def apply_reading(self) -> bool:
        """Apply the newest reading. Return False if tokens are not counted."""
        use = self._seen_use = self._limiter.kv_use
        if not self._options.is_on:
            return False
        capacity = 0.0 if use is None else self._get_capacity(use)
        if use is None or not (0.0 <= use.share < float("inf") and 0.0 < capacity < float("inf")):
            self._is_missing = True
            return self._kv_use is not None
        self._is_missing = False
        if use is self._kv_use:
            return True
        self._kv_use = use
        window = use.opened_at, use.closed_at
        self.memory.apply_reading(
            use.share * capacity,
            capacity,
            self._options.reserve,
            window,
            loop_time(),
            self._limiter.bound_other_owners(*window)[0],
        )
        return True

    def _get_capacity(self, use: KvUse) -> float:
        """Return the tokens of the whole KV memory. 0 if it is not known."""
        if self._options.per_endpoint is None:
            return use.capacity_tokens or 0.0
        return self._options.per_endpoint * (use.endpoints or 0.0)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────

    def look_up(self, requests: list[ClaimedRequest]) -> None:
        """Need nothing from the queue."""

    def apply(self, requests: list[ClaimedRequest]) -> list[ClaimedRequest]:
        """Return the requests for whose tokens there is room."""
        if self._kv_use is None:
            return requests
        now = loop_time()
        # Before the room, which depends on the mean of the requests if other dispatchers have some.
        calls = [self._estimate(claimed) for claimed in requests]
        self.memory.record_weights(calls)
        kept = []
        room = 0.0 if self.is_reading_lost else self.compute_room()
        for claimed, call in zip(requests, calls, strict=True):
            entry = claimed.entry
            tokens = call.prompt + call.output
            # A probe shows whether the gateway is back, and no other request is sent meanwhile.
            if entry.is_probe or tokens <= room or self._fits(tokens, room):
                self.memory.add_call(entry.lease.token, call, now)
                room -= tokens
                kept.append(claimed)
            else:
                if self.needed is None:
                    self.needed = tokens
                    self._next_try_at = now + RETRY_S
                self.returned_count += 1
                self._context.complete(build_return(entry.lease))
        return kept

    def _estimate(self, claimed: ClaimedRequest) -> CallTokens:
        """Return the estimated tokens of the next call for a request."""
        token, request, part = claimed.entry.lease.token, claimed.request, None
        for find in self._context.hooks.find_call_tokens:
            part = find(token) or part
        if part is not None and part[0] is not None:
            return CallTokens(part[0], part[1], part[1])
        path = request.endpoint or self._context.options.default_path
        call = self.estimator.estimate(scan_body(request.payload), path)
        if self._options.find_prompt is not None:
            factor, prompt = self._options.assumed_factor, self._options.find_prompt(request.payload)
            call = CallTokens(prompt * factor, call.output * factor, call.max_output)
        if part is not None:
            call.output = call.max_output = part[1]
            call.is_part = True
        return call

    def record_tokens(
        self, entry: InFlightLease, tokens_in: int, tokens_out: int, cached_tokens: int
    ) -> None:
        """Learn from the tokens that an answer reports. 0 stands for a missing number."""
        call = self.leases[entry.lease.token]
        call.generated = tokens_out
        self.estimator.learn(call, tokens_in, tokens_out, cached_tokens)

    def forget_lease(self, token: str) -> None:
        """Forget a lease that has ended."""
        self.memory.remove_call(token, loop_time())
