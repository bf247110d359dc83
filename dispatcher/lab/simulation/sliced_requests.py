"""Batch requests that the simulated dispatcher sends in slices, and the answers of the simulated servers.

The prompt of a request has the number of its context tokens and the number of tokens that the servers will
generate for it. The text of each token is one dot, so the dots in the prompt of a later slice say how many
tokens there are already.
"""

from __future__ import annotations

from math import isnan

import msgspec

from dispatcher.lab.simulation.world import Job
from dispatcher.lab.standin.model import TOKEN_S
from dispatcher.requests.request import Request

PATH = "/v1/completions"
PAYLOAD_TEMPLATE = b'{"prompt":"%d:%d","max_tokens":"%d"}'
"""Template of the payload of a request, filled in with its context and twice with its number of tokens. The
last one becomes a number."""
_DOT = b"."
_ANSWER_TEMPLATE = (
    b'{"id":"%b","object":"text_completion","created":1,"model":"m",'
    b'"choices":[{"index":0,"text":"%b","finish_reason":%b}],'
    b'"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}'
)


class _Body(msgspec.Struct):
    prompt: str
    max_tokens: int


_decode = msgspec.json.Decoder(_Body).decode


def build_options(slice_tokens: int | None, *, revokes: bool) -> dict[type, object]:
    """Return the options of the feature for slices of this number of tokens. `None` to send each request in
    one call. `revokes` is True to end slices early for realtime requests."""
    if slice_tokens is None:
        return {}
    # A build without the feature simulates whole requests.
    from dispatcher.features.slices.eligibility import SliceTerms
    from dispatcher.features.slices.options import SliceOptions

    terms = SliceTerms(slice_tokens, min_tokens=slice_tokens + 1, paths=(PATH,))
    # The simulated servers are not checked: they do not generate text that could differ.
    options = SliceOptions(is_on=True, terms=terms, skips_check=True, is_streamed=revokes, revokes=revokes)
    return {SliceOptions: options}


def parse_payload(payload: bytes) -> tuple[int, int, int, int]:
    """Return the context tokens and the tokens of the whole request, the number of those that were generated
    before, and the maximum for this call."""
    body = _decode(payload)
    size = body.prompt.rstrip(_DOT.decode())
    context, _, tokens = size.partition(":")
    return int(context), int(tokens), len(body.prompt) - len(size), body.max_tokens


def build_answer(request: Request, job: Job) -> bytes:
    """Return the answer to a slice."""
    return _fill_template(request, job, job.tokens, b'"length"')


def build_events(request: Request, job: Job, until: float) -> list[bytes]:
    """Return the events of a streamed slice with the tokens that it has generated until a time."""
    tokens = _count_generated_tokens(job, until)
    return [b"data: %b\n\n" % _fill_template(request, job, tokens, b"null")] if tokens > 0 else []


def _fill_template(request: Request, job: Job, tokens: int, finish_reason: bytes) -> bytes:
    prompt_tokens = job.context_tokens + job.earlier_tokens
    return _ANSWER_TEMPLATE % (
        request.id.encode(),
        _DOT * tokens,
        finish_reason,
        prompt_tokens,
        tokens,
        prompt_tokens + tokens,
    )


def _count_generated_tokens(job: Job, until: float) -> int:
    if isnan(job.started_at):
        return job.recomputed_tokens
    until = min(until, job.ends_at if isnan(job.finished_at) else job.finished_at)
    done_s = job.work_s * (until - job.started_at) / (job.ends_at - job.started_at)
    new_tokens = job.tokens - job.recomputed_tokens
    first_token_s = job.work_s - TOKEN_S * new_tokens
    return job.recomputed_tokens + max(0, min(new_tokens, int((done_s - first_token_s) / TOKEN_S)))
