"""`batch-dispatcher submit`: submit one request and wait for its result, or submit a batch file."""

from __future__ import annotations

import secrets
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from dispatcher.cli.submit_file import (
    BodyTemplate,
    Errors,
    File,
    Group,
    Ordered,
    Output,
    SequenceBy,
    SkipBad,
    TemplateField,
    find_body_mismatch,
    make_file_options,
    make_file_paths,
    submit_file,
)
from dispatcher.cli.terminal import exit_error, print_json, print_lines, print_note, print_warning
from dispatcher.core.patterns import matches_any

if TYPE_CHECKING:
    from dispatcher.client import Item
    from dispatcher.core.requests.result import PoppedResult
    from dispatcher.ports import Submission
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin

DEFAULT_DEADLINE_S = 3600.0
DEFAULT_FILE_DEADLINE_S = 86_400.0
Pairs = Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="May be repeated.")]
GRACE_S = 10.0
"""Time after the deadline within which a dispatcher answers, if there is one."""


def submit(
    payload: Annotated[
        str | None, typer.Argument(help="The request body, a JSON object; - reads standard input.")
    ] = None,
    file: File = None,
    output: Output = None,
    errors: Errors = None,
    skip_bad: SkipBad = False,
    ordered: Ordered = False,
    group: Group = "prefix",
    sequence_by: SequenceBy = "",
    template: BodyTemplate = None,
    field: TemplateField = "",
    *,
    where: QueueOptions,
    request_id: Annotated[str, typer.Option("--id", help="Default: a random one.")] = "",
    endpoint: Annotated[str, typer.Option(help="The gateway's path; default: gateway.path.")] = "",
    deadline: DeadlineOrNone = None,
    priority: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=9, help="0 is served first.")
    ] = None,
    header: Pairs = None,
    metadata: Pairs = None,
    label: Labels = None,
    no_slicing: Annotated[
        bool,
        typer.Option("--no-slicing", help="Send each request in one call, also if slicing is on."),
    ] = False,
    sequence: Annotated[
        str, typer.Option("--sequence", metavar="ID", help="Sequence, to which the request is appended.")
    ] = "",
    no_wait: Annotated[
        bool,
        typer.Option(
            "--no-wait", help="Print the id once the request is in the queue, without waiting for the result."
        ),
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")] = False,
) -> None:
    """Submit one request, wait for its result and print it, or submit a whole batch file.

    The id is printed first, on standard error, and `result ID` finds the result again. The same command
    resumes a batch file that was interrupted. Exit code 1: the result is an error, there is no result, or
    some lines of the file failed.
    """
    target = find_queue(where)
    headers, attributes = dict(parse_pairs("--header", header)), dict(parse_pairs("--metadata", metadata))
    labels = dict(parse_pairs("--label", label))
    if file is not None:
        if payload is not None or request_id or no_wait or sequence:
            raise exit_error("--file: give it no request, no --id, no --no-wait and no --sequence", 2)
        paths = make_file_paths(file, output, errors)
        options = make_file_options(
            target,
            deadline=DEFAULT_FILE_DEADLINE_S if deadline is None else deadline,
            priority=priority,
            headers=headers,
            metadata=attributes,
            labels=labels,
            slicing=not no_slicing,
            endpoint=endpoint,
            template=template,
            field=field,
            group=group,
            sequence_by=sequence_by,
            ordered=ordered,
            skip_bad=skip_bad,
        )
        submit_file(target, paths, options, as_json=json_output)  # exits
    if payload is None:
        raise exit_error("give a request, or --file", 2)
    # Without a configuration the allowed paths are not known; the dispatcher checks them anyway.
    if endpoint and target.settings and not matches_any(target.settings.gateway.allowed_paths, endpoint):
        raise exit_error(
            f"--endpoint {endpoint}: not among gateway.allowed_paths: no dispatcher would send it", 2
        )
    from dispatcher.client import Item

    body = sys.stdin.buffer.read() if payload == "-" else payload.encode(errors="surrogateescape")
    # deadline: seconds from now, not a point in time.
    item = Item(
        body,
        path=endpoint,
        id=request_id or f"r-{secrets.token_hex(8)}",
        deadline=DEFAULT_DEADLINE_S if deadline is None else deadline,
        priority=priority,
        headers=headers,
        metadata=attributes,
        labels=labels,
        sequence=sequence or None,
        slicing=not no_slicing,
    )
    _submit_one(target, item, body, wait=not no_wait, json_output=json_output)


def _submit_one(target: QueueTarget, item: Item, body: bytes, *, wait: bool, json_output: bool) -> None:
    import msgspec

    from dispatcher.client.item import TokenGenerator, build_submission
    from dispatcher.core.sequences.turns import Turn

    # A list of its own for each id, so that `result ID` finds the result from any machine.
    results = target.names.result_list_for_id(item.id) if wait else ""
    try:
        submission = build_submission(
            item, TokenGenerator().make_token(), queue=target.names.queue, results=results
        )
    except ValueError as error:
        raise exit_error(f"{error}{_suggest_file(body)}", 2) from error
    # A line of a batch file is valid JSON, but a model server would reject it.
    if {"custom_id", "url", "body"} <= msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys():
        message = (
            "this is a line of an OpenAI batch file: submit --file sends those (to send it alone, give what "
            "stands under `body`, and as --endpoint what stands under `url`)"
        )
        raise exit_error(message, 2)
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
            turn = Turn(str(item.sequence), secret=await admin.get_or_create_sequence_secret())
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


def _suggest_file(body: bytes) -> str:
    """Return a hint if the body is the name of a file. Empty if it is not."""
    name = body.decode(errors="replace")
    try:
        is_file = Path(name).is_file()
    except (OSError, ValueError):  # too long for a name, or with a zero byte
        is_file = False
    return f"; it is a file: a batch file is sent by --file {name}, one body by - < {name}" if is_file else ""


async def _read_result(admin: RedisQueueAdmin, submission: Submission) -> PoppedResult | None:
    """Return the result of a submission, or `None` if there is none yet.

    Others can write to the list of the id, so a result must have the token of the request.
    """
    from dispatcher.core.requests.result import decode_result

    for encoded in await read_results_by_id(admin, submission.request_id):
        if (result := decode_result(encoded)).request_token == submission.request_token:
            return result
    return None
