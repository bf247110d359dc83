"""Cost of parsing, merging and splitting list calls, compared with a baseline (tests/cost_comparison.py)."""

from __future__ import annotations

import json

import msgspec

from dispatcher.features.merging.shapes import SHAPES, merge_parts, parse_part, split_answer
from tests.cost_comparison import compare_costs, measure_cpu_s
from tests.list_calls import encode_body, parse_valid_part

BODY = encode_body(
    {"model": "text-embedding-3-small", "input": "x" * 110, "encoding_format": "float", "user": "u1"}
)


async def test_parsing_and_merging_cost_little_compared_with_decoding() -> None:
    """Parsing 200 bytes takes 10 µs, merging 32 of them 100 µs."""
    parts = [parse_valid_part("embeddings", BODY) for _ in range(32)]
    comparison = await compare_costs(
        measure_cpu_s(lambda: [parse_part(SHAPES["embeddings"], BODY) for _ in range(300)]),
        measure_cpu_s(lambda: [json.loads(BODY) for _ in range(300)]),
    )
    print(
        f"{len(BODY)} bytes: parsed in {comparison.ours / 300 * 1e6:.1f} µs, "
        f"{comparison.ratio:.1f} × json.loads"
    )
    assert comparison.ratio < 8
    comparison_of_merging = await compare_costs(
        measure_cpu_s(lambda: [merge_parts(parts) for _ in range(300)]),
        measure_cpu_s(lambda: [json.loads(BODY) for _ in range(300)]),
    )
    print(
        f"32 merged in {comparison_of_merging.ours / 300 * 1e6:.1f} µs, "
        f"{comparison_of_merging.ratio:.1f} × json.loads of one"
    )
    assert comparison_of_merging.ratio < 12


async def test_splitting_an_answer_costs_less_than_decoding_it() -> None:
    """Splitting 32 vectors of 768 numbers takes 300 µs."""
    parts = [parse_valid_part("embeddings", {"model": "m", "input": f"text {index}"}) for index in range(32)]
    vectors = [
        [round(((index * 31 + n * 17) % 1999 - 999) / 7919, 8) for n in range(768)] for index in range(32)
    ]
    data = [
        {"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)
    ]
    body = msgspec.json.encode({"object": "list", "data": data, "model": "m", "usage": {"prompt_tokens": 99}})
    comparison = await compare_costs(
        measure_cpu_s(lambda: [split_answer(parts, body) for _ in range(20)]),
        measure_cpu_s(lambda: [msgspec.json.decode(body) for _ in range(20)]),
    )
    print(
        f"{len(body)} bytes: split in {comparison.ours / 20 * 1e6:.0f} µs, "
        f"{comparison.ratio:.2f} × decoding it"
    )
    assert comparison.ratio < 0.6
