"""The section of /status about merged calls, and what verbs print of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dispatcher.telemetry.status import MAX_TABLE_ROWS, FeatureSection, FeatureStatus

if TYPE_CHECKING:
    from dispatcher.features.merging.merged_calls import MergeTarget
    from dispatcher.features.merging.merger import RequestMerger
    from dispatcher.kernel.context import KernelContext
    from dispatcher.limit.limiter import Limiter
    from dispatcher.requests.queue_counts import QueueCounts

MAX_LINES = 8
"""Maximum number of models with a line."""
MAX_PROBLEMS = 3
"""Maximum number of sentences about models whose requests are not merged any more."""


@dataclass(frozen=True, slots=True)
class MergeTargetStatus:
    """Merged calls of one path and model of a batching rule."""

    path: str = ""
    model: str = ""
    """Empty if the path has no model in its body."""
    shape: str = ""
    mode: str = ""
    size: int = 0
    """Number of items per call."""
    server_max_items: int | None = None
    gain: float | None = None
    checked_calls: int = 0
    off_reason: str | None = None
    """Reason why requests are not merged any more. `None` while they are."""
    sentence: str = ""
    """Summary of the other fields."""

    @property
    def name(self) -> str:
        """Model and path in words."""
        return f"{self.model} at {self.path}" if self.model else self.path


@dataclass(frozen=True, slots=True)
class BatchingStatus(FeatureSection):
    """State of merged calls in this process."""

    batching: Sequence[MergeTargetStatus] = ()
    batching_waiting: int = 0
    """Number of requests that wait for others to share a call."""
    batching_calls: Mapping[str, int] = field(default_factory=dict)
    """Merged calls by result."""
    batching_requests: int = 0
    """Number of requests that were answered by merged calls."""
    batching_checks: Mapping[str, int] = field(default_factory=dict)
    """Single calls that were made to check answers of merged calls, by result."""
    batching_timeouts: Mapping[str, int] = field(default_factory=dict)
    """Number of requests that this process claimed after the default timeout of their rule, by what happened
    to them: `reject`, `delay`."""

    def get_by_path_and_model(
        self, value: Callable[[MergeTargetStatus], float | None]
    ) -> Mapping[str, float]:
        """Return a value for each path and model for which it is known. Keys join both with a NUL byte."""
        values = {f"{each.path}\0{each.model}": value(each) for each in self.batching[:MAX_TABLE_ROWS]}
        return {name: known for name, known in values.items() if known is not None}

    def format_lines(self) -> Sequence[str]:
        """Return a line for each model.

        Models for which merging was switched off are listed with the problems instead.
        """
        merged = [each for each in self.batching if each.off_reason is None]
        lines = [f"Batching of {each.name}: {each.sentence}." for each in merged[:MAX_LINES]]
        more = len(merged) - len(lines)
        return [*lines, *([f"Batching of {more} more: see --json."] if more else [])]

    def list_problems(self) -> list[str]:
        """Return a sentence for each model for which merging was switched off."""
        ended = [each for each in self.batching if each.off_reason]
        sentences = [
            f"Batching has ended for {each.name}: {each.off_reason}" for each in ended[:MAX_PROBLEMS]
        ]
        more = len(ended) - len(sentences)
        return [*sentences, *([f"Batching has ended for {more} more models"] if more else [])]


SECTION = BatchingStatus


def build_status(
    context: KernelContext, merger: RequestMerger, now: float, counts: QueueCounts | None
) -> FeatureStatus:
    """Build the status of merged calls in this process."""
    section = BatchingStatus(
        batching=[build_target_status(target) for target in merger.targets],
        batching_waiting=len(merger.groups),
        batching_calls=dict(merger.call_counts),
        batching_requests=merger.merged_request_count,
        batching_checks=dict(merger.check_counts),
        batching_timeouts=dict(context.timeout_counts),
    )
    return FeatureStatus(section, _explain_call_counting(context.limiter, now), section.list_problems())


def build_target_status(target: MergeTarget) -> MergeTargetStatus:
    """Return what is merged and what is known."""
    size, gain = target.size, target.size.gain
    return MergeTargetStatus(
        path=target.path,
        model=target.model,
        shape=target.rule.shape.name,
        mode=str(size.mode),
        size=size.best_size,
        server_max_items=size.server_max_items,
        gain=None if gain is None else round(gain, 3),
        checked_calls=size.checked_calls,
        off_reason=size.off_reason or None,
        sentence=size.summary,
    )


def _explain_call_counting(limiter: Limiter, now: float) -> list[str]:
    """Return advice if readings count calls but a batching rule counts items."""
    counted = limiter.count_units_as_calls(now)
    if counted is None:
        return []
    units, calls = counted
    fewer = f"The metrics count calls: {units} units of this process are {calls} there"
    return [f"{fewer}. Set `unit: call` in batching.rules, and as many calls are sent as fit."]
