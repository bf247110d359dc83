"""Knowledge about slicing on each model: whether the text is equal to that of one call, and the cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from dispatcher.core.slices.eligibility import WholeReason
from dispatcher.core.slices.equality import Continuation, EqualityCheck
from dispatcher.core.slices.size import SizeEstimator

EQUAL_S = 6 * 3600.0
"""Time after which a model that was equal is checked again, because its server may have been replaced."""
UNEQUAL_S = 3600.0
"""Time after which a model that was not equal is checked again."""
UNDECIDED_S = 60.0
"""Time after which a check that has shown nothing is repeated."""
INTERRUPTED_S = 1.0
"""Time after which a check is repeated if one of its calls was refused, evicted or failed."""
MAX_MODELS = 200
"""Number of models that are known. Producers name models, so there must be a bound."""
MAX_TEMPLATE_OPTIONS = 4
"""Number of different `chat_template_kwargs` of one model that are known."""
MIN_CACHE_SAMPLES = 20
"""Number of continued slices after which the hits of the prefix cache are judged."""
MIN_CACHED_SHARE = 0.5
"""Smallest share of the prompt of a continued slice that must come from the prefix cache."""

ModelKey = tuple[str, str, bytes]
"""Path, model, and `chat_template_kwargs` as written."""


@dataclass(slots=True)
class ModelSupport:
    """Knowledge about one model."""

    continuation: Continuation | None = None
    """How its generations are continued. `None` if they are not."""
    reason: WholeReason | None = WholeReason.UNCHECKED
    """Reason why its requests are sent whole. `None` if they are sliced."""
    why: str = ""
    check_at: float = 0.0
    """Time from which the model is checked (again)."""
    is_being_checked: bool = False
    cache_samples: int = 0
    """Number of continued slices whose answers say how much of their prompt was cached."""
    cached_share: float = 0.0
    """Share of the prompt of continued slices that was in the prefix cache, as a moving average."""
    size: SizeEstimator = field(default_factory=SizeEstimator)

    def is_check_due(self, at: float) -> bool:
        return not self.is_being_checked and at >= self.check_at


@dataclass(slots=True)
class SupportTable:
    """All models of one process."""

    is_streamed: bool = False
    """True if slices ask for streams."""
    judges_cost: bool = True
    """True to send requests whole where slices find nothing in the prefix cache."""
    _models: dict[ModelKey, ModelSupport] = field(default_factory=dict)

    def get_support(self, key: ModelKey) -> ModelSupport:
        """Return what is known about the model. Nothing is remembered beyond the bounds of this module."""
        known = self._models.get(key)
        if known is not None:
            return known
        variants = sum(other[:2] == key[:2] for other in self._models)
        support = ModelSupport()
        if len(self._models) < MAX_MODELS and variants < MAX_TEMPLATE_OPTIONS:
            self._models[key] = support
        else:
            support.check_at = float("inf")
        return support

    def __iter__(self) -> Iterator[tuple[ModelKey, ModelSupport]]:
        return iter(self._models.items())

    def begin_check(self, key: ModelKey, at: float) -> EqualityCheck | None:
        """Return a check to run now. `None` if none is due, or one is running."""
        support = self.get_support(key)
        if not support.is_check_due(at):
            return None
        support.is_being_checked = True
        path, model, template_options = key
        options = msgspec.Raw(template_options) if template_options else None
        return EqualityCheck(path, model, options, is_streamed=self.is_streamed)

    def end_check(self, key: ModelKey, check: EqualityCheck | None, at: float) -> bool:
        """Record the result of a check, `None` if it was interrupted. Return True if it changes whether
        requests are sliced."""
        support = self.get_support(key)
        support.is_being_checked = False
        if check is None or check.is_undecided:
            support.check_at = at + (INTERRUPTED_S if check is None else UNDECIDED_S)
            support.why = check.why if check is not None else support.why
            return False
        before = support.reason
        support.continuation, support.why = check.continuation, check.why
        support.reason = None if check.continuation is not None else check.reason
        support.check_at = at + (UNEQUAL_S if support.reason else EQUAL_S)
        support.cache_samples = 0
        return support.reason is not before

    def record_reason(self, key: ModelKey, reason: WholeReason, why: str, at: float) -> None:
        """Send requests to the model whole from now on, for a reason that an answer has shown."""
        support = self.get_support(key)
        support.reason, support.why, support.check_at = reason, why, at + UNEQUAL_S

    def record_duration(self, key: ModelKey, tokens: int, duration_s: float, at: float) -> bool:
        """Record the duration of a continued slice. Return True if requests to the model are sent whole from
        now on."""
        support = self.get_support(key)
        support.size.record_slice(tokens, duration_s)
        if not self.judges_cost or not support.size.is_too_expensive or support.reason is not None:
            return False
        why = f"a continued slice takes {support.size.overhead_s:.3f} s to its first token"
        self.record_reason(key, WholeReason.NOT_WORTH_IT, why, at)
        support.size = SizeEstimator()  # measured again when the model is checked again
        return True

    def record_cached(self, key: ModelKey, cached_tokens: int, prompt_tokens: int, at: float) -> bool:
        """Record how much of the prompt of a continued slice was in the prefix cache. Return True if requests
        to the model are sent whole from now on."""
        support = self.get_support(key)
        share = cached_tokens / prompt_tokens if prompt_tokens > 0 else 0.0
        support.cache_samples += 1
        weight = max(1 / support.cache_samples, 1 / MIN_CACHE_SAMPLES)
        support.cached_share += (share - support.cached_share) * weight
        is_wasteful = support.cache_samples >= MIN_CACHE_SAMPLES and support.cached_share < MIN_CACHED_SHARE
        if not self.judges_cost or not is_wasteful or support.reason is not None:
            return False
        why = f"only {support.cached_share:.0%} of the prompts of continued slices are in the prefix cache"
        self.record_reason(key, WholeReason.NOT_WORTH_IT, why, at)
        return True
