"""`batch-dispatcher submit`: submit one request and wait for its result."""

from __future__ import annotations

import json
import secrets
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from dispatcher.cli.connection import (
    DeadlineOrNone,
    Labels,
    QueueOptions,
    QueueTarget,
    find_queue,
    parse_pairs,
    run_with_admin,
)
from dispatcher.cli.find_requests import read_results_by_id
from dispatcher.cli.result import describe_wait, exit_still_queued, print_result, wait_for_result
from dispatcher.cli.terminal import exit_error, print_json, print_lines, print_note, print_warning
from dispatcher.common.patterns import matches_any
from dispatcher.features import FEATURES

if TYPE_CHECKING:
    from dispatcher.client import Item
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
    from dispatcher.requests.submission import Submission
    from dispatcher.wire_format import PoppedResult

DEFAULT_DEADLINE_S = 3600.0
Pairs = Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="May be repeated.")]
HAS_SEQUENCES = "sequences" in FEATURES
GRACE_S = 10.0
"""Time after the deadline within which a dispatcher answers, if there is one."""

JsonResult = Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")]
Payload = Annotated[
    str | None, typer.Argument(help="The request body, a JSON object; - reads standard input.")
]


class RequestMaps(TypedDict):
    """Arguments of an `Item` that map names to values."""

    headers: dict[str, str]
    metadata: dict[str, str]
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of requests, whether one is submitted or many."""

    path: Annotated[
        str, typer.Option(help="Path at the gateway, such as /v1/embeddings; default: gateway.path.")
    ] = ""
    deadline: DeadlineOrNone = None
    priority: Annotated[int | None, typer.Option(metavar="N", min=0, max=9, help="0 is served first.")] = None
    header: Pairs = None
    metadata: Pairs = None
    label: Labels = None
    no_slicing: Annotated[
        bool,
        typer.Option("--no-slicing", help="Send each request in one call, also if slicing is on."),
    ] = False

    def parse_maps(self) -> RequestMaps:
        """Return headers, metadata and labels. Exits with 2 if one is invalid."""
        return {
            "headers": dict(parse_pairs("--header", self.header)),
            "metadata": dict(parse_pairs("--metadata", self.metadata)),
            "labels": dict(parse_pairs("--label", self.label)),
        }


@dataclass(frozen=True, slots=True)
class SingleOptions:
    """Options of a request that is submitted alone."""

    request_id: Annotated[str, typer.Option("--id", help="Default: a random one.")] = ""
    sequence: Annotated[
        str,
        typer.Option(
            "--sequence",
            metavar="ID",
            help="Sequence, to which the request is appended.",
            hidden=not HAS_SEQUENCES,
        ),
    ] = ""
    no_wait: Annotated[
        bool,
        typer.Option(
            "--no-wait", help="Print the id once the request is in the queue, without waiting for the result."
        ),
    ] = False


def submit(
    payload: Payload = None,
    *,
    where: QueueOptions,
    options: RequestOptions,
    single: SingleOptions,
    json_output: JsonResult = False,
) -> None:
    """Submit one request and print its result.

    The id is printed first, on standard error, and `result ID` finds the result again. Exit code 1: the
    result is an error, or there is no result.
    """
    if payload is None:
        raise exit_error("give a request", 2)
    submit_request(find_queue(where), read_body(payload), options, single, json_output=json_output)


def read_body(payload: str) -> bytes:
    """Return the body that an argument is, or that it says to read from standard input."""
    return sys.stdin.buffer.read() if payload == "-" else payload.encode(errors="surrogateescape")


def submit_request(
    target: QueueTarget, body: bytes, options: RequestOptions, single: SingleOptions, *, json_output: bool
) -> None:
    """Submit one request and print its result. Exits with 1 or 2 if that is not possible."""
    path, maps = options.path, options.parse_maps()
    # Without a configuration the allowed paths are not known; the dispatcher checks them anyway.
    if path and target.settings and not matches_any(target.settings.gateway.allowed_paths, path):
        raise exit_error(f"--path {path}: not among gateway.allowed_paths: no dispatcher would send it", 2)
    if single.sequence and not HAS_SEQUENCES:
        raise exit_error("--sequence: this build has no sequences", 2)
    from dispatcher.client import Item

    # deadline: seconds from now, not a point in time.
    item = Item(
        body,
        path=path,
        id=single.request_id or f"r-{secrets.token_hex(8)}",
        deadline=DEFAULT_DEADLINE_S if options.deadline is None else options.deadline,
        priority=options.priority,
        sequence=single.sequence or None,
        slicing=not options.no_slicing,
        **maps,
    )
    _submit_item(target, item, body, wait=not single.no_wait, json_output=json_output)


def _submit_item(target: QueueTarget, item: Item, body: bytes, *, wait: bool, json_output: bool) -> None:
    from dispatcher.client.item import TokenGenerator, build_submission

    # A list of its own for each id, so that `result ID` finds the result from any machine.
    results = target.names.result_list_for_id(item.id) if wait else ""
    try:
        submission = build_submission(
            item, TokenGenerator().make_token(), queue=target.names.queue, results=results
        )
    except ValueError as error:
        raise exit_error(str(error), 2) from error
    path = item.path or (target.settings.gateway.path if target.settings else "")
    if mismatch := find_body_mismatch(body, path):
        print_warning(f"the body {mismatch}")
    within_s = submission.deadline - time.time() + GRACE_S
    submitted, wait_reason = False, ""

    async def submit_and_wait(admin: RedisQueueAdmin) -> PoppedResult | None:
        nonlocal submission, submitted, wait_reason
        # The secret proves to the queue that this program may add to the sequence. It is only known once the
        # queue is connected, so the submission is made again with it.
        if item.sequence is not None:
            from dispatcher.features.sequences.queue import open_sequences
            from dispatcher.features.sequences.turns import Turn

            secret = await open_sequences(admin).get_or_create_sequence_secret()
            turn = Turn(str(item.sequence), secret=secret)
            item_in_sequence = replace(item, sequence=turn)
            submission = build_submission(
                item_in_sequence, submission.request_token, queue=target.names.queue, results=results
            )
        await admin.submit([submission])
        submitted = True
        if not wait:
            return None
        print_note(f"{item.id} submitted")  # before the wait: with the id the user can go on after Ctrl-C
        result = await wait_for_result(
            target, admin, item.id, lambda: _read_result(admin, submission), within_s
        )
        if result is None:
            wait_reason = await describe_wait(target, admin, item.id)
        return result

    try:
        result = run_with_admin(target, submit_and_wait)
    except KeyboardInterrupt:
        if submitted:
            raise exit_still_queued(item.id) from None
        raise
    if not wait:
        print_json({"id": item.id}) if json_output else print_lines(item.id)
    elif result is None:
        raise exit_error(f"no result for {item.id} within {within_s:.0f} s: {wait_reason}")
    else:
        print_result(result, json_output=json_output)


def find_body_mismatch(body: bytes, path: str) -> str:
    """Return why a body does not fit its path. Empty if there is no objection."""
    if not path.endswith("/completions") or path.endswith("/chat/completions"):
        return ""
    try:
        fields = json.loads(body)
    except ValueError:  # the code that parses the body reports it
        return ""
    if not isinstance(fields, dict) or "messages" not in fields or "prompt" in fields:
        return ""
    return f"has `messages`, and {path} takes a `prompt`: is --path /v1/chat/completions meant?"


async def _read_result(admin: RedisQueueAdmin, submission: Submission) -> PoppedResult | None:
    """Return the result of a submission, or `None` if there is none yet.

    Others can write to the list of the id, so a result must have the token of the request.
    """
    from dispatcher.requests.result import decode_result

    for encoded in await read_results_by_id(admin, submission.request_id):
        if (result := decode_result(encoded)).request_token == submission.request_token:
            return result
    return None
