"""Extract the text that a model generated from answers of chat completions, completions and responses."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class _ContentPart(msgspec.Struct):
    """Part of the content of a message. Its type is `text` in chat completions, and `output_text` in
    responses."""

    type: str = ""
    text: msgspec.Raw = msgspec.Raw()


class _ChatMessage(msgspec.Struct):
    content: str | list[_ContentPart] | None = None


class _AnswerChoice(msgspec.Struct):
    """Choice of a chat completion (`message`), or of a completion (`text`)."""

    message: _ChatMessage | None = None
    text: str | None = None


class _OutputItem(msgspec.Struct):
    """Output item of a response: a message, a tool call, or reasoning."""

    type: str = ""
    content: msgspec.Raw = msgspec.Raw()


class _AnswerWithText(msgspec.Struct):
    choices: list[_AnswerChoice] | None = None
    output: list[_OutputItem] | None = None


_answer = msgspec.json.Decoder(_AnswerWithText)
_parts = msgspec.json.Decoder(list[_ContentPart])
_text = msgspec.json.Decoder(str)


def extract_answer_text(body: bytes) -> str | None:
    """Return the text of the first choice, or of all messages of a response, joined.

    `None` if the answer has no text: an answer of another kind (embeddings), a tool call, or a body that
    cannot be decoded.
    """
    try:
        answer = _answer.decode(body)
        # Completions and chat completions have `choices`, responses have `output`.
        if answer.choices:
            return _extract_choice_text(answer.choices[0])
        messages = [item for item in answer.output or () if item.type == "message"]
        message_texts = [_join_texts(_parts.decode(item.content), "output_text") for item in messages]
    except (msgspec.DecodeError, RecursionError):
        return None
    texts = [each for each in message_texts if each is not None]
    return "".join(texts) if texts else None


def _extract_choice_text(choice: _AnswerChoice) -> str | None:
    if choice.message is None:
        return choice.text
    message_content = choice.message.content
    return _join_texts(message_content, "text") if isinstance(message_content, list) else message_content


def _join_texts(parts: Sequence[_ContentPart], kind: str) -> str | None:
    texts = [_text.decode(part.text) for part in parts if part.type == kind]
    return "".join(texts) if texts else None
