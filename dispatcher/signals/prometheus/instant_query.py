"""What Prometheus answers to a query, read by its types: any other shape is a sentence."""

from __future__ import annotations

from typing import Any

import msgspec

from dispatcher.signals.exposition import Sample


class QueryError(Exception):
    """The server refused a query or gave no usable answer; the message is a sentence."""

    def __init__(self, why: str, hint: str = "") -> None:
        super().__init__(why)
        self.hint = hint


class _VectorRow(msgspec.Struct):
    metric: dict[str, str]
    value: tuple[float, str]


class _MatrixRow(msgspec.Struct):
    metric: dict[str, str]
    values: list[tuple[float, str]]


class _QueryData(msgspec.Struct):
    resultType: str = "nothing"  # noqa: N815 -- Prometheus' name
    result: msgspec.Raw = msgspec.Raw(b"")


class _Document(msgspec.Struct):
    """An answer of the API, as far as it matters here."""

    status: str = ""
    error: str = ""
    warnings: list[str] | None = None
    data: _QueryData | None = None


_decode_document = msgspec.json.Decoder(_Document).decode
_decode_rows = msgspec.json.Decoder(list[_VectorRow]).decode
_decode_series = msgspec.json.Decoder(list[_MatrixRow]).decode


def vector(result: msgspec.Raw) -> list[Sample]:
    """The samples of an instant vector. Raises QueryError for any other shape."""
    if not bytes(result).lstrip().startswith(b"["):
        raise QueryError("the answer is not a list of samples")
    try:
        # As on a page, and not as Python has it, 1_0 is no number.
        return [
            Sample(row.metric.get("__name__", ""), row.metric, float(row.value[1].replace("_", "?")))
            for row in _decode_rows(result)
        ]
    except (ValueError, RecursionError) as error:  # of which msgspec's own, which say what is where
        why = f"not an instant vector: {str(error)[:200]}"
        raise QueryError(why, "signals.prometheus.queries") from None


def document(status: int, redirect: bool, body: bytes, result: str = "vector") -> dict[str, Any]:
    """The answer's document, where it is a whole and good one of that type: raw of an instant query, and
    read of a range query (a matrix). Raises QueryError where not."""
    if redirect:
        raise QueryError(f"HTTP {status}: a redirect, which is not followed", "signals.prometheus.url")
    try:
        said, shape = _decode_document(body), ""
    except (ValueError, RecursionError) as error:
        said, shape = _Document(), f" ({str(error)[:200]})"
    if status != 200:
        raise QueryError(f"HTTP {status}" + (f": {said.error[:300]}" if said.error else ""), _hint(status))
    if said.status != "success":
        raise QueryError(f"the answer is not Prometheus' JSON{shape}", "signals.prometheus.url")
    if said.warnings:
        raise QueryError(f"the answer may be partial: {said.warnings[0][:300]}")
    data = said.data or _QueryData()
    if data.resultType != result:
        what = "an instant vector" if result == "vector" else f"a {result}"
        why = f"the answer is {data.resultType[:40]}, not {what}"
        raise QueryError(why, "signals.prometheus.queries")
    if result == "matrix":
        return {"data": {"result": _matrix(data.result)}}
    return {"data": {"result": data.result}}


def _matrix(result: msgspec.Raw) -> list[dict[str, Any]]:
    try:
        return [msgspec.to_builtins(row) for row in _decode_series(result)]
    except (ValueError, RecursionError) as error:
        raise QueryError(f"not a matrix: {str(error)[:200]}") from None


def _hint(status: int) -> str:
    if status in (401, 403):
        return "signals.prometheus.token_file or signals.prometheus.headers (X-Scope-OrgID for a tenant)"
    if status in (404, 405):
        return "signals.prometheus.url: the address before /api/v1/query"
    if status in (400, 422):
        return "signals.prometheus.queries: each must be an instant vector; a number is vector(…)"
    return ""
