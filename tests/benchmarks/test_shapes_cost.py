"""What list calls cost to read, merge and split, beside a floor of the same moments (tests/floors.py)."""

from __future__ import annotations

import json

import msgspec

from dispatcher.core.merging.shapes import SHAPES, merge_parts, parse_part, split_answer
from tests.floors import beside, cpu_of
from tests.listcalls import part, text_of

BODY = text_of(
    {"model": "text-embedding-3-small", "input": "x" * 110, "encoding_format": "float", "user": "u1"}
)


async def test_reading_and_merging_cost_little_beside_what_it_would_take_to_decode_them() -> None:
    """200 bytes: 10 µs; 32 of them: 100 µs."""
    parts = [part("embeddings", BODY) for _ in range(32)]
    found = await beside(
        cpu_of(lambda: [parse_part(SHAPES["embeddings"], BODY) for _ in range(300)]),
        cpu_of(lambda: [json.loads(BODY) for _ in range(300)]),
    )
    print(f"{len(BODY)} bytes: read in {found.ours / 300 * 1e6:.1f} µs, {found.ratio:.1f} × json.loads")
    assert found.ratio < 8
    merged = await beside(
        cpu_of(lambda: [merge_parts(parts) for _ in range(300)]),
        cpu_of(lambda: [json.loads(BODY) for _ in range(300)]),
    )
    print(f"32 merged in {merged.ours / 300 * 1e6:.1f} µs, {merged.ratio:.1f} × json.loads of one")
    assert merged.ratio < 12


async def test_splitting_costs_less_than_to_decode_the_answer() -> None:
    """32 vectors of 768 numbers: 300 µs."""
    parts = [part("embeddings", {"model": "m", "input": f"text {at}"}) for at in range(32)]
    vectors = [[round(((at * 31 + n * 17) % 1999 - 999) / 7919, 8) for n in range(768)] for at in range(32)]
    data = [{"object": "embedding", "index": at, "embedding": vector} for at, vector in enumerate(vectors)]
    body = msgspec.json.encode({"object": "list", "data": data, "model": "m", "usage": {"prompt_tokens": 99}})
    found = await beside(
        cpu_of(lambda: [split_answer(parts, body) for _ in range(20)]),
        cpu_of(lambda: [msgspec.json.decode(body) for _ in range(20)]),
    )
    print(f"{len(body)} bytes: split in {found.ours / 20 * 1e6:.0f} µs, {found.ratio:.2f} × decoding it")
    assert found.ratio < 0.6
