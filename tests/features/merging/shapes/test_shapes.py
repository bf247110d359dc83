"""Bodies of list calls: how requests are parsed, merged and cut, and how answers are split and joined."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dispatcher.features.merging.shapes import (
    SHAPES,
    Part,
    Unfit,
    cut_part,
    find_shape,
    join_answers,
    merge_parts,
    parse_part,
    split_answer,
)
from dispatcher.requests.json_fields import MAX_DEPTH
from tests.list_calls import PATHS, answer_call, encode_body, parse_valid_part

EMBEDDINGS_ANSWER = (
    b'{"id": "embd-7", "object":"list", "data" : [\n'
    b'{"index":2,"object":"embedding","embedding":[1.50E-3, -0.0,1e0 ],"note":"\\u00e9"},\n'
    b'{"embedding":[0.1000,2],"index":0, "object":"embedding"},'
    b'{"object":"embedding","index":1,"embedding":"AAAAAA=="}],"model":"m" , '
    b'"usage":{"prompt_tokens":10,"total_tokens":10,"prompt_tokens_details":{"cached_tokens":1}}}'
)


def explain_unfit(name: str, body: Any) -> str:
    found = parse_part(SHAPES[name], body if isinstance(body, bytes) else encode_body(body))
    assert isinstance(found, Unfit), found
    return found.why


def split_valid_answer(parts: list[Part], body: bytes) -> list[bytes]:
    found = split_answer(parts, body)
    assert not isinstance(found, Unfit), found
    return found


def explain_unsplit(parts: list[Part], body: Any) -> str:
    found = split_answer(parts, body if isinstance(body, bytes) else encode_body(body))
    assert isinstance(found, Unfit), found
    return found.why


@pytest.mark.parametrize(
    ("body", "size", "tokens"),
    [
        ({"input": "abcdefgh"}, 1, 2),
        ({"input": ["abcdefgh", "ijklmnop"]}, 2, 6),
        ({"input": ["", ""]}, 2, 2),
        ({"input": [1, 2, 3]}, 1, 3),
        ({"input": [[1, 2, 3], [4]]}, 2, 4),
        ({"input": ["日本"]}, 1, 2),
    ],
)
def test_items_and_tokens_of_a_body_are_counted(body: Any, size: int, tokens: int) -> None:
    found = parse_valid_part("embeddings", {"model": "text-1", **body})
    assert (found.size, found.tokens, found.model) == (size, tokens, "text-1")


def test_tokens_of_a_query_count_with_each_text() -> None:
    first = parse_valid_part("rerank", {"query": "q" * 40, "documents": ["d" * 8, "e" * 8]})
    assert (
        first.tokens
        == 2 * 10 + parse_valid_part("rerank", {"query": "", "documents": ["d" * 8, "e" * 8]}).tokens
    )
    assert [piece.tokens for piece in cut_part(first, 1)] == [12, 12]
    pair = parse_valid_part("score", {"text_1": ["q" * 40], "text_2": ["d" * 8]})
    assert pair.tokens == parse_valid_part("score", {"text_1": "q" * 40, "text_2": ["d" * 8]}).tokens


@pytest.mark.parametrize(
    ("name", "body", "reason"),
    [
        ("embeddings", b"", "not the JSON that it should be"),
        ("embeddings", b"[]", "not the JSON that it should be"),
        ("embeddings", b'{"input":"\xff"}', "not the JSON that it should be"),
        ("embeddings", b'{"input":["\\ud800"]}', "not the JSON that it should be"),
        ("embeddings", {"model": "m"}, "no input in the body"),
        ("embeddings", {"input": []}, "an empty list"),
        ("embeddings", {"input": [[]]}, "an empty list"),
        ("embeddings", {"input": None}, "its items are neither text nor token ids"),
        ("embeddings", {"input": ["a", [1]]}, "its items are neither text nor token ids"),
        ("embeddings", {"input": [{"text": "a"}]}, "its items are neither text nor token ids"),
        ("embeddings", {"input": [1.5]}, "its items are neither text nor token ids"),
        ("embeddings", {"input": "a", "late_chunking": True}, "late_chunking: its items are embedded as one"),
        ("embeddings", b'{"input":"a","input":"b"}', "given twice"),
        ("embeddings", b'{"input":"a","user":"x","user":"x"}', "given twice"),
        ("embeddings", b'{"b":1,"input":"","b":{"q":0,%b"a":1}}' % (b" " * 10), "given twice"),
        ("tensorflow", b'{"b":1,"instances":[2],"b":{"q":0,%b"a":11}}' % (b" " * 14), "given twice"),
        ("embeddings", b'{"input":"a","\\u0075ser":"x"}', "given twice, or its name is escaped"),
        ("embeddings", b'{"input":"a","x":' + b"[" * 20 + b"]" * 20 + b"}", "nested too deeply"),
        ("embeddings", b'{"input":"a","x":' + b"[" * 90_000 + b"]" * 90_000 + b"}", "nested too deeply"),
        ("embeddings", {"input": "a", "x": "y" * 66_000}, "more than 65536 bytes beside its list"),
        ("tensorflow", {"inputs": {"x": [1]}}, "no instances in the body"),
        ("tensorflow", {"inputs": {"x": [1]}, "instances": [1]}, "inputs: the columnar format"),
        ("tensorflow", {"instances": {"a": 1}}, "its items are not in a list"),
        ("tensorflow", {"instances": []}, "an empty list"),
        ("rerank", {"query": "q", "documents": ["a"], "top_n": -1}, "top_n: no count"),
        ("rerank", {"query": "q", "documents": ["a"], "top_n": 1.5}, "top_n: no count"),
        ("rerank", {"query": "q"}, "no texts in the body"),
        ("score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1 and text_2 are not as long as each other"),
        ("score", {"text_1": ["a"], "text_2": "c"}, "text_1 and text_2 are not as long as each other"),
        ("predict", {"inputs": ["a", "b", "c"]}, "an item is neither a text nor a pair"),
        ("predict", {"inputs": [["a"], []]}, "an item is neither a text nor a pair"),
        ("predict", {"inputs": [["a"], "b"]}, "its items are neither texts nor pairs"),
    ],
)
def test_body_that_cannot_be_merged_is_explained(name: str, body: Any, reason: str) -> None:
    assert reason in explain_unfit(name, body)


def test_depth_is_limited_only_outside_of_the_list() -> None:
    deep = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert parse_valid_part("embeddings", b'{"input":"a","x":%b}' % deep).size == 1
    assert parse_valid_part("tensorflow", b'{"instances":[%b]}' % (b"[" * 500 + b"]" * 500)).size == 1


def test_merged_body_has_one_list_and_each_other_field_once() -> None:
    bodies = [
        b'{"model":"m","input":"a\\n","dimensions":256}',
        b'{"dimensions":256, "input" : [ "b" , "c"], "model":"m"}',
        b'{"input":["d"],"model":"m","dimensions":256}',
    ]
    merged = merge_parts([parse_valid_part("embeddings", body) for body in bodies])
    assert merged == b'{"dimensions":256,"model":"m","input":["a\\n", "b" , "c","d"]}'


def test_token_ids_are_not_merged_with_text() -> None:
    ids, lists, text = (
        parse_valid_part("embeddings", {"input": value}) for value in ([1, 2], [[3], [4, 5]], "1")
    )
    assert merge_parts([ids, lists]) == b'{"input":[[1, 2],[3], [4, 5]]}'
    assert ids.merge_key != text.merge_key
    with pytest.raises(ValueError, match="only parts of one key"):
        merge_parts([ids, text])
    with pytest.raises(ValueError, match="only parts of one key"):
        merge_parts([])


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ({"model": "a"}, {"model": "b"}),
        ({"model": "a"}, {}),
        ({"dimensions": 8}, {"dimensions": 8.0}),
        ({"encoding_format": "float"}, {"encoding_format": "base64"}),
        ({"user": "a"}, {"user": None}),
        ({"x": {"a": [1, 2]}}, {"x": {"a": [2, 1]}}),
    ],
)
def test_bodies_that_differ_in_other_fields_are_not_merged(first: Any, other: Any) -> None:
    assert (
        parse_valid_part("embeddings", {"input": "a", **first}).merge_key
        != parse_valid_part("embeddings", {"input": "a", **other}).merge_key
    )


def test_same_body_of_another_shape_is_not_merged() -> None:
    assert (
        parse_valid_part("embed", {"inputs": "a"}).merge_key
        != parse_valid_part("predict", {"inputs": "a"}).merge_key
    )


def test_fields_of_an_item_are_kept_byte_for_byte() -> None:
    parts = [parse_valid_part("embeddings", {"input": value}) for value in (["a", "b"], "c")]
    first, second = split_valid_answer(parts, EMBEDDINGS_ANSWER)
    assert first == (
        b'{"id":"embd-7","object":"list","data":[{"embedding":[0.1000,2],"index":0,"object":"embedding"},'
        b'{"object":"embedding","index":1,"embedding":"AAAAAA=="}],"model":"m",'
        b'"usage":{"prompt_tokens":7,"total_tokens":7,"prompt_tokens_details":{"cached_tokens":1}}}'
    )
    assert second == (
        b'{"id":"embd-7","object":"list","data":[{"index":0,"object":"embedding",'
        b'"embedding":[1.50E-3, -0.0,1e0 ],"note":"\\u00e9"}],"model":"m",'
        b'"usage":{"prompt_tokens":3,"total_tokens":3,"prompt_tokens_details":{"cached_tokens":0}}}'
    )


def test_nested_vectors_are_split() -> None:
    """They begin like flat vectors."""
    parts = [parse_valid_part("embeddings", {"input": value}) for value in "ab"]
    data = [{"index": at, "embedding": [[0.1, at], [0.2]]} for at in (0, 1)]
    for listed in (data, [{**each, "more": {"embedding": [1]}} for each in data]):
        found = [
            json.loads(each)["data"] for each in split_valid_answer(parts, encode_body({"data": listed}))
        ]
        assert found == [[{**each, "index": 0}] for each in listed]


def test_brackets_in_texts_of_an_answer_are_not_lists() -> None:
    parts = [parse_valid_part("rerank", {"query": "q", "documents": [value]}) for value in "ab"]
    results = [
        {"index": at, "relevance_score": 0.5, "document": {"text": f'"results":[{at}]] "index":9'}}
        for at in (0, 1)
    ]
    found = [
        json.loads(each)
        for each in split_valid_answer(parts, encode_body({"id": "[", "results": results, "meta": [[]]}))
    ]
    assert found == [{"id": "[", "results": [{**each, "index": 0}], "meta": [[]]} for each in results]


def test_nested_field_with_the_name_of_the_list_is_ignored() -> None:
    parts = [parse_valid_part("embeddings", {"input": value}) for value in "ab"]
    data = [{"index": at, "embedding": [at]} for at in (0, 1)]
    body = encode_body({"meta": {"data": [{"index": 0, "embedding": [7]}]}, "data": data})
    assert [json.loads(each)["data"][0]["embedding"] for each in split_valid_answer(parts, body)] == [
        [0],
        [1],
    ]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not the JSON"),
        ([], "not the JSON"),
        ({"error": {"message": "no"}}, "no data in the answer"),
        ({"data": None}, "not the JSON"),
        ({"data": None, "x": [{"index": at, "embedding": [1]} for at in (0, 1)]}, "not the JSON"),
        ({"data": [{"index": 0, "embedding": [1]}]}, "1 items in the answer to 2"),
        ({"data": [{"index": 0, "embedding": [1]}] * 2}, "two items of the answer of one index"),
        ({"data": [{"index": at, "embedding": [1]} for at in (1, 2)]}, "without an index below 2"),
        ({"data": [{"index": at, "embedding": [1]} for at in ("0", "1")]}, "without an index below 2"),
        ({"data": [{"index": at, "embedding": [1]} for at in (0, 1.0)]}, "without an index below 2"),
        (b'{"data":[{"index":0,"embedding":[1]},{"index":%b,"embedding":[1]}]}' % (b"1" * 5000), "below 2"),
        ({"data": [{"embedding": [1]}, {"embedding": [2]}]}, "without an index below 2"),
        ({"data": [{"index": 0, "embedding": [1]}, {"index": 1, "error": "x"}]}, "without embedding"),
        ({"data": [{"index": 0, "embedding": [1]}, {"index": 1, "embedding": None}]}, "without embedding"),
        ({"data": [{"index": 0, "embedding": [1]}, None]}, "not the JSON"),
        *(
            (b'{"data":[{"index":0,"embedding":[1]},{"index":1,"embedding":%b}]}' % vector, "not the JSON")
            for vector in (b"[1,oops]", b"[1,,2]", b"[1.2.3]", b"[NaN]", b"[1,]")
        ),
    ],
)
def test_unexpected_answer_is_not_split(body: Any, reason: str) -> None:
    parts = [parse_valid_part("embeddings", {"input": value}) for value in "ab"]
    assert reason in explain_unsplit(parts, encode_body(body) if not isinstance(body, bytes) else body)


def test_unexpected_answer_with_plain_vectors_is_not_split() -> None:
    parts = [parse_valid_part("embed", {"inputs": value}) for value in "ab"]
    assert split_valid_answer(parts, b"[[1],[2]]") == [b"[[1]]", b"[[2]]"]
    for body in (b'[[1],"x"]', b'{"error":"x"}', b"[[1]]"):
        assert explain_unsplit(parts, body)


def test_usage_is_divided_by_tokens() -> None:
    parts = [parse_valid_part("embeddings", {"input": value}) for value in ([1] * 9, [2])]
    data = [{"index": at, "embedding": [1]} for at in (0, 1)]
    body = encode_body({"data": data, "usage": {"prompt_tokens": 10, "more": {"cached": 4}}})
    shares = [json.loads(each)["usage"] for each in split_valid_answer(parts, body)]
    assert shares == [
        {"prompt_tokens": 9, "more": {"cached": 4}},
        {"prompt_tokens": 1, "more": {"cached": 0}},
    ]


def test_usage_that_is_not_a_count_is_copied() -> None:
    parts = [parse_valid_part("embeddings", {"input": value}) for value in "ab"]
    data = [{"index": at, "embedding": [1]} for at in (0, 1)]
    usage = {"prompt_tokens": 3, "cost": 0.5, "tier": "x", "flag": True, "none": None, "huge": 2**60}
    shares = [
        json.loads(each)["usage"]
        for each in split_valid_answer(parts, encode_body({"data": data, "usage": usage}))
    ]
    assert shares == [{**usage, "prompt_tokens": count, "cost": 0.25} for count in (2, 1)]
    for unusual in (None, "x", [1]):
        body = encode_body({"data": data, "usage": unusual})
        assert [json.loads(each)["usage"] for each in split_valid_answer(parts, body)] == [unusual, unusual]


def test_ranked_items_are_split_by_request_in_the_order_of_rank() -> None:
    parts = [
        parse_valid_part("rerank", {"query": "q", "documents": value, "top_n": 2})
        for value in (["a", "b", "c"], ["d"])
    ]
    assert merge_parts(parts) == b'{"query":"q","documents":["a", "b", "c","d"]}'
    results = [
        {"index": at, "relevance_score": score} for at, score in ((2, 0.9), (3, 0.8), (0, 0.7), (1, 0.6))
    ]
    first, second = (
        json.loads(each)["results"] for each in split_valid_answer(parts, encode_body({"results": results}))
    )
    assert [item["index"] for item in first] == [2, 0]
    assert second == [{"index": 0, "relevance_score": 0.8}]


def test_different_queries_are_not_merged() -> None:
    first, other = (parse_valid_part("rerank", {"query": query, "documents": ["a"]}) for query in "qr")
    assert first.merge_key != other.merge_key
    assert (
        parse_valid_part("rerank", {"query": "q", "documents": ["a"], "top_n": 1}).merge_key
        != first.merge_key
    )


@pytest.mark.parametrize("top_count", [None, 0])
def test_all_ranked_items_are_returned_without_top_n(top_count: int | None) -> None:
    first = parse_valid_part("rerank", {"query": "q", "documents": ["a", "b", "c"], "top_n": top_count})
    assert first.top_count == 0
    pieces = cut_part(first, 2)
    bodies = [answer_call("rerank", merge_parts([piece])) for piece in pieces]
    joined = join_answers(first, pieces, bodies)
    assert joined == answer_call("rerank", first.payload)


def test_ranked_answers_are_joined_by_rank() -> None:
    first = parse_valid_part("rerank", {"query": "q", "documents": list("abcd"), "top_n": 3})
    pieces = cut_part(first, 2)
    assert merge_parts(pieces[:1]) == b'{"query":"q","top_n":3,"documents":["a","b"]}'
    bodies = [
        encode_body(
            {"id": at, "results": [{"index": index, "relevance_score": score} for index, score in ranks]}
        )
        for at, ranks in enumerate([[(1, 0.9), (0, 0.2)], [(0, 0.9), (1, 0.3)]])
    ]
    joined = join_answers(first, pieces, bodies)
    assert isinstance(joined, bytes)
    assert [(item["index"], item["relevance_score"]) for item in json.loads(joined)["results"]] == [
        (1, 0.9),
        (2, 0.9),
        (3, 0.3),
    ]


def test_answers_not_ordered_by_rank_are_joined_by_index() -> None:
    first = parse_valid_part("tei_rerank", {"query": "q", "texts": list("abcd")})
    pieces = cut_part(first, 2)
    bodies = [b'[{"index":0,"score":0.1},{"index":1,"score":0.5}]'] * 2
    joined = join_answers(first, pieces, bodies)
    assert isinstance(joined, bytes)
    assert [item["index"] for item in json.loads(joined)] == [0, 1, 2, 3]


@pytest.mark.parametrize("score", [None, "x", [1]])
def test_ranks_that_are_not_numbers_are_not_joined(score: Any) -> None:
    first = parse_valid_part("tei_rerank", {"query": "q", "texts": list("ab")})
    bodies = [encode_body([{"index": 0, "score": each}]) for each in (0.5, score)]
    assert isinstance(join_answers(first, cut_part(first, 1), bodies), Unfit)


def test_answers_are_not_joined_if_one_piece_is_unexpected() -> None:
    first = parse_valid_part("embeddings", {"input": list("abc")})
    pieces = cut_part(first, 2)
    good = [answer_call("embeddings", merge_parts([piece])) for piece in pieces]
    assert isinstance(join_answers(first, pieces, [good[1], good[0]]), Unfit)
    assert isinstance(join_answers(first, pieces, [good[0], b'{"error":"x"}']), Unfit)
    ranked = parse_valid_part("rerank", {"query": "q", "documents": list("abc"), "top_n": 2})
    pieces = cut_part(ranked, 2)
    bodies = [answer_call("rerank", merge_parts([piece])) for piece in pieces]
    assert isinstance(join_answers(ranked, pieces, bodies), bytes)
    assert isinstance(join_answers(ranked, pieces, [bodies[1], bodies[1]]), Unfit)


def test_usage_of_pieces_is_added_up() -> None:
    first = parse_valid_part("embeddings", {"input": ["a", "b"]})
    usages: list[Any] = [
        {"n": 1, "d": {"c": 2}, "x": None},
        {"n": 3, "d": {"c": 5, "e": 1}, "x": 4, "f": 0.5},
    ]
    bodies = [encode_body({"data": [{"index": 0, "embedding": [1]}], "usage": usage}) for usage in usages]
    joined = join_answers(first, cut_part(first, 1), bodies)
    assert isinstance(joined, bytes)
    assert json.loads(joined)["usage"] == {"n": 4, "d": {"c": 7, "e": 1}, "x": 4, "f": 0.5}


def test_list_is_cut_by_items_and_by_tokens() -> None:
    first = parse_valid_part("embeddings", {"input": ["x" * 40, "y" * 40, "z" * 4, "x" * 400, "z"]})
    assert [piece.size for piece in cut_part(first, 2)] == [2, 2, 1]
    assert [piece.size for piece in cut_part(first, 100, 23)] == [2, 1, 1, 1]
    assert [piece.size for piece in cut_part(first, 100, 24)] == [3, 1, 1]
    assert [piece.size for piece in cut_part(first, 0)] == [1] * 5
    assert cut_part(first, 5) == [first]
    ids = parse_valid_part("embeddings", {"input": [[1, 2], [3, 4], [5]]})
    assert [(piece.size, piece.tokens) for piece in cut_part(ids, 9, 4)] == [(2, 4), (1, 1)]
    single = parse_valid_part("embeddings", {"input": "x" * 400})
    assert cut_part(single, 1, 5) == [single]


def test_score_pairs_with_different_texts_are_merged() -> None:
    first, other = (
        parse_valid_part("score", {"model": "m", "text_1": [f"q{at}"], "text_2": [f"d{at}"]}) for at in (1, 2)
    )
    assert merge_parts([first, other]) == b'{"model":"m","text_2":["d1","d2"],"text_1":["q1","q2"]}'
    shared_query = parse_valid_part("score", {"model": "m", "text_1": "q", "text_2": ["d"]})
    assert parse_valid_part("score", {"model": "m", "text_2": ["d"]}).merge_key not in (
        first.merge_key,
        shared_query.merge_key,
    )
    assert shared_query.merge_key not in (
        first.merge_key,
        parse_valid_part("score", {"model": "m", "text_1": "r", "text_2": ["d"]}).merge_key,
    )
    for names in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        assert parse_valid_part("score", dict(zip(names, (["a", "b"], ["c", "d"]), strict=True))).size == 2


def test_single_text_to_classify_is_answered_without_a_list() -> None:
    parts = [parse_valid_part("predict", {"inputs": value}) for value in ("a", ["b", "c"], [["d"]])]
    assert merge_parts(parts) == b'{"inputs":[["a"],["b", "c"],["d"]]}'
    assert split_valid_answer(parts, b"[[1],[2],[3]]") == [b"[1]", b"[2]", b"[[3]]"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/embeddings", "embeddings"),
        ("/openai/deployments/x/embeddings?api-version=1", "embeddings"),
        ("/v1/models/x:predict", "tensorflow"),
        ("/v1/models/x/versions/3:predict", "tensorflow"),
        ("/v2/models/x/infer", "kserve"),
        ("/v2/models/x/versions/1/infer", "kserve"),
        ("/v2/rerank", "rerank"),
        ("/rerank", "rerank"),
        ("/v1/score", "score"),
        ("/embed", "embed"),
        ("/predict", "predict"),
        ("/v1/chat/completions", None),
        ("/v2/models/x/generate", None),
        ("/embeddings/1", None),
        ("", None),
    ],
)
def test_shape_is_found_by_the_path(path: str, name: str | None) -> None:
    found = find_shape(path)
    assert (found and found.name) == name


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_has_its_name_and_a_test_server(name: str) -> None:
    assert SHAPES[name].name == name
    assert name in PATHS
