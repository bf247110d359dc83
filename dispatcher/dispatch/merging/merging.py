"""Merges requests into one call: groups them, creates the calls, and gives each request its part of the
answer.

    register    A request whose path has a rule becomes a `BatchMember`. If its body does not have the shape
                of the rule, it is sent as usual.
    group       Members with one key wait in a group until the grouping rule (grouping.py) sends the first
                ones.
    answer      The answer is split. If that fails, or the call was rejected, further attempts follow:

        2xx                      Each member gets its part. For the first calls, and for some later ones,
                                 items are also sent alone, and the answers compared before any is used.
        2xx that does not split  Each is sent alone; nothing of this model is merged any more.
        413, "batch too large"   Smaller calls, from now on too.
        other 4xx, too large     Two halves, down to the request that is the cause.
        5xx, no answer           Counts as a failed attempt for each. A request that failed once is sent
                                 alone, and none ends with an error before it was sent alone.
        429, no gateway          The same outcome for each.

    pieces      A list longer than the server accepts is sent in several calls, and answered once.

Nothing here waits or sends: times come in, attempts and completions go out. All members are leased by this
process already, and count in the limit.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from dispatcher.core.gateway.outcome import Delivered, Failed, TooLarge
from dispatcher.core.merging import shapes
from dispatcher.core.merging.merged_request import piece, together
from dispatcher.dispatch.in_flight import HeldLease, Try
from dispatcher.dispatch.merging.groups import Company
from dispatcher.dispatch.merging.merged_calls import (
    Answers,
    BatchItem,
    Bundle,
    CutList,
    Ends,
    FollowUp,
    PiecesDone,
    Proof,
    ServedModel,
    ServedModels,
    cut_list,
    joined,
    within,
)
from dispatcher.dispatch.options import Options
from dispatcher.telemetry.events import Event, emit

if TYPE_CHECKING:
    from dispatcher.core.merging.shapes import Part
    from dispatcher.core.requests.request import Request
    from dispatcher.ports import Forwarded

ALONE_MOST = 8192
"""Maximum number of requests that are remembered as to be sent alone."""


class Batching:
    """Merges the requests of one process."""

    def __init__(self, options: Options, rand: random.Random) -> None:
        self.company = Company()
        self.models = ServedModels(options.batching)
        self.calls: dict[str, int] = dict.fromkeys(("split", "halved", "unsplittable", "failed"), 0)
        """Number of merged calls by result."""
        self.requests = 0
        """Number of requests that were answered by merged calls."""
        self.checks: dict[str, int] = dict.fromkeys(("same", "differs", "unsure"), 0)
        """Number of single calls for parity checks, by result."""
        self._options = options
        self._random = rand
        self._items: dict[str, BatchItem] = {}
        """Members by the token of their lease."""
        self._bundles: dict[str, Bundle] = {}
        """Calls by the token of their attempt."""
        self._alone: OrderedDict[int, None] = OrderedDict()
        self._progress = PiecesDone()
        self._number = 0

    def reconfigure(self, options: Options) -> None:
        """Use new options. New rules start with nothing learned; waiting and running calls end by the old
        rules."""
        before, self._options = self._options, options
        if before.batching != options.batching:
            self.models = ServedModels(options.batching)

    # ── groups ───────────────────────────────────────────────────────────────────────────────────────────

    def read(self, held: HeldLease, request: Request) -> None:
        """Register a request that may be merged, or a list that may be too long. Requests of sequences are
        not merged, because the next one waits for their end."""
        if not self._options.batching or request.sequence is not None:
            return
        path = request.endpoint or self._options.path
        rule = self.models.rule(path)
        if rule is None:
            return
        part = shapes.read(rule.shape, request.payload)
        if isinstance(part, shapes.Unfit):
            return
        served = self.models.of(path, part.model, rule)
        headers = tuple(sorted(request.headers.items())) if request.headers else ()
        tenant = request.metadata.get(self._options.tenant_from, "")
        lease = held.lease
        self._items[lease.token] = BatchItem(
            held,
            request,
            part,
            served,
            # Everything that must be equal in one call is part of the key.
            (path, part.key, headers, tenant, request.version, request.endpoints),
            alone=held.probe or lease.lane is not None or lease.attempts > 0 or lease.entry in self._alone,
        )

    def item_of(self, held: HeldLease) -> BatchItem | None:
        """Return the member of a lease. `None` if no rule applies to it."""
        return self._items.get(held.lease.token)

    def forget(self, token: str) -> None:
        """Forget a lease that has ended."""
        self._items.pop(token, None)

    def gathers(self, held: HeldLease, now: float, left_s: float) -> bool:
        """Add the request to a batch group. Return False if no rule applies to it. `left_s` is the time to
        its deadline."""
        item = self._items.get(held.lease.token)
        if item is None:
            return False
        held.waits = True
        self.company.add(item, now, left_s)
        return True

    def formed(
        self, now: float, *, nobody_comes: bool, ours: Callable[[HeldLease], bool]
    ) -> tuple[list[Try], list[HeldLease]]:
        """Return attempts for the calls that are ready, and the leases that must not be sent.

        `is_complete` says that no other request can arrive soon. `is_lease_valid` checks that a lease is
        certainly still held.
        """
        batches, gone = self.company.formed(now, nobody_comes=nobody_comes, ours=ours)
        return [self._begin(items, most, again=False) for items, most in batches], gone

    def counts_one(self, formed: Try) -> bool:
        """Return True if the attempt counts one unit for any number of members."""
        return self._bundles[formed.token].items[0].served.rule.unit_per_call

    # ── creating attempts ────────────────────────────────────────────────────────────────────────────────

    def _begin(self, items: list[BatchItem], most: int, *, again: bool = True) -> Try:
        if len(items) > 1:
            return self._try(
                Bundle(items, most, again),
                together([item.request for item in items], [item.part for item in items]),
            )
        pieces = self._pieces(items[0])
        if pieces is not None:
            return self._next_piece(Bundle(items, most, again, pieces=pieces))
        return self._try(Bundle(items, most, again), items[0].request)

    def _try(self, bundle: Bundle, request: Request) -> Try:
        token = bundle.items[0].token
        if bundle.again:  # the token of the lease was used by the first attempt
            self._number += 1
            token = f"{token}.{self._number}"
        self._bundles[token] = bundle
        bundle.begins(bundle.items[0].served)
        return Try(token, request, [item.held for item in bundle.items], bundled=True, again=bundle.again)

    def _alone_again(self, items: Iterable[BatchItem], most: int) -> list[Try]:
        items = list(items)
        for item in items:
            self._remember_alone(item)
        return [self._begin([item], most) for item in items]

    def _halves(self, items: list[BatchItem], most: int) -> list[Try]:
        for item in items:
            self._remember_alone(item)  # it may return to the queue before the cause is known
        middle = (len(items) + 1) // 2
        return [self._begin(half, most) for half in (items[:middle], items[middle:])]

    def _remember_alone(self, item: BatchItem) -> None:
        self._alone[item.held.lease.entry] = None
        if len(self._alone) > ALONE_MOST:
            self._alone.popitem(last=False)

    # ── lists that are too long ──────────────────────────────────────────────────────────────────────────

    def _pieces(self, item: BatchItem) -> CutList | None:
        """Return the split list of a member. `None` if its list is not too long."""
        return self._progress.take(item) or cut_list(item)

    def _next_piece(self, bundle: Bundle) -> Try:
        pieces, (item,) = bundle.pieces, bundle.items
        assert pieces is not None  # noqa: S101 -- the call is a piece
        part = pieces.parts[len(pieces.bodies)]
        return self._try(bundle, piece(item.request, part))

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────

    def answered(self, tried: Try, seen: Forwarded) -> FollowUp:
        """Return how each lease of an attempt ends, and the attempts that follow."""
        bundle = self._ended(tried.token)
        return self._in_turn(bundle, self._came(bundle, tried, seen))

    def cut(self, tried: Try) -> FollowUp:
        """Handle an attempt whose answer is no longer awaited. A parity check may still need it."""
        if tried.token not in self._bundles:
            return FollowUp()
        bundle = self._ended(tried.token)
        if bundle.proof is None:
            return self._in_turn(bundle, FollowUp())
        # This member is completed elsewhere; the others still wait for the end of this check.
        bundle.proof.items = [each for each in bundle.proof.items if each is not bundle.items[0]]
        return self._in_turn(bundle, self._checked(bundle.proof, "unsure"))

    def unsent(self, tried: Try) -> FollowUp:
        """Handle a follow-up that could not start because the gate has closed."""
        bundle = self._ended(tried.token)
        if bundle.proof is not None:
            return self._in_turn(bundle, self._checked(bundle.proof, "unsure"))
        if bundle.pieces is not None:
            # The answers so far are kept, so that the next attempt continues with the next piece.
            self._progress.keep(bundle.items[0], bundle.pieces)
        return self._in_turn(bundle, FollowUp(back=list(tried.riders)))

    def _ended(self, token: str) -> Bundle:
        bundle = self._bundles.pop(token)
        bundle.items[0].served.under_way -= bundle.units
        return bundle

    def _in_turn(self, bundle: Bundle, follow: FollowUp) -> FollowUp:
        """Start follow-ups one after the other if a call counts one unit, because they have only that one."""
        if not bundle.items[0].served.rule.unit_per_call:
            return follow
        tries = follow.tries + bundle.then
        for first, *others in (tries,) if tries else ():
            self._bundles[first.token].then = others
        return FollowUp(follow.ends, tries[:1], follow.back)

    def _came(self, bundle: Bundle, tried: Try, seen: Forwarded) -> FollowUp:
        # Members whose lease left the attempt were completed then, and get no part of the answer.
        staying = {held.lease.token for held in tried.riders}
        items = [item for item in bundle.items if item.token in staying]
        if bundle.proof is not None:
            return self._compared(bundle, bundle.proof, items, seen)
        if bundle.pieces is not None:
            return self._piece_came(bundle, bundle.pieces, seen)
        if len(bundle.items) == 1:
            return self._single_came(bundle, seen)
        return self._merged_came(bundle, items, seen)

    def _merged_came(self, bundle: Bundle, items: list[BatchItem], seen: Forwarded) -> FollowUp:
        outcome, served = seen.outcome, bundle.items[0].served
        match outcome:
            case Delivered(status, body) if status < 300:
                parts = shapes.split([item.part for item in bundle.items], body)
                if isinstance(parts, shapes.Unfit):
                    self.calls["unsplittable"] += 1
                    many = f"{len(bundle.items)} requests"
                    self._off(served, f"the answer to {many} could not be split: {parts.why}")
                    return FollowUp(tries=self._alone_again(items, 1))
                self.calls["split"] += 1
                bundle.measured(seen.ended_at)
                answers = {
                    item.token: seen.but(outcome=Delivered(status, part))
                    for item, part in zip(bundle.items, parts, strict=True)
                }
                return self._believed(served, items, answers)
            case Delivered() | TooLarge():
                self.calls["halved"] += 1
                if self._learn([item.part for item in bundle.items], served, seen):
                    return FollowUp(tries=[self._begin(few, bundle.most) for few in within(served, items)])
                if len(items) > 1:
                    return FollowUp(tries=self._halves(items, bundle.most))
                return FollowUp(tries=self._alone_again(items, bundle.most))
            case Failed():
                self.calls["failed"] += 1
                return self._failed(items, seen)
            case _:
                return FollowUp([(item.held, seen) for item in items])

    def _failed(self, items: list[BatchItem], seen: Forwarded) -> FollowUp:
        """Count a failed attempt for each member, except for members that this would end: they are first sent
        alone."""
        last = self._options.retry.max_attempts
        ends: Ends = []
        alone = []
        for item in items:
            if item.held.lease.attempts + 1 >= last:
                alone.append(item)
            else:
                self._remember_alone(item)
                ends.append((item.held, seen))
        return FollowUp(ends, self._alone_again(alone, 1))

    def _learn(self, parts: list[Part], served: ServedModel, seen: Forwarded) -> bool:
        """Learn from an answer how much the server accepts. Return True if the answer was about the size."""
        outcome, size = seen.outcome, served.size
        if not isinstance(outcome, Delivered | TooLarge):
            return False
        items, tokens = sum(part.size for part in parts), sum(part.tokens for part in parts)
        before = size.takes, size.tokens
        learned = size.refused(outcome, items, tokens, seen.ended_at)
        if before != (size.takes, size.tokens):
            emit(Event.BATCHING_LIMIT, refused=items, **served.limits())
        return learned

    def _single_came(self, bundle: Bundle, seen: Forwarded) -> FollowUp:
        (item,), outcome = bundle.items, seen.outcome
        if isinstance(outcome, Delivered):
            if outcome.status < 300:
                bundle.measured(seen.ended_at)
            elif self._learn([item.part], item.served, seen):
                pieces = self._pieces(item)
                if pieces is not None:
                    return FollowUp(
                        tries=[self._next_piece(Bundle([item], bundle.most, True, pieces=pieces))]
                    )
            self._alone.pop(item.held.lease.entry, None)
        return FollowUp([(item.held, seen)])

    def _piece_came(self, bundle: Bundle, pieces: CutList, seen: Forwarded) -> FollowUp:
        (item,), outcome = bundle.items, seen.outcome
        if not isinstance(outcome, Delivered):
            self._progress.keep(item, pieces)
            return FollowUp([(item.held, seen)])
        if outcome.status < 300:
            pieces.bodies.append(outcome.body)
            if len(pieces.bodies) == len(pieces.parts):
                return FollowUp([(item.held, seen.but(outcome=joined(item, pieces, outcome.status)))])
        else:
            done = len(pieces.bodies)
            part = pieces.parts[done]
            if not self._learn([part], item.served, seen):
                return FollowUp([(item.held, seen)])  # an error of one piece is the answer to the list
            size = item.served.size
            # The answered pieces stay; only the rest is split again.
            pieces.parts[done:] = [
                each
                for left in pieces.parts[done:]
                for each in shapes.cut(left, size.takes or left.size, size.tokens)
            ]
        return FollowUp(tries=[self._next_piece(Bundle([item], bundle.most, True, pieces=pieces))])

    # ── parity checks ────────────────────────────────────────────────────────────────────────────────────

    def _believed(self, served: ServedModel, items: list[BatchItem], answers: Answers) -> FollowUp:
        # `None` asks for all members.
        wanted = served.size.to_check()
        chosen = items if wanted is None else self._random.sample(items, min(wanted, len(items)))
        if not chosen:
            return self._end(items, answers)
        proof = Proof(items, answers, len(chosen))
        return FollowUp(
            tries=[self._try(Bundle([item], 1, True, proof=proof), item.request) for item in chosen]
        )

    def _compared(self, bundle: Bundle, proof: Proof, items: list[BatchItem], seen: Forwarded) -> FollowUp:
        """Handle the answer of a single call of a parity check."""
        (item,) = bundle.items
        if not items:
            proof.items = [each for each in proof.items if each is not item]
        if not isinstance(seen.outcome, Delivered):
            return self._checked(proof, "unsure")
        proof.singles[item.token] = seen
        merged = proof.answers[item.token].outcome
        assert isinstance(merged, Delivered)  # noqa: S101 -- only answers are checked
        if seen.outcome.status != merged.status:
            why: str | None = f"a single call is answered {seen.outcome.status}"
        else:
            why = shapes.differs(item.part, merged.body, seen.outcome.body)
        proof.differs = proof.differs or why or ""
        return self._checked(proof, "differs" if why else "same")

    def _checked(self, proof: Proof, result: str) -> FollowUp:
        self.checks[result] += 1
        proof.checks -= 1
        # The answers are used only when all single calls agree.
        if proof.checks or not proof.items:
            return FollowUp()
        served = proof.items[0].served
        if not proof.differs:
            if proof.singles:
                served.size.same()
            return self._end(proof.items, proof.answers)
        self._off(served, f"a merged call was answered otherwise than single ones: {proof.differs}")
        asked = [item for item in proof.items if item.token in proof.singles]
        others = [item for item in proof.items if item.token not in proof.singles]
        ends = self._end(asked, proof.singles, merged=False).ends
        return FollowUp(ends, self._alone_again(others, 1))

    def _end(self, items: list[BatchItem], answers: Answers, *, merged: bool = True) -> FollowUp:
        self.requests += len(items) if merged else 0
        for item in items:
            self._alone.pop(item.held.lease.entry, None)
        return FollowUp([(item.held, answers[item.token]) for item in items])

    def _off(self, served: ServedModel, why: str) -> None:
        if not served.size.why_off:
            emit(Event.BATCHING_OFF, path=served.path, model=served.model, why=why)
        served.size.off(why)
