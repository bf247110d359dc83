"""Names of models: the model that a body requests, and answers that say that a model does not exist."""

from __future__ import annotations

import re

import msgspec

from dispatcher.core.printable import shortened
from dispatcher.core.requests.surrogates import without_surrogates

_NAME_CHARS = 100


def quoted(model: str) -> str:
    """Return a model's name in quotes, shortened, for a sentence."""
    return repr(shortened(model, _NAME_CHARS))


class _ModelField(msgspec.Struct):
    model: str | None = None


class _ServerError(msgspec.Struct):
    message: str = ""
    type: str | None = None
    param: str | None = None
    code: int | str | None = None


class _ServerAnswer(msgspec.Struct):
    message: str = ""
    type: str | None = None
    param: str | None = None
    code: int | str | None = None
    error: _ServerError | str | None = None


_named = msgspec.json.Decoder(_ModelField)
_answer = msgspec.json.Decoder(_ServerAnswer)


def model_of(payload: bytes) -> str:
    """Return the model that a body requests. Empty if there is none, or the value is not a name."""
    model = _model_in(payload)
    if model is None:  # the decoder rejects lone surrogates, which may be elsewhere in the body
        model = _model_in(without_surrogates(payload))
    return model or ""


def _model_in(text: bytes) -> str | None:
    """Return the model. `None` if the body cannot be decoded."""
    try:
        return _named.decode(text).model or ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def says_no_model(status: int, body: bytes, model: str) -> bool:
    """Return whether an answer says that the model does not exist.

    vLLM and compatible servers answer 404 with type NotFoundError and param `model`, OpenAI answers with code
    `model_not_found`. Any other 404 may be about the request.
    """
    if status not in (400, 404) or not model:
        return False
    try:
        answer = _answer.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    said = answer.error if isinstance(answer.error, _ServerError) else answer
    if said.code == "model_not_found":
        return True
    if status != 404:
        return False
    # Match the whole name: a model named `m` is part of the word "model".
    stands = re.search(rf"(?<![\w/.:-]){re.escape(model)}(?![\w/:-])", said.message)
    names_it = said.param == "model" or (stands is not None and "model" in said.message.lower())
    return names_it and (said.type or "NotFoundError") in ("NotFoundError", "not_found_error", "Not Found")
