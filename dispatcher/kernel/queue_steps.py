"""Steps of the loop at the queue, and what failed calls mean for the gate. Pure: nothing here calls the
queue.

A failed call closes the gate. What opens it again depends on the kind of the step:

    optional    any call that succeeds. If the step fails again after that, the gate stays open.
    repeated    if the queue was unreachable, any call of a step that is not optional. A read that works does
                not prove that writes work: a full or read-only Redis answers reads. If only this call was
                refused, its own success. The loop repeats the call while the gate is closed.
    claiming    the same, but the loop does not repeat a refused call while the gate is closed. Therefore the
                gate opens for another try after a pause that grows.

No failure keeps the gate closed for longer than `MAX_HOLD_S` unless it happens again, because a step that has
nothing left to do is not repeated and could never clear its failure. A reply that was not understood may
concern a single request, so it keeps the gate closed only for the pauses of a claiming step.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum, auto
from typing import NamedTuple

PAUSE_S = (0.5, 10.0)
"""Shortest and longest pause after which a refused claiming step is tried again. It doubles each time in a
row."""
MAX_HOLD_S = 60.0
"""Longest time for which a refused repeated step keeps the gate closed. The loop repeats it more often."""


class StepKind(Enum):
    """Role of a step, which decides what opens the gate after a failure."""

    OPTIONAL = auto()
    """Requests can be claimed, sent and settled without it."""
    REPEATED = auto()
    """The loop repeats it until it succeeds, even while the gate is closed."""
    CLAIMING = auto()
    """It belongs to a claim, and is not called while the gate is closed."""


class FailureCause(Enum):
    """Reason why a call failed."""

    UNREACHABLE = auto()
    """The queue could not be reached, or takes no calls of this kind now, so that all of them fail."""
    REFUSED = auto()
    """Only this call was refused."""
    NOT_UNDERSTOOD = auto()
    """The call raised an exception that no queue should raise."""


class Step(Enum):
    """Kind of call to the queue. Those of the kernel are in `QueueStep`; a feature has its own."""

    def __init__(self, _name: str, kind: StepKind) -> None:
        # Without names, steps of the same kind would be aliases of one member.
        self.kind = kind


class QueueStep(Step):
    """Each kind of call that the kernel makes."""

    COUNT = "count", StepKind.OPTIONAL
    TAKE_SNAPSHOT = "take snapshot", StepKind.OPTIONAL
    FIND_OVERDUE = "find overdue", StepKind.OPTIONAL
    SETTLE_UNLEASED = "settle unleased", StepKind.OPTIONAL
    WAIT_FOR_WORK = "wait for work", StepKind.OPTIONAL
    SWEEP = "sweep", StepKind.REPEATED
    RENEW = "renew", StepKind.REPEATED
    SHARE = "share", StepKind.REPEATED
    SETTLE = "settle", StepKind.REPEATED
    RELEASE = "release", StepKind.REPEATED
    MOVE_TO_DEAD_LETTERS = "move to dead letters", StepKind.REPEATED
    CLAIM = "claim", StepKind.CLAIMING
    PROBE = "probe", StepKind.CLAIMING
    SET_UNITS = "set units", StepKind.CLAIMING


class CallFailure(NamedTuple):
    """Failure of the last call of a step."""

    why: str
    cause: FailureCause
    until: float
    """Time until which only the success of the same step clears the failure."""


class StepFailures:
    """Steps that failed last time."""

    def __init__(self) -> None:
        self.streaks: Counter[Step] = Counter()
        """Number of failures of each step since its last success. Empty if all calls succeed."""
        self._failures: dict[Step, CallFailure] = {}
        """Failures that keep the gate closed."""

    @property
    def problem(self) -> str | None:
        """Newest failure that keeps the gate closed, as a sentence. `None` if there is none."""
        return next(reversed(self._failures.values())).why if self._failures else None

    def count_failure(self, step: Step) -> bool:
        """Count a failed call. Return True if it closes the gate."""
        self.streaks[step] += 1
        # If another call has succeeded since an optional step began to fail, its failure affects no request.
        return step.kind is not StepKind.OPTIONAL or self.streaks[step] == 1 or step in self._failures

    def record_failure(self, step: Step, cause: FailureCause, why: str, at: float) -> None:
        """Record a failed call that closes the gate."""
        if cause is FailureCause.UNREACHABLE or step.kind is StepKind.OPTIONAL:
            hold_s = 0.0
        elif cause is FailureCause.REFUSED and step.kind is StepKind.REPEATED:
            hold_s = MAX_HOLD_S
        else:
            hold_s = min(PAUSE_S[0] * 2.0 ** min(self.streaks[step] - 1, 10), PAUSE_S[1])
        self._failures.pop(step, None)  # the newest failure is the last one
        self._failures[step] = CallFailure(why, cause, at + hold_s)

    def get_cause(self, step: Step) -> FailureCause | None:
        """Return why the last call of a step failed. `None` if its failure does not keep the gate closed."""
        return self._failures[step].cause if step in self._failures else None

    def record_success(self, step: Step, at: float) -> bool:
        """Record a call that succeeded. Return True if there were failures that kept the gate closed."""
        # A Counter allows deleting a key that it does not have.
        del self.streaks[step]
        if not self._failures:
            return False
        self._failures.pop(step, None)
        proves_writes = step.kind is not StepKind.OPTIONAL
        self._failures = {
            other: failure
            for other, failure in self._failures.items()
            if failure.until > at or (other.kind is not StepKind.OPTIONAL and not proves_writes)
        }
        return True
