"""Results of requests, and the exceptions that carry one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from dispatcher.client.errors import NoResultError
from dispatcher.common.errors import BatchError
from dispatcher.requests.answer_text import extract_answer_text
from dispatcher.requests.usage import parse_token_usage
from dispatcher.wire_format import ErrorCode, PoppedResult

_MAX_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Numbers of tokens, from the field `usage` of the answer."""

    prompt_tokens: int
    """Number of tokens in the prompt."""
    completion_tokens: int
    """Number of generated tokens."""

    @property
    def total_tokens(self) -> int:
        """Sum of prompt tokens and completion tokens."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """Result of one request: the answer of the gateway, or the reason why there is none.

    `ok` is true if the request succeeded. `raise_for_status()` raises an exception if it did not.
    """

    id: str
    """Id of the request."""
    text: str
    """Body of the answer, unchanged. If there is no answer, `{"error": …}`. If `is_partial`, an answer with
    what was generated so far. For the generated text alone, use `content`."""
    status: int | None = None
    """HTTP status of the last answer, or `None` if there was no answer."""
    code: str = ""
    """Error code of the queue contract, or empty if the request was answered. Streams and maps also use
    NO_RESULT, HOOK_FAILED and INVALID_REQUEST for errors of the client itself."""
    message: str = ""
    """Description of the error as a sentence, or empty."""
    note: str = ""
    """Remark if `text` differs from the bytes that the gateway sent, because some were not valid UTF-8.
    Empty otherwise."""
    error: BatchError | None = None
    """Exception behind an error of the client itself (see `code`), or `None`."""
    model_version: str = ""
    """Name of the model version that the dispatcher chose for the request, or empty if it chose none."""
    slices: int = 1
    """Number of calls in which the answer was generated. More than 1 if the dispatcher sent the request in
    slices."""
    cached_tokens: int = 0
    """Number of tokens that the slices after the first one found in the prefix cache of the model server."""
    is_partial: bool = False
    """True if the request ended with an error after a part of its answer was generated. The result is then
    not `ok`, and `partial_content` is the text so far."""
    keep_number: int = field(default=0, repr=False)
    """Number of the result among the kept results of this client, or 0 if it is not kept."""

    @property
    def ok(self) -> bool:
        """True if the request was answered with a status below 400."""
        return not self.code and self.status is not None and self.status < 400

    def json(self) -> Any:
        """Return the decoded body. Raises ValueError if it is not JSON."""
        try:
            return msgspec.json.decode(self.text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"the body of {self.id} is no JSON: {error}") from error

    @property
    def content(self) -> str | None:
        """Generated text: the first choice of a completion or chat completion, or the output text of a
        response. `None` for other answers, for tool calls, and if the result is not `ok`."""
        return extract_answer_text(self.text.encode(errors="replace")) if self.ok else None

    @property
    def partial_content(self) -> str | None:
        """Text that was generated before the request ended with an error. `None` if the result is not
        `is_partial`."""
        return extract_answer_text(self.text.encode(errors="replace")) if self.is_partial else None

    @property
    def usage(self) -> TokenUsage | None:
        """Token usage that the answer reports, also if it is partial, or `None` if it reports none."""
        prompt_tokens, completion_tokens, _ = (
            parse_token_usage(self.text.encode(errors="replace")) if self.ok or self.is_partial else (0, 0, 0)
        )
        return TokenUsage(prompt_tokens, completion_tokens) if prompt_tokens or completion_tokens else None

    def raise_for_status(self) -> Result:
        """Return this result if it is `ok`. Raise RequestFailedError or one of its subclasses otherwise."""
        if self.ok:
            return self
        if self.error is not None:
            raise self.error
        why = self.code or f"status {self.status}"
        description = self.message or self.text[:_MAX_SHOWN_CHARS]
        raise _ERROR_CLASSES.get(self.code, RequestFailedError)(f"{self.id}: {why}: {description}", self)


class HookError(BatchError):
    """A hook (`before` or `after`) raised an exception, which is the `__cause__` of this one."""

    result: Result | None = None
    """Result of the request if the hook was `after`, else `None`."""


class RequestFailedError(BatchError):
    """The request has no answer, or its answer has a status of 400 or more."""

    def __init__(self, message: str, result: Result) -> None:
        super().__init__(message)
        self.result = result
        """Result of the request."""

    @property
    def id(self) -> str:
        """Id of the request."""
        return self.result.id

    @property
    def code(self) -> str:
        """Error code of the queue contract, or empty if the request was answered."""
        return self.result.code

    @property
    def status(self) -> int | None:
        """HTTP status of the last answer, or `None` if there was no answer."""
        return self.result.status

    @property
    def body(self) -> str:
        """Body of the last answer, or `{"error": …}` if there was no answer. If the result `is_partial`, an
        answer with what was generated so far."""
        return self.result.text


class RequestCancelledError(RequestFailedError):
    """The request was cancelled."""


class DeadlineExceededError(RequestFailedError):
    """The deadline of the request passed before it was answered."""


class SequenceError(RequestFailedError):
    """The request was not sent because of the state of its sequence."""


class SequenceAbortedError(SequenceError):
    """An earlier request of the sequence failed, or an operator aborted the sequence."""

    @property
    def cause(self) -> str:
        """Error of the earlier request, or the reason that the operator gave."""
        return self.result.message


class SequenceDeniedError(SequenceError):
    """The request's sequence belongs to a producer with another secret, or with another result list."""


class SequenceEndedError(SequenceError):
    """The sequence has ended, and accepts no further requests for now (`sequences.after_end`)."""


class SequenceFullError(SequenceError):
    """Too many requests of the sequence wait. The request may be submitted again with the same index."""


class SequenceIndexError(SequenceError):
    """Another request of the sequence has the same index, or the turn of that index has passed."""


_ERROR_CLASSES: Mapping[str, type[RequestFailedError]] = {
    ErrorCode.CANCELLED: RequestCancelledError,
    ErrorCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    ErrorCode.SEQUENCE_ABORTED: SequenceAbortedError,
    ErrorCode.SEQUENCE_DENIED: SequenceDeniedError,
    ErrorCode.SEQUENCE_ENDED: SequenceEndedError,
    ErrorCode.SEQUENCE_FULL: SequenceFullError,
    ErrorCode.SEQUENCE_INDEX: SequenceIndexError,
}


async def call_hook(hook: Callable[..., Any], *arguments: Any) -> Any:
    """Call a hook, which is a function or a coroutine function, and return its result."""
    returned = hook(*arguments)
    return await returned if inspect.isawaitable(returned) else returned


def result_from_popped(popped: PoppedResult, keep_number: int) -> Result:
    """Return the result for a decoded element of a result list."""
    return Result(
        popped.id,
        popped.payload,
        popped.status_code,
        popped.error_code or "",
        popped.error_message or "",
        popped.payload_note or "",
        model_version=popped.model_version or "",
        slices=max(1, popped.slices or 1),
        cached_tokens=popped.cached_tokens or 0,
        # The contract has an error in each partial result. A partial answer must never look like a whole one.
        is_partial=bool(popped.partial) and popped.error_code is not None,
        keep_number=keep_number,
    )


def result_from_error(request_id: str, error: Exception) -> Result:
    """Return the result that stands for an error of the client."""
    if isinstance(error, HookError) and error.result is not None:  # only the hook `after` failed
        return replace(error.result, code="HOOK_FAILED", message=str(error), error=error)
    code = "INVALID_REQUEST"
    if isinstance(error, NoResultError):
        code = "NO_RESULT"
    elif isinstance(error, HookError):
        code = "HOOK_FAILED"
    batch_error = error if isinstance(error, BatchError) else None
    text = msgspec.json.encode({"error": str(error)}).decode()
    return Result(request_id, text, None, code, str(error), error=batch_error)
