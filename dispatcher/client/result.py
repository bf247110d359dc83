"""What came of a request, and what is raised with it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from dispatcher.batched.errors import BatchError
from dispatcher.client.errors import NoResultError
from dispatcher.core.requests.answer_text import content
from dispatcher.core.requests.result import ErrorCode, PoppedResult
from dispatcher.core.requests.usage import tokens

_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens, as the answer's `usage` has them."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Both together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What came of one request: an answer of the gateway, or why there is none.

    `ok` tells which; `raise_for_status()` raises where it is no success.
    """

    id: str
    text: str
    """The body of the answer as it came; without one `{"error": …}`. `content` is the model's words."""
    status: int | None = None
    """The HTTP status of the last answer; None: there was none."""
    code: str = ""
    """Why the request failed: an error code of the queue contract; or, in streams and maps, NO_RESULT,
    HOOK_FAILED, INVALID_REQUEST of the client's own. Empty: it was answered."""
    message: str = ""
    """The same as a sentence."""
    note: str = ""
    """Said where `text` is not exactly what the gateway sent: bytes that are not UTF-8 were replaced."""
    error: BatchError | None = None
    """What the client met itself (`code` is one of its own), else None."""
    model_version: str = ""
    """The model that it was sent as, where the dispatcher chose it; else empty."""
    number: int = field(default=0, repr=False)
    """Where it is kept for this client; 0: nowhere."""

    @property
    def ok(self) -> bool:
        """It was answered, with a status below 400."""
        return not self.code and self.status is not None and self.status < 400

    def json(self) -> Any:
        """The body, decoded. Raises ValueError where it is no JSON."""
        try:
            return msgspec.json.decode(self.text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"the body of {self.id} is no JSON: {error}") from error

    @property
    def content(self) -> str | None:
        """The model's words: the first choice of a (chat) completion, the output text of a response. None for
        other answers, for calls of tools, and where it is not `ok`."""
        return content(self.text.encode(errors="replace")) if self.ok else None

    @property
    def usage(self) -> TokenUsage | None:
        """Tokens that the answer says it took; None where it says nothing of them."""
        came, went = tokens(self.text.encode(errors="replace")) if self.ok else (0, 0)
        return TokenUsage(came, went) if came or went else None

    def raise_for_status(self) -> Result:
        """This result where it is `ok`; else raises RequestFailedError, or one of its kinds."""
        if self.ok:
            return self
        if self.error is not None:
            raise self.error
        why = self.code or f"status {self.status}"
        told = self.message or self.text[:_SHOWN_CHARS]
        raise _KINDS.get(self.code, RequestFailedError)(f"{self.id}: {why}: {told}", self)


class HookError(BatchError):
    """`before` or `after` raised; the cause is what it raised."""

    result: Result | None = None
    """The answer that had come, where it was `after`."""


class RequestFailedError(BatchError):
    """A request that has no answer, or one with a status of 400 or more."""

    def __init__(self, message: str, result: Result) -> None:
        super().__init__(message)
        self.result = result

    @property
    def id(self) -> str:
        """Of the request."""
        return self.result.id

    @property
    def code(self) -> str:
        """Why there is no answer: an error code of the queue contract, or empty where there was one."""
        return self.result.code

    @property
    def status(self) -> int | None:
        """Of the last answer; None: there was none."""
        return self.result.status

    @property
    def body(self) -> str:
        """Of the last answer, or what was told instead."""
        return self.result.text


class RequestCancelledError(RequestFailedError):
    """Somebody cancelled it."""


class DeadlineExceededError(RequestFailedError):
    """Its deadline passed before it was answered."""


class SequenceError(RequestFailedError):
    """Its sequence did not let it go."""


class SequenceAbortedError(SequenceError):
    """An earlier request of its sequence has failed, or an operator gave the sequence up."""

    @property
    def cause(self) -> str:
        """How that one failed, or what the operator said."""
        return self.result.message


class SequenceDeniedError(SequenceError):
    """The request's sequence belongs to a producer with another secret, or with another result list."""


class SequenceEndedError(SequenceError):
    """Its sequence was over, and takes no more for now."""


class SequenceFullError(SequenceError):
    """Too many requests of its sequence waited. It may be sent again, with the same index."""


class SequenceIndexError(SequenceError):
    """Another request of its sequence has its index, or that one's turn has passed."""


_KINDS: Mapping[str, type[RequestFailedError]] = {
    ErrorCode.CANCELLED: RequestCancelledError,
    ErrorCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    ErrorCode.SEQUENCE_ABORTED: SequenceAbortedError,
    ErrorCode.SEQUENCE_DENIED: SequenceDeniedError,
    ErrorCode.SEQUENCE_ENDED: SequenceEndedError,
    ErrorCode.SEQUENCE_FULL: SequenceFullError,
    ErrorCode.SEQUENCE_INDEX: SequenceIndexError,
}


async def called(hook: Callable[..., Any], *arguments: Any) -> Any:
    """What a hook returns, plain function or coroutine function."""
    returned = hook(*arguments)
    return await returned if inspect.isawaitable(returned) else returned


def of_popped(popped: PoppedResult, number: int) -> Result:
    """A result as it lay in its list."""
    return Result(
        popped.id,
        popped.payload,
        popped.status_code,
        popped.error_code or "",
        popped.error_message or "",
        popped.payload_note or "",
        model_version=popped.model_version or "",
        number=number,
    )


def of_error(request_id: str, error: Exception) -> Result:
    """What a stream yields for an item that the client could not bring to an end."""
    if isinstance(error, HookError) and error.result is not None:
        return replace(error.result, code="HOOK_FAILED", message=str(error), error=error)
    code = "INVALID_REQUEST"
    if isinstance(error, NoResultError):
        code = "NO_RESULT"
    elif isinstance(error, HookError):
        code = "HOOK_FAILED"
    known = error if isinstance(error, BatchError) else None
    text = msgspec.json.encode({"error": str(error)}).decode()
    return Result(request_id, text, None, code, str(error), error=known)
