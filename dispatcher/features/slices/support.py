"""Knowledge about slicing on each model: whether the text is equal to that of one call, and the cost.

Producers choose the names of models and the `chat_template_kwargs` of their requests. The number of entries
is therefore bounded, and names and options that a producer invents do not displace what is known about the
requests of others (`SupportTable._find_evictable`). For the same reason, the answer to one request does not
decide how others are sent. It can only lead to another check of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from dispatcher.features.slices.eligibility import WholeReason
from dispatcher.features.slices.equality import Continuation, Difference, EqualityCheck
from dispatcher.features.slices.size import SizeEstimator

EQUAL_S = 6 * 3600.0
"""Time after which a model that was equal is checked again, because its server may have been replaced."""
UNEQUAL_S = 3600.0
"""Time after which a model that was not equal is checked again."""
DOUBT_S = 600.0
"""Time after a check of an equal model from which an answer that contradicts it leads to another check."""
UNDECIDED_S = 60.0
"""Time after which a check that has shown nothing is repeated."""
CERTAIN_TOKENS = 2048
"""Number of tokens of prompt and answer together that every server is assumed to accept."""
INTERRUPTED_S = 1.0
"""Time after which a check is repeated if one of its calls was refused, evicted or failed."""
KEPT_S = 60.0
"""Time for which the result of a check is never evicted."""
MAX_MODELS = 200
"""Largest number of entries."""
MAX_TEMPLATE_OPTIONS = 4
"""Largest number of entries of one model with `chat_template_kwargs`, besides the one without."""
MAX_KEY_BYTES = 4096
"""Size of a model's name and template options up to which they are remembered."""
MIN_CACHE_SAMPLES = 20
"""Number of continued slices after which the hits of the prefix cache are judged."""
MIN_CACHED_SHARE = 0.5
"""Smallest share of the prompt of a continued slice that must come from the prefix cache."""

ModelKey = tuple[str, str, bytes]
"""Path, model, and `chat_template_kwargs` as written. Empty if there are none."""


class Verdict(StrEnum):
    """Result of the last checks of a model."""

    EQUAL = "equal"
    UNEQUAL = "unequal"
    UNDECIDED = "undecided"
    """The checks have shown nothing so far."""
    UNCHECKED = "unchecked"
    """No check has ended."""


@dataclass(slots=True)
class ModelSupport:
    """Knowledge about one model."""

    continuation: Continuation | None = None
    """How its generations are continued. `None` if they are not."""
    reason: WholeReason | None = WholeReason.UNCHECKED
    """Reason why its requests are sent whole. `None` if they are sliced."""
    why: str = ""
    difference: Difference | None = None
    """Texts that were not equal in the last check."""
    is_new_message: bool = False
    """True if the server has answered with a new message instead of continuing the last one."""
    checked_at: float = float("-inf")
    """Time of the last check that has shown something."""
    check_at: float = 0.0
    """Time from which the model is checked (again)."""
    is_being_checked: bool = False
    interrupted: EqualityCheck | None = None
    """Check that ended early, because one of its calls had no final answer. The next check continues it."""
    request_count: int = 1
    """Number of requests that this entry was looked up for."""
    cache_samples: int = 0
    """Number of continued slices whose answers say how much of their prompt was cached."""
    cached_share: float = 0.0
    """Share of the prompt of continued slices that was in the prefix cache, as a moving average."""
    accepted_tokens: int = CERTAIN_TOKENS
    """Largest number of tokens of prompt and answer together that its servers are known to accept."""
    size: SizeEstimator = field(default_factory=SizeEstimator)

    @property
    def verdict(self) -> Verdict:
        match self.reason:
            case None | WholeReason.NOT_WORTH_IT:
                return Verdict.EQUAL
            case WholeReason.UNCHECKED:
                return Verdict.UNDECIDED if self.why else Verdict.UNCHECKED
            case _:
                return Verdict.UNEQUAL

    @property
    def has_verdict(self) -> bool:
        return self.reason is not WholeReason.UNCHECKED

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
    """Entries in the order of their last use."""

    def get_for_request(self, key: ModelKey) -> ModelSupport:
        """Return what is known about the model of a request, and count the request.

        A new entry takes the place of one without a verdict if the table is full. If all entries have a
        verdict, the new one is not remembered.
        """
        support = self._models.pop(key, None)
        if support is None:
            support = ModelSupport()
            self._remember(key, support, at=float("-inf"))
        else:
            support.request_count += 1
            self._models[key] = support
        return support

    def find_support(self, key: ModelKey) -> ModelSupport:
        """Return what is known about the model, without counting a request."""
        return self._models.get(key) or ModelSupport()

    def __iter__(self) -> Iterator[tuple[ModelKey, ModelSupport]]:
        return iter(self._models.items())

    def begin_check(self, key: ModelKey, at: float) -> EqualityCheck | None:
        """Return a check to run now. `None` if none is due, one is running, or there is no place for the
        model in the table."""
        support = self.find_support(key)
        if not support.is_check_due(at) or not self._remember(key, support, at):
            return None
        support.is_being_checked = True
        check, support.interrupted = support.interrupted, None
        if (
            check is not None
            and check.is_streamed == self.is_streamed
            and at < support.check_at + UNDECIDED_S
        ):
            return check
        path, model, template_options = key
        options = msgspec.Raw(template_options) if template_options else None
        return EqualityCheck(path, model, options, is_streamed=self.is_streamed)

    def _remember(self, key: ModelKey, support: ModelSupport, at: float) -> bool:
        """Add an entry, in the place of another one if there are too many. Return False if there is no
        place."""
        _, model, template_options = key
        if key in self._models:
            return True
        if len(model.encode(errors="replace")) + len(template_options) > MAX_KEY_BYTES:
            return False
        variants = [other for other in self._models if other[:2] == key[:2] and other[2]]
        has_many_variants = bool(template_options) and len(variants) >= MAX_TEMPLATE_OPTIONS
        if has_many_variants or len(self._models) >= MAX_MODELS:
            evicted = self._find_evictable(variants if has_many_variants else self._models, key, at)
            if evicted is None:
                return False
            del self._models[evicted]
        self._models[key] = support
        return True

    def _find_evictable(self, candidates: Iterable[ModelKey], key: ModelKey, at: float) -> ModelKey | None:
        """Return the entry to evict for a new one.

        Entries without a verdict go first, because names that do not exist have none. Entries that only one
        request has used are next, then entries with template options. Of several such entries, the least
        recently used one goes. An entry with template options never displaces the verdict of an entry
        without. Each verdict is kept for KEPT_S, so that requests which all have different options do not
        lead to a check each.
        """
        ranked = (
            ((support.has_verdict, support.request_count > 1, not other[2]), other)
            for other in candidates
            if not (support := self._models[other]).is_being_checked
            and (not support.has_verdict or at - support.checked_at >= KEPT_S)
            and (other[2] or not key[2] or not support.has_verdict)
        )
        # Entries are in the order of their last use, and `min` returns the first one of the lowest rank.
        return min(ranked, key=lambda each: each[0], default=(None, None))[1]

    def end_check(self, key: ModelKey, check: EqualityCheck, at: float) -> bool:
        """Record the result of a check. Return True if it changes whether requests are sliced."""
        support = self._models[key]  # it is not evicted during the check
        support.is_being_checked = False
        if check.next_body is not None:
            support.interrupted, support.check_at = check, at + INTERRUPTED_S
            return False
        if check.is_undecided:
            support.why, support.check_at = check.why, at + UNDECIDED_S
            return False
        before = support.reason
        support.continuation, support.why = check.continuation, check.why
        support.difference, support.is_new_message = check.difference, check.is_new_message
        support.reason = None if check.continuation is not None else check.reason
        support.checked_at, support.check_at = at, at + (UNEQUAL_S if support.reason else EQUAL_S)
        support.cache_samples = 0
        return support.reason is not before

    def record_doubt(self, key: ModelKey) -> None:
        """Let an equal model be checked again, because an answer has contradicted the last check.

        The request may be the cause, for example by a switch for reasoning in its text. The answer therefore
        decides nothing for other requests, and DOUBT_S limits how often it leads to a check.
        """
        support = self._models.get(key)
        if support is not None and support.reason is None:
            support.check_at = min(support.check_at, support.checked_at + DOUBT_S)

    def _stop_slicing(self, support: ModelSupport, why: str, at: float) -> None:
        """Send requests to the model whole from now on, because slices cost too much."""
        support.reason, support.why, support.check_at = WholeReason.NOT_WORTH_IT, why, at + UNEQUAL_S

    def record_duration(self, key: ModelKey, tokens: int, duration_s: float, at: float) -> bool:
        """Record the duration of a continued slice. Return True if requests to the model are sent whole from
        now on."""
        support = self._models.get(key)
        if support is None:
            return False
        support.size.record_slice(tokens, duration_s)
        if not self.judges_cost or not support.size.is_too_expensive or support.reason is not None:
            return False
        why = f"a continued slice takes {support.size.overhead_s:.3f} s to its first token"
        self._stop_slicing(support, why, at)
        support.size = SizeEstimator()  # measured again when the model is checked again
        return True

    def record_cached(self, key: ModelKey, cached_tokens: int, prompt_tokens: int, at: float) -> bool:
        """Record how much of the prompt of a continued slice was in the prefix cache. Return True if requests
        to the model are sent whole from now on."""
        support = self._models.get(key)
        if support is None:
            return False
        share = cached_tokens / prompt_tokens if prompt_tokens > 0 else 0.0
        support.cache_samples += 1
        weight = max(1 / support.cache_samples, 1 / MIN_CACHE_SAMPLES)
        support.cached_share += (share - support.cached_share) * weight
        is_wasteful = support.cache_samples >= MIN_CACHE_SAMPLES and support.cached_share < MIN_CACHED_SHARE
        if not self.judges_cost or not is_wasteful or support.reason is not None:
            return False
        why = f"only {support.cached_share:.0%} of the prompts of continued slices are in the prefix cache"
        self._stop_slicing(support, why, at)
        return True
