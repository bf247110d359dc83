"""How the last tries of one process went: one sentence where a good part of them failed. Pure.

A gateway that answers 500 to everything is there, so the gate stays open, and meanwhile all requests wait for
a retry: without this nobody would say that it is the gateway. Only kinds of failure are kept, which are few:
never what the gateway said.
"""

from __future__ import annotations

from collections import Counter, deque

from dispatcher.core.outcome import Delivered, Failed, Outcome, TooLarge, Unreachable

KEPT = 20
"""So many tries are looked at: as many that succeed, and what was before is forgotten."""
RECENT_S = 300.0
"""A try that ended longer ago says nothing of now."""
LEAST = 3
"""Fewer failures are nobody's concern, even of few tries."""
PART = 0.25
"""The least share of failures that is told: five of twenty, which one failure in a hundred never comes to."""
TOLD_MOST = 3
"""Kinds that are named, the most frequent first."""
KINDS = {
    "no connection": "no connection",
    "no answer within ": "no answer in time",
    "the answer (": "answer broken off",
    "the dispatcher failed": "a defect of the dispatcher",
}
"""Where no whole answer came: how the outcome's words begin, and what that is called."""
RESET = "connection reset"


class RecentTries:
    """Those of one process, the newest last."""

    __slots__ = ("_ended",)

    def __init__(self) -> None:
        self._ended: deque[tuple[float, str]] = deque(maxlen=KEPT)
        """When, and its kind of failure; empty: it was answered."""

    def ended(self, at: float, outcome: Outcome, status: int | None) -> None:
        """Count a try that has ended. `status` is the status of the gateway's answer, if there was one.

        Some outcomes are not counted: a refusal for overload, which the closed gate reports; an eviction,
        which is no failure; and a request that was not sent, or waits for its model, because it says nothing
        about the gateway.
        """
        match outcome:
            case Delivered() | TooLarge():
                self._ended.append((at, ""))
            case Failed(why=why) | Unreachable(why=why):
                self._ended.append((at, _kind(why) if status is None else str(status)))
            case _:
                pass

    def problem(self, now: float) -> str | None:
        """`Of the last 20 tries 20 failed: 500 (18), connection reset (2), the newest 4 s ago`; None: too few
        of them did, or none ended lately."""
        recent = [each for each in self._ended if now - each[0] < RECENT_S]
        failed = [each for each in recent if each[1]]
        if len(failed) < max(LEAST, PART * len(recent)):
            return None
        kinds = Counter(kind for _, kind in failed).most_common()
        told = [f"{kind} ({count})" for kind, count in kinds[:TOLD_MOST]]
        if more := sum(count for _, count in kinds[TOLD_MOST:]):
            told.append(f"others ({more})")
        newest_s = max(0.0, now - max(at for at, _ in failed))
        whole = f"Of the last {len(recent)} tries {len(failed)} failed"
        return f"{whole}: {', '.join(told)}, the newest {newest_s:.0f} s ago"


def _kind(why: str) -> str:
    """One of a few: what follows our words may be the peer's."""
    for begins, kind in KINDS.items():
        if why.startswith(begins):
            return kind
    return RESET if RESET in why else "no answer"
