"""Checks of the log of the stand-in gateway: the order of sequences, and calls for slices."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec

from tests.scenarios.processes import LogEntry

MAX_CHECK_PROMPT = 150
"""Prompts of the check whether a model continues generations have at most this many tokens."""


def find_order_errors(entries: list[LogEntry], turns: int) -> list[str]:
    """Return the violations of the order of one sequence at the gateway."""
    numbers = [int(entry.id.split("-")[1]) for entry in entries]
    errors = []
    for before, after in pairwise(numbers):
        if after not in (before, before + 1):
            errors.append(f"{after} after {before}")
    for first, second in pairwise(entries):
        if (
            first.ended_at is None or first.ended_at > second.arrived_at + 0.05
        ):  # the gateway notices a killed client late
            errors.append(f"{second.id} beside {first.id}")
        if first.status == 0 and second.id != first.id:
            errors.append(f"{second.id} after {first.id}, which had no answer")
    if numbers[:1] != [0] or set(numbers) != set(range(turns)):
        errors.append(f"not all: {numbers}")
    return errors


def list_slices(entries: list[LogEntry]) -> list[LogEntry]:
    """Return the log without the calls that check whether a model continues generations."""
    return [entry for entry in entries if entry.prompt_tokens > MAX_CHECK_PROMPT]


def summarize(body: str | bytes) -> tuple[Any, ...]:
    """Return what must not differ between an answer in slices and that of one call."""
    answer = msgspec.json.decode(body)
    choice, usage = answer["choices"][0], answer["usage"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return text, choice["finish_reason"], answer["model"], usage["prompt_tokens"], usage["completion_tokens"]
