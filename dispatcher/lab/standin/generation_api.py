"""Completions and chat completions of the stand-in with generated text, in the format of vLLM.

Names and places of the fields follow vLLM 0.11 and later: `return_token_ids` adds `token_ids` to each
choice; `prompt_token_ids` is a field of the choice of a completion, and of the answer to a chat completion.
In a stream the ids of the prompt are in the first chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from dispatcher.lab.standin.generation import (
    END,
    MAX_TOKEN_BYTES,
    ROLES,
    THINK_END_TEXT,
    THINK_START,
    VOCABULARY_SIZE,
    Generation,
    encode_text,
    generate_text,
    is_thinking,
)
from dispatcher.lab.standin.model import TOKEN_S, compute_work_s

_DEFAULT_MAX_TOKENS = 16
_SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "bad_words", "allowed_token_ids"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "response_format", "structured_outputs"),
)
"""Fields that change the generated text, so that a continuation that loses one of them shows."""
_UNSUPPORTED_FIELDS = (
    *("echo", "suffix", "logprobs", "prompt_logprobs", "use_beam_search", "prompt_embeds", "tools"),
    *("min_tokens", "stop_token_ids", "include_stop_str_in_output", "truncate_prompt_tokens"),
)
"""Fields that are rejected unless they are false, since ignoring them would yield a wrong answer."""
_OPENAI_FIELDS = frozenset(
    (
        *(
            "model",
            "prompt",
            "messages",
            "max_tokens",
            "max_completion_tokens",
            "stop",
            "stream",
            "user",
            "n",
        ),
        *("stream_options", "best_of", "echo", "suffix", "logprobs", "top_logprobs", "logit_bias", "seed"),
        *("temperature", "top_p", "presence_penalty", "frequency_penalty", "response_format", "tools"),
        *("tool_choice", "parallel_tool_calls", "reasoning_effort", "metadata", "store", "service_tier"),
    )
)


class GenerationConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Behaviour of servers that generate text depending on all text before it."""

    merged_tokens: bool = False
    """True if some tokens stand for several bytes, and generated text may be tokenized into other tokens than
    those that it was generated of."""
    end_probability: float = 0.01
    """Probability that the text ends at a character."""
    replaces_incomplete: bool = False
    """True to write U+FFFD for characters that the begin or the end of the text cuts. Otherwise their bytes
    are withheld at the end, and a text begins with a complete character if its prompt ends inside it."""
    trims_content: bool = False
    """True if the chat template removes white space at the begin and end of each message."""
    ignores_continue: bool = False
    """True to ignore `continue_final_message` and always begin a new message."""
    ignores_last_answer: bool = False
    """True to ignore a last message of the assistant, too, and answer the message before it again. Simulators
    of model servers do this."""
    rejects_unknown_fields: bool = False
    """True to reject requests with fields that the OpenAI API does not have."""
    no_token_ids: bool = False
    """True to ignore `return_token_ids`."""
    reasoning: Literal["", "reasoning_content", "reasoning"] = ""
    """Field of a chat message in which the reasoning is returned. Empty if the model does not reason."""
    context_length: int = 32_768
    """Maximum number of tokens of a prompt and its answer together."""
    prefix_cache: bool = True
    """True if each server keeps the tokens that it has processed, so that they take no time again."""
    chunk_tokens: int = 4
    """Number of tokens of each chunk of a stream."""


class InvalidRequestError(Exception):
    """Error for a request that the server rejects with 400."""

    def build_body(self) -> str:
        error = {"message": str(self), "type": "BadRequestError", "param": None, "code": 400}
        return msgspec.json.encode({"error": error}).decode()


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _ContentPart(msgspec.Struct):
    text: str
    type: Literal["text"] = "text"


class _Message(msgspec.Struct):
    role: str
    content: str | list[_ContentPart] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class _Body(msgspec.Struct):
    model: str = "m"
    prompt: str | list[int | str] | None = None
    messages: list[_Message] = []
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    ignore_eos: bool = False
    return_token_ids: bool | None = None
    add_generation_prompt: bool | msgspec.UnsetType = msgspec.UNSET
    continue_final_message: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Valid request for a completion or a chat completion."""

    config: GenerationConfig
    is_chat: bool
    model: str
    prompt: Sequence[int]
    max_tokens: int
    stop: Sequence[str]
    sampling: bytes
    """Parameters that change the generated text, as JSON."""
    ignores_end: bool
    returns_token_ids: bool
    is_stream: bool
    includes_usage: bool

    def generate_answer(self, cached_tokens: int, cold_s: float = 0.0) -> GeneratedAnswer:
        """Generate the answer of a server that has kept this many tokens of the prompt, and needs `cold_s`
        before it begins."""
        config = self.config
        generation = generate_text(
            self.model,
            self.prompt,
            max_tokens=self.max_tokens,
            stop=self.stop,
            sampling=self.sampling,
            end_probability=0.0 if self.ignores_end else config.end_probability,
            merged_tokens=config.merged_tokens,
            replaces_incomplete=config.replaces_incomplete,
        )
        return GeneratedAnswer(self, generation, cached_tokens, cold_s)


def parse_request(body: bytes, *, is_chat: bool, config: GenerationConfig) -> GenerationRequest:
    """Parse a request, or raise InvalidRequestError with the reason in the words of the real servers."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Any])
        found = msgspec.convert(fields, _Body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequestError(str(error)) from None
    _check_fields(fields, found, config)
    prompt = _apply_template(found, config) if is_chat else _parse_prompt(found, config)
    stop = [found.stop] if isinstance(found.stop, str) else found.stop or []
    if "" in stop:
        raise InvalidRequestError("stop cannot contain an empty string.")
    sampling = {name: fields[name] for name in _SAMPLING_FIELDS if fields.get(name) is not None}
    return GenerationRequest(
        config=config,
        is_chat=is_chat,
        model=found.model,
        prompt=prompt,
        max_tokens=_compute_max_tokens(found, fields, is_chat, len(prompt), config.context_length),
        stop=stop,
        sampling=msgspec.json.encode(sampling, order="deterministic"),
        ignores_end=found.ignore_eos,
        returns_token_ids=bool(found.return_token_ids) and not config.no_token_ids,
        is_stream=bool(found.stream),
        includes_usage=found.stream_options is not None and found.stream_options.include_usage,
    )


def _check_fields(fields: Mapping[str, Any], found: _Body, config: GenerationConfig) -> None:
    if config.rejects_unknown_fields:
        for name in fields:
            # `sim` is for the stand-in, not for the server that it plays.
            if name not in _OPENAI_FIELDS and name != "sim":
                raise InvalidRequestError(f"Unrecognized request argument supplied: {name}")
    # A `logprobs` of 0 asks for the log probabilities of the generated tokens only.
    wanted = [name for name in _UNSUPPORTED_FIELDS if fields.get(name)]
    if wanted or type(fields.get("logprobs")) is int:
        raise InvalidRequestError(f"`{[*wanted, 'logprobs'][0]}` is not supported by this server.")
    if any(number not in (None, 1) for number in (found.n, found.best_of)):
        raise InvalidRequestError("Only one answer is supported by this server: `n` and `best_of` must be 1.")
    if found.stream_options is not None and not found.stream:
        raise InvalidRequestError("Stream options can only be defined when `stream=True`.")


def _parse_prompt(found: _Body, config: GenerationConfig) -> list[int]:
    prompt = found.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if not prompt:
        raise InvalidRequestError("Either prompt or prompt_embeds must be provided and non-empty.")
    if isinstance(prompt, str):
        return _encode_text(prompt, config)
    tokens = [token for token in prompt if isinstance(token, int)]
    if len(tokens) < len(prompt):
        raise InvalidRequestError("Only one prompt is supported by this server.")
    if min(tokens) < 0 or max(tokens) >= VOCABULARY_SIZE:
        wrong = next(token for token in tokens if not 0 <= token < VOCABULARY_SIZE)
        raise InvalidRequestError(f"Token id {wrong} is out of vocabulary")
    return tokens


def _encode_text(text: str, config: GenerationConfig) -> list[int]:
    # No more than is needed to see that the text is too long, as in vLLM.
    limit = MAX_TOKEN_BYTES * (config.context_length + 1)
    return encode_text(text[:limit], merged_tokens=config.merged_tokens)


def _apply_template(found: _Body, config: GenerationConfig) -> list[int]:
    """Return the tokens of a chat: role, text and end of each message, then the role of the answer."""
    if not found.messages:
        raise InvalidRequestError("`messages` must not be empty.")
    messages = found.messages
    if config.ignores_last_answer and messages[-1].role == "assistant":
        messages = messages[:-1]
    ignores_continue = config.ignores_continue or config.ignores_last_answer
    continues = found.continue_final_message and not ignores_continue
    # Both are checked as in vLLM: its own check misses the default, which the template then rejects.
    if continues and found.add_generation_prompt is True:
        raise InvalidRequestError(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        )
    if continues and found.add_generation_prompt is msgspec.UNSET:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt are not compatible. Use "
            "continue_final_message when you want the model to continue the final message, and "
            "add_generation_prompt when you want to add a header that will prompt it to start a new "
            "assistant message instead."
        )
    tokens: list[int] = []
    for message in messages:
        if message.role not in ROLES:
            raise InvalidRequestError(f"Unexpected message role: {message.role}")
        text = message.text.strip() if config.trims_content else message.text
        tokens += [ROLES[message.role], *_encode_text(text, config), END]
    if continues:
        tokens.pop()
    elif found.add_generation_prompt is not False or ignores_continue:
        tokens.append(ROLES["assistant"])
        if config.reasoning:
            tokens.append(THINK_START)
    return tokens


def _compute_max_tokens(
    found: _Body, fields: Mapping[str, Any], is_chat: bool, prompt_tokens: int, context_length: int
) -> int:
    limit = found.max_tokens
    if is_chat:
        limit = found.max_tokens if found.max_completion_tokens is None else found.max_completion_tokens
    elif "max_tokens" not in fields:
        limit = _DEFAULT_MAX_TOKENS
    if limit is not None and limit < 1:
        raise InvalidRequestError(f"max_tokens must be at least 1, got {limit}.")
    wanted = limit or 1
    if prompt_tokens + wanted > context_length:
        # The prompt may be longer: its length is only known up to the limit.
        counted = min(prompt_tokens, max(0, context_length - wanted) + 1)
        raise InvalidRequestError(
            f"This model's maximum context length is {context_length} tokens. However, you requested "
            f"{wanted} output tokens and your prompt contains at least {counted} input tokens, for a total "
            f"of at least {counted + wanted} tokens. Please reduce the length of the input prompt or the "
            "number of requested output tokens."
        )
    return context_length - prompt_tokens if limit is None else limit


@dataclass(frozen=True, slots=True)
class Event:
    """Server-sent event of a stream."""

    tokens: int
    """Number of generated tokens after which it is sent."""
    data: bytes


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """Generated answer to a request, and the work that it takes."""

    request: GenerationRequest
    generation: Generation
    cached_tokens: int
    """Number of tokens of the prompt that the server had kept."""
    cold_s: float

    @property
    def token_count(self) -> int:
        """Number of generated tokens."""
        return len(self.generation.token_ids)

    @property
    def work_s(self) -> float:
        """Duration in an empty pool."""
        context = len(self.request.prompt) - self.cached_tokens
        return self.cold_s + compute_work_s(context, self.token_count)

    def compute_share(self, tokens: int) -> float:
        """Return the share of the duration after which this many tokens are generated."""
        return 1.0 - TOKEN_S * (self.token_count - tokens) / self.work_s

    def count_tokens(self, share: float) -> int:
        """Return the number of tokens that are generated after this share of the duration."""
        missing = (1.0 - share) * self.work_s / TOKEN_S
        return max(0, min(self.token_count, int(self.token_count - missing)))

    def list_tokens(self, count: int) -> list[int]:
        """Return the tokens that a server has processed after it generated `count` tokens. The last of them
        is only processed for the next one."""
        return [*self.request.prompt, *self.generation.token_ids[: max(0, count - 1)]]

    def build_body(self, id_: str, created: int) -> bytes:
        """Build the complete answer."""
        request, generation = self.request, self.generation
        choice = self._build_choice(generation.token_ids, is_last=True)
        answer: dict[str, Any] = {
            **self._build_head(id_, created, ""),
            "choices": [choice],
            "usage": self._usage,
        }
        if request.is_chat:
            content, reasoning = self._split_text(len(generation.text))
            choice["message"] = {"role": "assistant", "content": content or (None if reasoning else "")}
            if request.config.reasoning:
                choice["message"][request.config.reasoning] = reasoning or None
        else:
            choice["text"] = generation.text
        if request.returns_token_ids:
            (answer if request.is_chat else choice)["prompt_token_ids"] = request.prompt
        return msgspec.json.encode(answer)

    def build_events(self, id_: str, created: int) -> Iterator[Event]:
        """Yield the events of a streamed answer."""
        request, count = self.request, self.token_count
        head = self._build_head(id_, created, ".chunk")
        if request.includes_usage:
            head["usage"] = None
        step = max(1, request.config.chunk_tokens)
        ends = [*range(step, count, step), count]
        ids: dict[str, Any] = {"prompt_token_ids": request.prompt} if request.returns_token_ids else {}
        if request.is_chat:
            choice = {**self._build_choice([], is_last=False), "delta": {"role": "assistant", "content": ""}}
            yield Event(ends[0], msgspec.json.encode({**head, "choices": [choice], **ids}))
            ids = {}
        begin, sent = 0, 0
        for end in ends:
            shown = self._count_shown(end)
            choice = self._build_choice(self.generation.token_ids[begin:end], is_last=end == count) | ids
            if request.is_chat:
                choice["delta"] = self._build_delta(sent, shown)
            else:
                choice["text"] = self.generation.text[sent:shown]
            yield Event(end, msgspec.json.encode({**head, "choices": [choice]}))
            begin, sent, ids = end, shown, {}
        if request.includes_usage:
            yield Event(count, msgspec.json.encode({**head, "choices": [], "usage": self._usage}))
        yield Event(count, b"[DONE]")

    def _build_head(self, id_: str, created: int, suffix: str) -> dict[str, Any]:
        object_ = "chat.completion" + suffix if self.request.is_chat else "text_completion"
        return {"id": id_, "object": object_, "created": created, "model": self.request.model}

    def _build_choice(self, tokens: Sequence[int], *, is_last: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "logprobs": None,
            "finish_reason": self.generation.finish_reason if is_last else None,
            "stop_reason": self.generation.stop_reason if is_last else None,
        }
        if self.request.returns_token_ids:
            choice["token_ids"] = tokens
        return choice

    @property
    def _usage(self) -> dict[str, Any]:
        prompt_tokens = len(self.request.prompt)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.token_count,
            "total_tokens": prompt_tokens + self.token_count,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def _count_shown(self, tokens: int) -> int:
        """Return how many characters of the text a stream has shown after this many tokens."""
        text, lengths = self.generation.text, self.generation.lengths
        if tokens == self.token_count:
            return len(text)
        # Characters that may turn out to begin a stop string are held back.
        held = max((len(each) for each in self.request.stop), default=1) - 1
        return max(0, min(lengths[tokens - 1] - held, len(text)))

    def _split_text(self, shown: int) -> tuple[str, str]:
        """Return the content and the reasoning within the first `shown` characters of the text."""
        text = self.generation.text
        if not self.request.config.reasoning or not is_thinking(self.request.prompt):
            return text[:shown], ""
        end = text.find(THINK_END_TEXT)
        if end < 0:
            return "", text[:shown]
        return text[end + len(THINK_END_TEXT) : shown], text[: min(end, shown)]

    def _build_delta(self, sent: int, shown: int) -> dict[str, str]:
        """Return the part of a message between the character `sent` and the character `shown` of the text."""
        content, reasoning = self._split_text(shown)
        old_content, old_reasoning = self._split_text(sent)
        delta = {"content": content[len(old_content) :]}
        if self.request.config.reasoning and len(reasoning) > len(old_reasoning):
            delta[self.request.config.reasoning] = reasoning[len(old_reasoning) :]
        return delta
