"""Text generator in which each token depends on the model and on all tokens before it.

A stand-in for a language model at temperature 0: the same prompt always yields the same text, and a prompt
that differs in one token yields another text. So a generation that is continued wrongly shows. Nearly all
tokens are single bytes, therefore most characters of the generated text are split over several tokens.
"""

from __future__ import annotations

import codecs
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Literal

# Vocabulary. The tokens 0 to 255 are the bytes.

END = 256
"""End of the sequence, and of each message of a chat. It has no text."""
ROLES = {"system": 257, "developer": 258, "user": 259, "assistant": 260, "tool": 261}
"""Tokens that begin a message of a chat. They have no text."""
THINK_START, THINK_END = 262, 263
"""Begin and end of the reasoning. Unlike those above, they are found in text and written as text."""
THINK_END_TEXT = "</think>"
MERGED = (
    *(b"th", b"he", b"the", b" t", b" the", b"in", b"ing", b"an", b" a", b"er", b"  ", b"\n\n", b"\xc3\xa9"),
    *("漢".encode(), "字".encode(), "漢字".encode()),
    # Parts of characters, also behind another character, as tokenizers on bytes really have them.
    *(b"\xf0\x9f", b"\x98\x80", b"\x82\xac", b" \xf0\x9f", b"e\xcc", b"\xe6\xbc", b"\xb8\x8f "),
)
"""Bytes of the tokens that stand for several bytes."""
FIRST_MERGED = 264
VOCABULARY_SIZE = FIRST_MERGED + len(MERGED)

_TEXT_TOKENS = {"<think>": THINK_START, THINK_END_TEXT: THINK_END}
_TOKEN_BYTES = [
    *(bytes([byte]) for byte in range(256)),
    *(b"" for _ in range(256, THINK_START)),
    *(text.encode() for text in _TEXT_TOKENS),
    *MERGED,
]
MAX_TOKEN_BYTES = max(map(len, _TOKEN_BYTES))
_HASHED_TOKENS = [struct.pack("<I", token) for token in range(VOCABULARY_SIZE)]
_SPLIT_TEXT_TOKENS = re.compile("(" + "|".join(map(re.escape, _TEXT_TOKENS)) + ")")
_FIND_LONGEST = re.compile(
    b"|".join([*map(re.escape, sorted(MERGED, key=len, reverse=True)), b"."]), re.DOTALL
)
_IDS_BY_BYTES = {token: number for number, token in enumerate(_TOKEN_BYTES) if token}

# Characters that are generated. Quotes, backslashes and line separators have to survive JSON and events.
_EMOJI = "😀👩👨💻🚀"
_JOINER = "\u200d"
_CHARACTERS = (
    "eeeettttaaaoooiiinnnssshhhrrrddlluuccmmwwffggyyppbbvk0123456789TASW.,.,:;!?\"'\\{}[]/&%"
    "                    \n\n\n\téßéß€€漢字漢字語\u0301\u0308\u00a0\u0085\u2028\ufeff\ufe0f" + _EMOJI
)
_ENCODED = {character: character.encode() for character in dict.fromkeys(_CHARACTERS + _JOINER)}
_THINK_END_PROBABILITY = 1 / 32
_FALLBACK_BYTES = {b"\xe0": b"\xa0", b"\xf0": b"\x90"}
"""Second bytes after first bytes that no generated character has, where not every continuation is valid."""


def encode_text(text: str, *, merged_tokens: bool = False) -> list[int]:
    """Return the tokens of a text: its bytes, or with `merged_tokens` the longest token at each place."""
    tokens: list[int] = []
    for part in _SPLIT_TEXT_TOKENS.split(text):
        if part in _TEXT_TOKENS:
            tokens.append(_TEXT_TOKENS[part])
        elif merged_tokens:
            tokens += (_IDS_BY_BYTES[found[0]] for found in _FIND_LONGEST.finditer(part.encode()))
        else:
            tokens += part.encode()
    return tokens


class Detokenizer:
    """Incremental conversion of tokens to text. The bytes of an incomplete character are kept until it is
    complete.

    `before` are the tokens before the first one. If they end inside a character, its first bytes are kept.
    """

    def __init__(self, before: Sequence[int] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.last_character = ""
        """Last complete character since the last special token."""
        # A character has at most four bytes, and a decoder that starts inside one finds the next.
        for token in before[-8:]:
            self.add_token(token)

    @property
    def incomplete(self) -> bytes:
        """First bytes of a character whose other bytes are missing."""
        return self._decoder.getstate()[0]

    def add_token(self, token: int) -> str:
        """Return the characters that this token completes."""
        if END <= token <= THINK_END:
            # A special token ends what came before, complete or not.
            text = self.flush() + _TOKEN_BYTES[token].decode()
            self.last_character = ""
        else:
            text = self._decoder.decode(_TOKEN_BYTES[token])
            if text:
                self.last_character = text[-1]
        return text

    def flush(self) -> str:
        """Return U+FFFD in place of an incomplete character, or an empty text if there is none."""
        return self._decoder.decode(b"", final=True)


def decode_tokens(tokens: Sequence[int]) -> str:
    """Return the text of complete tokens."""
    detokenizer = Detokenizer()
    return "".join(map(detokenizer.add_token, tokens)) + detokenizer.flush()


def is_thinking(tokens: Sequence[int]) -> bool:
    """Return whether the tokens end inside of the reasoning."""
    for token in reversed(tokens):
        if token in (THINK_START, THINK_END):
            return token == THINK_START
    return False


class _TokenChooser:
    """Choice of the next token by a hash of the model, the sampling parameters and all tokens so far."""

    def __init__(
        self, model: str, sampling: bytes, prompt: Sequence[int], merged_tokens: bool, end_probability: float
    ) -> None:
        encoded = model.encode()
        # With its length in front, a model cannot look like another one with other parameters.
        head = b"".join(struct.pack("<I", len(part)) + part for part in (encoded, sampling))
        self._digest = blake2b(head, digest_size=16)
        self._digest.update(b"".join([_HASHED_TOKENS[token] for token in prompt]))
        self._detokenizer = Detokenizer(prompt)
        self._is_thinking = is_thinking(prompt)
        self._merged_tokens = merged_tokens
        self._end_probability = end_probability

    def choose_token(self) -> int:
        """Return the next token, and count it as one of the tokens so far."""
        end_draw, draw, form_draw = struct.unpack("<IQI", self._digest.digest())
        token = self._choose_token(end_draw / 2**32, draw, form_draw)
        self._digest.update(_HASHED_TOKENS[token])
        self._detokenizer.add_token(token)
        if token == THINK_END:
            self._is_thinking = False
        return token

    def _choose_token(self, end_draw: float, draw: int, form_draw: int) -> int:
        incomplete, last = self._detokenizer.incomplete, self._detokenizer.last_character
        if incomplete:
            found = _find_characters(incomplete)
            if not found:
                return _FALLBACK_BYTES.get(incomplete, b"\x80")[0]
            rest = found[draw % len(found)][len(incomplete) :]
        elif last == _JOINER:
            rest = _ENCODED[_EMOJI[draw % len(_EMOJI)]]
        elif self._is_thinking and end_draw < _THINK_END_PROBABILITY:
            return THINK_END
        elif not self._is_thinking and end_draw < self._end_probability:
            return END
        elif last and last in _EMOJI and draw % 3 == 0:
            rest = _ENCODED[_JOINER]
        else:
            rest = _ENCODED[_CHARACTERS[draw % len(_CHARACTERS)]]
        if self._merged_tokens and form_draw % 2 and (merged := _find_merged(rest)):
            return merged[form_draw // 2 % len(merged)]
        return rest[0]


@lru_cache(maxsize=256)
def _find_characters(start: bytes) -> list[bytes]:
    """Return the characters that begin with these bytes."""
    return [encoded for encoded in _ENCODED.values() if encoded.startswith(start)]


@lru_cache(maxsize=1024)
def _find_merged(rest: bytes) -> list[int]:
    """Return the tokens of several bytes that begin with `rest`, or that `rest` begins with."""
    return [
        number
        for number, token in enumerate(MERGED, FIRST_MERGED)
        if token.startswith(rest) or rest.startswith(token)
    ]


@dataclass(frozen=True, slots=True)
class Generation:
    """Generated tokens and their text."""

    token_ids: list[int]
    """All generated tokens, including the end of the sequence and those of a stop string."""
    text: str
    """Text without special tokens, cut before a stop string."""
    lengths: list[int]
    """Number of characters of the text that are complete after each token. It may exceed the length of a text
    that was cut."""
    finish_reason: Literal["length", "stop"]
    stop_reason: str | None
    """Stop string that was found."""


def generate_text(
    model: str,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    stop: Sequence[str] = (),
    sampling: bytes = b"",
    end_probability: float = 0.01,
    merged_tokens: bool = False,
    replaces_incomplete: bool = False,
) -> Generation:
    """Generate tokens until the end of the sequence, a stop string in their text, or `max_tokens`.

    `sampling` are parameters that change the choice of tokens. If the prompt ends inside a character, the
    text begins with the complete character; if the text ends inside a character, its bytes are withheld.
    With `replaces_incomplete` the text has U+FFFD in both cases.
    """
    chooser = _TokenChooser(model, sampling, prompt, merged_tokens, end_probability)
    detokenizer = Detokenizer(() if replaces_incomplete else prompt)
    tokens: list[int] = []
    lengths: list[int] = []
    text = ""
    while len(tokens) < max_tokens:
        token = chooser.choose_token()
        tokens.append(token)
        if token == END:
            lengths.append(len(text))
            return Generation(tokens, text, lengths, "stop", None)
        added = detokenizer.add_token(token)
        text += added
        lengths.append(len(text))
        for each in stop if added else ():
            at = text.find(each, max(0, len(text) - len(added) - len(each) + 1))
            if at >= 0:
                return Generation(tokens, text[:at], lengths, "stop", each)
    if replaces_incomplete:
        text += detokenizer.flush()
    return Generation(tokens, text, lengths, "length", None)
