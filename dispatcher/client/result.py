"""What came of a request."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from dispatcher.client.errors import (
    BatchError,
    DeadlineExceededError,
    HookError,
    NoResultError,
    RequestCancelledError,
    RequestFailedError,
)
from dispatcher.core.result import PoppedResult
from dispatcher.core.usage import tokens

_SHOWN_CHARS = 200
_KINDS = {"CANCELLED": RequestCancelledError, "DEADLINE_EXCEEDED": DeadlineExceededError}


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
    """The body of the answer; without one `{"error": …}`."""
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


def of_popped(popped: PoppedResult, number: int) -> Result:
    """A result as it lay in its list."""
    return Result(
        popped.id,
        popped.payload,
        popped.status_code,
        popped.error_code or "",
        popped.error_message or "",
        popped.payload_note or "",
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
