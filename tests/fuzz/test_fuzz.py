"""Whatever bytes come in, from whomever: a value or a typed refusal, at a bounded price, and no surprise.

The short form takes the same few hundred inputs each time; `make fuzz` new ones, for FUZZ_S seconds each.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

from dispatcher.admin import AdminLimits
from dispatcher.client.files.lines import BatchLine, LineRules, build_answer_line, group_key, parse_line
from dispatcher.core.gateway.outcome import classify_answer
from dispatcher.core.gateway.retry_after import MAX_RETRY_AFTER_S
from dispatcher.core.limit.budget import Policy
from dispatcher.core.limit.limiter import Limiter
from dispatcher.core.limit.poll import ReadFailure
from dispatcher.core.limit.realtime_impact import HistogramGrowth
from dispatcher.core.merging.shapes import (
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
from dispatcher.core.requests.request import Rejection, encode_member, parse_member
from dispatcher.core.requests.result import PoppedResult, decode_result, encode_answer
from dispatcher.core.requests.usage import parse_token_usage
from dispatcher.core.sequences.turns import OnError, Turn
from dispatcher.queue.keys import QueueNames
from dispatcher.queue.redis.connect import QueueUrlError, connect
from dispatcher.queue.requeue import build_resubmission
from dispatcher.settings import Problem, SecretUrl, Settings
from dispatcher.settings.effective import settings_as_json
from dispatcher.settings.load import parse_settings as parse_settings
from dispatcher.settings.yaml_source import MAX_BYTES
from dispatcher.signals.epp import latency
from dispatcher.signals.epp.series import SERIES_NAMES, PoolView, build_view
from dispatcher.signals.exposition import MalformedPageError, PageParser, Sample
from dispatcher.signals.prometheus.instant_query import QueryError, parse_document, parse_vector
from dispatcher.signals.prometheus.session import PrometheusAddress
from dispatcher.signals.prometheus.source import PrometheusSource
from dispatcher.signals.readings import PickerFacts, derive_readings, list_possible_signals
from tests.admin.stage import Stage, write_token
from tests.batchfiles import bent, line
from tests.fuzz.engine import MB, cases, flaw
from tests.signals.fakes import PAGES, row
from tests.signals.fakes import vector as answer_of

FUZZ_S = float(os.environ.get("FUZZ_S", "600"))
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
    sequence=Turn("chat-7", 3, last=True, on_error=OnError.HOLD),
)
LONG_AGO = 1_900_000_000.0


def refusal(kind: type[Exception], act: Callable[[], object]) -> str | None:
    """The words it was refused in; None: it was not."""
    try:
        act()
    except kind as error:
        return str(error)
    return None


def member(data: bytes) -> None:
    parsed = parse_member(data, max_payload_bytes=MB)
    if not isinstance(parsed, Rejection):
        assert parsed.deadline > 0
        assert build_resubmission(QueueNames("q", "results"), data, 5.0, 2_000_000_000) is not None


def law(views: Sequence[PoolView]) -> None:
    """What the dispatcher makes of views."""
    for policy in (Policy(), Policy(per_endpoint=0.4), Policy(max_sys=50.0)):
        lessons = PickerFacts()
        lessons.learn_from_views(views)
        verdict = derive_readings(views, "both", policy, "epp", lessons)
        derive_readings(views, "auto", policy, "epp", lessons)
        limiter = Limiter(policy, list_possible_signals("both"))
        for reading in verdict.readings:
            limiter.add_reading(reading, 2.0)
        for unread in verdict.unread:
            limiter.record_read_failure(unread.reason, unread.why, 2.0)
        allowance = limiter.get_allowance(2.0)
        assert 0 <= allowance.limit <= 1_000_000


def page(data: bytes) -> None:
    taken = PageParser(SERIES_NAMES, optional_names=latency.NAMES, max_optional=latency.MAX_SERIES)

    def read() -> None:
        for at in range(0, len(data), 65_536):
            taken.feed(data[at : at + 65_536])
        taken.close()

    if (why := refusal(MalformedPageError, read)) is not None:
        assert len(why) < 700
        return
    seen = build_view(taken.samples, "qwen", 1.0, 1.5)
    if isinstance(seen, PoolView):
        law([seen])
        law([seen, seen])
    growth = HistogramGrowth()
    growth.add_histograms(
        1.0,
        [
            latency.build_histograms(
                taken.optional_samples, "a", has_objective=True, problem=taken.optional_problem
            )
        ],
    )
    growth.compute_impact(None, "epp")


SOURCE = PrometheusSource(
    PrometheusAddress("http://prometheus"), "qwen", "default", timeout_s=1, max_age_s=60
)


def prometheus(data: bytes) -> None:
    rows: list[Sample] = []
    why = refusal(
        QueryError, lambda: rows.extend(parse_vector(parse_document(200, False, data)["data"]["result"]))
    )
    assert len(why or "") < 700
    if why is None:
        latency.parse_latency_rows(rows)
        seen = SOURCE._build_views(rows, [], 1.0, 1.5)
        if not isinstance(seen, ReadFailure):
            law(seen)
    for status in (400, 503):
        assert refusal(QueryError, partial(parse_document, status, False, data))


def configuration(data: bytes) -> None:
    shown(parse_settings(data.decode(errors="replace"), {}))


def environment(data: bytes) -> None:
    given = {"BATCH_DISPATCHER__GATEWAY__HEADERS": data.decode(errors="replace")}
    shown(parse_settings("gateway: {url: http://g}", given))


def shown(found: Settings | list[Problem]) -> None:
    """It is printed, or every problem of it."""
    if isinstance(found, Settings):
        json.dumps(settings_as_json(found))
    else:
        assert found
        assert all(str(problem) for problem in found)


def url(data: bytes) -> None:
    text = data.decode(errors="replace")
    secret = SecretUrl(text)
    head, at, tail = text.rpartition("@")
    begins = re.match(r"(?:redis|https)(?:\+[a-z]+)?://(?:user)?:[^@:/?#]*hunter2", head)
    hidden = bool(begins and at) and head.count("hunter2") == 1 and "hunter2" not in tail
    assert not hidden or "hunter2" not in str(secret)
    assert isinstance((secret.hosts, secret.credentials, secret.without_credentials), tuple)
    quoted = json.dumps(text)
    parse_settings(f'{{"gateway": {{"url": {quoted}}}, "queue": {{"url": {quoted}}}}}', {})
    told = refusal(QueueUrlError, lambda: connect(text))
    assert not hidden or "hunter2" not in (told or "")


def retry_after(data: bytes) -> None:
    text = data.decode("latin-1")
    for headers in (
        {"retry-after": text},
        {"retry-after": "5", "date": text},
        {"retry-after": text, "date": text},
    ):
        for status in (429, 503, 200):
            outcome = classify_answer(status, headers, b"", LONG_AGO)
            waits_s = getattr(outcome, "retry_after_s", None)
            assert waits_s is None or 0 <= waits_s <= MAX_RETRY_AFTER_S


def batch_line(data: bytes) -> None:
    rules = LineRules(max_body_bytes=MB)
    line = parse_line(data, rules)
    if isinstance(line, BatchLine):
        written = encode_member("id", line.body, 2_000_000_000, endpoint=line.url)
        assert not isinstance(parse_member(written, max_payload_bytes=MB), Rejection)
        group_key(line)
    else:
        assert all(fault.code and len(fault.message) < 700 for fault in line.faults)
        assert line.faults


def result(data: bytes) -> None:
    popped = PoppedResult("id", data.decode(errors="replace"), 200)
    assert build_answer_line("id", "custom", popped).text.count(b"\n") == 1
    refusal(ValueError, lambda: decode_result(data))
    assert decode_result(encode_answer("id", 200, data)).id == "id"
    parse_token_usage(data)
    for status in (200, 400, 404, 429, 500):
        classify_answer(status, {}, data, LONG_AGO)


LISTS = [
    b'{"model":"m","input":["a","b \\u00e9"],"encoding_format":"float"}',
    b'{"input":[[1,2],[3]],"x":{"b":[1.0,null],"a":"y"}}',
    b'{"instances":[{"a":1},[2,3]],"signature_name":"s"}',
    b'{"query":"q","documents":["a","b"],"top_n":1}',
    b'{"text_1":["a","b"],"text_2":["c","d"]}',
    b'{"inputs":[["a"],["b","c"]]}',
    b'{"id":"a","inputs":[{"name":"x","shape":[2,2],"datatype":"FP32","data":[1,2.5,3,4]}]}',
    b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"BYTES","data":[["a,b","c"]]}]}',
]
LISTED = [
    b'{"data":[{"index":1,"embedding":[0.5,1e-3]},{"index":0,"embedding":[1,2]}],"usage":{"n":5,"d":{"n":3}}}',
    b'{"data":[{"index":0,"embedding":"AACAPw=="},{"index":1,"embedding":[[1],[2]]}]}',
    b'{"predictions":[[0.1],[0.2]]}',
    b'{"results":[{"index":1,"relevance_score":0.9},{"index":0,"relevance_score":0.2}]}',
    b'{"data":[{"index":0,"score":0.5},{"index":1,"score":0.25}],"usage":{"total_tokens":7}}',
    b'[[{"score":0.5,"label":"a"}],[{"score":0.5,"label":"b"}]]',
    b'{"outputs":[{"name":"y","shape":[2,2],"datatype":"FP32","data":[1,2.5,3,4]}]}',
    b'{"detail":[{"msg":"List should have at most 2048 items after validation, not 3000"}]}',
]
WHOLE_BYTES = 65_536
"""What is longer is taken in by one shape only, for each of them may cost what the law allows."""
PARTS = [
    one for data in LISTS for shape in SHAPES.values() if isinstance(one := parse_part(shape, data), Part)
]


def list_call(data: bytes) -> None:
    """Read by every shape; what is understood is merged, cut, and as good as before."""
    shapes = list(SHAPES.values())
    for shape in shapes if len(data) <= WHOLE_BYTES else [shapes[len(data) % len(shapes)]]:
        one = parse_part(shape, data)
        if isinstance(one, Part):
            assert one.size > 0
            twice = parse_part(shape, merge_parts([one, one]))
            assert isinstance(twice, Part)
            assert twice.size == 2 * one.size
            assert sum(piece.size for piece in cut_part(one, max(1, one.size // 3))) == one.size
        else:
            assert one.why
            assert len(one.why) < 700


def list_answer(data: bytes) -> None:
    for one in PARTS if len(data) <= WHOLE_BYTES else [PARTS[len(data) % len(PARTS)]]:
        answers = split_answer([one, one], data)
        assert isinstance(answers, list) or 0 < len(answers.why) < 700
        pieces = cut_part(one, 1)
        joined = join_answers(one, pieces, [data] * len(pieces))
        assert isinstance(joined, bytes) or joined.why
        assert len(find_difference(one, data, data) or "") < 700
    for status in (400, 413, 422):
        for most in (parse_item_cap(status, data), parse_token_cap(status, data)):
            assert most is None or 0 <= most <= 10_000_000


GOOD: dict[str, tuple[Callable[[bytes], None], int, list[bytes]]] = {
    "member": (
        member,
        300,
        [MEMBER, MEMBER.replace(b"plain", b"redis"), b'{"data":{"id":"a","deadline":5}}'],
    ),
    "batch line": (batch_line, 300, [line("a", system="b", tools=[1]), bent(url="/v1/completions")]),
    "list call": (list_call, 200, LISTS),
    "list answer": (list_answer, 100, LISTED),
    "page": (page, 120, [path.read_bytes() for path in sorted(PAGES.glob("*.txt"))[::4]]),
    "prometheus": (
        prometheus,
        400,
        [
            json.dumps(
                answer_of(
                    [
                        *(
                            row(value, {"dispatcher_value": family})
                            for family, value in (("SATURATION", 0.4), ("READY", 4.0), ("QUEUED", 2.0))
                        ),
                        row(1.5, {"dispatcher_age": "SATURATION"}),
                    ]
                )
            ).encode(),
            b'{"status":"success","data":{"resultType":"vector","result":[{"metric":{},"value":[1.5,"1"]}]}}',
        ],
    ),
    "configuration": (
        configuration,
        100,
        [
            b"pool: {name: qwen}\ngateway:\n  url: http://g:8000\n  headers: {x-a: b}\nbudget: {upper: 1}\n",
            b"gateway: {url: 'http://u:p@g'}\nqueue:\n  url: redis://:x@h/0\nsignals: {epp: {urls: [http://a]}}\n",
        ],
    ),
    "environment": (environment, 100, [b"{x-a: b, x-c: 'd'}", b'{"x-a": "b"}', b"- a\n- b: {c: 1}\n"]),
    "url": (
        url,
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
        retry_after,
        1500,
        [
            b"120",
            b"Sun, 06 Nov 1994 08:49:37 GMT",
            b"Sunday, 06-Nov-94 08:49:37 GMT",
            b"Sun Nov  6 08:49:37 1994",
        ],
    ),
    "result": (
        result,
        600,
        [
            encode_answer("a", 200, b'{"usage":{"prompt_tokens":1,"completion_tokens":2}}'),
            b'{"id":"a","payload":"x"}',
        ],
    ),
}
"""What bytes come in, by whom they are taken, how many of the short form, and good ones to begin with."""
OF_SETTINGS = ("configuration", "environment", "url")


@pytest.mark.parametrize("what", GOOD)
def test_no_bytes_are_a_surprise_or_cost_too_much(what: str) -> None:
    act, count, good = GOOD[what]
    for data in (*good, *(piece * (MB // len(piece)) for piece in (b"\\", b"[", b'{"a":', b"a", b'"'))):
        assert not flaw(act, data[: MAX_BYTES if what in OF_SETTINGS else MB])
    for data in cases(1, count, 0, good, MB // 4):
        assert not (why := flaw(act, data)), f"{why}: {data[:300]!r}"


@pytest.mark.long
@pytest.mark.timeout(FUZZ_S + 300)
@pytest.mark.parametrize("what", GOOD)
def test_no_bytes_are_a_surprise_or_cost_too_much_for_long(what: str, tmp_path: Path) -> None:
    act, _, good = GOOD[what]
    seed, done = secrets.randbits(32), 0
    most = MAX_BYTES if what in OF_SETTINGS else 4 * MB  # a file of settings is no larger
    for data in cases(seed, None, FUZZ_S, good, most):
        if why := flaw(act, data):
            (tmp_path / "case").write_bytes(data)
            pytest.fail(f"{why}: {data[:300]!r}, seed {seed}, whole in {tmp_path / 'case'}")
        done += 1
    print(f"{what}: {done} inputs, seed {seed}")


REQUESTS = [
    b"GET /status HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer s3cret\r\nConnection: close\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: application/openmetrics-text\r\nConnection: close\r\n\r\n",
    b"GET /livez HTTP/1.0\r\n\r\n",
    b"POST /readyz HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"HEAD /events HTTP/1.1\r\nHost: a\r\nLast-Event-ID: 5\r\nContent-Length: 2\r\n\r\n{}",
]


async def answers(port: int, request: bytes) -> bytes:
    """The first line of what the port says to these bytes; empty: it only closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        async with asyncio.timeout(30):
            return await reader.readline()
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


async def ask(tmp_path: Path, caplog: pytest.LogCaptureFixture, seed: int, count: int | None) -> int:
    """Bent requests at a real port, then a good one; how many were answered."""
    done = 0
    limits = AdminLimits(request_timeout_s=0.2)
    async with Stage(token_file=write_token(tmp_path, "s3cret"), limits=limits).open() as url:
        port = int(url.rpartition(":")[2])
        with caplog.at_level(logging.WARNING):
            bent = cases(seed, count, FUZZ_S, REQUESTS, MB // 4)
            while requests := list(islice(bent, 32)):
                lines = await asyncio.gather(*(answers(port, request) for request in requests))
                for line, request in zip(lines, requests, strict=True):
                    status = line.split()[1:2]
                    assert not status or status[0][:1] in b"24", f"{line!r}: {request[:300]!r}"
                    done += bool(status)
        assert b" 200 " in await answers(port, REQUESTS[0])
    assert [record.getMessage() for record in caplog.records] == []
    return done


async def test_no_request_to_the_admin_port_is_a_surprise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert await ask(tmp_path, caplog, 1, 96) > 40


@pytest.mark.long
@pytest.mark.timeout(FUZZ_S + 300)
async def test_no_request_to_the_admin_port_is_a_surprise_for_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seed = secrets.randbits(32)
    print(f"admin: {await ask(tmp_path, caplog, seed, None)} requests, seed {seed}")
