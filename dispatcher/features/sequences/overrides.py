"""Overrides of the settings of sequences (`sequences.models`), found by the model of a request."""

from __future__ import annotations

from msgspec import structs

from dispatcher.features.sequences.decisions import SequenceTerms
from dispatcher.requests.model_names import find_model
from dispatcher.requests.request import Request


def name_override(request: Request, terms: SequenceTerms, default_path: str) -> Request:
    """Return the request with the override for its model in its turn.

    `default_path` is the path of requests that name none. The body is only read if there are overrides and
    the request belongs to a sequence.
    """
    turn = request.extra
    if turn is None or not terms.overrides:
        return request
    override = terms.match_override(find_model(request.payload, request.endpoint or default_path))
    if override == turn.override:
        return request
    return structs.replace(request, extra=structs.replace(turn, override=override))
