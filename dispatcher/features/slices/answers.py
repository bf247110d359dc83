"""Answers of slices: what a slice has generated, whether the generation continues, and the whole answer.

The whole answer is like that of one call: the text of all slices, their tokens, and the id of the first one.
Wherever a slice cannot be continued without doubt, the generation starts again from the beginning and is sent
whole, so that no consumer gets text that one call could not have returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from dispatcher.common.value import Value
from dispatcher.features.slices.eligibility import Generation, WholeReason
from dispatcher.features.slices.pieces import (
    NotContinuableError,
    Piece,
    Usage,
    count_token_ids,
    join_token_ids,
    read_piece,
)
from dispatcher.features.slices.progress import Progress, Stage, Time, encode_progress

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Character that many servers return for bytes that are no complete character."""
_WITHHELD_TOKENS = 3
"""Largest number of tokens of a part of a character, which some servers leave out of the text."""


class Unchanged(Value, frozen=True):
    """The answer is that of the request, as it came."""


class Finished(Value, frozen=True):
    """The generation has ended."""

    body: bytes
    """Answer of the whole generation."""
    slices: int
    cached_tokens: int
    """Tokens that later slices found in the prefix cache."""
    usage: Usage | None
    """Tokens of the last slice. `None` if its answer does not say them."""


class Continues(Value, frozen=True):
    """The generation goes on with another call."""

    progress: Progress
    usage: Usage | None = None
    """`None` if the slice has added nothing."""
    reason: WholeReason | None = None
    """Reason why the generation is not continued in slices. `None` if it is."""
    why: str = ""
    """The reason in one sentence."""


SliceResult = Unchanged | Finished | Continues


class _Kept(Value, frozen=True):
    """Values that are kept with the text."""

    max_bytes: int
    version: str
    session_token: str
    repeats_text: bool


class _Names(msgspec.Struct):
    """Names of an answer, which are those of the first one."""

    id: msgspec.Raw = msgspec.Raw(b"null")
    created: msgspec.Raw = msgspec.Raw(b"null")
    object: msgspec.Raw = msgspec.Raw(b"null")
    model: msgspec.Raw = msgspec.Raw(b"null")


class _End(msgspec.Struct):
    finish_reason: str | None = None


class _Ends(msgspec.Struct):
    choices: list[_End]


_T = TypeVar("_T")
_encode = msgspec.json.Encoder().encode
_decode_names = msgspec.json.Decoder(_Names).decode
_decode_ends = msgspec.json.Decoder(_Ends).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_time = msgspec.json.Decoder(Time).decode
# Most fields of an answer are passed on as they are written.
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_choices = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode


def interpret_answer(
    generation: Generation,
    progress: Progress | None,
    status: int,
    body: bytes,
    *,
    asked_tokens: int,
    max_kept_bytes: int,
    version: str = "",
    session_token: str = "",
    repeats_text: bool = False,
    is_cut: bool = False,
) -> SliceResult:
    """Return what the answer to a slice means. `progress` is that of the slices before, `asked_tokens` the
    `max_tokens` of this one.

    `version` and `session_token` are kept for the next slice, and so is `repeats_text` of the first one: it
    says that the server repeats the beginning of a message that it continues. `is_cut` says that the answer
    broke off, and has fewer tokens than it would have had.
    """
    if progress is not None and progress.stage is Stage.RESTART:
        return Unchanged()
    if not 200 <= status < 300:
        return _interpret_error(progress, status)
    try:
        piece = read_piece(body, is_chat=generation.is_chat, is_first=progress is None)
        if progress is not None and generation.is_chat:
            piece = _remove_repetition(piece, progress)
        kept = _Kept(max_kept_bytes, version, session_token, repeats_text)
        joined = _join_piece(generation, progress, piece, None if is_cut else asked_tokens, kept)
        return _add_uncounted_tokens(joined, progress, piece) if is_cut else joined
    except NotContinuableError as error:
        reason, why = error.reason, error.why
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason, why = WholeReason.BODY, f"the answer to a slice cannot be read: {error}"
    if progress is None and not is_cut and _has_ended(body):
        return Unchanged()
    return _restart(reason, why)


def _interpret_error(progress: Progress | None, status: int) -> SliceResult:
    """Interpret a final error. The first slice differs from the request only in its length, so its error is
    that of the request. Later ones may fail for what was added."""
    if progress is None:
        return Unchanged()
    if progress.stage is Stage.REST:
        return _restart(WholeReason.BODY, f"the server answered {status} to the rest of the generation")
    why = f"the server answered {status} to a slice"
    return Continues(replace(progress, stage=Stage.REST), reason=WholeReason.BODY, why=why)


def _restart(reason: WholeReason, why: str) -> Continues:
    return Continues(Progress(Stage.RESTART), reason=reason, why=why)


def _has_ended(body: bytes) -> bool:
    """Return True if the answer says that the generation has ended by itself."""
    try:
        choices = _decode_ends(body).choices
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return len(choices) == 1 and choices[0].finish_reason not in (None, "length")


def _join_piece(
    generation: Generation,
    progress: Progress | None,
    piece: Piece,
    asked_tokens: int | None,
    kept: _Kept,
) -> Finished | Continues:
    """Return the result of all slices. `asked_tokens` is `None` if the answer broke off."""
    before = progress or _make_first(piece, repeats_text=kept.repeats_text)
    if progress is not None and progress.token_ids and piece.text.startswith(REPLACEMENT):
        why = "the text of a slice begins with a part of a character"
        raise NotContinuableError(WholeReason.BODY, why)
    if asked_tokens is None:
        _check_cut_answer(generation, before, piece)
    text = before.text + piece.text
    kept_tokens = _count_kept_tokens(progress, piece)
    tokens = kept_tokens + piece.usage.completion_tokens
    cached_tokens = before.cached_tokens + (0 if progress is None else piece.usage.cached_tokens or 0)
    joined = replace(
        before,
        slices=before.slices + 1,
        text=text,
        token_ids=_join_token_ids(progress, piece),
        prompt_token_ids=before.prompt_token_ids or piece.prompt_token_ids,
        tokens=tokens,
        uncounted_tokens=0,
        cut_tokens=0,
        cached_tokens=cached_tokens,
        version=kept.version,
        session_token=kept.session_token or before.session_token,
    )
    if kept_tokens >= generation.max_tokens:
        # A stream broke off after its last token, and now the number of its tokens is known.
        whole = replace(joined, tokens=kept_tokens)
        return _finish(whole, piece, before.text, "length", None, is_chat=generation.is_chat)
    cut_at = _find_stop(generation.stop, text, len(before.text))
    if cut_at is not None:
        end, stop = cut_at
        return _finish(joined, piece, text[:end], "stop", stop, is_chat=generation.is_chat)
    # A slice that ends by its length with fewer tokens than asked for has filled the context of the model.
    goes_on = (
        piece.finish_reason == "length"
        and tokens < generation.max_tokens
        and (asked_tokens is None or piece.usage.completion_tokens >= asked_tokens)
    )
    if not goes_on and asked_tokens is None:
        # The number of its tokens is a guess, so that it does not say whether these are all.
        raise NotContinuableError(WholeReason.BODY, "the answer to a slice broke off near its end")
    if not goes_on:
        return _finish(joined, piece, text, piece.finish_reason, None, is_chat=generation.is_chat)
    return _continue_generation(generation, progress, joined, piece, kept, is_cut=asked_tokens is None)


def _continue_generation(
    generation: Generation,
    progress: Progress | None,
    joined: Progress,
    piece: Piece,
    kept: _Kept,
    *,
    is_cut: bool,
) -> Continues:
    """Return the progress from which the next call goes on. `progress` has the text and tokens from before
    the slice, and `joined` also those of the slice."""
    if joined.token_ids and joined.text.endswith(REPLACEMENT):
        return _continue_before(progress, piece, is_cut=is_cut)
    continuable = _prepare_continuation(generation, joined, kept.max_bytes)
    if _count_stored_bytes(continuable) > kept.max_bytes:
        return _stop_keeping(progress, piece, kept.max_bytes)
    known_text = "" if progress is None else progress.text
    if len(continuable.text) <= len(known_text) and not continuable.token_ids:
        # The next slice would be the same again.
        why = "a slice has added no text from which the next could go on"
        if progress is None or (progress.stage is Stage.REST and not is_cut):
            raise NotContinuableError(WholeReason.BODY, why)
        if is_cut:
            return Continues(progress)  # the same slice may add text when its answer does not break off
        rest = replace(
            continuable,
            stage=Stage.REST,
            tokens=_count_kept_tokens(progress, piece),
            cut_tokens=progress.cut_tokens,
        )
        return Continues(rest, piece.usage, WholeReason.BODY, why)
    if progress is not None and not piece.usage.prompt_tokens:  # what was cut before is not known either
        continuable = replace(continuable, cut_tokens=continuable.cut_tokens + progress.cut_tokens)
    return Continues(continuable, piece.usage)


def _count_stored_bytes(progress: Progress) -> int:
    """Return the number of bytes that the queue stores for this progress."""
    return len(encode_progress(progress))


def _stop_keeping(progress: Progress | None, piece: Piece, max_bytes: int) -> Continues:
    """Return the result of a slice that would make the progress too large. The slice is given up, and the
    rest after the previous slice is generated in one call."""
    why = f"the progress of the generation exceeds {max_bytes} bytes"
    if progress is None or progress.stage is Stage.REST:
        raise NotContinuableError(WholeReason.TOO_LARGE, why)
    return Continues(replace(progress, stage=Stage.REST), piece.usage, WholeReason.TOO_LARGE, why)


def _check_cut_answer(generation: Generation, before: Progress, piece: Piece) -> None:
    """Raise an exception if nothing of an answer that broke off can be kept."""
    if 0 < generation.max_tokens - before.tokens <= before.uncounted_tokens:
        # Whether there was anything left to generate is not known yet.
        raise NotContinuableError(WholeReason.BODY, "the answer to a slice broke off after the end")
    if generation.stop and piece.token_ids:
        # Servers hold back text that may begin a stop string, but not its tokens.
        raise NotContinuableError(WholeReason.BODY, "text may be missing in the answer to a slice")


def _continue_before(before: Progress | None, piece: Piece, *, is_cut: bool) -> Continues:
    """Return the result of a slice whose tokens end inside a character, which the server writes as U+FFFD.

    The next slice would begin with the rest of the character, and the text would have other tokens. So this
    slice is given up, and all that is left is generated in one call from the tokens before.
    """
    why = "the text of a slice ends with a part of a character"
    if is_cut or before is None or before.stage is Stage.REST:
        raise NotContinuableError(WholeReason.BODY, why)
    return Continues(replace(before, stage=Stage.REST), piece.usage, WholeReason.BODY, why)


def _remove_repetition(piece: Piece, progress: Progress) -> Piece:
    """Return the piece without the text that its message begins with, if the server repeats that."""
    is_repeated = piece.text.startswith(progress.text)
    if is_repeated and not progress.repeats_text:
        # Whether it does may depend on whether it streams, which the settings may have changed.
        raise NotContinuableError(WholeReason.UNEQUAL, "the server has repeated the beginning of the message")
    if not progress.repeats_text:
        return piece
    if not is_repeated:
        raise NotContinuableError(
            WholeReason.BODY, "the server has not repeated the beginning of the message"
        )
    return replace(piece, text=piece.text[len(progress.text) :])


def _add_uncounted_tokens(
    joined: Finished | Continues, before: Progress | None, piece: Piece
) -> Finished | Continues:
    """Return the result of a cut answer with the tokens that it may have had in addition."""
    if not isinstance(joined, Continues) or piece.token_ids:
        return joined
    if before is not None and len(joined.progress.text) <= len(before.text):
        return joined  # nothing is kept of the answer
    # A token has at least one byte.
    uncounted_tokens = max(0, len(piece.text.encode(errors="replace")) - piece.usage.completion_tokens)
    if before is not None and not piece.usage.prompt_tokens:  # those before are not counted yet either
        uncounted_tokens += before.uncounted_tokens
    progress = replace(joined.progress, uncounted_tokens=uncounted_tokens)
    return joined.copy_with(progress=progress)


def _make_first(piece: Piece, *, repeats_text: bool) -> Progress:
    names = _decode_names(piece.answer)
    return Progress(
        Stage.SLICES,
        prompt_tokens=piece.usage.prompt_tokens,
        response_id=_decode_or(_decode_text, names.id, ""),
        created=_decode_or(_decode_time, names.created, 0),
        object=_decode_or(_decode_text, names.object, ""),
        model=_decode_or(_decode_text, names.model, ""),
        repeats_text=repeats_text,
    )


def _decode_or(decode: Callable[[msgspec.Raw], _T], raw: msgspec.Raw, default: _T) -> _T:
    """Return the decoded value, or the default if it is of another type or out of range."""
    try:
        return decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return default


def _count_kept_tokens(progress: Progress | None, piece: Piece) -> int:
    """Return the number of tokens that the slices before have left.

    Text that could not be continued was cut off, and the server generated its tokens again. What the prompt
    of this slice has in addition to that of the first one says how many tokens were left.
    """
    if progress is None:
        return 0
    if progress.token_ids:
        return progress.tokens
    left = piece.usage.prompt_tokens - progress.prompt_tokens
    # Some servers count only tokens that are not in the prefix cache, so only a similar number is believed.
    least = max(1, progress.tokens - progress.cut_tokens)
    most = progress.tokens + progress.uncounted_tokens
    return min(left, most) if least / 2 <= left <= 2 * most + 16 else progress.tokens


def _join_token_ids(progress: Progress | None, piece: Piece) -> bytes:
    """Return the tokens of all slices. Empty if they are not known completely."""
    if count_token_ids(piece.token_ids) != piece.usage.completion_tokens:
        return b""
    if progress is None:
        return piece.token_ids if piece.prompt_token_ids else b""
    return join_token_ids(progress.token_ids, piece.token_ids) if progress.token_ids else b""


def _find_stop(stop: tuple[str, ...], text: str, known_length: int) -> tuple[int, str] | None:
    """Return where the text ends before a stop string across the end of the known text, and this string.

    The servers find those within the text of one slice.
    """
    best: tuple[int, int, str] | None = None
    for string in stop:
        begin = text.find(string, max(0, known_length - len(string) + 1), known_length + len(string) - 1)
        if begin >= 0 and (best is None or begin + len(string) < best[0]):
            best = begin + len(string), begin, string
    return None if best is None else best[1:]


def _prepare_continuation(generation: Generation, joined: Progress, max_kept_bytes: int) -> Progress:
    """Return the progress from which the next slice can go on."""
    text = joined.text
    if joined.token_ids and not generation.is_chat and _count_stored_bytes(joined) <= max_kept_bytes:
        return joined
    if not isinstance(generation.prompt, str):
        why = "the prompt consists of token ids, and the tokens generated so far are not known or too many"
        raise NotContinuableError(WholeReason.PROMPT, why)
    # The next slice generates the cut end again. A part of a character cannot be sent, and chat templates
    # strip the white space at the end of a message.
    text = text.rstrip(REPLACEMENT)
    if generation.is_chat:
        text = text.rstrip()
        if text[:1].isspace():
            why = "the text begins with white space, which chat templates strip"
            raise NotContinuableError(WholeReason.BODY, why)
    cut_tokens = len(joined.text[len(text) :].encode(errors="replace")) + _WITHHELD_TOKENS
    return replace(joined, text=text, token_ids=b"", prompt_token_ids=b"", cut_tokens=cut_tokens)


def _finish(
    joined: Progress, piece: Piece, text: str, finish_reason: str, stop: str | None, *, is_chat: bool
) -> Finished:
    """Return the answer of the whole: the last one, with the text, tokens and names of all."""
    answer: dict[str, Any] = _decode_fields(piece.answer)
    choice: dict[str, Any] = _decode_choices(answer["choices"])[0]
    if is_chat:
        choice["message"] = {**_decode_fields(choice["message"]), "content": text}
    else:
        choice["text"] = text
    choice["finish_reason"] = finish_reason
    if "stop_reason" in choice and (stop is not None or finish_reason != piece.finish_reason):
        choice["stop_reason"] = stop  # vLLM names the string there
    for name in ("token_ids", "prompt_token_ids"):  # asked for by the dispatcher only
        choice.pop(name, None)
        answer.pop(name, None)
    usage: dict[str, Any] = _decode_fields(answer["usage"])
    if joined.slices > 1:
        usage.pop("prompt_tokens_details", None)  # those of the last slice
        if joined.response_id:
            answer["id"] = joined.response_id
        if joined.created:
            answer["created"] = joined.created
    usage["prompt_tokens"], usage["completion_tokens"] = joined.prompt_tokens, joined.tokens
    usage["total_tokens"] = joined.prompt_tokens + joined.tokens
    answer["choices"], answer["usage"] = [choice], usage
    return Finished(_encode(answer), joined.slices, joined.cached_tokens, piece.usage)
