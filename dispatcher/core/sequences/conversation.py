"""Conversations that the dispatcher continues: compute the body of a turn, and the state for the next turn.

    chat        `messages` of the body: all messages that were sent before, the message of each answer as it
                came, then the messages of this turn; byte for byte as a client that keeps the conversation
                sends it
    responses   `previous_response_id`: the server keeps the conversation, and the state is the `id` of its
                answer

No value is decoded and encoded again. The conversation state is the list of messages, or the id, as JSON. If
there is none, because it is too long or the answer lacks it, the state is the reason, and the next turn is
rejected with it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from dispatcher.core.merging.shapes.fields import fields, items, loose_fields, place_of, text_of
from dispatcher.core.merging.shapes.part import NotUnderstoodError
from dispatcher.core.requests.request import Request
from dispatcher.core.sequences.turns import Session

# Marks a state that is a reason instead of JSON, which never begins with this byte.
_FAULT = b"!"
_MESSAGES, _PREVIOUS = "messages", "previous_response_id"
_ID = re.compile(rb'"[^"\\\x00-\x1f]{1,500}"')


@dataclass(frozen=True, slots=True)
class NotCarried:
    """The conversation cannot continue."""

    why: str
    """One sentence that says why."""


def spoken(payload: bytes, carried: bytes, most_bytes: int) -> bytes | NotCarried:
    """Return the body to send. `conversation` is the state that the previous turns left, empty for the first
    turn."""
    if carried.startswith(_FAULT):
        return NotCarried(carried[1:].decode())
    try:
        # The strict parser: with a field given twice, server and dispatcher might read different messages.
        found = fields(text_of(payload))
        if found.get("stream") == msgspec.Raw(b"true"):
            return NotCarried("an answer that is streamed cannot be carried on: leave out `stream`")
        if _MESSAGES in found:
            return _with_messages(payload, found[_MESSAGES], carried, most_bytes)
    except (NotUnderstoodError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return NotCarried(f"its body cannot be carried on: {error}")
    if "input" not in found:
        return NotCarried("its body has neither `messages` nor `input` to be carried on")
    if not carried or _PREVIOUS in found:
        return payload
    if carried[:1] != b'"':
        return NotCarried("its sequence carries messages, and its body has `input`")
    # The body has `input`, so the inserted first field is followed by a comma.
    return b'{"%b":%b,%b' % (_PREVIOUS.encode(), carried, payload[1:].lstrip())


def left(sent: bytes, answer: bytes, most_bytes: int) -> bytes:
    """Return the conversation state for the next turn, given the body that was sent and the answer to it."""
    found = _left(sent, answer, most_bytes)
    return _FAULT + found.why.encode(errors="replace") if isinstance(found, NotCarried) else found


def equipped(request: Request, payload: bytes, session: Session) -> Request:
    """Return the request as it is sent in its turn."""
    return replace(request, payload=payload, session=session)


def _left(sent: bytes, answer: bytes, most_bytes: int) -> bytes | NotCarried:
    try:
        found, told = fields(sent), loose_fields(text_of(answer))
        if _MESSAGES not in found:
            response_id = bytes(told.get("id", msgspec.Raw()))
            if not _ID.fullmatch(response_id):
                return NotCarried("the answer has no id that the next turn could name")
            return response_id
        choices = items(told.get("choices", msgspec.Raw(b"[]")))
        message = bytes(loose_fields(bytes(choices[0])).get("message", msgspec.Raw())) if choices else b""
        if message[:1] != b"{":
            return NotCarried("the answer has no message that the next turn could be built on")
        conversation = _joined(bytes(found[_MESSAGES]), b"[%b]" % message)
    except (NotUnderstoodError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return NotCarried(f"the answer cannot be carried on: {error}")
    if len(conversation) > most_bytes:
        return NotCarried(_too_long(len(conversation), most_bytes))
    return conversation


def _with_messages(payload: bytes, own: msgspec.Raw, carried: bytes, most_bytes: int) -> bytes | NotCarried:
    if bytes(own)[:1] != b"[":
        return NotCarried("`messages` is no list")
    if carried and carried[:1] != b"[":
        return NotCarried("its sequence carries a response's id, and its body has `messages`")
    # Raises if the list is malformed; the items are not needed.
    items(own)
    together = _joined(carried, bytes(own)) if carried else bytes(own)
    if len(together) > most_bytes:
        return NotCarried(_too_long(len(together), most_bytes))
    start = place_of(payload, _MESSAGES)
    return payload[:start] + together + payload[start + len(bytes(own)) :]


def _joined(before: bytes, after: bytes) -> bytes:
    """Return two lists joined, with their items as they are written."""
    first, then = before[1:-1].strip(), after[1:-1].strip()
    return b"[%b]" % (b",".join([each for each in (first, then) if each]))


def _too_long(size: int, most_bytes: int) -> str:
    return f"the conversation has {size} bytes, and sequences.max_carry_bytes is {most_bytes}"
