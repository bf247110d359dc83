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

from dispatcher.requests.affinity import Affinity
from dispatcher.requests.json_fields import (
    NotUnderstoodError,
    check_utf8,
    find_value,
    parse_fields,
    parse_fields_loosely,
    parse_items,
)
from dispatcher.requests.request import Request

# Marks a state that is a reason instead of JSON, which never begins with this byte.
_FAULT = b"!"
_MESSAGES, _PREVIOUS = "messages", "previous_response_id"
_ID = re.compile(rb'"[^"\\\x00-\x1f]{1,500}"')


@dataclass(frozen=True, slots=True)
class CannotContinue:
    """The conversation cannot continue."""

    why: str
    """One sentence that says why."""


def build_payload(payload: bytes, conversation: bytes, max_bytes: int) -> bytes | CannotContinue:
    """Return the body to send. `conversation` is the state that the previous turns left, empty for the first
    turn."""
    if conversation.startswith(_FAULT):
        return CannotContinue(conversation[1:].decode())
    try:
        # The strict parser: with a field given twice, server and dispatcher might read different messages.
        body_fields = parse_fields(check_utf8(payload))
        if body_fields.get("stream") == msgspec.Raw(b"true"):
            return CannotContinue(
                "the conversation cannot continue with a streamed answer: leave out `stream`"
            )
        if _MESSAGES in body_fields:
            return _insert_messages(payload, body_fields[_MESSAGES], conversation, max_bytes)
    except (NotUnderstoodError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return CannotContinue(f"the conversation cannot continue with this body: {error}")
    if "input" not in body_fields:
        return CannotContinue("the conversation cannot continue: the body has neither `messages` nor `input`")
    if not conversation or _PREVIOUS in body_fields:
        return payload
    if conversation[:1] != b'"':
        return CannotContinue(
            "the conversation of the sequence consists of messages, and the body has `input`"
        )
    # The body has `input`, so the inserted first field is followed by a comma.
    return b'{"%b":%b,%b' % (_PREVIOUS.encode(), conversation, payload[1:].lstrip())


def encode_conversation(sent: bytes, answer: bytes, max_bytes: int) -> bytes:
    """Return the conversation state for the next turn, given the body that was sent and the answer to it."""
    conversation = _extend_conversation(sent, answer, max_bytes)
    return (
        _FAULT + conversation.why.encode(errors="replace")
        if isinstance(conversation, CannotContinue)
        else conversation
    )


def prepare_request(request: Request, payload: bytes, affinity: Affinity) -> Request:
    """Return the request as it is sent in its turn."""
    return replace(request, payload=payload, affinity=affinity)


def _extend_conversation(sent: bytes, answer: bytes, max_bytes: int) -> bytes | CannotContinue:
    try:
        body_fields, answer_fields = parse_fields(sent), parse_fields_loosely(check_utf8(answer))
        if _MESSAGES not in body_fields:
            response_id = bytes(answer_fields.get("id", msgspec.Raw()))
            if not _ID.fullmatch(response_id):
                return CannotContinue("the answer has no id that the next turn could name")
            return response_id
        choices = parse_items(answer_fields.get("choices", msgspec.Raw(b"[]")))
        message = (
            bytes(parse_fields_loosely(bytes(choices[0])).get("message", msgspec.Raw())) if choices else b""
        )
        if message[:1] != b"{":
            return CannotContinue("the answer has no message that the next turn could be built on")
        conversation = _join_lists(bytes(body_fields[_MESSAGES]), b"[%b]" % message)
    except (NotUnderstoodError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return CannotContinue(f"the conversation cannot continue with this answer: {error}")
    if len(conversation) > max_bytes:
        return CannotContinue(_describe_too_long(len(conversation), max_bytes))
    return conversation


def _insert_messages(
    payload: bytes, own_messages: msgspec.Raw, conversation: bytes, max_bytes: int
) -> bytes | CannotContinue:
    if bytes(own_messages)[:1] != b"[":
        return CannotContinue("`messages` is no list")
    if conversation and conversation[:1] != b"[":
        return CannotContinue(
            "the conversation of the sequence is the id of a response, and the body has `messages`"
        )
    # Raises if the list is malformed; the items are not needed.
    parse_items(own_messages)
    all_messages = _join_lists(conversation, bytes(own_messages)) if conversation else bytes(own_messages)
    if len(all_messages) > max_bytes:
        return CannotContinue(_describe_too_long(len(all_messages), max_bytes))
    start = find_value(payload, _MESSAGES)
    return payload[:start] + all_messages + payload[start + len(bytes(own_messages)) :]


def _join_lists(before: bytes, after: bytes) -> bytes:
    """Return two lists joined, with their items as they are written."""
    first, then = before[1:-1].strip(), after[1:-1].strip()
    return b"[%b]" % (b",".join([each for each in (first, then) if each]))


def _describe_too_long(size: int, max_bytes: int) -> str:
    return f"the conversation has {size} bytes, and sequences.max_carry_bytes is {max_bytes}"
