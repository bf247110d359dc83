"""New submission of a dead request."""

from __future__ import annotations

from dispatcher.queue.keys import QueueNames
from dispatcher.requests.request import Rejection, encode_member, parse_member
from dispatcher.requests.score import PRIORITIES, PRIORITY_STEP, compute_score
from dispatcher.requests.submission import Submission


def build_resubmission(names: QueueNames, member: bytes, score: float, deadline: int) -> Submission | None:
    """Return a dead request as a new submission with another deadline and the same priority. `None` if it is
    unreadable.

    If its results went to the own list of a client, which has ended by now, they go to the list of the
    request's id.
    """
    request = parse_member(member)
    if isinstance(request, Rejection):
        return None
    again = encode_member(
        request.id,
        request.payload,
        deadline,
        created=request.created,
        endpoint=request.endpoint,
        headers=request.headers,
        metadata=request.metadata,
        token=request.token,
        results=names.result_list_for_id(request.id)
        if names.is_anonymous_client_list(request.results)
        else request.results,
        labels=request.labels,
        kind=request.kind,
        queue=request.queue,
        queue_id=request.queue_id,
        correlation_id=request.correlation_id,
        extra=None if request.extra is None else request.extra.move_to_end(),
    )
    # A foreign producer may have used a score without a priority: such a request gets the first one.
    band = score // PRIORITY_STEP
    priority = int(band) if band in PRIORITIES else 0
    return Submission(again, compute_score(deadline, priority), request.id, request.token, deadline)
