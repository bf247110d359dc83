"""Any input gives a value or an expected error, at a bounded CPU cost.

The short form uses the same few hundred inputs each time. `make fuzz` generates new ones, for FUZZ_S seconds
each.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

from dispatcher.features.batch_files.lines import (
    BatchLine,
    LineRules,
    build_answer_line,
    group_key,
    parse_line,
)
from dispatcher.features.merging.shapes import (
    SHAPES,
    Part,
    cut_part,
    find_difference,
    join_answers,
    merge_parts,
    parse_item_cap,
    parse_part,
    parse_token_cap,
    split_answer,
)
from dispatcher.features.sequences.turns import OnError, Turn
from dispatcher.limit.budget import Policy
from dispatcher.limit.limiter import Limiter
from dispatcher.limit.poll import ReadFailure
from dispatcher.limit.realtime_impact import HistogramGrowth
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.redis.connect import QueueUrlError, connect
from dispatcher.queue.requeue import build_resubmission
from dispatcher.requests.outcomes.outcome import classify_answer
from dispatcher.requests.outcomes.retry_after import MAX_RETRY_AFTER_S
from dispatcher.requests.request import Rejection, encode_member, parse_member
from dispatcher.requests.result import decode_result, encode_answer
from dispatcher.requests.usage import parse_token_usage
from dispatcher.service.admin import AdminLimits
from dispatcher.settings.effective import settings_as_json
from dispatcher.settings.load import parse_settings
from dispatcher.settings.model import Settings
from dispatcher.settings.values import SecretUrl
from dispatcher.settings.yaml_source import MAX_BYTES, Problem
from dispatcher.signals.epp import in_flight_load, latency
from dispatcher.signals.epp.series import SERIES_NAMES, PoolView, build_view
from dispatcher.signals.exposition import MalformedPageError, PageParser, Sample
from dispatcher.signals.prometheus.instant_query import QueryError, parse_document, parse_vector
from dispatcher.signals.prometheus.session import PrometheusAddress
from dispatcher.signals.prometheus.source import PrometheusSource
from dispatcher.signals.readings import PickerFacts, derive_readings, list_possible_signals
from dispatcher.wire_format import PoppedResult
from tests.features.batch_files.files import make_changed_line, make_line
from tests.fuzz import slice_inputs
from tests.fuzz.mutations import FUZZ_S, MB, find_problem, generate_inputs
from tests.service.admin.stage import Stage, write_token
from tests.signals.fakes import PAGES, vector_answer, vector_row

MEMBER = encode_member(
    "id-1",
    b'{"model":"m","prompt":"\\u00e9 x"}',
    2_000_000_000,
    created=1_900_000_000,
    endpoint="/v1/completions",
    headers={"x-a": "b"},
    metadata={"userid": "u"},
    token="t",
    results="batch-results:a",
    labels={"a": "b"},
    extra=Turn("chat-7", 3, last=True, on_error=OnError.HOLD),
)
NOW = 1_900_000_000.0


def get_error_message(kind: type[Exception], call: Callable[[], object]) -> str | None:
    """Return the message of the expected exception, or None if none was raised."""
    try:
        call()
    except kind as error:
        return str(error)
    return None


def consume_member(data: bytes) -> None:
    parsed = parse_member(data, max_payload_bytes=MB)
    if not isinstance(parsed, Rejection):
        assert parsed.deadline > 0
        assert build_resubmission(QueueNames("q", "results"), data, 5.0, 2_000_000_000) is not None


def consume_views(views: Sequence[PoolView]) -> None:
    """Derive readings and the limit from views of the picker."""
    for policy in (Policy(), Policy(per_endpoint=0.4), Policy(max_sys=50.0)):
        picker_facts = PickerFacts()
        picker_facts.learn_from_views(views)
        poll_result = derive_readings(views, "both", policy, "epp", picker_facts)
        derive_readings(views, "auto", policy, "epp", picker_facts)
        limiter = Limiter(policy, list_possible_signals("both"))
        for reading in poll_result.readings:
            limiter.add_reading(reading, 2.0)
        for unread in poll_result.unread:
            limiter.record_read_failure(unread.reason, unread.why, 2.0)
        allowance = limiter.get_allowance(2.0)
        assert 0 <= allowance.limit <= 1_000_000


def consume_metrics_page(data: bytes) -> None:
    parser = PageParser(SERIES_NAMES, optional=(in_flight_load.SERIES, latency.SERIES))

    def feed() -> None:
        for at in range(0, len(data), 65_536):
            parser.feed(data[at : at + 65_536])
        parser.close()

    if (message := get_error_message(MalformedPageError, feed)) is not None:
        assert len(message) < 700
        return
    view = build_view(parser.samples, "qwen", 1.0, 1.5)
    load = parser.optional[in_flight_load.SERIES]
    if isinstance(view, PoolView):
        view = replace(view, load=in_flight_load.sum_in_flight_load(load.samples, load.problem))
        consume_views([view])
        consume_views([view, view])
    growth, latencies = HistogramGrowth(), parser.optional[latency.SERIES]
    growth.add_histograms(
        1.0,
        [latency.build_histograms(latencies.samples, "a", has_objective=True, problem=latencies.problem)],
    )
    growth.compute_impact(None, "epp")


SOURCE = PrometheusSource(
    PrometheusAddress("http://prometheus"), "qwen", "default", timeout_s=1, max_age_s=60
)


def consume_prometheus_answer(data: bytes) -> None:
    rows: list[Sample] = []
    message = get_error_message(
        QueryError, lambda: rows.extend(parse_vector(parse_document(200, False, data)["data"]["result"]))
    )
    assert len(message or "") < 700
    if message is None:
        latency.parse_latency_rows(rows)
        views = SOURCE._build_views(rows, [], 1.0, 1.5)
        if not isinstance(views, ReadFailure):
            consume_views(views)
    for status in (400, 503):
        assert get_error_message(QueryError, partial(parse_document, status, False, data))


def consume_configuration(data: bytes) -> None:
    format_result(parse_settings(data.decode(errors="replace"), {}))


def consume_environment(data: bytes) -> None:
    environ = {"BATCH_DISPATCHER__GATEWAY__HEADERS": data.decode(errors="replace")}
    format_result(parse_settings("gateway: {url: http://g}", environ))


def format_result(parsed: Settings | list[Problem]) -> None:
    """Format the settings, or every problem, as commands print them."""
    if isinstance(parsed, Settings):
        json.dumps(settings_as_json(parsed))
    else:
        assert parsed
        assert all(str(problem) for problem in parsed)


def consume_url(data: bytes) -> None:
    text = data.decode(errors="replace")
    secret = SecretUrl(text)
    head, at, tail = text.rpartition("@")
    credentials = re.match(r"(?:redis|https)(?:\+[a-z]+)?://(?:user)?:[^@:/?#]*hunter2", head)
    must_be_hidden = bool(credentials and at) and head.count("hunter2") == 1 and "hunter2" not in tail
    assert not must_be_hidden or "hunter2" not in str(secret)
    assert isinstance((secret.hosts, secret.credentials, secret.without_credentials), tuple)
    quoted = json.dumps(text)
    parse_settings(f'{{"gateway": {{"url": {quoted}}}, "queue": {{"url": {quoted}}}}}', {})
    message = get_error_message(QueueUrlError, lambda: connect(text))
    assert not must_be_hidden or "hunter2" not in (message or "")


def consume_retry_after(data: bytes) -> None:
    text = data.decode("latin-1")
    for headers in (
        {"retry-after": text},
        {"retry-after": "5", "date": text},
        {"retry-after": text, "date": text},
    ):
        for status in (429, 503, 200):
            outcome = classify_answer(status, headers, b"", NOW)
            retry_after_s = getattr(outcome, "retry_after_s", None)
            assert retry_after_s is None or 0 <= retry_after_s <= MAX_RETRY_AFTER_S


def consume_batch_line(data: bytes) -> None:
    rules = LineRules(max_body_bytes=MB)
    line = parse_line(data, rules)
    if isinstance(line, BatchLine):
        written = encode_member("id", line.body, 2_000_000_000, endpoint=line.url)
        assert not isinstance(parse_member(written, max_payload_bytes=MB), Rejection)
        group_key(line)
    else:
        assert all(fault.code and len(fault.message) < 700 for fault in line.faults)
        assert line.faults


def consume_result(data: bytes) -> None:
    popped = PoppedResult("id", data.decode(errors="replace"), 200)
    assert build_answer_line("id", "custom", popped).text.count(b"\n") == 1
    get_error_message(ValueError, lambda: decode_result(data))
    assert decode_result(encode_answer("id", 200, data)).id == "id"
    parse_token_usage(data)
    for status in (200, 400, 404, 429, 500):
        classify_answer(status, {}, data, NOW)


LIST_CALLS = [
    b'{"model":"m","input":["a","b \\u00e9"],"encoding_format":"float"}',
    b'{"input":[[1,2],[3]],"x":{"b":[1.0,null],"a":"y"}}',
    b'{"instances":[{"a":1},[2,3]],"signature_name":"s"}',
    b'{"query":"q","documents":["a","b"],"top_n":1}',
    b'{"text_1":["a","b"],"text_2":["c","d"]}',
    b'{"inputs":[["a"],["b","c"]]}',
    b'{"id":"a","inputs":[{"name":"x","shape":[2,2],"datatype":"FP32","data":[1,2.5,3,4]}]}',
    b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"BYTES","data":[["a,b","c"]]}]}',
]
LIST_ANSWERS = [
    b'{"data":[{"index":1,"embedding":[0.5,1e-3]},{"index":0,"embedding":[1,2]}],"usage":{"n":5,"d":{"n":3}}}',
    b'{"data":[{"index":0,"embedding":"AACAPw=="},{"index":1,"embedding":[[1],[2]]}]}',
    b'{"predictions":[[0.1],[0.2]]}',
    b'{"results":[{"index":1,"relevance_score":0.9},{"index":0,"relevance_score":0.2}]}',
    b'{"data":[{"index":0,"score":0.5},{"index":1,"score":0.25}],"usage":{"total_tokens":7}}',
    b'[[{"score":0.5,"label":"a"}],[{"score":0.5,"label":"b"}]]',
    b'{"outputs":[{"name":"y","shape":[2,2],"datatype":"FP32","data":[1,2.5,3,4]}]}',
    b'{"detail":[{"msg":"List should have at most 2048 items after validation, not 3000"}]}',
]
MAX_BYTES_FOR_ALL_SHAPES = 65_536
"""Longer inputs are parsed as one shape only, since each shape may cost the allowed CPU time."""
PARTS = [
    part
    for data in LIST_CALLS
    for shape in SHAPES.values()
    if isinstance(part := parse_part(shape, data), Part)
]


def consume_list_call(data: bytes) -> None:
    """Parse the input as every shape. Merge and cut the parts that are valid."""
    shapes = list(SHAPES.values())
    for shape in shapes if len(data) <= MAX_BYTES_FOR_ALL_SHAPES else [shapes[len(data) % len(shapes)]]:
        part = parse_part(shape, data)
        if isinstance(part, Part):
            assert part.size > 0
            merged = parse_part(shape, merge_parts([part, part]))
            assert isinstance(merged, Part)
            assert merged.size == 2 * part.size
            assert sum(piece.size for piece in cut_part(part, max(1, part.size // 3))) == part.size
        else:
            assert part.why
            assert len(part.why) < 700


def consume_list_answer(data: bytes) -> None:
    for part in PARTS if len(data) <= MAX_BYTES_FOR_ALL_SHAPES else [PARTS[len(data) % len(PARTS)]]:
        send_raw_request = split_answer([part, part], data)
        assert isinstance(send_raw_request, list) or 0 < len(send_raw_request.why) < 700
        pieces = cut_part(part, 1)
        joined = join_answers(part, pieces, [data] * len(pieces))
        assert isinstance(joined, bytes) or joined.why
        assert len(find_difference(part, data, data) or "") < 700
    for status in (400, 413, 422):
        for cap in (parse_item_cap(status, data), parse_token_cap(status, data)):
            assert cap is None or 0 <= cap <= 10_000_000


CONSUMERS: dict[str, tuple[Callable[[bytes], None], int, list[bytes]]] = {
    "member": (
        consume_member,
        300,
        [MEMBER, MEMBER.replace(b"plain", b"redis"), b'{"data":{"id":"a","deadline":5}}'],
    ),
    "batch line": (
        consume_batch_line,
        300,
        [make_line("a", system="b", tools=[1]), make_changed_line(url="/v1/completions")],
    ),
    "list call": (consume_list_call, 200, LIST_CALLS),
    "list answer": (consume_list_answer, 100, LIST_ANSWERS),
    "page": (consume_metrics_page, 120, [path.read_bytes() for path in sorted(PAGES.glob("*.txt"))[::4]]),
    "prometheus": (
        consume_prometheus_answer,
        400,
        [
            json.dumps(
                vector_answer(
                    [
                        *(
                            vector_row(value, {"dispatcher_value": family})
                            for family, value in (("SATURATION", 0.4), ("READY", 4.0), ("QUEUED", 2.0))
                        ),
                        vector_row(1.5, {"dispatcher_age": "SATURATION"}),
                    ]
                )
            ).encode(),
            b'{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1.5,"1"]}]}}',
        ],
    ),
    "configuration": (
        consume_configuration,
        100,
        [
            b"pool: {name: qwen}\ngateway:\n  url: http://g:8000\n  headers: {x-a: b}\nbudget: {upper: 1}\n",
            b"gateway: {url: 'http://u:p@g'}\nqueue:\n  url: redis://:x@h/0\nsignals: {epp: {urls: [http://a]}}\n",
        ],
    ),
    "environment": (
        consume_environment,
        100,
        [b"{x-a: b, x-c: 'd'}", b'{"x-a": "b"}', b"- a\n- b: {c: 1}\n"],
    ),
    "url": (
        consume_url,
        250,
        [
            b"redis://user:hunter2@host:6379/0",
            b"redis+sentinel://:hunter2@h1:26379,h2/name/0?sentinel_password=hunter2",
            b"redis+cluster://:hunter2@h1,[::1]:7000",
            b"https://user:hunter2@gateway:8443/v1?sig=1",
            b"unix:///tmp/x.sock?db=1",
        ],
    ),
    "retry-after": (
        consume_retry_after,
        1500,
        [
            b"120",
            b"Sun, 06 Nov 1994 08:49:37 GMT",
            b"Sunday, 06-Nov-94 08:49:37 GMT",
            b"Sun Nov  6 08:49:37 1994",
        ],
    ),
    "result": (
        consume_result,
        600,
        [
            encode_answer("a", 200, b'{"usage":{"prompt_tokens":1,"completion_tokens":2}}'),
            b'{"id":"a","payload":"x"}',
        ],
    ),
    "slice answer": (slice_inputs.consume_answer, 400, slice_inputs.ANSWERS),
    "slice stream": (slice_inputs.consume_stream, 400, slice_inputs.STREAMS),
    "slice check": (slice_inputs.consume_check, 400, [*slice_inputs.ANSWERS, *slice_inputs.STREAMS]),
    "slice progress": (slice_inputs.consume_progress, 400, slice_inputs.STORED),
}
"""Kind of input → function that processes it, number of inputs in the short form, valid inputs."""
SETTINGS_CONSUMERS = ("configuration", "environment", "url")


@pytest.mark.parametrize("name", CONSUMERS)
def test_mutated_inputs_raise_no_unexpected_error_and_cost_little(name: str) -> None:
    consume, count, valid_inputs = CONSUMERS[name]
    for data in (
        *valid_inputs,
        *(piece * (MB // len(piece)) for piece in (b"\\", b"[", b'{"a":', b"a", b'"')),
    ):
        assert not find_problem(consume, data[: MAX_BYTES if name in SETTINGS_CONSUMERS else MB])
    for data in generate_inputs(1, count, 0, valid_inputs, MB // 4):
        assert not (message := find_problem(consume, data)), f"{message}: {data[:300]!r}"


@pytest.mark.long
@pytest.mark.timeout(FUZZ_S + 300)
@pytest.mark.parametrize("name", CONSUMERS)
def test_many_mutated_inputs_raise_no_unexpected_error_and_cost_little(name: str, tmp_path: Path) -> None:
    consume, _, valid_inputs = CONSUMERS[name]
    seed, count = secrets.randbits(32), 0
    max_bytes = MAX_BYTES if name in SETTINGS_CONSUMERS else 4 * MB  # larger settings files are rejected
    for data in generate_inputs(seed, None, FUZZ_S, valid_inputs, max_bytes):
        if message := find_problem(consume, data):
            (tmp_path / "case").write_bytes(data)
            pytest.fail(f"{message}: {data[:300]!r}, seed {seed}, input in {tmp_path / 'case'}")
        count += 1
    print(f"{name}: {count} inputs, seed {seed}")


REQUESTS = [
    b"GET /status HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer s3cret\r\nConnection: close\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: application/openmetrics-text\r\nConnection: close\r\n\r\n",
    b"GET /livez HTTP/1.0\r\n\r\n",
    b"POST /readyz HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"HEAD /events HTTP/1.1\r\nHost: a\r\nLast-Event-ID: 5\r\nContent-Length: 2\r\n\r\n{}",
]


async def send_raw_request(port: int, request: bytes) -> bytes:
    """Return the status line of the answer, or nothing if the server only closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        async with asyncio.timeout(30):
            return await reader.readline()
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


async def fuzz_admin_port(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, seed: int, count: int | None
) -> int:
    """Send mutated requests to a real admin port, then a valid one. Return the number of answers."""
    answered_count = 0
    limits = AdminLimits(request_timeout_s=0.2)
    async with Stage(token_file=write_token(tmp_path, "s3cret"), limits=limits).open() as url:
        port = int(url.rpartition(":")[2])
        with caplog.at_level(logging.WARNING):
            mutated = generate_inputs(seed, count, FUZZ_S, REQUESTS, MB // 4)
            while requests := list(islice(mutated, 32)):
                status_lines = await asyncio.gather(
                    *(send_raw_request(port, request) for request in requests)
                )
                for status_line, request in zip(status_lines, requests, strict=True):
                    status = status_line.split()[1:2]
                    assert not status or status[0][:1] in b"24", f"{status_line!r}: {request[:300]!r}"
                    answered_count += bool(status)
        assert b" 200 " in await send_raw_request(port, REQUESTS[0])
    assert [record.getMessage() for record in caplog.records] == []
    return answered_count


async def test_mutated_requests_to_the_admin_port_get_a_valid_status(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert await fuzz_admin_port(tmp_path, caplog, 1, 96) > 40


@pytest.mark.long
@pytest.mark.timeout(FUZZ_S + 300)
async def test_many_mutated_requests_to_the_admin_port_get_a_valid_status(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seed = secrets.randbits(32)
    print(f"admin: {await fuzz_admin_port(tmp_path, caplog, seed, None)} requests, seed {seed}")
