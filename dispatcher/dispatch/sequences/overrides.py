"""Overrides of the settings of sequences (`sequences.models`), found by the model of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from dispatcher.core.models.names import find_model

if TYPE_CHECKING:
    from dispatcher.core.requests.request import Request
    from dispatcher.dispatch.options import Options


def name_override(request: Request, options: Options) -> Request:
    """Return the request with the override for its model in its turn. The body is only read if there are
    overrides and the request belongs to a sequence."""
    turn, terms = request.sequence, options.sequences.terms
    if turn is None or not terms.overrides:
        return request
    override = terms.match_override(find_model(request.payload, request.endpoint or options.default_path))
    if override == turn.override:
        return request
    return structs.replace(request, sequence=structs.replace(turn, override=override))
