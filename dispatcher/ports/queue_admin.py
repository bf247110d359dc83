"""The queue as producers and operators see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dispatcher.core.requests.found_request import FoundRequest, Looked, Whereabouts, Words
from dispatcher.core.requests.queue_counts import Counts
from dispatcher.core.requests.submission import Submission
from dispatcher.core.sequences.decisions import SequencePage
from dispatcher.core.sequences.turns import SequenceSeen, SequenceStatus
from dispatcher.ports.model_registry import ModelMarks


@dataclass(frozen=True, slots=True)
class Dead:
    """A request that was put aside."""

    entry: int
    member: bytes
    score: float
    reason: str
    died_at: float
    """Unix seconds."""
    deliveries: int
    attempts: int
    refusals: int
    losses: int


class Desk(Protocol):
    """The queue as producers and operators see it. Raises QueueUnavailableError like Queue."""

    async def submit(self, submissions: Sequence[Submission]) -> int:
        """Put them into the queue and wake the dispatchers; how many were not pending already."""
        ...

    async def cancel(self, request_id: str, request_token: str = "", *, found: bool = False) -> bool:
        """Have those cancelled that are active under the id, or the one with that token; False where there is
        none. `found`: it was seen in the queue with that token, whoever submitted it."""
        ...

    async def pause(self, by: str, why: str) -> None: ...

    async def resume(self) -> None: ...

    async def paused(self) -> tuple[str, str] | None:
        """Who paused it and why; None when nobody did."""
        ...

    async def peek(self, most: int) -> Sequence[tuple[float, bytes]]:
        """Score and member of the first that a claim would take, those of all lanes included (but for closed
        ones), in order."""
        ...

    async def lying(self, state: Whereabouts, most: int, after: str = "", *, whole: bool = False) -> Looked:
        """A page in order, by rank: what leaves meanwhile shifts it. `whole`: members with all bytes."""
        ...

    async def near(self, request_id: str, after: str = "") -> Looked:
        """A page of those that hold this id and are found at little cost: of our client, or leased."""
        ...

    async def search(
        self, words: Words, after: str = "", *, entries_only: bool = False, whole: bool = False
    ) -> Looked:
        """A page of a walk over all, or over those claimed at least once: those that hold of each word one
        spelling. What is in the queue all the while is found; some are met twice. `whole`: as in `lying`."""
        ...

    async def ahead(self, found: FoundRequest) -> int | None:
        """How many lie before it in line; None where it does not wait there (any more)."""
        ...

    async def restore(self, queue: str, requests: Sequence[FoundRequest]) -> int:
        """Take over requests found in that other queue, none of them leased, each to the place where it lay;
        how many are new. Each is taken over once in a week, however often it is handed in."""
        ...

    async def read_results(self, name: str, most: int, after: int = 0) -> Sequence[bytes]:
        """What lies in a result list behind so many, the oldest first, about 1 MB; nothing is taken."""
        ...

    async def take_result(self, name: str, result: bytes) -> bool:
        """Remove the oldest that equals it; False where it is gone."""
        ...

    async def counts(self) -> Counts: ...

    async def awaited(self) -> Mapping[str, int]:
        """As Queue.awaited."""
        ...

    async def model_marks(self) -> ModelMarks:
        """What owners and operators say of versions of models, as `Queue.marks` tells it; reads only."""
        ...

    async def label(self, family: str, label: str, version: str | None, who: str) -> bool:
        """Have the label mean that version of the family, whatever the settings say; None takes it back.
        False: there was none to take back. No name may have more than 256 bytes, and no more than 1,000
        labels are kept: CallRefusedError."""
        ...

    async def drain(self, model: str, who: str, why: str = "") -> None:
        """Have this version take nothing new; what runs goes on to its end. Bounds as those of `label`."""
        ...

    async def undrain(self, model: str) -> bool:
        """Take that back; False: it was not drained."""
        ...

    async def dead_list(self, most: int, after: int = 0) -> Sequence[Dead]:
        """The dead with an entry above `after`, by entry."""
        ...

    async def dead_newest(self, most: int) -> Sequence[Dead]:
        """Those with the highest entries, the highest first."""
        ...

    async def dead_requeue(self, entries: Sequence[int], deadline: int) -> int:
        """Accept them anew with this deadline (in the member and in the score, the priority kept)."""
        ...

    async def dead_purge(self, entries: Sequence[int] | None = None) -> int:
        """Forget them; None: all."""
        ...

    async def sequences(
        self, most: int, after: str = "", status: SequenceStatus | None = None
    ) -> SequencePage:
        """A page of a walk over about so many, in no order; of those, the ones with that status."""
        ...

    async def sequence(self, sequence_id: str) -> SequenceSeen | None:
        """Return one sequence with the first of its waiting requests. `None` if it is not known."""
        ...

    async def release_sequence(self, sequence_id: str) -> bool:
        """Let a sequence that is held go on with its next request. Return False if it is not held."""
        ...

    async def abort_sequence(self, sequence_id: str, why: str) -> bool:
        """Have the waiting and later requests of a sequence answered SEQUENCE_ABORTED, and say `why`.

        A running request goes on to its end. A sequence can be aborted before any request of it was claimed.
        Return False if the sequence was aborted before, or has ended.
        """
        ...

    async def cancel_sequence(self, sequence_id: str, at: float | None = None, for_s: float = ...) -> bool:
        """End a sequence. Its waiting requests are answered CANCELLED, and its running one is cancelled if
        its producer gave it a token.

        Requests that were submitted until `at` (Unix time; `None` for now, by the queue's clock) and are
        claimed within `for_s` are answered CANCELLED, too. Until the sequence is forgotten, these include
        requests that do not say when they were submitted. Requests that are submitted later begin the
        sequence anew. Return False if, as far as dispatchers know, the sequence has ended or is not there.
        """
        ...

    async def forget_sequence(self, sequence_id: str) -> bool | None:
        """Forget a sequence: its next index, and that it was aborted or has ended. Later requests begin it
        anew, except for those that were submitted before it was cancelled.

        Return False, and do nothing, if a request of it runs or waits. `None` if it is not known.
        """
        ...
