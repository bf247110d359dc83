"""Program that serves a GGUF model by llama.cpp on a free port of 127.0.0.1, and prints its address.

python -m tests.engine.serve model.gguf [slots tokens]

With a number of slots, they share a KV memory of so many tokens, as in other engines.
"""

from __future__ import annotations

import signal
import sys

from xllamacpp import CommonParams, Server

from tests.support import die_with_parent


def serve(model: str, slots: int = 1, kv_tokens: int | None = None) -> None:
    """Serve the model until this process is stopped."""
    params = CommonParams()
    params.model.path = model
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.n_parallel = slots
    if kv_tokens is not None:
        params.n_ctx, params.kv_unified, params.endpoint_slots = kv_tokens, True, True
        params.cache_prompt, params.cache_ram_mib = False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    # Each token is computed in a batch of its own. Otherwise the numbers of a token in the prompt differ
    # slightly from those of the same token when it was generated. With llama.cpp's defaults and no cached
    # prompt, this changed 18 of 400 texts of 100 tokens.
    if slots == 1:
        params.n_ubatch = 1
    params.warmup = False
    params.verbosity = 1
    server = Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    die_with_parent()
    serve(sys.argv[1], *(int(argument) for argument in sys.argv[2:]))
