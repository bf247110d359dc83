"""The section of /status about slices, and what verbs print of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dispatcher.common.printable import truncate_text
from dispatcher.features.slices.counts import SliceCounts
from dispatcher.features.slices.eligibility import CHAT_SUFFIX, WholeReason
from dispatcher.features.slices.options import SliceOptions
from dispatcher.telemetry.status import FeatureSection, FeatureStatus

if TYPE_CHECKING:
    from dispatcher.features.slices.slicer import Slicer
    from dispatcher.features.slices.support import ModelKey, ModelSupport
    from dispatcher.kernel.context import KernelContext
    from dispatcher.requests.queue_counts import QueueCounts

MAX_STATUS_MODELS = 50
MAX_LINES = 8
"""Maximum number of models with a line."""
MAX_EXPLAINED_MODELS = 2
"""Maximum number of models for which `explain` says why their requests are not sliced."""
MAX_NAME_CHARS = 100
"""Maximum number of characters that a sentence has of the name of a model."""


@dataclass(frozen=True, slots=True)
class SlicedModelStatus:
    """Knowledge about slices of one model."""

    path: str = ""
    model: str = ""
    has_template_options: bool = False
    """True for the requests with one value of `chat_template_kwargs`, False for those without."""
    verdict: str = ""
    """Result of the last check: `equal`, `unequal`, `undecided` if it has shown nothing, or `unchecked`."""
    continued_by: str = ""
    """How its generations are continued: by `token ids` or by `text`. Empty if they are not."""
    whole_reason: str = ""
    """Reason why its requests are sent whole. Empty if they are sliced."""
    why: str = ""
    """The reason in a sentence, if there is more to say."""
    whole_text: str = ""
    """Part of the text of the check that was generated in one call, from shortly before the first difference.
    Empty if no texts differed."""
    sliced_text: str = ""
    """The same part of the text that was generated in slices."""
    remedy: str = ""
    """Change after which its requests could be sent in slices. Empty if they are, or if none is known."""
    slice_tokens: int | None = None
    """Number of tokens of a slice. `None` if it is that of the settings."""
    overhead_s: float | None = None
    """Measured time to the first token of a continued slice."""
    cached_share: float | None = None
    """Share of the prompts of continued slices that is in the prefix cache."""

    @property
    def name(self) -> str:
        """Model and path in words."""
        options = " with chat_template_kwargs" if self.has_template_options else ""
        return f"{self.model or 'no model'} at {self.path}{options}"

    @property
    def sentence(self) -> str:
        """Verdict, reason, texts and remedy, without the end of the sentence."""
        if not self.whole_reason:
            size = "" if self.slice_tokens is None else f", {self.slice_tokens:,} tokens each"
            cached = (
                ""
                if self.cached_share is None
                else f", {self.cached_share:.0%} of the prompts from the prefix cache"
            )
            return f"{self.verdict}, continued by {self.continued_by}{size}{cached}"
        reason = "" if self.whole_reason in (self.verdict, "unchecked") else f", {self.whole_reason}"
        texts = f' (whole: "{self.whole_text}", in slices: "{self.sliced_text}")' if self.whole_text else ""
        why = f": {self.why}{texts}" if self.why else ""
        remedy = f". Remedy: {self.remedy}" if self.remedy else ""
        return f"none, {self.verdict}{reason}{why}{remedy}"


@dataclass(frozen=True, slots=True)
class SlicingStatus(FeatureSection):
    """State of the slices."""

    slicing_mode: str = ""
    """Setting `slicing.mode`."""
    started: int | None = None
    """Number of pending requests with a part of the answer from earlier slices."""
    call_s: float | None = None
    """Mean duration of the last answered calls of this process. A slice is a call. `None` if it is not known
    yet."""
    slices: Mapping[str, int] = field(default_factory=dict)
    """Answers to slices in this process by what followed: `continued`, `finished`, `restarted`."""
    slice_tokens: int = 0
    """Tokens that slices have generated."""
    revoked_slices: int = 0
    """Slices that were ended early, because realtime requests waited."""
    whole_requests: Mapping[str, int] = field(default_factory=dict)
    """Long generations that were sent whole in this process, by the reason."""
    sliced_models: Sequence[SlicedModelStatus] = ()

    def format_lines(self) -> Sequence[str]:
        """Return a line for each model."""
        lines = [f"Slices of {each.name}: {each.sentence}." for each in self.sliced_models[:MAX_LINES]]
        more = len(self.sliced_models) - len(lines)
        return [*lines, *([f"Slices of {more} more: see --json."] if more else [])]

    def explain(self) -> Sequence[str]:
        """Return a sentence for each model whose requests are sent whole after a check."""
        whole = [each for each in self.sliced_models if each.whole_reason and each.why]
        sentences = [f"Slices of {each.name}: {each.sentence}." for each in whole[:MAX_EXPLAINED_MODELS]]
        more = len(whole) - len(sentences)
        return [*sentences, *([f"Slices of {more} more: see `batch-dispatcher status`."] if more else [])]

    def explain_whole_requests(self) -> str:
        """Return why long generations are sent whole. Empty if no setting or model is the reason."""
        if self.slicing_mode == "off":
            return "slicing.mode is off"
        whole = [each for each in self.sliced_models if each.whole_reason not in ("", WholeReason.UNCHECKED)]
        if not whole:
            return ""
        more = f", and those for {len(whole) - 1} more" if len(whole) > 1 else ""
        name = truncate_text(whole[0].name, MAX_NAME_CHARS)
        return f"requests for {name}{more} are not sent in slices: {whole[0].whole_reason}"


SECTION = SlicingStatus


def build_status(
    context: KernelContext, slicer: Slicer, now: float, counts: QueueCounts | None
) -> FeatureStatus:
    """Build the status of the slices of this process."""
    # Models that are not sliced come first, and the most recently used first among equals. Those without a
    # verdict come last, because producers can invent their names, and these must not hide the others.
    models = [*slicer.support]
    models.reverse()
    models.sort(key=lambda each: (not each[1].has_verdict, each[1].reason is None))
    call_s = context.limiter.mean_duration_s
    section = SlicingStatus(
        slicing_mode=_get_mode(context.options.of(SliceOptions)),
        started=counts.of(SliceCounts).started if counts else None,
        call_s=round(call_s, 3) if call_s else None,
        slices=dict(slicer.answer_counts),
        slice_tokens=slicer.generated_tokens,
        revoked_slices=slicer.revoked_count,
        whole_requests={str(reason): count for reason, count in slicer.whole_counts.items()},
        sliced_models=[
            build_model_status(key, support, support.size.size if slicer.measures_size else None)
            for key, support in models[:MAX_STATUS_MODELS]
        ],
    )
    return FeatureStatus(section, long_call_reason=section.explain_whole_requests())


def _get_mode(options: SliceOptions) -> str:
    return "off" if not options.is_on else "auto" if options.judges_cost else "on"


def build_model_status(
    key: ModelKey, support: ModelSupport, slice_tokens: int | None = None
) -> SlicedModelStatus:
    """Return the status of a model. `slice_tokens` is `None` if the settings say it."""
    path, model, template_options = key
    return SlicedModelStatus(
        path=path,
        model=model,
        has_template_options=bool(template_options),
        verdict=str(support.verdict),
        continued_by=str(support.continuation or ""),
        whole_reason=str(support.reason or ""),
        why=support.why,
        whole_text=support.difference.whole if support.difference else "",
        sliced_text=support.difference.sliced if support.difference else "",
        remedy=_suggest_remedy(path, support),
        slice_tokens=slice_tokens,
        overhead_s=None if support.size.overhead_s is None else round(support.size.overhead_s, 4),
        cached_share=round(support.cached_share, 3) if support.cache_samples else None,
    )


def _suggest_remedy(path: str, support: ModelSupport) -> str:
    """Return a change after which the requests for a model could be sent in slices. Empty if they are sliced,
    or if no remedy is known."""
    is_chat = path.endswith(CHAT_SUFFIX)
    match support.reason:
        case WholeReason.UNEQUAL if support.is_new_message:
            return (
                "serve the model with a server that continues a last message of the assistant "
                "(continue_final_message: vLLM, SGLang), or send completions instead of chats"
            )
        case WholeReason.UNEQUAL if is_chat:
            return (
                "use a chat template that leaves the last message as it is, or send completions to a server "
                "that returns token ids (vLLM)"
            )
        case WholeReason.UNEQUAL:
            return "use a server that returns token ids (return_token_ids: vLLM)"
        case WholeReason.REASONING:
            return "switch reasoning off in the requests, or run the server without a parser for reasoning"
        case WholeReason.BODY if is_chat:
            return "use a server that knows add_generation_prompt and continue_final_message (vLLM, SGLang)"
        case WholeReason.NOT_WORTH_IT:
            return (
                "switch the prefix cache of the servers on, and set sequences.header if slices reach other "
                "servers; slicing.mode: on slices at any cost"
            )
        case _:
            return ""
