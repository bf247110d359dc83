"""Names of models: the one that a body asks for, and an answer that says that there is none such. Pure."""

from __future__ import annotations

import re

import msgspec

from dispatcher.core.printable import shortened
from dispatcher.core.requests.surrogates import without_surrogates

_NAME_CHARS = 100


def quoted(model: str) -> str:
    """A model's name, in a sentence."""
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
    """What a body asks for; empty: nothing, or what is no name."""
    model = _model_in(payload)
    if model is None:  # half a pair somewhere in it is no reason not to read the rest
        model = _model_in(without_surrogates(payload))
    return model or ""


def _model_in(text: bytes) -> str | None:
    """None: it cannot be read."""
    try:
        return _named.decode(text).model or ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def says_no_model(status: int, body: bytes, model: str) -> bool:
    """Whether an answer says that there is no such model: as vLLM and those who copy it do (404, of type
    NotFoundError, param `model`), or OpenAI (code `model_not_found`). Any other 404 may be of the request."""
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
    # As a word of its own: `m` is part of "model".
    stands = re.search(rf"(?<![\w/.:-]){re.escape(model)}(?![\w/:-])", said.message)
    names_it = said.param == "model" or (stands is not None and "model" in said.message.lower())
    return names_it and (said.type or "NotFoundError") in ("NotFoundError", "not_found_error", "Not Found")
