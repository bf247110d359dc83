"""Batch requests that the simulated dispatcher sends in slices, and the answers of the simulated servers.

The prompt of a request is the number of tokens that the servers will generate for it, and the text of each
token is one dot. So the dots in the prompt of a later slice say how many tokens there are already.
"""

from __future__ import annotations

import msgspec

from dispatcher.core.requests.request import Request
from dispatcher.core.slices.eligibility import SliceTerms
from dispatcher.dispatch.options import SliceOptions
from dispatcher.lab.simulation.world import Job
from dispatcher.lab.standin.model import BATCH_CONTEXT

PATH = "/v1/completions"
PAYLOAD_TEMPLATE = b'{"prompt":"%d","max_tokens":"%d"}'
"""Template of the payload of a request, filled in twice with its number of tokens. The second one becomes a
number."""
_DOT = b"."
_ANSWER_TEMPLATE = (
    b'{"id":"%b","object":"text_completion","created":1,"model":"m",'
    b'"choices":[{"index":0,"text":"%b","finish_reason":"length"}],'
    b'"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}'
)


class _Body(msgspec.Struct):
    prompt: str
    max_tokens: int


_decode = msgspec.json.Decoder(_Body).decode


def build_options(slice_tokens: int | None) -> SliceOptions:
    """Return the options for slices of this number of tokens. `None` to send each request in one call."""
    if slice_tokens is None:
        return SliceOptions()
    terms = SliceTerms(slice_tokens, min_tokens=slice_tokens + 1, paths=(PATH,))
    # The simulated servers are not checked: they do not generate text that could differ.
    return SliceOptions(is_on=True, terms=terms, skips_check=True)


def parse_payload(payload: bytes) -> tuple[int, int, int]:
    """Return the number of tokens of the whole request, the number of those that were generated before, and
    the maximum for this call."""
    body = _decode(payload)
    number = body.prompt.rstrip(_DOT.decode())
    return int(number), len(body.prompt) - len(number), body.max_tokens


def build_answer(request: Request, job: Job) -> bytes:
    """Return the answer to a slice."""
    prompt_tokens = BATCH_CONTEXT + job.earlier_tokens
    text = _DOT * job.tokens
    return _ANSWER_TEMPLATE % (
        request.id.encode(),
        text,
        prompt_tokens,
        job.tokens,
        prompt_tokens + job.tokens,
    )
