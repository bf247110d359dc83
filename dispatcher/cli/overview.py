"""State of the queue and of a dispatcher, for `status`, `explain` and `top`.

Both are asked at the same time, and each is shown even if the other one does not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dispatcher.cli.admin_client import (
    AdminAddress,
    StatusProblem,
    StatusProblemKind,
    fetch_status_document,
    parse_admin_address,
)
from dispatcher.cli.connection import QueueLocation, QueueOptions, locate_queue, suggest_other_queues
from dispatcher.cli.terminal import exit_error
from dispatcher.telemetry.status import Status, decode_status

if TYPE_CHECKING:
    from dispatcher.requests.queue_counts import QueueCounts

COUNT_NAMES = ("pending", "leased", "delayed", "dead")
AdminUrl = Annotated[
    str,
    typer.Option(
        "--admin-url",
        metavar="URL",
        help="Dispatcher to ask, http://host:port. Default: from the configuration, on this machine.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class DispatcherOptions(QueueOptions):
    """Options that select the queue and the dispatcher of a verb."""

    admin_url: AdminUrl = ""


@dataclass(frozen=True, slots=True)
class Overview:
    """State of the queue and of a dispatcher at one moment."""

    queue: str | None = None
    """Name of the queue. `None` if the configuration does not say it."""
    counts: QueueCounts | None = None
    """Number of requests by location. `None` if the queue cannot be read."""
    pause: tuple[str, str] | None = None
    """Operator who paused the queue, and the reason. `None` if it is not paused, or cannot be read."""
    queue_problem: str | None = None
    """Reason why the queue cannot be read."""
    document: Mapping[str, Any] | None = None
    """/status of the dispatcher as it was sent. `None` if none answers."""
    dispatcher: Status | None = None
    """The decoded `document`."""
    dispatcher_problem: StatusProblem | None = None
    """Reason why no dispatcher answers."""
    config_problems: Sequence[str] = ()

    @property
    def is_of_other_queue(self) -> bool:
        """True if the dispatcher that answers works on another queue."""
        return bool(self.dispatcher and self.queue and self.dispatcher.process.queue != self.queue)

    def to_dict(self) -> dict[str, Any]:
        """Return the overview as --json prints it. /status is printed as it was sent, with unknown fields."""
        problem = self.dispatcher_problem
        return {
            "queue": self.queue,
            **{name: getattr(self.counts, name, None) for name in COUNT_NAMES},
            "paused": None if self.pause is None else {"by": self.pause[0], "why": self.pause[1]},
            "queue_problem": self.queue_problem,
            "dispatcher": self.document,
            "dispatcher_problem": str(problem) if problem else None,
            "dispatcher_problem_kind": problem.kind if problem else None,
            "config_problems": [*self.config_problems],
        }


def locate_targets(where: DispatcherOptions) -> tuple[QueueLocation, AdminAddress | None]:
    """Return the location of the queue and the address of the dispatcher.

    Exits with 2 if nothing is named.
    """
    location = locate_queue(where.config, where.queue_url, where.queue, where.pool)
    try:
        return location, parse_admin_address(location.admin, where.admin_url)
    except ValueError as error:
        raise exit_error(f"--admin-url: {error}", 2) from error


async def fetch_overview(
    location: QueueLocation, address: AdminAddress | None, *, suggests_queues: bool = False
) -> Overview:
    """Return the state of queue and dispatcher.

    `suggests_queues`: print the names of other queues if the default queue does not exist.
    """
    # At once, so that one that does not answer does not delay the other.
    (counts, pause, queue_problem), answer = await asyncio.gather(
        _read_queue(location, suggests_queues=suggests_queues), _ask_dispatcher(address)
    )
    overview = Overview(
        queue=location.names.queue if location.names else None,
        counts=counts,
        pause=pause,
        queue_problem=queue_problem,
        config_problems=[str(each) for each in location.problems],
    )
    if isinstance(answer, StatusProblem):
        return replace(overview, dispatcher_problem=answer)
    return replace(overview, document=answer, dispatcher=decode_status(answer))


async def _ask_dispatcher(address: AdminAddress | None) -> Mapping[str, Any] | StatusProblem:
    if address is None:
        why = "neither --config nor --admin-url says where to ask"
        return StatusProblem(StatusProblemKind.NO_ADDRESS, why)
    return await fetch_status_document(address)


async def _read_queue(
    location: QueueLocation, *, suggests_queues: bool
) -> tuple[QueueCounts | None, tuple[str, str] | None, str | None]:
    """Return the counts of the queue and its pause, or else the reason why it cannot be read."""
    url = location.find_queue_url()
    if location.names is None:
        return None, None, "the configuration does not tell which queue it is"
    if url is None:
        return None, None, location.unavailable_reason
    from dispatcher.queue.redis.connect import QueueUrlError, connect
    from dispatcher.queue.redis.queue_admin import RedisQueueAdmin
    from dispatcher.requests.submission import QueueUnavailableError

    try:
        admin = RedisQueueAdmin(connect(url), location.names)
    except QueueUrlError as error:
        raise exit_error(str(error), 2) from error
    try:
        counts, pause = await admin.count_requests(), await admin.read_pause()
        if suggests_queues and location.is_guessed:
            await suggest_other_queues(admin)
    except QueueUnavailableError as error:
        return None, None, str(error)
    finally:
        await admin.aclose()
    return counts, pause, None
