"""The stand-in for model servers of list calls: its duration, refusals and requested errors."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import struct
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest

from dispatcher.features.merging.shapes import (
    SHAPES,
    Unfit,
    find_difference,
    parse_item_cap,
    parse_token_cap,
    split_answer,
)
from dispatcher.lab.simulation import virtual_loop
from dispatcher.lab.standin.lists import ListConfig, ListServer, ListService, StatusAndBody
from tests.list_calls import PATHS, encode_body, parse_valid_part
from tests.support import wait_until

BODIES: dict[str, dict[str, Any]] = {
    "embeddings": {"model": "m", "input": ["a", "b", "c"]},
    "embed": {"inputs": ["a", "b", "c"]},
    "tensorflow": {"instances": [1, [2], {"x": 3}]},
    "kserve": {"inputs": [{"name": "x", "shape": [3, 2], "datatype": "FP32", "data": [1, 2, 3, 4, 5, 6]}]},
    "rerank": {"query": "q", "documents": ["a", "b", "c"]},
    "tei_rerank": {"query": "q", "texts": ["a", "b", "c"]},
    "score": {"text_1": "q", "text_2": ["a", "b", "c"]},
    "predict": {"inputs": [["a"], ["b"], ["c", "d"]]},
}
"""Bodies with three items each, by shape."""


def make_embedding_body(*texts: str) -> bytes:
    return encode_body({"model": "m", "input": texts})


async def gather_answers(
    server: ListServer, *bodies: bytes, path: str = "/v1/embeddings"
) -> Sequence[StatusAndBody]:
    return await asyncio.gather(*(server.answer_call(path, body) for body in bodies))


def answer_calls(server: ListServer, *bodies: bytes, path: str = "/v1/embeddings") -> Sequence[StatusAndBody]:
    """Send calls to the server in virtual time and return the answers."""
    return virtual_loop.run_in_virtual_time(gather_answers(server, *bodies, path=path))


def test_call_takes_its_configured_time_and_the_next_one_waits() -> None:
    server = ListServer(ListConfig(call_s=0.5, item_s=0.1, log_s=0.25))
    answer_calls(server, make_embedding_body("a"), make_embedding_body("b", "c", "d"))
    first, second = server.calls
    assert first.ended_at - first.started_at == pytest.approx(0.5 + 0.1 + 0.25)
    assert second.started_at == pytest.approx(first.ended_at)
    assert second.ended_at - second.started_at == pytest.approx(0.5 + 0.3 + 0.5)
    assert (server.most_running, server.items) == (1, 4)
    assert server.build_report()["busy_s"] == pytest.approx(0.85 + 1.3)


def test_workers_run_calls_in_parallel() -> None:
    server = ListServer(ListConfig(call_s=1.0, item_s=0.0, workers=3))
    answer_calls(server, *[make_embedding_body("a")] * 7)
    first_arrival = min(call.arrived_at for call in server.calls)
    assert [round(call.ended_at - first_arrival) for call in server.calls] == [1, 1, 1, 2, 2, 2, 3]
    assert server.most_running == 3


def test_cancelled_call_gives_up_its_turn() -> None:
    async def cancel_two_calls() -> ListServer:
        server = ListServer(ListConfig(call_s=1.0, item_s=0.0))
        tasks = [asyncio.create_task(server.answer_call("/embed", b'{"inputs":"a"}')) for _ in range(4)]
        await asyncio.sleep(0.5)
        tasks[0].cancel()
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return server

    server = virtual_loop.run_in_virtual_time(cancel_two_calls())
    assert [call.status for call in server.calls] == [0, 0, 200, 200]
    assert [call.ended_at - server.calls[0].arrived_at for call in server.calls[2:]] == pytest.approx(
        [1.5, 2.5]
    )
    assert server.running == 0


@pytest.mark.parametrize("name", PATHS)
def test_answer_of_every_shape_has_one_entry_per_item(name: str) -> None:
    server = ListServer()
    ((status, body),) = answer_calls(server, encode_body(BODIES[name]), path=PATHS[name])
    assert status == 200
    assert len(server.calls[0].texts) == parse_valid_part(name, BODIES[name]).size == 3
    found = json.loads(body)
    if name == "kserve":
        assert [output["shape"] for output in found["outputs"]] == [[3, 8], [3]]
    else:
        assert len(found[SHAPES[name].answer_field] if SHAPES[name].answer_field else found) == 3


def test_vector_of_a_text_is_reproducible_and_equal_as_base64() -> None:
    server = ListServer(ListConfig(dims=16))
    bodies = [
        make_embedding_body("a", "b"),
        make_embedding_body("b"),
        encode_body({"input": "b", "encoding_format": "base64"}),
        encode_body({"input": "b", "dimensions": 4}),
    ]
    data = [json.loads(body)["data"] for _, body in answer_calls(server, *bodies)]
    vector = data[0][1]["embedding"]
    assert vector == data[1][0]["embedding"] != data[0][0]["embedding"]
    assert list(struct.unpack("<16f", base64.b64decode(data[2][0]["embedding"]))) == vector
    assert math.hypot(*vector) == pytest.approx(1.0)
    assert len(data[3][0]["embedding"]) == 4


def test_tokens_of_a_call_are_the_sum_of_its_items() -> None:
    server = ListServer()
    usages = [
        json.loads(body)["usage"]["total_tokens"]
        for _, body in answer_calls(
            server, make_embedding_body("a", "bcdef"), make_embedding_body("a"), make_embedding_body("bcdef")
        )
    ]
    assert usages[0] == usages[1] + usages[2]


@pytest.mark.parametrize("words", ["tei", "openai", "triton", "tensorflow", "cohere", "infinity"])
@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed"])
def test_too_many_items_are_refused_with_the_message_of_a_real_server(words: Any, path: str) -> None:
    server = ListServer(ListConfig(max_items=2, words=words))
    texts = ["a", "b", "c"]
    bodies = [encode_body({"input": texts[:count], "inputs": texts[:count]}) for count in (2, 3)]
    (good, _), (status, answer_body) = answer_calls(server, *bodies, path=path)
    assert good == 200
    assert parse_item_cap(status, answer_body) == 2


def test_plain_refusal_names_no_number() -> None:
    ((status, answer_body),) = answer_calls(
        ListServer(ListConfig(max_items=1, words="plain")), make_embedding_body("a", "b")
    )
    assert (status, parse_item_cap(status, answer_body)) == (413, 0)


def test_too_many_tokens_are_refused() -> None:
    server = ListServer(ListConfig(max_tokens=10))
    (good, _), (status, answer_body) = answer_calls(
        server, make_embedding_body("a"), make_embedding_body("a" * 50)
    )
    assert good == 200
    assert (status, parse_item_cap(status, answer_body), parse_token_cap(status, answer_body)) == (
        400,
        None,
        10,
    )


def test_one_invalid_item_fails_the_whole_call() -> None:
    server = ListServer(ListConfig(bad="poison"))
    answers = answer_calls(server, make_embedding_body("a", "some poison"), make_embedding_body("a"))
    assert [status for status, _ in answers] == [400, 200]
    assert parse_item_cap(*answers[0]) is None
    assert math.isnan(server.calls[0].started_at)


def test_configured_number_of_answers_lacks_an_item() -> None:
    server = ListServer(ListConfig(missing=1))
    counts = [
        len(json.loads(body)["data"])
        for _, body in answer_calls(server, *[make_embedding_body("a", "b")] * 2)
    ]
    assert sorted(counts) == [1, 2]


@pytest.mark.parametrize("data", [[1, 2, 3, 4, 5, 6], [[1, 2], [3, 4], [5, 6]]], ids=["flat", "nested"])
def test_tensors_that_lack_an_item_have_a_row_less(data: list[Any]) -> None:
    """A server leaves out no whole tensor, which the answer to a merged call could not show."""
    server = ListServer(ListConfig(missing=1))
    (tensor,) = BODIES["kserve"]["inputs"]
    body = encode_body({"inputs": [{**tensor, "data": data}]})
    (_, lacking), (_, whole) = answer_calls(server, body, body, path=PATHS["kserve"])
    row = parse_valid_part("kserve", {"inputs": [{**tensor, "shape": [1, 2], "data": [1, 2]}]})
    assert isinstance(split_answer([row] * 3, lacking), Unfit)
    for output, expected in zip(json.loads(lacking)["outputs"], json.loads(whole)["outputs"], strict=True):
        assert output["shape"] == [2, *expected["shape"][1:]]
        assert len(output["data"]) == len(expected["data"]) / 3 * 2
        assert output["data"] == expected["data"][: len(output["data"])]


def test_configured_number_of_calls_fails() -> None:
    server = ListServer(ListConfig(fail=2))
    assert [status for status, _ in answer_calls(server, *[make_embedding_body("a")] * 3)] == [503, 503, 200]


def test_vectors_are_wrong_in_calls_above_the_configured_size() -> None:
    server = ListServer(ListConfig(wrong_above=2))
    bodies = [make_embedding_body("a", "b"), make_embedding_body("a", "b", "c")]
    data = [json.loads(body)["data"] for _, body in answer_calls(server, *bodies)]
    right, wrong = (json.dumps({"data": each[:1]}).encode() for each in data)
    assert "cosine" in (find_difference(parse_valid_part("embeddings", {"input": "a"}), wrong, right) or "")


def test_items_of_the_answer_can_be_shuffled() -> None:
    server = ListServer(ListConfig(shuffled=True, words="openai"))
    ((_, body),) = answer_calls(server, make_embedding_body("a", "b", "c"))
    assert [item["index"] for item in json.loads(body)["data"]] == [2, 1, 0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", b""),
        ("/v1/embeddings", b"[]"),
        ("/v1/embeddings", b"[" * 100_000),
        ("/v1/embeddings", b"{}"),
        ("/v1/embeddings", b'{"input":[]}'),
        ("/v1/embeddings", b'{"input":[{}]}'),
        ("/v1/models/m:predict", b'{"instances":1}'),
        ("/v2/models/m/infer", b'{"inputs":[{"name":"x","shape":[2],"data":[1]}]}'),
        ("/v2/models/m/infer", b'{"inputs":[{"name":"x"}]}'),
        ("/v2/models/m/infer", b'{"inputs":[1]}'),
        ("/rerank", b'{"documents":["a"]}'),
        ("/score", b'{"text_1":["a","b"],"text_2":["c"]}'),
        ("/predict", b'{"inputs":[["a"],[]]}'),
        ("/v1/completions", b'{"prompt":"a"}'),
    ],
)
def test_invalid_body_is_rejected(path: str, body: bytes) -> None:
    ((status, answer_body),) = answer_calls(ListServer(), body, path=path)
    assert status == 400
    assert json.loads(answer_body)["error"]["message"]


async def test_http_service_answers_calls_reports_them_and_can_be_reconfigured() -> None:
    async with ListService(ListConfig(call_s=0.0, item_s=0.0)) as service, aiohttp.ClientSession() as http:
        for _ in range(2):
            async with http.post(
                f"{service.url}/v1/embeddings", data=make_embedding_body("a", "b")
            ) as answer:
                assert answer.status == 200
                assert len((await answer.json())["data"]) == 2
        async with http.post(f"{service.url}/control", json={"max_items": 1}) as answer:
            assert (await answer.json())["max_items"] == 1
        async with http.post(f"{service.url}/v1/embeddings", data=make_embedding_body("a", "b")) as answer:
            assert answer.status == 413
        async with http.post(f"{service.url}/control", json={"max_itens": 1}) as answer:
            assert answer.status == 400
        async with http.get(f"{service.url}/nowhere") as answer:
            assert answer.status == 404
        async with http.get(f"{service.url}/observed") as answer:
            report = await answer.json()
    assert (report["calls"], report["answered"], report["items"]) == (3, 2, 4)
    assert report["sizes"] == [2, 2, 2]
    assert report["statuses"] == [200, 200, 413]


async def test_call_of_a_disconnected_client_is_cancelled() -> None:
    async with ListService(ListConfig(call_s=60.0)) as service, aiohttp.ClientSession() as http:
        call = asyncio.create_task(http.post(f"{service.url}/embed", json={"inputs": "a"}).__aenter__())
        await wait_until(lambda: service.lists.running == 1)
        call.cancel()
        service.lists.config.call_s = service.lists.config.item_s = 0.0
        async with http.post(f"{service.url}/embed", json={"inputs": "b"}) as answer:
            assert answer.status == 200
    assert [call.status for call in service.lists.calls] == [0, 200]
