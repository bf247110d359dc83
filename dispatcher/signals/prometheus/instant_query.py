"""Parse the answers of Prometheus' query API. An answer of another shape is a QueryError."""

from __future__ import annotations

from typing import Any

import msgspec

from dispatcher.signals.exposition import Sample


class QueryError(Exception):
    """The server rejected a query or gave no usable answer. The message is a sentence.

    `status` is the status of the answer, if that is what is wrong with it.
    """

    def __init__(self, why: str, hint: str = "", status: int | None = None) -> None:
        super().__init__(why)
        self.hint = hint
        self.status = status


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
    """The parts of an API answer that are used here."""

    status: str = ""
    error: str = ""
    warnings: list[str] | None = None
    data: _QueryData | None = None


_decode_document = msgspec.json.Decoder(_Document).decode
_decode_rows = msgspec.json.Decoder(list[_VectorRow]).decode
_decode_series = msgspec.json.Decoder(list[_MatrixRow]).decode


def parse_vector(result: msgspec.Raw) -> list[Sample]:
    """Return the samples of an instant vector. Raises QueryError for any other shape."""
    if not bytes(result).lstrip().startswith(b"["):
        raise QueryError("the answer is not a list of samples")
    try:
        # Python accepts 1_0 as a number; Prometheus' format does not.
        return [
            Sample(row.metric.get("__name__", ""), row.metric, float(row.value[1].replace("_", "?")))
            for row in _decode_rows(result)
        ]
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors and name the place
        why = f"not an instant vector: {str(error)[:200]}"
        raise QueryError(why, "signals.prometheus.queries") from None


def parse_document(
    status: int, is_redirect: bool, body: bytes, result_type: str = "vector"
) -> dict[str, Any]:
    """Return the document of an answer in the form that the client library reads.

    The result of an instant query stays raw; that of a range query (a matrix) is parsed. Raises QueryError if
    the answer is incomplete, reports an error or has another type.
    """
    if is_redirect:
        raise QueryError(f"HTTP {status}: a redirect, which is not followed", "signals.prometheus.url")
    try:
        answer, shape = _decode_document(body), ""
    except (ValueError, RecursionError) as error:
        answer, shape = _Document(), f" ({str(error)[:200]})"
    if status != 200:
        raise QueryError(
            f"HTTP {status}" + (f": {answer.error[:300]}" if answer.error else ""),
            _choose_hint(status),
            status,
        )
    if answer.status != "success":
        raise QueryError(f"the answer is not Prometheus' JSON{shape}", "signals.prometheus.url")
    # A partial answer may lack replicas, and would make the pool look less loaded than it is.
    if answer.warnings:
        raise QueryError(f"the answer may be partial: {answer.warnings[0][:300]}")
    data = answer.data or _QueryData()
    if data.resultType != result_type:
        what = "an instant vector" if result_type == "vector" else f"a {result_type}"
        why = f"the answer is {data.resultType[:40]}, not {what}"
        raise QueryError(why, "signals.prometheus.queries")
    if result_type == "matrix":
        return {"data": {"result": _parse_matrix(data.result)}}
    return {"data": {"result": data.result}}


def _parse_matrix(result: msgspec.Raw) -> list[dict[str, Any]]:
    try:
        return [msgspec.to_builtins(row) for row in _decode_series(result)]
    except (ValueError, RecursionError) as error:
        raise QueryError(f"not a matrix: {str(error)[:200]}") from None


def _choose_hint(status: int) -> str:
    if status in (401, 403):
        return "signals.prometheus.token_file or signals.prometheus.headers (X-Scope-OrgID for a tenant)"
    if status in (404, 405):
        return "signals.prometheus.url: the address before /api/v1/query"
    if status in (400, 422):
        return "signals.prometheus.queries: each must be an instant vector; a number is vector(…)"
    return ""
