"""Names of models: the model that a body requests, and answers that say that a model does not exist."""

from __future__ import annotations

import re
from urllib.parse import unquote

import msgspec

from dispatcher.common.printable import truncate_text
from dispatcher.requests.surrogates import replace_surrogates

_MAX_NAME_CHARS = 100
_MODEL_PATH = re.compile(r"/v[12]/models/([^/:]+)")
"""Path of the protocols of TensorFlow Serving and of KServe, which name the model there."""


def quote_model(model: str) -> str:
    """Return a model's name in quotes, shortened, for a sentence."""
    return repr(truncate_text(model, _MAX_NAME_CHARS))


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


def parse_model(payload: bytes) -> str:
    """Return the model that a body requests. Empty if there is none, or the value is not a name."""
    model = _decode_model(payload)
    if model is None:  # the decoder rejects lone surrogates, which may be elsewhere in the body
        model = _decode_model(replace_surrogates(payload))
    return model or ""


def find_model(payload: bytes, path: str) -> str:
    """Return the model that a request asks for: the one in its body, or in a path such as
    `/v2/models/m/infer` or `/v1/models/m:predict`. Empty if there is none."""
    if model := parse_model(payload):
        return model
    in_path = _MODEL_PATH.search(path)
    return unquote(in_path[1]) if in_path else ""


def _decode_model(text: bytes) -> str | None:
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
    error = answer.error if isinstance(answer.error, _ServerError) else answer
    if error.code == "model_not_found":
        return True
    if status != 404:
        return False
    # Match the whole name: a model named `m` is part of the word "model".
    name_match = re.search(rf"(?<![\w/.:-]){re.escape(model)}(?![\w/:-])", error.message)
    names_it = error.param == "model" or (name_match is not None and "model" in error.message.lower())
    return names_it and (error.type or "NotFoundError") in ("NotFoundError", "not_found_error", "Not Found")
